"""Faults under ``ddp`` that somebody who had not written the tests drew, and that no quick test noticed before."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "57h-a-sum-that-waited-is-added-to-the-next-iteration",
        sentence="What was reduced before an iteration that is discarded went on is added to a later iteration.",
        tests=[
            "tests/ddp/buckets/test_end_of_backward.py::test_an_iteration_that_goes_on_after_a_read_and_is_discarded_leaves_nothing"
        ],
        changes=[
            Change(
                "maingrad.ddp.buckets.bucket",
                "Bucket.reset",
                "self.carried = None",
                "",
            ),
        ],
    ),
    Fault(
        "12n-nan-of-an-earlier-backward-is-forgotten",
        sentence="The search for NaN looks at what came after the last reduction alone.",
        tests=[
            "tests/ddp/buckets/test_nan_check.py::test_a_bad_gradient_of_an_earlier_backward_of_the_iteration_is_found"
        ],
        changes=[
            Change(
                "maingrad.ddp.buckets.nan_check",
                "NanCheck.note",
                "largest if bucket.carried is None else torch.maximum(part, largest)",
                "largest",
            ),
        ],
    ),
    Fault(
        "46e-elements-that-have-changed-places-are-alike",
        sentence="The checksum of replicas is that of the same elements in another order.",
        tests=["tests/ddp/buckets/test_replicas.py::test_elements_that_have_changed_places_are_found"],
        changes=[
            Change(
                "maingrad.ddp.buckets.replicas",
                "_checksum",
                "(sums * (torch.arange(sums.numel(), device=bits.device) * 2 + 1)).sum()",
                "sums.sum()",
            ),
        ],
    ),
    Fault(
        "46f-an-iteration-that-goes-on-counts-twice",
        sentence="An iteration that goes on after a read is two, and replicas are compared in others than every N-th.",
        tests=["tests/ddp/buckets/test_replicas.py::test_an_iteration_that_goes_on_after_a_read_is_compared_once"],
        changes=[
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration._finish",
                "if not self._ended:",
                "if True:",
            ),
        ],
    ),
    Fault(
        "57i-a-step-that-raised-hides-its-gradients",
        sentence="After a step that raised, gradients are hidden from clipping, and refused as somebody else's by the next step.",
        tests=["tests/ddp/optimizer/test_distributed_optimizer.py::test_a_step_that_raised_may_be_taken_again"],
        changes=[
            Change("maingrad.ddp.optimizer.steps", "TorchSteps.update", "try:", "if True:"),
            Change("maingrad.ddp.optimizer.steps", "TorchSteps.update", "finally:", "if True:"),
        ],
    ),
    Fault(
        "27f-moments-of-later-steps-stay",
        sentence="A state of before the first step is loaded, and the moments of later steps stay.",
        tests=[
            "tests/ddp/optimizer/test_distributed_optimizer.py::test_a_state_from_before_the_first_step_begins_anew"
        ],
        changes=[
            Change(
                "maingrad.ddp.optimizer.distributed_optimizer",
                "DistributedOptimizer.load_state_dict",
                """
                state.clear()
                """,
                "",
            ),
        ],
    ),
    Fault(
        "35q-stages-of-another-schedule-are-parts-of-the-step",
        sentence="A step that failed is not given up, since stages of an earlier schedule have not given it up.",
        tests=["tests/te_integration/pipeline/test_failures.py::test_a_step_of_a_second_schedule_is_abandoned"],
        changes=[
            Change(
                "maingrad.ddp.wrapper.parts",
                "Parts.begin",
                "if part in self._begun or not self._open:",
                "if part in self._begun:",
            ),
        ],
    ),
    Fault(
        "28o-zeroing-is-refused-for-what-others-lack",
        sentence="An optimizer of some parameters cannot clear its gradients, though the others have none.",
        tests=[
            "tests/ddp/torch_grads/test_zeroing.py::test_an_optimizer_of_some_parameters_discards_if_the_others_have_nothing"
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.parts",
                "BucketParts.clear_hidden",
                "id(record) in missing and record.written",
                "id(record) in missing",
            ),
        ],
    ),
    Fault(
        "27g-a-group-without-parameters-keeps-its-options",
        sentence="The learning rate of a group without parameters is not that of the checkpoint.",
        tests=["tests/ddp/checkpoint/test_save_and_load.py::test_a_group_without_parameters_keeps_its_hyperparameters"],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.optimizer",
                "_match_groups",
                "there_of[index] = index",
                "pass",
            ),
        ],
    ),
    Fault(
        "34z-a-file-of-another-job-is-taken",
        sentence="A save takes the data file that another job has written in its folder for its own.",
        tests=["tests/ddp/checkpoint/test_ids.py::test_two_jobs_that_write_to_one_path_in_the_background_are_told"],
        changes=[
            Change(
                "maingrad.ddp.checkpoint.background",
                "PendingSave._complete",
                "RankFile(path, self._id)",
                "pass",
            ),
        ],
    ),
    Fault(
        "28p-recording-the-order-takes-grad",
        sentence="Recording the order of backward leaves no gradient where there was one.",
        tests=[
            "tests/ddp/wrapper/test_bad_input.py::test_recording_the_order_leaves_gradients_and_random_numbers_alone"
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.backward_order",
                "_noting_order",
                "entry.param.grad = grad",
                "pass",
            ),
        ],
    ),
]
