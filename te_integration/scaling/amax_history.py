"""Amaxes become part of a history at the end of an iteration, and a skipped step takes them back.

A product's forward and its backward record into a row of their own. At the end of an iteration the rows that belong to
it are merged into row 0 of the history::

    row                                        belongs to the iteration
    its backward brought gradients             yes. Gradients of any parameter of the model: the weight may be frozen
    autograd.grad, a frozen model, given up    no
    its backward has not come                  not yet; never, where the graph was freed
    it has no graph (a frozen first layer)     if another row of the same forward does
"""

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ...ddp.buckets.iteration_ends import forward_number, is_in_wrapper, num_changes, was_trained_in
from ...ddp.torch_internals import NO_BACKWARD, call_when_backward_ends, current_backward
from ..recipes import DelayedScaling
from .scaled_module import BUFFERS, NONE_YET, OPERANDS

__all__ = [
    "AmaxRow",
    "Roll",
    "ScalingUse",
    "commit",
    "commit_after_backward",
    "select",
]


class ScalingUse:
    """The host's state of the scaling of a ``ScaledModule``, which is held weakly."""

    def __init__(self, module: Any) -> None:
        self.module: Callable[[], Any] = weakref.ref(module)
        self.recipe: DelayedScaling | None = None
        """The recipe of the last forward whose amaxes count; None: there is none yet."""
        self.group: Any = None
        """``amax_reduction_group`` of that forward."""
        self.row_0: Literal["empty", "frozen", "trained"] = "trained"
        """Row 0 of the history holds no amax; amaxes of backwards alone in which nothing of the module was trained; or
        others, perhaps of a state that was loaded."""
        self.rows: list[AmaxRow] = []
        """In a wrapper: of forwards since the last end of an iteration."""
        self.awaited: weakref.WeakSet[Any] = weakref.WeakSet()
        """Without a wrapper: graphs of forwards whose backwards have not come."""
        self._wrapped = (-1, False)

    @property
    def is_live(self) -> bool:
        """True while the module is there and has this use: it may be freed, or unconverted, before a backward ends."""
        module = self.module()
        return module is not None and vars(module).get("_scaling_use") is self

    @property
    def scales(self) -> Tensor:
        """[n] the module's buffer."""
        scales: Tensor = self.module()._buffers[BUFFERS[0]]
        return scales

    @property
    def history(self) -> Tensor:
        """[L, n] the module's buffer."""
        history: Tensor = self.module()._buffers[BUFFERS[1]]
        return history

    def is_trained(self) -> bool:
        """Return True if a weight of the module requires a gradient."""
        return any(weight.requires_grad for weight in self.module().weights_present())

    def is_in_wrapper(self) -> bool:
        """Return True if a wrapper of ours updates the scales."""
        if self._wrapped[0] != num_changes():
            self._wrapped = num_changes(), is_in_wrapper(self.module())
        return self._wrapped[1]

    def add(self, row: "AmaxRow") -> None:
        """Keep a row until the end of the iteration. Rows of backwards that train nothing may come without an end."""
        self.rows.append(row)
        if len(self.rows) % 64 == 0 and current_backward() == NO_BACKWARD:
            self.rows = [old for old in self.rows if old.waits or not old.has_graph or was_trained_in(old.backward)]

    def record_row(self, row: "AmaxRow") -> None:
        """A row is in row 0 of the history now."""
        if not row.frozen:
            self.row_0 = "trained"
        elif self.row_0 == "empty":
            self.row_0 = "frozen"
        self.recipe, self.group = row.recipe, row.group

    def record_loaded(self) -> None:
        """Other amaxes are in row 0."""
        self.row_0 = "trained"
        self.rows = [row for row in self.rows if row.waits]

    def __reduce__(self) -> Any:
        return type(None), ()  # a copied module has its own graphs, group and wrapper


