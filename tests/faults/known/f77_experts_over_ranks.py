"""Experts over ranks."""

from fault import Change, Fault

TESTS = "tests/te_integration/experts/dispatch/"
GRADIENTS = TESTS + "test_dispatcher.py::test_results_and_gradients_are_those_of_one_process"
EXACT = GRADIENTS + "[{}-Exact-{}-{}]"
STEPS = TESTS + "test_wrappers.py::test_five_clipped_steps_are_those_of_one_process"
ADJOINT = TESTS + "test_transports.py::test_a_send_and_its_way_back_are_adjoint"
OVERLAP = TESTS + "test_transports.py::test_weight_gradients_and_a_shared_expert_run_while_rows_travel"
DISPATCH = "maingrad.te_integration.experts.dispatch"

FAULTS = [
    Fault(
        "77a-gradients-of-experts-are-divided-by-their-own-ranks",
        sentence="Gradients of experts, which have seen the tokens of all ranks, are averaged over the ranks that hold them.",
        tests=[STEPS + "[DDP-4-2]", STEPS + "[ZeRO-1-4-2]"],
        changes=[
            Change(
                "maingrad.ddp.collectives.reduction",
                "make_reductions",
                'if kind in ("dense", "mean") else averaging',
                'if kind in ("dense", "mean", "expert") else averaging',
            )
        ],
    ),
    Fault(
        "77b-units-of-experts-are-averaged-over-their-own-ranks",
        sentence="Under fully_shard gradients of experts are averaged over the ranks that hold them.",
        tests=[STEPS + "[ZeRO-3-4-2]"],
        changes=[
            Change(
                "maingrad.fsdp.iteration.connect",
                "",
                "bucket.reduction.factor = 1.0 / units[0].grid.size",
                "bucket.reduction.factor = 1.0 / bucket.reduction.grid.size",
            )
        ],
    ),
    Fault(
        "77c-scores-get-no-gradient",
        sentence="Probabilities travel with the rows, and the gradients that other ranks compute for them do not come back.",
        tests=[EXACT.format("all_to_all", 2, "any")],
        changes=[
            Change(
                f"{DISPATCH}.dispatcher",
                "TokenDispatcher.dispatch",
                "received, *travelling)",
                "received, travelling[0], *[each.detach() for each in travelling[1:]])",
            )
        ],
    ),
    Fault(
        "77d-gradients-of-scores-are-those-of-this-rank",
        sentence="Each rank keeps the part of the scores' gradients that its own experts compute.",
        tests=[EXACT.format("all_to_all", 2, "any")],
        changes=[
            Change(
                f"{DISPATCH}.all_to_all",
                "AllToAll.send_back",
                "return self._exchange(travelling, meanwhile, sent.received, sent.sent, sent.rows)",
                """
        results = self._exchange(travelling, meanwhile, sent.received, sent.sent, sent.rows)
        for result in results:
            if result.dim() == 1:
                mine = sum(sent.sent[: self.group.rank()])
                result[:mine].zero_()
                result[mine + sent.sent[self.group.rank()] :].zero_()
        return results
""",
            )
        ],
    ),
    Fault(
        "77e-a-rank-without-rows-takes-no-part",
        sentence="A rank that has received no rows starts no exchange in backward, and the others wait for it.",
        tests=[EXACT.format("all_to_all", 4, "none to the last ranks")],
        changes=[
            Change(
                f"{DISPATCH}.all_to_all",
                "AllToAll.send_back",
                "        travelling = ",
                """
        if not len(tensors[0]):
            return [each.new_zeros(sent.rows, *each.shape[1:]) for each in tensors]
        travelling = """,
            )
        ],
    ),
    Fault(
        "77f-norms-count-experts-as-copies",
        sentence="A norm counts the experts of a rank as if all ranks held copies of them.",
        tests=[STEPS + "[DDP-4-2]", STEPS + "[DDP-8-4]"],
        changes=[
            Change(
                "maingrad.ddp.optimizer.grad_norm",
                "",
                "replicas = model.reductions[grid_name].num_replicas",
                'replicas = model.reductions["dense"].num_replicas',
            )
        ],
    ),
    Fault(
        "77g-empty-slots-are-multiplied-by-zero",
        sentence="What an empty slot holds is multiplied by zero: Inf there becomes NaN in a token.",
        tests=[ADJOINT],
        changes=[
            Change(
                f"{DISPATCH}.capacity",
                "Capacity.send_back",
                ".masked_fill_(sent.has_none.view(-1, *[1] * (tensor.dim() - 1)), 0)",
                ".mul_(~sent.has_none.view(-1, *[1] * (tensor.dim() - 1)))",
            )
        ],
    ),
    Fault(
        "77h-dropped-rows-hold-what-the-memory-held",
        sentence="Rows that went nowhere come back as the memory was, and are summed.",
        tests=[EXACT.format("all_to_all", 2, "dropped")],
        changes=[Change(f"{DISPATCH}.all_to_all", "Collective._exchange", "result[arriving:].zero_()", "pass")],
    ),
    Fault(
        "77i-received-rows-stay-in-the-order-of-senders",
        sentence="Rows of one expert are taken for another's, because each sender's rows begin with the first expert again.",
        tests=[EXACT.format("all_to_all", 2, "any")],
        changes=[
            Change(
                f"{DISPATCH}.all_to_all",
                "AllToAll.send",
                "return [to_experts(tensor, route.sorting) for tensor in arrived], route.sorting.splits, route",
                "return arrived, route.sorting.splits, route",
            )
        ],
    ),
    Fault(
        "77j-the-sum-of-copies-goes-back-by-another-way",
        sentence="In backward the output's gradients go to the ranks in the order of senders.",
        tests=[EXACT.format("all_to_all", 2, "any"), EXACT.format("capacity", 4, "any")],
        changes=[
            Change(f"{DISPATCH}.all_to_all", "to_experts", "sorting.places", "sorting.copies[:, None]"),
            Change(f"{DISPATCH}.all_to_all", "to_experts", "rows.index_select(0, sorting.copies)", "rows"),
        ],
    ),
    Fault(
        "77k-rows-beyond-the-capacity-overwrite-others",
        sentence="A row beyond the capacity of its expert is sent back from the last slot.",
        tests=[TESTS + "test_transports.py::test_rows_beyond_the_capacity_are_dropped_as_by_their_ids", ADJOINT],
        changes=[Change(f"{DISPATCH}.capacity", "Capacity._route", " | (place >= self.capacity)", "")],
    ),
    Fault(
        "77l-a-replay-keeps-the-capacity-count",
        sentence="Rows that are dropped in replays of a captured step are not counted.",
        tests=[TESTS + "test_transports.py::test_a_captured_step_replays_with_other_routing"],
        changes=[
            Change(
                f"{DISPATCH}.capacity",
                "Capacity._route",
                "self.num_dropped += counts.sum() - kept.sum()",
                "self.num_dropped = self.num_dropped + (counts.sum() - kept.sum())",
            )
        ],
    ),
    Fault(
        "77m-nothing-runs-while-rows-travel",
        sentence="Weight gradients and the shared expert wait for the rows.",
        tests=[OVERLAP],
        changes=[
            Change(
                f"{DISPATCH}.all_to_all",
                "Collective._exchange",
                """
        if meanwhile is not None:
            meanwhile()
        with self._reporter.watch("an exchange of experts' rows"):
            for work in works:
                work.wait()
""",
                """
        for work in works:
            work.wait()
        if meanwhile is not None:
            meanwhile()
""",
            )
        ],
    ),
    Fault(
        "77n-a-schedule-loses-its-weight-gradients",
        sentence="An exchange in backward drains a queue that a pipeline's schedule wants to drain later.",
        tests=[TESTS + "test_in_programs.py::test_a_queue_without_fill_waits_is_left_alone"],
        changes=[
            Change(
                "maingrad.te_integration.wgrad_queue",
                "filling",
                "None if queue is None or not queue.fill_waits else queue.fill",
                "None if queue is None else queue.fill",
            )
        ],
    ),
    Fault(
        "77o-splits-of-the-host-are-captured",
        sentence="A capture keeps the split sizes of its own routing.",
        tests=[TESTS + "test_transports.py::test_a_capture_refuses_splits_on_the_host_by_name"],
        changes=[
            Change(
                f"{DISPATCH}.all_to_all",
                "AllToAll._route",
                "if is_capturing() or (counts.is_cuda and torch.cuda.is_current_stream_capturing()):",
                "if False:",
            )
        ],
    ),
    Fault(
        "77p-a-rank-that-ends-is-not-named",
        sentence="A rank that ends between the exchanges is not named by those that wait for its rows.",
        tests=[TESTS + "test_in_programs.py::test_a_rank_that_raises_between_the_exchanges_is_named_by_all_others"],
        changes=[
            Change(
                f"{DISPATCH}.all_to_all",
                "Collective.__init__",
                "self._reporter = FailureReporter()",
                "self._reporter = FailureReporter(); self._reporter.active = False",
            ),
        ],
    ),
    Fault(
        "77q-gradients-of-rows-travel-wide",
        sentence="Under a recipe rows travel in 8 bits, and their gradients in 16.",
        tests=[TESTS + "test_quantized_rows.py::test_products_of_rows_have_the_same_bits"],
        changes=[
            Change(
                f"{DISPATCH}.dispatcher", "TokenDispatcher.combine", "self.transport, of_grad", "self.transport, None"
            )
        ],
    ),
    Fault(
        "77r-rows-in-8-bits-lose-their-scales",
        sentence="Rows in 8 bits are read by the scales of other rows.",
        tests=[TESTS + "test_quantized_rows.py::test_products_of_rows_have_the_same_bits"],
        changes=[
            Change(
                f"{DISPATCH}.quantized_rows",
                "send_rows",
                "scale.view(q.scale.dtype)",
                "scale.view(q.scale.dtype).flip(0)",
            )
        ],
    ),
    Fault(
        "77s-a-compiler-merges-exchanges",
        sentence="A compiled graph has one of two equal exchanges, and none whose rows nobody reads: other ranks wait.",
        tests=[TESTS + "test_in_programs.py::test_a_compiled_graph_keeps_every_exchange"],
        changes=[
            Change(
                "maingrad.te_integration.torch_internals",
                "make_effectful_op",
                "_give_effect(op, _effect_type.ORDERED)",
                "pass",
            ),
        ],
    ),
    Fault(
        "77t-a-graph-recomputes-its-exchanges",
        sentence="A compiled graph holds the exchanges of a region that it recomputes, and fails in torch.",
        tests=[TESTS + "test_in_programs.py::test_a_graph_that_holds_its_exchanges_has_the_same_gradients"],
        changes=[
            Change(
                "maingrad.te_integration.torch_internals",
                "is_tracing_recomputed",
                "is torch.ops.higher_order.tag_activation_checkpoint",
                "is torch.ops.higher_order.wrap",
            ),
        ],
    ),
    Fault(
        "77u-a-wait-empties-the-queue",
        sentence="The second exchange of a layer computes all that waits, and the first one of the layer before has nothing.",
        tests=[TESTS + "test_transports.py::test_weight_gradients_and_a_shared_expert_run_while_rows_travel"],
        changes=[
            Change(
                "maingrad.te_integration.wgrad_queue",
                "WgradQueue.drain_half",
                "entries[: -(-len(entries) // 2)]",
                "entries",
            ),
        ],
    ),
    Fault(
        "77v-each-block-fills-its-own-waits-alone",
        sentence="Blocks have a queue each: the first exchange of a block never has another's weight gradients beside it.",
        tests=[
            "tests/launch/model/test_moe.py::test_delayed_weight_gradients_of_experts_are_computed_while_rows_travel"
        ],
        changes=[
            Change(
                "maingrad.launch.model.moe",
                "MixtureOfExperts.share_experts",
                "self.experts.wgrad_queue = queue",
                "self.experts.wgrad_queue.fill_waits = True",
            ),
        ],
    ),
    Fault(
        "77w-rows-travel-with-what-pads-them",
        sentence="Rows in 8 bits have other widths on a rank with one row or none, which no kernel quantises.",
        tests=[TESTS + "test_quantized_rows.py::test_ranks_whose_kernels_pad_and_ranks_whose_do_not"],
        changes=[
            Change(f"{DISPATCH}.quantized_rows", "send_rows", "tensor[: len(rows), :width]", "tensor[: len(rows)]"),
        ],
    ),
]
