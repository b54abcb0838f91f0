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
from .inputs import StaticInputs, check_outputs, detached_copies, signature
from .model_masks import ModelMasks
from .step_options import StepOptions
from .surroundings import surroundings

__all__ = ["Kind", "StepGraphs", "Variant", "check_memory_settings", "check_stock_hooks", "counted_steps"]

P = ParamSpec("P")
T = TypeVar("T")
Kind: TypeAlias = tuple[Hashable, tuple[Hashable, ...], tuple[Hashable, ...], Hashable]
"""Signature of the arguments, options of the optimizer, what is around the call, what else a caller has asked for."""


class Variant:
    """The graph of one kind of call."""

    def __init__(self, args: Any, device: torch.device, pool: GraphPool) -> None:
        self.inputs = StaticInputs(args, device)
        self.graph = CapturedGraph(pool)
        self.num_eager = 0
        """Calls of this kind so far that ran eagerly."""
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
        self.after_capture: Callable[[], None] = lambda: None
        """Called when a capture has gone well. If this raises, the capture has failed."""

    def reset(self) -> None:
        """Free all graphs and their memory, but for cuBLAS's workspaces. Later calls warm up and capture anew."""
        for variant in self._variants.values():
            self._free(variant)
        self._variants.clear()
        self._options.forget_state()
        self._pool.forget()

    @property
    def num_graphs(self) -> int:
        """Number of kinds of calls that are captured."""
        return sum(variant.graph.is_captured for variant in self._variants.values())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one iteration."""
        call = (args, kwargs)
        kind = self.kind_of(call)
        self.check_startable(kind)
        return self.run(kind, call, self._num_warmup_steps)

    def run(self, kind: Kind, call: Any, num_warmup_steps: int) -> T:
        """Run one iteration: eagerly as long as fewer calls of this kind were, then captured, then replayed."""
        variant = self._variants.get(kind) or self._add_variant(kind, call)
        with self._pool.on_stream():
            for model in gathered_models():  # a replay may read others (a teacher), and waits for none
                if model is not self._gathers:
                    model.finish()
            self._prepare()
            variant.inputs.load(call)
            self._options.load()
            if variant.graph.is_captured:
                self._replay(variant)
            elif variant.num_eager < num_warmup_steps:
                variant.outputs = self._run(variant)
                variant.num_eager += 1
                self._options.record_state()
            else:
                self._capture(variant)
            outputs: T = detached_copies(variant.outputs)
            variant.inputs.hand_back(call)
        if not variant.graph.is_captured:
            variant.outputs = None
        return outputs

    # ---- Which graph serves a call. ----

    def kind_of(self, call: Any, host: Hashable = None) -> Kind:
        """What calls must have in common that one graph serves.

        host  what else decides it

        Raises ``TypeError`` and ``ValueError`` for arguments that no graph can have.
        """
        self._begin_call()
        return signature(call), self._options.key(), self._around(), host

    def check_startable(self, kind: Kind) -> None:
        """Raise ``RuntimeError``, ``TypeError`` or ``ValueError`` where this call cannot be one of a graph."""
        self._check_startable(known=self.is_captured(kind))

    def is_captured(self, kind: Kind) -> bool:
        """Whether calls of this kind are replays."""
        variant = self._variants.get(kind)
        return variant is not None and variant.graph.is_captured

    def has_room(self, kind: Kind) -> bool:
        """Whether this kind has a graph, or may have one."""
        return kind in self._variants or len(self._variants) < self._max_graphs

    def forget(self, host: Hashable) -> None:
        """Free the graphs of kinds that were asked for with this ``host``."""
        for kind in [kind for kind in self._variants if kind[3] == host]:
            self._free(self._variants.pop(kind))

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
    def one_iteration(self) -> Iterator[None]:
        """Around the function: raise ``RuntimeError`` at the end unless it was one whole iteration."""
        with self._one_iteration():
            yield

    def _around(self) -> tuple[Hashable, ...]:
        return (*surroundings(self._module, self._params, self._device.type), *self._hooks())

    def _add_variant(self, key: Kind, call: Any) -> V:
        if len(self._variants) == self._max_graphs:
            raise RuntimeError(
                f"{self._name}: {self._max_graphs} kinds of calls have a graph each, and this one differs from the "
                f"last of them in {self._difference(key)}; or raise max_graphs"
            )
        variant = self._variants[key] = self.variant_type(call, self._device, self._pool)
        return variant

    def _difference(self, key: Kind) -> str:
        """What makes a call with this key another kind, and what to do."""
        arguments, options, *_ = list(self._variants)[-1]
        if key[0] != arguments:
            return "its arguments: give numbers that change as tensors, pad batches to few shapes"
        if key[1] != options:
            return (
                f"options of the optimizer ({', '.join(self._options.changed(options))}), which are numbers in the "
                f"kernels: keep all but learning rates constant (cycle_momentum=False of torch's schedulers)"
            )
        return "the model or what is around the call: train() or eval(), hooks, buffers, frozen parameters, autocast"

    # ---- Run, capture, replay. ----

    def _run(self, variant: V) -> Any:
        """Call the function, and check that it was one iteration."""
        args, kwargs = variant.inputs.args
        with self._one_iteration(), self._masks.answered():
            outputs = self._train_step(*args, **kwargs)
            variant.inputs.record_effects()
        check_outputs(outputs, self._name)
        return outputs

    def _capture(self, variant: V) -> None:
        check_memory_settings(self._device, self._num_ranks)
        try:
            with (
                self._captured(variant),
                _captured_gathers(),
                self._options.in_device_memory(),
                variant.graph.capture(),
            ):
                self._begin_capture()
                with self._surroundings_kept(variant):
                    variant.outputs = tree_map_only(Tensor, Tensor.detach, self._run(variant))
            self.after_capture()
        except BaseException:
            variant.graph.reset()
            self._capture_failed()
            raise
        self._end_capture(variant)
        if variant.graph.ran:
            self._finish_replay(variant)
        else:
            self._replay(variant)

    def _replay(self, variant: V) -> None:
        self._launch(variant)
        self._finish_replay(variant)

    def _finish_replay(self, variant: V) -> None:
        for model in gathered_models():  # the step may have written to others (a sharded average of weights)
            if model is not self._gathers:
                model.record_replay()
        for module, mode in variant.modes:
            module.training = mode
        self._after_replay(variant)

    @contextmanager
    def _surroundings_kept(self, variant: V) -> Iterator[None]:
        """Around the function's Python: note modes that it leaves changed, for replays, and raise for what they cannot
        change."""
        modes = {module: module.training for module in self._module.modules()}
        before = self._around()
        yield
        variant.modes = [
            (module, module.training)
            for module in self._module.modules()
            if modes.get(module, module.training) != module.training
        ]
        for module, mode in variant.modes:
            module.training = not mode
        after = self._around()
        for module, mode in variant.modes:
            module.training = mode
        if after != before:
            raise RuntimeError(
                f"{self._name} has replaced a buffer, or has changed hooks, modules or what is frozen, which replays "
                f"would not do: write buffers in place (copy_, add_), and change the rest before the graphed step"
            )

    def _free(self, variant: V) -> None:
        variant.graph.reset()

    # ---- What a subclass says of its wrapper. ----

    def _begin_call(self) -> None:
        """Before a graph is looked for."""

    def _hooks(self) -> Sequence[Hashable]:
        """Hooks of the wrapper's own that are called in an iteration."""
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
    def _one_iteration(self) -> AbstractContextManager[None]:
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


def check_stock_hooks(optimizer: Optimizer) -> None:
    """Raise ``ValueError`` for hooks of ``step``, which replays do not call."""
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
