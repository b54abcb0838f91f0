"""While gathers are under way and a rank is late, compiled code reads new weights in a module's forward: extensions in
C++ and TorchScript ask no ``__torch_function__``."""

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from native_reader import build_native_reader, read_natively
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

LATE = 0.2  # seconds by which the last rank's step comes after its neighbour's
WIDTH = 8
Seen = list[Tensor]

built = ""
"""Path of the extension, on each rank."""


class Read(torch.autograd.Function):
    """What an extension's function does: the weight's values are read in C++."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x_shape, ctx.w_shape = x.shape, weight.shape
        values = read_natively(built, weight)
        ctx.save_for_backward(x, values)
        return x * values.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, values = ctx.saved_tensors
        return grads[0] * values.sum(), (grads[0] * x).sum().expand(ctx.w_shape)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return Read.apply(x, weight)  # type: ignore[no-any-return]


class Own(nn.Module):
    """Gives its own parameters to the extension."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.rand(3 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return product(product(x, self.weight), self.bias)


class Keeps(Own):
    """Gives it parameters from a list in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.weight, self.bias]

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.kept:
            x = product(x, weight)
        return x


class KeepsLater(Keeps):
    """Like ``Keeps``, but the list is made in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.kept or [self.weight, self.bias]
        return super().forward(x)


class InADict(nn.Module):
    """Containers of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.rand(WIDTH) for _ in range(2)])
        self.named = nn.ParameterDict({"one": torch.rand(WIDTH), "other": torch.rand(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in (*self.several, self.named["one"], *self.named.values()):
            x = product(x, weight)
        return x


class LooksUp(Own):
    """A class with a ``__getattr__`` of its own."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name.removeprefix("my_"))

    def forward(self, x: Tensor) -> Tensor:
        return product(product(x, self.my_weight), self._parameters["bias"])


class Parent(nn.Module):
    """Hands its children's parameters to the extension; their forwards do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return product(product(x, self.norm.weight) + self.norm.bias, self.linear.weight) + self.linear.bias.sum()


class Tied(nn.Module):
    """One parameter under two names; the forward uses the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = Own()
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x)  # type: ignore[no-any-return]


class WithAHook(nn.Module):
    """torch's own module, before whose forward a user's function reads the weight that it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        weight = self.linear.weight
        self.linear.register_forward_pre_hook(lambda _, args: (product(args[0], weight),))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


class ByName(nn.Module):
    """Calls ``child.forward(x)`` instead of ``child(x)``."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Own()

    def forward(self, x: Tensor) -> Tensor:
        return self.own.forward(x)


class Scripts(nn.Module):
    """To be compiled by TorchScript, with a second method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale

    @torch.jit.export
    def backwards(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


class Scripted(nn.Module):
    """Beside a layer of torch's own, whose gather is under way as usual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.scripted = torch.jit.script(Scripts())

    def forward(self, x: Tensor) -> Tensor:
        return self.scripted.backwards(x) + self.scripted(x) + self.first(x)  # type: ignore[no-any-return]


class Traced(Scripted):
    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.trace(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.rand(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.scripted(x) + self.first(x)  # type: ignore[no-any-return]


def output(model: nn.Module, kept: Sequence[nn.Parameter]) -> Seen:
    """The output of the whole model."""
    return [model(torch.ones(2, WIDTH))]


def read_all(params: Sequence[Tensor]) -> Seen:
    return [read_natively(built, param) for param in params]


Way = tuple[Callable[[], nn.Module], Callable[[Any, Sequence[nn.Parameter]], Seen]]
"""A model, and what is read of it right after a step, given parameters that were listed before."""

WAYS: dict[str, Way] = {
    "its own weight": (Own, output),
    "a list that the module keeps": (Keeps, output),
    "a list that the module makes later": (KeepsLater, output),
    "a list and a dict of parameters": (InADict, output),
    "a lookup of the module's own": (LooksUp, output),
    "a tied weight": (Tied, output),
    "a hook": (WithAHook, output),
    "a scripted module and its second method": (Scripted, output),
    "a traced module": (Traced, output),
    "a scripted module's forward": (Scripted, lambda model, _: [model.scripted.forward(torch.ones(2, WIDTH))]),
    "a copy of a scripted module": (Scripted, lambda model, _: list(copy.deepcopy(model.scripted).parameters())),
    "after one look at a kept list": (Parent, lambda model, kept: read_all([param.view_as(param) for param in kept])),
}

OUTSIDE: dict[str, Way] = {
    "a child's weight": (Parent, output),
    "a forward that is called by name": (ByName, output),
    "a list of all parameters": (Parent, lambda model, _: read_all(list(model.parameters()))),
    "a list from before the step": (Parent, lambda _, kept: read_all(kept)),
}
"""C++ reads a parameter outside the forward of its module: the program waits."""


def read_after_a_late_step(
    path: str, way: str, config: dict[str, Any]
) -> tuple[list[bool], list[Tensor], list[Tensor]]:
    """(whether this rank waited for the last one, what it saw, what it sees when nothing is under way)."""
    global built
    built = path
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(0)
    make, read = {**WAYS, **OUTSIDE}[way]
    model = make()
    kept = list(model.parameters())
    settings = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 32, **config}
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(**settings))
    optimizer = DistributedOptimizer(ddp, lr=0.3)
    waited, seen, expected = [], [], []
    for step in range(2):
        ddp(torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        ddp.finish_grad_sync()
        began = time.perf_counter()
        if rank == last - 1:
            dist.send(torch.zeros(1), last)
        elif rank == last:
            dist.recv(torch.zeros(1), last - 1)
            time.sleep(LATE)
        optimizer.step()
        if way in OUTSIDE:
            optimizer.finish_param_sync()
        with torch.no_grad():
            seen += [value.clone() for value in read(model, kept)]
        waited.append(time.perf_counter() - began >= LATE)
        optimizer.finish_param_sync()
        with torch.no_grad():
            expected += [value.clone() for value in read(model, kept)]
        ddp.zero_grad_buffer()
    return waited, seen, expected


def check(way: str, ranks: int, config: dict[str, Any]) -> None:
    results = run_ranks(read_after_a_late_step, ranks, build_native_reader(), way, config)
    for _, seen, expected in results:
        assert seen
        for one, other in zip(seen, expected, strict=True):
            assert torch.equal(one, other)
    waited = results[-2][0]  # the late rank's neighbour, who has nothing else to wait for
    assert all(waited), "or the test shows nothing"


@pytest.mark.in_turn
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(1)
def test_new_weights_are_read_in_c(way: str) -> None:
    check(way, 2, {"overlap_param_gather": True})


@pytest.mark.parametrize("way", OUTSIDE)
@pytest.mark.sampled(1)
def test_a_program_waits_before_c_reads_outside_forwards(way: str) -> None:
    check(way, 2, {"overlap_param_gather": True})


@pytest.mark.parametrize("way", ["its own weight", "a list and a dict of parameters", "a tied weight"])
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_hybrid(way: str) -> None:
    check(way, 4, {"overlap_param_gather": True, "num_distributed_optimizer_instances": 2})
