"""``LinearCrossEntropy`` under ``torch.compile(fullgraph=True)``: eager's gradients, and each write once."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from loops import wrap
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.te_integration import Linear, LinearCrossEntropy, linear_cross_entropy

K, V = 8, 33


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Model(nn.Module):
    """A layer and a head, which a compiler traces together."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(K, K)
        self.head = LinearCrossEntropy(K, V, chunk_tokens=4, **options)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.head(self.layer(x), targets)
        return loss


def batch(ignored: int = -100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(V, (3, 7), generator=generator)
    targets[:, 0] = ignored
    return torch.randn(3, 7, K, generator=generator), targets


@pytest.mark.in_turn
@pytest.mark.parametrize("mode", ["recompute", "in_forward"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.sampled(4)
def test_whole_graphs_have_the_gradients_of_eager_code(mode: Any, bias: bool, wrapped: bool) -> None:
    options: dict[str, Any] = {"mode": mode, "bias": bias, "ignore_index": 5, "label_smoothing": 0.1, "z_loss": 0.01}
    options |= {"logit_softcap": 3.0, "logit_scale": 0.5}
    eager, compiled = Model(**options), Model(**options)
    compiled.forward = torch.compile(compiled.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
    one, other = (wrap(model) if wrapped else model for model in (eager, compiled))
    for _ in range(2):
        losses = []
        for model in (one, other):
            model.zero_grad()
            loss = model(*batch(ignored=5))
            loss.backward()
            losses.append(loss)
        assert torch.equal(*losses)
        for parameter, same in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(parameter.grad, same.grad)
    if wrapped:
        assert {record.name: record.num_fused_writes for record in other.records}["head.weight"] == 2


def test_a_compiled_forward_without_a_backward() -> None:
    eager, compiled = wrap(Model(mode="in_forward")), wrap(Model(mode="in_forward"))
    compiled.module.forward = torch.compile(compiled.module.forward, backend="aot_eager", fullgraph=True)
    eager(*batch()).backward()
    compiled(*batch())
    compiled(*batch()).backward()
    for parameter, same in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(parameter.grad, same.grad)
    compiled.zero_grad()
    with pytest.raises(RuntimeError, match="was told another gradient"):
        (2 * compiled(*batch())).backward()


@pytest.mark.parametrize("ignored", [-100, 5])
def test_a_compiled_head_takes_a_batch_whose_tokens_are_all_ignored(ignored: int) -> None:
    """The mean of no losses is NaN, and so is its gradient: it is not another one than was announced."""
    eager, compiled = (wrap(Model(mode="in_forward", ignore_index=ignored)) for _ in range(2))
    compiled.module.forward = torch.compile(compiled.module.forward, backend="aot_eager", fullgraph=True)
    x, targets = batch()
    for model in (eager, compiled):
        loss = model(x, torch.full_like(targets, ignored))
        loss.backward()
        assert loss.isnan()
    for parameter, same in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(parameter.grad.isnan(), same.grad.isnan())


@pytest.mark.in_turn
def test_gradients_of_inputs_alone_are_no_backward_of_the_weight() -> None:
    eager, compiled = (wrap(Model(mode="in_forward")) for _ in range(2))
    compiled.module.head.forward = torch.compile(compiled.module.head.forward, backend="aot_eager", fullgraph=True)
    x, targets = batch()
    x.requires_grad_()
    found = [torch.autograd.grad(model.module.head(x, targets), x)[0] for model in (eager, compiled)]
    assert torch.equal(*found)
    assert {record.num_fused_writes for record in compiled.records} == {0}
    for model in (eager, compiled):
        model(x, targets).backward()
    for parameter, same in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(parameter.grad, same.grad)


@pytest.mark.in_turn
def test_a_compiled_forward_in_a_checkpointed_region_is_refused() -> None:
    model = wrap(Model(mode="in_forward"))
    model.module.forward = torch.compile(model.module.forward, backend="aot_eager", fullgraph=True)
    x, targets = batch()
    with pytest.raises(RuntimeError, match=r"inside torch\.utils\.checkpoint writes main_grad twice"):
        checkpoint(model, x.requires_grad_(), targets, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("make", [Linear, LinearCrossEntropy, partial(LinearCrossEntropy, mode="in_forward")])
def test_gradients_of_gradients_are_refused(make: Any) -> None:
    """By the backend that runs the operators in autograd's own backward; the others' code has no second derivatives."""
    layer = make(K, V, bias=False, fuse_wgrad_accumulation=True)
    kept = wrap(layer)
    x, targets = batch()
    operands = (x,) if make is Linear else (x, targets)
    loss = torch.compile(layer, backend="eager", fullgraph=True)(*operands).sum()
    with pytest.raises(RuntimeError, match=r"create_graph=True\) through a compiled fused layer"):
        loss.backward(create_graph=True)
    assert kept.records


def test_the_function_of_a_plain_weight_is_in_the_graph() -> None:
    weight = torch.randn(V, K, generator=torch.Generator().manual_seed(0)).requires_grad_()
    same = copy.deepcopy(weight)
    x, targets = batch()
    bias, other = (torch.linspace(-1, 1, V).requires_grad_() for _ in range(2))
    options: Any = {"label_smoothing": 0.1, "z_loss": 0.01, "logit_softcap": 3.0, "logit_scale": 0.5, "chunk_tokens": 4}
    loss = linear_cross_entropy(x, weight, targets, bias=bias, **options)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    found = compiled(x, same, targets, bias=other, **options)
    assert torch.equal(found, loss)
    for each in (loss, found):
        each.backward()
    assert torch.equal(weight.grad, same.grad) and torch.equal(bias.grad, other.grad)


@pytest.mark.in_turn
@pytest.mark.parametrize("trained", ["hidden", "bias", "all"])
def test_gradients_of_autograd_have_the_dtype_of_what_they_are_of(trained: str) -> None:
    x, targets = batch()
    heads = [LinearCrossEntropy(K, V, bias=True, dtype=torch.bfloat16, chunk_tokens=4) for _ in range(2)]
    heads[1].load_state_dict(heads[0].state_dict())
    found = []
    for head, call in zip(heads, (heads[0], torch.compile(heads[1], backend="aot_eager", fullgraph=True)), strict=True):
        hidden = x.bfloat16().requires_grad_(trained in ("hidden", "all"))
        for name, parameter in head.named_parameters():
            parameter.requires_grad_(trained in (name, "all"))
        loss = call(hidden, targets)
        loss.backward()
        found.append([loss, hidden.grad, head.weight.grad, head.bias.grad])
    assert [each is None for each in found[0]] == [each is None for each in found[1]]
    for one, other in zip(*found, strict=True):
        assert one is None or (one.dtype is other.dtype and torch.equal(one, other))


@pytest.mark.in_turn
@pytest.mark.parametrize("mode", ["recompute", "in_forward"])
def test_in_fp64_a_compiled_head_is_as_exact_as_eager_code(mode: Any) -> None:
    x, targets = batch()
    eager, compiled = (wrap(Model(bias=True, mode=mode).double()) for _ in range(2))

    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        loss = model(x.double(), targets)
        return loss, torch.ones((), dtype=loss.dtype)  # of the dtype that the compiler takes the loss for

    found = run(eager), torch.compile(run, backend="aot_eager", fullgraph=True)(compiled.module)
    losses, seen = zip(*found, strict=True)
    assert all(each.dtype is torch.float64 for each in (*losses, *seen))
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for parameter, same in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(parameter.grad, same.grad)


def test_without_gradients_the_function_of_a_wrapped_weight_is_in_the_graph() -> None:
    """As in evaluation: nothing is written, and no graph breaks."""
    model = wrap(nn.Embedding(V, K))
    x, targets = batch()
    compiled = torch.compile(linear_cross_entropy, backend="eager", fullgraph=True)
    with torch.no_grad():
        for mode in ("recompute", "in_forward"):
            found = compiled(x, model.module.weight, targets, mode=mode)
            torch.testing.assert_close(found, linear_cross_entropy(x, model.module.weight, targets))
