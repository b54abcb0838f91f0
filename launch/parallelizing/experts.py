"""Experts over ranks: each data-parallel rank keeps its part of every layer's experts, to which the others send tokens.

=============================  =====================================================================================
experts                        what ``share_experts`` does
=============================  =====================================================================================
of Hugging Face                leaves each rank its slice of the packed weights; the fused module dispatches
the same, cut by ``ep_plan``   makes the DTensors local; our dispatch takes the place of what transformers installed
other modules with DTensors    (torchtitan's form) marks the parameters as experts; the module dispatches as before
=============================  =====================================================================================

Of n data-parallel ranks, ep hold all experts together, and n / ep hold the same ones.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...ddp.collectives.rank_grid import WORLD_OF_ONE, RankGrid, Ranks, make_grid
from ...ddp.contract.module import DelayedWgradModule
from ...ddp.plan.tensor_parallel.localize import LAYOUTS, can_localize, is_one_slice, layouts_of
from ...ddp.torch_internals.distributed import new_group_of_members
from ...te_integration.experts.dispatch.dispatcher import TokenDispatcher
from ...te_integration.experts.hugging_face_experts import (
    FusedExperts,
    is_experts_class,
    weight_names_of,
    why_not_experts,
)

__all__ = ["ExpertRanks", "keep_own", "mesh_of", "numbers_of_experts", "same_place", "share_experts"]

ExpertRanks: TypeAlias = int | dist.ProcessGroup | DeviceMesh
"""The ranks that hold all experts together; a number: so many neighbours among the data-parallel ranks."""


def share_experts(
    model: nn.Module, ranks: Ranks, ep: ExpertRanks | None, dispatch: Mapping[str, Any], *, fuse: bool
) -> dict[nn.Module, Ranks]:
    """Leave each rank its part of the experts in ``model``. Collective.

    Returns the modules whose own parameters are this rank's experts, with the ranks that hold the same; none if there
    is nothing to be done.

    ranks      the data-parallel ranks
    ep         None: only experts that are cut over data-parallel ranks already
    dispatch   options of ``TokenDispatcher``
    fuse       experts of Hugging Face will be converted

    Raises ``ValueError``, with the model unchanged, for experts that cannot be shared, and for options without effect.
    """
    if ep == 1:
        return {}  # on one process too, which has no groups
    cut, elsewhere = _cut_already(model, ranks)
    sends = ep is not None or any(map(_is_of_hugging_face, cut))
    if sends and not fuse:
        raise ValueError("experts over ranks need fuse=True: fused experts send tokens, those of transformers do not")
    if dispatch and not sends:
        raise ValueError("dispatch has no effect: no experts are shared out; give ep=, or leave it out")
    if ep is None and not cut:
        return {}
    if ep is not None and cut:
        raise ValueError("ep has no effect: the model's experts are cut over data-parallel ranks already; leave it out")
    if elsewhere is not None:  # norms would count experts once for each of these ranks
        raise ValueError(
            f"experts are not shared out in a model that is cut over tensor-parallel ranks ({elsewhere}), "
            f"which have the same tokens: cut the rest over no ranks, or all of it by transformers' plans"
        )
    mesh = next(iter(cut.values())) if ep is None else mesh_of(ep, make_grid(ranks))
    same = same_place(mesh, make_grid(ranks))
    modules: Iterable[tuple[str, Any]] = model.named_modules()
    experts = {name: each for name, each in modules if (each in cut if cut else _is_of_hugging_face(each))}
    if not experts:
        raise ValueError(
            f"ep has no effect: {type(model).__name__} has no experts of Hugging Face; a model of your own sends "
            f"tokens by te_integration.TokenDispatcher"
        )
    for name, module in experts.items():
        reason = _why_not(module, is_cut=bool(cut)) if _is_of_hugging_face(module) else None
        if not cut and module.num_experts % mesh.size():
            reason = f"{mesh.size()} ranks do not divide {module.num_experts} experts"
        if reason is not None:
            raise ValueError(f"the experts '{name}' cannot dispatch: {reason}")
    # One for all layers: a transport may own memory.
    dispatcher_of = functools.cache(lambda count: TokenDispatcher(count, mesh, **dispatch))
    made: dict[int, nn.Parameter] = {}
    for module in experts.values():
        if _is_of_hugging_face(module):
            _dispatch(module, mesh, dispatcher_of(_whole_shape(module, weight_names_of(module)[0])[0]), made)
        else:
            for param in module.parameters(recurse=False):
                param.allreduce = False
    return dict.fromkeys(experts.values(), same)


def keep_own(
    owner: nn.Module,
    names: Iterable[str],
    ranks: DeviceMesh | int,
    made: dict[int, nn.Parameter] | None = None,
) -> None:
    """Leave a module this rank's of equal parts of parameters [experts, ...], marked as experts.

    Its state dicts have DTensors over the mesh. Parameters that are DTensors already become local, and those that are
    parts already (``_whole_shape``) stay.

    ranks  that have a part each; only their number for a plan, which gets the first part
    made  the parts by ``id`` of the whole parameters, which other modules may share: so tied experts stay tied
    """
    made = {} if made is None else made
    rank, size = (0, ranks) if isinstance(ranks, int) else (ranks.get_local_rank(), ranks.size())
    for name in names:
        whole: Any = owner._parameters[name]
        if tuple(whole.shape) != _whole_shape(owner, name):
            continue
        count = whole.shape[0] // size
        own = made.get(id(whole))
        if own is None:
            local = whole.to_local() if is_one_slice(whole) else whole.narrow(0, rank * count, count).clone()
            own = made[id(whole)] = nn.Parameter(local.detach(), requires_grad=whole.requires_grad)
        own.allreduce = False  # type: ignore[attr-defined]
        owner._parameters[name] = own
        if isinstance(ranks, DeviceMesh):
            _know_layout(owner, name, own, ranks, whole)
    if isinstance(owner, DelayedWgradModule):
        owner.mark_delayed_weights()


def _know_layout(owner: nn.Module, name: str, own: nn.Parameter, mesh: DeviceMesh, whole: Tensor) -> None:
    from torch.distributed.tensor import Shard  # takes seconds

    from ...ddp.plan.tensor_parallel.layouts import Layout
    from ...ddp.plan.tensor_parallel.optimizers import set_slice_of
    from ...ddp.plan.tensor_parallel.state_dict import install_state_dict_hooks

    layout = Layout(mesh, Shard(0), whole.shape, whole.stride(), of_experts=True)
    owner.__dict__.setdefault(LAYOUTS, {})[name] = layout
    set_slice_of(own, layout)
    install_state_dict_hooks(owner)


def _whole_shape(owner: Any, name: str) -> tuple[int, ...]:
    """The shape of a parameter with all experts. A model that was shared out, and copied or unwrapped, has parts."""
    layout = layouts_of(owner).get(name)
    return tuple(owner._parameters[name].shape if layout is None else layout.shape)


def _dispatch(
    experts: Any, mesh: DeviceMesh, dispatcher: TokenDispatcher, made: dict[int, nn.Parameter] | None
) -> None:
    """Have a module of Hugging Face's experts keep this rank's, and send tokens to the others'."""
    names = weight_names_of(experts)
    biases = [f"{name}_bias" for name in names] if experts.has_bias else []
    keep_own(experts, (*names, *biases), mesh, made)
    experts.__dict__.pop("_is_expert_parallel", None)
    experts.__dict__.pop("forward", None)  # that of transformers' style: see ``_why_not`` for others
    experts.num_experts = dispatcher.num_experts // mesh.size()
    experts.dispatcher = dispatcher


