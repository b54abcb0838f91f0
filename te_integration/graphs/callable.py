"""``GraphedCallable``: what ``make_graphed_callables`` returns, a layer for one microbatch."""

import copy
from typing import Any

import torch
from torch import nn

from ...ddp.collectives.streams import is_capturing
from ...ddp.contract.delayed import delay_blocks
from ...ddp.contract.module import DelayedWgradModule
from ...ddp.wrapper.around_module import AroundModule
from ..recipes import Recipe, recipe_now
from .captured_order import ReplayError
from .layer_graphs import LayerGraphs
from .node import replay

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
        self._autocast = _autocast(graphs)
        self._end_making()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's forward. In a model that is compiled around it: a graph break."""
        if torch.compiler.is_compiling():
            return _run_outside_graph(GraphedCallable.forward, self, *args, **kwargs)
        graphs = self._graphs
        if graphs is None or not torch.is_grad_enabled() or not graphs.in_modes_of_capture():
            return self.module(*args, **kwargs)
        if is_capturing():
            raise ReplayError(f"{graphs.place} was called while another graph is captured: give that capture the layer")
        if delay_blocks.queue is not None:
            raise ReplayError(
                f"{graphs.place} was called in a delayed_wgrad block, and what the graphs delay was decided by the "
                f"capture: build the layer with delay_wgrad_compute=True, and call it outside of such blocks"
            )
        if _autocast(graphs) != self._autocast:
            raise ReplayError(f"{graphs.place} was captured under another autocast: call it as it was captured")
        return replay(graphs, args, kwargs)

    def need_backward_dw(self) -> bool:
        """Whether delayed weight gradients of this callable's microbatch are pending."""
        if self._graphs is None:
            return any(module.need_backward_dw() for module in self._delaying())
        return self._graphs.is_pending()

    def backward_dw(self) -> None:
        """Compute this microbatch's delayed weight gradients by W; a quiet no-op where none is pending.

        Raises ``ReplayError`` where another step comes before it in the captured order.
        """
        graphs = self._graphs
        if graphs is None:
            for module in self._delaying():
                module.backward_dw()
        elif graphs.is_pending():
            graphs.check_turn_of_wgrad()
            for module in self._delaying():
                while graphs.is_pending_in(module.wgrad_queue):  # what an eager backward queued before comes first
                    module.backward_dw()

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
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _delaying(self) -> list[DelayedWgradModule]:
        """The modules inside that delay, last one first."""
        found = [each for each in self.module.modules() if isinstance(each, DelayedWgradModule)]
        return [module for module in reversed(found) if module.wgrad_queue is not None]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the layer: graphs have captured the memory of this one."""
        return copy.deepcopy(self.module, memo)


def _run(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


_run_outside_graph: Any = torch.compiler.disable(_run)


def _autocast(graphs: LayerGraphs) -> tuple[bool, torch.dtype, Recipe | None]:
    kind = graphs.device_type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), recipe_now()
