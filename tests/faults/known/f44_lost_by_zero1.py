"""What a program does between wrapping a model and its first backward, and which is lost."""

from fault import Change, Fault

TESTS = "tests/ddp/contract/test_written_by_hand.py::"

FAULTS = [
    Fault(
        "44a-a-cast-before-the-optimizer-is-undone",
        sentence="Flat buffers are of the dtypes at wrapping: a cast between wrapping and the optimizer is undone.",
        tests=[f"{TESTS}test_a_cast_between_wrapping_and_building_the_optimizer_is_refused"],
        changes=[Change("maingrad.ddp.optimizer.flat_params", "check_flattenable", "check_same(entry)", "pass")],
    ),
    Fault(
        "44b-a-gradient-written-by-hand-is-lost",
        sentence="A gradient that a program has put into main_grad before the first backward is overwritten by it.",
        tests=[f"{TESTS}test_a_write_before_the_first_backward_is_refused_under_every_layer"],
        changes=[Change("maingrad.ddp.contract.record", "GradRecord.open_for_write", "self._check_zero()", "pass")],
    ),
    Fault(
        "44c-what-was-written-by-hand-survives-the-clearing",
        sentence="zero_grad_buffer takes an iteration for clear, and what a program has written to main_grad stays.",
        tests=[f"{TESTS}test_zero_grad_buffer_clears_what_was_written_by_hand"],
        changes=[
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration._discard",
                "record.clear_touched()",
                "pass",
            )
        ],
    ),
]
