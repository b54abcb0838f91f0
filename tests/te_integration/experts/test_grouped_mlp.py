"""``GroupedMLP`` against fp64 and against a loop over experts: every layout, split, dtype and gradient mode."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from expert_mlp import FFN, HIDDEN, LAYOUTS, SPLITS, Batch, batch_of, exact_grads, make_experts
from foreign import ForeignProvider
from hypothesis import given
from hypothesis import strategies as st
from loops import wrap
from modules import error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.te_integration import (
    GroupedLinear,
    GroupedMLP,
    ScaledClampedQGeGLU,
    ScaledSwiGLU,
    Sequential,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Sums of at most 200 products, each output of three such sums.
ROUNDING = {torch.float64: 2.0**-48, torch.float32: 2.0**-19, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}


def upstream(batch: Batch, seed: int = 7) -> Tensor:
    weights = torch.randn(batch.x.shape, generator=torch.Generator().manual_seed(seed)).to(batch.x)
    weights[batch.filled :] = float("nan")  # nothing that comes from a pad row may reach a gradient
    return weights.detach()


def run(module: GroupedMLP, batch: Batch, **more: Any) -> Tensor:
    output = module(batch.x, batch.splits, batch.probs, **more)
    output.backward(upstream(batch))
    module.backward_dw()
    return output.detach()


def gradients_of(module: GroupedMLP, batches: list[Batch], fuse: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and every parameter's summed gradient: from our wrapper, or from ``.grad`` without a wrapper."""
    if not fuse:
        outputs = [run(module, batch) for batch in batches]
        return outputs, {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    ddp = wrap(module)
    for record in ddp.records:
        if record.first_write_overwrites:
            record.view.data.fill_(float("nan"))
    outputs = [run(module, batch) for batch in batches]
    ddp.finish_grad_sync()
    return outputs, {record.name: record.view.clone() for record in ddp.records}


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str) -> None:
    assert actual.shape == expected.shape, what
    if not expected.any():
        assert not actual.any(), what
    else:
        assert error(actual, expected) <= ROUNDING[dtype], what


def assert_fp64s(module: GroupedMLP, batches: list[Batch], fuse: bool, **options: Any) -> None:
    dtype = batches[0].x.dtype
    weights = [upstream(batch).nan_to_num(0) for batch in batches]
    outputs, dxs, dprobs, grads = exact_grads(module, batches, weights, **options)
    actual_outputs, actual_grads = gradients_of(module, batches, fuse)
    for batch, output, dx, dprob, actual in zip(batches, outputs, dxs, dprobs, actual_outputs, strict=True):
        assert actual.dtype is dtype and batch.x.grad.dtype is dtype
        for ours, exact, what in ((actual, output, "y"), (batch.x.grad, dx, "dx"), (batch.probs.grad, dprob, "dp")):
            assert not ours[batch.filled :].any(), f"{what}: pad rows are zeros"
            assert_near(ours, exact, dtype, what)
    assert actual_grads.keys() == grads.keys()
    for name, gradient in grads.items():
        assert_near(actual_grads[name], gradient, dtype, name)


# ---- Numbers. ----


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_every_layout_and_split_is_fp64s(device: str, layout: str, splits: str, delay: bool, fuse: bool) -> None:
    options = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay, **LAYOUTS[layout]}
    module = make_experts(device=device, **options)
    batches = [batch_of(*SPLITS[splits], device=device, seed=1), batch_of([1, 1, 0, 7], 2, device=device, seed=2)]
    assert_fp64s(module, batches, fuse, scale_bias=options.get("scale_bias", False))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["discrete", "packed"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("fuse", [False, True])
def test_every_dtype_is_fp64s(device: str, layout: str, dtype: torch.dtype, fuse: bool) -> None:
    module = make_experts(device=device, params_dtype=dtype, fuse_wgrad_accumulation=fuse, **LAYOUTS[layout])
    assert_fp64s(module, [batch_of(*SPLITS["padded"], dtype=dtype, device=device)], fuse)


@pytest.mark.parametrize(
    ("activation", "params"),
    [("geglu", {}), ("reglu", {}), ("clamped_swiglu", {}), ("clamped_swiglu", {"limit": 0.3, "alpha": 1.1})],
)
def test_other_activations_are_fp64s(activation: str, params: dict[str, float]) -> None:
    module = make_experts(activation=activation, activation_params=params or None, fuse_wgrad_accumulation=True)
    batches = [batch_of(*SPLITS["uneven"])]
    assert_fp64s(module, batches, True, activation=activation, activation_params=params)


@pytest.mark.parametrize("fuse", [False, True])
def test_one_expert_is_fp64s(fuse: bool) -> None:
    assert_fp64s(make_experts(1, fuse_wgrad_accumulation=fuse), [batch_of([9], 2)], fuse)


@pytest.mark.parametrize("device", DEVICES)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(0, 20),
    st.sampled_from(sorted(LAYOUTS)),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_any_split_of_any_layout_is_fp64s(
    device: str, splits: list[int], padding: int, layout: str, delay: bool, fuse: bool, split_dtype: torch.dtype
) -> None:
    options = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay, **LAYOUTS[layout]}
    module = make_experts(len(splits), device=device, **options)
    batches = [
        batch_of(each, padding, split_dtype=split_dtype, seed=seed, device=device)
        for seed, each in enumerate((splits, splits[::-1]))
    ]
    assert_fp64s(module, batches, fuse, scale_bias=options.get("scale_bias", False))


