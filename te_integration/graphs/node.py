"""The node of autograd that stands for a graphed layer: its forward replays F, its backward D.

The layer's parameters are inputs of the node. So autograd's engine reaches them in each backward, their hooks run, and
everything that a provider of ``main_grad`` does there is done as in an eager backward.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ddp.contract.target import Demand, demand
from ...ddp.torch_internals import NO_BACKWARD, current_backward
from .captured_order import ReplayError
from .layer_graphs import LayerGraphs

__all__ = ["replay"]


def replay(graphs: LayerGraphs, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The layer's forward by its graphs: what the layer would return."""
    tensors = graphs.signature.tensors(args, kwargs)
    outputs = _Replay.apply(graphs, *tensors, *graphs.params)
    return graphs.result(outputs)


class _Replay(torch.autograd.Function):
    """``apply`` takes the graphs, the tensors among the layer's arguments, and the parameters that get a gradient."""

    @staticmethod
    def forward(ctx: Any, graphs: LayerGraphs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        # A forward inside a backward is a reentrant recompute; its nested backward counts as part of the outer one.
        ctx.outer_backward = current_backward()
        ctx.set_materialize_grads(False)
        ctx.run, outputs = graphs.replay_forward(tensors[: graphs.num_inputs])
        ctx.mark_non_differentiable(*graphs.not_differentiable(outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        graphs: LayerGraphs = ctx.graphs
        if torch.is_grad_enabled():
            raise ReplayError(f"the backward of {graphs.place}: create_graph=True needs the layer itself, not a graph")
        nodes = ctx.next_functions
        for number, param in enumerate(graphs.params, start=graphs.num_inputs):
            if graphs.writes(param) and demand(nodes[number][0]) is not Demand.ACCUMULATE:
                raise ReplayError(
                    f"the backward of {graphs.place} computes all gradients of the layer and writes main_grad; "
                    f"autograd.grad(), backward(inputs=...) and split backwards need the layer itself"
                )
        passes_on = [node is not None and node.name() == _NAME for node, _ in nodes[: graphs.num_inputs]]
        backward = current_backward() if ctx.outer_backward == NO_BACKWARD else ctx.outer_backward
        return None, *graphs.replay_dgrad(ctx.run, graphs.of_differentiable(grads), passes_on, backward)


_NAME = f"{_Replay.__name__}Backward"
