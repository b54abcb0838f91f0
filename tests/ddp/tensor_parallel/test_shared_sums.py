"""Layers to which one module gives one input share one sum of its gradient over the tensor-parallel ranks."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from gloo import run_ranks
from parallel_llama import make_mesh
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel
from maingrad.launch import simulate
from maingrad.te_integration import convert_linears
from maingrad.te_integration.dense.products import Ranks


class Attention(nn.Module):
    """Query, key and value of one input, or of two; ``fails``: after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=index == 1) for index in range(4))
        self.other: Tensor | None = None
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.other is None else self.other
        q = self.q(x)
        if self.fails:
            raise KeyError("in the middle")
        out: Tensor = self.o(torch.tanh(q) * self.k(y) + self.v(y))
        return out


PLAN = {name: ColwiseParallel() for name in ("q", "k", "v")} | {"o": RowwiseParallel()}


def models(
    fuse: bool, made: type[Attention] = Attention, frozen: str = ""
) -> tuple[Attention, DistributedDataParallel]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain = made()
    if frozen:
        plain.get_submodule(frozen).requires_grad_(False)
    model = copy.deepcopy(plain)
    mesh = make_mesh(1, 2)
    if fuse:
        convert_linears(model)
    parallelize_module(model, mesh["tp"], PLAN)
    return plain, DistributedDataParallel(model, process_group=mesh["dp"], tensor_parallel_group=mesh["tp"])


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many sums are started meanwhile, of outputs and of gradients."""
    started, start = [0], Ranks.start_sum

    def counting(ranks: Ranks, x: Tensor, **options: bool) -> Tensor:
        started[0] += 1
        return start(ranks, x, **options)

    with mock.patch.object(Ranks, "start_sum", counting):
        yield started


def assert_same(plain: Attention, model: DistributedDataParallel, *inputs: Callable[[], Tensor]) -> None:
    """Gradients of the inputs, and of this rank's rows of each weight."""
    results = []
    for each in (plain, model):
        x, *others = [make().requires_grad_() for make in inputs]
        (each if each is plain else model.module).other = others[0] * 1.0 if others else None
        each(x * 1.0).square().sum().backward()
        results.append([x.grad, *(other.grad for other in others)])
    torch.testing.assert_close(results[1], results[0])
    model.finish_grad_sync()
    rank = torch.distributed.get_rank()
    for name in ("q", "k", "v"):
        whole = getattr(plain, name).weight.grad.chunk(2)[rank]
        torch.testing.assert_close(getattr(model.module, name).weight.main_grad, whole)


def one_input(fuse: bool, compiled: bool) -> int:
    plain, model = models(fuse)
    if compiled:
        model.module.compile(backend="aot_eager", fullgraph=True)
    with counted() as started:
        assert_same(plain, model, lambda: torch.linspace(-1, 1, 24).view(3, 8))
    return started[0]


