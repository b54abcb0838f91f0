from fault import Change, Fault

FAULTS = [
    Fault(
        "56a-zero-grad-of-all-optimizers",
        sentence="A method that every optimizer of the process has is replaced, to see when gradients are cleared.",
        tests=["tests/test_nothing_replaced.py::test_nothing_in_torch_is_replaced"],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.optimizer",
                "guard_stock_optimizers",
                "register_optimizer_step_pre_hook(_before_step)",
                """
                register_optimizer_step_pre_hook(_before_step)
                clear = Optimizer.zero_grad
                Optimizer.zero_grad = lambda optimizer, *args, **kwargs: clear(optimizer, *args, **kwargs)
                """,
            ),
        ],
    ),
]
