"""``LayerGraphs``: the three graphs of one layer and microbatch, their capture and their replay.

    F   forward         static inputs --> static outputs
    D   dgrad           static gradients of the outputs --> static gradients of inputs and of unfused parameters;
                        fused weight gradients into ``main_grad``
    W   wgrad           the delayed weight gradients; no inputs and outputs of its own

What a backward says to a provider of ``main_grad`` is said by Python around the replay of D and W.
"""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...ddp.contract.capturing import (
    BackwardCapture,
    Delivery,
    FirstWrites,
    noting,
    open_deliveries,
    settle_kept,
)
from ...ddp.contract.delayed import DelayedWgrad
from ...ddp.contract.main_grad import record_of
from ...ddp.graphs.capture import CapturedGraph, GraphPool
from ...ddp.torch_internals import has_one_hook, has_tensor_hooks, tree_flatten, tree_unflatten
from ..pipeline.order import Kind
from ..wgrad_queue import WgradQueue
from .buffers import StaticBuffers
from .captured_order import CapturedOrder, Place, ReplayError, Step
from .signature import Signature
from .trial import Trial, content_kept, differentiable
from .weights import CapturedWeights

__all__ = ["CaptureState", "LayerGraphs"]


_A_TENSOR = object()
"""Stands for a tensor among a layer's outputs."""


_WORTH_A_COPY = 2**20
"""Bytes of a parameter's gradient from which on microbatches share its memory."""


class CaptureState:
    """What the graphs of one order share.

    in_order  there is an order, whose first write of a weight is that of each iteration
    shares    there are several microbatches: their outputs and gradients share memory where the order allows it. That
              takes a copy at the end of a graph; a copy of each microbatch would stay otherwise
    """

    def __init__(self, pool: GraphPool, *, in_order: bool, shares: bool) -> None:
        self.pool = pool
        self.shares = shares
        self.order = CapturedOrder(pool.device)
        self.buffers = StaticBuffers()
        self.first_writes = FirstWrites(in_order=in_order)

    def content_kept(self, module: nn.Module) -> AbstractContextManager[None]:
        """Around a capture: on CPUs it runs what it records."""
        return nullcontext() if self.pool.stream is not None else content_kept(module)


