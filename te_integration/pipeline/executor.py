"""Runs the order of a pipeline schedule with real modules, eagerly, one entry at a time.

    forward of chunk c     output = chunk(detached output of chunk c - 1); the last chunk ends with the loss
    dgrad of chunk c       backward of that output with the gradient that chunk c + 1 sent
    wgrad of chunk c       backward_dw() of the chunk's delaying modules, last layer first, for that microbatch only

A delaying module has ``need_backward_dw()`` and ``backward_dw()`` (maingrad's and Transformer Engine's modules do) and
contains no other such module: a container that only passes the call on would run its children twice.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...ddp.torch_internals import tree_leaves
from ...ddp.wrapper.parts import parts_of
from .order import Entry, Kind, Schedule

__all__ = ["ChunkLink", "ConnectedChunks", "ScheduleExecutor", "SlotRecord"]

Tensors: TypeAlias = Tensor | tuple[Tensor, ...]
Chunk: TypeAlias = nn.Module | Sequence[nn.Module]
LossFunction: TypeAlias = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRecord:
    """The record of one step of a schedule. Module names are those of ``named_modules`` of the chunk."""

    entry: Entry
    """The step: an entry of the order, or the implied wgrad after a dgrad."""
    modules: tuple[str, ...]
    """Modules with parameters whose GEMMs ran here, in order: forward, input gradient or delayed weight gradient."""
    delayed: tuple[str, ...] = ()
    """A dgrad lists the modules that delayed their weight gradients. All others computed theirs in this step."""


class ChunkLink(Protocol):
    """Delivers the tensors of a chunk. ``microbatch`` counts from 0, ``chunk`` from 1."""

    def receive_input(self, chunk: int, microbatch: int) -> Tensors:
        """The inputs of the chunk. ``send_input_grad`` returns a gradient for each tensor that requires one."""

    def send_output(self, chunk: int, microbatch: int, output: tuple[Tensor, ...]) -> None:
        """Take the detached outputs of the chunk. ``requires_grad`` is set on tensors that have a graph."""

    def receive_output_grad(self, chunk: int, microbatch: int) -> tuple[Tensor | None, ...]:
        """The gradient of each output; None for an unused output and for a loss."""

    def send_input_grad(self, chunk: int, microbatch: int, grad: tuple[Tensor | None, ...]) -> None:
        """Take the gradient of each input, or None."""


class ConnectedChunks:
    """A whole pipeline in one process: each chunk feeds the next chunk, and the last chunk returns the loss."""

    def __init__(self, schedule: Schedule, inputs: Sequence[Tensors]) -> None:
        schedule.check_connected()
        if len(inputs) != schedule.num_microbatches:
            raise ValueError(f"{len(inputs)} inputs for a schedule of {schedule.num_microbatches} microbatches")
        self._inputs = inputs
        self._last = schedule.num_chunks
        self._forward: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._backward: dict[tuple[int, int], tuple[Tensor | None, ...]] = {}
        self._losses: dict[int, Tensor] = {}

    @property
    def losses(self) -> list[Tensor]:
        """The detached losses, by microbatch."""
        return [loss.detach() for loss in self._losses.values()]  # the last chunk's forwards are in this order

    def receive_input(self, chunk: int, microbatch: int) -> Tensors:
        """The caller's input for chunk 1, else the output of the previous chunk."""
        return self._inputs[microbatch] if chunk == 1 else self._forward.pop((chunk, microbatch))

    def send_output(self, chunk: int, microbatch: int, output: tuple[Tensor, ...]) -> None:
        """Keep the outputs for the next chunk."""
        if chunk == self._last:
            (self._losses[microbatch],) = output
        else:
            self._forward[chunk + 1, microbatch] = output

    def receive_output_grad(self, chunk: int, microbatch: int) -> tuple[Tensor | None, ...]:
        """The gradients that the next chunk sent; None for the loss, whose backward starts with 1."""
        return (None,) if chunk == self._last else self._backward.pop((chunk, microbatch))

    def send_input_grad(self, chunk: int, microbatch: int, grad: tuple[Tensor | None, ...]) -> None:
        """Keep the gradients for the previous chunk. Chunk 1 runs backward through the graph of the caller's input."""
        if chunk > 1:
            self._backward[chunk - 1, microbatch] = grad
            return
        pairs = zip(_as_tuple(self._inputs[microbatch]), grad, strict=True)
        reached = [(tensor, gradient) for tensor, gradient in pairs if gradient is not None]
        if reached:
            torch.autograd.backward(*map(list, zip(*reached, strict=True)))  # type: ignore[arg-type]


