"""``state_dict`` and ``load_state_dict`` of fully sharded modules, in DTensors that are cut between rows.

``state_dict()`` returns what modules of PyTorch's FSDP2 return: DTensors with ``Shard(0)`` over the inner ranks. So
torch.distributed.checkpoint, and every tool for DTensors, accepts it. ``load_state_dict()`` takes DTensors of the same
or of other ranks, and whole tensors. Both are collective over the module's ranks, one parameter at a time.

Shards of this library end at any element; DTensors end between rows. Both are ranges of the flattened parameter. So one
all-to-all (``exchange``) converts between them, and each element is sent once::

    parameter of 5 rows of 4      0    4    8    12   16   20
    this library, 2 ranks         |---- rank 0 -----|--- rank 1 ---|          any element
    Shard(0), 2 ranks             |--- rank 0 ----|---- rank 1 ----|          rows: torch.chunk
"""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...ddp.collectives.failure_report import gather
from ...ddp.collectives.rank_grid import RankGrid, device_types_of
from ...ddp.contract.module import has_shard
from ...ddp.plan.cut import Range
from ...ddp.plan.model_slice import ModelSlice
from ...ddp.torch_grads.over_ranks import whole
from ..tensors.parameter import ShardedParameter, ShardInfo, local_shape

__all__ = [
    "disagreement",
    "exchange",
    "install_state_dict_hooks",
    "is_kept",
    "misfit",
    "rows_of_rank",
    "to_dtensor",
    "to_shard",
]

_MESH = "_maingrad_mesh"
"""Attribute of sharded parameters: the mesh of their DTensors."""
_KEPT = "_maingrad_kept"
"""Attribute of sharded parameters: the versions before and after loads that have changed no value."""

# torch.distributed.tensor is imported in functions: the import takes seconds, and needs torch.distributed.


