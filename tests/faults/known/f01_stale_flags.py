from fault import Change, Fault

FAULTS = [
    Fault(
        "01-stale-flag",
        sentence="Fused in one microbatch, plain in the next: the flag is still up, and the second gradient is dropped.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_01_a_plain_microbatch_after_a_fused_one_counts",
            "tests/te_integration/dense/test_module_faults.py::test_01_a_plain_microbatch_between_fused_ones_counts",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "absorb_grad",
                """
                if flag:
                    param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
                """,
                "",
            ),
        ],
    ),
    Fault(
        "01b-the-flag-of-a-failed-backward-stays-on-a-sharded-parameter",
        sentence="A foreign backward that failed leaves its flag on a sharded parameter: the next plain gradient is dropped.",
        tests=[
            "tests/fsdp/iteration/test_unusual_iterations.py::test_a_plain_use_after_a_foreign_backward_that_failed",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "forget_failed_backward",
                """
                if flag:
                    param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
                """,
                "",
            ),
        ],
    ),
]