@pytest.mark.in_turn
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_three_products_of_one_input_are_summed_once(fuse: bool, compiled: bool) -> None:
    """Unfused layers go through torch's dispatch, whose sums are torch's."""
    for started in run_ranks(one_input, 2, fuse, compiled):
        assert started == (1 if fuse else 0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.attention(self.norm(x))
        return out


def graphs_of_blocks() -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    mesh, model = make_mesh(1, 2), nn.Sequential(*(Block() for _ in range(3)))
    convert_linears(model)
    ranks = mesh["tp"]
    for block in model:
        parallelize_module(block.attention, ranks, PLAN)
        block.compile(backend="aot_eager", fullgraph=True)
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"], tensor_parallel_group=ranks)
    wrapped(torch.randn(3, 8, requires_grad=True)).square().sum().backward()
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.in_turn
def test_blocks_alike_are_one_graph() -> None:
    """Nothing by which layers know one another is compiled into a graph."""
    assert run_ranks(graphs_of_blocks, 2) == [1, 1]


def two_inputs() -> int:
    plain, model = models(fuse=True)
    with counted() as started:
        assert_same(
            plain, model, lambda: torch.linspace(-1, 1, 24).view(3, 8), lambda: torch.linspace(0, 1, 24).view(3, 8)
        )
    return started[0]


def test_other_inputs_have_sums_of_their_own() -> None:
    assert run_ranks(two_inputs, 2) == [2, 2]


def nothing_kept() -> None:
    plain, model = models(fuse=True)
    x = torch.linspace(-1, 1, 24).view(3, 8)
    model.module.fails = True
    with pytest.raises(KeyError):
        model(x.clone().requires_grad_() * 1.0)  # a leaf would share no sum
    model.module.fails = False
    copied = copy.deepcopy(model.module)
    (shared, of_copy) = (each.q._maingrad_shared_input for each in (model.module, copied))
    assert shared.input is None and of_copy.input is None
    assert of_copy is copied.k._maingrad_shared_input and of_copy is not shared
    # A layer that is called by itself sums by itself, and its input is not kept.
    with counted() as started:
        for layer in (model.module.q, model.module.k):
            layer(x.requires_grad_() * 1.0).square().sum().backward()
    assert started[0] == 2
    assert shared.input is None
    expected = [torch.autograd.grad(layer(x).square().sum(), x)[0] for layer in (plain.q, plain.k)]
    torch.testing.assert_close(x.grad, sum(expected))


def test_an_input_is_kept_for_the_forward_of_its_module_alone() -> None:
    run_ranks(nothing_kept, 2)


def forward_of_an_instance() -> None:
    """Shared inputs are around a forward that a program has set on the module itself."""
    mesh, model = make_mesh(1, 2), Attention()
    calls: list[int] = []

    def replaced(x: Tensor) -> Tensor:
        calls.append(x.dim())
        return Attention.forward(model, x)

    model.forward = replaced  # type: ignore[method-assign]
    convert_linears(model)
    parallelize_module(model, mesh["tp"], PLAN)
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"], tensor_parallel_group=mesh["tp"])
    wrapped(torch.randn(3, 8) * torch.ones(8, requires_grad=True)).square().sum().backward()
    assert calls == [2]


def test_a_forward_of_the_instance_runs() -> None:
    simulate(forward_of_an_instance, 2)


class Odd(Attention):
    """Its layers do not run alike: ``way`` says how."""

    way = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "no_grad":
            with torch.no_grad():
                q = self.q(x)
        elif self.way == "recomputed":
            q = checkpoint(self.q, x, use_reentrant=True)
        elif self.way == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                q = self.q(x).float()
        elif self.way == "all recomputed":
            return self.o(checkpoint(lambda x: torch.tanh(self.q(x)) * self.k(x) + self.v(x), x, use_reentrant=False))
        else:
            x = x * 1.0
            q = self.q(x)
            x.mul_(2.0)
        out: Tensor = self.o(torch.tanh(q) * self.k(x) + self.v(x))
        return out


def odd(way: str, trains: bool) -> None:
    plain = models(fuse=True, made=Odd, frozen="q" if way == "in place" else "")
    results = []
    for each, root in zip(plain, (plain[0], plain[1].module), strict=True):
        root.way = way
        x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_(trains)
        each(x * 1.0).square().sum().backward()
        results.append(x.grad)
    rounds = {"atol": 2e-2, "rtol": 2e-2} if way == "autocast" else {"atol": 1e-5, "rtol": 1.3e-6}
    assert (results[1] is not None) == trains
    torch.testing.assert_close(results[1], results[0], **rounds)
    plain[1].finish_grad_sync()
    for name in ("k", "v"):
        whole = getattr(plain[0], name).weight.grad.chunk(2)[torch.distributed.get_rank()]
        torch.testing.assert_close(getattr(plain[1].module, name).weight.main_grad, whole, **rounds)


@pytest.mark.parametrize(
    ("way", "trains"),
    [
        ("no_grad", True),
        ("recomputed", True),
        ("autocast", True),
        ("in place", True),
        ("all recomputed", True),
        ("all recomputed", False),
    ],
)
def test_layers_that_do_not_run_alike_sum_by_themselves(way: str, trains: bool) -> None:
    run_ranks(odd, 2, way, trains)


class Heads(Attention):
    def forward(self, x: Tensor) -> Any:
        return self.q(x), self.k(x), self.v(x)


def one_by_one() -> None:
    results = []
    for model in models(fuse=True, made=Heads):
        x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        *earlier, last = model(x)
        with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
            for each in earlier:
                each.square().sum().backward()
        last.square().sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(results[1], results[0])


def test_products_of_a_leaf_go_backward_one_by_one() -> None:
    """Heads on detached features, as of several tokens that are predicted: each frees its graph."""
    run_ranks(one_by_one, 2)


def test_a_buffer_that_alone_is_cut_stays_with_its_rank() -> None:
    """No parameter says that ranks hold the model together: the buffer does."""

    def on_each_rank() -> None:
        mesh, model = make_mesh(2, 2), nn.Linear(4, 4)
        own = torch.full((2, 3), float(mesh["tp"].get_local_rank()))
        model.register_buffer("table", DTensor.from_local(own.clone(), mesh["tp"], [Shard(0)]))
        with pytest.raises(ValueError, match=r"tensor_parallel_group .* are no two dims of one mesh"):
            DistributedDataParallel(copy.deepcopy(model))
        wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        assert torch.equal(wrapped.module.table, own)
        wrapped(torch.full((2, 4), float(mesh["dp"].get_local_rank()))).sum().backward()
        assert torch.equal(wrapped.module.weight.grad, torch.ones(4, 4))

    simulate(on_each_rank, 4)
