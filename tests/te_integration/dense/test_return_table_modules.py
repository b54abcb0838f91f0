"""Every row of the return table for every weight of every module; and autograd adds no pass over memory to the GEMM.

A row says what a backward returns to autograd for a weight, and what it does to ``main_grad`` and the flag. What is
returned is seen by a hook on the autograd node, what arrives by the strict provider's hook, which is not ours.
"""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from foreign import ForeignProvider, LazyForeignProvider
from loops import has_no_own_grad, wrap
from modules import ALL_FACTORIES, ALL_WEIGHTS, FEATURES, error, exact, make
from moves import moves_of_size
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel
from maingrad.ddp.contract.main_grad import placeholder

NUM_MICROBATCHES = 3
ROUNDING = 2.0**-19
OTHER_WEIGHT = {"fc1_weight": "fc2_weight", "fc2_weight": "fc1_weight"}


class Row(NamedTuple):
    """One row under one provider."""

    fuse: bool
    delay: bool
    provider: str
    """"none", "ours", "foreign", "lazy", or "no flag": a foreign one without ``grad_added_to_main_grad``."""
    returned: str
    """"gradient", "None" or "placeholder"."""
    flag: Any
    """As backward leaves it, before the hook."""
    lands_in: str
    """The attribute that holds the sum of all microbatches at the end."""


ROWS = {
    "plain": Row(False, False, "none", "gradient", "absent", "grad"),
    "plain, ours": Row(False, False, "ours", "gradient", False, "main_grad"),
    "plain, foreign": Row(False, False, "foreign", "gradient", False, "main_grad"),
    "delayed": Row(False, True, "none", "None", "absent", "grad"),
    "delayed, ours": Row(False, True, "ours", "None", False, "main_grad"),
    "main_grad without a flag": Row(True, False, "no flag", "None", "absent", "main_grad"),
    "main_grad, foreign": Row(True, False, "foreign", "placeholder", True, "main_grad"),
    "main_grad, lazy": Row(True, False, "lazy", "placeholder", True, "main_grad"),
    "main_grad, ours": Row(True, False, "ours", "None", True, "main_grad"),
    "delayed main_grad without a flag": Row(True, True, "no flag", "None", "absent", "main_grad"),
    "delayed main_grad, foreign": Row(True, True, "foreign", "placeholder", True, "main_grad"),
    "delayed main_grad, lazy": Row(True, True, "lazy", "placeholder", True, "main_grad"),
    "delayed main_grad, ours": Row(True, True, "ours", "None", True, "main_grad"),
}


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().sum()


def batches(*, requires_grad: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, 3, FEATURES, generator=generator).requires_grad_(requires_grad) for _ in range(NUM_MICROBATCHES)
    ]


def provide(model: nn.Module, provider: str) -> Any:
    """The provider, or None; to be kept alive."""
    if provider == "none":
        return None
    if provider == "ours":
        return wrap(model)
    kind = LazyForeignProvider if provider == "lazy" else ForeignProvider
    return kind(model, flag=provider != "no flag")


class Seen(NamedTuple):
    """A gradient on its way to autograd. Holding the tensor itself would make autograd copy it."""

    shape: torch.Size
    dtype: torch.dtype
    data_ptr: int
    is_zeros: bool


