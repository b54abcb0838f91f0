"""Ranks: as a launcher started them, as a user names them, and as the grid of one wrapper.

A grid has inner groups that share shards, and outer groups that join their replicas::

    process group of 8 ranks, 2 instances      inner (0 1 2 3) (4 5 6 7)      outer (0 4) (1 5) (2 6) (3 7)
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..torch_internals.distributed import new_group_of_members, timeout_on, zero_cta_options

__all__ = [
    "WORLD_OF_ONE",
    "Process",
    "RankGrid",
    "Ranks",
    "WorldOfOne",
    "backends_of",
    "check_member",
    "device_types_of",
    "group_or_default",
    "group_rank",
    "group_size",
    "in_two_dims",
    "init_process_group",
    "make_grid",
    "make_grids",
    "own_rank",
    "with_separate_gather",
    "world_size",
]


@final
class WorldOfOne:
    """The class of ``WORLD_OF_ONE``."""

    def __new__(cls) -> "WorldOfOne":
        return WORLD_OF_ONE

    def __reduce__(self) -> str:
        return "WORLD_OF_ONE"

    def __repr__(self) -> str:
        return "maingrad.ddp.WORLD_OF_ONE"


WORLD_OF_ONE: WorldOfOne = object.__new__(WorldOfOne)
"""This process alone, whatever other ranks there are. Accepted wherever a process group or a mesh is."""

Ranks: TypeAlias = dist.ProcessGroup | DeviceMesh | WorldOfOne | None
"""Ranks as a user names them. None: the default group; without one, and without a launcher, a world of one."""


class Process(NamedTuple):
    """This process among those of a job: its device, its rank and the number of ranks in the default group."""

    device: torch.device
    rank: int
    world_size: int


def init_process_group() -> Process:
    """Make the default process group of a program that torchrun started, and choose this process's device.

    With CUDA: NCCL, and the GPU with the number ``LOCAL_RANK``, which becomes the current device. Else gloo, and the
    CPU. A default group that exists already stays, and its backend decides on the device. Without a launcher (neither
    ``RANK`` nor ``WORLD_SIZE`` in the environment) the group has this process alone.
    ``torch.distributed.destroy_process_group`` ends the group.

    Raises ``RuntimeError`` where this machine has fewer GPUs than ``LOCAL_RANK`` asks for.
    """
    made = dist.is_initialized()
    if "nccl" in str(dist.get_backend()) if made else torch.cuda.is_available():
        index, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if index >= found:
            raise RuntimeError(f"LOCAL_RANK={index}, and this process sees {found} GPU(s): start one process for each")
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if not made:
        alone: dict[str, Any] = {}
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device, **alone)
        else:
            dist.init_process_group("gloo", **alone)
    return Process(device, dist.get_rank(), dist.get_world_size())


def own_rank() -> int:
    """This process's rank in the default group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks in the default group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _launched() -> int:
    """Number of ranks that torchrun or another launcher has started, by ``WORLD_SIZE``; 1 where it is not set."""
    said: Any = os.environ.get("WORLD_SIZE", "1")
    try:
        return int(said)
    except ValueError:
        return 1


# ---- Process groups that may be None, which means a world of one: every collective is the identity.


def group_or_default(
    group: dist.ProcessGroup | WorldOfOne | None, option: str = "process_group"
) -> dist.ProcessGroup | None:
    """``group``, or the default group for None. Returns None for ``WORLD_OF_ONE``, and where no group was initialised.

    Raises ``ValueError`` for None where there is no default group and a launcher has started several ranks.

    option  name of the argument by which the user gave ``group``, for the error
    """
    if isinstance(group, WorldOfOne):
        return None
    if group is not None:
        return group
    if dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    num_ranks = _launched()
    if num_ranks > 1:
        raise ValueError(
            f"there is no process group, and the environment says WORLD_SIZE={num_ranks}: each of these ranks would "
            f"train by itself; call torch.distributed.init_process_group() before wrapping. Where this process is to "
            f"train alone, say {option}={WORLD_OF_ONE!r}, or unset WORLD_SIZE"
        )
    return None


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks; 1 without a group."""
    return 1 if group is None else group.size()


def device_types_of(group: dist.ProcessGroup) -> list[str]:
    """Device types that the group has a backend for; an empty list where one backend serves all."""
    return [*_backend_by_device(group)]


def backends_of(groups: Iterable[dist.ProcessGroup], device: torch.device) -> set[str]:
    """Names of the groups' backends for this type of device."""
    return {_backend_by_device(group).get(device.type, str(dist.get_backend_config(group))) for group in groups}


