from fault import Change, Fault

FAULTS = [
    Fault(
        "33a-hooks-of-shards-are-never-called",
        sentence="A hook that a sharded parameter accepts is never called: an optimizer in backward trains nothing.",
        tests=[
            "tests/fsdp/tensors/test_grad_hooks.py::test_an_optimizer_in_backward_trains_as_in_plain_pytorch[1-zero3]",
        ],
        changes=[
            Change(
                "maingrad.fsdp.iteration.rounds",
                "GradRounds._finish",
                "call_grad_hooks(pair.sharded for bucket in self._buckets for pair in bucket.pairs)",
                "",
            ),
        ],
    ),
    Fault(
        "33b-shards-take-any-optimizer",
        sentence="An optimizer with sums over a parameter steps by the sums of each rank's shard.",
        tests=[
            "tests/fsdp/tensors/test_grad_hooks.py::test_sums_over_a_parameter_are_refused_on_all_ranks_alike_and_right_over_whole_ones",
        ],
        changes=[
            Change(
                "maingrad.fsdp.state.optimizer_watch",
                "check_class",
                """
                if why is not None:
                    raise RuntimeError(why)
                """,
                "",
            ),
        ],
    ),
    Fault(
        "33c-what-is-made-of-a-shard-is-none",
        sentence="What is made of a sharded gradient is a plain tensor, whose norms and sums are those of one rank.",
        tests=[
            "tests/fsdp/tensors/test_grad_reads.py::test_a_read_is_that_of_the_whole_gradient",
        ],
        quick=[
            "tests/fsdp/tensors/test_grad_reads.py::test_a_read_is_that_of_the_whole_gradient[data]",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.grad_reads",
                "on_elements",
                "return made if written is not None else tree_map(like.marked, made)",
                "return made",
            ),
        ],
    ),
    Fault(
        "33d-a-plain-gradient-is-clipped-by-one-rank",
        sentence="A plain tensor that is put into the .grad of a sharded parameter stays plain: each rank clips by a norm of its own.",
        tests=[
            "tests/fsdp/tensors/test_grad_reads.py::test_what_is_put_into_grad_is_clipped_and_stepped_as_the_whole",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.sharded_grad",
                "adopt_grad",
                "return grad if grad.requires_grad else _as_shard(grad, info)",
                "return grad",
            ),
        ],
    ),
    Fault(
        "33e-masters-are-written-on-one-rank",
        sentence="A program writes to the tensors of a sharded optimizer's groups: ranks go on with different weights.",
        tests=[
            "tests/ddp/torch_grads/test_written_masters.py::test_what_is_written_to_masters_reaches_all_ranks_or_is_refused",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.master_param",
                "WatchedMasters.check",
                "self.written() if self.follow_late else ()",
                "()",
            ),
        ],
    ),
    Fault(
        "33f-grad-data-takes-the-accumulator-away",
        sentence="Somebody sets .grad.data of an exposed gradient: backward accumulates into memory that is never reduced.",
        tests=[
            "tests/ddp/torch_grads/test_closures.py::test_what_is_done_to_a_gradient_is_stepped_and_gone_in_the_next_iteration",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.optimizer",
                "expose_grad",
                "record.view.detach() if same",
                "record.view if same",
            ),
        ],
    ),
    Fault(
        "33g-nobody-looks-after-a-closure",
        sentence="A closure leaves gradients in main_grad, and the step after it skips every parameter.",
        tests=[
            "tests/ddp/torch_grads/test_closures.py::test_a_closure_may_leave_the_last_reduction_to_the_step",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.optimizer",
                "after_closure.checked",
                "then()",
                "",
            ),
        ],
    ),
    Fault(
        "33h-a-late-hook-sees-no-gradient",
        sentence="A hook that is registered on a fused weight after the forward is called with None.",
        tests=[
            "tests/ddp/contract/test_hooks_and_kinds.py::test_a_hook_on_a_fused_weight_sees_and_changes_its_gradient[after forward-0]",
        ],
        changes=[
            Change(
                "maingrad.ddp.contract.main_grad",
                "WgradTarget.place",
                "if has_tensor_hooks(weight):  # registered after the forward: the hook must get the gradient",
                "if False:  # registered after the forward: the hook must get the gradient",
            ),
        ],
    ),
    Fault(
        "33i-functions-of-autograd-take-shards",
        sentence="A torch.autograd.Function takes a sharded parameter for the whole one: a fused loss has the classes of one rank.",
        tests=[
            "tests/fsdp/unit/test_bad_input.py::test_a_parameter_given_to_a_function_of_autograd_outside_its_unit",
            "tests/fsdp/tensors/test_sharded_tensors.py::test_a_function_of_autograd_refuses_what_leads_to_values",
        ],
        changes=[
            Change(
                "maingrad.fsdp.tensors.parameter",
                "_Guard.__get__",
                "return disabled_torch_function if is_forward_ad_enabled() or _is_inference() else _checked_in_function",
                "return disabled_torch_function",
            ),
        ],
    ),
    Fault(
        "33j-a-sum-is-that-of-one-ranks-elements",
        sentence="Sums, rows and products of a sharded gradient are those of one rank's elements.",
        tests=[
            "tests/fsdp/tensors/test_whole_grad_reads.py::test_what_needs_rows_positions_or_all_elements_names_the_whole_gradient",
            "tests/ddp/torch_grads/test_reads_of_parts.py::test_a_read_is_that_of_the_whole_gradient_or_names_it",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.grad_reads",
                "_keeps_elements",
                "return name not in _NO_ELEMENTS and (_is_elementwise(bare) or _is_elementwise(_in_place_or_reversed(name)))",
                "return True",
            ),
        ],
    ),
    Fault(
        "33l-a-whole-operand-is-taken-for-a-part",
        sentence="Of a whole tensor beside a sharded gradient the first elements are taken, on every rank.",
        tests=[
            "tests/fsdp/tensors/test_whole_grad_reads.py::test_whole_operands_change_this_ranks_elements_in_place",
            "tests/ddp/torch_grads/test_reads_of_parts.py::test_whole_tensors_beside_a_part",
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.over_ranks",
                "ShardInfo.cut",
                "return values.reshape(-1)[self.start : self.end]",
                "return values.reshape(-1)[: self.numel]",
            ),
        ],
    ),
]
