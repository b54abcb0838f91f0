"""Parameter groups by name or function, the optimizer class of each, and which classes may step over flat shards."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..buckets.bucket import BucketParam
from ..plan.owned_params import select_names
from ..torch_grads.lion import Lion
from ..torch_grads.muon import Muon
from ..torch_grads.optimizer import PER_PARAMETER

__all__ = [
    "IN_ONE_PASS",
    "ClassGroups",
    "assign_groups",
    "check_matrices",
    "check_optimizer_class",
    "check_options",
    "counts_apart",
    "groups_by_class",
    "is_capturable",
    "is_elementwise",
    "is_fused",
    "is_of_torch",
    "is_per_matrix",
    "names_of_classes",
    "why_not_over",
]

_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
"""Classes with a fused kernel, which divides by ``grad_scale`` and skips by ``found_inf`` on the device."""
IN_ONE_PASS = (*_FUSED, Lion)
"""Classes whose steps can run in one pass over memory: ``steps.py`` has the rule of each."""
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
"""Classes whose update of an element depends on this element's gradient and state alone."""


class ClassGroups(NamedTuple):
    """The groups that one optimizer class updates."""

    cls: type[torch.optim.Optimizer]
    options: dict[str, Any]
    """Options of the groups that do not say otherwise."""
    groups: dict[int, dict[str, Any]]
    """Each group's own options, by the group's index among the groups of all classes."""


