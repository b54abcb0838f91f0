"""Delayed scaling: a tensor's scale comes from its largest magnitudes (amaxes) in earlier iterations.

A module keeps as buffers, n = 3 for each of its products: of the input, the weight and the gradient of the output

    fp8_scale         [n]     what elements are multiplied by before the cast
    fp8_amax_history  [L, n]  row 0: the largest amax of this iteration so far, -1 where there is none yet;
                              the last row: the last iteration's; row 1: the oldest

Products of training record amaxes, and those of the iteration are merged into row 0 (``amax_history.py``). Once an
iteration the wrapper's ranks agree on the largest, the rows roll, and the scales follow. A skipped step takes that
back. Nothing of it is read by the host.
"""

import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...ddp.buckets.iteration_ends import IterationWatcher, watch_iterations
from ...ddp.collectives.streams import is_capturing
from ...ddp.plan.parallel_marks import is_marked_expert
from ...ddp.torch_internals import checkpointed_regions, current_backward
from ..recipes import DelayedScaling, amax_group_now
from .amax_history import NONE_YET, OPERANDS, Roll, commit, select
from .lone_modules import drop_amaxes, was_skipped, watch_steps
from .product_scaling import ProductScaling, ScalingUse

__all__ = ["ScaledModule", "refused", "update_scales"]

BUFFERS = ("fp8_scale", "fp8_amax_history")


class _Refused(threading.local):
    where: str | None = None


_refused = _Refused()


