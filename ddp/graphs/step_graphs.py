"""``StepGraphs``: an iteration's graphs, one for each kind of call. What is particular to a wrapper is in a subclass.

The order of the methods is that of a call: find the graph, then run the function, capture it, or replay its graph.
"""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..collectives.timeline import Observer
from ..gathers.gathered_models import GatheredModel, gathered_models
from ..torch_internals import tree_map_only
from .capture import CapturedGraph, GraphPool
from .host.surroundings import Surroundings
from .inputs import StaticInputs, check_outputs, detached_copies, signature
from .model_masks import ModelMasks
from .step_options import StepOptions

__all__ = ["Kind", "StepGraphs", "Variant", "check_memory_settings", "check_optimizer", "counted_steps"]

P = ParamSpec("P")
T = TypeVar("T")
Kind: TypeAlias = tuple[Hashable, tuple[Hashable, ...], Surroundings, tuple[bool, ...]]
"""Signature of the arguments, options of the optimizer, what is around the call, and ``training`` of each module."""
_MOST_KINDS = 256
"""Whose eager calls are counted."""


class Variant:
    """The graph of one kind of call."""

    def __init__(self, args: Any, device: torch.device, pool: GraphPool) -> None:
        self.inputs = StaticInputs(args, device)
        self.graph = CapturedGraph(pool)
        self.modes: list[tuple[nn.Module, bool]] = []
        """``training`` of the modules that the function has brought into another mode."""
        self.outputs: Any = None
        """What the captured function returned: memory that each replay overwrites."""


V = TypeVar("V", bound=Variant)