def install_state_dict_hooks(module: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Have ``state_dict`` and ``load_state_dict`` of ``module``, and of modules in it, translate to DTensors and back.

    module  a module whose shards are registered; modules inside that have these hooks keep them
    mesh    the mesh of the DTensors, which the user has sharded over. None: a mesh of one dim over the inner ranks

    Collective where the module has slices of tensor parallelism, whose mesh has one more dim.
    """
    of_slices: DeviceMesh | None = None
    for owner in module.modules():
        own = [param for param in owner._parameters.values() if isinstance(param, ShardedParameter)]
        for param in own:
            found = _slice_of(param.shard)
            if of_slices is None and found is not None and _MESH not in param.__dict__:
                of_slices = _mesh_of_slices(param, found, mesh)
            param.__dict__.setdefault(_MESH, mesh if found is None else of_slices)
        if own and _after_saving not in owner._state_dict_hooks.values():
            owner.register_state_dict_post_hook(_after_saving)
            owner.register_load_state_dict_pre_hook(_before_loading)


def is_kept(param: Tensor, version: int) -> bool:
    """Whether a parameter's writes since ``version`` are loads of the values that it had."""
    first, last = param.__dict__.get(_KEPT, (0, -1))
    return bool(first <= version and last == param._version)


def to_dtensor(param: ShardedParameter, value: Tensor) -> Tensor:
    """The DTensor of the whole parameter's shape, in new memory; in a world of one a plain tensor. Collective.

    value  the shard of ``param``, or optimizer state of the same shape
    """
    info, grid, found = param.shard, param.shard.grid, _slice_of(param.shard)
    shape = _whole_shape(info)
    if info.cut_slice is not found:
        local = whole(value.detach(), info)[slice(*rows_of_rank(shape[0], grid.inner_rank, grid.inner_size))].clone()
    else:
        local = _rows_of(info, value.detach().view(-1))
    if grid.inner is None and found is None:
        return local
    from torch.distributed.tensor import DTensor

    mesh, stride = _mesh_of(param), torch.empty(shape, device="meta").stride()
    dtensor = DTensor.from_local(local, mesh, _placements(info, mesh), run_check=False, shape=shape, stride=stride)
    # DTensor.from_local moves an offloaded shard to the mesh's device.
    return dtensor if local.device.type == mesh.device_type else dtensor.to(local.device)


def _rows_of(info: ShardInfo, flat: Tensor) -> Tensor:
    """This rank's rows of what ``grid`` shares, of which ``flat`` are this rank's elements. Collective."""
    grid, across, inside = info.grid, _ranges_across(info), _ranges_inside(info)
    if len(across) > 1:
        flat = exchange(flat, across, [inside[grid.inner_rank]] * len(across), grid.outer)
    local = exchange(flat, inside, _dtensor_ranges(info), grid.inner)
    if info.shape:
        return local.view(rows_of_rank(info.shape[0], grid.inner_rank, grid.inner_size).numel, *info.shape[1:])
    return local.view(())  # a scalar has no rows, and is whole on every rank


def _slice_of(info: ShardInfo) -> ModelSlice | None:
    """The slice of tensor parallelism that one more placement tells: one block on each rank, of one size. Of others the
    data-parallel ranks have rows of the whole parameter."""
    found = info.cut_slice
    return None if found is None or len(found.boxes) > 1 or found.is_uneven else found


def _whole_shape(info: ShardInfo) -> torch.Size:
    return torch.Size(info.shape if info.cut_slice is None else info.cut_slice.shape)


def to_shard(param: ShardedParameter, value: Tensor) -> Tensor:
    """This rank's shard of ``value``, of shape ``local_shape(param.shard)``.

    value  a DTensor, a whole tensor, or this rank's slice of tensor parallelism

    Collective for a DTensor. Call ``misfit`` before.
    """
    from torch.distributed.tensor import DTensor

    info, first = param.shard, 0
    if isinstance(value, DTensor):
        if not info.shape or not _is_ours(param, value):
            value = value.full_tensor()
        else:
            inside = _ranges_inside(info)
            value = exchange(value.to_local().contiguous().view(-1), _dtensor_ranges(info), inside, info.grid.inner)
            first = inside[info.grid.inner_rank].start
    found = info.cut_slice
    if found is not None and found.dim is not None and tuple(value.shape) == found.shape:
        value = found.part_of(value)
    return value.reshape(-1)[info.start - first : info.end - first].view(local_shape(info))


def misfit(given: Mapping[ShardedParameter, Mapping[str, Any]], complaints: Sequence[str] = ()) -> str | None:
    """Words for why this rank or another cannot take ``to_shard`` of some tensors; None if all can. Collective.

    given       by parameter: the tensors, by their names for errors
    complaints  why this rank cannot load, apart from these tensors
    """
    said: dict[ShardedParameter, list[str]] = {param: [] for param in given}
    why = list(complaints)
    for param, values in given.items():
        for name, value in values.items():
            said[param].append(f"{name} ({_described(param, value)})")
            objection = _objection(param, value)
            why += [] if objection is None else [f"{name}: {objection}"]
    return disagreement(said, why)


def _described(param: ShardedParameter, value: Tensor) -> str:
    """Words for the collectives that ``to_shard`` runs for ``value``, which ranks compare before they start."""
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return "a whole tensor"
    return "a DTensor of these ranks" if _is_ours(param, value) else "a DTensor of other ranks"


def _objection(param: ShardedParameter, value: Any) -> str | None:
    """Words for why ``to_shard`` cannot take ``value`` (another shape, another rank's elements). None if it can."""
    shape = _whole_shape(param.shard)
    if tuple(value.shape) not in (shape, param.shard.shape):
        return f"size mismatch, of shape {list(value.shape)}, and the whole parameter is {list(shape)}"
    if not _is_ours(param, value):
        return None
    saved, here = value.device_mesh.get_coordinate(), _mesh_of(param).get_coordinate()
    if saved == here:
        return None
    return (
        f"the DTensor has the elements of the rank at {saved} of its mesh, and this rank is at {here}: each rank "
        f"loads the file that it saved itself; torch.distributed.checkpoint and save_checkpoint write what fits any"
    )


def _is_ours(param: ShardedParameter, value: Any) -> bool:
    """``value`` is a DTensor as ``to_dtensor`` makes it."""
    from torch.distributed.tensor import DTensor

    found = _slice_of(param.shard)
    if not isinstance(value, DTensor) or found is not param.shard.cut_slice:
        return False
    if param.shard.grid.inner is None and found is None:
        return False
    mesh = _mesh_of(param)
    return bool(value.device_mesh == mesh and list(value.placements) == _placements(param.shard, mesh))


def _mesh_of(param: ShardedParameter) -> DeviceMesh:
    if param.__dict__[_MESH] is None:
        group = param.shard.grid.inner
        assert group is not None, "a rank alone has no DTensors"
        param.__dict__[_MESH] = DeviceMesh.from_group(group, device_of(group, param).type)
    return param.__dict__[_MESH]  # type: ignore[no-any-return]


def _mesh_of_slices(param: ShardedParameter, found: ModelSlice, mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh of a parameter's ranks, those with the other slices last. Collective over these ranks."""
    grid = param.shard.grid
    groups = [group for group in (grid.outer, grid.inner, found.group) if group is not None]
    places = gather([group.rank() for group in groups], groups, None, "the mesh of slices")
    ranks = torch.empty([group.size() for group in groups], dtype=torch.int)
    for rank, place in places.items():
        ranks[tuple(place)] = rank
    given = None if mesh is None else mesh.mesh_dim_names
    names = ("outer", "inner", "tp")[-len(groups) :] if given is None else (*given, "tp")
    return DeviceMesh.from_group(groups, device_of(groups[-1], param).type, mesh=ranks, mesh_dim_names=names)


@torch.no_grad()
def _after_saving(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Post-hook of ``state_dict``: replace the module's shards by DTensors (collective), whole parameters by copies."""
    for name, param in module._parameters.items():
        if isinstance(param, ShardedParameter):
            state_dict[prefix + name] = to_dtensor(param, param)
        elif param is not None and has_shard(param) and state_dict.get(prefix + name) is not param:  # keep_vars
            # Within unsharded(): its memory is freed, or gathered anew, while the state dict lives on.
            state_dict[prefix + name] = state_dict.get(prefix + name, param).detach().clone()


@torch.no_grad()
def _before_loading(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Pre-hook of ``load_state_dict``: replace DTensors and whole tensors by shards. Collective."""
    own = {prefix + name: param for name, param in module._parameters.items() if isinstance(param, ShardedParameter)}
    given = {key: state_dict[key] for key in own if isinstance(state_dict.get(key), Tensor)}
    if given and metadata.get("assign_to_params_buffers"):
        raise ValueError(
            f"load_state_dict(assign=True): parameter '{next(iter(given))}' is a view of this rank's shard, which the "
            f"optimizer updates: load without assign, which copies into it"
        )
    by_param: dict[ShardedParameter, dict[str, Tensor]] = {param: {} for param in own.values()}
    for key, value in given.items():
        by_param[own[key]][key] = value
    trouble = misfit(by_param)
    if trouble is not None:
        error_msgs.append(trouble)
    for key, value in given.items():
        param = own[key]
        state_dict[key] = param.detach() if trouble else to_shard(param, value)
        if torch.equal(param, state_dict[key].to(param.device)):  # a load of the model behind that of its optimizer
            before = param._version
            first, last = param.__dict__.get(_KEPT, (before, before))
            param.__dict__[_KEPT] = first if last == before else before, before + 1


# ---- Ranges of elements of the flattened parameter. ----


def _ranges_inside(info: ShardInfo) -> list[Range]:
    """For each inner rank, the range of its instance's shard: of all outer ranks together."""
    size = info.grid.inner_size
    return _cut(info, 0, info.bucket_numel // size, size)


def _ranges_across(info: ShardInfo) -> list[Range]:
    """For each outer rank, its range of this inner rank's shard; one range if outer ranks are replicas."""
    numel, parts = info.bucket_numel // info.grid.inner_size, info.grid.outer_size // info.num_replicas
    return _cut(info, info.grid.inner_rank * numel, numel // parts, parts)


def _cut(info: ShardInfo, first: int, size: int, count: int) -> list[Range]:
    """The parameter's elements in ``count`` parts of its bucket, of ``size`` elements each from ``first`` on."""
    numel = math.prod(info.shape)
    borders = [min(max(first + index * size - info.place, 0), numel) for index in range(count + 1)]
    return [Range(*borders[index : index + 2]) for index in range(count)]


def _dtensor_ranges(info: ShardInfo) -> list[Range]:
    """For each inner rank, the range of its part of the DTensor."""
    size = info.grid.inner_size
    if not info.shape:
        return [Range(0, 1)] * size
    rows, row = (rows_of_rank(info.shape[0], rank, size) for rank in range(size)), math.prod(info.shape[1:])
    return [Range(part.start * row, part.end * row) for part in rows]


def _placements(info: ShardInfo, mesh: DeviceMesh) -> Sequence[Any]:
    from torch.distributed.tensor import Replicate, Shard

    found = _slice_of(info)
    if found is not None and found.dim is not None:
        from torch.distributed.tensor.placement_types import _StridedShard

        # The tensor-parallel ranks have cut first: of their slices the others have rows.
        rows = Shard(0) if found.dim else _StridedShard(0, split_factor=mesh.size(mesh.ndim - 1))
        inside = [] if info.grid.inner is None else [rows]
        return [*([Replicate()] * (mesh.ndim - 1 - len(inside))), *inside, Shard(found.dim)]
    return [*([Replicate()] * (mesh.ndim - 1)), Shard(0) if info.shape else Replicate()]


# ---- Ranks compare, and send each other ranges. ----


def rows_of_rank(num_rows: int, rank: int, size: int) -> Range:
    """The rows of one of ``size`` ranks under DTensor's ``Shard(0)``, which cuts as ``torch.chunk``: every rank has
    ceil(num_rows / size) rows, the last ranks fewer or none."""
    step = -(-num_rows // size)
    return Range(min(rank * step, num_rows), min((rank + 1) * step, num_rows))


def exchange(have: Tensor, haves: Sequence[Range], wants: Sequence[Range], group: dist.ProcessGroup | None) -> Tensor:
    """Send every rank of ``group`` the elements that it wants. Collective. ``group`` None: this rank alone.

    have   [haves[rank].numel] this rank's elements, contiguous, on any device
    haves  for each rank of the group, the range that it has; ascending, without overlap, perhaps empty
    wants  for each rank of the group, the range that it wants, which lies in the union of ``haves``

    Returns [wants[rank].numel], new memory on the device of ``have``. Values are copied bit by bit.
    """
    if group is None or group.size() == 1:
        (mine,), (wanted,) = haves, wants
        return have[wanted.start - mine.start : wanted.end - mine.start].clone()
    rank = group.rank()
    mine, wanted = haves[rank], wants[rank]
    sent = [mine.intersect(want) for want in wants]
    received = [wanted.intersect(other) for other in haves]
    itemsize, device = have.element_size(), device_of(group, have)
    # Sent as bytes: not every backend supports every dtype.
    out = torch.empty(wanted.numel, dtype=have.dtype, device=device)
    source = torch.cat([have[part.start - mine.start : part.end - mine.start] for part in sent]).to(device)
    dist.all_to_all_single(
        out.view(torch.uint8),
        source.view(torch.uint8),
        [part.numel * itemsize for part in received],
        [part.numel * itemsize for part in sent],
        group=group,
    )
    return out.to(have.device)


def device_of(group: dist.ProcessGroup, tensor: Tensor) -> torch.device:
    """The tensor's device if the group's backend supports it; else (offloaded) a device that the backend supports."""
    device_types = device_types_of(group)
    if not device_types or tensor.device.type in device_types:
        return tensor.device
    return torch.device(device_types[0])


def disagreement(said: Mapping[ShardedParameter, Sequence[str]], complaints: Sequence[str]) -> str | None:
    """Words for why this rank or another cannot exchange; None if all can. Collective over the parameters' ranks.

    An exchange of a parameter's elements is a collective over the ranks that share the parameter. If one rank has no
    such tensor, the others would wait for ever; if one rank has another rank's tensor, the others would get wrong
    elements. So ranks compare before, and all of them raise.

    said        for each parameter, what this rank has of it; to be equal on all ranks that share the parameter
    complaints  why this rank cannot exchange
    """
    by_grid: dict[Any, tuple[RankGrid, list[str]]] = {}
    for param, texts in said.items():
        grid, found = param.shard.grid, param.shard.model_slice
        grid = grid if found is None else grid._replace(tensor=found.group)
        by_grid.setdefault(grid.groups, (grid, []))[1].extend(texts)
    trouble = None
    # Small grids first: what some ranks find out about their experts, all hear in the grid of the dense parameters.
    for grid, texts in sorted(by_grid.values(), key=lambda each: each[0].size):
        said_here = trouble, "\n\t".join(complaints), texts
        trouble = _difference(gather(said_here, grid.axes, None, "the comparison of state dicts"))
    return trouble


def _difference(everyone: Mapping[int, tuple[str | None, str, Sequence[str]]]) -> str | None:
    """Words for what keeps these ranks from an exchange: what one has heard elsewhere, complains of, or has other."""
    heard = [trouble for trouble, _, _ in everyone.values() if trouble is not None]
    if heard:
        return heard[0]
    complaining = [(rank, complaint) for rank, (_, complaint, _) in everyone.items() if complaint]
    if complaining:
        rank, complaint = complaining[0]
        return complaint if len(complaining) == len(everyone) else f"{complaint} (on rank {rank})"
    (first, (_, _, ours)), *others = everyone.items()
    for other, (_, _, theirs) in others:
        for here, there in zip_longest(ours, theirs, fillvalue="nothing"):
            if here != there:
                return f"state dicts differ between ranks: rank {first} has {here}, where rank {other} has {there}"
    return None