def _backend_by_device(group: dist.ProcessGroup) -> dict[str, str]:
    config = str(dist.get_backend_config(group))
    return dict(entry.split(":") for entry in config.split(",") if ":" in entry)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """This process's rank in the group; 0 without a group."""
    return 0 if group is None else group.rank()


# ---- The grid.


class RankGrid(NamedTuple):
    """This rank's groups. A group of None means an axis of one rank."""

    inner: dist.ProcessGroup | None
    outer: dist.ProcessGroup | None
    gather: dist.ProcessGroup | None
    """The inner ranks again, for all-gathers. It is a group of its own where all-gathers must not queue behind
    reductions: collectives of one group run one after the other."""
    assumed: bool = False
    """The user named no ranks, and there was no process group: assumed to be a world of one."""
    tensor: dist.ProcessGroup | None = None
    """The ranks that hold one copy of the model together, where norms and agreement are over these too."""

    @property
    def size(self) -> int:
        """Number of ranks of the grid."""
        return group_size(self.inner) * group_size(self.outer) * group_size(self.tensor)

    @property
    def groups(self) -> tuple[dist.ProcessGroup | None, ...]:
        """What tells the ranks of a grid from those of another."""
        return self.inner, self.outer, self.tensor

    @property
    def ranks(self) -> list[int]:
        """Global ranks of the instance."""
        return [own_rank()] if self.inner is None else dist.get_process_group_ranks(self.inner)

    @property
    def inner_size(self) -> int:
        """Number of ranks of an instance."""
        return group_size(self.inner)

    @property
    def inner_rank(self) -> int:
        """Rank in the instance: the index of this rank's shards."""
        return group_rank(self.inner)

    @property
    def outer_size(self) -> int:
        """Number of instances."""
        return group_size(self.outer)

    @property
    def outer_rank(self) -> int:
        """Index of this rank's instance."""
        return group_rank(self.outer)

    @property
    def axes(self) -> Iterator[dist.ProcessGroup]:
        """The groups that hold more than one rank, inner first."""
        for group in (self.inner, self.outer, self.tensor):
            if group is not None and group.size() > 1:
                yield group

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one whose values ``broadcast`` copies."""
        return all(group_rank(group) == 0 for group in self.axes)

    @property
    def in_larger_world(self) -> bool:
        """Whether the program has several ranks, in this grid or not."""
        return world_size() > 1

    @property
    def leaves_ranks_out(self) -> bool:
        """Whether the program has ranks that are not in this grid."""
        return world_size() > self.size

    def check_still_alone(self, what: str, option: str = "process_group") -> None:
        """Raise ``RuntimeError`` where a world of one was assumed, and a process group was initialised since.

        what    the owner of this grid, for the error
        option  name of the owner's argument that names ranks
        """
        if self.assumed and self.in_larger_world:
            raise RuntimeError(
                f"{what} was made before torch.distributed.init_process_group(), as a world of one, and there are "
                f"{world_size()} ranks now, over which nothing would be reduced; make it after "
                f"init_process_group(). Where this process is to train alone, say {option}={WORLD_OF_ONE!r}"
            )

    @torch.no_grad()
    def sum(self, value: Tensor) -> Tensor:
        """All-reduce a small tensor over all ranks, in place: inside instances, then across."""
        for group in self.axes:
            dist.all_reduce(value, group=group)
        return value

    @torch.no_grad()
    def broadcast(self, tensor: Tensor) -> None:
        """Copy the first rank's tensor to all other ranks. A rank alone may have it sparse."""
        groups = list(self.axes)
        if not groups:
            return
        whole = tensor.contiguous()  # NCCL needs contiguous memory
        for group in groups:
            dist.broadcast(whole, dist.get_global_rank(group, 0), group=group)
        if whole is not tensor:
            tensor.copy_(whole)


def make_grid(
    ranks: Ranks,
    *,
    num_instances: int = 1,
    option: str = "process_group",
) -> RankGrid:
    """The grid of ``ranks``.

    ranks          a process group; None for the default group; a DeviceMesh (inner), (outer, inner) or (outer, inner,
                   "cp"), whose last two dims are one; WORLD_OF_ONE
    num_instances  instances of consecutive ranks into which a process group is cut; a 2-D mesh has them already
    option         name of the argument by which the user gave ``ranks``, for errors

    Collective over the group: every member calls it, with the same arguments. Raises ``ValueError`` for another mesh of
    three or more dims, where this rank is not in ``ranks``, where ``num_instances`` does not divide the ranks, and for
    None where there is no process group and a launcher has started several ranks.
    """
    check_member(ranks, option)
    if isinstance(ranks, DeviceMesh):
        inner, outer = _groups_of_mesh(ranks, num_instances, option)
    else:
        inner, outer = _cut(group_or_default(ranks, option), num_instances, option)
    return RankGrid(inner, outer, inner, assumed=ranks is None and inner is None)


