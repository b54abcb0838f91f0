"""The same as ``drawn_under_ddp.py``, of sharded models, fused modules, recipes, graphs and pipelines."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "57j-an-iteration-is-ended-after-a-failed-backward",
        sentence="Gradients of a backward that failed between two units are taken for complete.",
        tests=[
            "tests/fsdp/iteration/test_unusual_iterations.py::test_an_iteration_is_not_ended_after_a_backward_that_failed"
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds._check_complete",
                "if self._is_busy:",
                "if any(grad_round.state is State.WRITING for grad_round in self._all):",
            ),
        ],
    ),
    Fault(
        "47j-one-ranks-groups-stop-the-others",
        sentence="One rank's optimizer state has other groups, and the other ranks wait for it.",
        tests=[
            "tests/fsdp/state/test_optimizer_state_dict.py::test_groups_of_other_sizes_on_one_rank_are_refused_on_all"
        ],
        changes=[
            Change(
                "maingrad.fsdp.state.optimizer_state",
                "_before_loading",
                "if here != there:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "45e-a-refused-write-stays",
        sentence="A write that was refused stays in whole parameters that are kept.",
        tests=["tests/fsdp/unit/test_whole_writes.py::test_a_refused_forward_leaves_a_model_that_trains_on"],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "Root.forward_failed",
                "bucket.record_change()",
                "pass",
            ),
        ],
    ),
    Fault(
        "59c-autocast-keeps-whole-weights",
        sentence="Autocast's casts of whole weights stay in memory until its block ends.",
        tests=["tests/fsdp/unit/test_memory.py::test_casts_of_autocast_do_not_outlive_their_unit"],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "Root._show_shards",
                "torch.clear_autocast_cache()",
                "pass",
            ),
        ],
    ),
    Fault(
        "34za-the-file-of-another-rank-is-loaded",
        sentence="A rank loads the elements of another rank.",
        tests=["tests/fsdp/state/test_state_dict.py::test_the_file_of_another_rank_is_refused_on_all_ranks"],
        changes=[
            Change(
                "maingrad.fsdp.state.state_dict",
                "_objection",
                "if saved == here:",
                "if True:",
            ),
        ],
    ),
    Fault(
        "27h-moments-of-a-frozen-parameter-are-not-saved",
        sentence="A parameter that is frozen when the checkpoint is saved loses its moments.",
        tests=["tests/fsdp/state/test_checkpoint.py::test_moments_of_a_parameter_that_is_frozen_now_are_kept"],
        changes=[
            Change(
                "maingrad.fsdp.state.checkpoint_source",
                "ShardedSource.hold",
                "if param.requires_grad or state.get(param)",
                "if param.requires_grad",
            ),
        ],
    ),
    Fault(
        "12o-no-sync-outlives-an-error",
        sentence="After an error within no_sync() no backward ends an iteration.",
        tests=["tests/fsdp/iteration/test_unusual_iterations.py::test_no_sync_inside_no_sync"],
        changes=[
            Change(
                "maingrad.fsdp.iteration.parts",
                "RootParts._syncing",
                """
                try:
                    yield
                finally:
                    root.sync = before
                """,
                """
                yield
                root.sync = before
                """,
            ),
        ],
    ),
    Fault(
        "53p-a-skipped-step-overwrites-what-was-loaded",
        sentence="Scales and amaxes that were loaded before a skipped step are lost.",
        tests=[
            "tests/te_integration/recipes/test_given_up_iterations.py::test_a_state_that_is_loaded_before_a_skipped_step_stays"
        ],
        changes=[
            Change(
                "maingrad.te_integration.scaling.amax_history",
                "Roll.undo",
                """
                if self._versions != self._versions_now():
                    return
                """,
                "",
            ),
        ],
    ),
    Fault(
        "53q-an-iteration-of-two-ends-is-taken-back-once",
        sentence="A skipped step takes back the amaxes of the last backward alone.",
        tests=[
            "tests/te_integration/recipes/test_given_up_iterations.py::test_an_iteration_of_two_ends_that_is_skipped"
        ],
        changes=[
            Change(
                "maingrad.te_integration.scaling.delayed_scaling",
                "_Watcher.ended",
                "roll.go_back_to(earlier)",
                "pass",
            ),
        ],
    ),
    Fault(
        "37zd-a-shorter-history-keeps-the-oldest",
        sentence="A history that becomes shorter forgets the last iterations.",
        tests=["tests/te_integration/recipes/test_delayed_scaling.py::test_another_history_length_keeps_the_newest"],
        changes=[
            Change(
                "maingrad.te_integration.scaling.scaled_module",
                "ScaledModule.make_room",
                "history[max(1, history.shape[0] - length + 1) :]",
                "history[1:length]",
            ),
        ],
    ),
    Fault(
        "53r-a-module-is-alone-for-ever",
        sentence="A module that has run without a wrapper has its own scales on each rank of a wrapper.",
        tests=[
            "tests/te_integration/recipes/test_delayed_scaling.py::test_a_module_that_has_run_without_a_wrapper_is_one_of_its_wrapper"
        ],
        changes=[
            Change(
                "maingrad.te_integration.scaling.amax_history",
                "ScalingUse.is_in_wrapper",
                "if self._wrapped[0] != num_changes():",
                "if self._wrapped[0] == -1:",
            ),
        ],
    ),
    Fault(
        "37ze-an-algorithm-writes-to-the-history",
        sentence="What a user's algorithm does to its argument changes the history.",
        tests=[
            "tests/te_integration/recipes/test_delayed_scaling.py::test_an_algorithm_that_writes_to_its_history_changes_its_copy"
        ],
        changes=[
            Change(
                "maingrad.te_integration.recipes",
                "DelayedScaling.new_scales",
                "history.clone()",
                "history",
            ),
        ],
    ),
    Fault(
        "16za-a-run-begins-in-the-middle",
        sentence="A run after one that failed begins with a later microbatch's graphs.",
        tests=[
            "tests/te_integration/graphs/test_callables.py::test_a_run_after_one_that_failed_begins_with_the_first_microbatch"
        ],
        changes=[
            Change(
                "maingrad.te_integration.graphs.chunks",
                "GraphedChunk.begin_run",
                "self._microbatch = 0",
                "pass",
            ),
        ],
    ),
    Fault(
        "35r-an-abandoned-step-keeps-grad",
        sentence="Gradients of a step that was abandoned stay in .grad of a stage without a wrapper.",
        tests=[
            "tests/te_integration/pipeline/test_failures.py::test_an_abandoned_step_leaves_nothing[Interleaved1F1B-unwrapped-0-('backward', 2)]"
        ],
        quick=[
            "tests/te_integration/pipeline/test_failures.py::test_an_abandoned_step_leaves_nothing[Interleaved1F1B-unwrapped-0-('backward', 2)]"
        ],
        changes=[
            Change(
                "maingrad.te_integration.pipeline.stage",
                "PipelineStage.abandon_step",
                "param.grad = None",
                "pass",
            ),
        ],
    ),
    Fault(
        "03f-a-block-that-shares-a-weight-is-a-unit",
        sentence="A block that shares a weight with modules outside becomes a unit of its own.",
        tests=[
            "tests/launch/parallelizing/test_parallelize.py::test_blocks_that_share_a_parameter_with_others_are_no_units"
        ],
        changes=[
            Change(
                "maingrad.launch.parallelizing.blocks",
                "self_contained",
                "if all(everywhere",
                "if any(everywhere",
            ),
        ],
    ),
]
