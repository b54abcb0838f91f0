from fault import Change, Fault

FAULTS = [
    Fault(
        "04a-backward-dw-assigns-grad",
        sentence="Delayed and not fused: backward_dw assigns .grad, and a second microbatch or a tied use loses gradients.",
        tests=[
            "tests/te_integration/delayed/test_delayed_wgrad.py::test_without_a_provider_it_adds_to_grad",
            "tests/te_integration/dense/test_return_table_modules.py::test_every_row_for_every_weight",
            "tests/te_integration/experts/test_grouped_linear_contract.py::test_04_delayed_and_unfused_gradients_add_up_in_grad",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.delayed",
                "add_to_grad",
                "weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)",
                "weight.grad = gradient",
            ),
        ],
    ),
    Fault(
        "04b-the-bias-waits-in-vain",
        sentence="Delayed: the bias gradient is left to backward_dw, which has none.",
        tests=[
            "tests/te_integration/dense/test_return_table_modules.py::test_every_row_for_every_weight",
        ],
        quick=[
            "tests/te_integration/dense/test_return_table_modules.py::test_every_row_for_every_weight[Linear-weight-delayed-True]",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.linear",
                "_FusedLinear.backward",
                "db = dy_rows.sum(0, dtype=ctx.bias_dtype) if needs_db else None",
                "db = dy_rows.sum(0, dtype=ctx.bias_dtype) if needs_db and not hasattr(use.target, 'queue') else None",
            ),
        ],
    ),
    Fault(
        "04c-threads-that-drain-add-twice",
        sentence="Threads that drain one queue each take the entries that are there, and a gradient is added twice.",
        tests=[
            "tests/te_integration/delayed/test_queue_edges.py::test_threads_that_drain_together_compute_each_gradient_once[False-drain]",
        ],
        changes=[
            Change(
                "maingrad.te_integration.wgrad_queue",
                "WgradQueue.__init__",
                "self._draining = threading.RLock()",
                "self._draining = threading.Semaphore(4)",
            ),
        ],
    ),
    Fault(
        "04d-a-module-that-is-gone-blocks-the-queue",
        sentence="A delayed gradient of a module that is gone blocks all that were queued behind it.",
        tests=[
            "tests/te_integration/delayed/test_queue_edges.py::test_a_module_that_is_gone_is_named_once_and_blocks_nobody",
        ],
        changes=[
            Change(
                "maingrad.te_integration.wgrad_queue",
                "WgradQueue._run",
                """
                orphans = [entry for entry in entries if entry.is_orphaned]
                mine = [entry for entry in entries if not entry.is_orphaned and chosen(entry)]
                """,
                """
                orphans: list[DelayedWgrad] = []
                mine = [entry for entry in entries if chosen(entry)]
                """,
            ),
        ],
    ),
]
