"""Delayed scaling: a tensor's scale comes from its largest magnitudes (amaxes) in earlier iterations.

Products of training record amaxes, and those of the iteration are merged into row 0 (``amax_history.py``). Once an
iteration the wrapper's ranks agree on the largest, the rows roll, and the scales follow. A skipped step takes that
back. Nothing of it is read by the host.
"""

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...ddp.buckets.iteration_ends import IterationWatcher, watch_iterations
from ...ddp.collectives.streams import is_capturing
from ...ddp.plan.owned_params import is_marked_expert
from ...ddp.torch_internals import checkpointed_regions, current_backward
from ..recipes import DelayedScaling, amax_group_now
from .amax_history import Roll, ScalingUse, commit, select
from .product_scaling import ProductScaling
from .scaled_module import BUFFERS, NONE_YET, ScaledModule

__all__ = ["refused", "scaling_of", "update_scales"]

_refused: ContextVar[str | None] = ContextVar("_refused", default=None)


@contextmanager
def refused(where: str) -> Iterator[None]:
    """Products under delayed scaling raise ``RuntimeError`` in this block: ``where`` runs them beside the training."""
    before = _refused.set(where)
    try:
        yield
    finally:
        _refused.reset(before)


def scaling_of(module: ScaledModule, recipe: DelayedScaling, product: int, device: torch.device) -> ProductScaling:
    """Return what quantises a product of the forward that begins."""
    if (where := _refused.get()) is not None:
        raise RuntimeError(
            f"{module.describe()}: DelayedScaling does not go with {where}, whose trials would be recorded as "
            f"training; graph the whole iteration (GraphedTrainingStep), or use another recipe"
        )
    trains = module.training and torch.is_grad_enabled()
    if not trains or any(again for _, again in checkpointed_regions()):  # a recompute has recorded before
        scales = module._buffers.get(BUFFERS[0])
        return ProductScaling(recipe, module.first_scales(device) if scales is None else scales.to(device), product)
    if is_of_experts(module):
        raise RuntimeError(f"{module.describe()}: DelayedScaling is not supported with experts, whose ranks differ")
    use = scaling_state(module, recipe.amax_history_len, device)
    waits = use.is_in_wrapper()
    if product == 0 and not waits:
        if current_backward() != -1:
            raise RuntimeError(
                f"{module.describe()}: DelayedScaling in a reentrant checkpoint of a module without a wrapper, whose "
                f"scales would change between the two forwards: use torch.utils.checkpoint(use_reentrant=False)"
            )
        if use.row_0 != "empty" and not use.awaited:  # the iteration of the last backward is over
            use.recipe, use.group = recipe, amax_group_now()
            if use.row_0 == "frozen" and use.is_trained():
                use.row_0 = "empty"
                use.history[0].fill_(NONE_YET)
            else:
                update_scales([use], ())
    return ProductScaling(recipe, use.scales, product, use, waits=waits)


def scaling_state(module: ScaledModule, length: int, device: torch.device) -> ScalingUse:
    """Return the host's state. Buffers are made, moved, or resized to ``length`` rows where needed."""
    watch_iterations(_watcher)
    use: ScalingUse | None = module._scaling_use
    if use is None:  # a copy of a module has none
        use = module._scaling_use = ScalingUse(module)
    if is_capturing() and module._buffers.get(BUFFERS[0]) is None:
        raise RuntimeError(
            f"{module.describe()}: the first forward under DelayedScaling is captured, and each replay would "
            f"begin its scales anew: run one iteration before the capture"
        )
    module.make_room(length, device)
    return use


def is_of_experts(module: ScaledModule) -> bool:
    """Return True if a weight is marked as one that other ranks hold other values of."""
    return any(map(is_marked_expert, module.weights_present()))


# ---- The end of an iteration. ----


class _Watcher(IterationWatcher):
    """Ends the iterations of scales with those of their models."""

    def __init__(self) -> None:
        self._rolls: weakref.WeakKeyDictionary[nn.Module, Roll] = weakref.WeakKeyDictionary()

    def ended(self, model: nn.Module, axes: Sequence[dist.ProcessGroup], trained: Collection[int]) -> None:
        """Scales change."""
        roll = _end_iteration(model, axes, trained)
        if roll is not None:
            if (earlier := self._rolls.get(model)) is not None:
                roll.go_back_to(earlier)
            self._rolls[model] = roll

    def stepped(self, model: nn.Module, found_inf: Tensor | None) -> None:
        """Scales stay; on the device they change back where the step is skipped."""
        roll = self._rolls.pop(model, None)
        if roll is not None and found_inf is not None:
            roll.undo(found_inf)

    def discarded(self, model: nn.Module, *, skipped: bool) -> None:
        """Scales change back where a step should have come."""
        roll = self._rolls.pop(model, None)
        if roll is not None and skipped:
            roll.undo()


_watcher = _Watcher()


def _end_iteration(model: nn.Module, axes: Sequence[dist.ProcessGroup], trained: Collection[int]) -> Roll | None:
    """Update all modules of a model. Modules that have run on other ranks alone take part: ranks send alike."""
    modules = [
        module
        for module in model.modules()
        if isinstance(module, ScaledModule) and module.num_products and not is_of_experts(module)
    ]
    uses = [use for module in modules if (use := module._scaling_use) is not None]
    rows = [row for use in uses for row in use.rows]
    chosen = select(rows, trained)
    commit(row for row in rows if row in chosen)
    for use in uses:
        use.rows = [row for row in use.rows if row.waits]

    uses = [use for use in uses if use.recipe is not None]
    if not uses:
        return None
    current = [use for use in uses if use.row_0 != "empty"] or uses
    first = current[0]
    assert first.recipe is not None
    if any((use.recipe, use.group) != (first.recipe, first.group) for use in current):
        found = sorted({f"{use.recipe}, amax_reduction_group={use.group}" for use in current})
        raise RuntimeError(
            f"{type(model).__name__}: modules of one model ran under several forms of DelayedScaling in one iteration, "
            f"and ranks that skip some of them would not agree on scales: {'; '.join(found)}. Use one recipe object "
            f"and one amax_reduction_group for the model; other recipes may be beside it"
        )
    device = next(value.device for each in modules if (value := each._buffers.get(BUFFERS[0])) is not None)
    states = []
    for module in modules:
        mine = module._buffers.get(BUFFERS[0])
        use = scaling_state(module, first.recipe.amax_history_len, device if mine is None else mine.device)
        use.recipe, use.group = first.recipe, first.group
        states.append(use)
    return update_scales(states, axes)


@torch.no_grad()
def update_scales(uses: Sequence[ScalingUse], axes: Sequence[dist.ProcessGroup]) -> Roll:
    """Agree on amaxes, roll the histories, and set the scales. Returns what takes that back.

    uses  of the modules of one model, in the same order on all ranks, with one recipe and ``amax_reduction_group``
    axes  groups that join the model's ranks, where there is no such group

    One reduction of all modules' amaxes for each group.
    """
    recipe, group = uses[0].recipe, uses[0].group
    assert recipe is not None, "it has run"
    for use in uses:
        use.row_0 = "empty"
    histories = [use.history for use in uses]
    rows = [history[0] for history in histories]
    # A NaN has no order, and two backends would reduce it to different values. A state that was loaded may have one.
    amaxes = torch.nan_to_num(torch.cat(rows), nan=NONE_YET, posinf=torch.inf)
    for axis in axes if group is None else (group,):
        if recipe.reduce_amax:
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=axis)
    torch._foreach_copy_(rows, list(amaxes.split([row.numel() for row in rows])))
    return Roll(recipe, histories, [use.scales for use in uses])