def test_splits_may_be_a_list_and_the_rows_have_more_dims() -> None:
    module, batch = make_experts(), batch_of([2, 0, 3, 1])
    expected = module(batch.x, batch.splits, batch.probs)
    assert torch.equal(module(batch.x, [2, 0, 3, 1], batch.probs), expected)
    folded = module(batch.x.view(2, 3, HIDDEN), batch.splits, batch.probs.view(2, 3))
    assert torch.equal(folded, expected.view(2, 3, HIDDEN))


def test_probabilities_may_be_flat_where_the_rows_have_more_dims() -> None:
    module, batch = make_experts(), batch_of([2, 0, 3, 1])
    x = batch.x.detach()
    expected = module(x, batch.splits, batch.probs)
    assert torch.equal(module(x.view(2, 3, -1), batch.splits, batch.probs).view_as(x), expected)
    assert torch.equal(module(x.view(2, 3, -1), batch.splits, batch.probs.view(2, 3)).view_as(x), expected)


def test_numbers_of_an_activation_serve_any_number_of_modules() -> None:
    numbers = {"limit": 2.0, "alpha": 1.5, "glu_linear_offset": 0.25}
    first, second = (make_experts(activation="clamped_swiglu", activation_params=numbers) for _ in range(2))
    batch = batch_of([2, 0, 3, 1])
    assert numbers == {"limit": 2.0, "alpha": 1.5, "glu_linear_offset": 0.25}
    assert torch.equal(*(module(batch.x, batch.splits, batch.probs) for module in (first, second)))


def test_without_probabilities_they_are_ones() -> None:
    module, batch = make_experts(), batch_of([2, 0, 3, 1])
    expected = module(batch.x, batch.splits, torch.ones_like(batch.probs))
    assert torch.equal(module(batch.x, batch.splits), expected)


def test_nan_probabilities_of_pad_rows_reach_nothing() -> None:
    module, clean, poisoned = make_experts(), batch_of(*SPLITS["padded"]), batch_of(*SPLITS["padded"])
    with torch.no_grad():
        poisoned.probs[poisoned.filled :] = float("nan")
    outputs = [run(module, clean), run(copy.deepcopy(module), poisoned)]
    assert torch.equal(*outputs)
    assert torch.equal(clean.x.grad, poisoned.x.grad)
    assert torch.equal(clean.probs.grad[: clean.filled], poisoned.probs.grad[: clean.filled])


# ---- Op by op. ----


def as_sequential(mlp: GroupedMLP, activation: torch.nn.Module, **options: Any) -> Sequential:
    """The same weights in three modules."""
    scale_bias = options.pop("scale_bias", False)
    one = GroupedLinear(mlp.num_gemms, HIDDEN, 2 * FFN, **options)
    two = GroupedLinear(mlp.num_gemms, FFN, HIDDEN, scale_bias=scale_bias, **options)
    for prefix, linear in (("fc1_", one), ("fc2_", two)):
        state = {name.removeprefix(prefix): value for name, value in mlp.state_dict().items() if prefix in name}
        linear.load_state_dict(state, strict=True)
    return Sequential(one, activation, two)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "clamped_swiglu"])
