from fault import Change, Fault, sharded

FAULTS = [
    Fault(
        "05-an-uninitialised-gradient-is-returned",
        sentence="Delayed and not fused: backward returns a buffer that nobody has written.",
        tests=[
            "tests/te_integration/dense/test_return_table_modules.py::test_every_row_for_every_weight",
            *sharded(
                "tests/fsdp/iteration/test_contract_faults.py::test_13_no_reduction_comes_before_a_delayed_gradient[unfused-{}]"
            ),
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "hand_over",
                "return None",
                """
                if not fused:
                    return torch.full_like(weight, torch.nan)
                return None
                """,
            ),
        ],
    ),
    Fault(
        "05b-a-delayed-group-returns-an-uninitialised-buffer",
        sentence="Delayed and not fused, a group of experts: backward returns a buffer that nobody has written.",
        tests=[
            "tests/te_integration/experts/test_grouped_linear_contract.py::test_05_delayed_and_unfused_returns_nothing_before_its_turn",
            "tests/te_integration/dense/test_return_table_modules.py::test_every_row_for_every_weight",
            *sharded(
                "tests/fsdp/iteration/test_contract_faults.py::test_05_delayed_and_unfused_experts_return_nothing_before_their_turn[discrete-{}]"
            ),
            *sharded(
                "tests/fsdp/iteration/test_contract_faults.py::test_05_delayed_and_unfused_experts_return_nothing_before_their_turn[packed-{}]"
            ),
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.delayed",
                "DelayedTarget.deliver",
                "live_queue(self.queue, self.owner).put(entry)",
                """
                live_queue(self.queue, self.owner).put(entry)
                if not self.fused:
                    return [None if place is None else torch.full_like(place[0], torch.nan) for place in places]
                """,
            ),
        ],
    ),
    Fault(
        "05c-what-a-foreign-module-has-yet-to-fill-is-taken",
        sentence="A module of others that delays hands autograd a buffer that it has yet to fill, and the hook takes it; or a bias' gradient, and `backward_dw` finds none.",
        tests=[
            "tests/ddp/contract/test_foreign_delayed.py::test_their_delayed_gradients_count_and_hold_their_bucket[1-0-plain, a buffer first]",
            "tests/ddp/contract/test_foreign_delayed.py::test_their_delayed_gradients_count_and_hold_their_bucket[1-0-fused, bias in backward]",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "take_grad_of_backward",
                'if delayer is None or record.shared or getattr(param, "grad_added_to_main_grad", False):',
                "if True:",
            ),
        ],
    ),
    Fault(
        "05d-a-lagging-bias-finds-none",
        sentence="A module of others that lags looks for the gradient of a bias that was taken with an earlier microbatch's.",
        tests=[
            "tests/ddp/contract/test_foreign_delayed.py::test_their_delayed_gradients_count_and_hold_their_bucket[3-1-plain, bias in backward]",
            "tests/ddp/contract/test_foreign_delayed.py::test_their_delayed_gradients_count_and_hold_their_bucket[3-2-fused, bias in backward]",
        ],
        quick=[
            "tests/ddp/contract/test_foreign_delayed.py::test_their_delayed_gradients_count_and_hold_their_bucket[3-1-plain, bias in backward]",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.module",
                "take_grad_of_backward_dw",
                "if any(pending.part_in_grad for pending in record.pending if pending is not mine):",
                "if False:",
            ),
        ],
    ),
]
