"""``graphed_chunks``: graphed callables as the chunks of a ``ScheduleExecutor``."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ..pipeline.order import Schedule
from .callable import GraphedCallable

__all__ = ["GraphedChunk", "graphed_chunks"]


def graphed_chunks(callables: Sequence[GraphedCallable], schedule: Schedule) -> "list[GraphedChunk]":
    """One module for each chunk of ``schedule``, from what ``make_graphed_callables`` returned for its order::

        schedule = parse_order(order, num_layers_per_chunk=counts)
        callables = make_graphed_callables(layers, samples, order=order, num_layers_per_chunk=counts)
        executor = ScheduleExecutor(schedule, graphed_chunks(callables, schedule))

    Raises ``ValueError`` where the numbers do not match, or the schedule does not know its layers.
    """
    counts = schedule.num_layers_per_chunk
    if counts is None:
        raise ValueError("this schedule knows no layers: give parse_order num_layers_per_chunk or num_layers")
    if len(callables) != sum(counts) * schedule.num_microbatches:
        raise ValueError(
            f"{len(callables)} callables for {schedule.num_microbatches} microbatches of {sum(counts)} layers"
        )
    remaining = iter(callables)
    return [
        GraphedChunk([[next(remaining) for _ in range(count)] for _ in range(schedule.num_microbatches)])
        for count in counts
    ]


class GraphedChunk(nn.Module):
    """The layers of one chunk, in sequence. Each forward takes the callables of the next microbatch.

    It is no part of the model: it registers no module, and ``parameters()`` are those of the layers.

    callables  those of each microbatch, layer by layer
    """

    def __init__(self, callables: Sequence[Sequence[GraphedCallable]]) -> None:
        super().__init__()
        self.callables = tuple(map(tuple, callables))
        self._microbatch = 0

    def begin_run(self) -> None:
        """The next forward is that of microbatch 0. ``ScheduleExecutor`` calls this when a run begins."""
        self._microbatch = 0

    def forward(self, *inputs: Any) -> Any:
        """Run the layers, each with the outputs of the one before."""
        outputs: Any = inputs
        for layer in self.callables[self._microbatch]:
            outputs = layer(*outputs) if isinstance(outputs, tuple | list) else layer(outputs)
        self._microbatch = (self._microbatch + 1) % len(self.callables)
        return outputs

    def need_backward_dw(self) -> bool:
        """Return True while delayed weight gradients of any microbatch are pending."""
        return any(layer.need_backward_dw() for layers in self.callables for layer in layers)

    def backward_dw(self) -> None:
        """Compute the delayed weight gradients of the oldest microbatch, last layer first. No-op without any."""
        for layers in self.callables:
            if any(layer.need_backward_dw() for layer in layers):
                for layer in reversed(layers):
                    layer.backward_dw()
                return

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the layers."""
        return nn.ModuleList(layer.module for layer in self.callables[0]).named_parameters(*args, **kwargs)
