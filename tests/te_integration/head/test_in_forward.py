"""``LinearCrossEntropy`` that writes main_grad in forward: under every wrapper, and where its backward goes astray."""

import copy
import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from foreign import ForeignProvider
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from traced_forms import traced

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import LinearCrossEntropy, linear_cross_entropy, make_graphed_callables
from maingrad.te_integration.head import compiled_head, in_forward

K, V, TOKENS = 8, 48, 14


class Model(nn.Module):
    """An embedding, a layer, and a head, perhaps with the embedding's weight, in a checkpointed region or not."""

    def __init__(self, mode: Any, *, tied: bool = False, region: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, K)
        self.layer = nn.Linear(K, K)
        self.head = LinearCrossEntropy(K, V, mode=mode, chunk_tokens=4)
        if tied:
            self.head.weight = self.embedding.weight
        self.region = region

    def forward(self, tokens: Tensor, targets: Tensor, **options: Any) -> Tensor:
        def end(x: Tensor) -> Tensor:
            loss: Tensor = self.head(self.layer(x).tanh(), targets, **options)
            return loss * 2 / 2  # the head is not the region's last operation

        x = self.embedding(tokens)
        return end(x) if self.region is None else checkpoint(end, x, use_reentrant=self.region)  # type: ignore[no-any-return]


def batch(seed: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + seed)
    tokens, targets = torch.randint(V, (2, TOKENS), generator=generator)
    targets[: 3 + rank] = -100  # ranks differ in tokens
    return tokens, targets


def ddp(model: nn.Module, **config: Any) -> Any:
    return DistributedDataParallel(model, DistributedDataParallelConfig(**config))


def sharded(model: Any, mesh: tuple[int, ...] = (), **options: Any) -> Any:
    dims = ("outer", "inner")[-len(mesh) :]
    options |= {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=dims)} if mesh else {}
    for unit in (model.layer, model):
        fully_shard(unit, **options)
    return model


WRAPPERS: dict[str, tuple[int, Callable[[nn.Module], Any]]] = {
    "ddp": (2, ddp),
    "overlapped": (2, partial(ddp, overlap_grad_reduce=True, bucket_size=100)),
    "zero1": (2, partial(ddp, use_distributed_optimizer=True, overlap_grad_reduce=True)),
    "released": (2, partial(ddp, use_distributed_optimizer=True, overlap_grad_reduce=True, release_grads=True)),
    "hybrid": (4, partial(ddp, use_distributed_optimizer=True, num_distributed_optimizer_instances=2)),
    "zero2": (2, partial(sharded, reshard_after_forward=False)),
    "zero3": (2, sharded),
    "hsdp": (4, partial(sharded, mesh=(2, 2))),
}


def iterations(wrap: Callable[[nn.Module], Any], model: nn.Module, *, told: bool) -> list[Tensor]:
    """Gradients of two iterations of two microbatches, whose losses are halved."""
    wrapped, found = wrap(model), []
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for iteration in range(2):
        for microbatch in range(2):
            with nullcontext() if microbatch else wrapped.no_sync():
                scale = {"grad_scale": 0.5} if told else {}
                loss = wrapped(*batch(2 * iteration + microbatch, rank), num_tokens=11, **scale)
                (loss * 0.5).backward()
        for parameter in wrapped.parameters():
            grad = parameter.grad
            grad = grad.to_local() if hasattr(grad, "to_local") else grad  # sharded: this rank's elements
            found.append(grad.detach().clone())
        wrapped.zero_grad()
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("region", [None, False, True], ids=["whole", "checkpointed", "reentrant"])
@pytest.mark.sampled(12)
def test_every_wrapper_has_the_gradients_of_recompute(wrapper: str, tied: bool, region: bool | None) -> None:
    ranks, wrap = WRAPPERS[wrapper]

    def both() -> bool:
        plain = iterations(wrap, Model("recompute", tied=tied), told=False)
        early = iterations(wrap, Model("in_forward", tied=tied, region=region), told=True)
        return all(map(torch.equal, plain, early)) and any(map(torch.any, plain))

    assert simulate(both, ranks) == [True] * ranks


