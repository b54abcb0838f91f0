"""Linear layers over tensor-parallel ranks."""

from fault import Change, Fault

TESTS = "tests/te_integration/dense/test_tensor_parallel.py::"
GRADIENTS = TESTS + "test_gradients_are_those_of_whole_layers"
LAYERS = "maingrad.te_integration.dense.tensor_parallel"

FAULTS = [
    Fault(
        "76a-the-gradient-of-the-input-is-one-ranks-part",
        sentence="A fused column-parallel layer sends back what its own columns give, and does not sum over the ranks.",
        tests=[GRADIENTS + "[fused-False]"],
        changes=[Change(LAYERS, "_Columns.backward", "dx = ranks.start_sum(dx, in_place=True)", "pass")],
    ),
    Fault(
        "76b-the-input-of-another-microbatch",
        sentence="The sequence that was gathered for the first microbatch serves the weight gradients of the second.",
        tests=[GRADIENTS + "[fused-True]"],
        changes=[
            Change(
                LAYERS,
                "_Columns.backward",
                "gathering = None if x is None else ranks.start_gather(cast(x, dy.dtype))",
                """
                gathering = None if x is None else ranks.start_gather(cast(x, dy.dtype))
                _Columns.__dict__.get("kept") or setattr(_Columns, "kept", {})
                gathering = _Columns.kept.setdefault((use.owner, ranks.rank), gathering)
                """,
            )
        ],
    ),
    Fault(
        "76c-each-rank-adds-the-bias",
        sentence="The bias of a row-parallel layer is part of each rank's product, and so of the sum once for each rank.",
        tests=[GRADIENTS + "[fused-False]"],
        changes=[
            Change(LAYERS, "multiply_over_ranks", "multiply(input, weights, None)", "multiply(input, weights, bias)"),
            Change(
                LAYERS, "multiply_over_ranks", "output if bias is None else output + cast(bias, output.dtype)", "output"
            ),
        ],
    ),
    Fault(
        "76d-an-unfused-layer-sums-nothing",
        sentence="Where autograd delivers the weight gradient, the gradient of the input is one rank's part.",
        tests=[GRADIENTS + "[unfused-False]"],
        changes=[
            Change(LAYERS, "_Exchange.backward", "_exchanged(grads[0], *ctx.arguments)", "grads[0].clone()"),
        ],
    ),
    Fault(
        "76e-a-compiled-layer-sums-nothing",
        sentence="In a compiled backward the gradient of the input is one rank's part.",
        tests=[GRADIENTS + "[compiled-False]"],
        changes=[
            Change(
                "maingrad.te_integration.dense.compiled_linear",
                "_CompiledLinear.backward",
                "dx = dx if ranks is None else ranks.start_sum(dx)",
                "pass",
            )
        ],
    ),
    Fault(
        "76f-nobody-knows-that-a-gradient-is-a-part",
        sentence="Norms and biases that see a part of the sequence have no mark, and train on that part.",
        tests=[GRADIENTS + "[fused-True]"],
        changes=[Change(LAYERS, "TensorParallelModule.set_marks", "self.ranks.sequence_dim is not None", "False")],
    ),
    Fault(
        "76g-gate-and-up-are-cut-as-one",
        sentence="The first rank has the gate of a gated activation, and the second what it multiplies.",
        tests=[TESTS + "test_a_gated_weight_is_two_blocks_each_of_which_is_cut", GRADIENTS + "[fused-False]"],
        changes=[Change(LAYERS, "_cut_over_ranks", "2 if gated else 1", "1")],
    ),
    Fault(
        "76i-a-plain-input-gets-one-ranks-part",
        sentence="A layer that torch has cut takes a plain input, and sends back what its own columns give.",
        tests=[TESTS + "test_a_backward_computes_while_its_collectives_run[torch's-False]"],
        changes=[
            Change(
                "maingrad.ddp.plan.tensor_parallel.products",
                "multiply",
                "_multiply_columns(module, x)",
                "module.multiply_slice(x, module.bias)",
            )
        ],
    ),
    Fault(
        "76h-the-weight-gradient-waits-for-the-inputs",
        sentence="The gradient of the input is summed after the weight gradient is computed, and nothing overlaps.",
        tests=[TESTS + "test_a_backward_computes_while_its_collectives_run[fused-False]"],
        changes=[
            Change(LAYERS, "_Columns.backward", "dx = ranks.start_sum(dx, in_place=True)", "pass"),
            Change(
                LAYERS, "_Columns.backward", "dx = ranks.finish_sum(dx)", "dx = ranks.finish_sum(ranks.start_sum(dx))"
            ),
        ],
    ),
]
