"""What ranks gather and reduce together, from shapes alone: no process group, no storage."""

from typing import NamedTuple

from torch import nn

from ...ddp.collectives.reduction import Placement, placements_of
from ...ddp.plan.model_slice import model_slice_of
from ...ddp.plan.owned_params import find_owned_params, plan_model
from ...ddp.torch_grads.muon_groups import MuonGroups
from ...fsdp.unit.plan import plan_unit, shard_degree
from ..config.run import Config
from ..model.hugging_face import LanguageModel
from ..parallelizing.muon import with_whole_matrices
from ..training.wrapping import units_of
from .rank_bytes import PlacedBucket, Traffic

__all__ = ["PlacedUnit", "lay_out", "states_of"]


class PlacedUnit(NamedTuple):
    """A unit of a fully sharded model, or one bucket of ``DistributedDataParallel``."""

    name: str
    """Name of the module in the model, empty for the model itself; or the number of the bucket."""
    buckets: tuple[PlacedBucket, ...]
    gathers_in_forward: int
    gathers_in_backward: int
    """All-gathers of each bucket in one step, from the second step on: the first step does not know the order yet."""
    reductions: tuple[int, ...]
    """Reductions of each bucket in one step, over the ranks of an instance; 1 for a bucket of delayed gradients."""

    @property
    def title(self) -> str:
        """The name, for a table."""
        return self.name or "(the model)"

    @property
    def param_nbytes(self) -> int:
        """Bytes of the unit's whole parameters."""
        return sum(bucket.param_nbytes for bucket in self.buckets)

    @property
    def grad_nbytes(self) -> int:
        """Bytes of the unit's whole gradients."""
        return sum(bucket.grad_nbytes for bucket in self.buckets)

    @property
    def traffic(self) -> Traffic:
        """Bytes that each rank sends in a step, over all of its gathers and reductions."""
        gathers = self.gathers_in_forward + self.gathers_in_backward
        found = [
            each._replace(reduce_inside=reductions * each.reduce_inside, gather=gathers * each.gather)
            for reductions, each in zip(self.reductions, (bucket.traffic for bucket in self.buckets), strict=True)
        ]
        return Traffic(*map(sum, zip(*found, strict=True)))


def lay_out(config: Config, model: LanguageModel, muon: MuonGroups, ranks: int) -> tuple[PlacedUnit, ...]:
    """The configured model over ``ranks`` ranks whose losses are averaged, each with its tensor-parallel ranks.

    model  as one of these has it. It may be on meta; a fully sharded one gets the dtype that its shards have
    muon   the model's matrices for Muon

    Units of a fully sharded model: the outermost first, the others in forward order. Else buckets in launch order.
    """
    return (_units if config.fully_sharded else _buckets)(config, model, muon, ranks)


def states_of(config: Config, model: LanguageModel, muon: MuonGroups) -> dict[str, int]:
    """Elements of optimizer state for each element of a parameter."""
    states = dict.fromkeys((name for name, _ in model.named_parameters()), config.optimizer.state_per_element())
    return states | dict.fromkeys(muon.matrices, 1)  # Muon's momentum


def _buckets(config: Config, model: LanguageModel, muon: MuonGroups, ranks: int) -> tuple[PlacedUnit, ...]:
    wrapper, outer_size = with_whole_matrices(config.ddp, muon), config.num_instances
    row, inner_size = placements_of(wrapper), ranks // outer_size
    states = states_of(config, model, muon)
    copies = inner_size * config.mesh.tp
    # As ``make_grids`` has them.
    sizes = {"slice": inner_size, "dense": copies, "partial": copies, "expert": inner_size // config.mesh.ep}
    owned = [
        each if (held := model_slice_of(each.param)) is None else each._replace(grid_name=held.grad)
        for each in find_owned_params(model)
    ]
    plan = plan_model(owned, wrapper, shard_degree=sizes if row.inner.scatters else 1)
    buckets = [
        PlacedBucket(
            layout=layout,
            placements=row,
            inner_size=sizes.get(layout.grid_name, inner_size),
            outer_size=outer_size,
            columns=config.mesh.tp if layout.grid_name == "dense" and row.inner.scatters else 1,
            wire_dtype=wrapper.grad_reduce_wire_dtype,
            releases_grads=wrapper.release_grads,
            compact=None if muon.groups and layout.keeps_matrices_whole else config.optimizer.compact_moments,
            states=states,
        )
        for layout in plan.buckets
    ]
    return tuple(
        PlacedUnit(str(bucket.layout.index), (bucket,), int(row.inner.gathers), 0, reductions=(1,))
        for bucket in buckets
    )


def _units(config: Config, model: LanguageModel, muon: MuonGroups, ranks: int) -> tuple[PlacedUnit, ...]:
    compact = config.optimizer.compact_moments
    if compact is None:
        model.float()  # parameters are fp32 at rest
    names = {id(module): name for name, module in model.named_modules()}
    fsdp, outer_size = config.fsdp, config.num_instances
    row, all_inside = fsdp.row, ranks // outer_size
    states = states_of(config, model, muon)
    taken: set[int] = set()

    def name_of(module: nn.Module, local: str) -> str:
        return f"{names[id(module)]}.{local}".removeprefix(".")

    placed: dict[str, tuple[PlacedBucket, ...]] = {}
    for module, policy in units_of(model, config.model, fsdp):
        owned = [entry for entry in find_owned_params(module) if id(entry.param) not in taken]
        taken.update(id(entry.param) for entry in owned)
        inner_size = all_inside // (config.mesh.ep if owned[0].grid_name == "expert" else 1)
        degree = shard_degree(row, inner_size, outer_size)
        placed[names[id(module)]] = tuple(
            PlacedBucket(
                layout=layout,
                placements=row,
                inner_size=inner_size,
                outer_size=outer_size,
                wire_dtype=fsdp.dtype("reduce_dtype"),
                trainable=trainable,
                own_shards=True,
                compact=compact,
                states={slot.spec.name: states[name_of(module, slot.spec.name)] for slot in layout.slots},
            )
            for layout, trainable in plan_unit(owned, policy, degree, fsdp.shard_atoms, fsdp.bucket_size)
        )
    entered = [name for name in names.values() if name in placed]  # this model registers modules in forward order
    shards, microbatches = row.inner.parameter is Placement.SHARDED, config.train.num_microbatches
    units = []
    for index, name in enumerate(entered):
        # The outermost unit and the unit that a forward enters first stay whole from one microbatch to the next. The
        # outermost unit and the unit that a forward enters last stay whole from the forward to the backward.
        in_forward = microbatches if shards and index > 1 else 1
        stays = not shards or fsdp.reshard_after_forward is False or index in (0, len(entered) - 1)
        reductions = (1 if fsdp.reduces_once or bucket.layout.delayed else microbatches for bucket in placed[name])
        units.append(PlacedUnit(name, placed[name], in_forward, 0 if stays else microbatches, tuple(reductions)))
    return tuple(units)
