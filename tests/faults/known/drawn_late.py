"""More like ``drawn_under_ddp.py``: a third draw, of what programs read, write by hand and keep."""

from fault import Change, Fault

FAULTS = [
    Fault(
        "50i-inf-of-the-first-models-ranks",
        sentence="Inf is looked for among the ranks of the first of two models alone.",
        tests=["tests/fsdp/tensors/test_grad_reads.py::test_inf_is_found_among_the_ranks_of_each_of_two_models"],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.grad_reads",
                "_check_and_unscale",
                "{grid.groups: grid for grid in grids}.values()",
                "list({grid.groups: grid for grid in grids}.values())[:1]",
            ),
        ],
    ),
    Fault(
        "28q-norms-lose-their-dims",
        sentence="A norm with keepdim has no dims.",
        tests=["tests/fsdp/tensors/test_grad_reads.py::test_a_norm_keeps_the_dims_of_the_whole"],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.grad_reads",
                "_norm",
                "if keepdim else norm",
                "if False else norm",
            ),
        ],
    ),
    Fault(
        "23t-a-kept-view-does-not-wait",
        sentence="A view of .grad is read while the next microbatch's reduction writes it.",
        tests=[
            "tests/fsdp/tensors/test_grad_reads.py::test_a_view_that_the_program_has_kept_waits_for_the_next_microbatch"
        ],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.sharded_grad",
                "ShardedGrad.marked",
                """
                if shares:
                    marked.sums = self.sums
                """,
                "pass",
            ),
        ],
    ),
    Fault(
        "24g-an-inner-step-ends-the-outer",
        sentence="After an inner optimizer's step the outer one's reads are collective.",
        tests=["tests/fsdp/tensors/test_grad_reads.py::test_a_step_within_a_step_leaves_the_outer_one_local"],
        changes=[
            Change(
                "maingrad.ddp.torch_grads.sharded_grad",
                "step_ended",
                "if optimizer is None or _step.optimizer == id(optimizer):",
                "if True:",
            ),
        ],
    ),
    Fault(
        "28r-grad-by-hand-outlives-zero-grad",
        sentence="model.zero_grad() leaves what the program has put into .grad.",
        tests=[
            "tests/ddp/torch_grads/test_zeroing.py::test_zero_grad_of_the_wrapper_clears_what_was_put_there_by_hand"
        ],
        changes=[
            Change(
                "maingrad.ddp.wrapper.attachment",
                "discard_grads",
                "entry.owned.param.grad = None",
                "pass",
            ),
        ],
    ),
    Fault(
        "16zc-a-cast-before-the-capture-is-replayed",
        sentence="A captured layer reads what autocast has cast before the capture, in every replay.",
        tests=[
            "tests/te_integration/graphs/test_callables.py::test_a_cast_from_before_the_capture_is_made_anew_in_replays"
        ],
        changes=[
            Change(
                "maingrad.ddp.graphs.capture",
                "CapturedGraph.capture",
                "torch.clear_autocast_cache()  # casts made before",
                "pass  # casts made before",
            ),
        ],
    ),
    Fault(
        "49e-ties-on-meta-are-two",
        sentence="A tied parameter from the meta device is one for each module that initialises it.",
        tests=["tests/fsdp/unit/test_meta.py::test_a_tied_parameter_is_initialised_once"],
        changes=[
            Change(
                "maingrad.fsdp.unit.materialize",
                "materialize",
                "_, module._parameters[name] = made.setdefault(id(param), (param, fresh))",
                "module._parameters[name] = fresh",
            ),
        ],
    ),
    Fault(
        "45g-writes-come-back-from-a-block-that-raised",
        sentence="Half of what a block was to write is copied into the shards.",
        tests=["tests/fsdp/unit/test_whole_writes.py::test_writes_in_unsharded_come_back_unless_its_block_raises"],
        changes=[
            Change(
                "maingrad.fsdp.module",
                "FSDPModule.unsharded",
                """
                writeback = False
                """,
                "",
            ),
        ],
    ),
    Fault(
        "45h-writes-in-unsharded-are-a-forwards",
        sentence="What was written within unsharded() is held against the next forward.",
        tests=["tests/fsdp/unit/test_whole_writes.py::test_writes_in_unsharded_are_not_held_against_the_next_forward"],
        changes=[
            Change(
                "maingrad.fsdp.module",
                "FSDPModule.reshard",
                """
                each.writes.note()
                """,
                "",
            ),
        ],
    ),
    Fault(
        "24h-unshard-crosses-delayed-gradients",
        sentence="unshard() gathers while another rank reduces delayed gradients.",
        tests=[
            "tests/fsdp/iteration/test_delayed_units.py::test_24_what_would_cross_with_delayed_gradients_is_refused_on_all_ranks[zero3-unsharded-False]"
        ],
        quick=[
            "tests/fsdp/iteration/test_delayed_units.py::test_24_what_would_cross_with_delayed_gradients_is_refused_on_all_ranks[zero3-unsharded-False]"
        ],
        changes=[
            Change(
                "maingrad.fsdp.module",
                "FSDPModule.unshard",
                """
                root.grads.check_delays_are_over("unshard()")
                """,
                "",
            ),
        ],
    ),
]
