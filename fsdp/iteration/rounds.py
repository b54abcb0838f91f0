"""The rounds of a model's units (``grad_round.py``): memory for what backward writes, reductions, the iteration's end.

Read from top to bottom, this is the way of a unit's gradients: ``enter``, the first write (``make_room``), ``leave``,
which keeps or sends them, ``backward_ended``, which sends what is left, and ``_finish``.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...ddp.buckets.bucket import Phase
from ...ddp.buckets.checks import check_nothing_bypassed, check_nothing_pending
from ...ddp.buckets.launcher import BucketLauncher
from ...ddp.collectives.failure_report import FailureReporter
from ...ddp.collectives.in_flight import InFlight, in_stages
from ...ddp.collectives.streams import OnStream, current_stream
from ...ddp.torch_internals import current_raw_stream
from ..tensors.gradient import step_ended
from ..tensors.parameter import call_grad_hooks
from ..unit.bucket import ShardedBucket
from ..unit.memory import Meter
from ..unit.round import Round, RoundPhase
from ..unit.unit import Unit
from .grad_pool import GradPool

__all__ = ["GradRounds"]


class _Going(NamedTuple):
    """One round, and the buckets whose gradients go it."""

    round: Round
    buckets: tuple[ShardedBucket, ...]

    @property
    def has_pending(self) -> bool:
        return any(bucket.has_pending for bucket in self.buckets)


class GradRounds:
    """The gradients of one model.

    units    of the model, the outermost first, connected
    buckets  those of them with gradients, about in backward's order
    """

    def __init__(
        self,
        units: Sequence[Unit],
        buckets: Sequence[ShardedBucket],
        failures: FailureReporter,
        device: torch.device,
    ) -> None:
        self._buckets = buckets
        self._device = device
        self.meter = Meter()
        """Memory of whole gradients."""
        for bucket in buckets:
            bucket.grads.meter = self.meter
            bucket.grad_shard.settle = _settling(self, bucket)
        self.launcher = BucketLauncher(
            [bucket.bucket for bucket in buckets if bucket.bucket is not None],
            [bucket.reduction for bucket in buckets],
            None,
            failures,
            device=device,
        )
        self._of: dict[Unit, list[_Going]] = {unit: _rounds_of(unit) for unit in units}
        self._all = [going for unit in reversed(units) for going in self._of[unit]]  # about in backward's order
        self._due: list[_Going] | None = None  # what an iteration whose backwards are over has still to send
        self._num_waited = 0  # rounds, at the end of the last iteration
        self._sending = False  # also after a reduction was refused: nobody else gives the iteration up
        self._home: torch.cuda.Stream | None = None  # of forwards: sums take their memory there and give it back there
        self._pool = GradPool(units)

    # ---- The life of a round. ----

    def begin(self) -> None:
        """A forward starts: after an iteration's end the memory of gradients that were cleared is not needed."""
        step_ended(None)  # one that has raised
        if self._device.type == "cuda":
            home = current_stream(self._device)
            if self._home is not None and self._home != home:
                self._home.wait_stream(home)  # before it uses again what is let go here
            self._home = home
        if self._sending:
            self._sending = False
            self.give_up()
        if not self._under_way:
            for bucket in self._buckets:
                bucket.grad_shard.forget_cleared()

    def backward_began(self) -> None:
        """Whoever has cleared ``.grad`` in the middle of an iteration gives up what it holds elsewhere."""
        self._due = None
        self._notice_all_cleared()

    def enter(self, unit: Unit, *, waits: bool) -> None:
        """Backward has come to a unit; ``waits``: to a forward of it that ran under ``delayed_wgrad``."""
        for going in self._of[unit]:
            going.round.enter(waits=waits)

    def make_room(self, bucket: ShardedBucket) -> None:
        """Give a bucket's whole gradients memory; where a collective has it, wait for that first."""
        self._settle(bucket)
        assert bucket.bucket is not None, "trainable"
        if not bucket.grads.resident:
            self._make_way(bucket)
            bucket.grads.take()
        if bucket.bucket.idle:
            bucket.bucket.phase = Phase.ACCUMULATING

    def note_stream(self, bucket: ShardedBucket) -> None:
        """A gradient was written on the current stream."""
        if self._device.type == "cuda" and bucket.bucket is not None:
            bucket.bucket.streams.add(current_raw_stream(self._device.index))

    def leave(self, unit: Unit, *, final: bool) -> None:
        """Backward has passed the unit, or ended; ``final``: it is the iteration's last."""
        for going in self._of[unit]:
            if going.has_pending:
                going.round.waits = True
            if going.round.keeps_after(final=final):
                going.round.keep()
                for bucket in going.buckets:
                    bucket.grad_shard.hold()
            else:
                self._send(going, final=final)

    def delayed_wgrad_done(self, bucket: ShardedBucket) -> None:
        """A delayed weight gradient was computed."""
        self.note_stream(bucket)
        if self._due is not None:
            self._send_due()

    def backward_ended(self, *, final: bool) -> None:
        """After the iteration's last backward all that is left is sent, in one order; the rest when it is computed."""
        if final:
            self._check_nothing_bypassed()
            self._end_iteration()

    def start_grad_sync(self) -> None:
        """Send what is left of the iteration; ``finish_grad_sync`` waits for it."""
        self._check_complete("start_grad_sync()")
        if self._under_way:
            self._notice_all_cleared()
            self._due = [going for going in self._all if going.round.is_left]
            self._send_due(finish=False)

    def finish_grad_sync(self) -> None:
        """Reduce what is left of the iteration, and wait: then ``.grad`` of every shard is complete."""
        self._check_complete("finish_grad_sync()")
        if self._under_way:
            self._notice_all_cleared()
            self._end_iteration()
        for going in self._all:
            going.round.has_waited = False

    def _check_complete(self, caller: str) -> None:
        """Every backward of the iteration has ended, and every delayed weight gradient is computed."""
        failed = next((going.round.name for going in self._all if going.round.phase is RoundPhase.WRITING), None)
        if failed is not None:
            raise RuntimeError(
                f"{caller} after a backward that raised an exception in {failed}: gradients are not "
                f"complete; call zero_grad(), and the next forward begins a new iteration"
            )
        check_nothing_pending((record for bucket in self._buckets for record in bucket.records), caller)
        self._check_nothing_bypassed()

    @property
    def is_clear(self) -> bool:
        """Whether no microbatch has left anything that is not summed up, or all of it was cleared."""
        return not self._under_way or all(bucket.grad_shard.is_cleared for bucket in self._buckets)

    def give_up(self) -> None:
        """Lose what is not reduced; what is under way ends."""
        self._due = None
        self._settle_all()
        for going in self._all:
            going.round.give_up()
            for bucket in going.buckets:
                bucket.discard_grads()

    # ---- The end of an iteration. ----

    @property
    def _under_way(self) -> bool:
        return any(going.round.under_way for going in self._all)

    def _end_iteration(self) -> None:
        self._due = [going for going in self._all if going.round.is_left]
        self._send_due()

    def _send_due(self, *, complete: bool = True, finish: bool = True) -> None:
        """All ranks send in one order: which delayed gradients are missing, and how long, may differ between them.

        complete  wait for those that are missing here
        finish    with the last of them the iteration ends, which waits for all
        """
        assert self._due is not None, "the iteration's backwards are over"
        while self._due and not (complete and self._due[0].has_pending):
            going = self._due.pop(0)
            if not going.round.waits:  # .grad that is cleared before a delayed gradient comes does not give that one up
                self._notice_cleared(going)
            self._send(going, final=True, makes_way=finish)
        if not self._due:
            self._due = None
            if finish:
                self._finish()

    def _finish(self) -> None:
        self._settle_all()
        for bucket in self._buckets:
            bucket.grad_shard.show_zeros()  # where no backward came, or all that came was cleared
            bucket.grad_shard.publish()
        for going in self._all:
            going.round.end()
        self._num_waited = sum(going.round.has_waited for going in self._all)
        if self._device.type == "cuda" and any(bucket.shard.device != self._device for bucket in self._buckets):
            current_stream(self._device).synchronize()  # the optimizer reads gradients on the host
        with torch.no_grad():
            call_grad_hooks(pair.sharded for bucket in self._buckets for pair in bucket.pairs)

    def check_delays_are_over(self, what: str) -> None:
        """Refuse ``what`` sends, after an iteration's last backward in which gradients were delayed.

        These are sent as they are computed, which may be now on one rank, and after what this sends on another. So all
        ranks refuse, those too that have none pending.
        """
        if self._due is None and not self._num_waited:
            return
        num_waited = sum(going.round.has_waited for going in self._all)
        over = self._due is None and num_waited < self._num_waited  # an optimizer has stepped
        if not over and not all(bucket.grad_shard.is_cleared for bucket in self._buckets):
            unit = next(going.round.name for going in self._all if going.round.waits or going.round.has_waited)
            if self._due is not None:
                self._send_due(complete=False)  # other ranks wait for it, and come here then
            raise RuntimeError(
                f"{what} after the iteration's last backward, in which weight gradients of {unit} were delayed: "
                f"compute these and call model.finish_grad_sync() first; or hold model.no_sync() around all backwards "
                f"but the last, and call torch.autograd.grad before it"
            )
        if self._due is None:  # that iteration was stepped with or thrown away: the next one may have many forwards
            self._num_waited = 0
            for going in self._all:
                going.round.has_waited = False

    def _check_nothing_bypassed(self) -> None:
        pairs = [entry for bucket in self._buckets for entry in zip(bucket.pairs, bucket.records, strict=True)]
        try:
            check_nothing_bypassed(((pair.whole, record) for pair, record in pairs), "the end of the iteration")
        except RuntimeError:
            for pair, _ in pairs:
                pair.whole.grad = None
            raise

    def _notice_all_cleared(self) -> None:
        for going in self._all:
            if going.round.is_left:
                self._notice_cleared(going)

    def _notice_cleared(self, going: _Going) -> None:
        for bucket in going.buckets:
            if bucket.grad_shard.was_cleared:
                self._settle(bucket)
                bucket.discard_grads()

    # ---- One reduction. ----

    def _send(self, going: _Going, *, final: bool, makes_way: bool = True) -> None:
        """Reduce what the round has; across instances alone, where the rest was done in earlier microbatches.

        makes_way  the pool takes what was kept, and stays bounded: not where others compute meanwhile, who would wait
        """
        inside, kept = going.round.phase is not RoundPhase.PARTIAL, going.round.was_kept
        going.round.send(final=final)
        for bucket in going.buckets:
            if inside or bucket.reduction.grid.outer_size > 1:
                self._launch(bucket, kept=kept and makes_way, inside=inside, across=final)

    def _launch(self, bucket: ShardedBucket, *, kept: bool, inside: bool, across: bool) -> None:
        assert bucket.bucket is not None, "trainable"
        if bucket.bucket.phase is not Phase.ACCUMULATING:
            self.make_room(bucket)  # this rank has written nothing: what it sends is zeros
        if kept:
            self._make_way(bucket)  # its memory comes into the pool
        self._sending = True
        keeps_total = self._claim(bucket)
        self.launcher.launch(
            bucket.bucket, partial(_reduce, bucket, keeps_total=keeps_total, inside=inside, across=across)
        )
        self._sending = False
        bucket.grad_shard.launched()
        if not bucket.keeps_grads:
            self._pool.launched.append(bucket)

    def _claim(self, bucket: ShardedBucket) -> bool:
        """Have memory for the sums, of the stream whose activations get it next."""
        home = self._home
        if home is None or home == current_stream(self._device):
            return bucket.grad_shard.claim()
        assert bucket.bucket is not None, "trainable"
        bucket.bucket.streams.add(home.cuda_stream)  # the reduction waits for it
        with OnStream(home):
            return bucket.grad_shard.claim()

    def _make_way(self, bucket: ShardedBucket) -> None:
        """Wait for as many reductions as keep the pool bounded."""
        for other in self._pool.in_the_way(bucket):
            self._settle(other)

    def _settle_all(self) -> None:
        """Wait for reductions as they were launched: how many the pool has waited for may differ between ranks, and
        without streams the collective across instances begins in the wait."""
        for bucket in [*self._pool.launched, *self._buckets]:
            self._settle(bucket)

    def _settle(self, bucket: ShardedBucket) -> None:
        """Wait for a bucket's reduction, if it was launched, and take its memory back."""
        if bucket.bucket is None or bucket.bucket.phase not in (Phase.REDUCING, Phase.REDUCED):
            return
        bucket.grad_shard.landed()
        self.launcher.wait_for(bucket.bucket)
        home = bucket.grads.stream  # to which the memory returns
        if home is not None and home != current_stream(self._device):
            home.wait_stream(current_stream(self._device))
        bucket.bucket.reset()
        if bucket in self._pool.launched:
            self._pool.launched.remove(bucket)
        if not bucket.keeps_grads:
            bucket.grads.release()


def _settling(rounds: GradRounds, bucket: ShardedBucket) -> Callable[[], None]:
    references = weakref.ref(rounds), weakref.ref(bucket)

    def settle() -> None:
        alive = references[0](), references[1]()
        if alive[0] is not None and alive[1] is not None:
            alive[0]._settle(alive[1])

    return settle


def _rounds_of(unit: Unit) -> list[_Going]:
    """One round of a unit's gradients; of those that its modules delay another, which is sent after the first."""
    found: list[_Going] = []
    for delayed in (False, True):
        buckets = tuple(bucket for bucket in unit.buckets if bucket.trainable and bucket.delayed is delayed)
        if buckets:
            going = _Going(Round(unit.label, keeps=buckets[0].holds_grads, delayed=delayed), buckets)
            for bucket in buckets:
                bucket.round = going.round
            found.append(going)
    return found


def _reduce(bucket: ShardedBucket, grads: Tensor, *, keeps_total: bool, inside: bool, across: bool) -> InFlight:
    stages = bucket.grad_shard.collect(bucket.reduction, grads, keeps_total=keeps_total, inside=inside, across=across)
    return in_stages(stages, (grads,))