def test_three_modules_give_the_same_bits(device: str, layout: str, fuse: bool, delay: bool, activation: str) -> None:
    options = {"fuse_wgrad_accumulation": fuse, "delay_wgrad_compute": delay, "device": device, **LAYOUTS[layout]}
    params = {"limit": 0.3} if activation == "clamped_swiglu" else {}
    mlp = make_experts(activation=activation, activation_params=params or None, **options)
    between = ScaledClampedQGeGLU(**params) if params else ScaledSwiGLU()
    ops = as_sequential(mlp, between, **options)
    scaled_bias = options.get("scale_bias", False)
    batch, other = (batch_of(*SPLITS["padded"], device=device) for _ in range(2))
    wrapped = [wrap(model) for model in (mlp, ops)] if fuse else []
    y = mlp(batch.x, batch.splits, batch.probs)
    extras = (other.splits, other.probs, other.splits, *((other.probs,) if scaled_bias else ()))
    assert ops.num_extra_inputs == len(extras) and mlp.num_extra_inputs == 2
    y_ops = ops(other.x, *extras)
    assert torch.equal(y, y_ops)
    for output, model, source in ((y, mlp, batch), (y_ops, ops, other)):
        output.backward(upstream(source))
        model.backward_dw()
    assert torch.equal(batch.x.grad, other.x.grad) and torch.equal(batch.probs.grad, other.probs.grad)
    for ddp in wrapped:
        ddp.finish_grad_sync()
    ours = [p.main_grad if fuse else p.grad for p in mlp.parameters()]
    theirs = [p.main_grad if fuse else p.grad for p in ops.parameters()]
    assert {tuple(g.shape) for g in ours} == {tuple(g.shape) for g in theirs}
    names = [name.replace("fc1_", "0.").replace("fc2_", "2.") for name, _ in mlp.named_parameters()]
    by_name = dict(zip([name for name, _ in ops.named_parameters()], theirs, strict=True))
    for name, gradient in zip(names, ours, strict=True):
        assert torch.equal(gradient, by_name[name]), name


# ---- Names and states. ----


@pytest.mark.parametrize(("packed", "other"), [*itertools.permutations(["discrete", "packed", "packed weights"], 2)])
def test_state_dicts_of_one_layout_load_into_another(packed: str, other: str) -> None:
    source, target = make_experts(seed=1, **LAYOUTS[packed]), make_experts(seed=2, **LAYOUTS[other])
    target.load_state_dict(source.state_dict(), strict=True)
    batch = batch_of([2, 0, 3, 1])
    assert torch.equal(target(batch.x, batch.splits, batch.probs), source(batch.x, batch.splits, batch.probs))
    source.load_state_dict(target.state_dict(), strict=True)


def test_names_and_shapes() -> None:
    def shapes(module: GroupedMLP) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in module.state_dict().items()}

    discrete = {}
    for expert in range(4):
        discrete[f"fc1_weight{expert}"] = (2 * FFN, HIDDEN)
        discrete[f"fc2_weight{expert}"] = (HIDDEN, FFN)
        discrete[f"fc1_bias{expert}"] = (2 * FFN,)
        discrete[f"fc2_bias{expert}"] = (HIDDEN,)
    assert shapes(make_experts()) == discrete
    assert shapes(make_experts(**LAYOUTS["packed"])) == {
        "fc1_weight": (4, 2 * FFN, HIDDEN),
        "fc2_weight": (4, HIDDEN, FFN),
        "fc1_bias": (4, 2 * FFN),
        "fc2_bias": (4, HIDDEN),
    }
    assert not any("bias" in name for name in shapes(make_experts(bias=False)))


def test_initialisation_is_the_same_in_both_layouts_and_as_asked() -> None:
    discrete, packed = make_experts(), make_experts(**LAYOUTS["packed"])
    for expert in range(4):
        for name in ("fc1_weight", "fc2_weight"):
            assert torch.equal(getattr(discrete, f"{name}{expert}"), getattr(packed, name)[expert])
    chosen = make_experts(
        init_method=lambda w: torch.nn.init.constant_(w, 2.0),
        output_layer_init_method=lambda w: torch.nn.init.constant_(w, 3.0),
    )
    assert (chosen.fc1_weight1 == 2).all() and (chosen.fc2_weight1 == 3).all() and not chosen.fc1_bias0.any()
    chosen.reset_parameters()
    assert (chosen.fc2_weight3 == 3).all()
    alone = make_experts(init_method=lambda w: torch.nn.init.constant_(w, 2.0))
    assert (alone.fc2_weight0 == 2).all()


