"""A unit: the parameters that are gathered together, used by one module's forward and backward, and let go together.

A forward of the unit goes through ``before_forward`` and ``after_forward``. Where it builds a graph, that is a ``Use``
(``uses.py``): backward reaches the outputs first (the parameters are gathered again), and with the inputs it has passed
the unit (the gradients are reduced).
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

__all__ = ["Unit"]


class Listener(Protocol):
    """Who hears of a unit's forwards and backwards, and has its parameters in place by then: the ``Root``."""

    def enter_forward(self, unit: "Unit") -> BackwardHooks:
        """A forward starts."""
        raise NotImplementedError

    def leave_forward(self, unit: "Unit", hooks: BackwardHooks | None) -> None:
        """It is over; ``passage``: it left a graph."""

    def enter_backward(self, forward: UnitForward, trace: ForwardTrace, task: int, *, delivers: bool) -> None:
        """Backward has reached the outputs of a forward; ``delivers``: it is a plain ``backward()``."""

    def leave_backward(self, forward: UnitForward, trace: ForwardTrace, task: int) -> None:
        """Backward has passed the unit's inputs."""


class Unit:
    """One ``fully_shard`` call.

    module   whose forward it is; held weakly, as the module owns the unit
    buckets  its parameters
    grid     the ranks that it is sharded over
    device   where it computes
    inside   the module and those in it that are not in units of their own
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
        """In the outermost unit; empty for that one."""
        self.buckets = tuple(buckets)
        self.trains = any(bucket.trainable for bucket in buckets)
        """Some of its parameters are."""
        self.policy = policy
        self.grid = grid
        self.device = device
        self.copy_engines = False
        """Gathers of the model that it is in run on copy engines."""
        self.reshard_after_forward = reshard_after_forward
        """None: unless it is the outermost."""
        self.forward_prefetch: tuple[Unit, ...] | None = None
        self.backward_prefetch: tuple[Unit, ...] | None = None
        """Units to gather while this one computes; None: what came next the last time."""
        self.root_reference: Any = None
        """Weak reference to the root, once there is one."""
        self.gathered = False
        """The whole parameters are there, or on their way."""
        self.freed = torch.cuda.Event() if device.type == "cuda" else None
        """After it nobody reads the whole parameters any more."""
        self.num_unshards = 0
        """How often somebody has unsharded it by hand: it stays gathered meanwhile."""
        self.registered = Registration(module, inside, self.pairs)
        """Which form of its parameters modules show."""

    @property
    def root(self) -> Listener:
        """Of the outermost unit."""
        root = None if self.root_reference is None else self.root_reference()
        if root is None:
            raise RuntimeError(
                f"forward or backward of {self.label}, whose model is gone: keep the model as long as its graphs"
            )
        return root  # type: ignore[no-any-return]

    @property
    def label(self) -> str:
        """For errors."""
        return f"unit '{self.name}'" if self.name else "the outermost unit"

    @property
    def arrived(self) -> bool:
        """Whether whole parameters are there for whoever reads them now."""
        return self.gathered and not any(
            bucket.gather is not None and bucket.gather.under_way for bucket in self.buckets
        )

    @property
    def pairs(self) -> list[ShardedPair]:
        """Its parameters."""
        return [pair for bucket in self.buckets for pair in bucket.pairs]

    @property
    def releasable(self) -> bool:
        """Whether whole parameters do not stay at rest."""
        return bool(self.buckets) and not self.buckets[0].whole_params_at_rest

    def check(self) -> None:
        """Raise ``RuntimeError`` for what has changed, within the unit or around it, since it was made."""
        check_surroundings(self.pairs, self.grid, self.label)
        self.registered.check(self.label)

    # ---- Forward. ----

    @property
    def needs_graph(self) -> bool:
        """What it returns leads to it, also where forward has used nothing that is trained. What the outermost unit
        returns is the user's to judge."""
        return self.trains and self.name != ""

    def before_forward(
        self, root: Listener, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], BackwardHooks | None]:
        """Have the whole parameters in place; returns the inputs as forward takes them, and the use that begins."""
        hooks = root.enter_forward(self)
        self.registered.show_whole(frozen=not hooks.forward.trains)
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = cast_inputs(args, kwargs, dtype)
        if not (torch.is_grad_enabled() and self.buckets):
            return args, kwargs, None
        hooks.watch_inputs(args, kwargs)
        return args, kwargs, hooks

    def after_forward(self, root: Listener, outputs: Any, hooks: BackwardHooks | None) -> Any:
        """Let the parameters go as far as backward does not need them at once; returns the outputs."""
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
        """Forward raised, or was stopped by a recompute that had seen enough."""
        self._end_forward()
        root.leave_forward(self, None)

    def _end_forward(self) -> None:
        self.registered.show_shards()
        if torch.is_autocast_enabled(self.device.type):
            # What autocast has cast is memory that nobody lets go of, and its gradient would come after the unit's.
            torch.clear_autocast_cache()

    def join(self, name: str, everyone: RankGrid | None) -> None:
        """Take its name in the outermost unit, and its parameters theirs; ``everyone``: what their norms cover."""
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

    @torch.no_grad()
    def write_back(self) -> None:
        """Take this rank's part of what somebody wrote to the whole parameters."""
        for pair in self.pairs:
            info = pair.sharded.shard
            part = pair.whole.detach().reshape(-1)[info.start : info.end]
            pair.sharded.copy_(part.view(pair.sharded.shape))
