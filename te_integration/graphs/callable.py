"""``GraphedCallable``: what ``make_graphed_callables`` returns, a layer for one microbatch; and its node of autograd.

The layer's parameters are inputs of the node. So autograd's engine reaches them in each backward, their hooks run, and
everything that a provider of ``main_grad`` does there is done as in an eager backward.
"""

from typing import Any

import torch
from torch import Tensor

from ...ddp.collectives.streams import is_capturing
from ...ddp.contract.delay_blocks import delay_blocks
from ...ddp.contract.main_grad import Demand, demand
from ...ddp.contract.module import DelayedWgradModule
from ...ddp.torch_internals import NO_BACKWARD, current_backward
from ...ddp.wrapper.attachment import AroundModule
from .captured_order import ReplayError
from .layer_graphs import LayerGraphs

__all__ = ["GraphedCallable"]


class GraphedCallable(AroundModule):
    """A layer that runs by its graphs. ``module`` is the layer, and has all other attributes.

    Called like the layer, with tensors like those in ``sample_args``. Outputs lie in static memory: they hold until the
    callable's next forward, and must not be changed in place before the backward. In evaluation (``eval()`` of the
    layer or of a module inside, captured in training), without gradients, and after ``reset()`` the layer itself runs.

    Raises ``ReplayError`` for arguments of another kind, for a parameter that was replaced, moved or frozen, and out of
    the captured order.
    """

    def __init__(self, graphs: LayerGraphs) -> None:
        super().__init__()
        self.module = graphs.module
        self._graphs: LayerGraphs | None = graphs
        self._end_making()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward. In a model that is compiled around it: a graph break."""
        if torch.compiler.is_compiling():
            return _forward_outside_graph(self, *args, **kwargs)
        graphs = self._graphs
        if graphs is None or not torch.is_grad_enabled() or not graphs.weights.in_modes_of_capture():
            return self.module(*args, **kwargs)
        if is_capturing():
            raise ReplayError(f"{graphs.place} was called while another graph is captured: give that capture the layer")
        if delay_blocks.queue is not None:
            raise ReplayError(
                f"{graphs.place} was called in a delayed_wgrad block, and what the graphs delay was decided by the "
                f"capture: build the layer with delay_wgrad_compute=True, and call it outside of such blocks"
            )
        tensors = graphs.signature.tensors(args, kwargs)
        return graphs.result(_Replay.apply(graphs, *tensors, *graphs.params))

    def need_backward_dw(self) -> bool:
        """Return True while delayed weight gradients of this callable's microbatch are pending."""
        if self._graphs is None:
            return any(module.need_backward_dw() for module in self._delaying())
        return bool(self._graphs.pending)

    def backward_dw(self) -> None:
        """Compute this microbatch's delayed weight gradients by W; a quiet no-op where none is pending.

        Raises ``ReplayError`` where another step comes before it in the captured order.
        """
        for module in self._delaying():
            if self._graphs is None:
                module.backward_dw()
            else:
                while not set(module.wgrad_queue).isdisjoint(self._graphs.pending):
                    module.backward_dw()  # what an eager backward queued before comes first

    def reset(self) -> None:
        """Free the graphs, and run the layer itself from now on. Their memory is free when all of the pool are."""
        graphs, self._graphs = self._graphs, None
        if graphs is not None:
            graphs.reset()

    # ---- A model whose layer was replaced by its callable keeps the keys of its state dict. ----

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The layer's state."""
        return self.module.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # nn.Module then loads the child from what is left under its name.
        for key in list(state_dict):  # all begin with the prefix
            state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _delaying(self) -> list[DelayedWgradModule]:
        """The modules inside that delay, last one first."""
        found = [each for each in self.module.modules() if isinstance(each, DelayedWgradModule)]
        return [module for module in reversed(found) if module.wgrad_queue is not None]


_forward_outside_graph: Any = torch.compiler.disable(GraphedCallable.forward)


class _Replay(torch.autograd.Function):
    """``apply`` takes the graphs, the tensors among the layer's arguments, and the parameters that get a gradient."""

    @staticmethod
    def forward(ctx: Any, graphs: LayerGraphs, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        # A forward inside a backward is a reentrant recompute; its nested backward counts as part of the outer one.
        ctx.outer_backward = current_backward()
        ctx.set_materialize_grads(False)
        ctx.run, outputs = graphs.replay_forward(tensors[: graphs.num_inputs])
        ctx.mark_non_differentiable(
            *(y for y, has_graph in zip(outputs, graphs.have_graph, strict=True) if not has_graph)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        graphs: LayerGraphs = ctx.graphs
        if torch.is_grad_enabled():
            raise ReplayError(f"the backward of {graphs.place}: create_graph=True needs the layer itself, not a graph")
        nodes = [node for node, _ in ctx.next_functions]
        for number in graphs.written:
            if demand(nodes[graphs.num_inputs + number]) is not Demand.ACCUMULATE:
                raise ReplayError(
                    f"the backward of {graphs.place} computes all gradients of the layer and writes main_grad; "
                    f"autograd.grad(), backward(inputs=...) and split backwards need the layer itself"
                )
        passes_on = [node is not None and node.name() == _NAME for node in nodes[: graphs.num_inputs]]
        backward = current_backward() if ctx.outer_backward == NO_BACKWARD else ctx.outer_backward
        of_outputs = [grad for grad, has_graph in zip(grads, graphs.have_graph, strict=True) if has_graph]
        return None, *graphs.replay_dgrad(ctx.run, of_outputs, passes_on, backward)


_NAME = f"{_Replay.__name__}Backward"
