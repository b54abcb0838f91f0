"""Which amaxes become part of a history, and how a skipped step takes them back.

A product's forward and its backward record into a row of their own. At the end of an iteration the rows that belong to
it are merged into row 0 of the history::

    row                                        belongs to the iteration
    its backward brought gradients             yes. Gradients of any parameter of the model: the weight may be frozen
    autograd.grad, a frozen model, given up    no
    its backward has not come                  not yet; never, where the graph was freed
    it has no graph (a frozen first layer)     if another row of the same forward does
"""

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ddp.buckets.iteration_ends import forward_number
from ...ddp.torch_internals import NO_BACKWARD, call_when_backward_ends, current_backward
from ..recipes import DelayedScaling

__all__ = ["NONE_YET", "OPERANDS", "AmaxRow", "Roll", "commit", "commit_after_backward", "select"]

OPERANDS = {"input": 0, "weight": 1, "grad": 2}
"""Places in a row."""
NONE_YET = -1.0
"""Where no amax was recorded: less than any amax."""


class AmaxRow:
    """Amaxes of one product in one forward and one backward of it.

    first   the product's first column in the module's history
    recipe  of the forward
    group   ``amax_reduction_group`` of the forward
    owner   lives as long as the forward's graph
    """

    __slots__ = ("backward", "first", "forward", "group", "has_graph", "outer", "owner", "recipe", "values")

    def __init__(self, first: int, recipe: DelayedScaling, group: Any, owner: Any, device: torch.device) -> None:
        self.first, self.recipe, self.group = first, recipe, group
        self.owner = weakref.ref(owner)
        self.forward = forward_number()
        self.outer = current_backward()
        """The backward in which a reentrant checkpoint runs this forward again."""
        self.backward = NO_BACKWARD
        self.has_graph = True
        self.values = torch.full((len(OPERANDS),), NONE_YET, dtype=torch.float32, device=device)

    def again(self, owner: Any) -> "AmaxRow":
        """For another backward of the same forward: it has a gradient of its own."""
        other = AmaxRow(self.first, self.recipe, self.group, owner, self.values.device)
        other.forward, other.outer = self.forward, self.outer
        other.values[: OPERANDS["grad"]].copy_(self.values[: OPERANDS["grad"]])
        return other

    @property
    def waits(self) -> bool:
        """Whether a backward may come."""
        return self.has_graph and self.backward == NO_BACKWARD and self.owner() is not None

    def is_in(self, trained: Collection[int]) -> bool:
        """Whether its backward is one of these, or inside of one."""
        return self.backward != NO_BACKWARD and (self.backward in trained or self.outer in trained)


def select(rows: Iterable[AmaxRow], trained: Collection[int]) -> set[AmaxRow]:
    """The rows of a model that belong to the iteration with these backwards."""
    rows = list(rows)
    found = {row for row in rows if row.is_in(trained)}
    forwards = {row.forward for row in found}
    # Where no product of a forward has a graph, only modules of others tell whether it was trained: take its rows.
    known = {row.forward for row in rows if row.has_graph}
    alike = (row for row in rows if not row.has_graph and (row.forward in forwards or row.forward not in known))
    return found.union(alike) if trained else found


@torch.no_grad()
def commit(rows: Iterable[tuple[Tensor, AmaxRow]]) -> None:
    """Merge rows into row 0 of their histories [L, n], a kernel for each row of a product."""
    turns: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    seen: defaultdict[tuple[int, int], int] = defaultdict(int)
    for history, row in rows:
        place = id(history), row.first
        current = history[0, row.first : row.first + len(OPERANDS)]
        turns[seen[place]].append((current, row.values.to(history.device)))
        seen[place] += 1
    for pairs in turns.values():
        torch._foreach_maximum_([current for current, _ in pairs], [values for _, values in pairs])


class _AtEnd:
    """Commits rows when a backward has ended. The engine holds it, and frees it where the backward fails."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, Tensor, AmaxRow, bool]] = []

    def __call__(self) -> None:
        commit((history, row) for _, history, row, _ in self.rows)
        for use, _, row, frozen in self.rows:
            use.record_row(row, frozen=frozen)
        self.rows.clear()


_at_end: "weakref.WeakValueDictionary[int, _AtEnd]" = weakref.WeakValueDictionary()


def commit_after_backward(use: Any, history: Tensor, row: AmaxRow, *, frozen: bool) -> None:
    """``commit``, where the running backward succeeds; for modules without a wrapper.

    frozen  nothing of the module is trained
    """
    task = current_backward()
    end = _at_end.get(task)
    if end is None:
        end = _at_end[task] = _AtEnd()
        call_when_backward_ends(end)
    end.rows.append((use, history, row, frozen))


class Roll:
    """Histories and scales before they moved on: a skipped step takes them back.

    The tensors are those of a model's modules, alike before and after.
    """

    def __init__(self, histories: Sequence[Tensor], scales: Sequence[Tensor], before: Tensor, old: Tensor) -> None:
        self._histories, self._scales = list(histories), list(scales)
        self._before, self._old = before, old
        self._before[0] = NONE_YET
        self.note()

    def note(self) -> None:
        """The tensors hold what the roll has left."""
        self._versions = [value._version for value in (*self._histories, *self._scales)]

    def go_back_to(self, earlier: "Roll") -> None:
        """Undo ``earlier`` as well, which was neither stepped over nor given up. Nothing where it had other tensors."""
        if len(self._histories) == len(earlier._histories) and all(map(_is, self._histories, earlier._histories)):
            self._before, self._old = earlier._before, earlier._old

    @torch.no_grad()
    def undo(self, found_inf: Tensor | None = None) -> None:
        """Put back what was there before; on the device where ``found_inf`` is not 0. Nothing after a load."""
        if self._versions != [value._version for value in (*self._histories, *self._scales)]:
            return
        before, old = self._before, self._old
        if found_inf is not None:
            skips = found_inf.to(old.device) != 0
            before = torch.where(skips, before, torch.cat(self._histories, dim=1))
            old = torch.where(skips, old, torch.cat(self._scales))
        widths = [scale.numel() for scale in self._scales]
        torch._foreach_copy_(self._scales, list(old.split(widths)))
        torch._foreach_copy_(self._histories, list(before.split(widths, dim=1)))


def _is(mine: Tensor, other: Tensor) -> bool:
    return mine is other
