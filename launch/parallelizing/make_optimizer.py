"""``make_optimizer``: one call for the optimizer of a model under any wrapper."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast, overload

import torch
from torch import Tensor, nn

from ...ddp import DistributedDataParallel, DistributedOptimizer, Muon
from ...ddp.buckets.bucket import BucketParam
from ...ddp.optimizer.param_groups import assign_groups, check_options, groups_by_class
from ...ddp.torch_grads.optimizer import after_closure
from ...fsdp import FSDPModule, translate_state_dicts
from ...fsdp.module import root_of
from ...fsdp.state.sharded_adam import sharded_class
from ...fsdp.state.sharded_optimizer import ShardedOptimizer

__all__ = ["make_optimizer"]

_FORM = {"state": "full", "moment_dtype": None, "offload_state": None}
"""Options that say in which form state is kept, and where, with their defaults."""


@overload
def make_optimizer(
    model: DistributedDataParallel,
    optimizer_class: type[torch.optim.Optimizer] = ...,
    *,
    max_grad_norm: float | None = ...,
    param_groups: Sequence[Mapping[str, Any]] = ...,
    **options: Any,
) -> DistributedOptimizer: ...
@overload
def make_optimizer(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer] = ...,
    *,
    max_grad_norm: float | None = ...,
    param_groups: Sequence[Mapping[str, Any]] = ...,
    **options: Any,
) -> Any: ...
def make_optimizer(
    model: nn.Module,
    optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    max_grad_norm: float | None = None,
    param_groups: Sequence[Mapping[str, Any]] = (),
    **options: Any,
) -> Any:
    """The optimizer of a model that ``parallelize`` returned, or that was wrapped or sharded by hand.

    optimizer_class  an elementwise class of ``torch.optim``, or one that declares ``elementwise = True``. AdamW, Adam
                     and SGD run as torch's fused kernels unless ``options`` say otherwise
    max_grad_norm    each step clips gradients by the norm over all ranks first; None: no clipping
    param_groups     dicts of options. ``"params"`` selects a group's parameters: a name or pattern (``"*.bias"``), a
                     sequence of them, or a function of name and parameter, which has the shape of the whole. A
                     parameter is in the first group that selects it; the others form the last group, which exists even
                     if it is empty. ``"optimizer"``: another class for the group
    options          of the class: ``lr``, ``betas``, ``weight_decay`` ...; and for AdamW and Adam ``state``,
                     ``moment_dtype`` and ``offload_state`` of ``DistributedOptimizer``, under any wrapper; for SGD and
                     Lion over a ``DistributedDataParallel``

    Returns a ``DistributedOptimizer`` over a ``DistributedDataParallel``, and over a sharded model an
    ``optimizer_class`` of its shards; a ``ShardedOptimizer`` where groups have other classes or ``Muon``; with
    ``state="compact"`` or ``offload_state`` a ``maingrad.fsdp.ShardedAdamW`` or ``ShardedAdam``, whose shards are bf16
    where ``fully_shard`` took a bf16 module. ``optimizer.grad_norm`` is the norm of the last step's gradients before
    clipping, a tensor of 0 dims, or None without clipping.

    Over a sharded model clipping is a hook of the optimizer's step, and ``GraphedTrainingStep`` refuses hooks: leave
    ``max_grad_norm`` out and call ``torch.nn.utils.clip_grad_norm_`` in the function that is captured.

    Raises ``TypeError`` for a model that is neither, and for options that the class does not know; ``ValueError`` for
    values that the class refuses and for groups that select nothing.
    """
    if isinstance(model, DistributedDataParallel):
        return DistributedOptimizer(
            model, optimizer_class=optimizer_class, max_grad_norm=max_grad_norm, param_groups=param_groups, **options
        )
    if not isinstance(model, FSDPModule):
        raise TypeError(
            f"make_optimizer takes a model under DistributedDataParallel or fully_shard, and {type(model).__name__} is "
            f'neither: model = maingrad.parallelize(model, "zero1") first, and give what it returns'
        )
    if "skip_nonfinite" in options:
        raise TypeError(
            f"make_optimizer(skip_nonfinite=...) is for models under DistributedDataParallel, and "
            f"{type(model).__name__} is sharded by fully_shard: leave skip_nonfinite out"
        )
    if max_grad_norm is not None and max_grad_norm <= 0:
        raise ValueError(f"max_grad_norm must be positive, or None for no clipping; got {max_grad_norm}")
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(f"optimizer_class is a subclass of torch.optim.Optimizer, got {optimizer_class!r}")
    form = {key: options.pop(key, default) for key, default in _FORM.items()}
    classes = groups_by_class(optimizer_class, options, param_groups)
    for each in classes:
        check_options(each.cls, each.options, each.groups)
    groups = _groups(model, param_groups)
    optimizer: Any
    if len(classes) == 1 and optimizer_class is not Muon:
        options = classes[0].options
        if form != _FORM:
            optimizer_class, options = sharded_class(optimizer_class), options | form
        optimizer = optimizer_class(groups, **options)
        translate_state_dicts(optimizer)
    elif form == _FORM:
        chosen = [(each.cls, each.options, {index: groups[index] for index in each.groups}) for each in classes]
        optimizer = ShardedOptimizer(chosen)
    else:
        raise ValueError(
            f'make_optimizer: state="compact" and offload_state are for Adam and AdamW over a sharded model, and a '
            f"group has {classes[-1].cls.__name__}: leave them out"
        )
    optimizer.grad_norm = None
    if max_grad_norm is not None:
        _clip_in_step(optimizer, max_grad_norm)
    return optimizer


def _groups(model: FSDPModule, param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """torch's groups of the trained shards: ``param_groups`` in their order, and the rest last, which may be empty."""
    root = root_of(model)
    whole = {id(pair.sharded): pair.whole for bucket in root.buckets for pair in bucket.pairs}
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    # As far as groups are assigned by it: the name, and the whole parameter for its shape, dtype and attributes.
    bucket_params = [SimpleNamespace(owned=SimpleNamespace(name=name, param=whole.get(id(p), p))) for name, p in named]
    chosen = assign_groups(cast("list[BucketParam]", bucket_params), param_groups)
    members: list[list[Tensor]] = [[] for _ in range(len(param_groups) + 1)]
    for name, param in named:
        members[chosen[name]].append(param)
    return [
        {**{key: value for key, value in group.items() if key != "optimizer"}, "params": inside}
        for group, inside in zip([*param_groups, {}], members, strict=True)
    ]


def _clip_in_step(optimizer: Any, max_norm: float) -> None:
    """Clip the gradients of ``optimizer``'s parameters at the begin of each step; after the closure, if it has one."""

    def clip() -> None:
        grads = [param for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.nn.utils.get_total_norm([param.grad for param in grads])
        # torch's GradScaler leaves it to fused kernels to unscale: gradients are still scaled here.
        scale = vars(optimizer).get("grad_scale")
        optimizer.grad_norm = norm if scale is None else norm / scale
        torch.nn.utils.clip_grads_with_norm_(grads, max_norm, optimizer.grad_norm)

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        with_closure = after_closure(args, kwargs, clip)
        if with_closure is None:
            clip()
        return with_closure

    optimizer.register_step_pre_hook(before_step)