@pytest.mark.parametrize("layout", ["discrete", "packed"])
def test_copies_and_pickles_compute_the_same(layout: str) -> None:
    module = make_experts(delay_wgrad_compute=True, **LAYOUTS[layout])
    batch = batch_of([2, 0, 3, 1])
    expected = run(module, batch)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(run(other, batch_of([2, 0, 3, 1])), expected)
        assert other.wgrad_queue is not module.wgrad_queue
    meta = make_experts(device="meta", **LAYOUTS[layout])
    assert all(parameter.is_meta for parameter in meta.parameters())
    meta.to_empty(device="cpu")
    meta.load_state_dict(module.state_dict())
    assert torch.equal(meta(batch.x, batch.splits, batch.probs), expected)


def test_what_it_is_is_said() -> None:
    text = repr(make_experts(fuse_wgrad_accumulation=True, activation="geglu"))
    for part in ("num_gemms=4", "hidden_size=6", "ffn_hidden_size=10", "geglu", "fuse_wgrad_accumulation=True"):
        assert part in text


def test_a_forward_like_the_last_one_makes_nothing_anew() -> None:
    module = make_experts(fuse_wgrad_accumulation=True)
    ddp, batch = wrap(module), batch_of([2, 0, 3, 1])
    for _ in range(2):
        ddp(batch.x, batch.splits, batch.probs)
        uses = dict(module._uses)
        assert len(uses) == 2
    ddp(batch.x, batch.splits, batch.probs)
    assert all(module._uses[key] is use for key, use in uses.items())


# ---- Recompute, autocast, compiler. ----


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_gives_the_same_bits(fuse: bool, reentrant: bool) -> None:
    results = []
    for recompute in (False, True):
        module = make_experts(fuse_wgrad_accumulation=fuse)
        ddp, batch = wrap(module), batch_of(*SPLITS["padded"])
        arguments = (batch.x, batch.splits, batch.probs)
        y = checkpoint(ddp, *arguments, use_reentrant=reentrant) if recompute else ddp(*arguments)
        y.backward(upstream(batch))
        ddp.finish_grad_sync()
        results.append([y.detach(), batch.x.grad, batch.probs.grad, *(record.view.clone() for record in ddp.records)])
    for once, again in zip(*results, strict=True):
        assert torch.equal(once, again)


@pytest.mark.parametrize("fuse", [False, True])
def test_autocast_computes_in_bf16_and_accumulates_in_fp32(fuse: bool) -> None:
    module = make_experts(fuse_wgrad_accumulation=fuse)
    ddp, batch = wrap(module), batch_of(*SPLITS["uneven"])
    with torch.autocast("cpu", torch.bfloat16):
        y = ddp(batch.x, batch.splits, batch.probs)
    assert y.dtype is torch.bfloat16
    y.backward(upstream(batch).bfloat16())
    ddp.finish_grad_sync()
    _, (dx,), (dprobs,), grads = exact_grads(module, [batch], [upstream(batch)])
    assert batch.x.grad.dtype is torch.float32 and error(batch.x.grad, dx) < ROUNDING[torch.bfloat16]
    assert error(batch.probs.grad, dprobs) < ROUNDING[torch.bfloat16]
    for record in ddp.records:
        assert record.view.dtype is torch.float32
        if grads[record.name].any():
            assert error(record.view, grads[record.name]) < ROUNDING[torch.bfloat16], record.name


@pytest.mark.parametrize("layout", ["discrete", "packed"])
def test_autograd_grad_writes_nothing(layout: str) -> None:
    module = make_experts(fuse_wgrad_accumulation=True, **LAYOUTS[layout])
    ddp, batch = wrap(module), batch_of(*SPLITS["padded"])
    before = [record.view.data.fill_(3.0).clone() for record in ddp.records]
    weights = list(module.parameters())
    y = ddp(batch.x, batch.splits, batch.probs)
    grads = torch.autograd.grad(y, [batch.x, batch.probs, *weights], upstream(batch))
    _, (dx,), (dprobs,), expected = exact_grads(module, [batch], [upstream(batch).nan_to_num(0)])
    for actual, exact in zip(grads, [dx, dprobs, *expected.values()], strict=True):
        assert_near(actual.detach(), exact, torch.float32, "grad")
    for record, kept in zip(ddp.records, before, strict=True):
        assert torch.equal(record.view, kept) and record.num_fused_writes == 0