def pair() -> tuple[Any, list[Tensor]]:
    """A wrapped model, and its gradients of batch 0."""
    plain = ddp(Model("recompute"))
    plain(*batch(0)).backward()
    return ddp(Model("in_forward")), [parameter.grad.clone() for parameter in plain.parameters()]


def check(model: Any, expected: list[Tensor]) -> None:
    """The next iteration is right, whatever came before."""
    model.zero_grad()
    model(*batch(0)).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.in_turn
def test_a_forward_whose_graph_is_gone_is_taken_back() -> None:
    for tied in (False, True):
        plain, model = ddp(Model("recompute", tied=tied)), ddp(Model("in_forward", tied=tied))
        plain(*batch(0)).backward()
        model(*batch(1))
        gc.collect()
        model(*batch(0)).backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("together", [False, True])
def test_two_forwards_whose_graphs_are_gone_are_taken_back(together: bool) -> None:
    """The first graph is gone before the second forward, or both go together."""
    model, expected = pair()
    losses = [model(*batch(1))]
    if not together:
        losses.clear()
    losses.append(model(*batch(2)))
    losses.clear()
    model(*batch(0)).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    check(model, expected)


def test_a_forward_whose_graph_is_gone_behind_an_iteration_that_was_not_cleared() -> None:
    """The writes of another iteration begin anew: what the last one has left is no other contribution."""
    plain, model = ddp(Model("recompute")), ddp(Model("in_forward"))
    for each in (plain, model):
        each(*batch(2)).backward()
        each.finish_grad_sync()
    model(*batch(1))
    gc.collect()
    for each in (plain, model):
        each(*batch(0)).backward()
        each.finish_grad_sync()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.main_grad, other.main_grad)


def test_without_grad_nothing_is_written() -> None:
    model, expected = pair()
    with torch.no_grad():
        model(*batch(1))
    assert model.records[0].num_fused_writes == 0
    check(model, expected)


def test_an_exception_between_forward_and_backward() -> None:
    model, expected = pair()
    loss = model(*batch(1))
    check(model, expected)
    with pytest.raises(RuntimeError, match="gradients were cleared or reduced before the backward came"):
        loss.backward()
    model.abandon_iteration()
    check(model, expected)


def test_a_forward_of_before_is_told_from_one_that_waits() -> None:
    model, expected = pair()
    before = model(*batch(1))
    model.zero_grad()
    waits = model(*batch(0))
    with pytest.raises(RuntimeError, match="gradients were cleared or reduced before the backward came"):
        before.backward()
    del waits
    model.abandon_iteration()
    check(model, expected)


def test_a_forward_beside_that_waits_for_its_backward() -> None:
    model, expected = pair()
    waiting = model(*batch(1))
    model(*batch(0)).backward()
    with pytest.raises(RuntimeError, match="its backward has not come"):
        model.finish_grad_sync()
    del waiting
    check(model, expected)


def test_two_forwards_then_two_backwards() -> None:
    plain, model = ddp(Model("recompute")), ddp(Model("in_forward"))
    for wrapped in (plain, model):
        losses = [wrapped(*batch(seed)) for seed in (0, 1)]
        with wrapped.no_sync():
            losses[0].backward()
        losses[1].backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_second_backward_is_refused() -> None:
    model, expected = pair()
    loss = model(*batch(1))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='a second backward through a forward in mode="in_forward"'):
        loss.backward()
    check(model, expected)


def test_another_gradient_than_the_announced_one_is_refused() -> None:
    for factor, told in ((2.0, None), (1.0, 0.5), (float("nan"), None), (1.0, 1.0001), (2e-7, 1e-7)):
        model, expected = pair()
        with pytest.raises(RuntimeError, match="was told another gradient of the loss"):
            (model(*batch(1), grad_scale=told) * factor).backward()
        check(model, expected)


def test_a_gradient_that_was_rounded_otherwise_is_the_announced_one() -> None:
    model, expected = pair()
    model(*batch(0), grad_scale=1 + 2**-22).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("mode", [nullcontext, traced], ids=["eager", "traced"])
