"""The ranks of one wrapper as a grid: inner groups that share shards, outer groups that join their replicas.

process group of 8 ranks, 2 instances      inner (0 1 2 3) (4 5 6 7)      outer (0 4) (1 5) (2 6) (3 7)
"""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..torch_internals import zero_cta_options
from .in_flight import device_types_of, group_or_default, group_rank, group_size, sum_over_group
from .world import WORLD_OF_ONE, Ranks, WorldOfOne, check_no_late_group, own_rank

__all__ = ["RankGrid", "all_groups", "check_member", "make_grid", "make_grids", "with_separate_gather"]


class RankGrid(NamedTuple):
    """Where this rank stands. A group of None is a world of one, or an axis of one."""

    inner: dist.ProcessGroup | None
    outer: dist.ProcessGroup | None
    gather: dist.ProcessGroup | None
    """The inner ranks again, where gathers must not queue behind reductions: collectives of one group are serial."""
    assumed: bool = False
    """Nobody named ranks, and there was no process group: a world of one for as long as there is none."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return group_size(self.inner) * group_size(self.outer)

    @property
    def inner_size(self) -> int:
        """Ranks of an instance."""
        return group_size(self.inner)

    @property
    def inner_rank(self) -> int:
        """Place in the instance: the index of this rank's shards."""
        return group_rank(self.inner)

    @property
    def outer_size(self) -> int:
        """Number of instances."""
        return group_size(self.outer)

    @property
    def outer_rank(self) -> int:
        """Which instance this is."""
        return group_rank(self.outer)

    @property
    def axes(self) -> Iterator[dist.ProcessGroup]:
        """The groups that hold more than one rank, inner first."""
        for group in (self.inner, self.outer):
            if group is not None and group.size() > 1:
                yield group

    def check_still_alone(self, what: str, option: str = "process_group") -> None:
        """Raise ``RuntimeError`` where this was taken for a world of one, and a process group was made since.

        what    has this grid
        option  what its ranks are called where the user may name them
        """
        if self.assumed:
            check_no_late_group(what, option)

    def sum(self, value: Tensor) -> Tensor:
        """Sum a small tensor over all ranks, in place: inside instances, then across."""
        for group in self.axes:
            sum_over_group(value, group)
        return value

    @torch.no_grad()
    def broadcast(self, tensor: Tensor) -> None:
        """Copy the first rank's tensor to all others."""
        whole = tensor.contiguous()  # NCCL takes no other
        for group in reversed(list(self.axes)):
            dist.broadcast(whole, dist.get_global_rank(group, 0), group=group)
        if whole is not tensor:
            tensor.copy_(whole)


def make_grid(
    ranks: Ranks,
    *,
    num_instances: int = 1,
    separate_gather: bool = False,
    copy_engines: bool = False,
    option: str = "process_group",
) -> RankGrid:
    """The grid over a process group (None: the default one), of a DeviceMesh: (inner), or (outer, inner); or of one.

    num_instances    cuts a process group into so many runs of consecutive ranks; a 2-D mesh says it by itself
    separate_gather  give gathers a communicator of their own
    copy_engines     one that uses the GPU's copy engines where it can
    option           what ``ranks`` is called where the user gave it, for errors

    Collective over the group: every member calls it, with the same arguments. Raises ``ValueError`` for a mesh of more
    dims, for ranks that this one is not among, where the ranks do not divide, and for None where there is no process
    group and a launcher has started several ranks.
    """
    check_member(ranks, option)
    if isinstance(ranks, DeviceMesh):
        inner, outer = _groups_of_mesh(ranks, num_instances, option)
    else:
        inner, outer = _cut(group_or_default(ranks, option), num_instances, option)
    grid = RankGrid(inner, outer, inner, assumed=ranks is None and inner is None)
    return with_separate_gather(grid, copy_engines=copy_engines) if separate_gather else grid


def with_separate_gather(grid: RankGrid, *, copy_engines: bool = False) -> RankGrid:
    """The same grid with a communicator for gathers alone; collective over the inner group."""
    if grid.inner_size == 1:
        return grid
    assert grid.inner is not None, "a group of more than one rank"
    options = zero_cta_options() if copy_engines else None
    gather = _group_of(dist.get_process_group_ranks(grid.inner), like=grid.inner, options=options)
    return grid._replace(gather=gather)


