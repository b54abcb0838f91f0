"""Faults 47: ranks that run other units, or take other steps."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "47a-the-order-of-units-is-not-compared",
        sentence="Ranks gather different units of equal size, and train on mixed weights without an error.",
        tests=["tests/fsdp/iteration/test_other_units.py::test_ranks_that_run_other_units"],
        changes=[
            Change(
                "maingrad.ddp.collectives.step_check",
                "StepCheck.read",
                "if digest or apart:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "47b-gathers-are-not-noted",
        sentence="An evaluation gathers other units on one rank, computes with mixed weights, and nothing tells.",
        tests=["tests/fsdp/iteration/test_other_units.py::test_an_evaluation_on_other_units"],
        changes=[
            Change(
                "maingrad.fsdp.unit.unit",
                "Unit.record_gather",
                """
                for log, number in self._inner_log:
                    log.record_gather(number)
                """,
                "",
            ),
        ],
    ),
    Fault(
        "47c-ranks-that-hold-other-experts-raise-alone",
        sentence="A difference between the ranks of some experts is not carried to the other ranks.",
        tests=["tests/fsdp/iteration/test_other_units.py::test_experts_have_an_order_of_their_own"],
        changes=[
            Change(
                "maingrad.ddp.collectives.step_check",
                "StepCheck._stages",
                "following[0, 1] = torch.maximum(found[0, 1], found[:, 0].sum())",
                "following[0, 1] = found[0, 1]",
            ),
        ],
    ),
    Fault(
        "47d-a-rank-that-skips-its-batch-is-not-noticed",
        sentence="Each rank leaves out another batch after its forward, and gradients of different steps are averaged.",
        tests=["tests/ddp/collectives/test_step_check.py::test_ranks_that_skip_different_batches"],
        changes=[
            Change(
                "maingrad.ddp.collectives.step_check",
                "StepCheck.record_forward",
                "self._forwards += 1",
                "pass",
            ),
        ],
    ),
    Fault(
        "47e-a-rank-that-leaves-out-an-update-is-not-noticed",
        sentence="One rank leaves out optimizer.step(), and replicas part.",
        tests=[
            "tests/ddp/collectives/test_step_check.py::test_ranks_that_skip_different_batches",
            "tests/fsdp/iteration/test_other_units.py::test_ranks_that_skip_different_steps",
        ],
        changes=[
            Change(
                "maingrad.ddp.collectives.step_check",
                "StepCheck.record_update",
                "self._updates += 1",
                "pass",
            ),
        ],
    ),
    Fault(
        "47f-ranks-may-not-have-other-numbers-of-microbatches",
        sentence="Microbatches without a loss on one rank count as skipped batches, and a right program is refused.",
        tests=["tests/ddp/collectives/test_step_check.py::test_what_ranks_may_do_differently"],
        changes=[
            Change(
                "maingrad.ddp.collectives.step_check",
                "StepCheck.read",
                "left and not used",
                "left",
            ),
        ],
    ),
    Fault(
        "47g-mixed-weights-stay-gathered",
        sentence="A refused iteration leaves each rank another unit gathered; the next one gathers on one rank alone.",
        tests=["tests/fsdp/iteration/test_other_units.py::test_a_program_that_catches_it_goes_on"],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "Root.begin",
                "self.gathers.begin_anew()",
                "pass",
            ),
        ],
    ),
    Fault(
        "47h-the-comparison-waits-among-anothers-reductions",
        sentence="The comparison of steps at a backward's end travels on the group of another wrapper, whose buckets are launched on one rank and not yet on another.",
        tests=["tests/fsdp/iteration/test_other_units.py::test_a_backward_may_belong_to_two_wrappers"],
        changes=[
            Change(
                "maingrad.ddp.collectives.step_check",
                "StepCheck._new_log",
                "self._over.get(id(group), group)",
                "group",
            ),
        ],
    ),
    Fault(
        "47i-how-often-ranks-reduce-is-not-compared",
        sentence="One rank runs a second backward outside no_sync(): it reduces once more than the others, and reductions of different backwards are mixed.",
        tests=["tests/ddp/collectives/test_step_check.py::test_ranks_that_reduce_in_different_backwards"],
        changes=[
            Change(
                "maingrad.ddp.collectives.step_check",
                "StepCheck.start",
                "self._reductions + again]",
                "1]",
            ),
        ],
    ),
]
