"""``GraphedTrainingStep``: a whole iteration, from the first forward to the update, replayed as one CUDA graph.

    eager     forwards, backwards, reductions, update | gathers, under the next iteration's forward ...
    captured  [ forwards, backwards, reductions, update ] [ gathers ]
                 ^ each first read of a parameter waits here for the bucket's latest gather, by an external event

The gathers of updated parameters are no part of the graph. They are launched after each replay, as after an eager step,
in a graph of their own where they can be captured. So every reader between replays (evaluation, ``state_dict``, a rank
that logs a norm) waits for them as it always does, no rank alone has to start a collective, and gathers run under the
next replay's forward. A captured wait for an external event refers to what was recorded last before the graph was
launched, however far ahead of the device the host is.

A replay runs no Python. What Python leaves behind after an eager iteration, ``_replay`` does again.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..optimizer.distributed_optimizer import DistributedOptimizer
from ..optimizer.param_groups import is_fused
from ..optimizer.param_sync import CapturedUpdates
from ..wrapper.data_parallel import DistributedDataParallel
from .capture import CapturedGraph, GraphPool
from .inputs import StaticInputs, detached_copies, signature
from .step_options import StepOptions
from .surroundings import surroundings

__all__ = ["GraphedTrainingStep"]

P = ParamSpec("P")
T = TypeVar("T")


class _Variant:
    """The graph of one kind of call."""

    def __init__(self, args: Any, device: torch.device, pool: GraphPool) -> None:
        self.inputs = StaticInputs(args, device)
        self.graph = CapturedGraph(pool)
        self.num_eager = 0
        """Calls of this kind so far that ran eagerly."""
        self.outputs: Any = None
        """What the captured function returned: memory that each replay overwrites."""
        self.grad_norm: Tensor | None = None
        self.written: list[int] = []
        """Parameters that the function changes after the update: indices of ``optimizer.slices``."""
        self.updates = CapturedUpdates()
        self.gathers: CapturedGraph | None = None
        """The gathers after the step, as a graph of their own: launching each from Python takes 0.2 ms. None: they are
        launched so, which those on copy engines must be."""


class GraphedTrainingStep(Generic[P, T]):
    """A function that runs one whole iteration, called eagerly at first, then captured and replayed as a CUDA graph::

        def train_step(tokens, targets):                 # one iteration, as a program without graphs writes it
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            model.finish_grad_sync()
            optimizer.step()
            model.zero_grad_buffer()                     # it ends like this: nothing of an iteration is left
            return loss

        step = GraphedTrainingStep(train_step, model, optimizer)
        for tokens, targets in batches:
            losses.append(step(tokens, targets))         # new tensors in every call
            scheduler.step()

    train_step        takes tensors, numbers and strings, alone or in lists, tuples and dicts; returns tensors or None,
                      alone or so. Microbatches, ``no_sync``, delayed weight gradients, ``ScheduleExecutor``, clipping,
                      loss scaling (``maingrad.ddp.GradScaler``) and compiled blocks may be in it
    model, optimizer  what it trains. Gradients are all-reduced, sharded (ZeRO-1) or hybrid
    num_warmup_steps  eager calls before the capture: optimizer states, compiled code and communicators are made in them
    max_graphs        how many kinds of calls are captured: see below

    Every call is one step of training, whether eager, captured or replayed. A call that differs in the shapes, dtypes
    or strides of tensors, in any other argument, in options of the optimizer other than the learning rate, in ``train``
    or ``eval``, in hooks or modules, or in autocast around it, gets a graph of its own. Learning rates, moments, loss
    scales and data are read from device memory at each replay; learning rates are rounded to fp32 there.

    **What the host computes in ``train_step`` is computed once.** A Python number that changes from call to call must
    be an argument (a tensor, or every value is captured anew); counters, lists and hooks of the program are not
    replayed; nothing may read a value of the device (``.item()``, printing): return tensors.

    Between calls the model and the optimizer are in the state that an eager step leaves. Refused by name: NaN checks
    (``check_for_nan_in_grad``), optimizers without fused kernels, step hooks, a recorded timeline, numbers of tokens
    that are no tensors, ``expandable_segments`` with several ranks, an iteration that began before the call,
    a second optimizer in the step, and parameters read behind the update where their gathers come later.

    On CPUs operations are recorded and run again in place of a CUDA graph: slower than eager, for tests.
    """

    def __init__(
        self,
        train_step: Callable[P, T],
        model: DistributedDataParallel,
        optimizer: DistributedOptimizer,
        *,
        num_warmup_steps: int = 2,
        max_graphs: int = 8,
    ) -> None:
        check_graphable(model, optimizer)
        if num_warmup_steps < 1:
            raise ValueError(f"num_warmup_steps must be at least 1 (states are made in it), got {num_warmup_steps}")
        self._train_step = train_step
        self._model = model
        self._optimizer = optimizer
        self._num_warmup_steps = num_warmup_steps
        self._max_graphs = max_graphs
        self._name = getattr(train_step, "__qualname__", type(train_step).__name__)
        self._options = StepOptions(optimizer, model.device)
        self._num_loads = optimizer.num_loads
        self._pool = GraphPool(model.device)
        self._variants: dict[tuple[Any, ...], _Variant] = {}

    def reset(self) -> None:
        """Free all graphs and their memory, but for cuBLAS's workspaces. Later calls warm up and capture anew."""
        for variant in self._variants.values():
            variant.graph.reset()
            if variant.gathers is not None:
                variant.gathers.reset()
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
        self._follow_loads()
        key = (signature(call), self._options.key(), surroundings(self._model))
        variant = self._variants.get(key)
        self._check_startable(known=variant is not None and variant.graph.is_captured)
        if variant is None:
            variant = self._new_variant(key, call)
        with self._pool.on_stream():
            self._optimizer.param_sync.finish_others()
            variant.inputs.load(call)
            self._options.load()
            if variant.graph.is_captured:
                self._replay(variant)
            elif variant.num_eager < self._num_warmup_steps:
                variant.outputs = self._run(variant)
                variant.num_eager += 1
                self._options.note_state()
            else:
                self._capture(variant)
            outputs: T = detached_copies(variant.outputs, self._name)
            variant.inputs.hand_back(call)
        if not variant.graph.is_captured:
            variant.outputs = None
        return outputs

    def _follow_loads(self) -> None:
        """Capture anew where the state that was loaded since may have no momentum, and dampening makes a first step
        another one. Each rank decides alike: one without a shard cannot see what is missing."""
        if self._num_loads != self._optimizer.num_loads:
            self._num_loads = self._optimizer.num_loads
            if any(group.get("dampening") for group in self._optimizer.param_groups):
                self.reset()

    def _new_variant(self, key: tuple[Any, ...], call: Any) -> _Variant:
        if len(self._variants) == self._max_graphs:
            raise RuntimeError(
                f"{self._name}: {self._max_graphs} kinds of calls have a graph each, and this one differs from the "
                f"last of them in {self._difference(key)}; or raise max_graphs"
            )
        variant = self._variants[key] = _Variant(call, self._model.device, self._pool)
        return variant

    def _difference(self, key: tuple[Any, ...]) -> str:
        """What makes a call with this key another kind, and what to do."""
        arguments, options, _ = list(self._variants)[-1]
        if key[0] != arguments:
            return "its arguments: give numbers that change as tensors, pad batches to few shapes"
        if key[1] != options:
            return (
                f"options of the optimizer ({', '.join(self._options.changed(options))}), which are numbers in the "
                f"kernels: keep all but learning rates constant (cycle_momentum=False of torch's schedulers)"
            )
        return "the model or what is around the call: train() or eval(), hooks, buffers, frozen parameters, autocast"

    def _check_startable(self, *, known: bool) -> None:
        """Raise where an eager iteration would raise, and where this one would not start as the captured one did.

        known  a call in the same surroundings was captured: its parameters were checked
        """
        model, optimizer = self._model, self._optimizer
        check_graphable(model, optimizer)
        if not torch.is_grad_enabled():
            raise RuntimeError(f"{self._name}: gradients are disabled around the graphed step")
        if model.observer.recording:
            raise RuntimeError(
                f"{self._name}: record_timeline() around a graphed step would record its capture; record eager steps"
            )
        if not model.is_clear:
            raise RuntimeError(
                f"{self._name}: an iteration has begun outside of the graphed step: call model.zero_grad_buffer() "
                f"before it, or abandon_iteration() after a backward that failed"
            )
        if known:
            model.check_in_use(self._name)
        else:
            model.check_before_forward()
        optimizer.prepare_replay()

    def _run(self, variant: _Variant) -> Any:
        """Call the function, and check that it was one iteration."""
        model, sync = self._model, self._optimizer.param_sync
        before = model.iteration, sync.num_published
        args, kwargs = variant.inputs.args
        outputs = self._train_step(*args, **kwargs)
        variant.inputs.note_effects()
        iterations, steps = model.iteration - before[0], sync.num_published - before[1]
        if iterations != 1 or steps != 1 or not model.is_clear:
            raise RuntimeError(
                f"{self._name} must run one whole iteration: it called optimizer.step() {steps} times, and "
                f"model.zero_grad_buffer() {iterations} times after a backward"
                + ("" if model.is_clear else ", and has left gradients: let zero_grad_buffer() be its last call")
            )
        return outputs

    def _capture(self, variant: _Variant) -> None:
        sync = self._optimizer.param_sync
        check_memory_settings(self._model)
        torch.clear_autocast_cache()  # casts made before would be read at replays, after their parameters have changed
        sync.start_again()
        try:
            with sync.captured() as variant.updates, self._options.in_device_memory(), variant.graph.capture():
                sync.wait_in_graph()
                variant.outputs = tree_map_only(Tensor, Tensor.detach, self._run(variant))
        except BaseException:
            variant.graph.reset()
            self._optimizer.forget_step()
            self._model.forget_iteration()
            raise
        finally:
            torch.clear_autocast_cache()
        variant.grad_norm = None if self._optimizer.max_grad_norm is None else self._optimizer.grad_norm
        variant.written = self._optimizer.written_since()
        self._capture_gathers(variant)
        if variant.graph.ran:
            self._after_replay(variant)
        else:
            self._model.iteration -= 1  # the capture's Python has counted the step that the first replay runs
            self._replay(variant)

    def _capture_gathers(self, variant: _Variant) -> None:
        sync = self._optimizer.param_sync
        if sync.stream is None or self._model.ddp_config.copy_engine_param_gather:
            return
        variant.gathers = CapturedGraph(GraphPool(self._model.device, sync.stream))
        try:
            with variant.gathers.capture():
                sync.start_replayed(variant.updates)
        finally:
            for gather in sync.gathers:
                gather.leave_capture()

    def _replay(self, variant: _Variant) -> None:
        if self._pool.stream is None:
            self._optimizer.finish_param_sync()  # on CPUs threads wait for collectives, and no operation does
        variant.graph.replay()
        self._model.note_replay()
        self._after_replay(variant)

    def _after_replay(self, variant: _Variant) -> None:
        """What Python does after the device's work of a step."""
        if variant.grad_norm is not None:
            self._optimizer.grad_norm = variant.grad_norm.clone()
        self._optimizer.note_written(variant.written)
        sync = self._optimizer.param_sync
        if variant.gathers is None:
            sync.start_replayed(variant.updates)
            sync.publish_replayed(None)
        else:
            sync.publish_replayed(partial(self._launch_gathers, variant.gathers))

    def _launch_gathers(self, gathers: CapturedGraph) -> None:
        with torch.cuda.stream(self._optimizer.param_sync.stream):
            gathers.replay()