def make_grids(
    ranks: Ranks,
    expert_ranks: Ranks,
    *,
    has_experts: bool,
    num_instances: int,
    separate_gather: bool,
    copy_engines: bool = False,
) -> dict[str, RankGrid]:
    """The grid of each kind of parameters. Where nothing says which ranks share experts, it is all of them.

    Raises ``ValueError`` for ranks of experts that are not among the others, over which norms are summed.
    """
    if expert_ranks is not None and not has_experts:
        raise ValueError(
            "expert_process_group has no effect: no parameter or buffer has the attribute allreduce = False, which "
            "marks experts"
        )
    how = {"num_instances": num_instances, "separate_gather": separate_gather, "copy_engines": copy_engines}
    dense = make_grid(ranks, **how)  # type: ignore[arg-type]
    if expert_ranks is None or (dense.size == 1 and expert_ranks is WORLD_OF_ONE):
        return {"dense": dense, "expert": dense}
    expert = make_grid(expert_ranks, **how, option="expert_process_group")  # type: ignore[arg-type]
    outside = sorted(set(_ranks_of(expert_ranks)) - set(_ranks_of(ranks)))
    if outside:
        raise ValueError(
            f"expert_process_group has ranks {outside}, which are not in process_group {_ranks_of(ranks)}: the ranks "
            f"that hold the same experts must be among those that hold the same dense parameters"
        )
    return {"dense": dense, "expert": expert}


def all_groups(grids: Iterable[RankGrid]) -> list[dist.ProcessGroup]:
    """Every group of more than one rank, once."""
    groups = {
        id(group): group for grid in grids for group in (grid.inner, grid.outer, grid.gather) if group is not None
    }
    return [group for group in groups.values() if group.size() > 1]


def check_member(ranks: Any, option: str) -> None:
    """Raise ``ValueError`` where this rank is not among ``ranks``, ``TypeError`` where these are no ranks at all.

    option  what ``ranks`` is called where the user gave it
    """
    if isinstance(ranks, DeviceMesh):
        member = ranks.get_coordinate() is not None
    elif ranks is None or isinstance(ranks, dist.ProcessGroup | WorldOfOne):
        member = True
    elif ranks == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to the others
        member = False
    else:
        raise TypeError(f"{option} is a ProcessGroup, a DeviceMesh, {WORLD_OF_ONE} or None; got {type(ranks).__name__}")
    if not member:
        raise ValueError(
            f"rank {dist.get_rank()} is not in {option}: give each rank a group or mesh that it belongs to, and wrap "
            f"on its members only"
        )


def _ranks_of(ranks: Ranks) -> list[int]:
    """Global ranks."""
    if isinstance(ranks, DeviceMesh):
        return [int(rank) for rank in ranks.mesh.flatten().tolist()]
    group = group_or_default(ranks)
    return [own_rank()] if group is None else dist.get_process_group_ranks(group)


def _groups_of_mesh(
    mesh: DeviceMesh, num_instances: int, option: str
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"{option}: a data-parallel mesh is (inner) or (outer, inner); this one has {mesh.ndim} dims "
            f"{mesh.mesh_dim_names}"
        )
    outer = mesh.get_group(0) if mesh.ndim == 2 else None
    if num_instances not in (1, group_size(outer)):
        raise ValueError(
            f"num_distributed_optimizer_instances is {num_instances}, and the mesh of {option} has "
            f"{group_size(outer)} instances: leave the option out, a mesh of two dims (outer, inner) says it"
        )
    return mesh.get_group(mesh.ndim - 1), outer


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
    """A new group, which its members alone make, with this group's backend and timeout, not the default group's."""
    group: dist.ProcessGroup = dist.new_group(
        ranks,
        backend=dist.get_backend_config(like),
        timeout=_timeout_of(like),
        pg_options=options,
        use_local_synchronization=True,
    )
    return group


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long its collectives may take; None where its backends do not say: their default."""
    if type(group) is not dist.ProcessGroup:  # simulated: nothing takes time
        return None
    options = [
        getattr(group._get_backend(device), "options", None) for device in map(torch.device, device_types_of(group))
    ]
    return max((entry._timeout for entry in options if entry is not None), default=None)