def with_separate_gather(grid: RankGrid, *, copy_engines: bool = False) -> RankGrid:
    """The same grid with a separate communicator for all-gathers. Collective over the inner group."""
    if grid.inner is None or dist.get_world_size() == 1:
        return grid
    options = zero_cta_options() if copy_engines else None
    # A rank alone among others makes a group as well: torch 2.11 names a group after the number of groups that the
    # rank is in, and ranks in different numbers of groups would wait for each other in the next one they share.
    gather = _group_of(dist.get_process_group_ranks(grid.inner), like=grid.inner, options=options)
    return grid._replace(gather=gather) if grid.inner_size > 1 else grid


def make_grids(
    ranks: Ranks,
    expert_ranks: Ranks,
    *,
    tensor_ranks: dist.ProcessGroup | None = None,
    has_experts: bool,
    num_instances: int,
    separate_gather: bool,
    copy_engines: bool = False,
) -> dict[str, RankGrid]:
    """The grid of each kind of parameters. Without ``tensor_ranks`` the first four are one.

    slice    ``ranks``, which average losses: each has other data, and the same slices
    dense    everyone: ``ranks`` of each of the tensor-parallel ranks. Norms and agreement are over these
    mean     everyone
    partial  everyone
    expert   those that hold the same experts, any of everyone

    expert_ranks     the ranks that hold the same experts; None: everyone
    tensor_ranks     the ranks that hold the slices of the same parameters; None: each rank has whole parameters
    has_experts      the model has parameters or buffers of experts
    separate_gather  make separate communicators for all-gathers
    copy_engines     these use the GPU's copy engines where they can

    Raises ``ValueError`` for ``expert_ranks`` without experts, for expert ranks that are not among everyone, over which
    norms are summed, for experts of tensor-parallel ranks without ``expert_ranks``, and for ``ranks`` and
    ``tensor_ranks`` that are no two dims of one mesh.
    """
    if expert_ranks is not None and not has_experts:
        raise ValueError(
            "expert_process_group has no effect: no parameter or buffer has the attribute allreduce = False, which "
            "marks experts"
        )

    def with_gather(grid: RankGrid) -> RankGrid:
        return with_separate_gather(grid, copy_engines=copy_engines) if separate_gather else grid

    averaging = make_grid(ranks, num_instances=num_instances)
    dense = same_slices = with_gather(averaging)
    members, where = _ranks_of(ranks), "process_group"
    if group_size(tensor_ranks) > 1:
        assert tensor_ranks is not None, "a group of more than one rank"
        everyone, members = _with_tensor_ranks(averaging, members, tensor_ranks)
        dense, where = with_gather(everyone), "process_group and tensor_parallel_group"
        if has_experts and expert_ranks is None:
            raise ValueError(
                f"the model has experts (allreduce = False) and tensor-parallel ranks: say which ranks hold the same "
                f"experts by expert_process_group, {WORLD_OF_ONE!r} where each has its own"
            )
    grids = {"dense": dense, "slice": same_slices, "mean": dense, "partial": dense}
    if expert_ranks is None or (dense.size == 1 and expert_ranks is WORLD_OF_ONE):
        return grids | {"expert": dense}
    expert = with_gather(make_grid(expert_ranks, num_instances=num_instances, option="expert_process_group"))
    outside = sorted(set(_ranks_of(expert_ranks)) - set(members))
    if outside:
        raise ValueError(
            f"expert_process_group has ranks {outside}, which are not in {where} {members}: the ranks "
            f"that hold the same experts must be among those that hold the same dense parameters"
        )
    return grids | {"expert": expert}


def _with_tensor_ranks(
    grid: RankGrid, members: Sequence[int], tensor_ranks: dist.ProcessGroup
) -> tuple[RankGrid, list[int]]:
    """The grid of everyone, and everyone's ranks: the inner axis of each of the tensor-parallel ranks is one axis.

    members  the global ranks of ``grid``
    """
    inner = grid.ranks
    columns: list[tuple[list[int], list[int]]] = [([], [])] * tensor_ranks.size()
    dist.all_gather_object(columns, (inner, list(members)), group=tensor_ranks)
    joined = sorted(rank for column, _ in columns for rank in column)
    everyone = sorted({rank for _, own in columns for rank in own})
    alike: list[list[int]] = [joined]
    if grid.inner is not None and grid.inner_size > 1:
        alike = [[]] * grid.inner_size
        dist.all_gather_object(alike, joined, group=grid.inner)
    if len(set(joined)) != len(inner) * len(columns) or any(each != joined for each in alike):
        raise ValueError(
            f"process_group {sorted(members)} and tensor_parallel_group {dist.get_process_group_ranks(tensor_ranks)} "
            f"are no two dims of one mesh: process_group has the ranks with the same slices and other data, as "
            f"mesh['dp'] and mesh['tp'] of one mesh (dp, tp)"
        )
    over_all = tensor_ranks if grid.inner is None or len(inner) == 1 else _group_of(joined, like=grid.inner)
    return RankGrid(over_all, grid.outer, over_all), everyone


