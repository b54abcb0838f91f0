"""``StaticInputs``: the memory from which a captured function reads its arguments."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["StaticInputs", "detached_copies", "signature"]


class StaticInputs:
    """Tensors of the shapes and dtypes of one call's arguments, on ``device``; ``load`` fills them for each call."""

    def __init__(self, args: Any, device: torch.device) -> None:
        leaves, self._spec = tree_flatten(args)
        self._leaves = [
            torch.empty_strided(*_layout(leaf), dtype=leaf.dtype, device=device).requires_grad_(leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        ]
        self.args = tree_unflatten(self._leaves, self._spec)
        """The arguments that the captured function gets."""

    @torch.no_grad()
    def load(self, args: Any) -> None:
        """Copy a call's tensors, which have the same ``signature``; the host waits for none that is pinned."""
        for static, leaf in zip(self._leaves, tree_flatten(args)[0], strict=True):
            if isinstance(leaf, Tensor):
                static.grad = None
                static.copy_(leaf, non_blocking=True)


def signature(args: Any) -> tuple[Hashable, ...]:
    """What two calls must have in common to run the same kernels: structure, shapes, dtypes, and all that is no tensor.

    Raises ``TypeError`` for an argument that is neither a tensor nor hashable.
    """
    leaves, spec = tree_flatten(args)
    parts: list[Hashable] = [spec]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            parts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
            continue
        try:
            hash(leaf)
        except TypeError:
            raise TypeError(
                f"a graphed function takes tensors, numbers and strings, alone or in lists, tuples and dicts, not "
                f"{type(leaf).__name__}"
            ) from None
        parts.append((type(leaf), leaf))
    return tuple(parts)


def detached_copies(outputs: Any, function: str) -> Any:
    """A copy of every tensor in ``outputs``, which the next replay would overwrite.

    Raises ``TypeError`` for what is neither a tensor nor None: a replay could not compute it again.
    """
    leaves, spec = tree_flatten(outputs)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) and leaf is not None:
            raise TypeError(
                f"{function} returned a {type(leaf).__name__}, which the host has computed once, and every replay "
                f"would return again: return tensors, and read them afterwards"
            )
    return tree_unflatten([None if leaf is None else leaf.detach().clone() for leaf in leaves], spec)


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    """Shape and strides of a copy that shares no elements, in the memory format of ``tensor``."""
    dense = torch.empty_like(tensor, device="meta")
    return dense.shape, dense.stride()
