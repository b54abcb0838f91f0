"""The ways in which the library runs a model, and one iteration of a model in one way on one rank."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...ddp import DistributedDataParallel, clip_grad_norm
from ...ddp.collectives.rank_grid import Ranks
from ...ddp.plan.model_slice import ModelSlice, model_slice_of
from ...ddp.torch_grads.muon_groups import MuonGroups, muon_groups
from ...fsdp import MixedPrecisionPolicy
from ...te_integration import WgradQueue, delayed_wgrad
from ..parallelizing.make_optimizer import make_optimizer
from ..parallelizing.parallelize import parallelize
from .batches import own_copy, part_of_tokens
from .comparison import Piece
from .plain import Part, Prepare
from .program import Program, set_seed

__all__ = ["WAYS", "RankResult", "Setting", "Way", "cut_by_tp_plan", "run_way"]

_NO_CLIPPING = 1e30
"""Norm at which gradients are clipped: the norm is computed, and nothing changes."""


class Way(NamedTuple):
    """One way to run a model."""

    parallel: str
    """As in ``parallelize``: ddp, zero1, zero3 or hsdp."""
    converted: bool = False
    """``convert_linears`` first: weight gradients are written into ``main_grad``."""
    recompute: bool = False
    """Activations of each unit are computed again in backward."""
    delayed: bool = False
    """Weight gradients are computed after each backward, from a ``WgradQueue``."""
    cut: Literal["tensor_parallel", "context_parallel"] | None = None
    """Two ranks compute each row together: they hold the model together, or have half of the tokens each."""
    ep: int = 1
    """Number of ranks that hold the experts of Hugging Face models together."""
    options: Mapping[str, Any] = {}
    """Further options of ``parallelize``, which overlaps reductions and gathers unless they say otherwise. A function
    is called on each rank."""

    @property
    def shards_parameters(self) -> bool:
        """Whether ``fully_shard`` runs the model, in units."""
        return self.parallel in ("zero3", "hsdp")

    @property
    def ranks_of_row(self) -> int:
        """How many ranks compute each row together."""
        return 1 if self.cut is None else 2


def _instances() -> DeviceMesh:
    """Shards lie inside each instance of ranks, with copies in the other instances: as few as the ranks allow."""
    ranks = dist.get_world_size()
    instances = next((n for n in range(2, ranks + 1) if ranks % n == 0), 1)
    return init_device_mesh("cpu", (instances, ranks // instances), mesh_dim_names=("outer", "inner"))


WAYS: Mapping[str, Way] = {
    "ddp": Way("ddp", options={"overlap_grad_reduce": False}),
    "ddp_converted": Way("ddp", converted=True),
    "ddp_find_unused": Way("ddp", converted=True, options={"find_unused_parameters": True}),
    "ddp_recompute": Way("ddp", recompute=True),
    "zero1": Way("zero1"),
    "zero1_converted": Way("zero1", converted=True),
    "zero1_delayed": Way("zero1", converted=True, delayed=True, options={"overlap_param_gather": False}),
    "hybrid_converted": Way("zero1", converted=True, options={"mesh": _instances}),
    "fsdp": Way("zero3"),
    "fsdp_converted": Way("zero3", converted=True),
    "fsdp_recompute": Way("zero3", converted=True, recompute=True),
    "fsdp_delayed": Way("zero3", converted=True, delayed=True),
    "fsdp_once": Way("zero3", converted=True, options={"reduce_every_microbatch": False}),
    "hsdp_converted": Way("hsdp", converted=True, options={"mesh": _instances}),
    "ddp_tp": Way("ddp", cut="tensor_parallel"),
    "zero1_tp_converted": Way("zero1", converted=True, cut="tensor_parallel"),
    "zero1_cp_converted": Way("zero1", converted=True, cut="context_parallel"),
    "zero1_ep_converted": Way("zero1", converted=True, ep=2),
    "fsdp_ep_converted": Way("zero3", converted=True, ep=2),
    "fsdp_cp_converted": Way("zero3", converted=True, cut="context_parallel"),
}
"""By name. All of them accumulate microbatches under ``no_sync``."""


Cut = Callable[[nn.Module, DeviceMesh], object]
"""Changes a copy of the model, given the mesh of the ranks that compute its rows together."""


def cut_by_tp_plan(model: Any, mesh: DeviceMesh) -> None:
    """Cut a model of Hugging Face as its ``tp_plan`` says. transformers itself does so where it loads one."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(model.tp_plan))


class Setting(NamedTuple):
    """What all ways have in common."""

    units: Callable[[nn.Module], Iterable[nn.Module]]
    """The modules inside the model that become units of their own, and are recomputed."""
    experts: Ranks | Callable[[], Ranks] = None
    """The ranks that hold the same experts; a function is called on each rank. None: all ranks."""
    adamw: Mapping[str, Any] = {}
    """Options of AdamW."""
    muon: Mapping[str, Any] | None = None
    """Options of ``muon_groups``; None: AdamW updates all parameters."""

    most_ep: int = 1
    """Among how many ranks the model's experts can be shared out."""
    tensor_parallel: Cut | None = None
    """Cuts a model over tensor-parallel ranks."""
    context_parallel: Cut | None = None
    """Lets a model take its rank's part of the tokens of each row."""

    def fits(self, way: Way) -> bool:
        """Whether there is what the way needs."""
        return self.most_ep % way.ep == 0 and (way.cut is None or getattr(self, way.cut) is not None)

    def matrices(self, module: nn.Module) -> MuonGroups:
        """The parameters that Muon updates."""
        return MuonGroups([], {}) if self.muon is None else muon_groups(module, **self.muon)


