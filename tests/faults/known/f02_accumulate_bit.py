from fault import Change, Fault

FAULTS = [
    Fault(
        "02a-flag-decides-whether-to-accumulate",
        sentence='The flag is read as "added once": every microbatch but the last is overwritten.',
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_02_every_microbatch_accumulates",
            "tests/te_integration/dense/test_module_faults.py::test_02_every_microbatch_of_every_iteration_counts",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "open_for_write",
                "overwrite = record.open_for_write()",
                "overwrite = record.open_for_write() or not weight.grad_added_to_main_grad",
            ),
        ],
    ),
    Fault(
        "02b-foreign-flag-decides-whether-to-accumulate",
        sentence='A foreign provider\'s flag is read as "added once": only one of its microbatches is kept.',
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_02_every_microbatch_accumulates",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "open_for_write",
                'return getattr(weight, "overwrite_main_grad", False) and _first_write_of(backward, weight)',
                'return not getattr(weight, "grad_added_to_main_grad", True)',
            ),
        ],
    ),
]
