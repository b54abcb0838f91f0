"""``StepCheck``: ranks compare which units they have gathered and reduced, and which steps they took.

The ranks of a group meet in collectives by number alone: each rank's third collective meets the third of the others. If
one rank gathers a layer where another gathers a different layer of the same size, both get mixed weights. If one rank
skips a batch, the gradients of different steps are averaged. No collective fails. So each rank notes what it does, and
behind each reduction of all gradients, once an iteration as a rule, the ranks reduce one row of integers for each
group, with MAX::

    hash of gathers and reductions | whether groups so far differ | counts | the same three, negative

The maxima of ``x`` and ``-x`` tell whether ``x`` is equal on all ranks. Groups come one after the other, those of
experts first. All but the hash is carried from one group to the next, so that all ranks raise.

CPU   the host waits in the same call, before gradients are used
CUDA  the row travels behind the iteration's reductions, and the host reads it at the same place of the next iteration.
      Its event has completed by then, as a rule. All ranks raise at this one place. If each rank raised where it finds
      the row complete, it would leave the others alone in a collective
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .failure_report import FailureReporter, gather
from .in_flight import in_stages
from .rank_grid import RankGrid
from .streams import OnStream, is_capturing

__all__ = ["NUM_COLUMNS", "GroupLog", "StepCheck"]

T = TypeVar("T")

_KINDS = ("gathered", "reduced")
NUM_COLUMNS = 2 * (1 + 1 + 4)
"""Integers, of 8 bytes, of the row that a group keeps on its device."""
_LIMIT = 4096  # entries that a log keeps: an evaluation may have any number
_OTHER_STEPS = {
    1: "ranks have skipped different batches before iteration {number}, and gradients of different steps were "
    "averaged: forwards whose gradients were not used: {found}. Decide on all ranks alike whether to skip (all-reduce "
    "what decides, then model.abandon_iteration() of DistributedDataParallel on all ranks); a forward on one rank that "
    "trains nothing runs under torch.no_grad() or after model.eval()",
    2: "ranks have taken different numbers of optimizer steps before iteration {number}: {found}. Their weights are no "
    "longer those of one model. Decide on all ranks alike whether to step (all-reduce what decides); load a "
    "checkpoint, or call broadcast_params() of DistributedDataParallel, to go on",
    3: "ranks have run different numbers of backwards outside no_sync() in iteration {number}: at least {found}. Each "
    "of these reduces gradients, and meets the same one of the other ranks: run equally many on all ranks, and under "
    "no_sync() those of which ranks run different numbers",
}
"""By column of the counts."""


class _Entries:
    """This rank's gathers, or reductions, on one group since the last comparison: indices of names."""

    __slots__ = ("digest", "first")

    def __init__(self) -> None:
        self.digest = 0
        """Hash of all entries."""
        self.first: list[int] = []
        """The first entries, by which a difference is named."""

    def add(self, index: int) -> None:
        self.digest = _hashed(self.digest, index)
        if len(self.first) < _LIMIT:
            self.first.append(index)


class GroupLog:
    """The order of this rank's collectives on one process group.

    group  more than one rank
    over   the group of the same ranks that is reduced over
    """

    def __init__(self, group: dist.ProcessGroup, over: dist.ProcessGroup) -> None:
        self.group = group
        self.over = over
        self.names: list[str] = []
        """Names of what is gathered and reduced, in an order that is equal on all ranks of the group."""
        self.entries = [_Entries() for _ in _KINDS]

    def add_name(self, name: str) -> int:
        """Returns the name's index, for ``record_gather`` and ``record_reduction``."""
        self.names.append(name)
        return len(self.names) - 1

    def record_gather(self, index: int) -> None:
        """An all-gather is issued."""
        self.entries[0].add(index)

    def record_reduction(self, index: int) -> None:
        """A reduction is issued."""
        self.entries[1].add(index)

    def take(self) -> "list[_Entries]":
        """The entries since the last call."""
        taken, self.entries = self.entries, [_Entries() for _ in _KINDS]
        return taken


class _Sent(NamedTuple):
    """A comparison under way."""

    answer: Callable[[], list[int]]
    """Waits for the end, on CUDA the host too, and returns the last row, which is complete then."""
    number: int
    """The iteration's number."""
    counts: list[int]
    """This rank's. These and the entries name a difference."""
    entries: list[list[_Entries]]
    """By group."""


