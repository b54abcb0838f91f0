"""``WrittenAhead``: weight gradients that forwards have added to ``main_grad``, and whose backward has not come.

A forward adds its gradient and gives the graph a token. Backward hands the token over: then the contribution counts as
any other. A graph that is freed without a backward leaves a contribution that nobody wants. If ``main_grad`` holds
nothing else, the next write takes it back; if it does, that write raises, and so does the reduction.
"""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...ddp.contract.main_grad import hand_over, record_of
from ...ddp.contract.record import GradRecord
from ..dense.linear import ProductUse

__all__ = ["deliver_written", "write_ahead"]


class WrittenAhead:
    """The contributions to one parameter's ``main_grad``. Its record holds this object until the iteration ends."""

    def __init__(self) -> None:
        self.tokens: list[StorageWeakRef] = []
        """A weak reference to the token of each, which lives as long as the forward's graph."""
        self.keeps = False
        """``main_grad`` holds a contribution whose backward has come."""

    def before_write(self, record: GradRecord) -> None:
        """Before a write of a backward."""
        self.drop_abandoned(record)
        self.keeps = True

    def drop_abandoned(self, record: GradRecord) -> None:
        """Take back what forwards wrote whose graphs are gone, if ``main_grad`` holds nothing else."""
        gone = [each for each in self.tokens if each.expired()]
        if not gone:
            return
        if self.keeps or len(gone) < len(self.tokens):
            raise _no_backward(record)
        self.tokens.clear()
        record.written = False
        if not record.first_write_overwrites:
            record.view.zero_()
        record.record_version()

    def check_all_came(self, record: GradRecord) -> None:
        """Raise ``RuntimeError`` where a contribution is left whose backward has not come."""
        self.drop_abandoned(record)
        if self.tokens:
            raise _no_backward(record)


def _no_backward(record: GradRecord) -> RuntimeError:
    return RuntimeError(
        f"parameter '{record.name}': a forward with mode='in_forward' has added its gradient, and its backward has "
        f"not come: run forwards without a backward under torch.no_grad(), call zero_grad() after a forward that "
        f"failed, or use mode='recompute'"
    )


def _open_ahead(record: GradRecord, token: Tensor) -> bool:
    """``GradRecord.open_for_write`` for a write in forward."""
    ahead = record.ahead
    if isinstance(ahead, WrittenAhead):
        ahead.drop_abandoned(record)
        keeps = ahead.keeps
    else:
        keeps = record.written
    keeps = keeps and record.closed is None  # of a closed bucket the write begins anew
    overwrite = record.open_for_write()
    if not isinstance(record.ahead, WrittenAhead):
        record.ahead = WrittenAhead()
    record.ahead.keeps = keeps
    record.ahead.tokens.append(StorageWeakRef(token.untyped_storage()))
    return overwrite


def write_ahead(use: ProductUse, operands: tuple[object, ...]) -> Tensor:
    """In forward, of a product with one weight: ``main_grad (+)= dW``. Returns the token of this contribution.

    The provider is ours, and the weight has no hooks. The graph keeps the token until backward hands it to
    ``deliver_written``.
    """
    (place,) = use.target.resolve([True])
    record = None if place is None else record_of(place.weight)
    assert place is not None and record is not None, "the caller asks can_write_in_forward"
    token = torch.empty(1, dtype=torch.uint8, device="cpu")
    overwrite = _open_ahead(record, token)
    use.wgrad.accumulate([place.accumulator], [overwrite], *operands)
    return token


def deliver_written(use: ProductUse, token: Tensor, poison: Tensor) -> Tensor | None:
    """In backward, after ``write_ahead``: the flag; returns what autograd gets.

    poison  [1]: 0, or NaN where what was written is no gradient: it is added to one element

    Raises ``RuntimeError`` where gradients were cleared meanwhile, and where a hook must see the gradient.
    """
    (place,) = use.target.resolve([True])
    record = None if place is None else record_of(place.weight)
    if place is None or place.accumulator is None or record is None:
        raise RuntimeError(
            f"{use.owner}: its forward wrote the weight's gradient, and since then the weight got a hook, was "
            f'frozen, or left its wrapper; change these before the forward, or use mode="recompute"'
        )
    ahead, mine = record.ahead, StorageWeakRef(token.untyped_storage())
    if not isinstance(ahead, WrittenAhead) or mine not in ahead.tokens:
        raise RuntimeError(
            f"{use.owner}: its forward wrote the gradient of parameter '{record.name}', as mode='in_forward' does, and "
            f"gradients were cleared or reduced before the backward came: call zero_grad() before the forward, and "
            f"each backward before the next iteration; or use mode='recompute'"
        )
    ahead.tokens.remove(mine)
    ahead.keeps = True
    record.num_fused_writes += 1
    place.accumulator.view(-1)[:1].add_(poison)
    return hand_over(place.weight, record, fused=True)
