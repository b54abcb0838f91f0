"""Faults of the head with its loss."""

from fault import Change, Fault

TESTS = "tests/te_integration/head/test_linear_cross_entropy.py"
IN_FORWARD = "tests/te_integration/head/test_in_forward.py"
CHUNKS = "maingrad.kernels.cross_entropy.chunks"
AHEAD = "maingrad.te_integration.head.written_ahead"

FAULTS = [
    Fault(
        "65a-a-chunk-is-lost",
        sentence="Each chunk overwrites main_grad where the first write of an iteration does.",
        tests=[f"{TESTS}::test_weights_for_each_token"],
        changes=[Change(CHUNKS, "head_grads", "overwrite=fresh and chunk.start == 0", "overwrite=fresh")],
    ),
    Fault(
        "65b-a-tied-weight-is-written-twice",
        sentence="The head writes main_grad, and autograd adds the same gradient.",
        tests=[f"{TESTS}::test_a_tied_weight_is_summed"],
        changes=[
            Change(
                "maingrad.te_integration.head.recomputing",
                "_Recomputed.backward",
                "(dw,) = weight_grads(ctx, wanted, places, (work,))",
                """
                (dw,) = weight_grads(ctx, wanted, places, (work,))
                dw = work.weight_grad(ctx.weight_dtype) if needs_dw and dw is None else dw
                """,
            ),
        ],
    ),
    Fault(
        "65c-ignored-tokens-count",
        sentence="The mean is over all tokens.",
        tests=[
            f"{TESTS}::test_autocast_casts_as_a_linear_layer",
            f"{TESTS}::test_without_a_provider_autograd_delivers",
        ],
        changes=[
            Change(
                "maingrad.te_integration.head.linear_cross_entropy",
                "_count",
                "(targets != ignore_index).sum() if num_tokens is None else num_tokens",
                "targets.numel() if num_tokens is None else num_tokens",
            ),
        ],
    ),
    Fault(
        "65d-the-upstream-gradient-is-taken-for-1",
        sentence="Backward multiplies by no gradient of the loss.",
        tests=[f"{TESTS}::test_weights_for_each_token"],
        changes=[
            Change(
                "maingrad.te_integration.head.recomputing",
                "_Recomputed.backward",
                "work: Any = HeadWork(head, grads[0], lse,",
                "work: Any = HeadWork(head, torch.ones_like(grads[0]), lse,",
            ),
        ],
    ),
    Fault(
        "65e-another-gradient-than-the-announced-one-passes",
        sentence="Backward does not compare the gradient that came with the one that forward was told.",
        tests=[f"{IN_FORWARD}::test_another_gradient_than_the_announced_one_is_refused"],
        changes=[
            Change(
                "maingrad.te_integration.head.in_forward",
                "poison_of",
                "fits = (close | (targets == ignore_index)).all()",
                "fits = (close | True).all()",
            ),
        ],
    ),
    Fault(
        "65f-chunks-are-summed-in-bf16",
        sentence="Each chunk's dW is rounded to a bf16 accumulator: 256 + 1 - 256 is 0.",
        tests=[f"{TESTS}::test_chunks_of_a_bf16_gradient_are_summed_in_fp32"],
        changes=[
            Change(
                CHUNKS,
                "head_grads",
                "torch.promote_types(main_grad.dtype, torch.float32) is not main_grad.dtype",
                "False",
            ),
        ],
    ),
    Fault(
        "65g-a-recompute-writes-again",
        sentence="Non-reentrant recompute runs the forward again, which adds dW once more.",
        tests=[f"{IN_FORWARD}::test_a_recompute_writes_once"],
        changes=[
            Change(
                "maingrad.te_integration.head.in_forward",
                "losses_in_forward",
                "recomputes = current_backward() != NO_BACKWARD and any(again for _, again in checkpointed_regions())",
                "recomputes = False",
            ),
        ],
    ),
    Fault(
        "65h-what-a-forward-wrote-stays",
        sentence="What a forward wrote whose backward does not come is added to the next gradient.",
        tests=[f"{IN_FORWARD}::test_a_forward_whose_graph_is_gone_is_taken_back"],
        changes=[Change(AHEAD, "WrittenAhead.drop_abandoned", "record.written = False", "")],
    ),
    Fault(
        "65i-cleared-gradients-are-taken-for-written",
        sentence="A backward whose forward's gradient was cleared goes on without a weight gradient.",
        tests=[f"{IN_FORWARD}::test_an_exception_between_forward_and_backward"],
        changes=[
            Change(AHEAD, "deliver_written", "or mine not in ahead.tokens:", "or False:"),
            Change(AHEAD, "deliver_written", "ahead.tokens.remove(mine)", "ahead.tokens.clear()"),
        ],
    ),
]
