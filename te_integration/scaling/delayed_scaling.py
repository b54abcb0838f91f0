"""Delayed scaling: a tensor's scale comes from its largest magnitudes (amaxes) in earlier iterations.

A module keeps as buffers, n = 3 for each of its products: of the input, the weight and the gradient of the output

    fp8_scale         [n]     what elements are multiplied by before the cast
    fp8_amax_history  [L, n]  row 0: the largest amax of this iteration so far, -1 where there is none yet;
                              the last row: the last iteration's; row 1: the oldest

Products of training record amaxes, and those of the iteration are merged into row 0 (``amax_history.py``). Once an
iteration the wrapper's ranks agree on the largest, the rows roll, and the scales follow. A skipped step takes that
back. Nothing of it is read by the host.
"""

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...ddp.buckets.iteration_ends import IterationWatcher, watch_iterations
from ...ddp.collectives.streams import is_capturing
from ...ddp.plan.parallel_marks import is_marked_expert
from ...ddp.torch_internals import checkpointed_regions, current_backward
from ..recipes import DelayedScaling, amax_group_now
from .amax_history import BUFFERS, NONE_YET, OPERANDS, Roll, ScalingUse, commit, select
from .lone_modules import drop_amaxes, was_skipped, watch_steps
from .product_scaling import ProductScaling

__all__ = ["ScaledModule", "refused", "update_scales"]

_refused: ContextVar[str | None] = ContextVar("_refused", default=None)


@contextmanager
def refused(where: str) -> Iterator[None]:
    """Products under delayed scaling raise ``RuntimeError`` in this block: ``where`` runs them beside the training."""
    before = _refused.set(where)
    try:
        yield
    finally:
        _refused.reset(before)


