"""``GradRounds``: the gradients of all units in an iteration, and the memory for them.

``GradRound`` has the table of states. The order of the methods of ``GradRounds`` is that of an iteration: ``begin`` (a
forward), ``backward_began``, ``backward_enters`` (a unit), ``make_room`` (the first write), ``leave`` (keeps or sends
gradients), ``backward_ended`` (sends the rest), ``_finish``.
"""

import enum
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...ddp.buckets import iteration_ends
from ...ddp.buckets.bucket import Bucket, Phase
from ...ddp.buckets.buffer import Meter
from ...ddp.buckets.checks import check_nothing_bypassed, check_nothing_pending
from ...ddp.buckets.iteration_ends import TrainedBackwards
from ...ddp.buckets.reducer import BucketLauncher
from ...ddp.collectives.failure_report import CollectiveError, FailureReporter
from ...ddp.collectives.in_flight import all_gather_shards
from ...ddp.collectives.rank_grid import RankGrid
from ...ddp.collectives.step_check import StepCheck
from ...ddp.collectives.streams import OnStream, current_stream
from ...ddp.torch_grads.sharded_grad import step_ended
from ..tensors.parameter import call_grad_hooks
from ..unit.bucket import ShardedBucket
from ..unit.plan import num_to_end, pool_limit
from ..unit.unit import Unit

__all__ = ["GradRound", "GradRounds", "State"]


class State(enum.Enum):
    """The state of a unit's gradients in the current iteration: see ``GradRound``."""

    IDLE = "idle"
    WRITING = "writing"
    KEPT = "kept"
    SENT_INSIDE = "sent inside the instance"
    SENT = "sent"

    __hash__ = object.__hash__  # enum's own __hash__ is Python code, and each move calls it twice


_MOVES = {
    State.IDLE: {State.WRITING},
    State.WRITING: {State.KEPT, State.SENT_INSIDE, State.SENT},
    State.KEPT: {State.WRITING, State.SENT},
    State.SENT_INSIDE: {State.WRITING, State.SENT},
    State.SENT: {State.WRITING, State.IDLE},
}


class GradRound:
    """The gradients of one unit in an iteration, from backward's first write to the sum over all ranks.

    ===========  ========================================  ========================================  =================
    state        what has happened in the iteration        whole gradients                           moves to
    ===========  ========================================  ========================================  =================
    IDLE         no backward has reached the unit          no memory                                 WRITING
    WRITING      backward has reached the unit's outputs   memory from the first write on, which     KEPT, SENT,
                                                           waits for a reduction that still uses it  SENT_INSIDE
    KEPT         backward has passed, and nothing is       stay. The next microbatch adds to them    WRITING, SENT
                 sent: ``reduces_once``, or some are
                 delayed
    SENT_INSIDE  sent inside the instance, in a            freed when another bucket needs the       WRITING, SENT
                 microbatch that is not the last           memory, or at the end
    SENT         sent over all ranks, in the last          freed likewise                            WRITING, IDLE
                 microbatch or after it
    ===========  ========================================  ========================================  =================

    Sent is launched: ``Phase.REDUCED`` of ``ddp/buckets/bucket.py`` says that the sum has arrived. With one instance
    SENT_INSIDE is over all ranks too: a unit that the last microbatch does not reach then has nothing more to send.

    From every state to IDLE if the iteration is given up: backward has failed, and the next forward begins a new one.

    Each move follows from the forwards and backwards that the program runs, and these are the same on all ranks. Each
    move to SENT_INSIDE or SENT is a collective. So no move may depend on what differs between ranks: which gradients a
    rank has written, which graphs are alive, or what ``.grad`` is.

    A unit has one round. If modules delay weight gradients, their buckets have a second round, which ends later.
    """

    __slots__ = ("__weakref__", "buckets", "delays", "state", "unit")

    def __init__(self, unit: Unit, buckets: tuple[ShardedBucket, ...]) -> None:
        self.unit = unit
        self.buckets = buckets
        self.state = State.IDLE
        """The current state; ``move`` sets it."""
        self.delays = buckets[0].delayed
        """Some gradients of this iteration are delayed, here or perhaps on another rank. So the round is sent once,
        after the last backward."""
        for bucket in buckets:
            bucket.round = weakref.ref(self)

    def move(self, state: State) -> None:
        """Go to another state. Raises ``RuntimeError`` for one that the table does not allow."""
        if state not in _MOVES[self.state]:
            raise RuntimeError(f"gradients of {self.unit.label} cannot go from {self.state.value} to {state.value}")
        self.state = state

    @property
    def under_way(self) -> bool:
        """A backward of the iteration has reached the unit, and the iteration has not ended."""
        return self.state is not State.IDLE

    @property
    def is_left(self) -> bool:
        """Backward has passed, and gradients are to be sent at the end of the iteration."""
        return self.state in (State.KEPT, State.SENT_INSIDE)

    @property
    def has_pending(self) -> bool:
        """Delayed gradients of the round are yet to be computed."""
        return any(bucket.has_pending for bucket in self.buckets)

    def reset(self) -> None:
        """The iteration is over, or given up."""
        self.state = State.IDLE
        self.delays = self.buckets[0].delayed


