"""A unit: the parameters that are gathered together, used by one module's forward and backward, and let go together.

A forward of the unit goes through ``before_forward`` and ``after_forward``. Where it builds a graph, that is a ``Use``,
which autograd's hooks on the forward's inputs and outputs hold: backward reaches the outputs first (the parameters are
gathered again), and with the inputs it has passed the unit (the gradients are reduced).
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..ddp.graph_walk import differentiable_tensors
from ..ddp.main_grad import record_of
from ..ddp.rank_grid import RankGrid
from .mixed_precision import MixedPrecisionPolicy, cast_floating, cast_inputs
from .sharded_bucket import ShardedBucket, ShardedPair
from .sharded_param import ShardedParameter
from .surroundings import check_surroundings

__all__ = ["Unit", "Use"]


class Listener(Protocol):
    """Who hears of a unit's forwards and backwards, and has its parameters in place by then: the ``Root``."""

    def enter_forward(self, unit: "Unit") -> None:
        """A forward starts."""

    def leave_forward(self, unit: "Unit", use: "Use | None") -> None:
        """It is over; ``use``: it left a graph."""

    def enter_backward(self, use: "Use") -> None:
        """Backward has reached the outputs of a forward."""

    def leave_backward(self, unit: "Unit", use: "Use | None") -> None:
        """Backward has passed the unit's inputs."""


class Use:
    """One forward of a unit whose graph is open. The hooks on its outputs own it."""

    __slots__ = ("__weakref__", "around", "inputs", "task", "unit")

    def __init__(self, unit: "Unit") -> None:
        self.unit = unit
        self.around: tuple[Unit, ...] = ()
        """The units that its forward ran inside."""
        self.inputs: set[int] = set()
        """While forward runs: ``id`` of the inputs that have gradients."""
        self.task = -1
        """The graph task that has reached its outputs last."""

    def on_output(self, _: Tensor) -> None:
        """Backward is about to enter the forward's graph."""
        task = torch._C._current_graph_task_id()
        if self.task != task:  # not another output of the same forward
            self.task = task
            self.unit.root.enter_backward(self)

    def on_input(self, _: Tensor) -> None:
        """Backward has left it: autograd runs later nodes first, and all of the forward's are later than its inputs'.

        That holds for all parts of the forward, those that no input leads to as well, and with several inputs already
        for the first that is reached.
        """
        if self.task == torch._C._current_graph_task_id():
            self.unit.uses.discard(self)
            if not self.unit.uses:
                self.unit.root.leave_backward(self.unit, self)


