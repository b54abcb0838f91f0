"""``StaticInputs``: the memory from which a captured function reads its arguments."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_internals import DisableTorchFunctionSubclass, tree_flatten, tree_unflatten

__all__ = ["StaticInputs", "check_outputs", "detached_copies", "signature"]


class StaticInputs:
    """Tensors of the shapes and dtypes of one call's arguments, on ``device``; ``load`` fills them for each call."""

    def __init__(self, args: Any, device: torch.device) -> None:
        leaves, self._spec = tree_flatten(args)
        self._first = _first_places(leaves)
        self._leaves: list[Any] = []
        for place, leaf in zip(self._first, leaves, strict=True):
            if isinstance(leaf, Tensor):
                again = place < len(self._leaves)
                leaf = self._leaves[place] if again else _static(leaf, device)
            self._leaves.append(leaf)
        self.args = tree_unflatten(self._leaves, self._spec)
        """The arguments that the captured function gets."""

    @torch.no_grad()
    def load(self, args: Any) -> None:
        """Copy a call's tensors, which have the same ``signature``; the host waits for none that is pinned."""
        for place, (static, leaf) in enumerate(zip(self._leaves, tree_flatten(args)[0], strict=True)):
            if isinstance(leaf, Tensor) and self._first[place] == place:
                static.copy_(leaf, non_blocking=True)
        self._versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in self._leaves]

    def check_unchanged(self, function: str) -> None:
        """Raise ``RuntimeError`` where the function, which has run on ``args``, has left something in them."""
        for leaf, version in zip(self._leaves, self._versions, strict=True):
            if isinstance(leaf, Tensor) and (leaf._version != version or leaf.grad is not None):
                raise RuntimeError(
                    f"{function} has written a tensor of shape {list(leaf.shape)} among its arguments, or its .grad, "
                    f"and a replay writes a copy: return what it computes, and for a gradient of an argument make a "
                    f"leaf in the step, x.detach().requires_grad_()"
                )


def signature(args: Any) -> tuple[Hashable, ...]:
    """What two calls must have in common to run the same kernels: structure, shapes, dtypes, and all that is no tensor.

    Raises ``TypeError`` for an argument that is neither a tensor nor a value, and ``ValueError`` for a tensor through
    which gradients would go to something before the call.
    """
    leaves, spec = tree_flatten(args)
    parts: list[Hashable] = [spec, *_first_places(leaves)]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.requires_grad and (leaf.grad_fn is not None or isinstance(leaf, nn.Parameter)):
                raise ValueError(
                    f"a tensor of shape {list(leaf.shape)} among the arguments of a graphed function is "
                    f"{'a parameter' if leaf.grad_fn is None else 'the result of operations with gradients'}, which "
                    f"would get none from a copy: give what is computed in the function, or detach() the tensor"
                )
            parts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
            continue
        if not _is_value(leaf):
            raise TypeError(
                f"a graphed function takes tensors, numbers and strings, alone or in lists, tuples and dicts, not "
                f"{type(leaf).__name__}: every replay would see what was in it, or came out of it, in the capture"
            )
        parts.append((type(leaf), leaf))
    return tuple(parts)


def _first_places(leaves: list[Any]) -> list[int]:
    """For each leaf the place where it first occurs: a tensor that is given twice is one tensor."""
    first: dict[int, int] = {}
    return [
        first.setdefault(id(leaf), place) if isinstance(leaf, Tensor) else place for place, leaf in enumerate(leaves)
    ]


def _is_value(leaf: Any) -> bool:
    """Whether an equal object means equal work: hashable by its value, or a function or module, which is code."""
    try:
        hash(leaf)
    except TypeError:
        return False
    kind: Any = type(leaf)
    by_value: bool = leaf is None or kind.__hash__ is not object.__hash__ or kind.__module__ == "torch"
    return by_value or callable(leaf)


def check_outputs(outputs: Any, function: str) -> None:
    """Raise ``TypeError`` for what is neither a tensor nor None: a replay could not compute it again."""
    for leaf in tree_flatten(outputs)[0]:
        if not isinstance(leaf, Tensor) and leaf is not None:
            raise TypeError(
                f"{function} returned a {type(leaf).__name__}, which the host has computed once, and every replay "
                f"would return again: return tensors, and read them afterwards"
            )


def detached_copies(outputs: Any) -> Any:
    """A copy of every tensor in ``outputs``, which the next replay would overwrite."""
    leaves, spec = tree_flatten(outputs)
    return tree_unflatten([None if leaf is None else leaf.detach().clone() for leaf in leaves], spec)


def _static(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a copy, in the memory format of ``tensor``. No two elements share memory."""
    with DisableTorchFunctionSubclass():
        memory = torch.empty_like(tensor, device=device)
    return memory.requires_grad_(tensor.requires_grad)
