"""``.grad`` of wrapped parameters: what a program finds there from the end of a backward on.

Gradients live in ``main_grad``, and other ranks' parts are added to them late: while a program goes on, or not before
it asks. So a backward leaves a ``ShownGrad`` in ``.grad``. It has the parameter's shape and no memory. The first torch
function that reads values of one has the iteration's reduction finished, and reads the gradients::

    whole gradients     ``.grad`` becomes a plain tensor: ``main_grad``'s memory, or a copy in the parameter's dtype
    sharded gradients   a function sees this rank's elements as a ``ShardedGrad``: norms are those of all ranks, results
                        of element-wise functions are of the parameter's shape too, others need ``full_tensor()``

To set ``.grad`` to None discards the gradient, and another tensor in its place is the gradient, as in plain PyTorch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..torch_internals import DisableTorchFunctionSubclass, let_foreach_take, reads_no_values, tree_leaves, tree_map
from .sharded_grad import ShardedGrad

__all__ = ["ShownGrad", "without_memory"]


class ShownGrad(Tensor):
    """``.grad`` of a wrapped parameter: the parameter's shape and dtype, and no memory.

    Its first read of values is collective: all ranks read, or step, in one order. A program that keeps one over the
    iteration's end has its values if they were read before; else a read raises ``RuntimeError``.
    """

    of: str
    """The parameter's name."""
    finish_reduction: "Callable[[ShownGrad], None]"
    """Has ``reduced`` set, where the iteration goes on."""
    reduced: "Tensor | None"
    """The reduced gradient, once it is there."""
    added: "Tensor | None"
    """What a later backward has accumulated into ``.grad``; its hook takes it."""

    @staticmethod
    def __torch_function__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in reads_no_values():
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        reads: dict[int, ShownGrad] = {}

        def read(leaf: Any) -> Any:
            if not isinstance(leaf, ShownGrad):
                return leaf
            real = leaf.read()
            reads[id(real)] = leaf
            return real

        def shown(leaf: Any) -> Any:
            """Element-wise results have the parameter's shape too, and may become ``.grad``."""
            if not isinstance(leaf, ShardedGrad):
                return leaf
            return reads[id(leaf)] if id(leaf) in reads else _shown(leaf)

        args, kwargs = tree_map(read, (args, kwargs))
        return tree_map(shown, func(*args, **kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], ShownGrad):  # autograd accumulates
            args[0].added = args[1]
            return args[0]
        if func in _ASKS:
            return func(*tree_map(_without_values, args), **(kwargs or {}))
        name = next(leaf.of for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, ShownGrad))
        raise RuntimeError(
            f"{func} read .grad of parameter '{name}' past torch's Python functions, which would finish its reduction: "
            f"read .grad before it on all ranks, by param.grad.norm() for example, and take param.grad again; where "
            f"gradients are sharded, give it param.grad.full_tensor()"
        )

    def read(self) -> Tensor:
        """The reduced gradient: a plain tensor, or a ``ShardedGrad``. Collective where it is not reduced yet."""
        if self.reduced is None:
            self.finish_reduction(self)
        if self.reduced is None:
            raise RuntimeError(
                f"this gradient of parameter '{self.of}' was kept over its iteration's end and is read now for the "
                f"first time: its values are gone. Read or clone param.grad between backward and zero_grad()"
            )
        return self.reduced

    @property
    def data(self) -> Tensor:
        """``data`` of the reduced gradient; setting it changes the gradient."""
        return self.read().data

    @data.setter
    def data(self, data: Tensor) -> None:
        self.read().data = data.read() if isinstance(data, ShownGrad) else data

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.read())

    def __format__(self, format_spec: str) -> str:
        return format(self.read(), format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.clone()

    def full_tensor(self) -> Tensor:
        """The whole reduced gradient, of the parameter's shape, on every rank. Collective."""
        real = self.read()
        return real.full_tensor() if isinstance(real, ShardedGrad) else real.clone()

    def to_local(self) -> Tensor:
        """A plain tensor of this rank's elements: flat where gradients are sharded, else all of them."""
        real = self.read()
        return real.to_local() if isinstance(real, ShardedGrad) else real


let_foreach_take(ShownGrad)


_ASKS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("is_same_size", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full")
)
"""What of ``reads_no_values`` torch computes: of shape, dtype and device alone."""


def _without_values(leaf: Any) -> Any:
    return torch.empty((), dtype=leaf.dtype, device=leaf.device).expand(leaf.shape) if type(leaf) is ShownGrad else leaf


def _shown(part: ShardedGrad) -> ShownGrad:
    return without_memory(part, part.shard.shape, part.dtype, part.shard.name, lambda _: None, part)


def without_memory(
    like: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str, finish: Any, reduced: Tensor | None
) -> ShownGrad:
    """A ``ShownGrad`` [shape] of ``dtype`` on the device of ``like``.

    name     the parameter's, for errors
    finish   called with it at the first read, where ``reduced`` is None; sets ``reduced``
    reduced  the gradient that it stands for; None: not reduced yet
    """
    strides = like.stride() if like.shape == shape else None
    make: Any = torch.Tensor._make_wrapper_subclass
    grad: ShownGrad = make(ShownGrad, shape, strides=strides, dtype=dtype, device=like.device)
    grad.of, grad.finish_reduction, grad.reduced, grad.added = name, finish, reduced, None
    return grad
