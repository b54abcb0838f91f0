"""``LayerGraphs``: the three graphs of one layer and microbatch, their capture and their replay.

    F   forward         static inputs --> static outputs
    D   dgrad           static gradients of the outputs --> static gradients of inputs and of unfused parameters;
                        fused weight gradients into ``main_grad``
    W   wgrad           the delayed weight gradients; no inputs and outputs of its own

What a backward says to a provider of ``main_grad`` is said by Python around the replay of D and W.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ddp.contract.capturing import BackwardCapture, Delivery, noting, open_deliveries, settle_kept
from ...ddp.contract.delayed import DelayedWgrad
from ...ddp.contract.main_grad import record_of
from ...ddp.graphs.capture import CapturedGraph
from ...ddp.torch_internals import has_one_hook, has_tensor_hooks
from ..pipeline.order import Kind
from .captured_order import CapturedOrder, ReplayError
from .signature import Sample, Signature, Structure, tensors_in
from .trial import content_kept, differentiable
from .weights import CapturedWeights

__all__ = ["LayerGraphs"]


_WORTH_A_COPY = 2**20
"""Bytes of a parameter's gradient from which on microbatches share its memory."""


class Forward(NamedTuple):
    """A replayed forward: versions that its backward must find."""

    weights: int
    outputs: list[int]