class GradRounds:
    """The rounds and reductions of one model.

    units     all units, the outermost first, connected
    buckets   their buckets with gradients, about in backward's order
    everyone  all ranks of the model, those of tensor parallelism too
    failures  reports collectives that fail
    """

    def __init__(
        self, units: Sequence[Unit], buckets: Sequence[ShardedBucket], everyone: RankGrid, failures: FailureReporter
    ) -> None:
        self._buckets = buckets
        self._device = device = units[0].device
        self._outermost, self._everyone, self._failures = units[0], everyone, failures
        self.meter = Meter()
        """Bytes of whole gradients."""
        for bucket in buckets:
            bucket.whole_grads.meter = self.meter
        self.launcher = BucketLauncher(
            [bucket.grad_bucket for bucket in buckets],
            [bucket.reduction for bucket in buckets],
            None if everyone.tensor is None else self._count_parts(everyone.tensor),
            failures,
            device=device,
        )
        grids = [bucket.reduction.grid for bucket in buckets]
        self.steps = StepCheck(everyone, failures, device, self.launcher.stream, grids)
        self._of: dict[Unit, list[GradRound]] = {}
        for unit in units:
            kinds = [
                tuple(b for b in unit.buckets if b.trainable and b.delayed is delayed) for delayed in (False, True)
            ]
            self._of[unit] = [GradRound(unit, kind) for kind in kinds if kind]
        self._all = [
            grad_round for unit in reversed(units) for grad_round in self._of[unit]
        ]  # about in backward's order
        self.were_mixed = False
        """The iteration was refused because ranks had run different units. The next forward makes all ranks alike."""
        self._due: list[GradRound] | None = None  # to be sent, after the iteration's last backward
        self._delayed_in: str | None = None  # a unit with delays in the iteration that has ended, until a step
        self._is_busy = False  # in a backward or a launch; stays True if that raises, until the iteration is given up
        self._home: torch.cuda.Stream | None = None  # the stream of forwards: sums take memory from it
        # The bound on whole gradients that are written or reduced. The outermost unit's do not count: they come first,
        # or after most activations are freed.
        pooled = [[bucket for bucket in unit.buckets if bucket.is_pooled] for unit in units[1:]]
        self._beside = {bucket: mine for mine in pooled for bucket in mine}
        self._limit = max((pool_limit([bucket.whole_grads.nbytes for bucket in mine]) for mine in pooled), default=0)
        self._launched: list[ShardedBucket] = []  # whose memory a reduction uses, in the order of launches
        self.trained = TrainedBackwards()

    @property
    def under_way(self) -> bool:
        """An iteration has begun and has not ended."""
        return any(grad_round.under_way for grad_round in self._all)

    @property
    def is_clear(self) -> bool:
        """No gradients of an iteration are left to be sent, or all ``.grad`` were set to None."""
        return not self.under_way or all(bucket.grad_shard.is_cleared for bucket in self._buckets)

    # ---- From a forward to the end of a backward. ----

    def begin(self) -> None:
        """An outermost forward starts. Outside of an iteration, free the memory of sums whose ``.grad`` is None."""
        step_ended(None)  # a step that has raised
        if self._device.type == "cuda":
            home = current_stream(self._device)
            if self._home is not None and self._home != home:
                self._home.wait_stream(home)  # before it uses memory again that is freed below
            self._home = home
        if self._is_busy:
            self.give_up()
        if not self.under_way:
            for bucket in self._buckets:
                bucket.grad_shard.free_if_cleared()
            if iteration_ends.is_watched() and all(bucket.grad_shard.is_cleared for bucket in self._buckets):
                self._discarded()

    def backward_began(self) -> None:
        """A backward of the iteration begins. Discard earlier gradients whose ``.grad`` was set to None meanwhile."""
        self._due = None
        self._is_busy = True
        self._notice_all_cleared()

    def backward_enters(self, unit: Unit, *, delays: bool) -> None:
        """Backward has reached the outputs of a unit; ``delays``: of a forward that ran under ``delayed_wgrad``."""
        for grad_round in self._of[unit]:
            grad_round.delays = grad_round.delays or delays
            if grad_round.state is not State.WRITING:
                grad_round.move(State.WRITING)

    def make_room(self, bucket: ShardedBucket) -> None:
        """Give the bucket's whole gradients memory. If a reduction still uses the memory, wait for it first."""
        # 5. The first GEMM of the bucket's parameters takes the memory of ``main_grad``, within the pool's bound.
        self.finish_reduction(bucket)
        if not bucket.whole_grads.resident:
            self._bound_pool(bucket)
            bucket.whole_grads.take()
        if bucket.grad_bucket.idle:
            bucket.grad_bucket.phase = Phase.ACCUMULATING

    def leave(self, unit: Unit, *, final: bool) -> None:
        """Backward has passed the unit, or has ended: keep or send; ``final``: the iteration's last backward.

        Nothing happens after a backward that was no part of an iteration.
        """
        for grad_round in self._of[unit]:
            if grad_round.state is not State.WRITING:
                continue
            if grad_round.has_pending:
                grad_round.delays = True
            # 7. Keep the gradients for the next microbatch, or launch their reduction.
            if grad_round.delays or (grad_round.buckets[0].reduces_once and not final):
                grad_round.move(State.KEPT)
                for bucket in grad_round.buckets:
                    bucket.grad_shard.defer()
            else:
                self._send(grad_round, final=final)

    def delayed_wgrad_done(self) -> None:
        """A delayed weight gradient was computed."""
        if self._due is not None:
            self._send_due()

    def backward_ended(self, *, final: bool) -> None:
        """After the iteration's last backward, send all rounds that are left; delayed ones when they are computed."""
        self._is_busy = False
        if final:
            self._check_nothing_beside()
            self._end_iteration()

    # ---- The end of an iteration. ----

    def finish_grad_sync(self, *, wait: bool = True) -> None:
        """Send all rounds that are left. Then, if ``wait``, ``.grad`` of every shard is complete."""
        self._check_complete("finish_grad_sync()" if wait else "start_grad_sync()")
        if self.under_way:
            self._notice_all_cleared()
            self._end_iteration(finish=wait)
        if wait:
            self._delayed_in = None

    def _end_iteration(self, *, finish: bool = True) -> None:
        self._due = [grad_round for grad_round in self._all if grad_round.is_left]
        self._send_due(finish=finish)

    def _send_due(self, *, complete: bool = True, finish: bool = True) -> None:
        """Send the rounds that are due, in an order that is the same on all ranks.

        complete  stop at the first round with delayed gradients that are not computed yet
        finish    if all are sent, wait for them and end the iteration

        Ranks may differ in which delayed gradients they compute, and when. So a round never overtakes another.
        """
        assert self._due is not None, "the iteration's backwards are over"
        while self._due and not (complete and self._due[0].has_pending):
            grad_round = self._due.pop(0)
            if not grad_round.delays:  # otherwise .grad may have been set to None before its gradients came
                self._notice_cleared(grad_round)
            self._send(grad_round, final=True, bounds_pool=finish)
        if not self._due:
            self._due = None
            if finish:
                self._finish()

    def _finish(self) -> None:
        """Wait for all reductions, complete ``.grad``, and call its hooks."""
        # 8. Wait for the reductions. Then ``.grad`` of the shards is complete.
        self._compare_steps()
        for bucket in self._buckets:
            bucket.grad_shard.show_zeros()  # no backward has reached it, or its .grad was set to None
        if self._everyone.tensor is not None:
            self._make_copies_alike(self._everyone.tensor)
        for bucket in self._buckets:
            bucket.grad_shard.publish()
        reached = [grad_round for grad_round in self._all if grad_round.under_way]
        self._delayed_in = next((grad_round.unit.label for grad_round in reached if grad_round.delays), None)
        for grad_round in reached:
            grad_round.move(State.IDLE)
        for grad_round in self._all:
            grad_round.reset()
        if self._device.type == "cuda" and any(bucket.shard.device != self._device for bucket in self._buckets):
            current_stream(self._device).synchronize()  # offloaded: the optimizer reads .grad on the host
        with torch.no_grad():
            if (model := self._outermost.module()) is not None:
                iteration_ends.end_iteration(model, self._everyone, self._failures, self.trained)
            call_grad_hooks(pair.sharded for bucket in self._buckets for pair in bucket.pairs)

    # ---- Copies on tensor-parallel ranks. Of equal gradients each rank gives a part, so that all have the same bits;
    # ---- of others ``.grad`` is the ranks' average. Both change nothing where they are done again: sums of earlier
    # ---- iterations may be in ``.grad``. Where a gradient is a sum of parts, each part counts as often as there are
    # ---- ranks.

    def _count_parts(self, group: dist.ProcessGroup) -> Callable[[Bucket], None]:
        """What multiplies partial gradients before a reduction, so that the average over ``group`` is their sum."""
        parts = {id(bucket.grad_bucket): found for bucket in self._buckets if (found := bucket.partial_grads())}

        def count(bucket: Bucket) -> None:
            if id(bucket) in parts:
                torch._foreach_mul_(parts[id(bucket)], float(group.size()))

        return count

    def _make_copies_alike(self, group: dist.ProcessGroup) -> None:
        """One collective an iteration for each dtype and kind: nothing of it depends on this rank's slices."""
        alike: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
        for bucket in self._buckets:
            for part, equal in bucket.grad_shard.copies():
                alike.setdefault((part.dtype, equal), []).append(part)
        with self._failures.watch("the gradients of copies on tensor-parallel ranks"):
            for (_, equal), parts in alike.items():
                numels = [part.numel() for part in parts]
                together = torch.cat([*parts, parts[0].new_zeros(-sum(numels) % group.size())])
                if equal:
                    all_gather_shards(together, group).wait()
                else:
                    dist.all_reduce(together, group=group)
                    together.div_(group.size())
                torch._foreach_copy_(parts, together[: sum(numels)].split(numels))

    def _compare_steps(self) -> None:
        """Compare the steps of ranks, and wait for all reductions. If ranks differ, discard the gradients and raise."""
        try:
            self.steps.start()
            self.steps.next_iteration()
            self._finish_reductions()  # before the host waits for the comparison
            self.steps.finish()
        except RuntimeError as error:
            if not isinstance(error, CollectiveError):
                self.give_up()
                self.were_mixed = True
                for pair in (pair for bucket in self._buckets for pair in bucket.pairs):
                    pair.sharded.grad = None  # gradients of other units may be in it
            raise

    def give_up(self) -> None:
        """Give the iteration up: wait for reductions under way, and discard the other gradients."""
        self._due = self._delayed_in = None
        self._is_busy = False
        self.trained.clear()
        self._finish_reductions()
        for grad_round in self._all:
            grad_round.reset()
            for bucket in grad_round.buckets:
                bucket.discard_grads()

    # ---- ``.grad`` that the program has set to None. ----

    def _discarded(self) -> None:
        """``.grad`` of all shards were set to None after an iteration."""
        if (model := self._outermost.module()) is not None:
            if any(bucket.grad_shard.has_scaler for bucket in self._buckets):
                iteration_ends.record_optimizer(model)
            iteration_ends.discard_iteration(model)

    def _notice_all_cleared(self) -> None:
        if self.trained and self.is_clear:
            self.trained.clear()
        for grad_round in self._all:
            if grad_round.is_left:
                self._notice_cleared(grad_round)

    def _notice_cleared(self, grad_round: GradRound) -> None:
        for bucket in grad_round.buckets:
            if bucket.grad_shard.was_cleared:
                self.finish_reduction(bucket)
                bucket.discard_grads()

    # ---- One reduction. ----

    def _send(self, grad_round: GradRound, *, final: bool, bounds_pool: bool = True) -> None:
        """Launch the reductions of a round. In state SENT_INSIDE only those across instances are left.

        bounds_pool  gradients that were kept now count for the pool, and the launch waits until the pool is within its
                     bound. False: no wait, because other parts of the model compute meanwhile
        """
        inside = grad_round.state is not State.SENT_INSIDE
        grad_round.move(State.SENT if final else State.SENT_INSIDE)
        for bucket in grad_round.buckets:
            if inside or bucket.reduction.grid.outer_size > 1:
                kept = grad_round.delays or bucket.reduces_once
                self._launch(grad_round.unit, bucket, bounds_pool=kept and bounds_pool, inside=inside, across=final)

    def _launch(self, unit: Unit, bucket: ShardedBucket, *, bounds_pool: bool, inside: bool, across: bool) -> None:
        if not bucket.is_written:
            self.make_room(bucket)  # this rank has written no gradient, and sends zeros
        if bounds_pool:
            self._bound_pool(bucket)
        was_busy, self._is_busy = self._is_busy, True
        unit.record_reduction(inside=inside, across=across)
        adds_to_total = self._claim(bucket)
        # The launcher's stream waits for the streams that have written. There ``GradShard`` reduce-scatters the whole
        # gradients, and adds this rank's part to its sums: in the last microbatch to those that ``.grad`` shows.
        self.launcher.launch(
            bucket.grad_bucket,
            partial(bucket.grad_shard.reduce, adds_to_total=adds_to_total, inside=inside, across=across),
        )
        self._is_busy = was_busy
        if bucket.is_pooled:
            self._launched.append(bucket)

    def _claim(self, bucket: ShardedBucket) -> bool:
        """``GradShard.claim`` on the stream of forwards, whose activations use the memory of the sums next."""
        home = self._home
        if home is None or home == current_stream(self._device):
            return bucket.grad_shard.claim()
        bucket.grad_bucket.streams.add(home.cuda_stream)  # the reduction waits for this stream
        with OnStream(home):
            return bucket.grad_shard.claim()

    def _bound_pool(self, bucket: ShardedBucket) -> None:
        """Wait for the oldest reductions, until the bucket's memory fits into the pool."""
        if bucket not in self._beside:
            return
        written = bucket.whole_grads.nbytes
        for other in self._beside[bucket]:
            if other is not bucket and other.whole_grads.resident and other not in self._launched:
                written += other.whole_grads.nbytes
        launched = [each.whole_grads.nbytes for each in self._launched]
        for other in self._launched[: num_to_end(written, launched, self._limit)]:
            self.finish_reduction(other)

    def _finish_reductions(self) -> None:
        """Wait for all reductions."""
        for bucket in self._buckets:
            self.finish_reduction(bucket)

    def finish_reduction(self, bucket: ShardedBucket) -> None:
        """Wait for the bucket's reduction, if one was launched, and free the memory of whole gradients."""
        if not bucket.is_launched:
            return
        bucket.grad_shard.landed()
        self.launcher.wait_for(bucket.grad_bucket)  # the current stream waits; over gloo the host
        home = bucket.whole_grads.stream  # the memory returns to this stream
        if home is not None and home != current_stream(self._device):
            home.wait_stream(current_stream(self._device))
        bucket.grad_bucket.reset()
        if bucket in self._launched:
            self._launched.remove(bucket)
        if not bucket.whole_grads_at_rest:
            bucket.whole_grads.release()

    # ---- Checks. ----

    def step_began(self) -> None:
        """An optimizer has begun to step over gradients of the iteration that has ended."""
        self._delayed_in = None

    def check_delays_are_over(self, what: str) -> None:
        """Raise ``RuntimeError`` if ``what``, which gathers, comes before delayed gradients of an iteration are sent.

        A round with delays is sent when its gradients are computed: before the gather on one rank, after it on another.
        So all ranks raise, also those without pending gradients.
        """
        if self._is_busy or (self._due is None and self._delayed_in is None):
            return  # a launch has raised: ``begin`` gives the iteration up
        if not all(bucket.grad_shard.is_cleared for bucket in self._buckets):
            unit = self._delayed_in or next(grad_round.unit.label for grad_round in self._all if grad_round.delays)
            if self._due is not None:
                self._send_due(complete=False)  # other ranks wait for these, and then raise as well
            raise RuntimeError(
                f"{what} after the iteration's last backward, in which weight gradients of {unit} were delayed: "
                f"compute these and call model.finish_grad_sync() first; or run all backwards but the last within "
                f"model.no_sync(), and call torch.autograd.grad before the last"
            )
        if self._due is None:  # all .grad were set to None
            self._delayed_in = None

    def _check_complete(self, caller: str) -> None:
        """Raise ``RuntimeError`` if a backward has failed, or a delayed weight gradient is not computed."""
        if self._is_busy:  # perhaps between two units
            where = next((f" in {each.unit.label}" for each in self._all if each.state is State.WRITING), "")
            raise RuntimeError(
                f"{caller} after a backward that raised an exception{where}: gradients are not complete; call "
                f"zero_grad(), and the next forward begins a new iteration"
            )
        check_nothing_pending((record for bucket in self._buckets for record in bucket.records), caller)
        self._check_nothing_beside()

    def _check_nothing_beside(self) -> None:
        """Raise for a gradient that has come to ``.grad`` of a whole parameter, and discard it."""
        pairs = [entry for bucket in self._buckets for entry in zip(bucket.pairs, bucket.records, strict=True)]
        try:
            check_nothing_bypassed(((pair.whole, record) for pair, record in pairs), "the end of the iteration")
        except RuntimeError:
            for pair, _ in pairs:
                pair.whole.grad = None
            raise
