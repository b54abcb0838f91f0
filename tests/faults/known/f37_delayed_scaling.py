from fault import Change, Fault

FAULTS = [
    Fault(
        "37u-amaxes-of-an-evaluation",
        sentence="Amaxes of an eval forward count as those of training.",
        tests=[
            "tests/te_integration/recipes/test_delayed_scaling.py::test_evaluation_leaves_the_state_alone",
        ],
        changes=[
            Change(
                "maingrad.te_integration.scaling.delayed_scaling",
                "scaling_of",
                "trains = module.training and torch.is_grad_enabled()",
                "trains = True",
            ),
        ],
    ),
    Fault(
        "37v-each-rank-has-its-own-scales",
        sentence="A rank's scales come from its own data alone.",
        tests=[
            "tests/te_integration/recipes/test_delayed_scaling.py::test_ranks_have_the_scales_of_one_process[zero1]",
            "tests/te_integration/recipes/test_delayed_scaling.py::test_ranks_have_the_scales_of_one_process[zero3]",
            "tests/te_integration/recipes/test_delayed_scaling.py::test_ranks_that_run_other_modules_agree",
        ],
        changes=[
            Change(
                "maingrad.te_integration.scaling.delayed_scaling",
                "update_scales",
                "dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=axis)",
                "pass",
            ),
        ],
    ),
    Fault(
        "37w-scales-change-between-microbatches",
        sentence="Scales change within an iteration.",
        tests=[
            "tests/te_integration/recipes/test_delayed_scaling.py::test_microbatches_share_scales_and_leave_the_largest_amax",
        ],
        changes=[
            Change(
                "maingrad.te_integration.scaling.delayed_scaling",
                "scaling_of",
                "waits = use.is_in_wrapper()",
                "waits = False",
            ),
        ],
    ),
    Fault(
        "37x-a-graph-gets-other-scales",
        sentence="A backward quantises by other scales than its forward.",
        tests=[
            "tests/te_integration/recipes/test_delayed_scaling.py::test_without_a_wrapper_scales_change_before_the_next_forward",
        ],
        changes=[
            Change(
                "maingrad.te_integration.scaling.delayed_scaling",
                "scaling_of",
                'if use.row_0 != "empty" and not use.awaited:',
                'if use.row_0 != "empty":',
            ),
        ],
    ),
]
