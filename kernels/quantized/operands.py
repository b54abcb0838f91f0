"""``quantize_both``: the copies of a matrix that products take, and which devices have kernels for them."""

import torch
from torch import Tensor

from ..compat import HAS_TRITON
from .quantize import quantize, record_amax
from .spec import Quantized, QuantSpec, ScaleForm

if HAS_TRITON:
    from ..triton_support import capability_of
    from .quantize_triton import empty_copy, quantize_triton

__all__ = ["form_of", "has_kernels", "lacking", "quantize_both", "quantized_like"]

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
    spec = form_of(rows, columns)
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


def form_of(rows: QuantSpec | None, columns: QuantSpec | None) -> QuantSpec | None:
    """The spec of both copies, or of the one that is wanted; None where they differ: kernels write one form."""
    if rows is None or columns is None or rows is columns or rows == columns:
        return rows or columns
    return None


def quantized_like(x: Tensor, spec: QuantSpec) -> tuple[Tensor, ...]:
    """Fakes of the tensors of a transposed copy: that of ``x.t()`` by ``spec``, for a fake x [R, C]."""
    if min(x.shape) > 1 and x.dtype in _HALF and has_kernels(spec, x.device):
        return empty_copy(x.shape[0], x.shape[1], spec, x, transposed=True).tensors
    return quantize(x, spec).tensors


def has_kernels(spec: QuantSpec, device: torch.device) -> bool:
    """Whether kernels quantise by ``spec`` on ``device``, and multiply."""
    return device.type == "cuda" and not spec.emulated and lacking(spec, device) is None


def lacking(spec: QuantSpec, device: torch.device) -> str | None:
    """What a GPU lacks for kernels of ``spec``; None: nothing."""
    capability = capability_of(device) if HAS_TRITON else None
    if capability is None:
        return "an NVIDIA GPU and Triton"
    if spec.scale is ScaleForm.FP32 and spec.block is None:
        return None if capability >= (8, 9) else "compute capability 8.9 or higher"
    if spec.scale is ScaleForm.POWER_OF_TWO and spec.block in ((1, 128), (128, 128)):
        return None if capability[0] == 9 else "compute capability 9.0"
    return "kernels that are not written yet (and compute capability 10.0)"