class _Place(NamedTuple):
    """One module's registration of one parameter."""

    parameters: dict[str, nn.Parameter | None]
    """Of the module."""
    module: "weakref.ref[nn.Module]"
    local: str
    """Its name there."""
    plain: bool
    """The module's class does nothing else about parameters that are set, as recurrent layers do."""
    sharded: ShardedParameter
    whole: nn.Parameter
    trainable: bool

    @classmethod
    def of(cls, pair: ShardedPair, module: nn.Module, local: str) -> "_Place":
        """As it stands when the unit is made."""
        plain = type(module).__setattr__ is nn.Module.__setattr__
        trainable = pair.sharded.requires_grad
        return cls(module._parameters, weakref.ref(module), local, plain, pair.sharded, pair.whole, trainable)

    def register(self, param: nn.Parameter) -> None:
        """Have the module show this form."""
        if self.plain:
            self.parameters[self.local] = param
        else:
            setattr(self.module(), self.local, param)


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
        kinds: dict[tuple[torch.dtype, bool], list[ShardedBucket]] = {}
        for bucket in buckets:
            if bucket.trainable:
                kinds.setdefault((bucket.shard.dtype, bucket.delayed), []).append(bucket)
        self.kinds = tuple([tuple(kind) for kind in kinds.values()])
        """Buckets with gradients that wait for each other's delayed ones: which parameters are used, and with them
        which bucket is done first, may differ between ranks, and the order of reductions may not."""
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
        self.entered: int | None = None
        """The graph task that is in its backward."""
        self.uses: weakref.WeakSet[Use] = weakref.WeakSet()
        """Forwards that backward has not passed, as far as their graphs are alive."""
        self.freed = torch.cuda.Event() if device.type == "cuda" else None
        """After it nobody reads the whole parameters any more."""
        self.num_held = 0
        """How often somebody has unsharded it by hand: it stays gathered meanwhile."""
        self._num_shown = 0
        self._shown_in_backward = False
        self._places = [_Place.of(pair, module, local) for pair in self.pairs for module, local in pair.owned.owners]
        self._contents = [
            (found._parameters, len(found._parameters), found._modules, tuple(found._modules.values()))
            for found in inside
        ]
        self._plain = {id(param) for param in module.parameters()} - {id(pair.before) for pair in self.pairs}

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
        return bool(self.buckets) and not self.buckets[0].keeps_params

    @property
    def shows_whole(self) -> bool:
        """Its modules have the whole parameters registered."""
        return self._num_shown > 0

    def check(self) -> None:
        """Raise ``RuntimeError`` where a parameter was replaced, frozen, unfrozen or added since the unit was made."""
        check_surroundings(self.pairs, self.grid, self.label)
        shown = self.shows_whole
        for parameters, _, local, _, sharded, whole, trainable in self._places:
            if parameters.get(local) is not (whole if shown else sharded):
                raise RuntimeError(
                    f"parameter '{sharded.shard.name}' was replaced after fully_shard (a new nn.Parameter, a tie, "
                    f"torch.nn.utils.parametrize): no unit gathers it or reduces its gradient; change the model "
                    f"before fully_shard, and values in place, under torch.no_grad()"
                )
            if sharded.requires_grad is not trainable or whole.requires_grad is not trainable:
                raise RuntimeError(
                    f"parameter '{sharded.shard.name}' was {'frozen' if trainable else 'unfrozen'} (requires_grad_) "
                    f"after fully_shard, which plans for gradients or for none; do it before"
                )
        for index, (parameters, size, children, found) in enumerate(self._contents):
            if len(parameters) != size or tuple(children.values()) != found:
                self._check_no_stranger()
                self._contents[index] = parameters, len(parameters), children, tuple(children.values())

    def _check_no_stranger(self) -> None:
        module = self.module()
        assert module is not None, "its forward runs"
        for name, param in module.named_parameters():
            known = isinstance(param, ShardedParameter) or record_of(param) is not None or id(param) in self._plain
            if param.requires_grad and not known:
                raise RuntimeError(
                    f"parameter '{name}' of {self.label} was not there at fully_shard: no unit gathers it or reduces "
                    f"its gradient; add it before, or freeze it"
                )

    def show_whole(self) -> None:
        """Register the whole parameters in the modules that had them before sharding."""
        self._num_shown += 1
        if self._num_shown == 1:
            for place in self._places:
                place.register(place.whole)

    def show_shards(self) -> None:
        """Register the shards again."""
        self._num_shown -= 1
        if self._num_shown == 0:
            self.register_shards()

    def show_in_backward(self) -> None:
        """Register the whole parameters for what forward runs again in backward (recompute inside the unit)."""
        if not self._shown_in_backward:
            self._shown_in_backward = True
            self.show_whole()

    def hide_after_backward(self) -> None:
        """Undo it."""
        if self._shown_in_backward:
            self._shown_in_backward = False
            self.show_shards()

    def show_whole_to_foreign_delays(self) -> None:
        """Modules that are not ours, and delay weight gradients, write to what they have registered by then."""
        modules = [(place.whole, module) for place in self._places if (module := place.module()) is not None]
        delaying = {
            id(module): module
            for whole, module in modules
            if (record := record_of(whole)) is not None and record.foreign_delayer == type(module).__name__
        }
        for module in delaying.values():
            backward_dw = type(module).backward_dw  # type: ignore[attr-defined]
            shown = partial(_among_whole, weakref.ref(self), backward_dw, weakref.ref(module))
            object.__setattr__(module, "backward_dw", shown)

    def register_shards(self) -> None:
        """Register the shards, whatever is registered now."""
        for place in self._places:
            place.register(place.sharded)

    # ---- Forward. ----

    def before_forward(
        self, root: Listener, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], Use | None]:
        """Have the whole parameters in place; returns the inputs as forward takes them, and the use that begins."""
        root.enter_forward(self)
        self.show_whole()
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            args, kwargs = cast_inputs(args, kwargs, dtype)
        if not (torch.is_grad_enabled() and self.buckets):
            return args, kwargs, None
        use = Use(self)
        for tensor in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(tensor, Tensor):
                _watch_input(tensor, use)
            elif tensor is not None and not isinstance(tensor, (bool, int, float, str)):
                for leaf in tree_leaves(tensor):
                    if isinstance(leaf, Tensor):
                        _watch_input(leaf, use)
        return args, kwargs, use

    def after_forward(self, root: Listener, outputs: Any, use: Use | None) -> Any:
        """Let the parameters go as far as backward does not need them at once; returns the outputs."""
        self._end_forward()
        if self.policy.output_dtype is not None:
            outputs = cast_floating(outputs, self.policy.output_dtype)
        opened = False
        if use is not None:
            tensors = _tensors_of(outputs)
            if any(id(tensor) in use.inputs for tensor in tensors):
                # Backward must leave the unit after it has entered it, on ranks where it only hands something on too.
                outputs = tree_map(lambda leaf: leaf.view_as(leaf) if id(leaf) in use.inputs else leaf, outputs)
                tensors = _tensors_of(outputs)
            use.inputs.clear()
            for tensor in tensors:
                if tensor.grad_fn is not None:
                    tensor.register_hook(use.on_output)
                    opened = True
            if opened:
                self.uses.add(use)
        root.leave_forward(self, use if opened else None)
        return outputs

    def forward_failed(self, root: Listener) -> None:
        """Forward raised, or was stopped by a recompute that had seen enough."""
        self._end_forward()
        root.leave_forward(self, None)

    def _end_forward(self) -> None:
        self.show_shards()
        if torch.is_autocast_enabled(self.device.type):
            # What autocast has cast is memory that nobody lets go of, and its gradient would come after the unit's.
            torch.clear_autocast_cache()

    def rename(self, name: str) -> None:
        """Take its name in the outermost unit, and its parameters theirs."""
        for pair in self.pairs:
            info = pair.sharded.shard
            pair.sharded.shard = info._replace(name=f"{name}.{pair.name}" if name else pair.name, unit=name)
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


def _among_whole(
    unit: "weakref.ref[Unit]", backward_dw: Any, module: "weakref.ref[nn.Module]", *args: Any, **kwargs: Any
) -> Any:
    live = unit()
    if live is None:
        return backward_dw(module(), *args, **kwargs)
    live.show_whole()
    try:
        return backward_dw(module(), *args, **kwargs)
    finally:
        live.show_shards()


def _tensors_of(outputs: Any) -> list[Tensor]:
    return [outputs] if type(outputs) is Tensor else differentiable_tensors(outputs)


def _watch_input(tensor: Tensor, use: Use) -> None:
    if not tensor.requires_grad:
        return
    use.inputs.add(id(tensor))
    # A leaf's hook may run before all of the forward's graph has: such a unit is passed when backward ends.
    if tensor.grad_fn is not None and tensor.device == use.unit.device:
        # Weakly: recompute makes graphs that no backward comes to, over inputs that live on.
        tensor.register_hook(partial(_on_input, weakref.ref(use)))


def _on_input(reference: "weakref.ref[Use]", grad: Tensor) -> None:
    use = reference()
    if use is not None:
        use.on_input(grad)
