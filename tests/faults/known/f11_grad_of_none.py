from fault import Change, Fault

FAULTS = [
    Fault(
        "11-none-is-not-safe",
        sentence="The overlapping hook refuses a gradient of None, which is what a fused module returns.",
        tests=[
            "tests/ddp/buckets/test_overlap.py::test_a_fused_layer_that_leaves_no_grad_is_reduced_under_overlap",
        ],
        changes=[
            Change(
                "maingrad.ddp.buckets.reducer",
                "Readiness.on_grad",
                "take_grad_of_backward(param, record)",
                """
                if self._overlap and param.grad is None:
                    raise RuntimeError("param.grad being None is not safe when overlap_grad_reduce is True")
                take_grad_of_backward(param, record)
                """,
            ),
        ],
    ),
]
