"""Faults that quick tests did not notice until somebody made them by hand: discarded sums, kept graphs, markers."""

from fault import Change, Fault

ITERATION = "tests/fsdp/iteration"
GRAPHS = "tests/te_integration/graphs/test_callables.py"
RECOMPUTED = "tests/te_integration/delayed/test_queue_edges.py::test_uses_in_two_recomputed_blocks_are_one_microbatch"
SCALING = "tests/te_integration/recipes"
MANIFEST = "tests/ddp/checkpoint/test_damaged_files.py::test_a_manifest_of_other_types_is_refused_by_name"

FAULTS = [
    Fault(
        "57a-padding-keeps-nan",
        sentence="Clipping by a norm that is NaN multiplies padding too, and every later norm is NaN.",
        tests=["tests/ddp/optimizer/test_grad_norm.py::test_an_iteration_with_nan_leaves_nothing_behind"],
        changes=[
            Change("maingrad.ddp.buckets.bucket", "Bucket.zeroed_views", "views + self._padding_views()", "views"),
        ],
    ),
    Fault(
        "57b-a-failed-microbatch-leaves-a-partial-sum",
        sentence="An instance's sum of an iteration that was given up is added to that of the next iteration.",
        tests=[
            f"{ITERATION}/test_iterations.py::"
            "test_gradients_that_are_zeroed_in_place_know_nothing_of_an_iteration_that_broke_off[hsdp]"
        ],
        changes=[
            Change(
                "maingrad.fsdp.unit.grad_shard",
                "GradShard.give_up",
                "self._has_partial, self._expected = False, None",
                "self._expected = None",
            ),
        ],
    ),
    Fault(
        "57c-a-cleared-partial-sum-is-kept",
        sentence="An instance's sum that was cleared while gradients were delayed is added to what comes later.",
        tests=[f"{ITERATION}/test_delayed_units.py::test_gradients_are_cleared_while_delayed_ones_wait[hsdp]"],
        changes=[
            Change("maingrad.fsdp.unit.grad_shard", "GradShard.claim", "self._has_partial = False", "pass"),
        ],
    ),
    Fault(
        "57d-a-discarded-part-is-sent",
        sentence="What was cleared before the end of the iteration is summed over the instances.",
        tests=[
            f"{ITERATION}/test_unusual_iterations.py::test_an_iteration_that_ends_after_its_sums_were_cleared_has_none"
        ],
        changes=[
            Change(
                "maingrad.fsdp.unit.grad_shard", "GradShard._over_instances", "elif not adds_to_partial:", "elif False:"
            ),
        ],
    ),
    Fault(
        "57e-a-failed-backward-makes-parameters-ready",
        sentence="Parameters that a failed backward has reached are ready after the next iteration's first microbatch.",
        tests=[
            "tests/ddp/buckets/test_end_of_backward.py::"
            "test_what_a_failed_backward_has_reached_is_not_ready_in_the_next_iteration"
        ],
        changes=[
            Change("maingrad.ddp.buckets.reducer", "Readiness.reset", "self._passed.clear()\n", ""),
        ],
    ),
    Fault(
        "57f-what-was-due-stays-due",
        sentence="After an iteration whose end was refused, every backward is taken for one with delayed gradients.",
        tests=[f"{ITERATION}/test_unusual_iterations.py::test_an_iteration_after_one_whose_end_was_refused"],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds.give_up",
                "self._due = self._delayed_in = None",
                "self._delayed_in = None",
            ),
        ],
    ),
    Fault(
        "57g-a-refused-end-is-taken-for-a-delay",
        sentence="The forward after an iteration whose end was refused looks for delayed gradients, and raises.",
        tests=[f"{ITERATION}/test_unusual_iterations.py::test_an_iteration_after_one_whose_end_was_refused"],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds.check_delays_are_over",
                "self._is_busy or (self._due is None and self._delayed_in is None)",
                "self._due is None and self._delayed_in is None",
            ),
        ],
    ),
    Fault(
        "24f-a-clearing-takes-what-comes-after-it",
        sentence="Delayed gradients that are computed after .grad was cleared are discarded.",
        tests=[f"{ITERATION}/test_delayed_units.py::test_gradients_are_cleared_while_delayed_ones_wait"],
        changes=[
            Change("maingrad.fsdp.iteration.rounds", "GradRounds._send_due", "if not grad_round.delays:", "if True:"),
        ],
    ),
    Fault(
        "58a-masters-are-overwritten-by-equal-weights",
        sentence="A load of the model's own half-precision weights rounds the fp32 masters.",
        tests=[
            "tests/ddp/optimizer/test_distributed_optimizer.py::"
            "test_a_model_that_is_loaded_behind_its_optimizer_loses_no_bits"
        ],
        changes=[
            Change(
                "maingrad.ddp.optimizer.steps",
                "TorchSteps.take_written",
                "torch.where(same, held.master, held.param)",
                "torch.where(same, held.param, held.param)",
            ),
        ],
    ),
    Fault(
        "59a-a-delayed-gradient-keeps-the-graph",
        sentence="A queue keeps the graph of a product's input, and with it the weights of the layers before.",
        tests=[
            "tests/te_integration/delayed/test_queue_edges.py::test_a_queue_keeps_nothing_of_the_layers_before",
            "tests/te_integration/experts/test_grouped_linear_contract.py::"
            "test_a_group_that_waits_keeps_nothing_of_the_layers_before",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.delayed",
                "DelayedTarget.deliver",
                "each.detach() if isinstance(each, Tensor) else each for each in operands",
                "operands",
            ),
        ],
    ),
    Fault(
        "21e-each-recomputed-block-is-a-microbatch",
        sentence="A layer, or experts, that two reentrant checkpoints run need two calls of backward_dw().",
        tests=[
            "tests/te_integration/experts/test_grouped_linear_contract.py::"
            "test_uses_in_two_recomputed_blocks_are_one_microbatch",
            f"{RECOMPUTED}[False]",
            f"{RECOMPUTED}[True]",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.linear",
                "weight_grads",
                "ctx.outer_backward if ctx.outer_backward != NO_BACKWARD else current_backward()",
                "current_backward()",
            ),
        ],
    ),
    Fault(
        "09f-a-kernel-overwrites-out-unseen",
        sentence="Memory for the outputs of experts is filled again before its backward, which goes on.",
        tests=[
            "tests/te_integration/experts/test_grouped_linear.py::"
            "test_memory_that_was_filled_again_too_early_is_noticed[cpu]"
        ],
        changes=[
            Change(
                "maingrad.te_integration.experts.fused_grouped_linear",
                "_written",
                "torch.autograd.graph.increment_version(buffer)",
                "pass",
            ),
        ],
    ),
    Fault(
        "16i-input-gradients-are-given-away",
        sentence="autograd.grad() hands out the graph's memory, which the next replay overwrites.",
        tests=[f"{GRAPHS}::test_input_gradients_that_a_program_asks_for_are_its_own"],
        changes=[
            Change(
                "maingrad.te_integration.graphs.layer_graphs",
                "LayerGraphs.replay_dgrad",
                "grad if grad is None or passes else grad.clone()",
                "grad if passes else grad",
            ),
        ],
    ),
    Fault(
        "16i-a-buffer-of-a-gradient-is-a-gradient",
        sentence="A layer hands its output's gradient on in a buffer that is filled before both readers have read it.",
        tests=[f"{GRAPHS}::test_a_gradient_that_two_layers_get_stays_until_the_second_reads_it"],
        changes=[
            Change(
                "maingrad.te_integration.graphs.layer_graphs",
                "LayerGraphs._static",
                "result.untyped_storage().data_ptr() in own",
                "not own",
            ),
        ],
    ),
    Fault(
        "16l-a-replay-leaves-the-wrapper-in-evaluation",
        sentence="A step that switches to training leaves the wrapper in evaluation when it is replayed.",
        tests=["tests/ddp/graphs/test_host_effects.py::test_the_mode_that_the_step_leaves"],
        changes=[
            Change(
                "maingrad.ddp.graphs.training_step",
                "GraphedTrainingStep.__init__",
                """
                model,
                [entry.owned.param for entry in model.bucket_params],
                """,
                """
                model.module,
                [entry.owned.param for entry in model.bucket_params],
                """,
            ),
        ],
    ),
    Fault(
        "34y-foreign-byte-order-is-read",
        sentence="A checkpoint from a machine of the other byte order is loaded as if it were this one's.",
        tests=[f"{MANIFEST}[byteorder: the other]"],
        quick=[f"{MANIFEST}[byteorder: the other]"],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.files.manifest",
                "Manifest.read",
                'content["byteorder"] != sys.byteorder',
                "False",
            ),
        ],
    ),
    Fault(
        "39e-sets-of-a-blend-come-in-blocks",
        sentence="A blend runs through one set after the other.",
        tests=["tests/launch/data/test_sources.py::test_blends_keep_their_shares_everywhere"],
        changes=[
            Change(
                "maingrad.launch.data.order",
                "Blend.of",
                "np.lexsort((sets, (earlier + 0.5) / counts[sets]))",
                "np.arange(len(sets))",
            ),
        ],
    ),
    Fault(
        "39f-a-blend-begins-with-every-small-set",
        sentence="A set may be a whole sequence ahead of its share.",
        tests=["tests/launch/data/test_sources.py::test_no_set_of_a_blend_is_a_whole_sequence_ahead"],
        changes=[
            Change("maingrad.launch.data.order", "Blend.of", "(earlier + 0.5)", "earlier"),
        ],
    ),
    Fault(
        "53k-nothing-recorded-is-an-amax-of-zero",
        sentence="A history moves on where a product has recorded nothing.",
        tests=[f"{SCALING}/test_delayed_scaling.py::test_scales_are_those_of_the_formulas"],
        changes=[
            Change("maingrad.te_integration.scaling.scaled_module", "", "NONE_YET = -1.0", "NONE_YET = 0.0"),
        ],
    ),
    Fault(
        "53l-a-skipped-step-leaves-its-amaxes",
        sentence="What a skipped step takes back ends with the amaxes of that step.",
        tests=[f"{SCALING}/test_given_up_iterations.py::test_what_trains_nothing_leaves_no_amax[ddp]"],
        changes=[
            Change("maingrad.te_integration.scaling.amax_history", "Roll.__init__", "self._before[0] = NONE_YET\n", ""),
        ],
    ),
    Fault(
        "53m-a-history-begins-with-zeros",
        sentence="A history shows an amax of 0 before anything was recorded.",
        tests=[f"{SCALING}/test_delayed_scaling.py::test_a_history_begins_without_an_amax"],
        changes=[
            Change(
                "maingrad.te_integration.scaling.scaled_module",
                "ScaledModule.make_room",
                "torch.full_like(scales, NONE_YET)",
                "torch.zeros_like(scales)",
            ),
        ],
    ),
    Fault(
        "53n-scales-that-begin-anew-have-an-amax-of-zero",
        sentence="A checkpoint of before the recipe leaves histories that show an amax of 0.",
        tests=[f"{SCALING}/test_delayed_scaling_checkpoints.py::test_a_checkpoint_of_before_the_recipe[zero3]"],
        changes=[
            Change(
                "maingrad.te_integration.scaling.scaled_module",
                "ScaledModule.adopt_stored",
                "history.zero_()[0] = NONE_YET",
                "history.zero_()",
            ),
        ],
    ),
    Fault(
        "53o-gradients-that-nobody-recorded-are-zero",
        sentence="A frozen layer's history forgets the amaxes of its gradients.",
        tests=[f"{SCALING}/test_delayed_scaling.py::test_a_frozen_layer_keeps_the_history_of_its_gradients"],
        changes=[
            Change(
                "maingrad.te_integration.scaling.amax_history",
                "AmaxRow.__init__",
                "(len(OPERANDS),), NONE_YET,",
                "(len(OPERANDS),), 0.0,",
            ),
        ],
    ),
    Fault(
        "47p-instances-gather-other-units",
        sentence="Two instances evaluate other units, and each gathers the other's shards across instances, silently.",
        tests=[f"{ITERATION}/test_other_units.py::test_an_evaluation_of_instances_on_other_units"],
        changes=[
            Change(
                "maingrad.fsdp.unit.unit",
                "Unit.record_gather",
                "if self._outer_log and any(bucket.gathers_across for bucket in self.buckets):",
                "if False:",
            ),
        ],
    ),
    Fault(
        "61n-all-layers-round-alike",
        sentence="Moments of all parameters are rounded by the same random bits.",
        tests=[
            "tests/fsdp/state/test_compact_state.py::"
            "test_moments_of_equal_gradients_are_rounded_by_random_bits_of_their_own"
        ],
        changes=[
            Change(
                "maingrad.fsdp.state.sharded_adam",
                "_ShardedAdam._row",
                "zlib.crc32(_name_of(param).encode())",
                "0",
            ),
        ],
    ),
]
