"""Whole parameters that a program has kept from ``unsharded()``: their reads raise while they have no memory.

The class of such a parameter is ``FreedParameter`` until the unit is gathered again.
"""

from typing import Any

from torch import Tensor, nn

from ...ddp.torch_grads.grad_reads import name_of
from ...ddp.torch_internals import disabled_torch_function, tree_leaves
from .parameter import leads_to_values, reads_no_values

__all__ = ["allow_reads", "refusal_of_grads", "refusal_of_params", "refuse_reads"]

_NAME = "_maingrad_freed"


class FreedParameter(nn.Parameter):
    """A whole parameter without memory. Functions that use its values, and views of it, raise ``RuntimeError``."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOWED:
            return disabled_torch_function(func, types, args, kwargs or {})
        used = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FreedParameter))
        raise RuntimeError(
            f"{name_of(func)} uses the parameter {used.__dict__[_NAME]!r}, which was whole within unsharded() "
            f"or unshard(), and is sharded again: it has no memory now. Keep a copy from the block "
            f"(param.detach().clone(), state_dict()), or read the parameter in a block of its own"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FreedParameter({self.__dict__[_NAME]!r}, {list(self.shape)}, without memory)"


def refuse_reads(param: nn.Parameter, name: str) -> None:
    """``param`` has no memory now; ``name``: for the error."""
    param.__dict__[_NAME] = name
    param.__class__ = FreedParameter


def allow_reads(param: nn.Parameter) -> None:
    """Undo ``refuse_reads``."""
    param.__class__ = nn.Parameter
    param.__dict__.pop(_NAME, None)


def refusal_of_params(name: str) -> str:
    """The error for reads of freed memory of whole parameters; ``name``: of the bucket."""
    return (
        f"the memory of the whole parameters ({name}) was freed after the forward of their unit, and this tensor is "
        f"one of them, or a view: keep a copy from the forward (tensor.clone()), or read them within unsharded()"
    )


def refusal_of_grads(name: str) -> str:
    """The error for reads of freed memory of whole gradients; ``name``: of the bucket."""
    return (
        f"the memory of the whole gradients ({name}) was freed after their reduction, and this tensor is a main_grad "
        f"or a view of one: read param.grad of the sharded parameters, or copy main_grad in backward"
    )


def _allowed() -> frozenset[Any]:
    grad: Any = Tensor.grad
    return (reads_no_values() - leads_to_values()) | {grad.__get__, grad.__set__, grad.__delete__}


_ALLOWED = _allowed()
