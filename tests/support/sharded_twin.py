"""A fully sharded model beside a plain twin, which sees the batches of all ranks one after the other."""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp.torch_grads.sharded_grad import ShardedGrad
from maingrad.fsdp import FSDPModule, fully_shard
from maingrad.fsdp.tensors.parameter import ShardedParameter
from maingrad.launch import simulate

__all__ = [
    "KINDS",
    "WIDTH",
    "Block",
    "Net",
    "assert_same_grads",
    "assert_same_weights",
    "batches_of",
    "both",
    "mean_loss",
    "no_sync",
    "one_backward",
    "options_of",
    "plain_grads",
    "rank_and_size",
    "ranks_of",
    "shard_blocks",
    "train_beside",
]

WIDTH = 7
TOLERANCE = 1e-9
"""Relative, of a gradient's or weight's norm: models are fp64, so that sums that cancel are no excuse."""


class Block(nn.Module):
    """A norm and a layer around a residual."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


class Net(nn.Module):
    """Layers of odd sizes and a scalar around blocks."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.scale = nn.Parameter(torch.tensor(0.75))
        self.head = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def shard_blocks(model: nn.Module, **options: Any) -> None:
    """Every ``Block`` a unit, and the model around them."""
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **options)
    fully_shard(model, **options)


KINDS = {"alone": 0, "zero1": 2, "zero2": 2, "zero3": 3, "hsdp": 4, "hsdp_zero1": 4}
"""Ways to shard, and on how many ranks tests try each: 0 is a world without ``torch.distributed``. With ", once" after
its name, gradients are reduced once in an iteration."""


def ranks_of(kind: str) -> int:
    """On how many ranks a kind is tried."""
    return KINDS[kind.removesuffix(", once")]


