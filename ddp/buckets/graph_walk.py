"""The autograd graph behind a forward: which parameters backward reaches, and whether it recomputes."""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_internals import tree_leaves

__all__ = ["GraphWalk", "differentiable_tensors", "walk_graph"]

_REENTRANT = "CheckpointFunctionBackward"
"""Backward node of reentrant recompute, torch's and Megatron's. A nested backward runs inside this node, over a graph
that does not exist before."""


class GraphWalk(NamedTuple):
    """The result of ``walk_graph``."""

    leaves: set[int]
    """``id`` of every leaf tensor that backward reaches."""
    recomputes: bool
    """Whether a reentrant recompute is in the graph. Leaves inside the recompute are not in ``leaves``."""


def differentiable_tensors(outputs: Any) -> list[Tensor]:
    """Tensors that require a gradient in a forward's return value: in nested tuples, lists, dicts and dataclasses."""
    tensors = []
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                tensors.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            tensors += differentiable_tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return tensors


def walk_graph(outputs: Iterable[Tensor]) -> GraphWalk:
    """Walk the graph from ``outputs`` to its leaves (about 0.15 ms for 700 nodes)."""
    leaves: set[int] = set()
    recomputes = False
    stack: list[Any] = []
    for output in outputs:
        if output.grad_fn is None:
            leaves.add(id(output))
        else:
            stack.append(output.grad_fn)
    seen = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            leaves.add(id(variable))
        elif type(node).__name__ == _REENTRANT:
            recomputes = True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return GraphWalk(leaves, recomputes)
