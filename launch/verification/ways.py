"""The ways in which the library runs a model, and one iteration of a model in one way on one rank."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ...ddp import DistributedDataParallel, DistributedDataParallelConfig, clip_grad_norm
from ...ddp.collectives.world import Ranks
from ...fsdp import MixedPrecisionPolicy
from ...te_integration import WgradQueue, delayed_wgrad
from ..parallelizing.make_optimizer import make_optimizer
from ..parallelizing.parallelize import parallelize
from .batches import own_copy
from .program import Program

__all__ = ["WAYS", "Piece", "RankResult", "Setting", "Way", "run_way"]

_NO_CLIPPING = 1e30
"""Norm at which gradients are clipped: the norm is computed, and nothing changes."""
LEARNING_RATE, WEIGHT_DECAY = 0.05, 0.1
"""Of AdamW: large, so that the first step changes bf16 weights too."""


class Way(NamedTuple):
    """One way to run a model."""

    parallel: str
    """As in ``maingrad train``: ddp, zero1, hybrid, fsdp or hsdp."""
    converted: bool = False
    """``convert_linears`` first: weight gradients are written into ``main_grad``."""
    recompute: bool = False
    """Activations of each unit are computed again in backward."""
    delayed: bool = False
    """Weight gradients are computed after each backward, from a ``WgradQueue``."""
    options: Mapping[str, Any] = {}
    """Further options of the wrapper."""

    @property
    def shards_parameters(self) -> bool:
        """Whether ``fully_shard`` runs the model, in units."""
        return self.parallel in ("fsdp", "hsdp")


_OVERLAP = {"overlap_grad_reduce": True}
WAYS: Mapping[str, Way] = {
    "ddp": Way("ddp"),
    "ddp_converted": Way("ddp", converted=True, options=_OVERLAP),
    "ddp_find_unused": Way("ddp", converted=True, options={**_OVERLAP, "find_unused_parameters": True}),
    "ddp_recompute": Way("ddp", recompute=True, options=_OVERLAP),
    "zero1": Way("zero1", options={**_OVERLAP, "overlap_param_gather": True}),
    "zero1_converted": Way("zero1", converted=True, options={**_OVERLAP, "overlap_param_gather": True}),
    "zero1_delayed": Way("zero1", converted=True, delayed=True, options=_OVERLAP),
    "hybrid_converted": Way("hybrid", converted=True, options={**_OVERLAP, "overlap_param_gather": True}),
    "fsdp": Way("fsdp"),
    "fsdp_converted": Way("fsdp", converted=True),
    "fsdp_recompute": Way("fsdp", converted=True, recompute=True),
    "fsdp_delayed": Way("fsdp", converted=True, delayed=True),
    "fsdp_once": Way("fsdp", converted=True, options={"reduce_every_microbatch": False}),
    "hsdp_converted": Way("hsdp", converted=True),
}
"""By name. All of them accumulate microbatches under ``no_sync``."""


class Setting(NamedTuple):
    """What all ways have in common."""

    units: Callable[[nn.Module], Iterable[nn.Module]]
    """The modules inside the model that become units of their own, and are recomputed."""
    experts: Callable[[], Ranks]
    """Called on each rank: the ranks that hold the same experts."""
    adam_eps: float
    """Of AdamW: as large as gradients are, so that the step does not magnify rounding errors of small gradients."""
    between: Callable[[nn.Module], None] = lambda model: None
    """Changes each copy first; for experiments."""


class Piece(NamedTuple):
    """Elements [start, start + len(values)) of one flattened parameter, or of its gradient."""

    name: str
    start: int
    values: Tensor


class RankResult(NamedTuple):
    """What one rank has after one iteration."""

    grads: list[Piece]
    """The reduced gradients that the rank holds."""
    norm: float
    """The global norm of gradients, as the library computes it."""
    weights: list[Piece]
    """After the step of AdamW."""
    fused_writes: int
    """Weight-gradient products that were written into ``main_grad``."""


class _Wrapped(NamedTuple):
    model: Any
    step: Callable[[], tuple[list[Piece], float, list[Piece]]]
    """Ends the gradients' reduction and updates the weights: gradients, norm, weights."""
    fused_writes: Callable[[], int]