class StepGraphs(ABC, Generic[P, T, V]):
    """Calls ``train_step`` eagerly at first, then captures it, and replays the graph.

    train_step        runs one whole iteration
    optimizer         the one optimizer that steps in it
    module            its modes, hooks, buffers and parameters decide which graph serves a call
    params            its trained parameters, whose hooks do so too
    gathers           those of its parameters
    num_ranks         whose collectives are captured
    device            a CUDA device with an index, or the CPU
    num_warmup_steps  eager calls of each kind before its capture
    max_graphs        of kinds of calls
    """

    variant_type: type[V]
    """What a subclass keeps of each kind of call."""

    def __init__(
        self,
        train_step: Callable[P, T],
        optimizer: Optimizer,
        module: nn.Module,
        params: Sequence[Tensor],
        gathers: GatheredModel,
        num_ranks: int,
        device: torch.device,
        *,
        num_warmup_steps: int,
        max_graphs: int,
    ) -> None:
        if num_warmup_steps < 1:
            raise ValueError(f"num_warmup_steps must be at least 1 (states are made in it), got {num_warmup_steps}")
        self._train_step = train_step
        self._module = module
        self._params = params
        self._gathers = gathers
        self._num_ranks = num_ranks
        self._device = device
        self._num_warmup_steps = num_warmup_steps
        self._max_graphs = max_graphs
        self._name = getattr(train_step, "__qualname__", type(train_step).__name__)
        self._options = StepOptions(optimizer, device)
        self._masks = ModelMasks(module)
        self._pool = GraphPool(device)
        self._variants: dict[Kind, V] = {}
        """What is captured."""
        self._num_eager: dict[Kind, int] = {}
        """Eager calls of each kind."""
        self._states: list[Surroundings] = []
        """What was around calls, the latest first."""
        self.make_state: Callable[..., Surroundings] = Surroundings
        """Reads what is around a call now."""
        self.most_states = max_graphs + 1
        self.after_capture: Callable[[str | None], None] = self._check_unchanged
        """Called when a capture has gone well, with what it has changed. If this raises, the capture has failed."""

    def reset(self) -> None:
        """Free all graphs and their memory, but for cuBLAS's workspaces. Later calls warm up and capture anew."""
        for variant in self._variants.values():
            self._free(variant)
        self._variants.clear()
        self._num_eager.clear()
        self._states.clear()
        self._options.forget_state()
        self._pool.forget()

    @property
    def num_graphs(self) -> int:
        """Number of kinds of calls that are captured."""
        return len(self._variants)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one iteration: eagerly as long as fewer calls of its kind were, then captured, then replayed."""
        call = (args, kwargs)
        kind = self.kind_of(call, self.state()[0])
        self.check_startable(kind)
        if self.is_captured(kind):
            self.load(kind, call)
            return self.replay(kind)
        if (num_eager := self.num_eager(kind)) == self._num_warmup_steps:
            return self.capture(kind, call)
        if num_eager == 0 and len(self._num_eager) == self._max_graphs:
            raise RuntimeError(
                f"{self._name}: {self._max_graphs} kinds of calls have a graph each, and this one is another: give "
                f"numbers that change as tensors, pad batches to few shapes, keep options of the optimizer but rates "
                f"constant (cycle_momentum=False), and the model's modes, hooks and buffers; or raise max_graphs"
            )
        inputs = StaticInputs(call, self._device)
        with self._ready():
            inputs.load(call)
            outputs: T = detached_copies(self._run(inputs))
            self._options.record_state()
            self.record_eager(kind)
        return outputs

    # ---- Which graph serves a call. ----

    def kind_of(self, call: Any, state: Surroundings) -> Kind:
        """What calls must have in common that one graph serves.

        state  what is around this one

        Raises ``TypeError`` and ``ValueError`` for arguments that no graph can have.
        """
        return signature(call), self._options.key(), state, state.training()

    def state(self) -> tuple[Surroundings, str | None]:
        """What is around the call, as it was in one of the latest; else anew, and what has changed since the latest."""
        changes = []
        for at, state in enumerate(self._states):
            if (change := state.change()) is None:
                self._states.insert(0, self._states.pop(at))
                return state, None
            changes.append(change)
        state = self.make_state(self._module, self._params, self._device.type, self._beside)
        self._states.insert(0, state)
        if len(self._states) > self.most_states:
            self.forget(self._states[-1])
        return state, changes[0] if changes else None

    def check_startable(self, kind: Kind) -> None:
        """Raise ``RuntimeError``, ``TypeError`` or ``ValueError`` where this call cannot be one of a graph."""
        self._check_startable(known=self.is_captured(kind))

    def is_captured(self, kind: Kind) -> bool:
        """Whether calls of this kind are replays."""
        return kind in self._variants

    def has_room(self) -> bool:
        """Whether another kind may have a graph."""
        return len(self._variants) < self._max_graphs

    def num_eager(self, kind: Kind) -> int:
        """Eager calls of this kind so far."""
        return self._num_eager.get(kind, 0)

    def record_eager(self, kind: Kind) -> None:
        """A call of this kind has run eagerly, and the next of it may be captured."""
        if len(self._num_eager) == _MOST_KINDS:
            self._num_eager.clear()
        self._num_eager[kind] = self.num_eager(kind) + 1

    def forget(self, state: Surroundings) -> None:
        """Free the graphs of calls that had this around them."""
        self._states = [each for each in self._states if each is not state]
        self._num_eager = {kind: number for kind, number in self._num_eager.items() if kind[2] is not state}
        for kind in [kind for kind in self._variants if kind[2] is state]:
            self._free(self._variants.pop(kind))

    # ---- Run, capture, replay. ----

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Around an eager iteration beside the graphs, on the stream of captures: autograd's nodes belong to it."""
        with self._pool.on_stream(), self._masks.answered():
            try:
                self._options.load()  # what was loaded since, into the memory that kernels read
            except RuntimeError:  # of other shapes
                self.reset()
            yield
            self._options.record_state()

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Around a call that is or will be a graph, on the stream of captures."""
        with self._pool.on_stream():
            for model in gathered_models():  # a replay may read others (a teacher), and waits for none
                if model is not self._gathers:
                    model.finish()
            self._prepare()
            self._options.load()
            yield

    def _run(self, inputs: StaticInputs) -> Any:
        """Call the function, and check that it was one iteration."""
        args, kwargs = inputs.args
        with self.one_iteration(), self._masks.answered():
            outputs = self._train_step(*args, **kwargs)
        inputs.check_unchanged(self._name)
        check_outputs(outputs, self._name)
        return outputs

    def capture(self, kind: Kind, call: Any) -> T:
        """Capture a call, anew where its kind has a graph. It has run then, and later ones of its kind are replays."""
        if kind in self._variants:
            self._free(self._variants.pop(kind))
        variant = self.variant_type(call, self._device, self._pool)
        check_memory_settings(self._device, self._num_ranks)
        with self._ready():
            variant.inputs.load(call)
            try:
                with (
                    self._captured(variant),
                    _captured_gathers(),
                    self._options.in_device_memory(),
                    variant.graph.capture(),
                ):
                    self._begin_capture()
                    variant.outputs = tree_map_only(Tensor, Tensor.detach, self._run(variant.inputs))
                *_, state, training = kind
                now = zip(state.modules, training, state.training(), strict=True)
                variant.modes = [(module, mode) for module, before, mode in now if mode != before]
                self.after_capture(state.change())
            except BaseException:
                variant.graph.undo()
                self._capture_failed()
                raise
            self._end_capture(variant)
            self._variants[kind] = variant
            if not variant.graph.ran:
                self._launch(variant)
            return self._finish(variant)

    def _check_unchanged(self, change: str | None) -> None:
        if change is not None:
            raise RuntimeError(
                f"{self._name} has replaced or changed {change}, which replays would not do: write buffers in place "
                f"(copy_, add_), and change the rest before the graphed step"
            )

    def load(self, kind: Kind, call: Any) -> None:
        """Copy a call's arguments to where its graph reads them."""
        with self._pool.on_stream():
            self._variants[kind].inputs.load(call)

    def replay(self, kind: Kind) -> T:
        """Replay the graph of a call of this kind, whose arguments are loaded."""
        variant = self._variants[kind]
        with self._ready():
            self._launch(variant)
            return self._finish(variant)

    def _finish(self, variant: V) -> T:
        """Behind the device's work of a step."""
        for model in gathered_models():  # the step may have written to others (a sharded average of weights)
            if model is not self._gathers:
                model.record_replay()
        for module, mode in variant.modes:
            module.training = mode
        self._after_replay(variant)
        outputs: T = detached_copies(variant.outputs)
        return outputs

    def _free(self, variant: V) -> None:
        variant.graph.reset()

    # ---- What a subclass says of its wrapper. ----

    def _beside(self) -> Sequence[object]:
        """What else is compared: hooks of the wrapper's own that are called in an iteration."""
        return ()

    @abstractmethod
    def _check_startable(self, *, known: bool) -> None:
        """Raise where an eager iteration would raise, and where this one would not start as the captured one did.

        known  a call in the same surroundings was captured: its parameters were checked
        """

    def _check_observed(self, observer: Observer) -> None:
        """Raise where gradients are disabled, or ``observer``, the trained model's, records."""
        if not torch.is_grad_enabled():
            raise RuntimeError(f"{self._name}: gradients are disabled around the graphed step")
        if observer.recording:
            raise RuntimeError(
                f"{self._name}: record_timeline() around a graphed step would record its capture; record eager steps"
            )

    def _prepare(self) -> None:
        """Before an eager call, a capture or a replay, on its stream."""

    @abstractmethod
    def one_iteration(self) -> AbstractContextManager[None]:
        """Around the function's Python: raise ``RuntimeError`` at the end unless it was one whole iteration."""

    @contextmanager
    def _captured(self, variant: V) -> Iterator[None]:
        """Around a capture."""
        yield

    def _begin_capture(self) -> None:
        """In a capture, before the function is called."""

    def _end_capture(self, variant: V) -> None:
        """After a capture. On CUDA nothing of it has run."""

    @abstractmethod
    def _capture_failed(self) -> None:
        """Give up the iteration of a capture that has failed."""

    def _launch(self, variant: V) -> None:
        """Launch the captured work, and count what its Python would have counted."""
        variant.graph.replay()

    @abstractmethod
    def _after_replay(self, variant: V) -> None:
        """What Python does after the device's work of a step."""