class AmaxRow:
    """Amaxes of one product in one forward and one backward of it.

    use     of the module; held weakly
    first   the product's first column in the module's history
    recipe  of the forward
    group   ``amax_reduction_group`` of the forward
    owner   lives as long as the forward's graph
    """

    def __init__(
        self, use: ScalingUse, first: int, recipe: DelayedScaling, group: Any, owner: Any, device: torch.device
    ) -> None:
        self.use = weakref.ref(use)
        self.first, self.recipe, self.group = first, recipe, group
        self.owner = weakref.ref(owner)
        self.forward = forward_number()
        self.outer = current_backward()
        """The backward in which a reentrant checkpoint runs this forward again."""
        self.backward = NO_BACKWARD
        self.has_graph = True
        self.frozen = False
        """The backward trains nothing of the module, which has no wrapper."""
        self.values = torch.full((len(OPERANDS),), NONE_YET, dtype=torch.float32, device=device)

    def again(self, use: ScalingUse, owner: Any) -> "AmaxRow":
        """Return a row for another backward of the same forward, which has a gradient of its own."""
        other = AmaxRow(use, self.first, self.recipe, self.group, owner, self.values.device)  # the module may be gone
        other.forward, other.outer = self.forward, self.outer
        other.values[: OPERANDS["grad"]].copy_(self.values[: OPERANDS["grad"]])
        return other

    @property
    def waits(self) -> bool:
        """True while a backward may come."""
        return self.has_graph and self.backward == NO_BACKWARD and self.owner() is not None

    def is_in(self, trained: Collection[int]) -> bool:
        """Return True if its backward is one of these, or inside of one."""
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
def commit(rows: Iterable[AmaxRow]) -> None:
    """Merge rows into row 0 of their histories [L, n], a kernel for each row of a product. Modules may be freed."""
    turns: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    seen: Counter[tuple[ScalingUse, int]] = Counter()
    for row in rows:
        use = row.use()
        if use is None or not use.is_live:
            continue
        current = use.history[0, row.first : row.first + len(OPERANDS)]
        turns[seen[use, row.first]].append((current, row.values.to(current.device)))
        seen[use, row.first] += 1
        use.record_row(row)
    for pairs in turns.values():
        torch._foreach_maximum_([current for current, _ in pairs], [values for _, values in pairs])


class _AtEnd(list[AmaxRow]):
    """Rows that are committed when a backward has ended. The engine holds it, and frees it where the backward fails."""

    def __call__(self) -> None:
        commit(self)


_at_end: "weakref.WeakValueDictionary[int, _AtEnd]" = weakref.WeakValueDictionary()


def commit_after_backward(row: AmaxRow) -> None:
    """``commit``, where the running backward succeeds; for modules without a wrapper."""
    task = current_backward()
    end = _at_end.get(task)
    if end is None:
        end = _at_end[task] = _AtEnd()
        call_when_backward_ends(end)
    end.append(row)


class Roll:
    """Moves histories and scales on, at the end of an iteration. A skipped step takes that back.

    recipe     says the new scales
    histories  of a model's modules, with the iteration's amaxes in row 0
    scales     of the same modules
    """

    @torch.no_grad()
    def __init__(self, recipe: DelayedScaling, histories: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        self._histories, self._scales = list(histories), list(scales)
        self._before, self._old = torch.cat(self._histories, dim=1), torch.cat(self._scales)
        is_known = self._before[0] >= 0
        history = self._before.clone()
        history[0].clamp_(min=0.0)
        limit = torch.full_like(self._old, recipe.fp8_format.forward.max)
        limit[OPERANDS["grad"] :: len(OPERANDS)] = recipe.fp8_format.backward.max
        new = recipe.new_scales(history, limit, self._old)
        history = history.roll(-1, 0)
        history[0] = NONE_YET
        self._write(torch.where(is_known, history, self._before), torch.where(is_known, new, self._old))
        self._before[0] = NONE_YET
        self._versions = self._versions_now()

    def go_back_to(self, earlier: "Roll") -> None:
        """Undo ``earlier`` as well, which was neither stepped over nor given up. Nothing where it had other tensors."""
        if list(map(id, self._histories)) == list(map(id, earlier._histories)):
            self._before, self._old = earlier._before, earlier._old

    @torch.no_grad()
    def undo(self, found_inf: Tensor | None = None) -> None:
        """Put back what was there before; on the device where ``found_inf`` is not 0. Nothing after a load."""
        if self._versions != self._versions_now():
            return
        before, old = self._before, self._old
        if found_inf is not None:
            skips = found_inf.to(old.device) != 0
            before = torch.where(skips, before, torch.cat(self._histories, dim=1))
            old = torch.where(skips, old, torch.cat(self._scales))
        self._write(before, old)

    def _write(self, history: Tensor, scales: Tensor) -> None:
        widths = [scale.numel() for scale in self._scales]
        torch._foreach_copy_(self._scales, list(scales.split(widths)))
        torch._foreach_copy_(self._histories, list(history.split(widths, dim=1)))

    def _versions_now(self) -> list[int]:
        return [value._version for value in (*self._histories, *self._scales)]
