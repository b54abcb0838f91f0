"""Hooks around every optimizer's ``step``, which torch offers.

Before a step: a step over gradients that are not complete raises, and so does a step over parameters of before
``fully_shard``, which no forward uses. State that was loaded becomes shards. After a step the units of the changed
shards are to be gathered again: fused optimizers do not raise the version of tensors that they write.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...ddp.buckets.iteration_ends import is_watched, record_step
from ...ddp.optimizer.param_groups import is_elementwise, why_not_over
from ...ddp.torch_grads.optimizer import after_closure, prepare_skippable_step
from ...ddp.torch_grads.sharded_grad import step_began, step_ended
from ..tensors.parameter import ShardedParameter
from .optimizer_state import params_of, translate_state_dicts

if TYPE_CHECKING:
    from ..iteration.root import Root
    from ..unit.bucket import ShardedBucket

__all__ = ["bucket_of", "buckets_of", "check_class", "mark_replaced", "replaced_in", "watch_optimizers", "watch_steps"]

_BUCKET = "_maingrad_bucket"
_REPLACED = "_maingrad_sharded_in"


def watch_steps(bucket: "ShardedBucket") -> None:
    """Mark the bucket's shards, so that the hooks find the bucket from an optimizer's parameters."""
    watch_optimizers()
    here = weakref.ref(bucket)
    for pair in bucket.pairs:
        setattr(pair.sharded, _BUCKET, here)


def mark_replaced(param: Tensor, unit: str) -> None:
    """Mark the user's parameter of before sharding: ``unit`` has sharded it."""
    setattr(param, _REPLACED, unit)


def replaced_in(param: Tensor) -> str | None:
    """The unit that has sharded ``param``, a parameter of before sharding; None for any other parameter."""
    return getattr(param, _REPLACED, None)


@functools.cache
def watch_optimizers() -> None:
    """Install the hooks, once in a process."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _roots_of(buckets: Sequence["ShardedBucket"]) -> list["Root"]:
    """The models of the buckets, as far as a forward has run in them and they are alive."""
    return list({root for bucket in buckets if (root := bucket.root) is not None})


def bucket_of(param: Tensor) -> "ShardedBucket | None":
    """The bucket of a sharded parameter; None for any other one."""
    reference = param.__dict__.get(_BUCKET)
    return None if reference is None else reference()


def buckets_of(optimizer: Optimizer) -> list["ShardedBucket"]:
    """The buckets of the optimizer's sharded parameters."""
    references = {id(found): found for p in params_of(optimizer) if (found := p.__dict__.get(_BUCKET)) is not None}
    buckets = [reference() for reference in references.values()]
    return [bucket for bucket in buckets if bucket is not None]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    for param in params_of(optimizer):
        unit = replaced_in(param)
        if unit is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} was built before fully_shard: its parameters are those that {unit} had "
                f"before it was sharded, which no forward uses any more; build the optimizer from model.parameters() "
                f"after the last fully_shard call"
            )
    buckets = buckets_of(optimizer)
    if buckets:
        check_class(optimizer, buckets)
        translate_state_dicts(optimizer)
        prepare_skippable_step(optimizer)
    begin = functools.partial(_begin, optimizer, buckets)
    with_closure = after_closure(args, kwargs, begin, functools.partial(step_ended, optimizer)) if buckets else None
    if with_closure is None:
        begin()
    return with_closure


def _begin(optimizer: Optimizer, buckets: Sequence["ShardedBucket"]) -> None:
    """A step begins to read gradients. If the step has a closure, the closure has computed them before."""
    step = f"{type(optimizer).__name__}.step()"
    for bucket in buckets:
        if bucket.has_pending:
            raise RuntimeError(
                f"{step}: gradients of '{bucket.name}' wait for delayed weight gradients: run the modules' "
                f"backward_dw() or drain their WgradQueue, after the last backward and before the step"
            )
    for bucket in buckets:
        grads = None if bucket.round is None else bucket.round()
        if grads is None:
            continue
        if grads.under_way or not bucket.grad_bucket.idle or any(pair.whole.grad is not None for pair in bucket.pairs):
            raise RuntimeError(
                f"{step}: gradients of '{bucket.name}' are not reduced yet: run the last microbatch's backward outside "
                f"no_sync(), or call model.finish_grad_sync()"
            )
    for root in _roots_of(buckets):
        root.grads.step_began()
        if is_watched() and (model := root.module()) is not None:
            record_step(model, vars(optimizer).get("found_inf"))
    if buckets or any(isinstance(param, ShardedParameter) for param in params_of(optimizer)):
        step_began(optimizer)


def check_class(optimizer: Optimizer, buckets: Sequence["ShardedBucket"]) -> None:
    """Raise ``RuntimeError`` for a class whose update of one element depends on elements that other ranks may have.

    The plan decides which parameters are cut between ranks, and so all ranks raise alike.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam | torch.optim.Adafactor):
        raise RuntimeError(
            f"{name} cannot update sharded parameters: it needs whole gradients at once, their rows and columns, or "
            f"sparse ones; use an elementwise class of torch.optim"
        )
    cut = any(bucket.cuts_parameters for bucket in buckets)
    remedy = 'fully_shard(..., shard_atoms="whole"), or give maingrad.make_optimizer groups of maingrad.ddp.Muon'
    why = why_not_over(type(optimizer), whole=not cut, kept_whole=remedy)
    if why is not None:
        raise RuntimeError(why)
    if is_elementwise(type(optimizer)):
        return
    for info in (pair.sharded.shard for bucket in buckets for pair in bucket.pairs):
        if info.is_cut:
            raise RuntimeError(
                f"{name} updates whole parameters, and would take slices for them: parameter '{info.name}' is a slice "
                f"of tensor parallelism; use an elementwise class of torch.optim. If every rank holds the whole "
                f"parameter, set its mark tensor_model_parallel to False before fully_shard"
            )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    step_ended(optimizer)
    buckets = buckets_of(optimizer)
    for bucket in buckets:
        bucket.record_change()
    for root in _roots_of(buckets):
        root.grads.steps.record_update()
