"""``state_dict`` and ``load_state_dict`` of fully sharded modules, in DTensors that are cut between rows.

``state_dict()`` returns what modules of PyTorch's FSDP2 return: DTensors with ``Shard(0)`` over the inner ranks. So
torch.distributed.checkpoint, and every tool for DTensors, accepts it. ``load_state_dict()`` takes DTensors of the same
or of other ranks, and whole tensors. Both are collective over the module's ranks, one parameter at a time.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...ddp.contract.module import has_shard
from ...ddp.plan.ranges import Range
from ..tensors.parameter import ShardedParameter, ShardInfo, local_shape
from .exchange import device_of, disagreement, exchange, rows_of_rank

__all__ = ["Translation", "install_state_dict_hooks", "translation_of"]

_TRANSLATION = "_maingrad_translation"
"""Attribute of sharded parameters."""

# torch.distributed.tensor is imported in functions: the import takes seconds, and needs torch.distributed.


def install_state_dict_hooks(module: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Have ``state_dict`` and ``load_state_dict`` of ``module``, and of modules in it, translate to DTensors and back.

    module  a module whose shards are registered; modules inside that have these hooks keep them
    mesh    the mesh of the DTensors, which the user has sharded over. None: a mesh of one dim over the inner ranks
    """
    translation = Translation(mesh)
    for owner in module.modules():
        own = [param for param in owner._parameters.values() if isinstance(param, ShardedParameter)]
        for param in own:
            param.__dict__.setdefault(_TRANSLATION, translation)
        if own and _after_saving not in owner._state_dict_hooks.values():
            owner.register_state_dict_post_hook(_after_saving)
            owner.register_load_state_dict_pre_hook(_before_loading)


def translation_of(param: ShardedParameter) -> "Translation":
    """The ``Translation`` that ``install_state_dict_hooks`` has attached to ``param``."""
    return param.__dict__[_TRANSLATION]  # type: ignore[no-any-return]