def node_of(output: Tensor, weight: Tensor) -> tuple[Any, int]:
    """The autograd node that passes ``weight`` its gradient, and the gradient's index among those of the node."""
    todo, seen = [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for index, (following, _) in enumerate(node.next_functions):
            if getattr(following, "variable", None) is weight:
                return node, index
            todo.append(following)
    raise AssertionError("the weight is not reached")


def watch(output: Tensor, weight: nn.Parameter, seen: list[tuple[Seen | None, Any]]) -> None:
    """Note what the next backward returns for ``weight``, and the flag as it leaves it."""
    node, index = node_of(output, weight)

    def note(grads: tuple[Tensor | None, ...], _: object) -> None:
        grad = grads[index]
        flag = getattr(weight, "grad_added_to_main_grad", "absent")
        seen.append((None if grad is None else Seen(grad.shape, grad.dtype, grad.data_ptr(), not grad.any()), flag))

    node.register_hook(note)


@pytest.mark.parametrize("input_needs_grad", [True, False])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(("kind", "name"), ALL_WEIGHTS)
def test_every_row_for_every_weight(kind: str, name: str, row: Row, input_needs_grad: bool) -> None:
    module = make(kind, fuse=row.fuse, delay=row.delay)
    weight = getattr(module, name)
    inputs = batches(requires_grad=input_needs_grad)
    _, input_grads, expected = exact(module, inputs, loss_of)
    provider = provide(module, row.provider)
    seen: list[tuple[Seen | None, Any]] = []
    placeholder(max(module.parameters(), key=torch.numel))  # all share the memory of the largest so far
    for x in inputs:
        output = module(x) if row.provider != "ours" else provider(x)
        watch(output, weight, seen)
        before = _main_grad_of(provider, weight)
        loss_of(output).backward()
        if row.delay:
            after = _main_grad_of(provider, weight)
            assert before is None or torch.equal(before, after) or before.isnan().all(), "written before its turn"
            assert module.need_backward_dw()
            module.backward_dw()
        if row.provider == "lazy":
            provider.start_microbatch(module)
        if row.provider != "none":
            assert row.provider == "no flag" or weight.grad_added_to_main_grad is False
    assert not module.need_backward_dw()

    returned = [each for each, _ in seen]
    assert [flag for _, flag in seen] == [row.flag] * NUM_MICROBATCHES
    if row.returned == "None":
        assert returned == [None] * NUM_MICROBATCHES
    elif row.returned == "placeholder":
        scratch = placeholder(weight).data_ptr()  # shared: a placeholder costs nothing
        assert returned == [Seen(weight.shape, weight.dtype, scratch, True)] * NUM_MICROBATCHES
        delivered = [grad.data_ptr() for owner, grad in provider.placeholders if owner == name]
        assert delivered == [scratch] * NUM_MICROBATCHES, "autograd took it over without a copy"
    else:
        assert not any(each is None or each.is_zeros for each in returned)

    for x, gradient in zip(inputs, input_grads, strict=True):
        assert x.grad is None if not input_needs_grad else error(x.grad, gradient) <= ROUNDING
    for parameter_name, gradient in expected.items():
        parameter = getattr(module, parameter_name)
        is_weight = parameter_name in module.weight_names
        where = row.lands_in if is_weight or row.provider != "no flag" else "grad"
        assert error(getattr(parameter, where), gradient) <= ROUNDING, parameter_name
        assert where == "grad" or has_no_own_grad(parameter)


def _main_grad_of(provider: Any, weight: Tensor) -> Tensor | None:
    if provider is None:
        return None
    if isinstance(provider, LazyForeignProvider):
        found = [main_grad for main_grad in provider.allocated.values() if main_grad.shape == weight.shape]
        return found[0].clone() if found else None
    return weight.main_grad.clone()


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("provider", ["ours", "foreign", "lazy", "none"])
@pytest.mark.parametrize(("kind", "name"), ALL_WEIGHTS)
def test_the_frozen_row_for_every_weight(kind: str, name: str, provider: str, fuse: bool, delay: bool) -> None:
    """Nothing is returned, written or flagged for it; its bias, the input and every other parameter get theirs."""
    if provider == "none" and fuse and kind not in ("Linear", "LayerNormLinear", "packed GroupedLinear"):
        provider = "foreign"  # its other weights need one
    module = make(kind, fuse=fuse, delay=delay)
    weight = getattr(module, name).requires_grad_(False)
    inputs = batches(requires_grad=True)
    _, input_grads, expected = exact(module, inputs, loss_of)
    kept = provide(module, provider)
    if provider != "ours":
        weight.main_grad = torch.full(weight.shape, torch.nan)
        weight.grad_added_to_main_grad = False
    for x in inputs:
        loss_of(module(x)).backward()
        module.backward_dw()
        if provider == "lazy":
            kept.start_microbatch(module)
    assert weight.grad is None
    if provider == "ours":
        assert not hasattr(weight, "main_grad")
    else:
        assert weight.main_grad.isnan().all() and weight.grad_added_to_main_grad is False
    for x, gradient in zip(inputs, input_grads, strict=True):
        assert error(x.grad, gradient) <= ROUNDING
    for other, gradient in expected.items():
        parameter = getattr(module, other)
        assert error(parameter.grad if provider == "none" else parameter.main_grad, gradient) <= ROUNDING, other


# ---- One module twice in a backward. ----


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("provider", ["ours", "lazy"])
@pytest.mark.parametrize("kind", ALL_FACTORIES)
def test_08_a_module_used_twice_overwrites_once_in_each_backward(
    kind: str, provider: str, delay: bool, reentrant: bool
) -> None:
    """Memory starts as NaN, so the first use must overwrite. The second use adds, after a nested backward too."""
    module = make(kind, delay=delay)
    kept = provide(module, provider)
    for x in batches(requires_grad=True):
        once = exact(module, [x], loss_of)[2]
        first = checkpoint(module, x, use_reentrant=True) if reentrant else module(x)
        (loss_of(first) + loss_of(module(x))).backward()
        module.backward_dw()
        assert not module.need_backward_dw(), "one backward, one microbatch"
        for name in module.weight_names:
            assert error(getattr(module, name).main_grad, 2 * once[name]) <= ROUNDING, name
        if provider == "lazy":
            kept.allocated.clear()
            continue
        kept.finish_grad_sync()
        kept.zero_grad_buffer()
        for name in module.weight_names:
            getattr(module, name).main_grad.data.fill_(torch.nan)


# ---- Passes over memory of a weight's size. ----


@pytest.mark.parametrize("provider", ["ours", "foreign", "lazy", "no flag"])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize(("kind", "name"), ALL_WEIGHTS)
def test_autograd_passes_over_a_fused_weights_gradient_nowhere(
    kind: str, name: str, delay: bool, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GEMM is left out, so that only operations of autograd and of our code are recorded."""
    called: list[tuple[int, ...]] = []
    gemm, grouped = (
        "maingrad.te_integration.dense.products.wgrad_accumulate",
        "maingrad.ddp.contract.grouped_wgrad.grouped_wgrad",
    )
    monkeypatch.setattr(gemm, lambda dy, x, grad, **_: called.append(grad.shape))

    def note_each(dy: Tensor, x: Tensor, grads: Any, offsets: Tensor, **_: object) -> None:
        called.extend([grads.shape] if isinstance(grads, Tensor) else [grad.shape for grad in grads])

    monkeypatch.setattr(grouped, note_each)
    module = make(kind, delay=delay)
    weight = getattr(module, name)
    kept = provide(module, provider)
    inputs = [torch.randn(5, FEATURES, requires_grad=True) for _ in range(3)]
    loss_of(module(inputs[0])).backward()  # allocates the scratch, where there is one
    module.backward_dw()
    for x in inputs[1:]:
        loss = loss_of(module(x))
        assert moves_of_size(loss.backward, tuple(weight.shape)) == []
        assert moves_of_size(module.backward_dw, tuple(weight.shape)) == []
    assert called.count(weight.shape) == 3 * [getattr(module, each).shape for each in module.weight_names].count(
        weight.shape
    )
    assert kept is not None


@pytest.mark.parametrize(("kind", "name"), ALL_WEIGHTS)
def test_the_count_of_passes_sees_those_of_an_unfused_module(kind: str, name: str) -> None:
    module = make(kind, fuse=False)
    ddp = wrap(module)
    inputs = [torch.randn(5, FEATURES) for _ in range(2)]
    loss_of(ddp(inputs[0])).backward()
    assert "aten::add_" in moves_of_size(loss_of(ddp(inputs[1])).backward, tuple(getattr(module, name).shape))


# ---- What a foreign provider is told of delays. ----


@pytest.mark.parametrize("kind", ALL_FACTORIES)
def test_13_a_delayed_weight_is_known_to_every_provider(kind: str) -> None:
    """A foreign one finds the mark when it wraps and is called after each backward_dw; ours sees buckets wait."""
    module, plain = make(kind, delay=True), make(kind)
    for name, parameter in module.named_parameters():
        assert getattr(parameter, "skip_backward_post_hook", False) is (name in module.weight_names), name
    assert not any(hasattr(parameter, "skip_backward_post_hook") for parameter in plain.parameters())
    calls: list[str] = []
    provider = ForeignProvider(module)
    for name in module.weight_names:
        module.register_wgrad_accumulation_and_reduce_hooks(lambda name=name: calls.append(name))
    loss_of(module(batches(requires_grad=False)[0])).backward()
    assert calls == []
    module.backward_dw()
    assert calls == list(module.weight_names)
    module.backward_dw()
    assert len(calls) == len(module.weight_names), "nothing was pending"
    assert provider.placeholders


@pytest.mark.parametrize("kind", ALL_FACTORIES)
@pytest.mark.parametrize("fuse", [True, False])
def test_13_no_bucket_launches_before_its_delayed_weight(kind: str, fuse: bool) -> None:
    module = make(kind, fuse=fuse, delay=True)
    inputs = batches(requires_grad=False)
    expected = exact(module, inputs, loss_of)[2]
    ddp = wrap(module, overlap_grad_reduce=True, bucket_size=1)
    assert isinstance(ddp, DistributedDataParallel)
    delayed = {bucket.index for bucket in ddp.buckets if {r.name for r in bucket.records} & set(module.weight_names)}
    with ddp.no_sync():
        for x in inputs[:-1]:
            loss_of(ddp(x)).backward()
    loss_of(ddp(inputs[-1])).backward()
    launched = {bucket.index for bucket in ddp.buckets if bucket.phase.value == "reducing"}
    assert launched == {bucket.index for bucket in ddp.buckets} - delayed
    for _ in itertools.repeat(None, NUM_MICROBATCHES):
        assert not {b.index for b in ddp.buckets if b.phase.value == "reducing"} & delayed
        module.backward_dw()
    assert {bucket.phase.value for bucket in ddp.buckets} == {"reducing"}
    ddp.finish_grad_sync()
    for record in ddp.records:
        assert error(record.view, expected[record.name]) <= ROUNDING, record.name
