from fault import Change, Fault, sharded

FAULTS = [
    Fault(
        "19a-a-split-backward-bypasses-main-grad",
        sentence="A fused backward that a zero-bubble schedule splits runs twice, and its weight gradient never reaches main_grad.",
        tests=[
            "tests/te_integration/pipeline/test_stage.py::test_19_a_backward_split_by_torch_is_refused[foreign]",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.linear",
                "wanted_and_places",
                """
                if use.fused and Demand.ACCUMULATE not in wanted:
                    refuse_split_backward(ctx, returns=Demand.RETURN in wanted)
                """,
                "",
            ),
        ],
    ),
    Fault(
        "19b-a-gradient-bypasses-the-hooks",
        sentence="A gradient that a zero-bubble schedule puts into .grad by hand is missing from the reduction, without a word.",
        tests=[
            "tests/te_integration/pipeline/test_stage.py::test_19_a_backward_split_by_torch_is_refused",
            "tests/te_integration/pipeline/test_stage.py::test_19_a_gradient_that_bypassed_the_hooks_is_cleared_with_the_iteration",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration._start",
                "check_nothing_bypassed(unshown, caller)",
                "pass",
            ),
        ],
    ),
    Fault(
        "19c-a-gradient-bypasses-the-hooks-of-a-whole-parameter",
        sentence="A gradient that somebody put into .grad of a whole parameter is missing from the reduction, without a word.",
        tests=[
            *sharded(
                "tests/fsdp/iteration/test_contract_faults.py::test_19_gradients_that_are_asked_for_one_after_the_other[fused-{}]"
            ),
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds._check_complete",
                "self._check_nothing_beside()",
                "",
            ),
        ],
    ),
]