# ---- What there is. ----


def numbers_of_experts(model: nn.Module) -> list[int]:
    """Numbers of experts of the modules that ``ep`` can share out; empty where ``ep`` would be refused."""
    found: list[Any] = [module for module in model.modules() if _is_of_hugging_face(module)]
    return [] if any(map(_why_not, found)) else [int(module.num_experts) for module in found]


def _is_of_hugging_face(module: Any) -> bool:
    return isinstance(module, FusedExperts) or is_experts_class(type(module))


def _cut_already(model: nn.Module, ranks: Ranks) -> tuple[dict[nn.Module, DeviceMesh], list[int] | None]:
    """The modules with stacks of experts that are cut over data-parallel ranks, with their mesh.

    Stacks have three dims: a matrix that is cut over ranks with other data is a mistake, which the wrapper refuses.
    Experts that were shared out are cut as well: the model is a copy, or was unwrapped. The second result: ranks beside
    the data-parallel ones over which something is cut.
    """
    found: dict[nn.Module, DeviceMesh] = {}
    elsewhere: list[int] | None = None
    here = {rank for group in make_grid(ranks).axes for rank in dist.get_process_group_ranks(group)}
    for module, mesh, of_experts in _cuts(model):
        if not here.issuperset(mesh.mesh.tolist()):
            elsewhere = mesh.mesh.tolist()
        elif of_experts:
            found[module] = mesh
    if len({tuple(mesh.mesh.tolist()) for mesh in found.values()}) > 1:
        raise ValueError("experts are cut over several groups of data-parallel ranks: cut them all over one mesh")
    return found, elsewhere


