"""What the units of one model share: streams, the order of gathers and reductions, the pool of gradients.

    compute   | forward k        | forward k+1      |   ...   | backward k+1       | backward k         |
    gathers   |  k+1             |  k+2             |         |  k          | k-1  |             | k-2  |
    reduces                                                   |       k+2          |  k+1               |

Gathers and reductions run on streams and communicators of their own. In backward the next gather is issued before the
unit's reduction. Nothing here waits on the host but what a backend without streams (gloo) makes it wait for.
"""

import weakref
from functools import partial

import torch
from torch import nn
from torch.autograd import Variable

from ..ddp.bucket import Phase
from ..ddp.failure_report import FailureReporter
from ..ddp.iteration_checks import check_nothing_bypassed, check_nothing_pending
from ..ddp.launcher import BucketLauncher
from ..ddp.mapped_memory import MappedPool
from ..ddp.rank_grid import RankGrid, all_groups, with_separate_gather
from ..ddp.streams import OnStream, current_stream
from ..ddp.timeline import Timeline
from .memory import Meter
from .order import BackwardOrder, ForwardOrder
from .sharded_bucket import BucketEvents, ShardedBucket
from .unit import Unit, Use

__all__ = ["Root"]

GRAD_POOL_UNITS = 2
"""Units whose whole gradients have memory at once: the one that is being written, and reductions under way."""


