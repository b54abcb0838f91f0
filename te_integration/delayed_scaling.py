"""Delayed scaling: a tensor's scale comes from its largest magnitudes (amaxes) in earlier iterations.

A module keeps as buffers, n = 3 for each of its products: of the input, the weight and the gradient of the output

    fp8_scale         [n]     what elements are multiplied by before the cast
    fp8_amax_history  [L, n]  row 0: the largest amax of this iteration so far, -1 where there is none yet;
                              the last row: the last iteration's; row 1: the oldest

Products of training record amaxes in row 0. Once an iteration the wrapper's ranks agree on the largest, the rows roll,
and the scales follow. Nothing of that is read by the host.
"""

import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ddp.buckets.iteration_ends import ends, is_in_wrapper, num_changes
from ..ddp.collectives.streams import is_capturing
from ..ddp.plan.parallel_marks import is_marked_expert
from ..ddp.torch_internals import checkpointed_regions, current_backward
from ..kernels.quantized import QuantSpec
from .recipes import DelayedScaling, Operand, amax_group_now

__all__ = ["ProductScaling", "ScaledModule", "refused", "update_scales"]

BUFFERS = ("fp8_scale", "fp8_amax_history")
_OPERANDS: dict[Operand, int] = {"input": 0, "weight": 1, "grad": 2}
_NONE = -1.0
"""Row 0 of a history where no amax was recorded."""


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


class _Graph:
    """A forward of training whose backward has not come: it lives as long as the forward's graph."""

    __slots__ = ("__weakref__",)


class _Use:
    """What the host knows of a module's scaling."""

    def __init__(self) -> None:
        self.recipe: DelayedScaling | None = None
        """Of the last forward that has recorded; None: none has."""
        self.group: dist.ProcessGroup | None = None
        """``amax_reduction_group`` of that forward."""
        self.recorded = True
        """Row 0 may hold amaxes: those of this process, or of a state that was loaded."""
        self.awaited: weakref.WeakSet[_Graph] = weakref.WeakSet()
        """Forwards whose backwards have not come."""
        self._wrapped = (-1, False)

    def is_in_wrapper(self, module: nn.Module) -> bool:
        """Whether a wrapper of ours updates the scales."""
        if self._wrapped[0] != num_changes():
            self._wrapped = num_changes(), is_in_wrapper(module)
        return self._wrapped[1]

    def __reduce__(self) -> Any:
        return _Use, ()  # a copied module has its own graphs, group and wrapper


class ProductScaling:
    """What quantises the operands of one product in one forward and its backward.

    recipe   says elements and scales
    scales   [n] the module's
    product  its number in the module
    history  [L, n] records amaxes; None: this forward records none
    use      the module's, with a ``history``
    """

    __slots__ = ("_first", "_graph", "_has_weight", "_history", "_scales", "_use", "recipe")

    def __init__(
        self, recipe: DelayedScaling, scales: Tensor, product: int, history: Tensor | None = None, use: Any = None
    ) -> None:
        self.recipe = recipe
        self._scales, self._history, self._use = scales, history, use
        self._first = len(_OPERANDS) * product
        self._has_weight = False
        self._graph = _Graph()
        if use is not None and torch.is_grad_enabled():
            use.awaited.add(self._graph)

    def __eq__(self, other: object) -> bool:
        """Whether the same scales quantise: copies of a weight are kept by it."""
        return (
            isinstance(other, ProductScaling)
            and self.recipe == other.recipe
            and self._scales is other._scales
            and self._first == other._first
            and (self._history is None) is (other._history is None)  # a copy that is found again is not recorded
        )

    def __hash__(self) -> int:
        return hash((self.recipe, id(self._scales), self._first))

    def specs(self, operand: Operand) -> tuple[QuantSpec, QuantSpec]:
        """The recipe's."""
        return self.recipe.specs(operand)

    def scale_of(self, operand: Operand) -> Tensor:
        """0-dim fp32."""
        return self._scales[self._first + _OPERANDS[operand]]

    def amax_of(self, operand: Operand) -> Tensor | None:
        """See ``Recipe``. A weight that the backward quantises again is recorded once."""
        if operand == "grad" and self._use is not None:
            self._use.awaited.discard(self._graph)
        if self._history is None or (operand == "weight" and self._has_weight):
            return None
        self._has_weight = self._has_weight or operand == "weight"
        return self._history[0, self._first + _OPERANDS[operand]]


