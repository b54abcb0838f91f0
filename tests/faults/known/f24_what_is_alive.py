from fault import Change, Fault

FAULTS = [
    Fault(
        "24a-graphs-that-are-alive-postpone-a-reduction",
        sentence="Graphs that are still alive count as uses that backward will come to: ranks that keep outputs reduce later than others.",
        tests=[
            "tests/fsdp/iteration/test_what_is_alive.py::test_an_exception_is_stored_on_rank_0[zero3]",
            "tests/fsdp/iteration/test_what_is_alive.py::test_any_program[0-hsdp]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.hooks",
                "ForwardTrace.comes_again",
                """
                mine = self._forwards_of[id(forward.unit)]
                return len(mine) > 1 and not all(self.is_passed(other, task) for other in mine)
                """,
                "return any(not self.is_passed(other.forward, task) for other in _alive if other.forward.unit is forward.unit)",
            ),
            Change(
                "maingrad.fsdp.iteration.hooks",
                "",
                "class BackwardHooks:",
                """
                _alive: "weakref.WeakSet[BackwardHooks]" = weakref.WeakSet()


                class BackwardHooks:
                """,
            ),
            Change(
                "maingrad.fsdp.iteration.hooks",
                "BackwardHooks.__init__",
                "self.trace = trace",
                """
                self.trace = trace
                _alive.add(self)
                """,
            ),
        ],
    ),
    Fault(
        "24b-cleared-gradients-are-not-reduced",
        sentence="A rank that has cleared .grad in the middle of an iteration takes no part in its reductions.",
        tests=[
            "tests/fsdp/iteration/test_what_is_alive.py::test_gradients_are_cleared_on_rank_0[zero1]",
            "tests/fsdp/iteration/test_what_is_alive.py::test_gradients_are_cleared_on_rank_0[zero3 once]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds.finish_grad_sync",
                "self._notice_all_cleared()",
                "",
            ),
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds._send_due",
                "self._notice_cleared(grad_round)",
                """
                if any(bucket.grad_shard.was_cleared for bucket in grad_round.buckets):
                    continue
                """,
            ),
        ],
    ),
    Fault(
        "24c-gradients-are-read-before-they-arrive",
        sentence="Between microbatches .grad is read, or zeroed in place, while a reduction is about to add to it.",
        tests=[
            "tests/fsdp/iteration/test_iterations.py::test_what_users_do_to_gradients_between_microbatches_comes_after_what_is_under_way[zero2]",
        ],
        quick=[
            "tests/fsdp/iteration/test_iterations.py::test_what_users_do_to_gradients_between_microbatches_comes_after_what_is_under_way[zero2]",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.sharded_grad",
                "ShardedGrad.__torch_function__",
                """
                if being_reduced:
                    _arrive((args, kwargs))
                """,
                "",
            ),
        ],
    ),
    Fault(
        "24d-a-branch-decides-where-backward-comes",
        sentence="A unit whose data has led to frozen layers is not in the graph: backward comes to other units than on other ranks.",
        tests=[
            "tests/fsdp/iteration/test_branches.py::test_a_branch_to_what_is_frozen_on_some_ranks[zero3-(0, 1, 0, 0)]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.hooks",
                "BackwardHooks.watch_outputs",
                """
                outputs = tree_map(_with_graph, outputs)
                tensors = _tensors_of(outputs)
                """,
                "pass",
            ),
        ],
    ),
    Fault(
        "24e-thrown-away-gradients-refuse-the-next-microbatches",
        sentence="Delayed gradients of an iteration that was thrown away are remembered: a forward in the middle of the next one is refused.",
        tests=[
            "tests/fsdp/iteration/test_delayed_units.py::test_a_step_that_is_skipped_after_its_delayed_gradients_leaves_the_next_iteration_its_microbatches[zero3]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds.check_delays_are_over",
                """
                if self._due is None:  # all .grad were set to None
                    self._delayed_in = None
                """,
                "",
            ),
        ],
    ),
]
