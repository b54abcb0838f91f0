from fault import Change, Fault, sharded

FAULTS = [
    Fault(
        "03a-plain-use-of-a-tied-weight",
        sentence="A tied weight used by a fused and by a plain module: the plain contribution is dropped with the placeholder.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_03_a_plain_use_of_a_tied_weight_counts",
            "tests/te_integration/dense/test_module_faults.py::test_03_every_use_of_a_tied_weight_counts",
            *sharded(
                "tests/fsdp/iteration/test_contract_faults.py::test_03_every_use_of_a_tied_weight_counts[plain-{}]"
            ),
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "absorb_grad",
                "ours, record.consumer_wrote = record.consumer_wrote, False",
                """
                ours, record.consumer_wrote = record.consumer_wrote, False
                if flag and ours:
                    param.grad = None
                    return
                """,
            ),
        ],
    ),
    Fault(
        "03b-second-fused-use-overwrites",
        sentence="A tied weight with two fused uses under our own overwrite: the second use erases the first.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_03_both_fused_uses_of_a_tied_weight_count_under_our_overwrite",
            "tests/te_integration/dense/test_module_faults.py::test_03_every_use_of_a_tied_weight_counts",
            *sharded(
                "tests/fsdp/iteration/test_contract_faults.py::test_03_every_use_of_a_tied_weight_counts[fused-{}]"
            ),
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.record",
                "GradRecord.open_for_write",
                "overwrite = self.first_write_overwrites and not self.written",
                "overwrite = self.first_write_overwrites and not self.num_hook_writes",
            ),
        ],
    ),
    Fault(
        "03c-foreign-overwrite-is-taken-twice",
        sentence="A tied weight with two fused uses under a foreign overwrite_main_grad: the second use erases the first.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_03_both_fused_uses_of_a_tied_weight_count_under_a_foreign_overwrite",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "open_for_write",
                'return getattr(weight, "overwrite_main_grad", False) and _first_write_of(backward, weight)',
                'return getattr(weight, "overwrite_main_grad", False)',
            ),
        ],
    ),
    Fault(
        "03d-nobody-asks-for-zeros",
        sentence="A tied weight used by a foreign and by another module, without zero_out_wgrad: the real contribution is dropped, or NaN is added.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_03_a_foreign_modules_tied_use_adds_no_uninitialised_memory",
            "tests/te_integration/dense/test_module_faults.py::test_03_every_use_of_a_tied_weight_counts",
            *sharded(
                "tests/fsdp/iteration/test_contract_faults.py::test_03_a_foreign_modules_use_and_a_plain_one_count[{}]"
            ),
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "attach",
                "if record.shared:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "03e-a-fused-use-comes-last",
        sentence="Both uses of a tied weight are delayed, the fused one comes last, and leaves the other's sum in .grad.",
        tests=[
            "tests/te_integration/delayed/test_delayed_ties.py::test_all_of_a_tied_weights_gradient_arrives",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.delayed",
                "DelayedTarget._compute",
                "for weight in weights:",
                "for weight in () if self.fused else weights:",
            ),
        ],
    ),
    Fault(
        "03g-a-foreign-write-is-taken-for-the-programs",
        sentence="A foreign module writes the weight that it shares with ours first in a backward, and the write is refused as one by hand.",
        tests=["tests/te_integration/dense/test_module_faults.py::test_03_every_use_of_a_tied_weight_counts"],
        quick=[
            f"tests/te_integration/dense/test_module_faults.py::test_03_every_use_of_a_tied_weight_counts[foreign-False-{delay}-Linear-weight]"
            for delay in (False, True)
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.record",
                "GradRecord.open_for_write",
                "is_of_ours = self.first_write_overwrites or not self.shared",
                "is_of_ours = True",
            ),
        ],
    ),
]