class ScaledModule:
    """Mixin of modules whose products may have delayed scaling. Buffers are made by the first forward that records."""

    num_products = 1
    """0: delayed scaling is refused."""
    _scaling_use: ScalingUse | None = None
    training: bool
    weight_names: tuple[str, ...]
    _buffers: dict[str, Tensor | None]
    _parameters: dict[str, nn.Parameter | None]

    def describe(self) -> str:
        """The module's name in errors."""
        raise NotImplementedError

    def scaling_of(self, recipe: DelayedScaling, product: int, device: torch.device) -> ProductScaling:
        """Return what quantises a product of the forward that begins."""
        if (where := _refused.get()) is not None:
            raise RuntimeError(
                f"{self.describe()}: DelayedScaling does not go with {where}, whose trials would be recorded as "
                f"training; graph the whole iteration (GraphedTrainingStep), or use another recipe"
            )
        trains = self.training and torch.is_grad_enabled()
        if not trains or any(again for _, again in checkpointed_regions()):  # a recompute has recorded before
            scales = self._buffers.get(BUFFERS[0])
            return ProductScaling(recipe, self._first_scales(device) if scales is None else scales.to(device), product)
        if is_of_experts(self):
            raise RuntimeError(f"{self.describe()}: DelayedScaling is not supported with experts, whose ranks differ")
        use = self.scaling_state(recipe.amax_history_len, device)
        waits = use.is_in_wrapper()
        if product == 0 and not waits:
            if current_backward() != -1:
                raise RuntimeError(
                    f"{self.describe()}: DelayedScaling in a reentrant checkpoint of a module without a wrapper, whose "
                    f"scales would change between the two forwards: use torch.utils.checkpoint(use_reentrant=False)"
                )
            watch_steps(use)
            if use.row_0 != "empty" and not use.awaited:  # the iteration of the last backward is over
                use.recipe, use.group = recipe, amax_group_now()
                if (use.row_0 == "frozen" and use.trained_weights()) or was_skipped(use):
                    drop_amaxes(use)
                else:
                    update_scales([use], ())
        return ProductScaling(recipe, use.scales, product, use, waits=waits)

    def scaling_state(self, length: int, device: torch.device) -> ScalingUse:
        """Return the host's state. Buffers are made, moved, or resized to ``length`` rows where needed."""
        watch_iterations(_watcher)
        if self._scaling_use is None or self._scaling_use.module() is not self:
            self._scaling_use = ScalingUse(self)
        if self._buffers.get(BUFFERS[0]) is None:
            if is_capturing():
                raise RuntimeError(
                    f"{self.describe()}: the first forward under DelayedScaling is captured, and each replay would "
                    f"begin its scales anew: run one iteration before the capture"
                )
            scales = self._first_scales(device)
            self._register_scaling(scales, torch.full_like(scales, NONE_YET)[None])
        use = self._scaling_use
        scales, history = use.scales, use.history
        if scales.device != device or history.shape[0] != length:
            kept = history[max(1, history.shape[0] - length + 1) :]
            missing = history.new_zeros(length - 1 - kept.shape[0], history.shape[1])
            self._register_scaling(scales.to(device), torch.cat([history[:1], missing, kept]).to(device))
        return use

    def _register_scaling(self, scales: Tensor, history: Tensor) -> None:
        assert isinstance(self, nn.Module)
        for name, value in zip(BUFFERS, (scales, history), strict=True):
            self.register_buffer(name, value)

    def _first_scales(self, device: torch.device) -> Tensor:
        return torch.ones(len(OPERANDS) * self.num_products, dtype=torch.float32, device=device)

    def drop_scaling(self) -> None:
        """Forget scales and amaxes."""
        vars(self).pop("_scaling_use", None)
        for name in BUFFERS:
            self._buffers.pop(name, None)

    def on_demand_buffers(self) -> tuple[str, ...]:
        """Names of buffers that checkpoints may hold or lack."""
        return BUFFERS if self.num_products else ()

    def fits_stored(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return True if these are shapes of ``on_demand_buffers``."""
        scales, history = (shapes.get(name, ()) for name in BUFFERS)
        width = (len(OPERANDS) * self.num_products,)
        return len(history) == 2 and history[0] > 0 and scales == history[1:] == width

    @torch.no_grad()
    def adopt_stored(self, stored: Mapping[str, Tensor]) -> None:
        """Take ``on_demand_buffers`` from a checkpoint. None there: scales begin anew, in place."""
        scales, history = (self._buffers.get(name) for name in BUFFERS)
        if stored:
            use = self._make_room(stored[BUFFERS[1]].shape[0])
            use.scales.copy_(stored[BUFFERS[0]])
            use.history.copy_(stored[BUFFERS[1]])
        elif scales is not None and history is not None:
            scales.fill_(1.0)
            history.zero_()[0] = NONE_YET

    def _make_room(self, length: int) -> ScalingUse:
        """Buffers for a state that is loaded, where the module is."""
        scales = self._buffers.get(BUFFERS[0])
        use = self.scaling_state(length, (next(_weights(self)) if scales is None else scales).device)
        use.record_loaded()
        return use

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = [self._buffers.get(name) for name in BUFFERS]
        module = super()._apply(fn, recurse)  # type: ignore[misc]  # nn.Module's
        for name, value in zip(BUFFERS, before, strict=True):
            moved = self._buffers.get(name)
            if value is not None and moved is not None and moved.dtype is not value.dtype:  # half(), bfloat16()
                self._buffers[name] = value.to(moved.device)
        return module

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        shapes = {n: tuple(state_dict[prefix + n].shape) for n in self.on_demand_buffers() if prefix + n in state_dict}
        if self.fits_stored(shapes) and any(True for _ in _weights(self)):
            self._make_room(shapes[BUFFERS[1]][0])
        elif not shapes and self._buffers.get(BUFFERS[0]) is not None:
            # A state of before the recipe, or of weights alone: nothing is missing, and scales stay.
            state_dict |= {prefix + name: self._buffers[name] for name in BUFFERS}
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]  # nn.Module's


def is_of_experts(module: ScaledModule) -> bool:
    """Return True if a weight is marked as one that other ranks hold other values of."""
    return any(map(is_marked_expert, _weights(module)))


def _weights(module: ScaledModule) -> Any:
    return (weight for name in module.weight_names if (weight := module._parameters.get(name)) is not None)


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
        use = module.scaling_state(first.recipe.amax_history_len, device if mine is None else mine.device)
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
