"""The ways in which the library runs a model, and one iteration of a model in one way on one rank."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
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
from .comparison import Piece
from .plain import Part, Prepare
from .program import Program

__all__ = ["WAYS", "RankResult", "Setting", "Way", "run_way"]

_NO_CLIPPING = 1e30
"""Norm at which gradients are clipped: the norm is computed, and nothing changes."""
LEARNING_RATE, WEIGHT_DECAY = 0.05, 0.1
"""AdamW's, large, so that one step changes bf16 weights."""


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
    """AdamW's, as large as gradients are, so that the step does not magnify rounding errors of small gradients."""

    @property
    def adamw(self) -> dict[str, float]:
        """Options of AdamW."""
        return {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "eps": self.adam_eps}


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


def run_way(program: Program, way: Way, parts: Sequence[Part], setting: Setting, prepare: Prepare) -> RankResult:
    """One iteration on this rank: ``parts`` are its microbatches."""
    module = program.make()
    prepare(module)
    if way.shards_parameters:
        model, end = _shard(module, way, setting)
    else:
        model, end = _wrap(module, way, setting)
    queue = WgradQueue()
    for index, part in enumerate(parts):
        with nullcontext() if index + 1 == len(parts) else model.no_sync():
            with delayed_wgrad(queue) if way.delayed else nullcontext():
                loss = program.loss_of(model, own_copy(part.batch), part.draw)
            (loss / len(parts)).backward()
            queue.drain()
    model.finish_grad_sync()
    return end()


def _wrap(module: nn.Module, way: Way, setting: Setting) -> tuple[Any, Callable[[], RankResult]]:
    """The wrapped model, and what updates the weights at the end of the iteration."""
    sharded = way.parallel != "ddp"
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=sharded,
        num_distributed_optimizer_instances=_num_instances() if way.parallel == "hybrid" else 1,
        num_buckets=4,
        **way.options,
    )
    form = "zero1" if sharded else "ddp"
    model = _parallelize(module, form, way, setting, config=config, expert_process_group=setting.experts())
    if sharded:
        optimizer: Any = make_optimizer(model, max_grad_norm=_NO_CLIPPING, **setting.adamw)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **setting.adamw)

    def end() -> RankResult:
        grads = list(_held_grads(model))
        norm = None if sharded else clip_grad_norm(model, _NO_CLIPPING)
        optimizer.step()
        weights = [Piece(name, 0, _flat(param)) for name, param in module.named_parameters()]
        fused_writes = sum(record.num_fused_writes for record in model.records)
        return RankResult(grads, float(optimizer.grad_norm if norm is None else norm), weights, fused_writes)

    return model, end


def _shard(module: nn.Module, way: Way, setting: Setting) -> tuple[Any, Callable[[], RankResult]]:
    """The sharded model, and what updates the weights at the end of the iteration."""
    mesh: Any = None
    if way.parallel == "hsdp":
        outer = _num_instances()
        mesh = init_device_mesh("cpu", (outer, dist.get_world_size() // outer), mesh_dim_names=("outer", "inner"))
    form = "hsdp" if way.parallel == "hsdp" else "zero3"
    as_stored = MixedPrecisionPolicy()
    model = _parallelize(module, form, way, setting, mesh=mesh, mixed_precision=as_stored, **way.options)
    params: list[Any] = list(model.parameters())
    optimizer = make_optimizer(model, max_grad_norm=_NO_CLIPPING, fused=False, **setting.adamw)

    def end() -> RankResult:
        held = [param for param in params if param.requires_grad and param.shard.numel]
        grads = [Piece(param.shard.name, param.shard.start, _flat(param.grad.to_local())) for param in held]
        optimizer.step()
        weights = [Piece(param.shard.name, param.shard.start, _flat(param)) for param in params]
        records = [record for unit in model.units for bucket in unit.buckets for record in bucket.records]
        fused_writes = sum(record.num_fused_writes for record in records)
        return RankResult(grads, float(optimizer.grad_norm), weights, fused_writes)

    return model, end


def _parallelize(module: nn.Module, form: str, way: Way, setting: Setting, **options: Any) -> Any:
    units = [*setting.units(module)]
    recompute = way.recompute and bool(units)
    return parallelize(module, form, units=units, fuse=way.converted, recompute=recompute, **options)


def _num_instances() -> int:
    """Of a hybrid: the smallest divisor of the number of ranks, 1 of one rank."""
    ranks = dist.get_world_size()
    return next((n for n in range(2, ranks + 1) if ranks % n == 0), 1)


def _held_grads(model: DistributedDataParallel) -> Iterator[Piece]:
    """The reduced gradients of the ranges that this rank owns."""
    for bucket in model.buckets:
        first, last = model.owned_range(bucket.layout)
        for slot in bucket.layout.slots:
            base = slot.start - bucket.layout.start
            start, end = max(base, first), min(slot.end - bucket.layout.start, last)
            if start < end:
                yield Piece(slot.spec.name, start - base, bucket.grad_data[start:end].clone())


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().reshape(-1)
