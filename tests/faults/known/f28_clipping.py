from fault import Change, Fault

FAULTS = [
    Fault(
        "28a-what-is-not-exposed-is-not-clipped",
        sentence="torch's clipping skips parameters whose gradient is in main_grad: the norm is 0, and nothing is clipped.",
        tests=[
            "tests/ddp/stock/test_stock_clipping.py::test_gradients_that_were_not_exposed_are_refused",
            "tests/ddp/stock/test_stock_clipping.py::test_delayed_gradients_that_are_all_pending_are_refused",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.attachment",
                "attach_params",
                "guard_stock_clipping(wrapper)",
                "",
            ),
        ],
    ),
    Fault(
        "28b-clipping-imported-by-name-is-not-seen",
        sentence="Only who looks torch's clipping up in its module finds the check: most programs have imported it by name.",
        tests=[
            "tests/ddp/stock/test_stock_clipping.py::test_gradients_that_were_not_exposed_are_refused",
        ],
        changes=[
            Change(
                "maingrad.ddp.stock.clipping",
                "_guard_once",
                "checked[function] = _with_check_inside(function) or _with_check(function)",
                "checked[function] = _with_check(function)",
            ),
        ],
    ),
]
