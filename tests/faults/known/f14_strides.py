from fault import Change, Fault

FAULTS = [
    Fault(
        "14-strides-are-not-checked",
        sentence="A main_grad of the right shape that is not contiguous is not refused by name.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_14_a_main_grad_that_is_not_contiguous_is_refused_with_its_stride",
            "tests/te_integration/dense/test_module_faults.py::test_14_a_main_grad_that_does_not_fit_is_refused",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.record",
                "check_accumulator",
                "or not (_rows_fit(main_grad) if rows_apart else main_grad.is_contiguous())",
                "",
            ),
        ],
    ),
    Fault(
        "14b-strides-of-an-expert-are-not-checked",
        sentence="An expert's main_grad of the right shape, whose rows overlap or whose columns are apart, is not refused by name.",
        tests=[
            "tests/te_integration/experts/test_grouped_linear_contract.py::test_14_a_main_grad_that_cannot_be_written_is_refused",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.record",
                "check_accumulator",
                "or not (_rows_fit(main_grad) if rows_apart else main_grad.is_contiguous())",
                "or not (rows_apart or main_grad.is_contiguous())",
            ),
        ],
    ),
    Fault(
        "14c-rows-apart-are-refused",
        sentence="An expert's rows that lie apart, which the product can write, are refused, or copied and lost.",
        tests=[
            "tests/te_integration/experts/test_grouped_linear_contract.py::test_14_rows_of_any_stride_are_written_where_they_are",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.grouped_wgrad",
                "GroupedWgrad.accumulate",
                "if self._packed:",
                """
                main_grads = [None if each is None else each.contiguous() for each in main_grads]
                if self._packed:
                """,
            ),
        ],
    ),
]
