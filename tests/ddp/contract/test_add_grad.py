"""``add_grad``: gradients that no backward delivers are reduced with all others."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, add_grad
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import Linear, convert_linears

RANKS = 2
CONFIGS: dict[str, dict[str, Any]] = {
    "all-reduce": {"overlap_grad_reduce": True},
    "ZeRO-1": {"overlap_grad_reduce": True, "use_distributed_optimizer": True, "overlap_param_gather": True},
    "in the end": {},
}


def make_model(fused: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    if fused:
        convert_linears(model)
    return model


def tasks(model: nn.Module, step: int, rank: int) -> list[Tensor]:
    """A loss for each task."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    return list(model(x).square().mean(0))


def projected(losses: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """PCGrad: if two tasks' gradients disagree, the component of each along the other is removed."""
    first, second = ([*torch.autograd.grad(loss, params, retain_graph=True)] for loss in losses)
    dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
    square = sum(b.square().sum() for b in second)
    scale = torch.clamp(dot / square, max=0.0)
    return [a - scale * b + b for a, b in zip(first, second, strict=True)]


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("how", CONFIGS)
@pytest.mark.sampled(4)
def test_projected_gradients_train_as_in_plain_pytorch(how: str, fused: bool) -> None:
    def train() -> dict[str, Tensor]:
        model = make_model(fused)
        ddp = DistributedDataParallel(model, DistributedDataParallelConfig(**CONFIGS[how]))
        optimizer = DistributedOptimizer(ddp, lr=0.1)
        params = list(model.parameters())
        for step in range(3):
            for param, grad in zip(params, projected(tasks(ddp, step, dist.get_rank()), params), strict=True):
                add_grad(param, grad)
            ddp.finish_grad_sync()
            optimizer.step()
            ddp.zero_grad_buffer()
        return {name: param.detach().clone() for name, param in model.named_parameters()}

    plain = make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    params = list(plain.parameters())
    for step in range(3):
        everyones = [projected(tasks(plain, step, rank), params) for rank in range(RANKS)]
        for param, *grads in zip(params, *everyones, strict=True):
            param.grad = sum(grads) / RANKS
        optimizer.step()
    for found in simulate(train, RANKS):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.detach())


@pytest.mark.parametrize("given", [("q_weight",), ("k_weight",), ("q_weight", "k_weight"), ()])
def test_weights_of_one_product_are_overwritten_each_for_itself(given: tuple[str, ...]) -> None:
    """One of them may have a gradient of this iteration already."""
    layer = Linear(4, 6, bias=False, parameters_split={"q_": 3, "k_": 3}, fuse_wgrad_accumulation=True)
    ddp, x = DistributedDataParallel(layer), torch.arange(8.0).view(2, 4)
    for number in (1, 2):
        for name in given:
            add_grad(getattr(layer, name), torch.full((3, 4), 5.0))
        ddp(x).sum().backward()
        ddp.finish_grad_sync()
        for name in ("q_weight", "k_weight"):
            expected = x.sum(0).expand(3, 4) + 5.0 * (name in given)
            assert torch.equal(getattr(layer, name).main_grad, expected), f"iteration {number}"
        ddp.zero_grad_buffer()


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("order", ["before", "between", "after"])
def test_it_adds_to_what_backwards_bring(order: str, fused: bool) -> None:
    """A fused layer's first product overwrites; after ``add_grad`` it must add."""

    def train() -> dict[str, Tensor]:
        model = make_model(fused)
        ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True))
        first, second = tasks(ddp, 0, dist.get_rank())
        if order == "between":
            with ddp.no_sync():
                first.backward(retain_graph=True)
        if order == "after":  # every bucket is launched
            (first + second).backward()
        for param in model.parameters():
            add_grad(param, torch.full_like(param, 1.0 + dist.get_rank()))
        if order != "after":
            (second if order == "between" else first + second).backward()
        ddp.finish_grad_sync()
        return {name: param.main_grad.clone() for name, param in model.named_parameters()}

    plain = make_model()
    (sum(loss for rank in range(RANKS) for loss in tasks(plain, 0, rank)) / RANKS).backward()
    for found in simulate(train, RANKS):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.grad + 1.5)


def test_a_gradient_with_a_graph_of_its_own_leaves_it_behind() -> None:
    """A penalty's gradient, or one of ``create_graph=True``: main_grad holds numbers alone."""
    model = make_model()
    ddp = DistributedDataParallel(model)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    for param in model.parameters():
        add_grad(param, 3 * scale * param)
        assert not param.main_grad.requires_grad
    ddp.finish_grad_sync()
    for param in model.parameters():
        assert torch.equal(param.main_grad, 3 * param.detach())


def test_what_cannot_be_added_is_refused_by_name() -> None:
    def refuse() -> None:
        model = make_model()
        with pytest.raises(ValueError, match="not wrapped in"):
            add_grad(model[0].weight, torch.zeros(7, 5))
        ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True))
        with pytest.raises(ValueError, match=r"'0\.weight' is \(7, 5\), and grad \(5, 7\)"):
            add_grad(model[0].weight, torch.zeros(5, 7))
        model[0].weight.grad = torch.zeros(7, 5, dtype=torch.float64)
        with pytest.raises(RuntimeError, match=r"'0\.weight' was put into \.grad by hand.*add_grad\(param, grad\)"):
            ddp.finish_grad_sync()
        sharded = fully_shard(make_model())
        with pytest.raises(ValueError, match="not wrapped in"):
            add_grad(sharded[0].weight, torch.zeros_like(sharded[0].weight))

    simulate(refuse, RANKS)


def test_a_torch_wrapper_whose_constructor_failed_is_not_blamed() -> None:
    """The error's traceback keeps the half-made wrapper alive, which reduces nothing."""
    model = make_model()
    with pytest.raises((ValueError, RuntimeError)) as failed:
        TorchDDP(model)  # without a process group
    ddp = DistributedDataParallel(model)
    model[0].weight.grad = torch.zeros(7, 5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"'0\.weight' was put into \.grad by hand"):
        ddp.finish_grad_sync()
    assert failed.tb is not None


def test_a_gathered_parameter_of_a_unit_takes_nothing() -> None:
    """Its accumulator is the unit's, which this iteration may not reduce."""
    model = fully_shard(nn.Linear(3, 2))
    with model.unsharded(), pytest.raises(ValueError, match="add_grad: this parameter is not wrapped"):
        add_grad(model.weight, torch.zeros(2, 3))