def test_a_compiler_takes_both_layers_or_none() -> None:
    module, splits = make_experts(fuse_wgrad_accumulation=True, single_grouped_weight=True), torch.tensor([1])
    ForeignProvider(nn.ParameterList([module.fc2_weight]))
    assert module.runs_in_graph(splits) is False
    module.fc2_weight.requires_grad_(False)
    assert module.runs_in_graph(splits) is True


@pytest.mark.in_turn
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.sampled(1)
def test_a_compiled_module_computes_the_same(fuse: bool) -> None:
    module, twin = (make_experts(fuse_wgrad_accumulation=fuse) for _ in range(2))
    batch, other = (batch_of([2, 0, 3, 1]) for _ in range(2))
    compiled = torch.compile(module, backend="aot_eager")
    ddps = [wrap(compiled), wrap(twin)]
    for ddp, source in zip(ddps, (batch, other), strict=True):
        y = ddp(source.x, source.splits, source.probs)
        y.backward(upstream(source))
        ddp.finish_grad_sync()
    torch.testing.assert_close(batch.x.grad, other.x.grad)
    torch.testing.assert_close(batch.probs.grad, other.probs.grad)
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.main_grad, theirs.main_grad)


# ---- Bad input. ----


@pytest.mark.parametrize(
    ("arguments", "error_type", "message"),
    [
        ({"activation": "gelu"}, ValueError, "GroupedMLP needs a gated activation.*got 'gelu'"),
        ({"activation": "swigelu"}, ValueError, "unknown activation 'swigelu': it is one of .*, swiglu"),
        ({"activation_params": {"limit": 1.0}}, ValueError, "only clamped_swiglu takes any"),
        ({"tp_size": 2}, ValueError, "GroupedMLP does not support tp_size=2"),
        ({"experts": 2}, TypeError, "GroupedMLP has no argument 'experts'"),
        ({"dtype": torch.float32, "params_dtype": torch.bfloat16}, ValueError, "they are one argument"),
        ({"bias": False, "scale_bias": True}, ValueError, "scale_bias"),
    ],
)
def test_arguments_that_cannot_take_effect_are_refused(
    arguments: dict[str, Any], error_type: type[Exception], message: str
) -> None:
    with pytest.raises(error_type, match=message):
        GroupedMLP(4, HIDDEN, FFN, **arguments)
    GroupedMLP(4, HIDDEN, FFN, tp_size=1, sequence_parallel=False)
    with pytest.raises(ValueError, match="num_gemms"):
        GroupedMLP(0, HIDDEN, FFN)


def test_inputs_that_do_not_fit_are_refused() -> None:
    module, batch = make_experts(name="experts"), batch_of([2, 0, 3, 1])
    with pytest.raises(ValueError, match="experts"):
        module(batch.x, [2, 0, 3], batch.probs)
    with pytest.raises(ValueError, match="experts"):
        module(batch.x, [2, 0, 3, 2], batch.probs)
    with pytest.raises(ValueError, match="experts"):
        module(batch.x, [2, -1, 4, 1], batch.probs)
    with pytest.raises(ValueError, match="experts"):
        module(batch.x[:, 1:], batch.splits, batch.probs)
    with pytest.raises(ValueError, match=r"experts.*a probability for each row"):
        module(batch.x, batch.splits, batch.probs[1:])
    with pytest.raises(ValueError, match=r"a probability for each row, \(2, 3\); got probs of \(3, 2\)"):
        module(batch.x.view(2, 3, -1), batch.splits, batch.probs.view(3, 2))
    with pytest.raises(ValueError, match=r"experts: the input is torch\.float16"):
        module(batch.x.half(), batch.splits, batch.probs)
    scaled = make_experts(scale_bias=True, name="experts")
    with pytest.raises(ValueError, match=r"experts.*scale_bias.*probs"):
        scaled(batch.x, batch.splits)