class LayerGraphs:
    """The graphs of one layer and microbatch. First the captures are called in the captured order, then the replays.

    signature  of each call
    trial      what the layer's backward delivers
    state      what all graphs of the order share
    """

    def __init__(
        self, module: nn.Module, place: Place, signature: Signature, trial: Trial, state: CaptureState
    ) -> None:
        self.module = module
        self.place = place
        self.signature = signature
        self.params = trial.params
        self.delays = trial.delays
        self.has_backward = trial.has_backward
        self._state = state
        self._order = state.order
        self._weights = CapturedWeights(module, place)
        self._graphs = {kind: CapturedGraph(state.pool) for kind in Kind}
        self._steps: dict[Kind, int] = {}
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._output_grads: list[Tensor] = []
        self._grads: list[Tensor | None] = []  # of inputs, then of params; None where there is none
        self._taken: list[Tensor] = []  # buffers of the results of the graph that is being captured
        self._now: list[Delivery] = []  # weight gradients that D computes
        self._later: list[Delivery] = []  # that W computes
        self._entries: list[DelayedWgrad] = []
        self._backward = -1
        self._computed: _Computed | None = None
        self._forward: weakref.ref[Forward] | None = None

    # ---- Capture. ----

    def capture_forward(self, samples: Sequence[Tensor]) -> None:
        """Capture F."""
        state = self._state
        self._inputs = [state.buffers.take(sample) for sample in samples]
        with state.pool.on_stream(), torch.no_grad():
            for buffer, sample in zip(self._inputs, samples, strict=True):
                buffer.copy_(sample)
        kinds = self.signature.kinds
        self._leaves = [
            buffer.detach().requires_grad_(kind.requires_grad) for buffer, kind in zip(self._inputs, kinds, strict=True)
        ]
        args, kwargs = self.signature.arguments(self._leaves)
        with state.content_kept(self.module), self._graphs[Kind.FORWARD].capture():
            result = self.module(*args, **kwargs)
            leaves, self._output_spec = tree_flatten(result)
            self._captured = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self._outputs = [self._static(output) for output in self._captured]
        self._shared_outputs, self._taken = self._taken, []
        self._is_tensor = isinstance(result, Tensor)
        self._output_leaves = [_A_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._steps[Kind.FORWARD] = self._order.append(Step(Kind.FORWARD, self.place))
        if not self.has_backward:
            self._end_forward()

    def capture_dgrad(self) -> None:
        """Capture D. Where it computes all weight gradients, the buffers are free for later entries."""
        state = self._state
        outputs = differentiable(self._captured)
        self._output_grads = [state.buffers.take(output) for output in outputs]
        with state.pool.on_stream():
            for buffer in self._output_grads:
                buffer.zero_()
        sources = [leaf for leaf in self._leaves if leaf.requires_grad]
        capture = BackwardCapture(state.first_writes)
        with state.content_kept(self.module), self._graphs[Kind.DGRAD].capture(), noting(capture):
            grads = torch.autograd.grad(outputs, [*sources, *self.params], self._output_grads, allow_unused=True)
            of_inputs = [None if grad is None else self._static(grad) for grad in grads[: len(sources)]]
            of_params: list[Tensor | None] = [
                None if grad is None else self._static(grad, least=_WORTH_A_COPY) for grad in grads[len(sources) :]
            ]
        self._shared_grads, self._taken = self._taken, []
        remaining = iter(of_inputs)
        self._grads = [next(remaining) if leaf.requires_grad else None for leaf in self._leaves]
        self._grads += of_params
        self._now = [delivery for delivery in capture.deliveries if not delivery.delayed]
        self._later = [delivery for delivery in capture.deliveries if delivery.delayed]
        self._written = {id(weight) for delivery in capture.deliveries for weight in delivery.weights}
        self._steps[Kind.DGRAD] = self._order.append(Step(Kind.DGRAD, self.place))
        self._end_forward()
        self._give_back(self._shared_outputs)
        if not self._later:
            self._give_back([*self._inputs, *self._output_grads])

    def end_of_dgrads(self) -> None:
        """All layers of this entry have their D: what a D has returned to autograd is used up."""
        self._give_back(self._shared_grads)

    def capture_wgrad(self) -> None:
        """Capture W, if the layer delays a gradient. Then the buffers are free for later entries."""
        if not self._later:
            return
        with self._state.content_kept(self.module), self._graphs[Kind.WGRAD].capture():
            for delivery in self._later:
                delivery.compute(self._state.first_writes)
        self._steps[Kind.WGRAD] = self._order.append(Step(Kind.WGRAD, self.place))
        self._give_back([*self._inputs, *self._output_grads])

    def _static(self, result: Tensor, least: int = 0) -> Tensor:
        """In a capture: the static memory of an output or gradient, shared with other microbatches from ``least`` bytes
        on.
        """
        result = result.detach()
        if self._state.shares and result.nbytes >= least:
            buffer = self._state.buffers.take(result)
            buffer.copy_(result)
            self._taken.append(buffer)
            return buffer
        # The buffers are filled anew before others have read a gradient that is one of them.
        own = {buffer.untyped_storage().data_ptr() for buffer in self._output_grads}
        return result.clone() if result.untyped_storage().data_ptr() in own else result

    def _end_forward(self) -> None:
        """Let go of the captured forward's autograd graph, and so of what only D reads."""
        self._differentiable = [output.requires_grad for output in self._captured]
        del self._leaves, self._captured

    def _give_back(self, buffers: list[Tensor]) -> None:
        for buffer in buffers:
            self._state.buffers.give_back(buffer)

    # ---- Replay. ----

    def in_modes_of_capture(self) -> bool:
        """Whether the layer and all modules inside are in ``train()`` or ``eval()`` as they were captured."""
        return self._weights.in_modes_of_capture()

    def replay_forward(self, tensors: Sequence[Tensor]) -> tuple["Forward", list[Tensor]]:
        """Run F for these inputs, which ``signature`` has checked. Returns a mark of this run, and static outputs."""
        self._weights.check()
        step = self._steps[Kind.FORWARD]
        self._order.enter(step)
        for buffer, tensor in zip(self._inputs, tensors, strict=True):
            if tensor.data_ptr() != buffer.data_ptr():
                buffer.copy_(tensor, non_blocking=True)
        self._graphs[Kind.FORWARD].replay()
        self._order.leave(step)
        outputs = [output.detach() for output in self._outputs]
        run = Forward(self._weights.version(), [output._version for output in outputs])
        self._forward = weakref.ref(run)
        return run, outputs

    @property
    def device_type(self) -> str:
        """ "cuda", or "cpu"."""
        return self._state.pool.device.type

    @property
    def num_inputs(self) -> int:
        """Number of tensors among the arguments."""
        return len(self._inputs)

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """What the layer returns, around these outputs."""
        if self._is_tensor:
            return outputs[0]
        remaining = iter(outputs)
        leaves = [next(remaining) if leaf is _A_TENSOR else leaf for leaf in self._output_leaves]
        return tree_unflatten(leaves, self._output_spec)

    def not_differentiable(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Those of the outputs through which no backward goes."""
        return [output for output, has_graph in zip(outputs, self._differentiable, strict=True) if not has_graph]

    def of_differentiable(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the other outputs."""
        return [grad for grad, has_graph in zip(grads, self._differentiable, strict=True) if has_graph]

    def writes(self, param: nn.Parameter) -> bool:
        """Whether a replay writes this parameter's gradient itself, to ``main_grad`` or later to ``.grad``."""
        return id(param) in self._written

    def replay_dgrad(
        self, run: "Forward", output_grads: Sequence[Tensor | None], passes_on: Sequence[bool], backward: int
    ) -> list[Tensor | None]:
        """Run D, and say to providers what the layer's backward would say.

        run           the mark of the forward, from ``replay_forward``
        output_grads  of the differentiable outputs; None: zeros
        passes_on     for each input: its gradient goes to another graph, which copies it
        backward      number of the running backward

        Returns what autograd gets for each input and each parameter.
        """
        self._check_backward(run)
        step = self._steps[Kind.DGRAD]
        self._order.enter(step)
        for buffer, grad in zip(self._output_grads, output_grads, strict=True):
            if grad is None:
                buffer.zero_()
            elif grad.data_ptr() != buffer.data_ptr() or grad.stride() != buffer.stride():
                buffer.copy_(grad, non_blocking=True)
        kept = open_deliveries(self._now, backward)
        self._graphs[Kind.DGRAD].replay()
        settle_kept(kept)
        self._order.leave(step)
        self._forward = None

        self._backward, self._computed = backward, None
        self._entries = [
            delivery.put(self._compute_delayed, self._read_by_wgrad(), backward) for delivery in self._later
        ]
        for entry in self._entries:
            self._order.record_delayed(entry)
        handed: dict[int, Tensor] = {}
        for delivery in (*self._now, *self._later):
            for weight, given in zip(delivery.weights, delivery.hand_over(), strict=True):
                if given is not None:
                    handed[id(weight)] = given
        count = len(self._inputs)
        of_inputs = [
            grad if grad is None or passes else grad.clone()
            for grad, passes in zip(self._grads[:count], passes_on, strict=True)
        ]
        of_params = [
            handed.get(id(param)) if grad is None else _for_autograd(param, grad)
            for param, grad in zip(self.params, self._grads[count:], strict=True)
        ]
        return [*of_inputs, *of_params]

    def _read_by_wgrad(self) -> tuple[Tensor, ...]:
        """Buffers that W reads. Where eager code fills one too early, ``DelayedWgrad`` sees its version."""
        return (*self._output_grads, *self._inputs)

    def _check_backward(self, run: "Forward") -> None:
        if self._forward is None or self._forward() is not run:
            raise ReplayError(
                f"the backward of {self.place}: its forward was run again since, or this is a second backward of one "
                f"forward; graphs hold one forward at a time"
            )
        if self._weights.version() != run.weights_version:
            raise ReplayError(
                f"the backward of {self.place}: a parameter was changed in place between forward and backward"
            )
        if [output._version for output in self._outputs] != run.output_versions:
            raise ReplayError(
                f"the backward of {self.place}: an output was changed in place, and lies in memory that backward may "
                f"read; change a clone()"
            )
        for delivery in (*self._now, *self._later):
            if any(map(has_tensor_hooks, delivery.weights)):
                raise ReplayError(
                    f"{delivery.owner}: the weight got a hook (register_hook) after the capture, and the replay has no "
                    f"gradient to show it: capture again; the capture will name the hook"
                )

    def _compute_delayed(self) -> None:
        """Run W, unless another entry of this microbatch has done so."""
        if self._computed is not None:
            self._computed.wait()
            return
        step = self._steps[Kind.WGRAD]
        self._order.enter(step)
        kept = open_deliveries(self._later, self._backward)
        self._graphs[Kind.WGRAD].replay()
        settle_kept(kept)
        self._order.leave(step)
        self._computed = _Computed(self._state.pool.device)

    def is_pending(self) -> bool:
        """Whether delayed weight gradients of this microbatch are to be computed."""
        return any(entry.waits for entry in self._entries)

    def is_pending_in(self, queue: WgradQueue) -> bool:
        """Whether ``queue`` holds some of them."""
        waiting = [entry for entry in self._entries if entry.waits]
        return any(entry is mine for entry in queue for mine in waiting)

    def check_turn_of_wgrad(self) -> None:
        """Raise ``ReplayError`` where another graph comes before W."""
        self._order.check(self._steps[Kind.WGRAD])

    def reset(self) -> None:
        """Free the graphs. The other graphs of the order are replayed without these."""
        for graph in self._graphs.values():
            graph.reset()
        for step in self._steps.values():
            self._order.remove(step)


def _for_autograd(param: nn.Parameter, grad: Tensor) -> Tensor:
    """A static gradient as autograd gets it: itself where our provider takes it at once, else a copy.

    Without our provider, ``.grad`` would be the static memory, which the next replay overwrites.
    """
    record = record_of(param)
    taken = record is not None and record.foreign_delayer is None and has_one_hook(param)
    return grad.detach() if taken else grad.clone()


class Forward:
    """A replayed forward. Its node in the autograd graph holds this mark: if that is freed, no backward will come."""

    __slots__ = ("__weakref__", "output_versions", "weights_version")

    def __init__(self, weights_version: int, output_versions: list[int]) -> None:
        self.weights_version = weights_version
        self.output_versions = output_versions


class _Computed:
    """The end of a replay of W, for other streams."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Have the current stream wait for it."""
        if self._event is not None:
            self._event.wait()
