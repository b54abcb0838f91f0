"""Recipes of low precision, and ``autocast``, under which modules compute with quantised operands.

    product            operands, each contracted along its last dim     rows are
    y  = x W^T         x rows        W rows                             the tokens; output features
    dx = dy W          dy rows       W columns (W^T)                    the tokens; input features
    dW = dy^T x        dy columns    x columns                          output features; input features

Names and defaults are Transformer Engine's. Weight gradients are summed in fp32 in ``main_grad`` under every recipe.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

from ..ddp.graphs.compared_by_state import ComparedByState
from ..ddp.graphs.host.surroundings import modes, switches
from ..ddp.torch_internals import checkpointed_region, checkpointed_regions, current_backward
from ..kernels.quantized import Element, QuantSpec, ScaleForm

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
    "amax_group_now",
    "autocast",
    "recipe_named",
    "recipe_now",
]

Operand = Literal["input", "weight", "grad"]


class Format(Enum):
    """Elements of inputs and weights, and of gradients."""

    E4M3 = (Element.E4M3, Element.E4M3)
    HYBRID = (Element.E4M3, Element.E5M2)
    """E4M3 forward; E5M2 for gradients, which need its range."""

    @property
    def forward(self) -> Element:
        """The format of inputs and weights."""
        return self.value[0]

    @property
    def backward(self) -> Element:
        """The format of gradients of outputs."""
        return self.value[1]


@dataclass(frozen=True, kw_only=True)
class Recipe(ComparedByState, ABC):
    """How the operands of a linear layer's three products are quantised. Equal where class and all attributes are.

    emulate  quantise, and multiply what the elements stand for in fp32. On a CPU all recipes run so. On a GPU a recipe
             without kernels there raises ``RuntimeError`` unless it is emulated
    """

    emulate: bool = False

    @abstractmethod
    def spec(self, operand: Operand, *, columns: bool) -> QuantSpec:
        """How the operand is quantised, as it is or transposed (``columns``): the recipe's fields alone decide."""

    def specs(self, operand: Operand) -> tuple[QuantSpec, QuantSpec]:
        """``spec`` as it is and transposed; asked for once, since the host looks it up for each matrix."""
        known: dict[Operand, tuple[QuantSpec, QuantSpec]] = self.__dict__.setdefault("_specs", {})
        found = known.get(operand)
        if found is None:
            self.seal()
            rows, columns = self.spec(operand, columns=False), self.spec(operand, columns=True)
            found = known[operand] = rows, rows if rows == columns else columns
        return found

    def scale_of(self, operand: Operand) -> Tensor | None:
        """The scale of the whole operand, where it is known before; None: the operand's own values decide."""
        return None

    def amax_of(self, operand: Operand) -> Tensor | None:
        """Return the 0-dim fp32 tensor that records the operand's largest magnitude; None: nothing records it.

        Asked once for each matrix, which also has a ``scale_of``.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class _Float8TensorScaling(Recipe):
    """8 bits and one scale a tensor."""

    fp8_format: Format = Format.HYBRID

    def spec(self, operand: Operand, *, columns: bool) -> QuantSpec:
        """One scale in fp32."""
        element = self.fp8_format.backward if operand == "grad" else self.fp8_format.forward
        return QuantSpec(element, None, ScaleForm.FP32, emulated=self.emulate)


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(_Float8TensorScaling):
    """8 bits and one scale a tensor, from the tensor's own largest magnitude.

    fp8_format  elements: HYBRID, or E4M3 throughout
    """


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(_Float8TensorScaling):
    """8 bits and one scale a tensor, from the tensor's largest magnitudes (amaxes) in earlier iterations.

    margin             scales are ``(max / amax) / 2^margin``
    fp8_format         elements: HYBRID, or E4M3 throughout
    amax_history_len   iterations that are remembered, the last one among them
    amax_compute_algo  the amax for scales: the history's "max", its "most_recent", or a function of the history
                       [amax_history_len, n] that returns [n], on the device. Row 0 is the last iteration's
    reduce_amax        amaxes are the largest of all ranks of the model; False: of this rank alone

    ``te_integration/scaling`` says where the state is, and when it changes. Raises ``ValueError`` for an
    unknown ``amax_compute_algo`` and for a history without rows.
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] | Callable[[Tensor], Tensor] = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        if self.amax_history_len < 1:
            raise ValueError(f"DelayedScaling: amax_history_len must be at least 1, got {self.amax_history_len}")
        if self.amax_compute_algo not in ("max", "most_recent") and not callable(self.amax_compute_algo):
            raise ValueError(
                f'DelayedScaling: amax_compute_algo is "max", "most_recent" or a function, got '
                f"{self.amax_compute_algo!r}"
            )

    def new_scales(self, history: Tensor, limit: Tensor, old: Tensor) -> Tensor:
        """[n] the scales after an iteration. An amax of 0, Inf or NaN keeps the old one.

        history  [L, n] amaxes, row 0 the last iteration's
        limit    [n] the elements' largest magnitudes
        old      [n] the scales before

        Raises ``ValueError`` where a function gives another shape.
        """
        if self.amax_compute_algo == "max":
            amax = history.amax(0)
        elif self.amax_compute_algo == "most_recent":
            amax = history[0]
        else:
            amax = self.amax_compute_algo(history.clone())
            if amax.shape != old.shape:
                raise ValueError(
                    f"DelayedScaling: amax_compute_algo takes {list(history.shape)} and must return "
                    f"{list(old.shape)}, got {list(amax.shape)}"
                )
        scales = ((limit / amax) / 2.0**self.margin).clamp(max=torch.finfo(torch.float32).max)
        return torch.where((amax > 0) & amax.isfinite(), scales, old)


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """8 bits (E4M3) and a power of two for each 128 elements of inputs and gradients, and each 128 x 128 of weights."""

    def spec(self, operand: Operand, *, columns: bool) -> QuantSpec:
        """1 x 128 along the contraction, or 128 x 128."""
        height = 128 if operand == "weight" else 1
        return QuantSpec(Element.E4M3, (height, 128), ScaleForm.POWER_OF_TWO, emulated=self.emulate)


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """8 bits (E4M3) and an exponent of 8 bits for each 32 elements along the contraction (OCP Microscaling, 2023)."""

    def spec(self, operand: Operand, *, columns: bool) -> QuantSpec:
        """1 x 32 along the contraction, weights too."""
        return QuantSpec(Element.E4M3, (1, 32), ScaleForm.E8M0, emulated=self.emulate)


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """4 bits (E2M1), a scale in E4M3 for each 16 elements (16 x 16 of weights), and one fp32 factor a tensor.

    disable_rht                  no random Hadamard transform of the weight gradient's operands along the tokens
    disable_stochastic_rounding  gradients are rounded to nearest
    disable_2d_quantization      weights have a scale for each 16 elements along the contraction
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False

    def spec(self, operand: Operand, *, columns: bool) -> QuantSpec:
        """1 x 16 along the contraction, or 16 x 16."""
        if operand == "weight":
            height = 1 if self.disable_2d_quantization else 16
            return QuantSpec(Element.E2M1, (height, 16), ScaleForm.E4M3, emulated=self.emulate)
        return QuantSpec(
            Element.E2M1,
            (1, 16),
            ScaleForm.E4M3,
            rotated=columns and not self.disable_rht,
            stochastic=operand == "grad" and not self.disable_stochastic_rounding,
            emulated=self.emulate,
        )


_NAMED: dict[str, type[Recipe]] = {
    "float8_current": Float8CurrentScaling,
    "float8_delayed": DelayedScaling,
    "float8_block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}


def recipe_named(name: str, *, emulate: bool = False) -> Recipe | None:
    """The recipe of a name in a configuration, with its defaults; None for "none"."""
    return None if name == "none" else _NAMED[name](emulate=emulate)


class _State(threading.local):
    recipe: Recipe | None = None
    group: Any = None
    """``amax_reduction_group`` of the innermost block."""
    region: Any = None
    """The checkpointed region in which the innermost block was entered; None outside of regions."""


_state = _State()

_num_blocks = 0
"""``autocast`` blocks with a recipe that are open in any thread."""

may_be_any = False
"""True while a forward of any thread may have a recipe: compilers read this in traced code, as a constant.

