from fault import Change, Fault, sharded

FAULTS = [
    Fault(
        "10a-grad-is-not-cleared",
        sentence="The hook leaves the placeholder in .grad, and the next real gradient is added to it.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_10_the_hook_clears_a_foreign_placeholder",
            *sharded("tests/fsdp/iteration/test_contract_faults.py::test_10_the_hook_clears_a_foreign_placeholder[{}]"),
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "absorb_grad",
                """
                if not getattr(param, "zero_out_wgrad", False):
                    param.grad = None
                """,
                'if not getattr(param, "zero_out_wgrad", False):',
            ),
        ],
    ),
    Fault(
        "10b-a-written-scratch-is-handed-out",
        sentence="A provider that leaves .grad accumulates into the memory of all placeholders, and it is handed out as it is.",
        tests=[
            "tests/ddp/contract/test_contract_faults.py::test_10_a_placeholder_somebody_wrote_to_is_zeros_when_it_is_handed_out_again",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "placeholder",
                "scratch.zero_()",
                "",
            ),
        ],
    ),
    Fault(
        "10c-what-was-given-up-comes-back",
        sentence="Microbatches whose .grad was cleared before the last one are added to the next iteration.",
        tests=[
            "tests/fsdp/iteration/test_reduced_once_grads.py::test_clearing_all_gives_the_iteration_up",
            "tests/fsdp/iteration/test_reduced_once_memory.py::test_what_was_given_up_has_no_memory_when_the_next_backward_begins",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds.backward_began",
                "self._notice_all_cleared()",
                "",
            ),
        ],
    ),
    Fault(
        "10d-what-was-done-to-a-held-gradient-is-lost",
        sentence="What was written to .grad through a view, while it stood for gradients that were not in it yet, is lost.",
        tests=[
            "tests/fsdp/iteration/test_reduced_once_grads.py::test_what_cannot_be_refused_is_noticed_by_the_last_microbatch",
            "tests/fsdp/iteration/test_reduced_once_grads.py::test_finish_grad_sync_notices_it_as_well",
        ],
        changes=[
            Change(
                "maingrad.fsdp.unit.grad_shard",
                "GradShard._check_untouched",
                "if grad is not shown or touched:  # a write through a view is not refused, but seen",
                """
                if grad is not shown or (
                    touched and not isinstance(grad, PlaceholderGrad)
                ):  # a write through a view is not refused, but seen
                """,
            ),
        ],
    ),
]