class Root:
    """The state of one model: its units, and where its iteration stands.

    module  of the outermost unit; held weakly, as it owns this
    units   the outermost first, then in the order of ``named_modules``
    """

    def __init__(self, module: nn.Module, units: list[Unit]) -> None:
        self.module = weakref.ref(module)
        self.units = units
        self.buckets = [bucket for unit in reversed(units) for bucket in unit.buckets]  # about backward's order
        self.device = units[0].device
        self._unit_of = {id(bucket): unit for unit in units for bucket in unit.buckets}
        self.failures = FailureReporter()
        self.param_meter, self.grad_meter = Meter(), Meter()
        self._join_ranks()
        self._trainable = [bucket for bucket in self.buckets if bucket.trainable]
        self._connect()
        self.launcher = BucketLauncher(
            [bucket.bucket for bucket in self._trainable if bucket.bucket is not None],
            [bucket.reduction for bucket in self._trainable],
            None,
            self.failures,
            device=self.device,
        )
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        """Of gathers."""
        if self._copy_engines:
            self._map_memory()
        self._freed: list[torch.cuda.Event] = []  # after which gathers may reuse memory, not waited for yet

        # Forward.
        self._depth = 0  # units whose forward is running
        self.forward_order: ForwardOrder[Unit] = ForwardOrder()
        self.backward_order: BackwardOrder[Use] = BackwardOrder()

        # Backward.
        self.sync = True
        """False in every microbatch but the iteration's last."""
        self._task: int | None = None  # the outermost graph task; None outside
        self._tasks: set[int] = set()  # those whose end will be heard of
        self._entered: list[Unit] = []
        self._grad_holders: list[Unit] = []  # whose whole gradients have memory, as far as they come from the pool
        self._keeps_graph = False  # backward(create_graph=True): what it read is read again
        self._left_over = False  # some microbatches were not reduced over all ranks yet

    # ---- Forward. ----

    def enter_forward(self, unit: Unit) -> None:
        """A unit's forward starts: gather it, and what comes next; its parameters are there for the current stream."""
        recomputes = torch._C._current_graph_task_id() != -1
        following: Unit | None = None
        if not recomputes:
            if self._depth == 0:
                self._begin()
            following = self.forward_order.enter(unit)
        self.gather(unit)
        if unit.forward_prefetch is not None:
            for other in unit.forward_prefetch:
                self.gather(other)
        elif following is not None:
            self.gather(following)
        self.arrive(unit)
        self._depth += 1

    def leave_forward(self, unit: Unit, use: Use | None) -> None:
        """A unit's forward is over; ``use``: it left a graph."""
        self._depth -= 1
        if use is not None:
            self.backward_order.push(use)
        if unit.entered is None:
            reshards = unit.reshard_after_forward
            if reshards is None:
                reshards = unit is not self.units[0]
            # What backward begins with stays.
            if use is None or (reshards and not self.forward_order.came_last(unit)):
                self.release(unit)
        if self._depth == 0 and torch._C._current_graph_task_id() == -1:
            if use is None:
                self._release_all()
            if self.timeline is not None:
                self.timeline.forward_ended()

    def _begin(self) -> None:
        """The outermost forward starts."""
        if self.timeline is not None:
            self.timeline.forward_started()
        if self._task is not None:
            self.abandon()
        self.forward_order.begin()
        self.backward_order.begin()
        self.notice_changes()

    def notice_changes(self) -> None:
        """Shards that were changed since they were gathered are gathered anew, after whatever changed them."""
        if not any(bucket.changed for bucket in self.buckets):
            return
        if self.stream is not None:
            self.stream.wait_stream(current_stream(self.device))
        for unit in self.units:
            if unit.gathered and any(bucket.changed for bucket in unit.buckets):
                self.arrive(unit)
                self.release(unit)
                unit.gathered = False

    # ---- Parameters. ----

    def gather(self, unit: Unit) -> None:
        """Issue the gather of a unit's parameters, unless they are there."""
        if unit.gathered:
            return
        if self.stream is not None:
            for event in self._freed:
                self.stream.wait_event(event)
            self._freed.clear()
        unit.gathered = True
        for bucket in unit.buckets:
            bucket.start_gather(self.stream, self.timeline)

    def arrive(self, unit: Unit) -> None:
        """Have the current stream (CUDA), or this thread, wait for the gather."""
        for bucket in unit.buckets:
            if bucket.gather is not None:
                bucket.gather.arrive()

    def release(self, unit: Unit) -> None:
        """Let the whole parameters go, after what the current stream has been given so far."""
        if not (unit.gathered and unit.releasable):
            return
        self.arrive(unit)
        unit.gathered = False
        for bucket in unit.buckets:
            bucket.forget_params()
        if unit.freed is not None:
            unit.freed.record(current_stream(self.device))
            self._freed.append(unit.freed)

    def _release_all(self, keep_first: int = 0) -> None:
        kept = self.forward_order.first(keep_first)
        for unit in self.units:
            if unit not in kept and unit.entered is None:
                self.arrive(unit)  # also where nobody came to use it: the optimizer changes what a gather reads
                self.release(unit)

    # ---- Backward. ----

    def enter_backward(self, use: Use) -> None:
        """Backward has reached the outputs of a unit's forward."""
        unit = use.unit
        self._enter(unit)
        self.backward_order.enter(use)
        self.gather(unit)
        self._prefetch_backward(unit, use, 1)
        self.arrive(unit)
        unit.show_in_backward()
        if torch.is_grad_enabled():
            self._keeps_graph = True

    def leave_backward(self, unit: Unit, use: Use | None) -> None:
        """Backward has passed the unit's inputs, or ended."""
        if unit.entered is None:
            return
        unit.entered = None
        self._entered.remove(unit)
        unit.hide_after_backward()
        if self._keeps_graph:
            pass
        elif self.sync or unit not in self.forward_order.first(KEPT_UNITS):
            self.release(unit)
        if use is not None:
            self._prefetch_backward(unit, use, 2)  # before the reduction, which it would wait behind
        for bucket in unit.buckets:
            if bucket.has_pending:
                bucket.awaits_delayed = True
            elif bucket.trainable:
                self._pass(bucket)

    def _enter(self, unit: Unit) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            if self._task is None:
                self._task = task
                if self._left_over:
                    self._drop_what_was_cleared()
                if self.timeline is not None:
                    self.timeline.backward_started()
            self._tasks.add(task)
            Variable._execution_engine.queue_callback(_BackwardEnd(weakref.ref(self), task))
        if unit.entered is None:
            unit.entered = task
            self._entered.append(unit)

    def _prefetch_backward(self, unit: Unit, use: Use, count: int) -> None:
        if unit.backward_prefetch is not None:
            for other in unit.backward_prefetch:
                self.gather(other)
            return
        for following in self.backward_order.before(use, count):
            self.gather(following.unit)

    def end_backward(self, task: int) -> None:
        """A graph task is over, and with it every unit that it entered."""
        for unit in [unit for unit in self._entered if unit.entered == task]:
            self.leave_backward(unit, None)
        self._tasks.discard(task)
        if task != self._task:
            return
        self._task = None
        if self.timeline is not None:
            self.timeline.backward_ended(self.sync)
        if self._keeps_graph:  # a graph of these gradients reads the parameters: until the next forward
            self._keeps_graph = False
            if self.sync and not any(bucket.has_pending for bucket in self._trainable):
                self.finish()
            self._left_over = self._left_over or not self.sync
            return
        if self.sync:
            self._release_all()
            if not any(bucket.has_pending for bucket in self._trainable):
                self.finish()
            return
        self._left_over = True
        self._release_all(keep_first=KEPT_UNITS)
        for unit in self.forward_order.first(KEPT_UNITS + 1):
            self.gather(unit)

    def backward_failed(self, task: int) -> None:
        """A graph task was given up before its end: the modules have their shards again. The rest can wait."""
        for unit in self._entered:
            if unit.entered == task:
                unit.hide_after_backward()

    def abandon(self) -> None:
        """Give up what a backward that failed has left: what it did not reduce is lost."""
        self._task = None
        self._tasks.clear()
        self._keeps_graph = False
        for unit in self._entered:
            unit.entered = None
            unit.hide_after_backward()
        self._entered.clear()
        for bucket in self._trainable:
            self._settle(bucket)
            bucket.discard_grads()
        self._grad_holders.clear()
        self._release_all()

    # ---- Gradients. ----

    def finish_grad_sync(self) -> None:
        """Reduce what is left of the iteration, and wait: then ``.grad`` of every shard is complete."""
        check_nothing_pending((record for bucket in self._trainable for record in bucket.records), "finish_grad_sync()")
        self.finish()

    def finish(self) -> None:
        """The same, where nothing is pending."""
        self._check_nothing_bypassed()
        if self._left_over:
            for bucket in self._trainable:
                if not self._was_cleared(bucket) and (bucket.accumulated or bucket.reduction.shard.has_partial):
                    self._launch(bucket, final=True, written=bucket.accumulated)
            self._left_over = False
        for bucket in self._trainable:
            self._settle(bucket)
            bucket.reduction.shard.publish()
        if self.device.type == "cuda" and any(bucket.shard.device != self.device for bucket in self._trainable):
            current_stream(self.device).synchronize()  # the optimizer reads gradients on the host

    def _check_nothing_bypassed(self) -> None:
        pairs = [entry for bucket in self._trainable for entry in zip(bucket.pairs, bucket.records, strict=True)]
        try:
            check_nothing_bypassed(((pair.whole, record) for pair, record in pairs), "the end of the iteration")
        except RuntimeError:
            for pair, _ in pairs:
                pair.whole.grad = None
            raise

    def _drop_what_was_cleared(self) -> None:
        """Whoever clears ``.grad`` in the middle of an iteration gives up what the iteration holds elsewhere."""
        for bucket in self._trainable:
            self._was_cleared(bucket)

    def _was_cleared(self, bucket: ShardedBucket) -> bool:
        if not bucket.reduction.shard.was_cleared:
            return False
        self._settle(bucket)
        bucket.discard_grads()
        return True

    @property
    def unfinished(self) -> bool:
        """Whether gradients are not reduced yet, or not waited for."""
        return self._left_over or any(
            bucket.bucket is not None and not bucket.bucket.idle for bucket in self._trainable
        )

    def _pass(self, bucket: ShardedBucket) -> None:
        """All contributions of this backward are in."""
        bucket.awaits_delayed = False
        if bucket.keeps_grads and not self.sync:
            bucket.accumulated = True
            bucket.reduction.shard.hold()
            self._left_over = True
        else:
            self._launch(bucket, final=self.sync, written=True)

    def _launch(self, bucket: ShardedBucket, *, final: bool, written: bool) -> None:
        assert bucket.bucket is not None, "trainable"
        if bucket.bucket.phase is not Phase.ACCUMULATING:
            self._make_room(bucket)
        bucket.accumulated = False
        bucket.reduction.final, bucket.reduction.written = final, written
        self.launcher.launch(bucket.bucket)

    def _make_room(self, bucket: ShardedBucket) -> None:
        """Give a bucket's whole gradients memory; where a collective has it, wait for that first."""
        self._settle(bucket)
        assert bucket.bucket is not None, "trainable"
        if not bucket.grads.resident:
            self._take_from_pool(self._unit_of[id(bucket)], bucket)
            bucket.grads.take()
        if bucket.bucket.idle:
            bucket.bucket.phase = Phase.ACCUMULATING

    def _take_from_pool(self, unit: Unit, bucket: ShardedBucket) -> None:
        """Keep the number of units with whole gradients bounded: this one, and those that are being reduced.

        Units that are still being written are not waited for: their last gradient may come long after, or never.
        """
        if bucket.keeps_grads or unit in self._grad_holders:
            return
        launched = [held for held in self._grad_holders if _is_reduced(held)]
        for done in launched[: len(launched) - (GRAD_POOL_UNITS - 1)]:
            for other in done.buckets:
                self._settle(other)
        self._grad_holders.append(unit)

    def _settle(self, bucket: ShardedBucket) -> None:
        """Wait for a bucket's reduction, if it was launched, and take its memory back."""
        if bucket.bucket is None or bucket.bucket.phase not in (Phase.REDUCING, Phase.REDUCED):
            return
        self.launcher.wait_for(bucket.bucket)
        home = bucket.grads.stream  # to which the memory returns
        if home is not None and home != current_stream(self.device):
            home.wait_stream(current_stream(self.device))
        bucket.bucket.reset()
        if not bucket.keeps_grads:
            bucket.grads.release()
            unit = self._unit_of[id(bucket)]
            if unit in self._grad_holders and not any(b.trainable and b.grads.resident for b in unit.buckets):
                self._grad_holders.remove(unit)

    def _on_grad(self, bucket: ShardedBucket) -> None:
        unit = self._unit_of[id(bucket)]
        if unit.entered is None:  # the graph came to the parameter another way, or again
            self._enter(unit)

    def _on_delayed_wgrad(self, bucket: ShardedBucket) -> None:
        assert bucket.bucket is not None, "trainable"
        if self.stream is not None:
            bucket.bucket.streams.add(torch._C._cuda_getCurrentRawStream(self.device.index))
        if not bucket.awaits_delayed or bucket.has_pending:
            return
        self._pass(bucket)
        if self.sync and self._task is None and not any(other.has_pending for other in self._trainable):
            self.finish()

    # ---- Set-up. ----

    @property
    def timeline(self) -> Timeline | None:
        """The recording under way."""
        return self.launcher.timeline

    def _join_ranks(self) -> None:
        """Groups of their own for gathers, and what gradients are divided by: an expert has seen all ranks' tokens."""
        grids: dict[int, RankGrid] = {}
        self._copy_engines = any(unit.copy_engines for unit in self.units)
        size = self.units[0].grid.size
        with self.failures.watch("the making of process groups"):
            for bucket in self.buckets:
                grid = bucket.reduction.grid
                joined = grids.setdefault(id(grid.inner), grid)
                if joined.inner is joined.gather:
                    joined = grids[id(grid.inner)] = with_separate_gather(joined, copy_engines=self._copy_engines)
                bucket.reduction.grid = grid._replace(gather=joined.gather)
                bucket.reduction.factor = 1.0 / size
        self.failures.groups = all_groups([bucket.reduction.grid for bucket in self.buckets])

    def _map_memory(self) -> None:
        """Reserve, in memory that copy engines reach, what is gathered at once; units take turns in it.

        Memory that is freed in a pool is cut anew for what comes next, and all ranks take and free in one order.
        """
        assert self.stream is not None, "only on CUDA"
        by_group: dict[int, list[ShardedBucket]] = {}
        for bucket in self.buckets:
            if bucket.reduction.grid.inner_size > 1:
                by_group.setdefault(id(bucket.reduction.grid.gather), []).append(bucket)
        for buckets in by_group.values():
            gather = buckets[0].reduction.grid.gather
            assert gather is not None, "a group of more than one rank"
            pool = MappedPool(gather, self.device)
            sizes = [
                sum(_rounded(bucket.gathered.nbytes) for bucket in buckets if self._unit_of[id(bucket)] is unit)
                for unit in self.units
            ]
            if not buckets[0].keeps_params:
                sizes = [sizes[0], *sorted(sizes[1:], reverse=True)[: KEPT_UNITS + 1]]
            with OnStream(self.stream):
                with pool.allocating():
                    reserved = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
                pool.share()
                del reserved
            for bucket in buckets:
                bucket.gathered.pool = pool

    def _connect(self) -> None:
        here = weakref.ref(self)
        events = BucketEvents(
            partial(_on, here, Root._make_room),
            partial(_on, here, Root._on_grad),
            partial(_on, here, Root._on_delayed_wgrad),
        )
        numbers = {id(bucket): index for index, bucket in enumerate(self._trainable)}
        for unit in self.units:
            unit.root_reference = here
            for bucket in unit.buckets:
                bucket.connect(numbers.get(id(bucket), -1), self.failures, events)
                bucket.gathered.meter = self.param_meter
                if bucket.trainable:
                    bucket.grads.meter = self.grad_meter


KEPT_UNITS = 2
"""Units at the start of forward that stay gathered from a microbatch's backward to the next one's forward."""


def _rounded(nbytes: int) -> int:
    """What the caching allocator makes of it."""
    return -(-nbytes // 2**21) * 2**21


def _is_reduced(unit: Unit) -> bool:
    """Whether no gradient of it is being written."""
    return all(
        bucket.bucket is None or bucket.bucket.phase in (Phase.REDUCING, Phase.REDUCED) or bucket.bucket.idle
        for bucket in unit.buckets
    )


def _on(here: "weakref.ref[Root]", event: "object", bucket: ShardedBucket) -> None:
    live = here()
    if live is not None:
        event(live, bucket)  # type: ignore[operator]


class _BackwardEnd:
    """What the engine calls at the end of a graph task; it lets it go uncalled where backward fails."""

    __slots__ = ("_called", "_here", "_task")

    def __init__(self, here: "weakref.ref[Root]", task: int) -> None:
        self._here = here
        self._task = task
        self._called = False

    def __call__(self) -> None:
        self._called = True
        live = self._here()
        if live is not None:
            live.end_backward(self._task)

    def __del__(self) -> None:
        live = None if self._called else self._here()
        if live is not None:
            live.backward_failed(self._task)
