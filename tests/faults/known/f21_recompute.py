from fault import Change, Fault, sharded

FAULTS = [
    Fault(
        "21-reentrant-recompute-fires-twice",
        sentence="Reentrant recompute fires a hook twice: the bucket is launched at the first, the second contribution is lost.",
        tests=[
            "tests/ddp/contract/test_recompute.py::test_no_contribution_is_lost_on_two_ranks[all_reduce-reentrant]",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.record",
                "GradRecord.open_for_write",
                """
                if self.closed is not None:
                    raise RuntimeError(f"parameter '{self.name}' received a gradient after {self.closed}")
                """,
                "",
            ),
            Change(
                "maingrad.ddp.buckets.reducer",
                "Readiness.on_grad",
                "if record.shared or self._recomputes:",
                "if record.shared:",
            ),
        ],
    ),
    Fault(
        "21b-the-end-of-a-nested-backward-ends-all",
        sentence="The end of a nested backward is taken for the end of all: units are reduced, and what they get later is not.",
        tests=[
            *sharded(
                "tests/fsdp/iteration/test_contract_faults.py::test_21_a_unit_that_is_recomputed_and_runs_again_loses_nothing[{}]"
            ),
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "Root.end_backward",
                "for unit in backward.tasks.get(task, ()):",
                "for unit in list(backward.entered):",
            ),
            Change(
                "maingrad.fsdp.iteration.root",
                "Root.on_grad",
                "self.enter(unit, current_backward(), trains=True, delays=False)",
                "",
            ),
        ],
    ),
    Fault(
        "21c-a-recompute-forgets-the-block",
        sentence="A recompute outside of the block that delayed its first forward saves other tensors, and the input gradient is wrong.",
        tests=[
            "tests/te_integration/delayed/test_delayed_recompute.py::test_a_block_around_either_pass",
            "tests/te_integration/delayed/test_delayed_recompute.py::test_one_module_in_regions_of_both_kinds",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.delay_blocks",
                "queue_of_block",
                """
                if is_recompute:
                    return _around.get(region)
                """,
                "",
            ),
        ],
    ),
    Fault(
        "21d-recompute-is-frozen-as-the-last-forward-was",
        sentence="What is recomputed goes by the last forward, in which the model was frozen, and loses its gradients.",
        tests=[
            "tests/fsdp/iteration/test_frozen_meanwhile.py::test_recompute_is_frozen_as_its_forward_was[between_forward_and_backward-around units]",
        ],
        quick=[
            "tests/fsdp/iteration/test_frozen_meanwhile.py::test_recompute_is_frozen_as_its_forward_was[between_forward_and_backward-around units]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.root",
                "Root.pre_forward",
                "forward.trains = not (self._frozen if task == -1 else self._is_frozen())",
                "forward.trains = not self._frozen",
            ),
        ],
    ),
]
