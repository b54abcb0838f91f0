from fault import Change, Fault

FAULTS = [
    Fault(
        "22a-written-whatever-was-asked-for",
        sentence="autograd.grad(loss, inputs) writes main_grad as a side effect.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_22_gradients_that_are_handed_to_the_caller_leave_main_grad_alone",
            "tests/te_integration/dense/test_module_faults.py::test_22_gradients_that_are_handed_to_the_caller_leave_main_grad_alone",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "demand",
                "return Demand.ACCUMULATE if wanted else Demand.NOTHING",
                "return Demand.ACCUMULATE",
            ),
        ],
    ),
    Fault(
        "22b-a-graph-of-the-gradient-is-written",
        sentence="A second derivative writes main_grad, whose gradient has no graph.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_22_gradients_that_are_handed_to_the_caller_leave_main_grad_alone",
            "tests/ddp/contract/test_backward_variants.py::test_second_derivatives_from_autograd_grad_are_plain_pytorchs_and_write_nothing",
            "tests/te_integration/dense/test_module_faults.py::test_22_gradients_that_are_handed_to_the_caller_leave_main_grad_alone",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "demand",
                "return Demand.RETURN  # create_graph=True: the gradient itself must be differentiable",
                "return Demand.ACCUMULATE",
            ),
        ],
    ),
]
