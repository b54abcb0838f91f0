from fault import Change, Fault

FAULTS = [
    Fault(
        "55a-threads-of-gloo-are-left-at-work",
        sentence="A process ends while gloo's threads release the last collective's tensors, and aborts now and then.",
        tests=["tests/ddp/collectives/test_end_of_process.py::test_a_process_waits_for_threads_of_gloo_alone"],
        changes=[
            Change(
                "maingrad.ddp.collectives.in_flight",
                "_let_gloo_finish",
                "deadline = time.monotonic() + 10",
                "return",
            ),
        ],
    ),
]