Two values alone, since compiled code is compiled again for each.
"""


blocks_in_trace = 0
"""In code that a compiler traces: ``autocast`` blocks that the traced code itself has entered. Elsewhere 0."""

_numbered: list[Recipe] = []


def number_of(recipe: Recipe | None) -> int:
    """A number that stands for equal recipes in compiled graphs; -1 for None."""
    if recipe is None:
        return -1
    if recipe not in _numbered:
        _numbered.append(recipe)
    return _numbered.index(recipe)


def recipe_of(number: int) -> Recipe:
    """The recipe of a ``number_of``."""
    return _numbered[number]


_region_untraced: Any = torch.compiler.disable(checkpointed_region)
"""Beside compiled code a compiler would take this function's frame, and warn of what it calls."""


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
) -> Iterator[None]:
    """Around forwards: modules quantise the operands of their products as ``recipe`` says, in backward too.

    enabled               False: no recipe in this block, whatever is around it
    calibrating           must be False: amaxes are recorded by quantised products alone
    recipe                None: ``Float8CurrentScaling()``. One recipe object may serve all blocks
    amax_reduction_group  with ``DelayedScaling``: the ranks whose amaxes count; None: those of the wrapper, and without
                          a wrapper this rank alone

    Blocks nest, and belong to a thread. A forward is quantised in bf16 and fp16: the parameters' dtype, or that of
    ``torch.autocast``, which may be around too. fp32 and fp64 modules compute as without a recipe, and a warning says
    so. What ``torch.utils.checkpoint(use_reentrant=False)`` computes again has the recipe of its first forward.
    """
    global _num_blocks, blocks_in_trace
    if calibrating:
        raise ValueError(
            "autocast: calibrating=True (amaxes without quantisation) is not supported; train a few iterations under "
            "DelayedScaling instead, which begins with scales of 1"
        )
    if amax_reduction_group is not None and not isinstance(recipe, DelayedScaling):
        raise ValueError("autocast: amax_reduction_group belongs to DelayedScaling; other recipes keep no amaxes")
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(f"autocast takes a recipe of maingrad.te_integration, not {type(recipe).__name__}")
    before = _state.recipe, _state.region, _state.group
    is_traced = torch.compiler.is_compiling()
    region = None if is_traced else _region_untraced()
    if recipe is not None and not is_traced:
        recipe.seal()
    _state.recipe = (recipe or _DEFAULT) if enabled else None
    _state.group = amax_reduction_group
    _state.region = None if region is None else region[0]
    _num_blocks += enabled
    blocks_in_trace += is_traced
    _update_may_be_any()
    try:
        yield
    finally:
        _state.recipe, _state.region, _state.group = before
        _num_blocks -= enabled
        blocks_in_trace -= is_traced
        _update_may_be_any()


