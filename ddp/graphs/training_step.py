"""``GraphedTrainingStep``: a whole iteration, from the first forward to the update, replayed as one CUDA graph.

    eager     forwards, backwards, reductions, update | gathers, under the next iteration's forward ...
    captured  [ forwards, backwards, reductions, update ] [ gathers ]
                 ^ each first read of a parameter waits here for the bucket's latest gather, by an external event

The gathers of updated parameters are no part of the graph. They are launched after each replay, as after an eager step,
in a graph of their own where they can be captured. So every reader between replays (evaluation, ``state_dict``, a rank
that logs a norm) waits for them as it always does, no rank alone has to start a collective, and gathers run under the
next replay's forward. A captured wait for an external event refers to what was recorded last before the graph was
launched, however far ahead of the device the host is.

A replay runs no Python. What Python leaves behind after an eager iteration, ``_after_replay`` does again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..optimizer.distributed_optimizer import DistributedOptimizer
from ..optimizer.param_groups import is_capturable, is_fused
from ..optimizer.param_sync import CapturedUpdates
from ..wrapper.data_parallel import DistributedDataParallel
from .capture import CapturedGraph, GraphPool
from .step_graphs import P, StepGraphs, T, Variant, check_optimizer, counted_steps

__all__ = ["GraphedTrainingStep"]


class _Variant(Variant):
    def __init__(self, args: Any, device: torch.device, pool: GraphPool) -> None:
        super().__init__(args, device, pool)
        self.grad_norm: Tensor | None = None
        self.written: list[int] = []
        """Parameters that the function changes after the update: indices of ``optimizer.slices``."""
        self.updates = CapturedUpdates()
        self.gathers: CapturedGraph | None = None
        """The gathers after the step, as a graph of their own: launching each from Python takes 0.2 ms. None: they are
        launched so, which those on copy engines must be."""


class GraphedTrainingStep(StepGraphs[P, T, _Variant]):
    """A function that runs one whole iteration, called eagerly at first, then captured and replayed as a CUDA graph::

        def train_step(tokens, targets):                 # one iteration, as a program without graphs writes it
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()                        # it ends like this: nothing of an iteration is left
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
    (``check_for_nan_in_grad``), ``check_replicas_every``, optimizers without fused kernels, step hooks, a recorded
    timeline, numbers of tokens that are no tensors, ``expandable_segments`` with several ranks, an iteration that began
    before the call, a second optimizer in the step, and parameters read behind the update where their gathers come
    later.

    Call ``reset`` before ``torch.distributed.destroy_process_group``: NCCL waits there for ever for collectives that a
    living graph has captured.

    On CPUs operations are recorded and run again in place of a CUDA graph: slower than eager, for tests.
    """

    variant_type = _Variant

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
        super().__init__(
            train_step,
            optimizer,
            model,
            [entry.owned.param for entry in model.bucket_params],
            optimizer.param_sync,
            model.grids["dense"].size,
            model.device,
            num_warmup_steps=num_warmup_steps,
            max_graphs=max_graphs,
        )
        self._model = model
        self._optimizer = optimizer
        self._trained = {id(entry.owned.param) for entry in model.bucket_params}

    def _check_startable(self, *, known: bool) -> None:
        model, optimizer = self._model, self._optimizer
        check_graphable(model, optimizer)
        self._check_observed(model.observer)
        if not model.is_clear:
            raise RuntimeError(
                f"{self._name}: an iteration has begun outside of the graphed step: call model.zero_grad() "
                f"before it, or abandon_iteration() after a backward that failed"
            )
        if known:
            model.check_in_use(self._name)
        else:
            model.check_before_forward()
        optimizer.prepare_replay()

    @contextmanager
    def one_iteration(self) -> Iterator[None]:
        model, sync = self._model, self._optimizer.param_sync
        before = model.iteration, sync.num_published
        with counted_steps(self._name, self._optimizer, self._trained):
            yield
        iterations, steps = model.iteration - before[0], sync.num_published - before[1]
        if iterations != 1 or steps != 1 or not model.is_clear:
            raise RuntimeError(
                f"{self._name} must run one whole iteration: it called optimizer.step() {steps} times, and "
                f"zero_grad() {iterations} times after a backward"
                + ("" if model.is_clear else ", and has left gradients: let zero_grad() be its last call")
            )

    @contextmanager
    def _captured(self, variant: _Variant) -> Iterator[None]:
        sync = self._optimizer.param_sync
        sync.start_again()
        with sync.captured() as variant.updates:
            yield

    def _begin_capture(self) -> None:
        self._optimizer.param_sync.wait_in_graph()

    def _capture_failed(self) -> None:
        self._optimizer.forget_step()
        self._model.forget_iteration()

    def _end_capture(self, variant: _Variant) -> None:
        variant.grad_norm = None if self._optimizer.max_grad_norm is None else self._optimizer.grad_norm
        variant.written = self._optimizer.written_since()
        if not variant.graph.ran:
            self._model.iteration -= 1  # the capture's Python has counted the step that the first replay runs
        sync = self._optimizer.param_sync
        if sync.stream is None or self._model.copy_engines:
            return
        variant.gathers = CapturedGraph(GraphPool(self._device, sync.stream))
        try:
            with variant.gathers.capture():
                sync.start_replayed(variant.updates)
        finally:
            for gather in sync.gathers:
                gather.leave_capture()

    def _launch(self, variant: _Variant) -> None:
        if self._pool.stream is None:
            self._optimizer.finish_param_sync()  # on CPUs threads wait for collectives, and no operation does
        super()._launch(variant)
        self._model.record_replay()

    def _after_replay(self, variant: _Variant) -> None:
        if variant.grad_norm is not None:
            self._optimizer.grad_norm = variant.grad_norm.clone()
        self._optimizer.record_written(variant.written)
        sync = self._optimizer.param_sync
        if variant.gathers is None:
            sync.start_replayed(variant.updates)
            sync.publish_replayed(None)
        else:
            sync.publish_replayed(partial(self._launch_gathers, variant.gathers))

    def _launch_gathers(self, gathers: CapturedGraph) -> None:
        with torch.cuda.stream(self._optimizer.param_sync.stream):
            gathers.replay()

    def _free(self, variant: _Variant) -> None:
        super()._free(variant)
        if variant.gathers is not None:
            variant.gathers.reset()


def check_graphable(model: DistributedDataParallel, optimizer: DistributedOptimizer) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what cannot be captured, whatever the function does."""
    if not isinstance(model, DistributedDataParallel) or not isinstance(optimizer, DistributedOptimizer):
        raise TypeError(
            f"GraphedTrainingStep takes a maingrad.ddp.DistributedDataParallel and its DistributedOptimizer, not "
            f"{type(model).__name__} and {type(optimizer).__name__}; for fully_shard: maingrad.fsdp.GraphedTrainingStep"
        )
    if optimizer.model is not model:
        raise ValueError("GraphedTrainingStep: the optimizer was built over another model")
    if model.ddp_config.check_for_nan_in_grad:
        raise ValueError(
            "GraphedTrainingStep: check_for_nan_in_grad reads the result on the host in every step, which a graph "
            "cannot; switch it off, and look at optimizer.grad_norm after the step"
        )
    if model.ddp_config.check_replicas_every:
        raise ValueError(
            "GraphedTrainingStep: check_replicas_every compares parameters on the host, which a graph cannot; switch "
            "it off, or train without the graph while you look for replicas that part"
        )
    classes = zip(optimizer.classes_of_groups, optimizer.param_groups, strict=True)
    on_host = next((cls for cls, group in classes if not is_capturable(cls, group)), None)
    if on_host is not None:
        raise ValueError(
            f"GraphedTrainingStep: {on_host.__name__} reads learning rates and counters on the host; "
            f"AdamW, Adam and SGD with fused=True (the default), and maingrad.ddp.Muon, can be captured"
        )
    on_host = next((cls for cls in optimizer.classes_of_groups if not is_fused(cls)), None)
    if optimizer.skip_nonfinite and on_host is not None:
        raise ValueError(
            f"GraphedTrainingStep: skip_nonfinite skips {on_host.__name__} on the host, which no graph replays: leave "
            f"it out"
        )
    check_optimizer(optimizer)