class ScheduleExecutor:
    """Runs a schedule over chunks of a model; call ``run`` once for each iteration.

    chunks  one per chunk of the schedule, in order: a module, or a list of layers that are called in sequence.
            ``ValueError`` if the number of chunks is wrong, or the number of layers where the schedule has one

    Modules write to ``.grad`` or ``main_grad``, and add a weight's gradients in the order of microbatches. Valid orders
    therefore give equal gradients bit for bit, unless chunks share weights.

    maingrad wrappers, in or around chunks, learn which dgrad and wgrad of a chunk are the last. One wrapper around all
    chunks launches each bucket when it is complete. With several wrappers or sharded chunks, a chunk's buckets launch
    together after its last entry. ``no_sync`` around ``run`` leaves reductions to a later ``run``.
    ``finish_grad_sync()`` ends the iteration.
    """

    def __init__(self, schedule: Schedule, chunks: Sequence[Chunk]) -> None:
        if len(chunks) != schedule.num_chunks:
            raise ValueError(f"{len(chunks)} chunks for a schedule of {schedule.num_chunks}")
        self.schedule = schedule
        counts = schedule.num_layers_per_chunk or (None,) * len(chunks)
        self._chunks = [_Chunk(number, *pair) for number, pair in enumerate(zip(chunks, counts, strict=True), start=1)]
        self.records: list[SlotRecord] = []
        """The steps of the latest run."""

    def run(self, inputs: Sequence[Tensors], loss_fn: LossFunction) -> list[Tensor]:
        """Run all microbatches; returns their losses, detached.

        inputs   of chunk 1, one per microbatch: a tensor, or a tuple of tensors
        loss_fn  ``loss_fn(*output of the last chunk, microbatch=k)``: a scalar tensor, scaled by the caller

        The chunks form one pipeline here. Raises ``ScheduleError``, with the index, if an entry comes before the entry
        of the neighbouring chunk that it needs. ``run_linked`` has no such requirement.
        """
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of the last chunk's output, not {loss_fn!r}")
        link = ConnectedChunks(self.schedule, inputs)
        self.run_linked(link, loss_fn)
        return link.losses

    def run_linked(self, link: ChunkLink, loss_fn: LossFunction | None = None) -> None:
        """Run the chunks of one rank; ``link`` delivers tensors to and from the chunks of other ranks.

        loss_fn  as in ``run``, if the last chunk here is the last one of the pipeline; else None

        Raises ``RuntimeError`` that names the entry for a wgrad of a chunk without any delaying module, and for a
        backward entry while gradients are disabled.
        """
        for chunk in self._chunks:
            chunk.begin_run()
        self._check_runnable()
        self.records = []
        run = _Run(self.schedule, self._chunks, link, loss_fn)
        try:
            for step in self.schedule.steps:
                self.records.append(run.step(step))
        except BaseException:
            run.fail()
            raise
        finally:
            run.close()
        if pending := self._pending():
            raise RuntimeError(
                f"after the last entry, weight gradients are still pending in {pending}: backward_dw() must run all of "
                f"the oldest microbatch, and a module that delays must not hold others that do"
            )

    def _pending(self) -> str:
        return ", ".join(f"{name} of chunk {chunk.number}" for chunk in self._chunks for name in chunk.pending())

    def _check_runnable(self) -> None:
        """Raise every error that is known before anything runs."""
        if not torch.is_grad_enabled():
            first = next(entry for entry in self.schedule.entries if entry.kind is not Kind.FORWARD)
            raise RuntimeError(f"{first} in inference: gradients are disabled, so that there is no backward to run")
        for entry in self.schedule.entries:
            if entry.kind is Kind.WGRAD and not self._chunks[entry.chunk - 1].delaying:
                raise _nothing_delays(entry, self._chunks[entry.chunk - 1])
        if pending := self._pending():
            raise RuntimeError(
                f"{pending} has pending weight gradients from before this run: call its backward_dw() first, or it "
                f"would run them in place of this run's"
            )