class LayerGraphs:
    """The graphs of one layer and microbatch. First the captures are called in the captured order, then the replays.

    place      the layer and microbatch, for errors
    signature  of each call
    sample     the arguments of the capture
    order      what all graphs of the order share
    """

    def __init__(
        self, module: nn.Module, place: str, signature: Signature, sample: Sample, order: CapturedOrder
    ) -> None:
        self.module, self.place, self.signature = module, place, signature
        self.params = [param for param in module.parameters() if param.requires_grad]
        """Parameters whose gradients the backward delivers, to autograd, to ``main_grad`` or to a queue."""
        self.has_backward = False
        """Whether F has an output that requires a gradient."""
        self.num_inputs = len(signature.kinds)
        self.weights = CapturedWeights(module, place, order.pool.device.type)
        self._sample: Sample | None = sample
        self._order = order
        self._graphs = {kind: CapturedGraph(order.pool) for kind in Kind}
        self._steps: dict[Kind, int] = {}
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._output_grads: list[Tensor] = []
        self._grads: list[Tensor | None] = []  # of inputs, then of params; None where there is none
        self._captured: tuple[list[Tensor], list[Tensor]] | None = None  # F's inputs and outputs, with autograd's graph
        self._shared: list[Tensor] = []  # buffers with the results of the graph that was captured last
        self._noted = BackwardCapture(order.first_writes, self.params)
        self._now: list[Delivery] = []  # weight gradients that D computes
        self._later: list[Delivery] = []  # that W computes
        self._entries: list[DelayedWgrad] = []
        self._backward = -1
        self._is_computed = False  # W has run since the last D
        self._forward: Forward | None = None  # whose backward may come

    # ---- Capture. ----

    def capture_forward(self) -> None:
        """Capture F."""
        samples, self._sample = tensors_in(self._sample), None
        self._inputs = [self._order.buffers.take(sample) for sample in samples]
        with self._order.pool.on_stream(), torch.no_grad():
            for buffer, sample in zip(self._inputs, samples, strict=True):
                buffer.copy_(sample)
        leaves = [
            buffer.detach().requires_grad_(kind.requires_grad)
            for buffer, kind in zip(self._inputs, self.signature.kinds, strict=True)
        ]
        args, kwargs = self.signature.arguments(leaves)
        with self._capture(Kind.FORWARD), noting(self._noted):
            result = self.module(*args, **kwargs)
            outputs = tensors_in(result)
            self._outputs = [self._static(output) for output in outputs]
        self._results = Structure(result)
        self.have_graph = [output.requires_grad for output in outputs]
        """Says of each output if a backward goes through it."""
        self.has_backward = any(self.have_graph) and bool(self.params or differentiable(leaves))
        if self.has_backward:
            self._captured = leaves, outputs

    def capture_dgrad(self) -> None:
        """Capture D. Where it computes all weight gradients, the buffers are free for later entries."""
        assert self._captured is not None, "F is captured, and has a backward"
        leaves, captured = self._captured
        outputs, sources = differentiable(captured), differentiable(leaves)
        self._output_grads = [self._order.buffers.take(output) for output in outputs]
        with self._order.pool.on_stream():
            for buffer in self._output_grads:
                buffer.zero_()
        noted = self._noted
        shared_outputs, self._shared = self._shared, []
        with self._capture(Kind.DGRAD), noting(noted):
            grads = torch.autograd.grad(outputs, [*sources, *self.params], self._output_grads, allow_unused=True)
            worth = [0] * len(sources) + [_WORTH_A_COPY] * len(self.params)
            static: Iterator[Tensor | None] = iter(
                [None if g is None else self._static(g, least) for g, least in zip(grads, worth, strict=True)]
            )
        self._grads = [next(static) if leaf.requires_grad else None for leaf in leaves]
        self._now = [delivery for delivery in noted.deliveries if not delivery.delayed]
        self._later = [delivery for delivery in noted.deliveries if delivery.delayed]
        written = {id(weight) for delivery in noted.deliveries for weight in delivery.weights}
        found = [(p, g) for p, g in zip(self.params, static, strict=True) if g is not None or id(p) in written]
        self.params = [param for param, _ in found]
        self._grads += [grad for _, grad in found]
        self.written = [number for number, param in enumerate(self.params) if id(param) in written]
        """Numbers of the ``params`` whose gradients replays write, to ``main_grad`` or later to ``.grad``."""
        self._captured = None  # lets go of autograd's graph, and so of what only D reads
        self._order.buffers.give_back(shared_outputs)
        if not self._later:
            self._order.buffers.give_back([*self._inputs, *self._output_grads])

    @property
    def delays(self) -> bool:
        """Whether some weight gradients are delayed."""
        return bool(self._later)

    def end_of_dgrads(self) -> None:
        """All layers of this entry have their D: what a D has returned to autograd is used up."""
        self._order.buffers.give_back(self._shared)

    def capture_wgrad(self) -> None:
        """Capture W, if the layer delays a gradient. Then the buffers are free for later entries."""
        if self._later:
            with self._capture(Kind.WGRAD):
                for delivery in self._later:
                    delivery.compute(self._order.first_writes)
            self._order.buffers.give_back([*self._inputs, *self._output_grads])

    @contextmanager
    def _capture(self, kind: Kind) -> Iterator[None]:
        graph = self._graphs[kind]
        with content_kept(self.module, runs=graph.ran), graph.capture():
            yield
        self._steps[kind] = self._order.append(f"the {kind.value} of {self.place}")

    def _static(self, result: Tensor, least: int = 0) -> Tensor:
        """In a capture: the static memory of a result, shared with other microbatches from ``least`` bytes on."""
        result = result.detach()
        if self._order.shares and result.nbytes >= least:
            buffer = self._order.buffers.take(result)
            buffer.copy_(result)
            self._shared.append(buffer)
            return buffer
        # The buffers are filled anew before others have read a gradient that is one of them.
        own = {buffer.untyped_storage().data_ptr() for buffer in self._output_grads}
        return result.clone() if result.untyped_storage().data_ptr() in own else result

    # ---- Replay. ----

    def replay_forward(self, tensors: Sequence[Tensor]) -> tuple[Forward, list[Tensor]]:
        """Run F for these inputs, which ``signature`` has checked. Returns this run, and static outputs."""
        self.weights.check()
        self._order.enter(self._steps[Kind.FORWARD])
        for buffer, tensor in zip(self._inputs, tensors, strict=True):
            if tensor.data_ptr() != buffer.data_ptr():
                buffer.copy_(tensor, non_blocking=True)
        self._replay(Kind.FORWARD, ())
        self._forward = Forward(self.weights.version(), [output._version for output in self._outputs])
        return self._forward, [output.detach() for output in self._outputs]

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Return what the layer returns, around these outputs."""
        return self._results.fill(outputs)

    def replay_dgrad(
        self, forward: Forward, output_grads: Sequence[Tensor | None], passes_on: Sequence[bool], backward: int
    ) -> list[Tensor | None]:
        """Run D, and say to providers what the layer's backward would say.

        forward       from ``replay_forward``
        output_grads  of the outputs that ``have_graph``; None: zeros
        passes_on     for each input: its gradient goes to another graph, which copies it
        backward      number of the running backward

        Returns what autograd gets for each input and each parameter.
        """
        self._check_backward(forward)
        self._order.enter(self._steps[Kind.DGRAD])
        for buffer, grad in zip(self._output_grads, output_grads, strict=True):
            if grad is None:
                buffer.zero_()
            elif grad.data_ptr() != buffer.data_ptr():
                buffer.copy_(grad, non_blocking=True)
            elif grad.stride() != buffer.stride():
                buffer.copy_(grad.clone())  # a hook has made it a transposed view of the buffer itself
        self._backward = backward
        self._replay(Kind.DGRAD, self._now)
        self._forward, self._is_computed = None, False

        # Buffers that W reads: where eager code fills one too early, ``DelayedWgrad`` sees its version.
        operands = (*self._output_grads, *self._inputs)
        self._entries = [delivery.put(self._compute_delayed, operands, backward) for delivery in self._later]
        self._order.record_delayed(self._entries)
        handed: dict[int, Tensor] = {}
        for delivery in (*self._now, *self._later):
            for weight, given in zip(delivery.weights, delivery.hand_over(), strict=True):
                if given is not None:
                    handed[id(weight)] = given
        of_inputs = [
            grad if grad is None or passes else grad.clone()
            for grad, passes in zip(self._grads[: self.num_inputs], passes_on, strict=True)
        ]
        of_params = [
            handed.get(id(param)) if grad is None else _for_autograd(param, grad)
            for param, grad in zip(self.params, self._grads[self.num_inputs :], strict=True)
        ]
        return [*of_inputs, *of_params]

    @property
    def pending(self) -> list[DelayedWgrad]:
        """The delayed weight gradients of this microbatch that are to be computed."""
        return [entry for entry in self._entries if entry.waits]

    def reset(self) -> None:
        """Free the graphs. The other graphs of the order are replayed without these."""
        for graph in self._graphs.values():
            graph.reset()
        for step in self._steps.values():
            self._order.remove(step)

    def _replay(self, kind: Kind, deliveries: Sequence[Delivery]) -> None:
        """Run a graph that computes ``deliveries``."""
        kept = open_deliveries(deliveries, self._backward)
        self._graphs[kind].replay()
        settle_kept(kept)
        self._order.leave(self._steps[kind])

    def _check_backward(self, forward: Forward) -> None:
        if self._forward is not forward:
            raise ReplayError(
                f"the backward of {self.place}: its forward was run again since, or this is a second backward of one "
                f"forward; graphs hold one forward at a time"
            )
        if self.weights.version() != forward.weights:
            raise ReplayError(
                f"the backward of {self.place}: a parameter was changed in place between forward and backward"
            )
        if [output._version for output in self._outputs] != forward.outputs:
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
        if self._is_computed:
            self._order.wait()
            return
        self._order.enter(self._steps[Kind.WGRAD])
        self._replay(Kind.WGRAD, self._later)
        self._is_computed = True


def _for_autograd(param: nn.Parameter, grad: Tensor) -> Tensor:
    """A static gradient as autograd gets it: itself where our provider takes it at once, else a copy.

    Without our provider, ``.grad`` would be the static memory, which the next replay overwrites.
    """
    return grad.detach() if record_of(param) is not None and has_one_hook(param) else grad.clone()