@contextmanager
def refused(where: str) -> Iterator[None]:
    """Products under delayed scaling raise ``RuntimeError`` in this block: ``where`` runs them beside the training."""
    before, _refused.where = _refused.where, where
    try:
        yield
    finally:
        _refused.where = before


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
        """What quantises a product of the forward that begins."""
        if _refused.where is not None:
            raise RuntimeError(
                f"{self.describe()}: DelayedScaling does not go with {_refused.where}, whose trials would be recorded "
                f"as training; graph the whole iteration (GraphedTrainingStep), or use another recipe"
            )
        trains = self.training and torch.is_grad_enabled()
        if not trains or any(again for _, again in checkpointed_regions()):  # a recompute has recorded before
            scales = self._buffers.get(BUFFERS[0])
            return ProductScaling(recipe, _ones(self, device) if scales is None else scales.to(device), product)
        if is_of_experts(self):
            raise RuntimeError(f"{self.describe()}: DelayedScaling is not supported with experts, whose ranks differ")
        use, scales, history = self.scaling_state(recipe.amax_history_len, device)
        assert isinstance(self, nn.Module)
        waits = use.is_in_wrapper(self)
        if product == 0 and not waits:
            if current_backward() != -1:
                raise RuntimeError(
                    f"{self.describe()}: DelayedScaling in a reentrant checkpoint of a module without a wrapper, whose "
                    f"scales would change between the two forwards: use torch.utils.checkpoint(use_reentrant=False)"
                )
            watch_steps(self, use)
            if use.recorded and not use.awaited:
                use.recipe, use.group = recipe, amax_group_now()
                self._end_own_iteration(use, history)
        return ProductScaling(recipe, scales, product, history, use, waits=waits)

    def _end_own_iteration(self, use: ScalingUse, history: Tensor) -> None:
        """Without a wrapper: the iteration of the last backward is over.

        It was none if all was frozen for it alone, or if its step was skipped.
        """
        if (use.frozen and any(weight.requires_grad for weight in _weights(self))) or was_skipped(use):
            drop_amaxes(use, history)
        else:
            update_scales([self], ())
        use.frozen = False

    def scaling_state(self, length: int, device: torch.device) -> tuple[ScalingUse, Tensor, Tensor]:
        """What the host knows, the scales, and the history of ``length`` rows; made, moved or resized where needed."""
        watch_iterations(_watcher)
        if self._scaling_use is None:
            self._scaling_use = ScalingUse()
        scales, history = (self._buffers.get(name) for name in BUFFERS)
        if scales is None or history is None:
            if is_capturing():
                raise RuntimeError(
                    f"{self.describe()}: the first forward under DelayedScaling is captured, and each replay would "
                    f"begin its scales anew: run one iteration before the capture"
                )
            scales, history = _ones(self, device), _empty_history(self, length, device)
            self._set(scales, history)
        if scales.device != device or history.shape[0] != length:
            kept = history[-(length - 1) :] if length > 1 else history[:0]
            missing = history.new_zeros(length - 1 - kept.shape[0], history.shape[1])
            history = torch.cat([history[:1], missing, kept]).to(device)
            scales = scales.to(device)
            self._set(scales, history)
        return self._scaling_use, scales, history

    def _set(self, scales: Tensor, history: Tensor) -> None:
        assert isinstance(self, nn.Module)
        for name, value in zip(BUFFERS, (scales, history), strict=True):
            self.register_buffer(name, value)

    def drop_scaling(self) -> None:
        """Forget scales and amaxes."""
        vars(self).pop("_scaling_use", None)
        for name in BUFFERS:
            self._buffers.pop(name, None)

    def on_demand_buffers(self) -> tuple[str, ...]:
        """Names of buffers that checkpoints may hold or lack."""
        return BUFFERS if self.num_products else ()

    def fits_stored(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether these are shapes of ``on_demand_buffers``."""
        width = (len(OPERANDS) * self.num_products,)
        found = tuple(shapes.get(name, ()) for name in BUFFERS)
        return found[0] == width and len(found[1]) == 2 and found[1][0] > 0 and found[1][1:] == width

    @torch.no_grad()
    def adopt_stored(self, stored: Mapping[str, Tensor]) -> None:
        """Take ``on_demand_buffers`` from a checkpoint. None there: scales begin anew, in place."""
        scales, history = (self._buffers.get(name) for name in BUFFERS)
        if stored:
            before = scales if scales is not None else next(_weights(self))
            _, scales, history = self.scaling_state(stored[BUFFERS[1]].shape[0], before.device)
            scales.copy_(stored[BUFFERS[0]])
            history.copy_(stored[BUFFERS[1]])
            vars(self)["_scaling_use"].record_loaded()
        elif scales is not None and history is not None:
            scales.fill_(1.0)
            history.zero_()[0] = NONE_YET

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
        device = next((weight.device for weight in _weights(self)), None)
        scales = self._buffers.get(BUFFERS[0])
        if device is not None and self.fits_stored(shapes):
            self.scaling_state(shapes[BUFFERS[1]][0], device if scales is None else scales.device)[0].record_loaded()
        elif not shapes and scales is not None:
            # A state of before the recipe, or of weights alone: nothing is missing, and scales stay.
            state_dict |= {prefix + name: self._buffers[name] for name in BUFFERS}
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]  # nn.Module's


def is_of_experts(module: ScaledModule) -> bool:
    """Whether a weight is marked as one that other ranks hold other values of."""
    return any(map(is_marked_expert, _weights(module)))


def _weights(module: ScaledModule) -> Any:
    return (weight for name in module.weight_names if (weight := module._parameters.get(name)) is not None)


def _ones(module: ScaledModule, device: torch.device) -> Tensor:
    return torch.ones(len(OPERANDS) * module.num_products, dtype=torch.float32, device=device)


def _empty_history(module: ScaledModule, length: int, device: torch.device) -> Tensor:
    history = torch.zeros(length, len(OPERANDS) * module.num_products, dtype=torch.float32, device=device)
    history[0] = NONE_YET
    return history


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
    _merge_rows(modules, trained)
    uses = [use for module in modules if (use := module._scaling_use) is not None and use.recipe is not None]
    if not uses:
        return None
    current = [use for use in uses if use.recorded] or uses
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
    for module in modules:
        mine = module._buffers.get(BUFFERS[0])
        use, _, _ = module.scaling_state(first.recipe.amax_history_len, device if mine is None else mine.device)
        use.recipe, use.group = first.recipe, first.group
    return update_scales(modules, axes)


def _merge_rows(modules: Sequence[ScaledModule], trained: Collection[int]) -> None:
    """Merge the iteration's amaxes into the histories, and forget others but those that wait for their backward."""
    running = [(module, use) for module in modules if (use := module._scaling_use) is not None and use.rows]
    belonging = select((row for _, use in running for row in use.rows), trained)
    merged = [(_buffer(module, BUFFERS[1]), row) for module, use in running for row in use.rows if row in belonging]
    commit(merged)
    for _, use in running:
        for row in use.rows:
            if row in belonging:
                use.record_row(row)
        use.rows = [row for row in use.rows if row.waits]


@torch.no_grad()
def update_scales(modules: Sequence[ScaledModule], axes: Sequence[dist.ProcessGroup]) -> Roll:
    """Agree on amaxes, roll the histories, and set the scales. Returns what takes that back.

    modules  those of one model, in the same order on all ranks, with one recipe and ``amax_reduction_group``
    axes     groups that join the model's ranks, where there is no such group

    One reduction of all modules' amaxes for each group.
    """
    rows = [_buffer(module, BUFFERS[1])[0] for module in modules]
    for module in modules:
        use = module._scaling_use
        assert use is not None and use.recipe is not None, "it has run"
        use.recorded = False
        recipe, group = use.recipe, use.group
    # A NaN has no order, and two backends would reduce it to different values. A state that was loaded may have one.
    amaxes = torch.nan_to_num(torch.cat(rows), nan=NONE_YET, posinf=torch.inf)
    for axis in axes if group is None else (group,):
        if recipe.reduce_amax:
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=axis)
    torch._foreach_copy_(rows, list(amaxes.split([row.numel() for row in rows])))
    return _roll(recipe, modules)


def _roll(recipe: DelayedScaling, modules: Sequence[ScaledModule]) -> Roll:
    histories = [_buffer(module, BUFFERS[1]) for module in modules]
    scales = [_buffer(module, BUFFERS[0]) for module in modules]
    before, old = torch.cat(histories, dim=1), torch.cat(scales)
    is_known = before[0] >= 0
    history = before.clone()
    history[0].clamp_(min=0.0)
    limit = torch.full_like(old, recipe.fp8_format.forward.max)
    limit[OPERANDS["grad"] :: len(OPERANDS)] = recipe.fp8_format.backward.max
    new = recipe.new_scales(history, limit, old)
    history = history.roll(-1, 0)
    history[0] = NONE_YET
    widths = [scale.numel() for scale in scales]
    torch._foreach_copy_(scales, list(torch.where(is_known, new, old).split(widths)))
    torch._foreach_copy_(histories, list(torch.where(is_known, history, before).split(widths, dim=1)))
    return Roll(histories, scales, before, old)


def _buffer(module: ScaledModule, name: str) -> Tensor:
    value = module._buffers[name]
    assert value is not None, "it has a state"
    return value