class _Chunk:
    """One chunk: calls its layers, and names its modules.

    num_layers  as the schedule has it; None: unknown
    """

    def __init__(self, number: int, chunk: Chunk, num_layers: int | None) -> None:
        self.number = number
        self.type_name = type(chunk).__name__
        self._is_list = isinstance(chunk, Sequence | nn.ModuleList)
        self.layers: list[nn.Module] = list(chunk) if self._is_list else [chunk]  # type: ignore[arg-type, list-item]
        for layer in self.layers:
            if not isinstance(layer, nn.Module):
                raise TypeError(f"chunk {number} must be a module or a list of modules, not {type(layer).__name__}")
        found = len(chunk) if isinstance(chunk, nn.Sequential) else len(self.layers)
        if num_layers not in (None, found) and (self._is_list or isinstance(chunk, nn.Sequential)):
            raise ValueError(f"chunk {number} has {found} layers, the schedule says {num_layers}")

    def begin_run(self) -> None:
        """Find the modules, and tell layers that count microbatches (``GraphedChunk``).

        Modules may have been replaced or converted since the last run.
        """
        self.names: dict[nn.Module, str] = {}
        for index, layer in enumerate(self.layers):
            for name, module in layer.named_modules(prefix=str(index) if self._is_list else ""):
                self.names.setdefault(module, name or type(module).__name__)
        self._able = {module for module in self.names if has_backward_dw(module)}
        self.delaying: list[Any] = [
            module
            for module in self.names
            if module in self._able and self._able.isdisjoint(list(module.modules())[1:])
        ]
        """Delaying modules, in layer order."""
        for layer in self.layers:
            getattr(layer, "begin_run", lambda: None)()

    def pending(self) -> list[str]:
        """Names of modules with pending weight gradients, containers too."""
        return [name for module, name in self.names.items() if module in self._able and _needs_backward_dw(module)]

    def __call__(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for layer in self.layers:
            inputs = _as_tuple(layer(*inputs))
        if not all(isinstance(tensor, Tensor) for tensor in inputs):
            kinds = ", ".join(type(tensor).__name__ for tensor in inputs)
            raise TypeError(f"chunk {self.number} must return a tensor or a tuple of tensors, not {kinds}")
        return inputs


class _Run:
    """The state of one run. The inputs and outputs of a forward are kept until its dgrad."""

    def __init__(self, schedule: Schedule, chunks: list[_Chunk], link: ChunkLink, loss_fn: LossFunction | None) -> None:
        self._chunks, self._link, self._loss_fn = chunks, link, loss_fn
        self._loss_chunk = 0 if loss_fn is None else schedule.num_chunks
        self._live: dict[tuple[int, int], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        self._reached: dict[nn.Module, None] = {}  # modules that ran in this step, in order
        self._in_forward = False
        # For each delaying module: (chunk, microbatch) of its pending weight gradients, oldest first.
        self._pending = {module: deque[tuple[int, int]]() for chunk in chunks for module in chunk.delaying}
        self._parts = {chunk: parts_of(chunk.layers) for chunk in chunks}  # wrappers that reduce its gradients
        self._reduced = [(chunk, parts) for chunk, found in self._parts.items() for parts in found]
        self._hosts = [parts.host for _, parts in self._reduced]
        self._launches_early = len({parts for _, parts in self._reduced}) == 1  # several: in one order on replicas
        self._last_dgrads = {step.chunk: step for step in schedule.steps if step.kind is Kind.DGRAD}
        self._last_steps = {step.chunk: step for step in schedule.steps}
        for chunk, parts in self._reduced:
            parts.begin(chunk, [param for layer in chunk.layers for param in layer.parameters()])
        self._handles: list[RemovableHandle] = []
        for module in dict.fromkeys(module for chunk in chunks for module in chunk.names):
            if module in self._pending or any(True for _ in module.parameters(recurse=False)):
                self._handles.append(module.register_forward_hook(self._watch))

    def fail(self) -> None:
        """Tell the wrappers that the remaining gradients of this run will not come."""
        for chunk, parts in self._reduced:
            parts.leave(chunk)

    def close(self) -> None:
        """Remove the hooks from the modules, and free graphs."""
        for handle in self._handles:
            handle.remove()
        self._live.clear()  # after an error: gc cannot see the cycle graph -> hook -> run

    def step(self, entry: Entry) -> SlotRecord:
        """Run one step."""
        self._reached = {}
        chunk = self._chunks[entry.chunk - 1]
        delayed: list[nn.Module] = []
        self._in_forward = entry.kind is Kind.FORWARD
        if entry.kind is Kind.FORWARD:
            self._run_forward(chunk, entry)
        elif entry.kind is Kind.DGRAD:
            delayed = self._run_dgrad(chunk, entry)
        else:
            self._run_wgrad(chunk, entry)
        if entry is self._last_steps[entry.chunk]:
            for parts in self._parts[chunk]:
                parts.end(chunk)
        return SlotRecord(
            entry=entry,
            modules=tuple(chunk.names[module] for module in self._reached),
            delayed=tuple(chunk.names[module] for module in delayed),
        )

    def _run_forward(self, chunk: _Chunk, entry: Entry) -> None:
        received = _as_tuple(self._link.receive_input(entry.chunk, entry.microbatch))
        inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in received)
        outputs = chunk(inputs)
        if entry.chunk == self._loss_chunk:
            assert self._loss_fn is not None, "this chunk was chosen for it"
            loss = self._loss_fn(*outputs, microbatch=entry.microbatch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ValueError(f"{entry}: loss_fn must return a scalar tensor, got {loss!r:.60}")
            outputs = (loss,)
        self._live[entry.chunk, entry.microbatch] = inputs, outputs
        detached = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)
        self._link.send_output(entry.chunk, entry.microbatch, detached)

    def _run_dgrad(self, chunk: _Chunk, entry: Entry) -> list[nn.Module]:
        """Returns the modules that delayed their weight gradients."""
        key = entry.chunk, entry.microbatch
        inputs, outputs = self._live.pop(key)
        grads = self._link.receive_output_grad(*key)
        if len(grads) != len(outputs):
            raise ValueError(f"{entry}: got {len(grads)} gradients for {len(outputs)} outputs")
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if output.requires_grad and (entry.chunk == self._loss_chunk or grad is not None)
        ]
        if pairs:
            final = self._launches_early and entry is self._last_dgrads[entry.chunk]
            with ExitStack() as stack:
                for parts in self._parts[chunk]:
                    stack.enter_context(parts.backward(chunk, final=final))
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        self._link.send_input_grad(*key, tuple(tensor.grad for tensor in inputs))
        delayed = []
        for module in reversed(chunk.delaying):
            pending = self._pending[module]
            # A delaying module delays nothing if its weight is frozen or its delay is switched off.
            if _needs_backward_dw(module) and (module in self._reached or not pending):
                pending.append(key)
                delayed.append(module)
        return delayed

    def _run_wgrad(self, chunk: _Chunk, entry: Entry) -> None:
        key = entry.chunk, entry.microbatch
        for module in reversed(chunk.delaying):
            pending = self._pending[module]
            if key not in pending:
                continue
            if pending[0] != key:
                raise RuntimeError(
                    f"{entry}: {chunk.names[module]} is in chunk {pending[0][0]} too, and its oldest pending weight "
                    f"gradient is that of microbatch {pending[0][1]} there: backward_dw() would run it out of its turn"
                )
            module.backward_dw()
            pending.popleft()
            self._reached[module] = None
        if not self._reached and not entry.implied:
            raise _nothing_delays(entry, chunk)

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: record that the module runs, in this forward and in the backward."""
        if self._in_forward:  # a recompute during backward does not count
            self._reached[module] = None
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(lambda grad: self._reached.setdefault(module))  # freed with the graph


def has_backward_dw(module: nn.Module) -> bool:
    """Return True if the module, or a module inside that it passes the call on to, may delay weight gradients."""
    return all(callable(getattr(module, verb, None)) for verb in ("backward_dw", "need_backward_dw"))


def _needs_backward_dw(module: Any) -> bool:
    """Return True while weight gradients are pending. Transformer Engine's method only says if the module delays."""
    store = getattr(module, "wgrad_store", None)
    if store is not None:
        return store.context is not None and not store.context.empty()
    return bool(module.need_backward_dw())


def _nothing_delays(entry: Entry, chunk: _Chunk) -> RuntimeError:
    return RuntimeError(
        f"{entry}: chunk {entry.chunk} ({chunk.type_name}) has no delayed weight gradient to compute; leave its wgrad "
        f"entries out, or delay its modules (delay_wgrad_compute=True)"
    )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
