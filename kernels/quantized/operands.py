"""The copies that products take of a matrix, of experts' rows and of their weights, and which devices have kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..compat import HAS_TRITON, capability_of
from ..experts import PerExpert
from ..grouped.products import alike
from .grouped import GroupedQuantized, quantize_grouped
from .quantize import quantize, record_amax
from .spec import Quantized, QuantSpec, ScaleForm

if HAS_TRITON:
    from .quantize_triton import empty_copy, quantize_experts_triton, quantize_grouped_triton, quantize_triton

__all__ = ["has_kernels", "lacking", "quantize_both", "quantize_experts", "quantize_grouped_both", "quantized_like"]

_HALF = (torch.bfloat16, torch.float16)


def quantize_both(
    x: Tensor,
    rows: QuantSpec | None,
    columns: QuantSpec | None,
    *,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """x [R, C] quantised as it is (``rows``) and transposed (``columns``); None: not this copy.

    On GPUs that have kernels x is read once for both copies (twice, where one scale is the tensor's and not given), and
    nothing else is written. Elsewhere, and for emulated specs, the reference runs; the bits are the same.

    scale  see ``quantize``
    amax   0-dim fp32, with a ``scale``: raised in place to the largest magnitude in x, where that is larger. NaN counts
           as 0

    Raises ``ValueError`` unless x is a matrix with elements, for a ``scale`` with another form of scales, and for an
    ``amax`` without a ``scale``.
    """
    if amax is not None and scale is None:
        raise ValueError("quantize_both records an amax where a scale is given")
    spec = _form_of(rows, columns)
    if (
        spec is not None
        and (scale is None or spec.block is None)
        and x.dim() == 2
        and min(x.shape) > 1  # Triton makes constants of counts that are 1; with them 3.6 leaves elements unwritten
        and x.dtype in _HALF
        and has_kernels(spec, x.device)
    ):
        return quantize_triton(x, rows, columns, scale, amax)
    if amax is not None:
        record_amax(x, amax)
    as_it_is = None if rows is None else quantize(x, rows, scale=scale)
    return as_it_is, None if columns is None else quantize(x.t(), columns, scale=scale)


def quantize_grouped_both(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, offsets: Tensor
) -> tuple[GroupedQuantized | None, GroupedQuantized | None]:
    """Each expert's rows of x [T, C] quantised as they are (``rows``), and transposed (``columns``); None: not so.

    As ``quantize_grouped`` for each; on GPUs with kernels x is read once for both copies, or twice where an expert has
    one scale.
    """
    spec = _form_of(rows, columns)
    if spec is not None and x.dim() == 2 and x.dtype in _HALF and has_kernels(spec, x.device, experts=True):
        return quantize_grouped_triton(x, rows, columns, offsets)
    as_it_is = None if rows is None else quantize_grouped(x, rows, offsets)
    return as_it_is, None if columns is None else quantize_grouped(x, columns, offsets, transposed=True)


def quantize_experts(
    matrices: PerExpert, rows: QuantSpec | None, columns: QuantSpec | None
) -> tuple[Quantized | None, Quantized | None]:
    """Each expert's matrix [R, C] quantised as it is (``rows``) and transposed (``columns``); None: not this copy.

    matrices  [E, R, C], or E x [R, C]: bf16, fp16 or fp32 with elements, of one shape
    """
    spec = _form_of(rows, columns)
    first = matrices[0]
    if spec is not None and first.dtype in _HALF and has_kernels(spec, first.device, experts=True):
        return quantize_experts_triton(alike(matrices), rows, columns)
    each = matrices.unbind() if isinstance(matrices, Tensor) else matrices
    as_it_is = None if rows is None else _stacked([quantize(matrix, rows) for matrix in each])
    return as_it_is, None if columns is None else _stacked([quantize(matrix.t(), columns) for matrix in each])


def _stacked(each: Sequence[Quantized]) -> Quantized:
    first = each[0]
    factors = [one.factor for one in each if one.factor is not None]
    with torch.autocast(first.data.device.type, enabled=False):  # it knows no dtypes of 8 bits
        data, scale = torch.stack([one.data for one in each]), torch.stack([one.scale for one in each])
        factor = torch.stack(factors) if factors else None
    return Quantized(data, scale, factor, first.spec, first.columns)


def _form_of(rows: QuantSpec | None, columns: QuantSpec | None) -> QuantSpec | None:
    """The spec of both copies, or of the one that is wanted; None where they differ: kernels write one form."""
    if rows is None or columns is None or rows is columns or rows == columns:
        return rows or columns
    return None


def quantized_like(x: Tensor, spec: QuantSpec) -> tuple[Tensor, ...]:
    """Fakes of the tensors of a transposed copy: that of ``x.t()`` by ``spec``, for a fake x [R, C]."""
    if min(x.shape) > 1 and x.dtype in _HALF and has_kernels(spec, x.device):
        return empty_copy(x.t(), spec, transposed=True).tensors
    return quantize(x, spec).tensors


def has_kernels(spec: QuantSpec, device: torch.device, *, experts: bool = False) -> bool:
    """Whether kernels quantise by ``spec`` on ``device``, and multiply; ``experts``: rows and weights of experts."""
    return device.type == "cuda" and not spec.emulated and lacking(spec, device, experts=experts) is None


def lacking(spec: QuantSpec, device: torch.device, *, experts: bool = False) -> str | None:
    """What a GPU lacks for kernels of ``spec``, or for those of ``experts``; None: nothing."""
    capability = capability_of(device) if HAS_TRITON else None
    if capability is None:
        return "an NVIDIA GPU and Triton"
    is_whole = spec.scale is ScaleForm.FP32 and spec.block is None
    if not is_whole and (spec.scale is not ScaleForm.POWER_OF_TWO or spec.block not in ((1, 128), (128, 128))):
        return "kernels that are not written yet (and compute capability 10.0)"
    if is_whole and not experts:
        return None if capability >= (8, 9) else "compute capability 8.9 or higher"
    return None if capability == (9, 0) else "compute capability 9.0"