class StepCheck:
    """The comparison of one model's ranks.

    grid      the model's ranks, which take the same steps
    failures  reports a comparison that fails
    device    where the model computes
    stream    CUDA: of the reductions
    grids     each with a group for gathers of this model alone, over which the comparison travels: it comes at the end
              of a backward, where another wrapper's buckets may be launched on one rank and not yet on another
    """

    def __init__(
        self,
        grid: RankGrid,
        failures: FailureReporter,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        grids: Iterable[RankGrid] = (),
    ) -> None:
        self._grid = grid
        self._over = {id(each.inner): each.gather for each in grids if each.gather is not None}
        self._failures = failures
        self._stream = stream
        self._device = device
        self._logs = [self._new_log(group) for group in grid.axes]
        self.active = bool(self._logs)
        """False in a world of one, which compares nothing."""
        self._sent: _Sent | None = None
        self._number = 0  # of comparisons
        self._started = False  # in this iteration
        self._rows: Tensor | None = None  # CUDA: where the rows are reduced

        self._reductions = 1  # of all gradients, in this iteration

        # Since the last comparison.
        self._forwards = self._used = self._updates = 0

    # ---- What this rank does. ----

    def log_of(self, group: dist.ProcessGroup | None) -> GroupLog | None:
        """The log of collectives on ``group``; None for one rank. All ranks of a group ask in one order."""
        if group is None or group.size() == 1:
            return None
        log = next((log for log in self._logs if log.group is group), None)
        if log is None:
            log = self._new_log(group)
            self._logs.insert(len(self._logs) - len(list(self._grid.axes)), log)  # the model's own ranks come last
        return log

    def record_forward(self) -> None:
        """A forward of the model that trains has ended."""
        self._forwards += 1

    def record_use(self) -> None:
        """A backward has reached the outputs of such a forward."""
        self._used += 1

    def record_update(self) -> None:
        """An optimizer steps."""
        self._updates += 1

    def record_given_up(self) -> None:
        """All ranks have given the iteration up, each at a point of its own."""
        self._forwards = self._used = 0

    def forget(self) -> None:
        """Forget everything since the last comparison: the ranks agree again, by other means."""
        self._take()

    # ---- Comparisons. ----

    def next_iteration(self) -> None:
        """The program begins a new iteration. If gradients were not compared, this rank has discarded them."""
        if not self._started:
            self._used = 0
        self._started = False
        self._reductions = 1

    def go_on(self) -> None:
        """A backward comes behind this iteration's reduction: all gradients are reduced, and compared, once more."""
        self._started = False
        self._reductions += 1
        self._number -= not is_capturing()  # it counts iterations that were compared

    def start(self, *, again: bool = False) -> None:
        """Compare what ranks have done since the last comparison, once a reduction. Collective, behind the reductions.

        again  the iteration is to be reduced once more

        CUDA: raise first what the comparison before has found. Captured iterations are not compared.
        """
        if not self.active or self._started:
            return
        self.read()
        self._started = True
        if is_capturing():
            self.forget()
            return
        counts = [self._used, self._forwards - self._used, self._updates, self._reductions + again]
        if not self._number:  # what a rank did before, a look at shapes or a warm-up, is its own affair
            counts = [0, 0, 0, counts[-1]]
        self._number += 1
        entries = self._take()
        values = array("q", [value for found in entries for value in _row(found, counts)])
        with self._failures.watch("the comparison of steps between ranks"):
            self._sent = _Sent(self._send(values, len(entries)), self._number, counts, entries)

    def finish(self) -> None:
        """CPU: wait for the comparison, and raise what it has found."""
        if self._stream is None:
            self.read()

    def read(self) -> None:
        """Wait for the comparison under way, if there is one. Raises ``RuntimeError`` on all ranks if ranks differ.

        The host waits. On CUDA it waits for work of the iteration before.
        """
        if self._sent is None or is_capturing():
            return
        sent, self._sent = self._sent, None
        with self._failures.watch("the comparison of steps between ranks"):
            row = sent.answer()
        digest, apart, used, left, updates, reductions = _spreads(row)
        if digest or apart:
            self._raise_other_units(sent)
        # Ranks may have different numbers of microbatches, also where a microbatch has no loss and thus no backward.
        for column, spread in ((3, reductions), (2, updates), (1, left and not used)):
            if spread:
                self._raise_other_steps(sent, column)

    def _new_log(self, group: dist.ProcessGroup) -> GroupLog:
        return GroupLog(group, self._over.get(id(group), group))

    def _take(self) -> list[list[_Entries]]:
        """The entries of all groups; counts begin anew."""
        self._forwards = self._used = self._updates = 0
        return [log.take() for log in self._logs]

    def _send(self, values: "array[int]", num_rows: int) -> Callable[[], list[int]]:
        """``_Sent.answer``. ``values``: the rows, one after the other; on CPUs collectives write there."""
        rows = torch.frombuffer(values, dtype=torch.int64).view(num_rows, NUM_COLUMNS)
        if self._stream is None:
            flight = in_stages(self._stages(rows), (rows,))

            def on_host() -> list[int]:
                flight.wait()
                return values[-NUM_COLUMNS:].tolist()

            return on_host
        pinned, answer = rows.pin_memory(), torch.empty(NUM_COLUMNS, dtype=torch.int64, pin_memory=True)
        event = torch.cuda.Event()
        with OnStream(self._stream):
            if self._rows is None:
                self._rows = torch.empty_like(rows, device=self._device)
            self._rows.copy_(pinned, non_blocking=True)  # behind the comparison before, on the same stream
            in_stages(self._stages(self._rows), (self._rows, pinned)).wait()
            answer.copy_(self._rows[-1], non_blocking=True)
            event.record(self._stream)

        def from_device() -> list[int]:
            event.synchronize()
            found: list[int] = answer.tolist()
            return found

        return from_device

    def _stages(self, rows: Tensor) -> Iterator[Any]:
        for index, log in enumerate(self._logs):
            row = rows[index]
            yield dist.all_reduce(row, dist.ReduceOp.MAX, group=log.over, async_op=True)
            if index + 1 < len(self._logs):
                found, following = row.view(2, -1), rows[index + 1].view(2, -1)
                torch.maximum(following[:, 1:], found[:, 1:], out=following[:, 1:])
                following[0, 1] = torch.maximum(found[0, 1], found[:, 0].sum())

    # ---- Errors, on all ranks. ----

    def _raise_other_units(self, sent: _Sent) -> None:
        found = [self._difference(log, entries) for log, entries in zip(self._logs, sent.entries, strict=True)]
        texts = self._everyones(next(filter(None, found), None))
        self.forget()
        text = next(filter(None, texts.values()), "the order of their collectives differs")
        raise RuntimeError(
            f"ranks have run different units, or units in another order, so that weights or gradients of different "
            f"units were mixed: {text}, before the end of iteration {sent.number}. Run the same units in the same "
            f"order on all ranks, in evaluations too: draw dropped layers by a seed that all ranks share, evaluate "
            f"equal numbers of batches, or make one unit of the layers between which a rank chooses"
        )

    def _difference(self, log: GroupLog, mine: list[_Entries]) -> str | None:
        """The first collective in which the ranks of a group differ, in words. Collective over the group."""
        everyone = gather(mine, [log.group], self._failures, "the ranks' orders of units")
        texts = (
            _first_difference(verb, {rank: theirs[kind] for rank, theirs in everyone.items()}, log.names)
            for kind, verb in enumerate(_KINDS)
        )
        return next(filter(None, texts), None)

    def _raise_other_steps(self, sent: _Sent, column: int) -> None:
        everyone = self._everyones(str(sent.counts[column]))
        self.forget()
        found = _by_value(everyone)
        raise RuntimeError(_OTHER_STEPS[column].format(number=sent.number, found=found))

    def _everyones(self, mine: T) -> dict[int, T]:
        return gather(mine, self._grid.axes, self._failures, "the ranks' steps")