def check_graphable(model: DistributedDataParallel, optimizer: DistributedOptimizer) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what cannot be captured, whatever the function does."""
    if not isinstance(model, DistributedDataParallel) or not isinstance(optimizer, DistributedOptimizer):
        raise TypeError(
            f"GraphedTrainingStep takes a maingrad.ddp.DistributedDataParallel and its DistributedOptimizer, not "
            f"{type(model).__name__} and {type(optimizer).__name__}"
        )
    if optimizer.model is not model:
        raise ValueError("GraphedTrainingStep: the optimizer was built over another model")
    if model.ddp_config.check_for_nan_in_grad:
        raise ValueError(
            "GraphedTrainingStep: check_for_nan_in_grad reads the result on the host in every step, which a graph "
            "cannot; switch it off, and look at optimizer.grad_norm after the step"
        )
    if not (is_fused(optimizer.optimizer_class) and all(group["fused"] for group in optimizer.param_groups)):
        raise ValueError(
            f"GraphedTrainingStep: {optimizer.optimizer_class.__name__} reads learning rates and counters on the host; "
            f"AdamW, Adam and SGD with fused=True (the default) can be captured"
        )
    if vars(optimizer).get("_optimizer_step_pre_hooks") or vars(optimizer).get("_optimizer_step_post_hooks"):
        raise ValueError(
            "GraphedTrainingStep: hooks of optimizer.register_step_pre_hook and register_step_post_hook would not run "
            "at replays; call what they do before or after the graphed step"
        )


def check_memory_settings(model: DistributedDataParallel) -> None:
    """Raise ``RuntimeError`` where NCCL would read, in replays, memory that the allocator may have mapped elsewhere."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if model.device.type == "cuda" and model.grids["dense"].size > 1 and "expandable_segments:True" in settings:
        raise RuntimeError(
            "GraphedTrainingStep with several ranks: captured collectives hang or fail under the allocator's setting "
            "expandable_segments:True; unset it in PYTORCH_CUDA_ALLOC_CONF"
        )
