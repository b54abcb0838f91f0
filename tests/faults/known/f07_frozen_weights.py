from fault import Change, Fault

FAULTS = [
    Fault(
        "07a-a-frozen-weight-takes-its-bias-along",
        sentence="A frozen weight with a trainable bias: the bias gets no gradient.",
        tests=[
            "tests/te_integration/dense/test_return_table_modules.py::test_the_frozen_row_for_every_weight",
            "tests/te_integration/dense/test_layer_norm_mlp.py::test_07_either_weight_may_be_frozen",
        ],
        changes=[
            Change(
                "maingrad.te_integration.dense.linear",
                "LinearModule.multiply",
                "return self.execution(",
                """
                if bias is not None and not any(weight.requires_grad for weight in weights):
                    bias = bias.detach()
                return self.execution(
                """,
            ),
        ],
    ),
    Fault(
        "07b-one-entry-for-each-weight-is-expected",
        sentence="One of an MLP's two weights is frozen: backward_dw takes two gradients from a queue of one.",
        tests=[
            "tests/te_integration/dense/test_layer_norm_mlp.py::test_07_either_weight_may_be_frozen",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.module",
                "DelayedWgradModule.backward_dw",
                "self.wgrad_queue.drain_oldest_microbatch()",
                """
                for _ in self.delayed_wgrad_weights():
                    self.wgrad_queue._run_one(self.wgrad_queue._entries[0])
                """,
            ),
        ],
    ),
]
