"""``GradRounds``: the gradients of all units in an iteration (phases: ``unit/round.py``), and the memory for them.

The order of the methods is that of an iteration: ``begin`` (forward), ``backward_began``, ``enter`` (a unit),
``make_room`` (the first write), ``leave`` (keeps or sends gradients), ``backward_ended`` (sends the rest), ``_finish``.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ...ddp.buckets import iteration_ends
from ...ddp.buckets.bucket import Phase
from ...ddp.buckets.checks import check_nothing_bypassed, check_nothing_pending
from ...ddp.buckets.iteration_ends import TrainedBackwards
from ...ddp.buckets.launcher import BucketLauncher
from ...ddp.collectives.failure_report import CollectiveError, FailureReporter
from ...ddp.collectives.in_flight import InFlight, in_stages
from ...ddp.collectives.step_check import StepCheck
from ...ddp.collectives.streams import OnStream, current_stream
from ...ddp.torch_grads.sharded_grad import step_ended
from ...ddp.torch_internals import current_raw_stream
from ..tensors.parameter import call_grad_hooks
from ..unit.bucket import ShardedBucket
from ..unit.memory import Meter
from ..unit.round import RoundPhase
from ..unit.unit import Unit
from .grad_pool import GradPool
from .grad_set import GradSet, rounds_of
from .unit_log import UnitLog

__all__ = ["GradRounds"]


class GradRounds:
    """The rounds and reductions of one model.

    units     all units, the outermost first, connected
    buckets   their buckets with gradients, about in backward's order
    failures  reports collectives that fail
    device    where the model computes
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
        self._outermost, self._failures = units[0], failures
        self.meter = Meter()
        """Bytes of whole gradients."""
        for bucket in buckets:
            bucket.grads.meter = self.meter
            bucket.grad_shard.finish_reduction = _finishing(self, bucket)
        self.launcher = BucketLauncher(
            [bucket.grad_bucket for bucket in buckets if bucket.grad_bucket is not None],
            [bucket.reduction for bucket in buckets],
            None,
            failures,
            device=device,
        )
        grids = [bucket.reduction.grid for bucket in buckets]
        self.steps = StepCheck(units[0].grid, failures, device, self.launcher.stream, grids)
        self.log = UnitLog(units, self.steps) if self.steps.active else None
        for bucket in buckets:
            bucket.steps = self.steps
        self._of: dict[Unit, list[GradSet]] = {unit: rounds_of(unit) for unit in units}
        self._all = [grad_set for unit in reversed(units) for grad_set in self._of[unit]]  # about in backward's order
        self.were_mixed = False
        """The iteration was refused because ranks had run different units. The next forward makes all ranks alike."""
        self._due: list[GradSet] | None = None  # to be sent, after the iteration's last backward
        self._num_with_delays = 0  # rounds with delays in the last iteration
        self._sending = False  # stays True if a launch raises: the next forward gives the iteration up
        self._in_backward = False  # stays True if a backward raises
        self._home: torch.cuda.Stream | None = None  # the stream of forwards: sums take memory from it
        self._pool = GradPool(units)
        self.trained = TrainedBackwards()

    # ---- The life of a round. ----

    def begin(self) -> None:
        """An outermost forward starts. Outside of an iteration, free the memory of sums whose ``.grad`` is None."""
        step_ended(None)  # a step that has raised
        if self._device.type == "cuda":
            home = current_stream(self._device)
            if self._home is not None and self._home != home:
                self._home.wait_stream(home)  # before it uses memory again that is freed below
            self._home = home
        if self._sending:
            self._sending = False
            self.give_up()
        if not self.under_way:
            for bucket in self._buckets:
                bucket.grad_shard.free_if_cleared()
            if iteration_ends.is_watched() and all(bucket.grad_shard.is_cleared for bucket in self._buckets):
                self.discarded()

    def backward_began(self) -> None:
        """A backward of the iteration begins. Discard earlier gradients whose ``.grad`` was set to None meanwhile."""
        self._due = None
        self._in_backward = True
        self._notice_all_cleared()

    def enter(self, unit: Unit, *, delays: bool) -> None:
        """Backward has reached the outputs of a unit; ``delays``: of a forward that ran under ``delayed_wgrad``."""
        for grad_set in self._of[unit]:
            grad_set.round.enter(delays=delays)

    def make_room(self, bucket: ShardedBucket) -> None:
        """Give the bucket's whole gradients memory. If a reduction still uses the memory, wait for it first."""
        self._finish_reduction(bucket)
        assert bucket.grad_bucket is not None, "trainable"
        if not bucket.grads.resident:
            self._bound_pool(bucket)
            bucket.grads.take()
        if bucket.grad_bucket.idle:
            bucket.grad_bucket.phase = Phase.ACCUMULATING

    def leave(self, unit: Unit, *, final: bool) -> None:
        """Backward has passed the unit, or has ended: keep or send; ``final``: the iteration's last backward."""
        for grad_set in self._of[unit]:
            if grad_set.has_pending:
                grad_set.round.delays = True
            if grad_set.round.keeps_after(final=final):
                grad_set.round.keep()
                for bucket in grad_set.buckets:
                    bucket.grad_shard.defer()
            else:
                self._send(grad_set, final=final)

    def delayed_wgrad_done(self, bucket: ShardedBucket) -> None:
        """A delayed weight gradient was computed."""
        if self._device.type == "cuda" and bucket.grad_bucket is not None:
            bucket.grad_bucket.streams.add(current_raw_stream(self._device.index))  # which wrote it
        if self._due is not None:
            self._send_due()

    def backward_ended(self, *, final: bool) -> None:
        """After the iteration's last backward, send all rounds that are left; delayed ones when they are computed."""
        self._in_backward = False
        if final:
            self._check_nothing_bypassed()
            self._end_iteration()

    def start_grad_sync(self) -> None:
        """Send all rounds that are left, without waiting; ``finish_grad_sync`` waits."""
        self._check_complete("start_grad_sync()")
        if self.under_way:
            self._notice_all_cleared()
            self._due = [grad_set for grad_set in self._all if grad_set.round.is_left]
            self._send_due(finish=False)

    def finish_grad_sync(self) -> None:
        """Send all rounds that are left, and wait. Then ``.grad`` of every shard is complete."""
        self._check_complete("finish_grad_sync()")
        if self.under_way:
            self._notice_all_cleared()
            self._end_iteration()
        for grad_set in self._all:
            grad_set.round.had_delays = False

    def _check_complete(self, caller: str) -> None:
        """Raise ``RuntimeError`` if a backward has failed, or a delayed weight gradient is not computed."""
        if self._in_backward:  # perhaps between two units
            inside = (each.round.name for each in self._all if each.round.phase is RoundPhase.WRITING)
            raise RuntimeError(
                f"{caller} after a backward that raised an exception{next((f' in {name}' for name in inside), '')}: "
                f"gradients are not complete; call zero_grad(), and the next forward begins a new iteration"
            )
        check_nothing_pending((record for bucket in self._buckets for record in bucket.records), caller)
        self._check_nothing_bypassed()

    @property
    def is_clear(self) -> bool:
        """Whether no gradients of an iteration are left to be sent, or all ``.grad`` were set to None."""
        return not self.under_way or all(bucket.grad_shard.is_cleared for bucket in self._buckets)

    def give_up(self) -> None:
        """Give the iteration up: wait for reductions under way, and discard the other gradients."""
        self._due = None
        self._in_backward = False
        self.trained.clear()
        self._finish_reductions()
        for grad_set in self._all:
            grad_set.round.give_up()
            for bucket in grad_set.buckets:
                bucket.discard_grads()

    # ---- The end of an iteration. ----

    @property
    def under_way(self) -> bool:
        """Whether an iteration has begun and has not ended."""
        return any(grad_set.round.under_way for grad_set in self._all)

    def _end_iteration(self) -> None:
        self._due = [grad_set for grad_set in self._all if grad_set.round.is_left]
        self._send_due()

    def _send_due(self, *, complete: bool = True, finish: bool = True) -> None:
        """Send the rounds that are due, in an order that is the same on all ranks.

        complete  stop at the first round with delayed gradients that are not computed yet
        finish    if all are sent, wait for them and end the iteration

        Ranks may differ in which delayed gradients they compute, and when. So a round never overtakes another.
        """
        assert self._due is not None, "the iteration's backwards are over"
        while self._due and not (complete and self._due[0].has_pending):
            grad_set = self._due.pop(0)
            if not grad_set.round.delays:  # otherwise .grad may have been set to None before its gradients came
                self._notice_cleared(grad_set)
            self._send(grad_set, final=True, bounds_pool=finish)
        if not self._due:
            self._due = None
            if finish:
                self._finish()

    def _finish(self) -> None:
        self._compare_steps()
        for bucket in self._buckets:
            bucket.grad_shard.show_zeros()  # no backward has reached it, or its .grad was set to None
            bucket.grad_shard.publish()
        for grad_set in self._all:
            grad_set.round.end()
        self._num_with_delays = sum(grad_set.round.had_delays for grad_set in self._all)
        if self._device.type == "cuda" and any(bucket.shard.device != self._device for bucket in self._buckets):
            current_stream(self._device).synchronize()  # offloaded: the optimizer reads .grad on the host
        with torch.no_grad():
            if (model := self._outermost.module()) is not None:
                iteration_ends.end_iteration(model, self._outermost.grid, self._failures, self.trained)
            self.trained.clear()
            call_grad_hooks(pair.sharded for bucket in self._buckets for pair in bucket.pairs)

    def _compare_steps(self) -> None:
        """Compare the steps of ranks, and wait for all reductions. If ranks differ, discard the gradients and raise."""
        try:
            self.steps.start()
            self.steps.next_iteration()
            self._finish_reductions()  # before the host waits: without streams some collectives begin in the wait
            self.steps.finish()
        except RuntimeError as error:
            if not isinstance(error, CollectiveError):
                self._discard_mixed()
            raise

    def _discard_mixed(self) -> None:
        """Gradients of other units may be in ``.grad``."""
        self.give_up()
        self.were_mixed = True
        for bucket in self._buckets:
            for pair in bucket.pairs:
                pair.sharded.grad = None

    def check_delays_are_over(self, what: str) -> None:
        """Raise ``RuntimeError`` if ``what``, which gathers, comes before delayed gradients of an iteration are sent.

        A round with delays is sent when its gradients are computed: before the gather on one rank, after it on another.
        So all ranks raise, also those without pending gradients.
        """
        if self._sending or (self._due is None and not self._num_with_delays):
            return  # sending has raised: ``begin`` gives the iteration up
        num_with_delays = sum(grad_set.round.had_delays for grad_set in self._all)
        over = self._due is None and num_with_delays < self._num_with_delays  # an optimizer has stepped
        if not over and not all(bucket.grad_shard.is_cleared for bucket in self._buckets):
            unit = next(
                grad_set.round.name for grad_set in self._all if grad_set.round.delays or grad_set.round.had_delays
            )
            if self._due is not None:
                self._send_due(complete=False)  # other ranks wait for these, and then raise as well
            raise RuntimeError(
                f"{what} after the iteration's last backward, in which weight gradients of {unit} were delayed: "
                f"compute these and call model.finish_grad_sync() first; or run all backwards but the last within "
                f"model.no_sync(), and call torch.autograd.grad before the last"
            )
        if self._due is None:  # an optimizer has stepped, or all .grad were set to None
            self._num_with_delays = 0
            for grad_set in self._all:
                grad_set.round.had_delays = False

    def _check_nothing_bypassed(self) -> None:
        pairs = [entry for bucket in self._buckets for entry in zip(bucket.pairs, bucket.records, strict=True)]
        try:
            check_nothing_bypassed(((pair.whole, record) for pair, record in pairs), "the end of the iteration")
        except RuntimeError:
            for pair, _ in pairs:
                pair.whole.grad = None
            raise

    def discarded(self) -> None:
        """``.grad`` of all shards were set to None after an iteration."""
        if (model := self._outermost.module()) is not None:
            if any(bucket.grad_shard.has_scaler for bucket in self._buckets):
                iteration_ends.record_optimizer(model)
            iteration_ends.discard_iteration(model)

    def _notice_all_cleared(self) -> None:
        if self.trained and self.is_clear:
            self.trained.clear()
        for grad_set in self._all:
            if grad_set.round.is_left:
                self._notice_cleared(grad_set)

    def _notice_cleared(self, grad_set: GradSet) -> None:
        for bucket in grad_set.buckets:
            if bucket.grad_shard.was_cleared:
                self._finish_reduction(bucket)
                bucket.discard_grads()

    # ---- One reduction. ----

    def _send(self, grad_set: GradSet, *, final: bool, bounds_pool: bool = True) -> None:
        """Launch the reductions of a round. In phase PARTIAL only those across instances are left.

        bounds_pool  gradients that were kept now count for the pool, and the launch waits until the pool is within its
                     bound. False: no wait, because other parts of the model compute meanwhile
        """
        inside, kept = grad_set.round.phase is not RoundPhase.PARTIAL, grad_set.round.was_kept
        grad_set.round.send(final=final)
        for bucket in grad_set.buckets:
            if inside or bucket.reduction.grid.outer_size > 1:
                self._launch(bucket, kept=kept and bounds_pool, inside=inside, across=final)

    def _launch(self, bucket: ShardedBucket, *, kept: bool, inside: bool, across: bool) -> None:
        assert bucket.grad_bucket is not None, "trainable"
        if bucket.grad_bucket.phase is not Phase.ACCUMULATING:
            self.make_room(bucket)  # this rank has written no gradient, and sends zeros
        if kept:
            self._bound_pool(bucket)
        self._sending = True
        if self.log is not None:
            self.log.record_reduction(bucket, inside=inside, across=across)
        adds_to_total = self._claim(bucket)
        self.launcher.launch(
            bucket.grad_bucket, partial(_reduce, bucket, adds_to_total=adds_to_total, inside=inside, across=across)
        )
        self._sending = False
        bucket.grad_shard.launched()
        if not bucket.whole_grads_at_rest:
            self._pool.launched.append(bucket)

    def _claim(self, bucket: ShardedBucket) -> bool:
        """``GradShard.claim`` on the stream of forwards, whose activations use the memory of the sums next."""
        home = self._home
        if home is None or home == current_stream(self._device):
            return bucket.grad_shard.claim()
        assert bucket.grad_bucket is not None, "trainable"
        bucket.grad_bucket.streams.add(home.cuda_stream)  # the reduction waits for this stream
        with OnStream(home):
            return bucket.grad_shard.claim()

    def _bound_pool(self, bucket: ShardedBucket) -> None:
        """Wait for the oldest reductions, until the bucket's memory fits into the pool."""
        for other in self._pool.must_end_before(bucket):
            self._finish_reduction(other)

    def _finish_reductions(self) -> None:
        """Wait for all reductions, in one order on all ranks: without streams the second collective begins here."""
        for bucket in self._buckets:
            self._finish_reduction(bucket)

    def _finish_reduction(self, bucket: ShardedBucket) -> None:
        """Wait for the bucket's reduction, if one was launched, and free the memory of whole gradients."""
        if bucket.grad_bucket is None or bucket.grad_bucket.phase not in (Phase.REDUCING, Phase.REDUCED):
            return
        bucket.grad_shard.landed()
        self.launcher.wait_for(bucket.grad_bucket)
        home = bucket.grads.stream  # the memory returns to this stream
        if home is not None and home != current_stream(self._device):
            home.wait_stream(current_stream(self._device))
        bucket.grad_bucket.reset()
        if bucket in self._pool.launched:
            self._pool.launched.remove(bucket)
        if not bucket.whole_grads_at_rest:
            bucket.grads.release()


def _finishing(rounds: GradRounds, bucket: ShardedBucket) -> Callable[[], None]:
    references = weakref.ref(rounds), weakref.ref(bucket)

    def finish_reduction() -> None:
        alive = references[0](), references[1]()
        if alive[0] is not None and alive[1] is not None:
            alive[0]._finish_reduction(alive[1])

    return finish_reduction


def _reduce(bucket: ShardedBucket, grads: Tensor, *, adds_to_total: bool, inside: bool, across: bool) -> InFlight:
    stages = bucket.grad_shard.collect(
        bucket.reduction, grads, adds_to_total=adds_to_total, inside=inside, across=across
    )
    return in_stages(stages, (grads,))