def _cuts(model: nn.Module) -> Iterator[tuple[nn.Module, DeviceMesh, bool]]:
    """Modules with parameters that are cut, over which mesh, and whether they are experts."""
    has_dtensors = can_localize(model)
    for module in model.modules():
        for layout in layouts_of(module).values():
            yield module, layout.mesh, layout.of_experts
        own: list[Any] = list(module.parameters(recurse=False)) if has_dtensors else []
        stacks = any(each.dim() == 3 for each in own)
        stacks &= all(is_one_slice(each) and each.placements[0].is_shard(0) for each in own)
        for each in filter(is_one_slice, own):
            yield module, each.device_mesh, stacks and each.device_mesh.size() > 1


def _why_not(experts: nn.Module, *, is_cut: bool = False) -> str | None:
    if not is_cut and "forward" in vars(experts):
        return "its forward was replaced on this instance"
    return None if isinstance(experts, FusedExperts) else why_not_experts(experts, may_be_split=is_cut)


# ---- Their ranks. ----


def mesh_of(ep: ExpertRanks, grid: RankGrid) -> DeviceMesh:
    """The ranks of ``ep`` that this one belongs to, as a mesh of one dim."""
    if isinstance(ep, DeviceMesh):
        if ep.ndim != 1:
            raise ValueError(f"ep: a mesh of the ranks that hold all experts has one dim, this one has {ep.ndim}")
        return ep
    if isinstance(ep, int):
        if ep < 1 or grid.inner_size % ep:
            raise ValueError(f"ep = {ep} does not divide the {grid.inner_size} data-parallel rank(s) of an instance")
        first = grid.inner_rank // ep * ep
        ep = _group_like(grid.ranks[first : first + ep], grid.inner)
    device = "cuda" if "nccl" in str(dist.get_backend(ep)) else "cpu"
    return DeviceMesh.from_group(ep, device)


def same_place(mesh: DeviceMesh, grid: RankGrid) -> Ranks:
    """The data-parallel ranks that hold the same experts as this one: those with its place in their ``mesh``."""
    assert grid.inner is not None, "ep divides several ranks"
    outside = {*mesh.mesh.tolist()} - {*grid.ranks}
    if outside:
        raise ValueError(f"ep has ranks {sorted(outside)}, which are not among the data-parallel ranks {grid.ranks}")
    places: list[Any] = [None] * grid.inner_size
    dist.all_gather_object(places, mesh.get_local_rank(), group=grid.inner)
    alike = [rank for rank, place in zip(grid.ranks, places, strict=True) if place == mesh.get_local_rank()]
    if grid.outer is None and len(alike) == 1:
        return WORLD_OF_ONE
    inner = _group_like(alike, grid.inner)
    if grid.outer is None:
        return inner
    columns: list[Any] = [None] * grid.outer_size
    dist.all_gather_object(columns, alike, group=grid.outer)
    names = ("outer", "inner")
    return DeviceMesh.from_group(
        [grid.outer, inner], mesh.device_type, mesh=torch.tensor(columns), mesh_dim_names=names
    )


def _group_like(ranks: list[int], like: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of some of the ranks of ``like``, by its backend. Its members alone call this."""
    return new_group_of_members(ranks, backend=dist.get_backend_config(like))