def run_way(program: Program, way: Way, batches: Sequence[Any], draws: Sequence[int], setting: Setting) -> RankResult:
    """One iteration on this rank: ``batches`` are its microbatches."""
    module = program.make()
    setting.between(module)
    wrapped = _shard(module, way, setting) if way.shards_parameters else _wrap(module, way, setting)
    queue = WgradQueue()
    for index, (batch, draw) in enumerate(zip(batches, draws, strict=True)):
        synced: AbstractContextManager[Any] = nullcontext() if index + 1 == len(batches) else wrapped.model.no_sync()
        with synced:
            with delayed_wgrad(queue) if way.delayed else nullcontext():
                loss = program.loss_of(wrapped.model, own_copy(batch), draw)
            (loss / len(batches)).backward()
            queue.drain()
    grads, norm, weights = wrapped.step()
    return RankResult(grads, norm, weights, wrapped.fused_writes())


def _num_instances() -> int:
    """Of a hybrid: the smallest divisor of the number of ranks, 1 of one rank."""
    ranks = dist.get_world_size()
    return next((n for n in range(2, ranks + 1) if ranks % n == 0), 1)


def _parallelize(module: nn.Module, form: str, way: Way, setting: Setting, **options: Any) -> Any:
    units = [*setting.units(module)]
    recompute = way.recompute and bool(units)
    return parallelize(module, form, units=units, fuse=way.converted, recompute=recompute, **options)


def _wrap(module: nn.Module, way: Way, setting: Setting) -> _Wrapped:
    sharded = way.parallel != "ddp"
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded,
        num_distributed_optimizer_instances=_num_instances() if way.parallel == "hybrid" else 1,
        num_buckets=4,
        **way.options,
    )
    model = _parallelize(
        module, "zero1" if sharded else "ddp", way, setting, config=config, expert_process_group=setting.experts()
    )
    options: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "eps": setting.adam_eps}
    if sharded:
        optimizer: Any = make_optimizer(model, max_grad_norm=_NO_CLIPPING, **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step() -> tuple[list[Piece], float, list[Piece]]:
        model.finish_grad_sync()
        grads = list(_held_grads(model))
        if sharded:
            optimizer.step()
            norm = float(optimizer.grad_norm)
        else:
            norm = float(clip_grad_norm(model, _NO_CLIPPING))
            optimizer.step()
        return grads, norm, [Piece(name, 0, _flat(param)) for name, param in module.named_parameters()]

    return _Wrapped(model, step, lambda: sum(record.num_fused_writes for record in model.records))


def _held_grads(model: DistributedDataParallel) -> Iterator[Piece]:
    """The reduced gradients of the ranges that this rank owns."""
    for bucket in model.buckets:
        first, last = model.owned_range(bucket.layout)
        for slot in bucket.layout.slots:
            base = slot.start - bucket.layout.start
            start, end = max(base, first), min(slot.end - bucket.layout.start, last)
            if start < end:
                yield Piece(slot.spec.name, start - base, bucket.grad_data[start:end].clone())


def _shard(module: nn.Module, way: Way, setting: Setting) -> _Wrapped:
    mesh: Any = None
    if way.parallel == "hsdp":
        outer = _num_instances()
        mesh = init_device_mesh("cpu", (outer, dist.get_world_size() // outer), mesh_dim_names=("outer", "inner"))
    form = "hsdp" if way.parallel == "hsdp" else "zero3"
    as_stored = MixedPrecisionPolicy()
    model = _parallelize(module, form, way, setting, mesh=mesh, mixed_precision=as_stored, **way.options)
    params: list[Any] = list(model.parameters())
    optimizer = make_optimizer(
        model, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, eps=setting.adam_eps, foreach=False, fused=False
    )

    def step() -> tuple[list[Piece], float, list[Piece]]:
        model.finish_grad_sync()
        trained = [param for param in params if param.requires_grad]
        grads = [
            Piece(param.shard.name, param.shard.start, _flat(param.grad.to_local()))
            for param in trained
            if param.shard.numel
        ]
        norm = float(torch.nn.utils.clip_grad_norm_(params, _NO_CLIPPING))
        optimizer.step()
        return grads, norm, [Piece(param.shard.name, param.shard.start, _flat(param)) for param in params]

    def fused_writes() -> int:
        return sum(
            record.num_fused_writes for unit in model.units for bucket in unit.buckets for record in bucket.records
        )

    return _Wrapped(model, step, fused_writes)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().reshape(-1)
