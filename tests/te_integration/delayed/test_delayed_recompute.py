"""Non-reentrant recompute of modules whose weight gradients a block delays: the recomputed forward saves the same
tensors as the first forward, whichever of the two forwards runs in the block."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.te_integration import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear, WgradQueue, delayed_wgrad

WIDTH = 8


class Experts(GroupedLinear):
    """The first expert takes half of the rows, the second takes the other half."""

    def forward(self, inp: Tensor) -> Tensor:
        rows = inp.numel() // WIDTH
        return super().forward(inp, [rows // 2, rows - rows // 2])


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Linear(WIDTH, WIDTH),
    "no bias": lambda: Linear(WIDTH, WIDTH, bias=False),
    "split": lambda: Linear(WIDTH, WIDTH, parameters_split=("q", "k")),
    "normalized": lambda: LayerNormLinear(WIDTH, WIDTH),
    "mlp": lambda: LayerNormMLP(WIDTH, WIDTH),
    "recomputing mlp": lambda: LayerNormMLP(WIDTH, WIDTH, checkpoint=True),
    "experts": lambda: Experts(2, WIDTH, WIDTH),
}
SHAPES = [(WIDTH, WIDTH), (3, WIDTH), (2, 3, WIDTH)]


def make(kind: str) -> nn.Module:
    """Two modules, and between them an operation that is not delayed."""
    torch.manual_seed(0)
    return nn.Sequential(MODULES[kind](), nn.Linear(WIDTH, WIDTH), nn.Tanh(), MODULES[kind]()).double()


def input_of(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


def recomputed(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)


def check_like_plain(model: nn.Module, x: Tensor, plain: nn.Module, times: int = 1) -> None:
    """Compare the gradients with ``times`` the gradients of ``plain``, an untouched copy."""
    y = x.detach().requires_grad_()
    for _ in range(times):
        plain(y).square().sum().backward()
    assert torch.allclose(x.grad, y.grad)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(param.grad, expected.grad), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("blocks", ["forward", "backward", "both", "neither"])
@pytest.mark.parametrize("kind", MODULES)
def test_a_block_around_either_pass(kind: str, blocks: str, shape: tuple[int, ...]) -> None:
    model, x, queue = make(kind), input_of(shape), WgradQueue()
    plain = copy.deepcopy(model)
    if blocks in ("forward", "both"):
        with delayed_wgrad(queue):
            y = recomputed(model, x)
            if blocks == "both":
                y.square().sum().backward()
    else:
        y = recomputed(model, x)
    if blocks == "backward":
        with delayed_wgrad(queue):
            y.square().sum().backward()
    elif blocks != "both":
        y.square().sum().backward()
    assert bool(queue) == (blocks in ("forward", "both"))
    queue.drain()
    check_like_plain(model, x, plain)


@pytest.mark.parametrize("backward_in_block", [False, True])
@pytest.mark.parametrize("delays", [(0,), (3,), (0, 3)], ids=str)
@pytest.mark.sampled(4)
def test_a_block_inside_the_region(delays: tuple[int, ...], backward_in_block: bool) -> None:
    """Only some layers run in a block, and the backward may run in another queue's block."""
    model, x, queue, other = make("linear"), input_of((WIDTH, WIDTH)), WgradQueue(), WgradQueue()
    plain = copy.deepcopy(model)

    def run(hidden: Tensor) -> Tensor:
        for index, layer in enumerate(model):
            if index in delays:
                with delayed_wgrad(queue):
                    hidden = layer(hidden)
            else:
                hidden = layer(hidden)
        return hidden

    loss = checkpoint(run, x, use_reentrant=False).square().sum()
    if backward_in_block:
        with delayed_wgrad(other):
            loss.backward()
    else:
        loss.backward()
    assert len(queue) == len(delays) and not len(other)
    queue.drain()
    check_like_plain(model, x, plain)


def test_regions_inside_regions() -> None:
    model, x, queue = make("linear"), input_of((WIDTH, WIDTH)), WgradQueue()
    plain = copy.deepcopy(model)

    def inner(hidden: Tensor) -> Tensor:
        return recomputed(model[:3], hidden)

    def outer(hidden: Tensor) -> Tensor:
        return model[3](checkpoint(inner, hidden, use_reentrant=False))

    with delayed_wgrad(queue):
        y = checkpoint(outer, x, use_reentrant=False)
    y.square().sum().backward()
    queue.drain()
    check_like_plain(model, x, plain)


def test_one_module_in_regions_of_both_kinds() -> None:
    """One module runs delayed and undelayed, both graphs alive: each recompute follows its own first forward."""
    model, x, queue = make("linear"), input_of((WIDTH, WIDTH)), WgradQueue()
    plain = copy.deepcopy(model)
    with delayed_wgrad(queue):
        first = recomputed(model, x).square().sum()
    second = recomputed(model, x).square().sum()
    second.backward()
    first.backward()
    queue.drain()
    check_like_plain(model, x, plain, times=2)


def test_a_graph_that_is_kept_is_recomputed_alike() -> None:
    model, x, queue = make("linear"), input_of((WIDTH, WIDTH)), WgradQueue()
    plain = copy.deepcopy(model)
    with delayed_wgrad(queue):
        loss = recomputed(model, x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    queue.drain()
    check_like_plain(model, x, plain, times=2)


def test_offload_inside_the_region() -> None:
    model, x, queue = make("linear"), input_of((WIDTH, WIDTH)), WgradQueue()
    plain = copy.deepcopy(model)

    def run(hidden: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            hidden = model[:2](hidden)
        return model[2:](hidden)

    with delayed_wgrad(queue):
        y = checkpoint(run, x, use_reentrant=False)
    y.square().sum().backward()
    queue.drain()
    check_like_plain(model, x, plain)


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ["linear", "split", "normalized", "mlp"])
def test_compiled_layers_whose_recompute_would_differ_are_refused(kind: str) -> None:
    """The graph breaks for the block's queue, and would not in the recompute, outside of the block."""
    model, queue = make(kind), WgradQueue()
    model[0].compile(backend="eager")
    with delayed_wgrad(queue), pytest.raises(RuntimeError, match="compiled layer under delayed_wgrad"):
        recomputed(model, input_of((WIDTH, WIDTH)))
    assert len(queue) == 0
    with delayed_wgrad(queue):
        loss = model(input_of((WIDTH, WIDTH))).square().sum()
    loss.backward()
    assert len(queue) > 0
    queue.drain()