def test_where_the_host_does_not_wait_another_gradient_leaves_nan(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose answer the host does not read."""
    for where in (in_forward, compiled_head):
        monkeypatch.setattr(where, "poison_of", lambda *_: torch.tensor([float("nan")]))
    head = LinearCrossEntropy(K, V, bias=True, mode="in_forward")
    model = ddp(head)
    x = torch.randn(TOKENS, K, requires_grad=True)
    with mode():
        loss = model(x, torch.arange(TOKENS))
    (2 * loss).backward()
    assert x.grad is not None and x.grad.isnan().all()
    assert head.bias.main_grad.isnan().all()
    assert head.weight.main_grad.isnan().any(), "norms and checks of gradients find it"


@pytest.mark.parametrize(
    "scale",
    [torch.tensor(1024.0), torch.tensor([[0.5]]), 0.0, torch.tensor(0.25, dtype=torch.float64), torch.tensor(3)],
    ids=["0-dim", "2-dim", "none left", "fp64", "an integer"],
)
def test_scales_of_many_kinds(scale: Any) -> None:
    plain, model = ddp(Model("recompute")), ddp(Model("in_forward"))
    (plain(*batch(0)) * scale).backward()
    (model(*batch(0), grad_scale=scale) * scale).backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_in_fp64_the_announced_gradient_is_exact() -> None:
    plain, model = ddp(Model("recompute").double()), ddp(Model("in_forward").double())
    for each in (plain, model):
        each(*batch(0), num_tokens=7).backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-14, atol=0.0)


class ByFunction(nn.Module):
    """Its head is the function, with the embedding's weight."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.mode = nn.Embedding(V, K), mode

    def forward(self, tokens: Tensor, targets: Tensor, grad_scale: float | None) -> Tensor:
        options: Any = {"mode": self.mode, "grad_scale": grad_scale, "num_tokens": 11}
        return linear_cross_entropy(self.embedding(tokens), self.embedding.weight, targets, **options)


def test_the_function_writes_in_forward_too() -> None:
    plain, model = ddp(ByFunction("recompute")), ddp(ByFunction("in_forward"))
    (plain(*batch(0), None) / 2).backward()
    loss = model(*batch(0), 0.5)
    assert model.module.embedding.weight.main_grad.any(), "before any backward"
    (loss / 2).backward()
    torch.testing.assert_close(*(each.module.embedding.weight.main_grad for each in (plain, model)))


@pytest.mark.parametrize("change", ["hook", "freeze"])
def test_a_weight_that_changes_between_forward_and_backward(change: str) -> None:
    model, expected = pair()
    loss, weight = model(*batch(1)), model.module.head.weight
    hook = weight.register_hook(lambda grad: grad) if change == "hook" else None
    weight.requires_grad_(change == "hook")
    with pytest.raises(RuntimeError, match=r"since then the weight got a hook, was frozen, or left its wrapper"):
        loss.backward()
    if hook is not None:
        hook.remove()
    weight.requires_grad_(True)
    model.abandon_iteration()
    check(model, expected)


@pytest.mark.in_turn
@pytest.mark.parametrize("beside", ["a backward that came", "a forward that waits", "a backward of the other mode"])
def test_a_forward_whose_graph_is_gone_beside_another_contribution(beside: str) -> None:
    """What it has added cannot be taken out of the sum."""
    model, expected = pair()
    with model.no_sync():
        if beside != "a forward that waits":
            model.module.head.mode = "recompute" if "other mode" in beside else "in_forward"
            model(*batch(1)).backward()
            model.module.head.mode = "in_forward"
            model(*batch(2))
        else:
            gone, _waiting = model(*batch(1)), model(*batch(2))
            del gone
        gc.collect()
        with pytest.raises(RuntimeError, match=r"has added its gradient, and its backward has not come"):
            model(*batch(0)).backward()
    check(model, expected)


def test_gradients_of_inputs_alone_take_no_part() -> None:
    model, expected = pair()
    tokens, targets = batch(1)
    x = model.module.embedding(tokens)
    loss = model.module.head(x, targets)
    (found,) = torch.autograd.grad(loss, x)
    plain = copy.deepcopy(model.module)
    plain.head.mode = "recompute"
    y = plain.embedding(tokens)
    assert torch.equal(found, torch.autograd.grad(plain.head(y, targets), y)[0])
    del loss, x
    model(*batch(0)).backward()  # takes back what the forward of the other backward has written
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    check(model, expected)
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"autograd.grad\(loss, weight\) in mode"):
        torch.autograd.grad(model(*batch(1)), model.module.head.weight)


