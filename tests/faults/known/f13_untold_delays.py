from fault import Change, Fault, sharded

FAULTS = [
    Fault(
        "13a-buckets-do-not-wait-for-delayed-gradients",
        sentence="The provider does not know what is delayed: a bucket is reduced before its gradient exists.",
        tests=[
            "tests/te_integration/dense/test_return_table_modules.py::test_13_no_bucket_launches_before_its_delayed_weight",
        ],
        changes=[
            Change(
                "maingrad.ddp.buckets.reducer",
                "Readiness._mark_ready",
                """
                if record.pending:
                    record.awaits_delayed = True
                    return
                """,
                "",
            ),
        ],
    ),
    Fault(
        "13b-only-the-first-weight-is-marked",
        sentence="A module that delays two weights marks one: a foreign provider reduces the other too early.",
        tests=[
            "tests/te_integration/dense/test_return_table_modules.py::test_13_a_delayed_weight_is_known_to_every_provider",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.module",
                "DelayedWgradModule.mark_delayed_weights",
                "for name in self.delayed_wgrad_weights():",
                "for name in list(self.delayed_wgrad_weights())[:1]:",
            ),
        ],
    ),
    Fault(
        "13c-a-container-is-hooked-too",
        sentence="A container has the verb as well: a foreign provider hooks its modules' parameters twice.",
        tests=[
            "tests/te_integration/test_sequential.py::test_a_foreign_provider_registers_with_the_modules_alone",
        ],
        changes=[
            Change(
                "maingrad.te_integration.sequential",
                "Sequential",
                "def _delaying(self) -> Iterator[Any]:",
                """
                def register_wgrad_accumulation_and_reduce_hooks(self, fn: Any) -> None:
                    for module in self._delaying():
                        module.register_wgrad_accumulation_and_reduce_hooks(fn)

                def _delaying(self) -> Iterator[Any]:
                """,
            ),
        ],
    ),
    Fault(
        "13d-a-delay-under-fsdp2",
        sentence="Weight gradients are delayed under torch's FSDP2, which reduces without them and finds them an iteration late.",
        tests=[
            "tests/te_integration/foreign/test_stock_fsdp2_refused.py::test_delayed_weight_gradients_are_refused_in_forward",
            "tests/te_integration/foreign/test_stock_fsdp2_refused.py::test_what_cannot_be_is_an_error",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.delayed",
                "DelayedTarget.__init__",
                """
                if TorchShards.of(weight) is not None:
                    raise TorchShards.refuse_delay(name)
                """,
                "",
            ),
        ],
    ),
    Fault(
        "13e-a-unit-is-reduced-before-its-delayed-gradients",
        sentence="A unit is reduced when backward has passed it, with weight gradients still to be computed.",
        tests=[
            *sharded(
                "tests/fsdp/iteration/test_contract_faults.py::test_13_no_reduction_comes_before_a_delayed_gradient[fused-{}]"
            ),
            *sharded("tests/fsdp/iteration/test_contract_faults.py::test_13_a_queue_that_nobody_was_told_of[{}]"),
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds._send_due",
                "while self._due and not (complete and self._due[0].has_pending):",
                "while self._due:",
            ),
        ],
    ),
    Fault(
        "13f-delayed-gradients-are-reduced-as-they-come",
        sentence="A unit whose delayed gradients are complete is reduced before those that come first: ranks that delay others disagree.",
        tests=[
            "tests/fsdp/iteration/test_delayed_units.py::test_some_ranks_alone_use_what_delays[zero3-modules]",
            "tests/fsdp/iteration/test_delayed_units.py::test_some_ranks_alone_use_what_delays[zero3-queue]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds._send_due",
                """
                while self._due and not (complete and self._due[0].has_pending):
                    grad_round = self._due.pop(0)
                """,
                """
                while done := next((grad_round for grad_round in self._due or () if not (complete and grad_round.has_pending)), None):
                    self._due.remove(grad_round := done)
                """,
            ),
        ],
    ),
    Fault(
        "13g-a-delay-that-was-right-before-torch-wrapped",
        sentence="A module that ran before torch's DistributedDataParallel wrapped it delays on, and its gradients stay local.",
        tests=[
            "tests/te_integration/foreign/test_torch_ddp.py::test_a_delayed_gradient_is_refused_where_the_module_ran_before_it_was_wrapped",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.delayed",
                "DelayedTarget.serves",
                "and not in_torch_ddp()",
                "",
            ),
        ],
    ),
    Fault(
        "13h-a-delay-in-recompute-under-torch",
        sentence="Under reentrant recompute the forward that delays runs in backward, where no wrapper of torch's is active.",
        tests=[
            "tests/te_integration/foreign/test_torch_ddp.py::test_a_delayed_gradient_is_refused_in_reentrant_recompute",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.torch_wrappers",
                "refuse_delay_in_recompute",
                "if _without_grad and current_backward() != NO_BACKWARD:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "13i-a-drain-decides-which-round-it-is",
        sentence="A unit that may have delayed gradients is reduced in backward on ranks that have none.",
        tests=[
            "tests/fsdp/iteration/test_delayed_units.py::test_some_ranks_alone_use_what_delays[zero3-modules]",
            "tests/fsdp/iteration/test_delayed_units.py::test_some_ranks_alone_use_what_delays[hsdp-queue]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds.leave",
                "if grad_round.delays or (grad_round.buckets[0].reduces_once and not final):",
                "if grad_round.has_pending or (grad_round.buckets[0].reduces_once and not final):",
            ),
        ],
    ),
    Fault(
        "13j-a-copy-calls-the-originals-provider",
        sentence="A copy of a module that delays tells the original's provider of its backward_dw.",
        tests=[
            "tests/te_integration/dense/test_split_hooks.py::test_a_copy_of_a_module_that_delays_calls_nobody_back",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.module",
                "DelayedWgradModule.__setstate__",
                'self.__dict__.pop("_after_backward_dw", None)',
                "",
            ),
        ],
    ),
]