def groups_by_class(
    cls: type[torch.optim.Optimizer], options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[ClassGroups]:
    """The groups of each class, those of ``cls`` first, with the group of all other parameters, which comes last.

    cls      of groups without ``"optimizer"``
    options  of the groups of ``cls``. Groups of another class begin with the defaults of that class
    """
    members: dict[type[torch.optim.Optimizer], dict[int, dict[str, Any]]] = {cls: {}}
    for index, group in enumerate([*groups, {}]):
        own = {key: value for key, value in group.items() if key not in ("params", "optimizer")}
        members.setdefault(group.get("optimizer", cls), {})[index] = own
    return [ClassGroups(each, _with_fused(each, options if each is cls else {}), own) for each, own in members.items()]


def _with_fused(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"fused": True, **options} if is_fused(cls) and not options.get("foreach") else dict(options)


def names_of_classes(classes: Sequence[type]) -> str:
    """The name of the class of all groups; else those of each group's class, separated by commas."""
    names = [each.__name__ for each in classes]
    return ", ".join(names if len(set(names)) > 1 else names[:1])


def check_optimizer_class(cls: type, bucket_params: Iterable[BucketParam], *, whole: bool) -> None:
    """Raise ``ValueError`` for a class whose update of an element depends on elements in other shards or segments.

    ``why_not_over`` has the rule. All ranks raise, whatever their shards hold.
    """
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(f"an optimizer class is a subclass of torch.optim.Optimizer, got {cls!r}")
    if issubclass(cls, torch.optim.LBFGS | torch.optim.SparseAdam):
        raise ValueError(
            f"{cls.__name__} cannot update flat shards: it needs all parameters at once, or sparse gradients; use it "
            f"as it is, with use_distributed_optimizer=False"
        )
    if whole and issubclass(cls, torch.optim.Muon | Muon):
        dims = (2,) if issubclass(cls, torch.optim.Muon) else (2, 3)
        for entry in bucket_params:
            if entry.owned.param.dim() not in dims:
                raise ValueError(
                    f"{cls.__name__} updates matrices, and parameter '{entry.owned.name}' has shape "
                    f"{list(entry.owned.param.shape)}: use a class of your own that updates the others otherwise"
                )
    option = "keep_matrices_whole=[their names]" if is_per_matrix(cls) else "keep_params_whole=True"
    why = why_not_over(cls, whole=whole, kept_whole=f"DistributedDataParallelConfig({option})")
    if why is not None:
        raise ValueError(why)


def why_not_over(cls: type, *, whole: bool, kept_whole: str) -> str | None:
    """Why an optimizer of this class may not step over shards; None where it may. One rule for all wrappers.

    Torch's classes are listed above. Other classes declare by an attribute what the update of an element depends on.
    ``elementwise = True``: this element's gradient and state. ``per_parameter = True``: the gradient and state of this
    element's parameter (LAMB, LARS), so that parameters must stay whole; with ``per_matrix = True`` too, of its matrix
    in a stack [experts, rows, columns]. A class that sums over all parameters (L-BFGS, Prodigy, D-Adaptation) cannot
    step over shards.

    whole       whether shards hold whole parameters, or of such a class whole matrices
    kept_whole  the option that keeps parameters whole, for the error
    """
    name = cls.__name__
    if is_elementwise(cls):
        return None
    if cls in PER_PARAMETER or getattr(cls, "per_parameter", False):
        if whole:
            return None
        return f"{name} updates whole parameters, and shards cut them apart: keep them whole, by {kept_whole}"
    return (
        f"{name} is not known to be elementwise, and ranks have shards: use one of "
        f"{', '.join(known.__name__ for known in _ELEMENTWISE)}; set {name}.elementwise = True if each element's "
        f"update depends on that element alone; or {name}.per_parameter = True if it depends on that parameter alone, "
        f"and keep parameters whole, by {kept_whole}. One that sums over all parameters (Prodigy, D-Adaptation) is a "
        f"stock optimizer for DistributedDataParallel with use_distributed_optimizer=False"
    )


def is_elementwise(cls: type) -> bool:
    """Whether the update of an element depends on this element's gradient and state alone."""
    return cls in _ELEMENTWISE or getattr(cls, "elementwise", False)


def is_per_matrix(cls: type) -> bool:
    """Whether the update of a stack's matrix depends on this matrix's gradient and state alone."""
    return cls is torch.optim.Muon or getattr(cls, "per_matrix", False)


def is_fused(cls: type) -> bool:
    """Whether torch has a fused kernel for this class on every device."""
    return cls in _FUSED


def is_capturable(cls: type, group: Mapping[str, Any]) -> bool:
    """Whether steps of a group read the learning rate, which is a tensor then, and counters on the device alone."""
    return cls is Muon or (is_fused(cls) and group["fused"])  # a subclass may read more


def is_of_torch(cls: type) -> bool:
    """Whether this is one of torch's own classes, which keep state for each parameter separately."""
    return cls in vars(torch.optim).values()


def counts_apart(cls: type) -> bool:
    """Whether this class is known to keep state, and count steps, for each parameter separately."""
    return is_of_torch(cls) or cls in (Lion, Muon)


def check_options(cls: type, options: Mapping[str, Any], groups: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise what the class's constructor raises for bad options, for those of each group too.

    torch's constructor does not check the options of groups: misspelt names and negative values would pass.
    """
    if any(given.get("differentiable") for given in (options, *groups.values())):
        raise ValueError("differentiable=True: the step works on masters, which no graph leads to; leave it out")
    cls([{"params": []}], **options)
    for index, given in groups.items():
        try:
            cls([{"params": []}], **{**options, **given})
        except (TypeError, ValueError) as error:
            raise type(error)(f"param_groups[{index}]: {error}") from None


def check_matrices(
    cls: type,
    options: Mapping[str, Any],
    groups: Mapping[int, Mapping[str, Any]],
    bucket_params: Iterable[BucketParam],
    assigned: Mapping[str, int],
) -> None:
    """Raise what ``Muon`` raises for a matrix that the options of its group do not fit.

    All ranks raise, though one rank alone updates the matrix: the others would wait for this rank for ever.

    assigned  of ``assign_groups``
    """
    if not issubclass(cls, Muon):
        return
    for entry in bucket_params:
        own = groups[assigned[entry.owned.name]]
        try:
            cls([torch.empty(entry.owned.param.shape, device="meta")], **{**options, **own})
        except ValueError as error:
            raise ValueError(f"parameter '{entry.owned.name}': {error}") from None


Selector = str | Sequence[str] | Callable[[str, torch.Tensor], bool]


def assign_groups(bucket_params: Iterable[BucketParam], groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Name of each parameter -> index of the first group that selects it; ``len(groups)`` for the rest.

    Each group's ``"params"`` is a name or pattern (``"*.bias"``), a sequence of them, or a function of a parameter's
    name and the parameter. Raises ``ValueError`` for a group that selects nothing, and for a name that matches nothing.
    """
    if isinstance(groups, Mapping | str) or not all(isinstance(group, Mapping) for group in groups):
        raise TypeError(f"param_groups is a sequence of dicts, one for each group; got {groups!r}")
    params = {entry.owned.name: entry.owned.param for entry in bucket_params}
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
    if callable(selector) and not isinstance(selector, nn.Module):
        return {name for name, param in params.items() if selector(name, param)}
    patterns: list[Any] = (
        list(selector) if isinstance(selector, Iterable) and not isinstance(selector, str) else [selector]
    )
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"param_groups[{index}]: select parameters by name, pattern or function of name and parameter; got "
                f"{type(pattern).__name__}"
            )
    return select_names(patterns, params, f"param_groups[{index}]")
