"""``Unit``: the parameters that are gathered together for one module's forward and backward, and freed together.

Five things of a unit change in an iteration. ``iteration/root.py`` tells when; here is where each one is kept, who
changes it, and when its memory comes and goes:

===========================  ==============================  ========================================================
what                         kept in                         changed by
===========================  ==============================  ========================================================
memory of whole parameters   ``Unit.gathered``;              ``UnitGathers.gather`` takes it, ``release`` frees it.
                             ``ShardedBucket.whole_params``  It stays between ``unshard()`` and ``reshard()``, and
                                                             where placements keep parameters whole
form that modules register   ``Registration``                ``Root``: ``show_whole`` around a forward, and from
                                                             entering a unit in backward to passing it; ``unshard()``
state of the gradients       ``GradRound.state``             ``GradRounds``: ``backward_enters``, ``leave``, ``_finish``
memory of whole gradients    ``ShardedBucket.whole_grads``;  ``GradRounds.make_room`` takes it at the first write, and
                             ``Phase`` of each bucket        ``finish_reduction`` frees it. The phase goes from IDLE
                                                             to ACCUMULATING, REDUCING, REDUCED and IDLE
sums of the shards           ``GradShard``                   ``claim`` takes memory before a reduction;
                                                             ``free_if_cleared`` frees it in the first forward after
                                                             ``zero_grad``
===========================  ==============================  ========================================================
"""

import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...ddp.collectives.rank_grid import RankGrid
from ...ddp.collectives.step_check import GroupLog, StepCheck
from ...ddp.contract.torch_wrappers import check_not_collected, check_not_inside, in_torch_ddp
from ...ddp.torch_internals import are_transforms_active
from ..tensors.parameter import ShardedPair
from .bucket import ShardedBucket
from .plan import UnitOptions
from .registration import Registration, WholeWrites

if TYPE_CHECKING:
    from ..iteration.root import Root
    from .weight_unit import WeightUnit

__all__ = ["Unit", "check_no_transform"]


