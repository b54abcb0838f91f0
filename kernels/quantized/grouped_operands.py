"""``quantize_grouped_both`` and ``quantize_experts``: the copies that experts' products take, and where kernels are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..compat import HAS_TRITON
from ..experts import PerExpert
from ..grouped.products import alike
from .grouped import GroupedQuantized, QuantizedExperts, quantize_grouped
from .operands import form_of, lacking
from .quantize import quantize
from .spec import Quantized, QuantSpec

if HAS_TRITON:
    from ..triton_support import capability_of
    from .quantize_triton import quantize_experts_triton, quantize_grouped_triton

__all__ = ["has_grouped_kernels", "lacking_for_experts", "quantize_experts", "quantize_grouped_both"]

_HALF = (torch.bfloat16, torch.float16)


def quantize_grouped_both(
    x: Tensor, rows: QuantSpec | None, columns: QuantSpec | None, offsets: Tensor
) -> tuple[GroupedQuantized | None, GroupedQuantized | None]:
    """Each expert's rows of x [T, C] quantised as they are (``rows``), and transposed (``columns``); None: not so.

    As ``quantize_grouped`` for each; on GPUs with kernels x is read once for both copies, or twice where an expert has
    one scale.
    """
    spec = form_of(rows, columns)
    if spec is not None and x.dim() == 2 and x.dtype in _HALF and has_grouped_kernels(spec, x.device):
        return quantize_grouped_triton(x, rows, columns, offsets)
    as_it_is = None if rows is None else quantize_grouped(x, rows, offsets)
    return as_it_is, None if columns is None else quantize_grouped(x, columns, offsets, transposed=True)


def quantize_experts(
    matrices: PerExpert, rows: QuantSpec | None, columns: QuantSpec | None
) -> tuple[QuantizedExperts | None, QuantizedExperts | None]:
    """Each expert's matrix [R, C] quantised as it is (``rows``) and transposed (``columns``); None: not this copy.

    matrices  [E, R, C], or E x [R, C]: bf16, fp16 or fp32 with elements, of one shape
    """
    spec = form_of(rows, columns)
    first = matrices[0]
    if spec is not None and first.dtype in _HALF and has_grouped_kernels(spec, first.device):
        return quantize_experts_triton(alike(matrices), rows, columns)
    each = matrices.unbind() if isinstance(matrices, Tensor) else matrices
    as_it_is = None if rows is None else _stacked([quantize(matrix, rows) for matrix in each])
    return as_it_is, None if columns is None else _stacked([quantize(matrix.t(), columns) for matrix in each])


def _stacked(each: Sequence[Quantized]) -> QuantizedExperts:
    first = each[0]
    factors = [one.factor for one in each if one.factor is not None]
    with torch.autocast(first.data.device.type, enabled=False):  # it knows no dtypes of 8 bits
        data, scale = torch.stack([one.data for one in each]), torch.stack([one.scale for one in each])
        factor = torch.stack(factors) if factors else None
    return QuantizedExperts(data, scale, factor, first.spec, first.columns)


def has_grouped_kernels(spec: QuantSpec, device: torch.device) -> bool:
    """Whether kernels quantise experts' rows by ``spec`` on ``device``, and multiply."""
    return device.type == "cuda" and not spec.emulated and lacking_for_experts(spec, device) is None


def lacking_for_experts(spec: QuantSpec, device: torch.device) -> str | None:
    """What a GPU lacks for kernels of experts under ``spec``; None: nothing."""
    missing = lacking(spec, device)
    if missing is not None:
        return missing
    return None if capability_of(device) == (9, 0) else "compute capability 9.0"
