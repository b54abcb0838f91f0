from fault import Change, Fault

FAULTS = [
    Fault(
        "17a-the-stream-is-captured",
        sentence="A delayed gradient captures the stream it was made on, and runs on another one without waiting.",
        tests=[
            "tests/te_integration/delayed/test_delayed_streams.py::test_17_it_runs_on_the_stream_of_the_moment_after_the_one_that_made_its_tensors",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.delayed",
                "DelayedWgrad.run",
                "current = None if self._producer is None else torch.cuda.current_stream(tensors[0].device)",
                "current = self._producer",
            ),
        ],
    ),
    Fault(
        "17b-tensors-are-freed-under-the-other-stream",
        sentence="A delayed gradient lets its tensors go when its kernel is queued on another stream, not when that has run.",
        tests=[
            "tests/te_integration/delayed/test_delayed_streams.py::test_17_its_tensors_live_until_the_other_stream_is_done",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.delayed",
                "DelayedWgrad.run",
                "self._done.record(current)",
                """
                self._done.record(current)
                self._operands = None
                """,
            ),
        ],
    ),
]
