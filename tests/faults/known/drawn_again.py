"""More like ``drawn_under_ddp.py``: a second draw over all folders."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "18d-sums-of-microbatches-in-the-weights-dtype",
        sentence="Unfused delayed gradients of a weight are summed over microbatches in its own dtype.",
        tests=[
            "tests/te_integration/delayed/test_delayed_ties.py::test_the_sum_of_each_microbatch_is_handed_over_with_it"
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.delayed",
                "DelayedWgrad.is_last_of",
                " and other.microbatch == self.pending.microbatch",
                "",
            ),
        ],
    ),
    Fault(
        "47k-reductions-are-counted-on",
        sentence="After ranks that differed in backwards were refused, every later iteration is.",
        tests=["tests/ddp/collectives/test_step_check.py::test_a_program_that_catches_the_number_of_backwards_goes_on"],
        changes=[
            Change(
                "maingrad.ddp.collectives.step_check",
                "StepCheck.next_iteration",
                """
                self._reductions = 1
                """,
                "",
            ),
        ],
    ),
    Fault(
        "57k-a-recording-outlives-an-error",
        sentence="A recorded block that raised records on.",
        tests=["tests/ddp/collectives/test_timeline.py::test_a_block_that_raises_ends_the_recording"],
        changes=[
            Change(
                "maingrad.ddp.collectives.timeline",
                "recorded_on",
                """
                try:
                    yield timeline
                finally:
                    observed.observer = UNOBSERVED
                    timeline.close()
                """,
                """
                yield timeline
                observed.observer = UNOBSERVED
                timeline.close()
                """,
            ),
        ],
    ),
    Fault(
        "34zb-groups-that-ranks-choose-differently",
        sentence="Ranks have put a parameter into other groups, and the checkpoint has one rank's.",
        tests=[
            "tests/ddp/checkpoint/test_save_and_load.py::test_groups_that_ranks_choose_differently_are_refused_on_all"
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.manifest",
                "saved_tensors",
                "if fields[name].setdefault(key, value) != value:",
                'if fields[name].setdefault(key, value) != value and key != "group":',
            ),
        ],
    ),
    Fault(
        "34zc-an-expanded-buffer-breaks-a-load-off",
        sentence="A load has written weights when it comes to a tensor that takes no values.",
        tests=[
            "tests/ddp/checkpoint/test_save_and_load.py::test_a_buffer_that_is_expanded_cannot_be_loaded_and_nothing_is"
        ],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.checkpoint",
                "_parts_to_fill",
                "if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):",
                "if False:",
            ),
        ],
    ),
    Fault(
        "34zd-the-older-of-two-is-read",
        sentence="Where a save died between its renames, the previous checkpoint is read.",
        tests=["tests/ddp/checkpoint/test_killed_saves.py::test_of_two_complete_ones_the_newer_is_loaded"],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.folder",
                "find",
                "for folder in _beside(path) if",
                "for folder in reversed(_beside(path)) if",
            ),
        ],
    ),
    Fault(
        "33n-a-hook-that-removes-itself-raises",
        sentence="A hook of a sharded parameter cannot remove itself.",
        tests=["tests/fsdp/tensors/test_grad_hooks.py::test_a_hook_may_remove_itself_and_add_another"],
        changes=[
            Change(
                "maingrad.fsdp.tensors.parameter",
                "call_grad_hooks",
                "list(hooks.values()) if hooks else ()",
                "hooks.values() if hooks else ()",
            ),
        ],
    ),
    Fault(
        "45f-a-failed-forwards-write-is-refused-later",
        sentence="What a forward that failed has written is held against the next one.",
        tests=[
            "tests/fsdp/unit/test_whole_writes.py::test_a_forward_that_writes_and_fails_is_not_held_against_the_next"
        ],
        changes=[
            Change(
                "maingrad.fsdp.unit.registration",
                "WholeWrites.forward_failed",
                "self.note()",
                "pass",
            ),
        ],
    ),
    Fault(
        "57l-whole-parameters-after-a-failed-backward",
        sentence="After a backward that failed inside a unit, its modules register whole parameters without memory.",
        tests=[
            "tests/fsdp/iteration/test_unusual_iterations.py::test_after_a_backward_that_failed_inside_a_unit_the_model_has_its_shards"
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "Root.backward_failed",
                "unit.registered.show_shards()",
                "pass",
            ),
        ],
    ),
    Fault(
        "23s-what-is-unsharded-stays-old",
        sentence="Whole parameters within unsharded() are those of before a step in it.",
        tests=[
            "tests/fsdp/unit/test_freed_memory.py::test_what_is_unsharded_follows_its_shards_from_forward_to_forward"
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "UnitGathers.notice_changes",
                "if unit.num_unshards:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "53s-loaded-amaxes-stay-where-they-are",
        sentence="Amaxes of a loaded state never become scales.",
        tests=[
            "tests/te_integration/recipes/test_delayed_scaling.py::test_amaxes_that_are_loaded_move_on_with_the_next_forward"
        ],
        changes=[
            Change(
                "maingrad.te_integration.scaling.scaled_module",
                "ScaledModule._expect_stored",
                "self._scaling_use.record_loaded()",
                "pass",
            ),
        ],
    ),
    Fault(
        "53t-amaxes-of-before-a-load-count",
        sentence="Amaxes of microbatches before a load are added to what was loaded.",
        tests=[
            "tests/te_integration/recipes/test_delayed_scaling.py::test_amaxes_of_microbatches_before_a_load_are_gone"
        ],
        changes=[
            Change(
                "maingrad.te_integration.scaling.amax_history",
                "ScalingUse.record_loaded",
                """
                self.rows = [row for row in self.rows if row.waits]
                """,
                "",
            ),
        ],
    ),
    Fault(
        "37zf-unconverted-layers-keep-scales",
        sentence="A layer that is plain again has buffers of a recipe in its state dict.",
        tests=["tests/te_integration/test_unconvert.py::test_scales_of_a_recipe_go_with_the_conversion"],
        changes=[
            Change(
                "maingrad.te_integration.conversion.convert",
                "_drop_handle",
                """
                module.drop_scaling()
                """,
                "",
            ),
        ],
    ),
    Fault(
        "09g-memory-with-a-gradient-is-written",
        sentence="Memory for the outputs of experts that requires a gradient is written.",
        tests=[
            "tests/te_integration/experts/test_grouped_linear.py::test_memory_that_does_not_fit_is_refused[out-<lambda>-out is memory .* must not require a gradient]"
        ],
        quick=[
            "tests/te_integration/experts/test_grouped_linear.py::test_memory_that_does_not_fit_is_refused[out-<lambda>-out is memory .* must not require a gradient]"
        ],
        changes=[
            Change(
                "maingrad.te_integration.experts.fused_grouped_linear",
                "_check_buffer",
                "if buffer.requires_grad:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "16zb-graphs-of-another-autocast",
        sentence="A layer's graphs are replayed under another autocast than they were captured in.",
        tests=["tests/te_integration/graphs/test_refused.py::test_another_autocast_than_that_of_the_capture"],
        changes=[
            Change(
                "maingrad.te_integration.graphs.weights",
                "CapturedWeights._state",
                "torch.is_autocast_enabled(self._kind)",
                "False",
            ),
        ],
    ),
    Fault(
        "18e-bias-sums-in-half-precision",
        sentence="Gradients of experts' biases are scaled and summed in half precision.",
        tests=["tests/kernels/grouped/test_reductions.py::test_bias_sums_of_half_precision_are_fp32"],
        changes=[
            Change(
                "maingrad.kernels.grouped.reference",
                "grouped_bias_grad_reference",
                "torch.promote_types(dy.dtype, torch.float32)",
                "dy.dtype",
            ),
        ],
    ),
    Fault(
        "39g-training-goes-on-in-evaluation",
        sentence="After a validation steps run without dropout.",
        tests=["tests/launch/training/test_train.py::test_validations_change_no_step"],
        changes=[
            Change(
                "maingrad.launch.training.train",
                "Trainer._validate",
                "self.model.train()",
                "pass",
            ),
        ],
    ),
    Fault(
        "40e-ignored-parameters-become-fp32",
        sentence="Parameters that are to be left alone become fp32.",
        tests=["tests/launch/parallelizing/test_parallelize.py::test_ignored_parameters_keep_their_dtype"],
        changes=[
            Change(
                "maingrad.launch.parallelizing.dtypes",
                "store_in_fp32",
                " and id(param) not in ignored",
                "",
            ),
        ],
    ),
    Fault(
        "39h-checkpoints-of-before-borders-are-refused",
        sentence="A checkpoint that did not note borders of documents is taken for one of other data.",
        tests=["tests/launch/data/test_batches.py::test_borders_belong_to_a_digest"],
        changes=[
            Change(
                "maingrad.launch.data.tokens",
                "Digest.says_otherwise",
                "if self.borders and self.borders",
                "if self.borders",
            ),
        ],
    ),
]