class Translation:
    """Converts shards to DTensors and back: parameters of one unit, and optimizer state of the same shape.

    mesh  of the DTensors; None: made at the first use, of one dim over the inner ranks
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = mesh
        self._known: dict[ShardInfo, tuple[list[Range], list[Range]]] = {}

    def to_dtensor(self, info: ShardInfo, value: Tensor) -> Tensor:
        """The DTensor of shape ``info.shape``, in new memory; in a world of one a plain tensor. Collective.

        value  the shard ``info`` on this rank, [info.numel] elements in any shape
        """
        flat = value.detach().view(-1)
        across, inside = self._ranges(info)
        group, rank = info.grid.inner, info.grid.inner_rank
        if len(across) > 1:
            flat = exchange(flat, across, [inside[rank]] * len(across), info.grid.outer)
        local = exchange(flat, inside, _dtensor_ranges(info), group).view(_dtensor_shape(info, rank))
        if group is None:
            return local
        from torch.distributed.tensor import DTensor

        mesh = self._mesh_of(flat, group)
        stride = tuple(math.prod(info.shape[dim + 1 :]) for dim in range(len(info.shape)))
        dtensor = DTensor.from_local(
            local, mesh, _placements(info, mesh), run_check=False, shape=torch.Size(info.shape), stride=stride
        )
        # DTensor.from_local moves an offloaded shard to the mesh's device.
        return dtensor if local.device.type == mesh.device_type else dtensor.to(local.device)

    def describe(self, info: ShardInfo, value: Tensor) -> str:
        """Words for the collectives that ``to_shard`` runs for ``value``, which ranks compare before they start."""
        from torch.distributed.tensor import DTensor

        if not isinstance(value, DTensor):
            return "a whole tensor"
        return "a DTensor of these ranks" if self._is_ours(value, info) else "a DTensor of other ranks"

    def objection(self, info: ShardInfo, value: Any) -> str | None:
        """Words for why ``to_shard`` cannot take ``value`` (another shape, another rank's elements). None if it can."""
        if tuple(value.shape) != info.shape:
            return f"a tensor of shape {list(value.shape)}, and the whole parameter is {list(info.shape)}"
        if not self._is_ours(value, info) or info.grid.inner is None:
            return None
        saved, here = value.device_mesh.get_coordinate(), self._mesh_of(value, info.grid.inner).get_coordinate()
        if saved == here:
            return None
        return (
            f"the DTensor has the elements of the rank at {saved} of its mesh, and this rank is at {here}: each rank "
            f"loads the file that it saved itself; torch.distributed.checkpoint and save_checkpoint write what fits any"
        )

    def to_shard(self, info: ShardInfo, value: Tensor) -> Tensor:
        """This rank's shard of ``value``, of shape ``local_shape(info)``; ``value``: a DTensor, or a whole tensor.

        Collective for a DTensor. Call ``objection`` before.
        """
        from torch.distributed.tensor import DTensor

        first = 0
        if isinstance(value, DTensor):
            group = info.grid.inner
            if not self._is_ours(value, info):
                value = value.full_tensor()
            elif not info.shape:
                value = value.to_local()
            else:
                inside, local = self._ranges(info)[1], value.to_local().contiguous().view(-1)
                value = exchange(local, _dtensor_ranges(info), inside, group)
                first = inside[info.grid.inner_rank].start
        return value.reshape(-1)[info.start - first : info.end - first].view(local_shape(info))

    def _is_ours(self, value: Any, info: ShardInfo) -> bool:
        from torch.distributed.tensor import DTensor

        group = info.grid.inner
        if group is None or not isinstance(value, DTensor):
            return False
        mesh = self._mesh_of(value.to_local(), group)
        return bool(value.device_mesh == mesh and list(value.placements) == _placements(info, mesh))

    def _mesh_of(self, tensor: Tensor, group: dist.ProcessGroup) -> DeviceMesh:
        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(group, device_of(group, tensor).type)
        return self._mesh

    def _ranges(self, info: ShardInfo) -> tuple[list[Range], list[Range]]:
        """For each rank of the outer group, its range; for each inner rank, the range of its part of the instance.

        Collective at the first call for ``info``.
        """
        if info not in self._known:
            mine = info.elements
            across = _gathered(mine, _outer(info))
            filled = [part for part in across if part.numel]
            part = Range(min(each.start for each in filled), max(each.end for each in filled)) if filled else mine
            self._known[info] = across, _gathered(part, info.grid.inner)
        return self._known[info]


@torch.no_grad()
def _after_saving(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Post-hook of ``state_dict``: replace the module's shards by DTensors (collective), whole parameters by copies."""
    for name, param in module._parameters.items():
        if isinstance(param, ShardedParameter):
            state_dict[prefix + name] = translation_of(param).to_dtensor(param.shard, param)
        elif param is not None and has_shard(param) and state_dict.get(prefix + name) is not param:  # keep_vars
            # Within unsharded(): its memory is freed, or gathered anew, while the state dict lives on.
            state_dict[prefix + name] = param.detach().clone()


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
    said, objections = dict.fromkeys(own.values(), "nothing"), []
    for key, value in given.items():
        translation, info = translation_of(own[key]), own[key].shard
        said[own[key]] = translation.describe(info, value)
        why = translation.objection(info, value)
        if why is not None:
            objections.append(f"size mismatch for {key}: {why}" if value.shape != info.shape else f"{key}: {why}")
    trouble = disagreement(said, "\n\t".join(objections) or None)
    if trouble is not None:
        error_msgs.append(trouble)
    for key, value in given.items():
        param = own[key]
        state_dict[key] = param.detach() if trouble else translation_of(param).to_shard(param.shard, value)


def _outer(info: ShardInfo) -> dist.ProcessGroup | None:
    """The outer group, if its ranks have different elements of an instance's shard; None if they are replicas."""
    return info.grid.outer if info.num_replicas < info.grid.outer_size else None


def _gathered(value: Range, group: dist.ProcessGroup | None) -> list[Range]:
    if group is None or group.size() == 1:
        return [value]
    values = [value] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _dtensor_shape(info: ShardInfo, rank: int) -> tuple[int, ...]:
    """Shape of inner rank ``rank``'s part of the DTensor. A scalar has no rows, and is whole on every rank."""
    if not info.shape:
        return ()
    return (rows_of_rank(info.shape[0], rank, info.grid.inner_size).numel, *info.shape[1:])


def _dtensor_ranges(info: ShardInfo) -> list[Range]:
    """The range of elements of each inner rank's part of the DTensor."""
    size = info.grid.inner_size
    if not info.shape:
        return [Range(0, 1)] * size
    rows, row = (rows_of_rank(info.shape[0], rank, size) for rank in range(size)), math.prod(info.shape[1:])
    return [Range(part.start * row, part.end * row) for part in rows]


def _placements(info: ShardInfo, mesh: DeviceMesh) -> Sequence[Any]:
    from torch.distributed.tensor import Replicate, Shard

    return [*([Replicate()] * (mesh.ndim - 1)), Shard(0) if info.shape else Replicate()]