@contextmanager
def _captured_gathers() -> Iterator[None]:
    """Around a capture: gathers of all models that it may read."""
    models = gathered_models()
    for model in models:
        model.begin_capture()
    try:
        yield
    finally:
        for model in models:
            model.end_capture()


@contextmanager
def counted_steps(name: str, optimizer: Optimizer, trained: Collection[int]) -> Iterator[list[Optimizer]]:
    """Around a function: yields a list that gets an entry for each step of ``optimizer``.

    trained  ``id`` of the parameters of the model

    Raises ``RuntimeError`` at the end where another optimizer has stepped.
    """
    mine: list[Optimizer] = []
    others: list[str] = []
    thread = threading.get_ident()  # simulated ranks are threads

    def note(stepped: Optimizer, args: Any, kwargs: Any) -> None:
        if stepped is optimizer:
            mine.append(stepped)
        elif not {*map(id, stepped.param_groups)} <= {*map(id, optimizer.param_groups)}:  # those inside one share them
            params = (param for group in stepped.param_groups for param in group["params"])
            if threading.get_ident() == thread or any(id(param) in trained for param in params):
                others.append(type(stepped).__name__)

    handle = register_optimizer_step_post_hook(note)
    try:
        yield mine
    finally:
        handle.remove()
    if others:
        raise RuntimeError(
            f"{name}: {others[0]} has stepped beside the optimizer of the graphed step, and replays would not read its "
            f"learning rates: give its parameters to this optimizer as a group of param_groups, or, where they are "
            f"another model's, make a GraphedTrainingStep for each model"
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` for hooks of ``step``, which replays do not call, and for dampening."""
    if any(group.get("dampening") for group in optimizer.param_groups):
        raise ValueError(
            "GraphedTrainingStep: SGD with dampening takes its first step otherwise than the later ones, and state may "
            "be loaded from before the first: use dampening=0"
        )
    if vars(optimizer).get("_optimizer_step_pre_hooks") or vars(optimizer).get("_optimizer_step_post_hooks"):
        raise ValueError(
            "GraphedTrainingStep: hooks of optimizer.register_step_pre_hook and register_step_post_hook would not run "
            "at replays; call what they do before or after the graphed step"
        )


def check_memory_settings(device: torch.device, num_ranks: int) -> None:
    """Raise ``RuntimeError`` where NCCL would read, in replays, memory that the allocator may have mapped elsewhere."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if device.type == "cuda" and num_ranks > 1 and "expandable_segments:True" in settings:
        raise RuntimeError(
            "GraphedTrainingStep with several ranks: captured collectives hang or fail under the allocator's setting "
            "expandable_segments:True; unset it in PYTORCH_CUDA_ALLOC_CONF"
        )
