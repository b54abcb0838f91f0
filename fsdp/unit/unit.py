"""``Unit``: the parameters that are gathered together for one module's forward and backward, and freed together.

Each forward calls ``before_forward`` and ``after_forward``. If the forward builds a graph, hooks (``forwards.py``) tell
the ``Listener`` when backward reaches the outputs, so that the parameters are gathered again, and when backward has
passed the inputs, so that the gradients are reduced.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ...ddp.collectives.rank_grid import RankGrid
from .bucket import ShardedBucket, ShardedPair
from .forwards import BackwardHooks, ForwardTrace, UnitForward
from .mixed_precision import MixedPrecisionPolicy, cast_floating, cast_inputs
from .registration import Registration
from .surroundings import check_surroundings
from .whole_writes import WholeWrites, write_back

__all__ = ["Unit"]


class Listener(Protocol):
    """The interface of ``iteration/root.py`` that a unit calls. Whole parameters are gathered when a call returns."""

    def enter_forward(self, unit: "Unit") -> BackwardHooks:
        """A forward of the unit starts."""
        raise NotImplementedError

    def leave_forward(self, unit: "Unit", hooks: BackwardHooks | None) -> None:
        """The forward is over; ``hooks``: those on its graph, None if it has left none."""

    def enter_backward(self, forward: UnitForward, trace: ForwardTrace, task: int, *, delivers: bool) -> None:
        """Backward has reached the outputs of a forward; ``delivers``: it is a plain ``backward()``, without inputs."""

    def leave_backward(self, forward: UnitForward, trace: ForwardTrace, task: int) -> None:
        """Backward has passed the inputs of a forward."""


class Unit:
    """One ``fully_shard`` call.

    module                 the module, which owns the unit; the reference is weak
    name                   of the module's class, until ``join`` gives the name in the outermost unit
    buckets                the unit's parameters, perhaps none
    policy                 dtypes
    grid                   the ranks over which the unit is sharded
    device                 where the unit computes
    inside                 the module and the modules in it, without units inside it and their modules
    reshard_after_forward  as in ``fully_shard``
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        buckets: Sequence[ShardedBucket],
        policy: MixedPrecisionPolicy,
        grid: RankGrid,
        device: torch.device,
        inside: Sequence[nn.Module],
        reshard_after_forward: bool | None,
    ) -> None:
        self.module = weakref.ref(module)
        self.name = name
        """Name of the module in the outermost unit; empty for the outermost."""
        self.buckets = tuple(buckets)
        self.trains = any(bucket.trainable for bucket in buckets)
        """Some parameters of the unit are trained."""
        self.policy = policy
        self.grid = grid
        self.device = device
        self.copy_engines = False
        """Gathers of the whole model run on copy engines."""
        self.reshard_after_forward = reshard_after_forward
        """By None, every unit reshards but the outermost."""
        self.forward_prefetch: tuple[Unit, ...] | None = None
        self.backward_prefetch: tuple[Unit, ...] | None = None
        """Units to gather while this unit computes; None: the unit that came next the last time."""
        self.root_reference: Any = None
        """Weak reference to the model's root; None before the first forward of the model."""
        self.gathered = False
        """The gather of the whole parameters was issued, and they are not freed."""
        self.freed = torch.cuda.Event() if device.type == "cuda" else None
        """CUDA: recorded after the last read of the whole parameters."""
        self.num_unshards = 0
        """Number of ``unshard()`` calls without ``reshard()``. If not 0, the unit stays gathered."""
        self.registered = Registration(module, inside, self.pairs)
        """Which form of the parameters the modules register."""
        self.writes = WholeWrites(self.pairs)
        """Writes to whole parameters in forwards."""

    @property
    def root(self) -> Listener:
        """The model's root. Raises ``RuntimeError`` if the model is gone."""
        root = None if self.root_reference is None else self.root_reference()
        if root is None:
            raise RuntimeError(
                f"forward or backward of {self.label}, whose model is gone: keep the model as long as its graphs"
            )
        return root  # type: ignore[no-any-return]

    @property
    def label(self) -> str:
        """The unit in words, for errors."""
        return f"unit '{self.name}'" if self.name else "the outermost unit"

    @property
    def arrived(self) -> bool:
        """Whether the whole parameters can be read now: their gather has arrived."""
        return self.gathered and not any(
            bucket.gather is not None and bucket.gather.under_way for bucket in self.buckets
        )

    @property
    def pairs(self) -> list[ShardedPair]:
        """The unit's parameters, of all buckets."""
        return [pair for bucket in self.buckets for pair in bucket.pairs]

    @property
    def releasable(self) -> bool:
        """Whether the whole parameters can be freed: placements shard parameters at rest."""
        return bool(self.buckets) and not self.buckets[0].whole_params_at_rest

    def check(self) -> None:
        """Raise ``RuntimeError`` if parameters, modules or surroundings have changed after ``fully_shard``."""
        check_surroundings(self.pairs, self.grid, self.label)
        self.registered.check(self.label)

    # ---- Forward. ----

    @property
    def needs_graph(self) -> bool:
        """Whether outputs must have a graph, also if this rank's forward has used no trained parameter. The outermost
        unit's outputs stay as they are, because no other unit depends on them."""
        return self.trains and self.name != ""

    def before_forward(
        self, root: Listener, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], BackwardHooks | None]:
        """Gather and register the whole parameters. Returns args and kwargs, cast by the policy, and the hooks.

        The hooks are None without grad mode and for a unit without parameters.
        """
        hooks = root.enter_forward(self)
        self.registered.show_whole(frozen=not hooks.forward.trains)
        if self.num_unshards:
            self.writes.note()  # writes after unshard() are lost, unless unsharded() writes back
        module = self.module()
        self.writes.forward_begins(training=module is not None and module.training)
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = cast_inputs(args, kwargs, dtype)
        if not (torch.is_grad_enabled() and self.buckets):
            return args, kwargs, None
        hooks.watch_inputs(args, kwargs)
        return args, kwargs, hooks

    def after_forward(self, root: Listener, outputs: Any, hooks: BackwardHooks | None) -> Any:
        """Register the shards, and free the whole parameters unless backward begins with this unit. Returns outputs."""
        try:
            self.writes.forward_ends()
        except RuntimeError:
            self.forward_failed(root)
            for bucket in self.buckets:
                bucket.record_change()  # the next forward gathers what was there before the write
            raise
        self._end_forward()
        if self.policy.output_dtype is not None:
            outputs = cast_floating(outputs, self.policy.output_dtype)
        if hooks is not None:
            outputs, has_graph = hooks.watch_outputs(outputs)
            if not has_graph:
                hooks = None
        root.leave_forward(self, hooks)
        return outputs

    def forward_failed(self, root: Listener) -> None:
        """Forward has raised, or a recompute has stopped it early."""
        refused = self.writes.forward_failed()
        self._end_forward()
        root.leave_forward(self, None)
        for bucket in self.buckets if refused else ():
            bucket.record_change()  # the next forward gathers what was there before the write

    def _end_forward(self) -> None:
        self.registered.show_shards()
        if torch.is_autocast_enabled(self.device.type):
            # Autocast caches casts of parameters, which would stay in memory. Their gradients would come too late.
            torch.clear_autocast_cache()

    def join(self, name: str, everyone: RankGrid | None) -> None:
        """Set the names of unit and parameters in the outermost unit; ``everyone``: see ``ShardInfo``."""
        for pair in self.pairs:
            full_name = f"{name}.{pair.name}" if name else pair.name
            pair.sharded.shard = pair.sharded.shard._replace(name=full_name, unit=name, everyone=everyone)
        self.name = name

    def set_reshard(self, reshard_after_forward: bool) -> None:
        """Change ``reshard_after_forward``."""
        if reshard_after_forward and not self.releasable:
            raise ValueError(
                f"{self.label}: reshard_after_forward=True has no effect where placements keep parameters whole"
            )
        self.reshard_after_forward = reshard_after_forward

    def write_back(self) -> None:
        """Copy this rank's part of the whole parameters to the shards."""
        write_back(self.pairs)