class RankResult(NamedTuple):
    """What one rank has after one iteration."""

    grads: list[Piece]
    """The reduced gradients that the rank holds."""
    norm: float
    """The global norm of gradients, as the library computes it."""
    weights: list[Piece]
    """After the optimizer's step."""
    fused_writes: int
    """Weight-gradient products that were written into ``main_grad``."""


def run_way(program: Program, way: Way, parts: Sequence[Part], setting: Setting, prepare: Prepare) -> RankResult:
    """One iteration on this rank: ``parts`` are its microbatches."""
    # 1. the model
    module = program.make()
    prepare(module)
    options = dict(way.options)
    if way.shards_parameters:
        options["mixed_precision"] = MixedPrecisionPolicy()  # parameters stay in the dtypes that they have
    else:
        options |= {"num_buckets": 4, "expert_process_group": setting.experts}
    if way.ep > 1:
        options["ep"] = way.ep
    options = {name: value() if callable(value) else value for name, value in options.items()}
    muon = setting.matrices(module)
    if way.parallel == "zero1":
        options["keep_matrices_whole"] = muon.matrices
    part = (0, 1)  # of the tokens of each row
    if way.cut is not None:
        rows = dist.get_world_size() // way.ranks_of_row
        mesh = init_device_mesh("cpu", (rows, way.ranks_of_row), mesh_dim_names=("rows", "cut"))
        getattr(setting, way.cut)(module, mesh["cut"])
        if way.cut == "tensor_parallel":
            options["mesh"] = mesh["rows"]
        else:
            part = mesh.get_local_rank("cut"), way.ranks_of_row
    units = [*setting.units(module)]
    recompute = way.recompute and bool(units)
    model: Any = parallelize(module, way.parallel, units=units, fuse=way.converted, recompute=recompute, **options)
    params: list[Any] = list(model.parameters())
    # 2. its optimizer: a stock one under "ddp"
    is_stock = way.parallel == "ddp" and setting.muon is None
    optimizer: Any
    if is_stock:
        optimizer = torch.optim.AdamW(params, **setting.adamw)
    else:
        optimizer = make_optimizer(model, max_grad_norm=_NO_CLIPPING, param_groups=muon.groups, **setting.adamw)
    # 3. the microbatches
    queue = WgradQueue()
    for index, each in enumerate(parts):
        batch = own_copy(each.batch) if part == (0, 1) else part_of_tokens(own_copy(each.batch), *part)
        with nullcontext() if index + 1 == len(parts) else model.no_sync():
            set_seed(program.seed + each.draw)
            with delayed_wgrad(queue) if way.delayed else nullcontext():
                loss = program.loss_of(model, batch)
            (loss / len(parts)).backward()
            queue.drain()
    model.finish_grad_sync()
    # 4. the step, for which gradients may be cleared
    if way.shards_parameters:
        held = [param for param in params if param.requires_grad and param.shard.numel]
        shards = [(param, param.shard.name, param.shard.start, param.shard.cut_slice) for param in held]
        grads = [_in_whole(Piece(name, start, _flat(param.grad.to_local())), own) for param, name, start, own in shards]
    else:
        named = dict(module.named_parameters())  # those of experts are no slices of the wrapper's
        slices = {name: model.model_slices.get(name) or model_slice_of(param) for name, param in named.items()}
        grads = list(_held_grads(model, slices))
    if is_stock:
        optimizer.grad_norm = clip_grad_norm(model, _NO_CLIPPING)
    optimizer.step()
    if way.shards_parameters:
        weights = [_in_whole(Piece(name, start, _flat(param)), own) for param, name, start, own in shards]
        records = [record for unit in model.units for bucket in unit.buckets for record in bucket.records]
    else:
        weights = [_in_whole(Piece(name, 0, _flat(param)), slices[name]) for name, param in named.items()]
        records = model.records
    return RankResult(grads, float(optimizer.grad_norm), weights, sum(record.num_fused_writes for record in records))


def _held_grads(model: DistributedDataParallel, slices: Mapping[str, ModelSlice | None]) -> Iterator[Piece]:
    """The reduced gradients of the ranges that this rank owns."""
    for bucket in model.buckets:
        first, last = model.owned_range(bucket.layout)
        for slot in bucket.layout.slots:
            base = slot.start - bucket.layout.start
            start, end = max(base, first), min(slot.end - bucket.layout.start, last)
            if start < end:
                piece = Piece(slot.spec.name, start - base, bucket.reduced[start - first : end - first].clone())
                yield _in_whole(piece, slices[piece.name])


def _in_whole(piece: Piece, held: ModelSlice | None) -> Piece:
    """A piece of the parameter that tensor-parallel ranks hold together, where ``piece`` is of this rank's slice."""
    if held is None or held.dim is None:
        return piece
    places = torch.arange(math.prod(held.shape)).view(held.shape)
    found = held.part_of(places).reshape(-1)[piece.start : piece.start + len(piece.values)]
    return Piece(piece.name, int(found[0]) if len(found) else 0, piece.values, found)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().reshape(-1)