def _row(found: list[_Entries], counts: list[int]) -> list[int]:
    values = [_hashed(*(entries.digest for entries in found)), 0, *counts]
    return [*values, *(-each for each in values)]


def _hashed(*numbers: int) -> int:
    """A hash that is not negative, and below 2^62. Python hashes integers alike in all processes."""
    return hash(numbers) & (2**62 - 1)


def _spreads(maxima: list[int]) -> list[int]:
    """The largest minus the smallest of some numbers, from the maxima of these numbers and of their negatives."""
    half = len(maxima) // 2
    return [high + low for high, low in zip(maxima[:half], maxima[half:], strict=True)]


def _first_difference(verb: str, orders: dict[int, _Entries], names: Sequence[str]) -> str | None:
    """The first entry in which ``orders``, by rank, differ."""
    if len({order.digest for order in orders.values()}) == 1:
        return None
    for entries in zip_longest(*(order.first for order in orders.values())):
        if len(set(entries)) > 1:
            named = ("nothing more" if entry is None else names[entry] for entry in entries)
            return f"{verb} {_by_value(dict(zip(orders, named, strict=True)))}"
    return f"{verb} in an order that differs after {_LIMIT} units of a long evaluation"


def _by_value(found: dict[int, str]) -> str:
    """``2 on rank 0, 3 on ranks 1, 2``"""
    ranks: dict[str, list[int]] = {}
    for rank, value in found.items():
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))}" for value, those in ranks.items()
    )
