"""Parameter groups by name or predicate, and the optimizer classes that may work on flat shards."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .wiring import WiredParam

__all__ = ["assign_groups", "check_optimizer_class", "is_fused"]

_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
"""One kernel for all tensors, that divides by ``grad_scale`` and skips by ``found_inf`` on the device."""
_ELEMENTWISE = (
    *_FUSED,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
"""Each element's update depends on that element's gradient and state alone."""


def check_optimizer_class(cls: type, *, whole: bool) -> None:
    """Raise ``ValueError`` for a class whose update of one element depends on others, which shards and runs cut apart.

    Classes of torch are known; another one says ``elementwise = True`` itself. With whole parameters any class may work
    that looks at one parameter at a time; one that looks at all of them (L-BFGS) may not.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f"optimizer_class is a subclass of torch.optim.Optimizer, got {cls!r}")
    if issubclass(cls, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ValueError(f"{cls.__name__} cannot update flat shards: it needs all parameters at once, or sparse ones")
    if whole or cls in _ELEMENTWISE or getattr(cls, "elementwise", False):
        return
    raise ValueError(
        f"{cls.__name__} is not known to be elementwise, and shards cut parameters apart: use one of "
        f"{', '.join(known.__name__ for known in _ELEMENTWISE)}; set {cls.__name__}.elementwise = True if each "
        f"element's update depends on that element alone; or give each parameter to one rank with "
        f"DistributedDataParallelConfig(keep_params_whole=True)"
    )


def is_fused(cls: type) -> bool:
    """Whether torch has a fused kernel of this class on every device."""
    return cls in _FUSED


Selector = str | Sequence[str] | Callable[[str, torch.Tensor], bool]


def assign_groups(wired: Iterable[WiredParam], groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Name of each parameter -> index of the first group that selects it; ``len(groups)`` for the rest.

    Each group's ``"params"`` is a name or pattern (``"*.bias"``), a sequence of them, or a function of a parameter's
    name and the parameter. Raises ``ValueError`` for a group that selects nothing, and for a name that matches nothing.
    """
    params = {entry.owned.name: entry.owned.param for entry in wired}
    selected = [_selected(index, group, params) for index, group in enumerate(groups)]
    assigned = {
        name: next((index for index, names in enumerate(selected) if name in names), len(groups)) for name in params
    }
    for index, names in enumerate(selected):
        if index not in assigned.values():
            reason = "selects no parameter" if not names else "selects only parameters of groups before it"
            raise ValueError(f"param_groups[{index}] {reason}: params={groups[index]['params']!r}")
    return assigned


def _selected(index: int, group: Mapping[str, Any], params: Mapping[str, torch.Tensor]) -> set[str]:
    if "params" not in group:
        raise ValueError(f"param_groups[{index}] has no 'params': a name, a pattern, a list of them, or a function")
    selector: Selector = group["params"]
    if callable(selector):
        return {name for name, param in params.items() if selector(name, param)}
    patterns = [selector] if isinstance(selector, str) else list(selector)
    found: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"param_groups[{index}]: select parameters by name, pattern or function of name and parameter; got "
                f"{type(pattern).__name__}"
            )
        matching = set(fnmatch.filter(params, pattern))
        if not matching:
            raise ValueError(f"param_groups[{index}]: no trainable parameter is called '{pattern}'")
        found |= matching
    return found