def check_member(ranks: Any, option: str) -> None:
    """Raise ``ValueError`` where this rank is not in ``ranks``, ``TypeError`` for an object that names no ranks.

    option  name of the argument by which the user gave ``ranks``
    """
    if isinstance(ranks, DeviceMesh):
        member = ranks.get_coordinate() is not None
    elif ranks is None or isinstance(ranks, dist.ProcessGroup | WorldOfOne):
        member = True
    elif ranks == dist.GroupMember.NON_GROUP_MEMBER:  # new_group's result on ranks outside of the group
        member = False
    else:
        raise TypeError(f"{option} is a ProcessGroup, a DeviceMesh, {WORLD_OF_ONE} or None; got {type(ranks).__name__}")
    if not member:
        raise ValueError(
            f"rank {dist.get_rank()} is not in {option}: give each rank a group or mesh that it belongs to, and wrap "
            f"on its members only"
        )


def _ranks_of(ranks: Ranks) -> list[int]:
    """The global ranks that ``ranks`` names."""
    if isinstance(ranks, DeviceMesh):
        return [int(rank) for rank in ranks.mesh.flatten().tolist()]
    group = group_or_default(ranks)
    return [own_rank()] if group is None else dist.get_process_group_ranks(group)


def _groups_of_mesh(
    mesh: DeviceMesh, num_instances: int, option: str
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    mesh = in_two_dims(mesh)
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"{option}: a data-parallel mesh is (inner) or (outer, inner); this one has {mesh.ndim} dims "
            f"{mesh.mesh_dim_names}: flatten those that share shards, as in mesh['shard', 'cp']._flatten('inner'), and "
            f"give the outer one beside it, mesh['replicate', 'inner']; or three dims, of which the last is called 'cp'"
        )
    outer = mesh.get_group(0) if mesh.ndim == 2 else None
    if num_instances not in (1, group_size(outer)):
        raise ValueError(
            f"num_distributed_optimizer_instances is {num_instances}, and the mesh of {option} has "
            f"{group_size(outer)} instances: leave the option out, a mesh of two dims (outer, inner) says it"
        )
    return mesh.get_group(mesh.ndim - 1), outer


def in_two_dims(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh (outer, inner, "cp") as one of two dims: context-parallel ranks have other tokens of one batch, and share
    shards. Others as they are. Collective over the last two dims."""
    if mesh.ndim != 3 or (mesh.mesh_dim_names or ("",))[-1] != "cp":
        return mesh
    outer, *joined = mesh.mesh_dim_names or ()
    groups = [mesh.get_group(0), mesh[tuple(joined)]._flatten().get_group()]  # torch keeps what it has flattened
    names = (outer, "_".join(joined))
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=mesh.mesh.flatten(1), mesh_dim_names=names)


def _cut(
    group: dist.ProcessGroup | None, num_instances: int, option: str
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    if num_instances == 1:
        return group, None
    size = group_size(group)
    if size % num_instances:
        raise ValueError(
            f"num_distributed_optimizer_instances = {num_instances} does not divide the {size} ranks of {option}"
        )
    assert group is not None, "one rank divides into one instance only"
    ranks = dist.get_process_group_ranks(group)
    inner_size = size // num_instances
    instance, place = divmod(group_rank(group), inner_size)
    inner = _group_of(ranks[instance * inner_size : (instance + 1) * inner_size], like=group)
    return inner, _group_of(ranks[place::inner_size], like=group)


def _group_of(ranks: list[int], *, like: dist.ProcessGroup, options: Any = None) -> dist.ProcessGroup:
    """A new group with the backend and the timeout of the group ``like``. Only its members call this."""
    return new_group_of_members(
        ranks, backend=dist.get_backend_config(like), timeout=_timeout_of(like), pg_options=options
    )


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long its collectives may take. None, which means the backend's default, where no backend says."""
    if type(group) is not dist.ProcessGroup:  # simulated ranks have no timeout
        return None
    timeouts = [timeout_on(group, torch.device(kind)) for kind in device_types_of(group)]
    return max((timeout for timeout in timeouts if timeout is not None), default=None)