def test_without_a_wrapper_any_gradient_may_come() -> None:
    early, plain = Model("in_forward"), Model("recompute")
    for model in (early, plain):
        (3 * model(*batch(0))).backward()
    for one, other in zip(early.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.in_turn
def test_a_backward_of_the_other_mode_after_a_forward_whose_graph_is_gone() -> None:
    """It takes back what that forward has added; and what it writes itself is no more to be taken back."""
    model, expected = pair()
    head = model.module.head
    model(*batch(1))
    gc.collect()
    head.mode = "recompute"
    with model.no_sync():
        model(*batch(0)).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.main_grad, gradient)
    head.mode = "in_forward"
    model(*batch(2))
    gc.collect()
    with pytest.raises(RuntimeError, match="its backward has not come"):
        model(*batch(0))
    check(model, expected)


@pytest.mark.in_turn
def test_an_iteration_may_end_after_a_forward_whose_graph_is_gone() -> None:
    model, expected = pair()
    model(*batch(1))
    gc.collect()
    model.module.layer(torch.ones(1, K)).sum().backward()
    model.finish_grad_sync()
    assert not model.module.head.weight.main_grad.any()
    check(model, expected)


@pytest.mark.parametrize("hooked", [False, True])
def test_where_autograd_delivers_any_gradient_may_come(hooked: bool) -> None:
    """By the module's option, or for a hook on the weight."""
    head = LinearCrossEntropy(K, V, mode="in_forward", fuse_wgrad_accumulation=hooked)
    model, weight = ddp(head), head.weight.detach().clone().requires_grad_()
    if hooked:
        head.weight.register_hook(lambda grad: 2 * grad)
    x, targets = torch.randn(4, K), torch.arange(4)
    (3 * model(x, targets)).backward()
    torch.nn.functional.cross_entropy(x @ weight.T, targets).backward()
    assert weight.grad is not None and model.records[0].num_fused_writes == 0
    torch.testing.assert_close(head.weight.main_grad, (6 if hooked else 3) * weight.grad)


def test_under_a_foreign_provider_any_gradient_may_come() -> None:
    early, plain = (LinearCrossEntropy(K, V, mode=mode) for mode in ("in_forward", "recompute"))  # type: ignore[arg-type]
    early.load_state_dict(plain.state_dict())
    providers = [ForeignProvider(head) for head in (early, plain)]
    x, targets = torch.randn(4, K), torch.arange(4)
    for head in (early, plain):
        (3 * head(x, targets)).backward()
    assert torch.equal(early.weight.main_grad, plain.weight.main_grad) and all(each.seen for each in providers)


def test_graphs_of_layers_refuse_it() -> None:
    head = LinearCrossEntropy(K, V, mode="in_forward")
    ddp(head)
    with pytest.raises(ValueError, match="writes main_grad in its forward"):
        make_graphed_callables((head,), ((torch.randn(4, K, requires_grad=True), torch.randint(V, (4,))),))


def in_a_region(model: Any) -> Tensor:
    """The loss of batch 0 in a region that computes it again: a later operation of the region keeps its output."""
    loss: Tensor = checkpoint(lambda *given: model(*given).relu(), *batch(0), use_reentrant=False)
    return loss


@pytest.mark.parametrize("nested", [False, True])
def test_a_recompute_writes_once(nested: bool) -> None:
    plain, model = ddp(Model("recompute")), ddp(Model("in_forward", region=False))
    for wrapped in (plain, model):
        (in_a_region(wrapped) if nested else wrapped(*batch(0))).backward()
    writes = {record.name: record.num_fused_writes for record in model.records}
    assert writes["head.weight"] == 1
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_forward_without_a_backward_behind_a_reduction_is_taken_back() -> None:
    """An iteration's second backward outside ``no_sync`` puts aside what was reduced: the next write begins anew."""
    plain, model = ddp(Model("recompute")), ddp(Model("in_forward"))
    for each in (plain, model):
        each(*batch(0)).backward()
        each.finish_grad_sync()
    model(*batch(1))  # a look at the loss
    gc.collect()
    for each in (plain, model):
        each(*batch(2)).backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad)