class ScaledModule:
    """Mixin of modules whose products may have delayed scaling. Buffers are made by the first forward that records."""

    num_products = 1
    """0: delayed scaling is refused."""
    _scaling_use: _Use | None = None
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
        use.recipe, use.group = recipe, amax_group_now()
        assert isinstance(self, nn.Module)
        if product == 0 and not use.is_in_wrapper(self):
            if current_backward() != -1:
                raise RuntimeError(
                    f"{self.describe()}: DelayedScaling in a reentrant checkpoint of a module without a wrapper, whose "
                    f"scales would change between the two forwards: use torch.utils.checkpoint(use_reentrant=False)"
                )
            if use.recorded and not use.awaited:
                update_scales([self], ())
        use.recorded = True
        return ProductScaling(recipe, scales, product, history, use)

    def scaling_state(self, length: int, device: torch.device) -> tuple[_Use, Tensor, Tensor]:
        """What the host knows, the scales, and the history of ``length`` rows; made, moved or resized where needed."""
        global _is_used
        _is_used = True
        if self._scaling_use is None:
            self._scaling_use = _Use()
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
        width = (len(_OPERANDS) * self.num_products,)
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
            vars(self)["_scaling_use"].recorded = True
        elif scales is not None and history is not None:
            scales.fill_(1.0)
            history.zero_()[0] = _NONE

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
            self.scaling_state(shapes[BUFFERS[1]][0], device if scales is None else scales.device)[0].recorded = True
        elif not shapes and scales is not None:
            # A state of before the recipe, or of weights alone: nothing is missing, and scales stay.
            state_dict |= {prefix + name: self._buffers[name] for name in BUFFERS}
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]  # nn.Module's


_is_used = False
"""Whether any module of the process has scales."""


def is_of_experts(module: ScaledModule) -> bool:
    """Whether a weight is marked as one that other ranks hold other values of."""
    return any(map(is_marked_expert, _weights(module)))


def _weights(module: ScaledModule) -> Any:
    return (weight for name in module.weight_names if (weight := module._parameters.get(name)) is not None)


def _ones(module: ScaledModule, device: torch.device) -> Tensor:
    return torch.ones(len(_OPERANDS) * module.num_products, dtype=torch.float32, device=device)


def _empty_history(module: ScaledModule, length: int, device: torch.device) -> Tensor:
    history = torch.zeros(length, len(_OPERANDS) * module.num_products, dtype=torch.float32, device=device)
    history[0] = _NONE
    return history


# ---- The end of an iteration. ----


def _end_iteration(model: nn.Module, axes: Sequence[dist.ProcessGroup]) -> None:
    """Update all modules of a model. Modules that have run on other ranks alone take part: ranks send alike."""
    if not _is_used:
        return
    modules = [
        module
        for module in model.modules()
        if isinstance(module, ScaledModule) and module.num_products and not is_of_experts(module)
    ]
    uses = [use for module in modules if (use := module._scaling_use) is not None and use.recipe is not None]
    if not uses:
        return
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
    update_scales(modules, axes)


ends.append(_end_iteration)


@torch.no_grad()
def update_scales(modules: Sequence[ScaledModule], axes: Sequence[dist.ProcessGroup]) -> None:
    """Agree on amaxes, roll the histories, and set the scales.

    modules  those of one model, in the same order on all ranks
    axes     groups that join the model's ranks; a module's ``amax_reduction_group`` comes before them

    One reduction of all modules' amaxes for each group.
    """
    by_group: defaultdict[Any, list[Tensor]] = defaultdict(list)
    by_recipe: defaultdict[DelayedScaling, list[ScaledModule]] = defaultdict(list)
    for module in modules:
        use = module._scaling_use
        assert use is not None and use.recipe is not None, "it has run"
        use.recorded = False
        by_recipe[use.recipe].append(module)
        groups = () if not use.recipe.reduce_amax else (use.group,) if use.group is not None else tuple(axes)
        by_group[groups].append(_buffer(module, BUFFERS[1])[0])
    for groups, rows in by_group.items():
        # A NaN has no order, and two backends would reduce it to different values: Inf counts as it does.
        amaxes = torch.nan_to_num(torch.cat(rows), nan=torch.inf, posinf=torch.inf)
        for group in groups:
            dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
        torch._foreach_copy_(rows, list(amaxes.split([row.numel() for row in rows])))
    for recipe, found in by_recipe.items():
        _roll(recipe, found)


def _roll(recipe: DelayedScaling, modules: Sequence[ScaledModule]) -> None:
    histories = [_buffer(module, BUFFERS[1]) for module in modules]
    scales = [_buffer(module, BUFFERS[0]) for module in modules]
    before, old = torch.cat(histories, dim=1), torch.cat(scales)
    is_known = before[0] >= 0
    history = before.clone()
    history[0].clamp_(min=0.0)
    limit = torch.full_like(old, recipe.fp8_format.forward.max)
    limit[_OPERANDS["grad"] :: len(_OPERANDS)] = recipe.fp8_format.backward.max
    new = recipe.new_scales(history, limit, old)
    history = history.roll(-1, 0)
    history[0] = _NONE
    widths = [scale.numel() for scale in scales]
    torch._foreach_copy_(scales, list(torch.where(is_known, new, old).split(widths)))
    torch._foreach_copy_(histories, list(torch.where(is_known, history, before).split(widths, dim=1)))


def _buffer(module: ScaledModule, name: str) -> Tensor:
    value = module._buffers[name]
    assert value is not None, "it has a state"
    return value
