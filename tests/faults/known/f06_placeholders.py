from fault import Change, Fault

FAULTS = [
    Fault(
        "06a-main-grad-is-the-placeholder",
        sentence="A view of main_grad is returned as the placeholder: counted twice where .grad is added all the same.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_06_nothing_returned_is_added_to_what_was_written",
            "tests/te_integration/dense/test_module_faults.py::test_06_what_is_returned_is_no_view_of_main_grad",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "hand_over",
                "return placeholder(weight)",
                "return weight.main_grad",
            ),
        ],
    ),
    Fault(
        "06b-main-grad-is-the-gradient",
        sentence="A view of main_grad is returned as the gradient under our own provider: counted twice.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_06_nothing_returned_is_added_to_what_was_written",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "hand_over",
                "return None",
                'return getattr(weight, "main_grad", None)',
            ),
        ],
    ),
]