class Unit:
    """One ``fully_shard`` call.

    buckets  the unit's parameters, perhaps none
    options  those of ``fully_shard``
    grid     the ranks over which the unit is sharded
    device   where the unit computes
    inside   the module, which owns the unit, and the modules in it, without units inside it and their modules
    weights  groups of its parameters that modules ask for, with buckets of their own
    """

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        options: UnitOptions,
        grid: RankGrid,
        device: torch.device,
        inside: Sequence[nn.Module],
        weights: "Sequence[WeightUnit]" = (),
    ) -> None:
        self.module = weakref.ref(inside[0])
        self.name = type(inside[0]).__name__
        """Name of the module's class, until ``join`` gives that in the outermost unit; empty for the outermost."""
        self.label = f"unit '{self.name}'"
        """The unit in words, for errors."""
        self.buckets = tuple(buckets)
        self.weights = tuple(weights)
        mine: tuple[ShardedPair, ...] = tuple(pair for bucket in buckets for pair in bucket.pairs)
        self.pairs: tuple[ShardedPair, ...] = (*mine, *(pair for weight in weights for pair in weight.pairs))
        """The unit's parameters, of all buckets, those of ``weights`` too."""
        self.trains: bool = any(each.trainable for each in buckets)
        """Some parameters of the unit are trained, without those of ``weights``."""
        self.releasable = any(not bucket.whole_params_at_rest for bucket in buckets)
        """The whole parameters can be freed: placements shard parameters at rest."""
        self.policy = options.policy
        self.grid = grid
        self.device = device
        self.copy_engine_gather = options.copy_engine_gather
        """Whether gathers of the whole model run on copy engines; "auto": the root chooses."""
        self.reshard_after_forward = options.reshard_after_forward
        """See ``fully_shard``; methods of ``FSDPModule`` may set it."""
        self.forward_prefetch: tuple[Unit, ...] | None = None
        self.backward_prefetch: tuple[Unit, ...] | None = None
        """Units to gather while this unit computes; None: the unit that came next the last time."""
        self.root_reference: weakref.ref[Root] | None = None
        """The model's root; None before the first forward of the model."""
        self.gathered = False
        """The gather of the whole parameters was issued, and they are not freed. Where placements keep their memory,
        False says that ``notice_changes`` has found them older than the shards."""
        self.freed = torch.cuda.Event() if device.type == "cuda" else None
        """CUDA: recorded after the last read of the whole parameters."""
        self.num_unshards = 0
        """Number of ``unshard()`` calls without ``reshard()``. If not 0, the unit stays gathered."""
        self.registered = Registration(inside, self.pairs)
        """The form of the parameters that modules register."""
        self.writes = WholeWrites(mine, served=options.forward_writes == "alike" or grid.size == 1)
        """Writes to whole parameters in forwards."""
        # Each log of the order of collectives, which ranks compare, with the unit's number in it. Empty for one rank.
        self._inner_log: list[tuple[GroupLog, int]] = []
        self._outer_log: list[tuple[GroupLog, int]] = []
        for bucket in buckets:
            bucket.unit = weakref.ref(self)
        for weight in weights:
            weight.enclose(self, inside)

    @property
    def root(self) -> "Root":
        """The model's root. Raises ``RuntimeError`` if the model is gone."""
        root = None if self.root_reference is None else self.root_reference()
        if root is None:
            raise RuntimeError(
                f"forward or backward of {self.label}, whose model is gone: keep the model as long as its graphs"
            )
        return root

    @property
    def arrived(self) -> bool:
        """The whole parameters can be read now: their gather has arrived."""
        return self.gathered and not any(bucket.gather.under_way for bucket in self.buckets)

    @property
    def reshards(self) -> bool:
        """Whole parameters are freed between forward and backward. By None, not those of the outermost unit."""
        return self.name != "" if self.reshard_after_forward is None else self.reshard_after_forward

    @property
    def needs_graph(self) -> bool:
        """Outputs must have a graph, also if this rank's forward has used no trained parameter. The outermost
        unit's outputs stay as they are, because no other unit depends on them."""
        return self.trains and self.name != ""

    def join(self, name: str, everyone: RankGrid | None, root: "weakref.ref[Root]") -> None:
        """Set the root, and the names of unit and parameters in the outermost unit; ``everyone``: see ``ShardInfo``."""
        for pair in self.pairs:
            full_name = f"{name}.{pair.name}" if name else pair.name
            pair.sharded.shard = pair.sharded.shard._replace(name=full_name, unit=name, everyone=everyone)
        self.name, self.root_reference = name, root
        self.label = f"unit '{name}'" if name else "the outermost unit"

    # ---- The order of collectives. ----

    def join_logs(self, steps: StepCheck) -> None:
        """Note the unit's collectives from now on. A group of ranks has a log: ranks of other experts run other units.

        Only collectives are noted. A rank that computes alone, or whose units are gathered already, may do as it likes.
        """
        logs = [steps.log_of(group) for group in (self.grid.inner, self.grid.outer)]
        self._inner_log, self._outer_log = ([] if log is None else [(log, log.add_name(self.label))] for log in logs)

    def record_gather(self) -> None:
        """The unit's gathers are issued next."""
        for log, number in self._inner_log:
            log.record_gather(number)
        if self._outer_log and any(bucket.gathers_across for bucket in self.buckets):
            for log, number in self._outer_log:
                log.record_gather(number)

    def record_reduction(self, *, inside: bool, across: bool) -> None:
        """A reduction of one bucket is issued: inside the instance, across instances, or both."""
        for log, number in [*(self._inner_log if inside else ()), *(self._outer_log if across else ())]:
            log.record_reduction(number)

    # ---- Checks. ----

    def check(self) -> None:
        """Raise ``RuntimeError`` in a forward for changes after ``fully_shard``: of parameters, modules or ranks; and
        inside torch's ``DistributedDataParallel`` or a transform of ``torch.func``."""
        check_no_transform(self.label)
        if torch.is_grad_enabled():
            self.grid.check_still_alone(f"{self.label} of fully_shard", "mesh")
        if in_torch_ddp():
            check_not_inside(self._forms(), f"{self.label} of maingrad.fsdp.fully_shard")
        self.registered.check(self.label)

    def refuse_torch_ddp(self) -> None:
        """Called by ``named_parameters``. Raise ``ValueError`` if the constructor of torch's wrapper is the caller."""
        check_not_collected(self._forms(), f"{self.label} of maingrad.fsdp.fully_shard", num_callers=2)

    def _forms(self) -> Iterator[nn.Parameter]:
        return (form for pair in self.pairs for form in (pair.sharded, pair.whole))


def check_no_transform(label: str) -> None:
    """Raise ``RuntimeError`` inside ``torch.func.grad``, ``vmap``, ``jvp`` and the like."""
    if are_transforms_active():
        raise RuntimeError(
            f"a transform of torch.func over {label} of maingrad.fsdp.fully_shard: it would take no gradient from "
            f"gathered parameters; give torch.func a plain model, with weights copied within unsharded()"
        )