_DEFAULT = Float8CurrentScaling()

_regions: "weakref.WeakKeyDictionary[Any, Recipe]" = weakref.WeakKeyDictionary()
"""The recipe around each checkpointed region whose first forward had one around it."""


def _note_regions(frames: list[Any], recipe: Recipe) -> None:
    for frame in frames:
        if frame not in _regions:
            weakref.finalize(frame, _update_may_be_any).atexit = False  # references made first are told last
            _regions[frame] = recipe


def _update_may_be_any() -> None:
    """A block begins or ends, or a region's graph was freed."""
    global may_be_any
    may_be_any = _num_blocks > 0 or bool(_regions)


def recipe_now() -> Recipe | None:
    """The recipe of the running forward; in a recompute that of the first forward.

    A block inside a region is entered again in the recompute, and counts. A block around the region is closed by then,
    and a block around the backward does not count. Of nested regions the recompute of an outer one is the first forward
    of a new inner one.
    """
    recipe = _state.recipe
    if _num_blocks == 0 and not _regions:
        return None
    first: list[Any] = []
    for frame, again in checkpointed_regions():
        if frame is _state.region:
            break
        if again:
            recipe = _regions.get(frame)
            break
        first.append(frame)
    if recipe is not None:
        _note_regions(first, recipe)
    return recipe


def amax_group_now() -> Any:
    """``amax_reduction_group`` of the innermost block."""
    return _state.group


def is_recomputed_without_region() -> bool:
    """Return True if a forward runs in a backward, and not in a region: reentrant ``torch.utils.checkpoint``."""
    return current_backward() != -1 and not checkpointed_regions()


def _mode() -> Recipe | None:
    return _state.recipe


switches.append("ignores_recipes")
modes.append(_mode)  # a graphed step that is called under autocast has a graph of its own
