"""What stock optimizers must be told, and what must be told of them: two hooks of torch's around every step.

A step over gradients that are still being reduced would read half of them, and one over the parameters of before
``fully_shard`` would update memory that nobody uses: both raise. After a step the units gather anew what it changed;
fused optimizers do not raise the version of what they write.

State dicts speak of whole parameters, from the optimizer's first one on: Adagrad has state before its first step. torch
lets hooks of theirs be registered on an optimizer that one has, and nobody tells of those that are made: two methods of
its base class are replaced by ones that register them.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...ddp.optimizer.param_groups import why_not_over
from ...ddp.stock.optimizer import after_closure
from ...ddp.stock.skipped_steps import prepare_skippable_step
from ..tensors.gradient import step_began, step_ended
from ..tensors.parameter import ShardedParameter
from .optimizer_state import translate_state_dicts

if TYPE_CHECKING:
    from ..unit.bucket import ShardedBucket

__all__ = ["mark_replaced", "replaced_in", "watch_optimizers", "watch_steps"]

_BUCKET = "_maingrad_bucket"
_REPLACED = "_maingrad_sharded_in"


def watch_steps(bucket: "ShardedBucket") -> None:
    """Have optimizers over this bucket's shards watched."""
    watch_optimizers()
    here = weakref.ref(bucket)
    for pair in bucket.pairs:
        setattr(pair.sharded, _BUCKET, here)


def mark_replaced(param: Tensor, unit: str) -> None:
    """Remember on the parameter of before that a unit has sharded it."""
    setattr(param, _REPLACED, unit)


def replaced_in(param: Tensor) -> str | None:
    """The unit that has sharded this parameter, where it is one of before."""
    return getattr(param, _REPLACED, None)


@functools.cache
def watch_optimizers() -> None:
    """Have torch tell of all optimizers' steps, from here on."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)
    for verb in ("state_dict", "load_state_dict"):
        setattr(Optimizer, verb, _translating(getattr(Optimizer, verb)))


def _translating(verb: Callable[..., Any]) -> Callable[..., Any]:
    """``verb`` of an optimizer that is known to be over shards, where it is."""

    @functools.wraps(verb)
    def translating(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if any(_BUCKET in param.__dict__ for param in _params_of(optimizer)):
            translate_state_dicts(optimizer)
        return verb(optimizer, *args, **kwargs)

    return translating


def _params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _buckets_of(optimizer: Optimizer) -> list["ShardedBucket"]:
    references = {id(found): found for p in _params_of(optimizer) if (found := p.__dict__.get(_BUCKET)) is not None}
    buckets = [reference() for reference in references.values()]
    return [bucket for bucket in buckets if bucket is not None]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    for param in _params_of(optimizer):
        unit = replaced_in(param)
        if unit is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} was built before fully_shard: it holds the parameters that {unit} had "
                f"before it was sharded, which no forward uses any more; build the optimizer from model.parameters() "
                f"after the last fully_shard call"
            )
    buckets = _buckets_of(optimizer)
    if buckets:
        _check_class(optimizer, buckets)
    if buckets:
        translate_state_dicts(optimizer)
        prepare_skippable_step(optimizer)
    begin = functools.partial(_begin, optimizer, buckets)
    with_closure = after_closure(args, kwargs, begin, functools.partial(step_ended, optimizer)) if buckets else None
    if with_closure is None:
        begin()
    return with_closure


def _begin(optimizer: Optimizer, buckets: Sequence["ShardedBucket"]) -> None:
    """The part of a step that reads gradients; a closure that computes them comes before it."""
    for bucket in buckets:
        why = bucket.why_unfinished
        if why is not None:
            bucket = next((other for other in buckets if other.has_pending), bucket)  # what the others wait for
            why = bucket.why_unfinished
            raise RuntimeError(f"{type(optimizer).__name__}.step(): gradients of '{bucket.name}' {why}")
    for bucket in buckets:
        if bucket.round is not None:
            bucket.round.had_delays = False
    if buckets or any(isinstance(param, ShardedParameter) for param in _params_of(optimizer)):
        step_began(optimizer)


def _check_class(optimizer: Optimizer, buckets: Sequence["ShardedBucket"]) -> None:
    """Raise ``RuntimeError`` for one whose update of an element depends on elements that other ranks may have.

    Which parameters are cut follows from the plan, and so is the same on all ranks.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam | torch.optim.Adafactor):
        raise RuntimeError(
            f"{name} cannot update sharded parameters: it needs whole gradients at once, their rows and columns, or "
            f"sparse ones; use an elementwise class of torch.optim"
        )
    cut = any(bucket.cuts_parameters for bucket in buckets)
    why = why_not_over(type(optimizer), whole=not cut, kept_whole='fully_shard(..., shard_atoms="whole")')
    if why is not None:
        raise RuntimeError(why)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    step_ended(optimizer)
    for bucket in _buckets_of(optimizer):
        bucket.note_change()