def options_of(kind: str) -> dict[str, Any]:
    """Arguments of ``fully_shard``, on each rank."""
    if kind.endswith(", once"):
        return options_of(kind.removesuffix(", once")) | {"reduce_every_microbatch": False}
    if kind == "alone":
        return {}
    if kind in ("hsdp", "hsdp_zero1"):
        return {"placements": kind, "mesh": init_device_mesh("cpu", (2, dist.get_world_size() // 2))}
    return {"placements": kind}


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def batches_of(
    rank: int, count: int, *, step: int = 0, features: int = 5, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """One rank's microbatches of one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(4, features, generator=generator, dtype=dtype) for _ in range(count)]


def mean_loss(outputs: Any) -> Tensor:
    """Of every tensor in it. Not quadratic at the optimum, so that no gradient vanishes."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return sum((tensor - 1).square().mean() for tensor in tensors)  # type: ignore[return-value]


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Of a twin: nothing."""
    return model.no_sync() if isinstance(model, FSDPModule) else nullcontext()


def one_backward(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """All microbatches of an iteration, as the documentation has it."""
    for batch in batches[:-1]:
        with no_sync(model):
            (mean_loss(model(batch)) / len(batches)).backward()
    (mean_loss(model(batches[-1])) / len(batches)).backward()


Run = Callable[[nn.Module, Sequence[Tensor]], None]


def plain_grads(twin: nn.Module, run: Run, everyones: Iterable[Sequence[Tensor]]) -> dict[str, Tensor | None]:
    """The mean over ranks of what ``run`` leaves in ``.grad`` for each rank's batches; it stays in the twin's."""
    sums: dict[str, Tensor | None] = dict.fromkeys(name for name, _ in twin.named_parameters())
    size = 0
    for batches in everyones:
        size += 1
        twin.zero_grad()
        run(twin, batches)
        for name, param in twin.named_parameters():
            if param.grad is not None:
                before = sums[name]
                sums[name] = param.grad if before is None else before + param.grad
    for name, param in twin.named_parameters():
        found = sums[name]
        param.grad = sums[name] = None if found is None else found / size
    return sums


def assert_same_grads(model: nn.Module, expected: dict[str, Tensor | None], tolerance: float = TOLERANCE) -> None:
    """``.grad`` of every shard; zeros are as good as None where nothing is expected."""
    names = dict(model.named_parameters())
    assert names.keys() == expected.keys()
    for name, param in names.items():
        found, wanted = param.grad, expected[name]
        if found is None:
            assert wanted is None or not wanted.any(), f"{name} has no gradient"
        else:
            whole = torch.zeros(_shard_of(param)[0]) if wanted is None else wanted
            local = found.to_local() if isinstance(found, ShardedGrad) else found
            _assert_close(name, local, _shard_of(param), whole, tolerance)


def assert_same_weights(model: nn.Module, twin: nn.Module, tolerance: float = TOLERANCE) -> None:
    plain = dict(twin.named_parameters())
    names = dict(model.named_parameters())
    assert names.keys() == plain.keys()
    for name, param in names.items():
        _assert_close(name, param, _shard_of(param), plain[name].detach(), tolerance)


def _shard_of(param: Tensor) -> tuple[tuple[int, ...], int, int]:
    """Shape of the whole, and this rank's elements; of an ignored parameter, all."""
    if isinstance(param, ShardedParameter):
        return param.shard.shape, param.shard.start, param.shard.end
    return tuple(param.shape), 0, param.numel()


def _assert_close(
    name: str, piece: Tensor, shard: tuple[tuple[int, ...], int, int], whole: Tensor, tolerance: float
) -> None:
    shape, start, end = shard
    assert tuple(whole.shape) == shape, name
    found = torch.empty(end - start, dtype=piece.dtype)
    with torch.no_grad():
        found.copy_(piece.reshape(-1))
    wanted = whole.reshape(-1)[start:end]
    error = (found.double() - wanted.double()).norm()
    assert bool(torch.isfinite(error)), f"{name}: {found}"
    assert error <= tolerance * whole.double().norm(), f"{name}: {found} where {wanted} was expected"


def both(
    make: Callable[[], nn.Module], shard: Callable[[nn.Module], Any], dtype: torch.dtype | None = torch.float64
) -> tuple[Any, nn.Module]:
    """The sharded model and its twin, of the same seed on all ranks. dtype: None leaves the model's own."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make() if dtype is None else make().to(dtype))
    model, twin = models
    shard(model)
    return model, twin


def train_beside(
    kind: str,
    make: Callable[[], nn.Module] = Net,
    shard: Callable[..., Any] = shard_blocks,
    run: Run = one_backward,
    *,
    ranks: int | None = None,
    steps: int = 2,
    microbatches: int = 2,
    features: int = 5,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    tolerance: float = TOLERANCE,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
) -> None:
    """Train both on simulated ranks, and compare gradients and weights after every step.

    kind       one of ``KINDS``, perhaps with ", once"
    ranks      None: those of the kind; 0: without ``torch.distributed``
    shard      called with the model and the options of the kind
    run        the backwards of one iteration over one rank's batches; called with the model, and with its twin
    optimizer  makes one for either; None: SGD with momentum
    """

    def on_each_rank() -> None:
        rank, size = rank_and_size()
        model, twin = both(make, lambda model: shard(model, **options_of(kind)), dtype)
        batches = functools.partial(batches_of, features=features, dtype=dtype or torch.float32)
        make_optimizer = optimizer or (lambda any: torch.optim.SGD(any.parameters(), lr=0.1, momentum=0.9))
        mine, plain = make_optimizer(model), make_optimizer(twin)
        for step in range(steps):
            run(model, batches(rank, microbatches, step=step))
            everyones = [batches(other, microbatches, step=step) for other in range(size)]
            assert_same_grads(model, plain_grads(twin, run, everyones), tolerance)
            mine.step()
            plain.step()
            assert_same_weights(model, twin, tolerance)
            mine.zero_grad()

    ranks = ranks_of(kind) if ranks is None else ranks
    if ranks:
        simulate(on_each_rank, ranks, seed=seed)
    else:
        on_each_rank()
