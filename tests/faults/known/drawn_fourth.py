"""Faults that were drawn over all folders and that no quick test noticed, with the tests that notice them now."""

from fault import Change, Fault

COPIED = (
    "tests/ddp/collectives/test_step_check.py::"
    "test_what_ranks_may_do_differently[ddp-parameters_copied_from_the_first_rank]"
)

FAULTS = [
    Fault(
        "13k-a-unit-is-sent-while-its-own-modules-delay",
        sentence="Modules get queues of their own after their model was sharded: units are sent before they are drained.",
        tests=[
            "tests/fsdp/iteration/test_delayed_units.py::test_modules_that_get_a_queue_of_their_own_after_they_were_sharded"
        ],
        changes=[
            Change("maingrad.fsdp.iteration.rounds", "GradRounds.leave", "if grad_round.has_pending:", "if False:"),
        ],
    ),
    Fault(
        "19d-a-gradient-by-hand-waits-for-finish-grad-sync",
        sentence="A gradient by hand that no backward takes is missing in a loop that never calls finish_grad_sync.",
        tests=[
            "tests/fsdp/iteration/test_unusual_iterations.py::"
            "test_a_gradient_by_hand_that_no_backward_takes_is_refused_when_the_last_backward_ends"
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds.backward_ended",
                "self._check_nothing_beside()",
                "pass",
            ),
        ],
    ),
    Fault(
        "09j-the-id-that-drops-a-copy-wraps",
        sentence="The id behind the last of 2^15 experts does not fit its 16-bit key: the copy is the first expert's.",
        tests=[
            "tests/te_integration/experts/test_moe_permutation.py::test_as_many_experts_as_keys_of_a_sort_can_number"
        ],
        changes=[
            Change(
                "maingrad.te_integration.experts.moe_permutation",
                "row_id_map",
                "num_experts < 2**15",
                "num_experts <= 2**15",
            ),
        ],
    ),
    Fault(
        "28u-clipping-in-the-step-forgets-the-loss-scale",
        sentence="With a scaler and max_grad_norm the step divides by the clipping alone.",
        tests=[
            "tests/ddp/optimizer/test_grad_scaler.py::test_scaled_training_is_bitwise_unscaled_training"
            "[fused, clipping inside]"
        ],
        quick=[
            "tests/ddp/optimizer/test_grad_scaler.py::test_scaled_training_is_bitwise_unscaled_training"
            "[fused, clipping inside]"
        ],
        changes=[
            Change(
                "maingrad.ddp.optimizer.distributed_optimizer",
                "DistributedOptimizer._grad_divisor",
                "inverse if scale is None else inverse * scale",
                "inverse",
            ),
        ],
    ),
    Fault(
        "46g-half-of-a-complex-number-is-compared",
        sentence="Replicas that differ in imaginary parts alone are taken for equal.",
        tests=["tests/ddp/wrapper/test_odd_iterations.py::test_a_difference_in_the_imaginary_part_parts_replicas"],
        changes=[
            Change(
                "maingrad.ddp.buckets.replicas",
                "_checksum",
                "torch.view_as_real(values) if values.is_complex() else values",
                "values.real if values.is_complex() else values",
            ),
        ],
    ),
    Fault(
        "53u-a-step-that-is-taken-loses-its-amaxes",
        sentence="Under a scaler the device takes the amaxes of each step back, also where it does not skip the step.",
        tests=[
            "tests/te_integration/recipes/test_given_up_iterations.py::test_a_scaler_that_takes_its_steps_keeps_their_amaxes"
        ],
        changes=[
            Change(
                "maingrad.te_integration.scaling.amax_history",
                "Roll.undo",
                "before = torch.where(skips, before, torch.cat(self._histories, dim=1))",
                "",
            ),
        ],
    ),
    Fault(
        "53v-an-iteration-of-two-ends-goes-back-to-its-first",
        sentence="Two losses were reduced one after the other, and their step is skipped: the first one's amaxes stay.",
        tests=[
            "tests/te_integration/recipes/test_given_up_iterations.py::test_an_iteration_of_two_ends_that_is_skipped"
        ],
        quick=[
            "tests/te_integration/recipes/test_given_up_iterations.py::test_an_iteration_of_two_ends_that_is_skipped[zero2]"
        ],
        changes=[
            Change(
                "maingrad.te_integration.scaling.amax_history",
                "Roll.go_back_to",
                "self._before, self._old = earlier._before, earlier._old",
                "pass",
            ),
        ],
    ),
    Fault(
        "53w-a-frozen-block-under-reentrance-has-no-amaxes",
        sentence="A block whose own backward brings no gradient of a parameter is taken for one that trains nothing.",
        tests=[
            "tests/te_integration/recipes/test_given_up_iterations.py::test_a_frozen_block_in_a_reentrant_checkpoint_counts"
        ],
        changes=[
            Change(
                "maingrad.te_integration.scaling.amax_history",
                "AmaxRow.is_in",
                "(self.backward in trained or self.outer in trained)",
                "self.backward in trained",
            ),
        ],
    ),
    Fault(
        "53x-a-sharded-models-first-skipped-step-counts",
        sentence="A scaler skips the first step over shards, and nobody knows yet that an optimizer trains them.",
        tests=[
            "tests/te_integration/recipes/test_given_up_iterations.py::test_a_scaler_that_skips_a_step_skips_its_amaxes"
        ],
        quick=[
            "tests/te_integration/recipes/test_given_up_iterations.py::test_a_scaler_that_skips_a_step_skips_its_amaxes[zero2]"
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds._discarded",
                "iteration_ends.record_optimizer(model)",
                "pass",
            ),
        ],
    ),
    Fault(
        "47n-weights-of-a-mixed-iteration-stay",
        sentence="Ranks ran different units and were told so; whole parameters that only some gathered are used again.",
        tests=["tests/fsdp/iteration/test_other_units.py::test_a_program_that_catches_it_goes_on"],
        quick=["tests/fsdp/iteration/test_other_units.py::test_a_program_that_catches_it_goes_on[zero2]"],
        changes=[
            Change("maingrad.fsdp.iteration.root", "Root.begin", "self.gathers.begin_anew()", "pass"),
        ],
    ),
    Fault(
        "57o-a-backward-adds-to-gradients-that-were-divided",
        sentence="A backward behind the division by tokens is reduced, and added to what was divided already.",
        tests=[
            "tests/ddp/wrapper/test_odd_iterations.py::test_nothing_is_added_to_gradients_that_were_divided_by_tokens"
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration._reopen",
                "self._finished and self._num_tokens is not None",
                "False",
            ),
        ],
    ),
    Fault(
        "47r-ranks-that-agree-again-are-refused",
        sentence="After broadcast_params, steps that ranks took apart before are still held against them.",
        tests=[COPIED],
        quick=[COPIED],
        changes=[
            Change(
                "maingrad.ddp.wrapper.data_parallel",
                "DistributedDataParallel.broadcast_params",
                "self.steps.forget()",
                "",
            ),
        ],
    ),
    Fault(
        "47s-a-step-updates-before-ranks-are-compared",
        sentence="Under ZeRO-1, a step that no read comes before updates with gradients of different batches.",
        tests=[
            "tests/ddp/collectives/test_step_check.py::test_ranks_that_skip_different_batches[in a plain loop-zero1]"
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration.wait_for_buckets",
                "self.steps.finish()",
                "",
            ),
        ],
    ),
    Fault(
        "46h-a-first-element-is-not-compared",
        sentence="Replicas that differ in the first element of a parameter, or in a scalar, are taken for equal.",
        tests=["tests/ddp/buckets/test_replicas.py::test_a_difference_in_one_element_is_found"],
        changes=[
            Change(
                "maingrad.ddp.buckets.replicas",
                "_checksum",
                "* 2 + 1",
                "* 2",
            ),
        ],
    ),
    Fault(
        "28v-clipping-rounds-the-sums-to-the-weights-dtype",
        sentence="Under DistributedOptimizer without shards a read of a bf16 parameter's .grad rounds the fp32 sums.",
        tests=[
            "tests/ddp/torch_grads/test_stock_clipping.py::"
            "test_under_our_optimizer_a_bf16_parameters_gradient_is_read_as_it_is_summed"
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.shown_params",
                "ShownGrads.fill",
                "each.dtype if each.record.updater is None else each.record.view.dtype",
                "each.dtype",
            ),
        ],
    ),
]
