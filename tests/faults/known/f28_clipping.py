from fault import Change, Fault

FAULTS = [
    Fault(
        "28a-what-is-not-shown-is-not-clipped",
        sentence="torch's clipping skips parameters without .grad: the norm is 0, and nothing is clipped.",
        tests=[
            "tests/ddp/torch_grads/test_stock_clipping.py::test_every_clip_is_plain_pytorchs[2-{}-clip_grad_norm_]",
            "tests/ddp/torch_grads/test_stock_clipping.py::test_every_clip_is_plain_pytorchs[2-{}-clip_grad_value_]",
            "tests/ddp/wrapper/test_plain_loop.py::test_logged_norms_are_those_of_the_whole_batch[ddp]",
        ],
        changes=[
            Change("maingrad.ddp.buckets.reducer", "Readiness._show", "self._shown.show()", "pass"),
        ],
    ),
    Fault(
        "28b-a-read-does-not-wait-for-the-reduction",
        sentence="A first read of .grad takes what this rank has summed, and not all ranks' sum.",
        tests=[
            "tests/ddp/torch_grads/test_stock_clipping.py::test_every_clip_is_plain_pytorchs[2-{}-clip_grad_norm_]",
            "tests/ddp/wrapper/test_plain_loop.py::test_each_optimizer_trains_as_in_plain_pytorch[ddp-2-sgd-1]",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.shown_params", "ShownGrads.finish_reduction", "self._finish_reduction()", ""
            ),
        ],
    ),
    Fault(
        "28c-a-norm-is-that-of-one-ranks-shard",
        sentence="Under ZeRO-1 torch's clipping takes the norm of this rank's elements for that of the whole gradient.",
        tests=[
            "tests/ddp/torch_grads/test_stock_clipping.py::test_every_clip_is_plain_pytorchs[2-{'use_distributed_optimizer': True}-clip_grad_norm_]",
            "tests/ddp/wrapper/test_plain_loop.py::test_logged_norms_are_those_of_the_whole_batch[zero1]",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.shown_params",
                "ShownGrads.fill",
                "each.note(make_sharded_grad(*each.part))",
                "each.note(each.part[0].view(-1))",
            ),
        ],
    ),
    Fault(
        "28d-cancelled-gradients-come-back",
        sentence="A .grad that a program has set to None before clipping is there again after it.",
        tests=[
            "tests/ddp/wrapper/test_plain_loop.py::test_what_is_done_to_grad_is_what_steps[ddp-cancelled-before_clip]",
        ],
        quick=[
            "tests/ddp/wrapper/test_plain_loop.py::test_what_is_done_to_grad_is_what_steps[ddp-cancelled-before_clip]",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.shown_params",
                "ShownGrads.expose",
                "(param.grad is not None and (param.grad is grad or param.grad is grad.reduced))",
                "param.grad is grad or param.grad is grad.reduced",
            ),
        ],
    ),
    Fault(
        "28e-replaced-gradients-are-not-stepped",
        sentence="DistributedOptimizer steps with main_grad, and another tensor that a program has put into .grad is lost.",
        tests=[
            "tests/ddp/wrapper/test_plain_loop.py::test_what_is_done_to_grad_is_what_steps[ddp_own-replaced-before_clip]",
            "tests/ddp/torch_grads/test_written_masters.py::test_a_whole_gradient_that_is_put_in_place_of_another_is_stepped",
            "tests/ddp/torch_grads/test_stock_clipping.py::test_what_is_put_into_grad_before_our_clipping_is_clipped",
        ],
        quick=[
            "tests/ddp/wrapper/test_plain_loop.py::test_what_is_done_to_grad_is_what_steps[ddp_own-replaced-before_clip]",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration.finish_and_take_changes",
                "self.shown.take_changes()",
                "",
            ),
        ],
    ),
    Fault(
        "28f-kept-gradients-are-zeroed",
        sentence="A program keeps .grad over the end of an iteration, and finds zeros, or the next iteration's gradient.",
        tests=[
            "tests/ddp/wrapper/test_plain_loop.py::test_gradients_that_the_program_keeps_hold_their_values_in_later_iterations[ddp-2-before_clip]",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.shown_params",
                "_keep_own",
                "sys.getrefcount(each.spare) > _alone()",
                "False",
            ),
            Change(
                "maingrad.ddp.torch_grads.shown_params",
                "_keep_own",
                "sys.getrefcount(each.plain) > _alone()",
                "False",
            ),
        ],
    ),
    Fault(
        "28g-cleared-gradients-are-added-to",
        sentence="zero_grad sets every .grad to None, and the next backward adds to the gradients of before.",
        tests=[
            "tests/ddp/torch_grads/test_zeroing.py::test_zero_grad_after_a_backward_for_something_else_discards_it[sgd-1-False]",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration.begin_if_cleared",
                "if self.shown.is_cleared:",
                "if False:",
            ),
            Change(
                "maingrad.ddp.torch_grads.shown_params",
                "ShownGrads.unfill",
                "self._cleared.append(each)",
                "pass",
            ),
        ],
    ),
    Fault(
        "28h-unused-parameters-are-reduced-behind-the-programs-collectives",
        sentence="What a rank has not used is launched by its step alone, behind collectives of the program.",
        tests=[
            "tests/ddp/buckets/test_end_of_backward.py::test_a_collective_of_the_program_comes_behind_all_reductions"
        ],
        changes=[
            Change("maingrad.ddp.buckets.reducer", "Readiness._show", "self._launcher.on_backward_over()", "pass"),
        ],
    ),
    Fault(
        "28i-a-gradient-by-hand-is-lost-under-the-shown-one",
        sentence="Where no backward reaches a parameter, a gradient that was put there by hand is overwritten silently.",
        tests=[
            "tests/ddp/buckets/test_end_of_backward.py::test_a_gradient_by_hand_of_what_no_backward_reaches_is_refused"
        ],
        changes=[
            Change("maingrad.ddp.torch_grads.shown_params", "ShownGrads.show", "each.param.grad is not None or ", ""),
        ],
    ),
    Fault(
        "28j-our-clipping-scales-what-is-not-stepped",
        sentence="A tensor that a program has put into .grad stays there unscaled when our clipping scales main_grad.",
        tests=[
            "tests/ddp/torch_grads/test_stock_clipping.py::test_what_is_put_into_grad_before_our_clipping_is_clipped",
        ],
        quick=[
            "tests/ddp/torch_grads/test_stock_clipping.py::test_what_is_put_into_grad_before_our_clipping_is_clipped[False-None-replaced]",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.shown_params",
                "ShownGrads.take_changes",
                "if each.param.grad is not None:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "28l-memory-that-the-program-gives-is-lost",
        sentence="`param.grad.data = ...` gives a reduced gradient other memory, which the step does not read.",
        tests=[
            "tests/ddp/wrapper/test_plain_loop.py::test_what_is_done_to_grad_is_what_steps[ddp_own-with_other_memory-before_clip]"
        ],
        quick=[
            "tests/ddp/wrapper/test_plain_loop.py::test_what_is_done_to_grad_is_what_steps[ddp_own-with_other_memory-before_clip]"
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.shown_params",
                "ShownParam.is_changed",
                "return address != self.memory[0] or (version != self.memory[1] and address != self.target.data_ptr())",
                "return False",
            ),
        ],
    ),
    Fault(
        "28m-results-have-the-shards-shape",
        sentence="Element-wise results of a sharded gradient are flat under ZeRO-1, and torch refuses them as `.grad`.",
        tests=[
            "tests/ddp/wrapper/test_plain_loop.py::test_what_is_done_to_grad_is_what_steps[zero1-replaced-before_clip]"
        ],
        quick=[
            "tests/ddp/wrapper/test_plain_loop.py::test_what_is_done_to_grad_is_what_steps[zero1-replaced-before_clip]"
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.shown_grad",
                "ShownGrad.__torch_function__",
                "return reads[id(leaf)] if id(leaf) in reads else _shown(leaf)",
                "return leaf",
            ),
        ],
    ),
    Fault(
        "28n-a-failed-backward-counts-on",
        sentence="A backward that raised is taken for under way after zero_grad(), and .grad stays None after the next one.",
        tests=[
            "tests/ddp/buckets/test_end_of_backward.py::test_after_a_backward_that_failed_a_module_that_is_called_directly_shows_its_gradients",
        ],
        changes=[
            Change(
                "maingrad.ddp.buckets.reducer",
                "Readiness.reset",
                "self._checked = self._counts = False",
                "self._checked = False",
            ),
        ],
    ),
    Fault(
        "28s-a-failed-backward-is-cleared-by-one-rank",
        sentence="After a backward that raised, zero_grad() leaves reductions under way that other ranks have not launched.",
        tests=[
            "tests/ddp/buckets/test_end_of_backward.py::test_a_backward_that_failed_after_other_launches_on_each_rank_is_given_up",
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.iteration",
                "BucketIteration.zero_grad_buffer",
                "if self.has_failed:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "28t-reduced-values-are-taken-for-the-programs",
        sentence="A second backward is refused where it begins with a parameter that other ranks alone have trained so far.",
        tests=[
            "tests/ddp/buckets/test_end_of_backward.py::test_a_second_backward_may_begin_with_what_the_first_has_not_reached",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.record",
                "GradRecord.open_for_write",
                "written_already or self.closed)",
                "written_already)",
            ),
        ],
    ),
]
