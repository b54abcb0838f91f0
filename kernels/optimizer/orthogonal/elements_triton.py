"""Triton kernels of Muon's passes over elements. Each program has BLOCK elements of one matrix.

Products are added in one rounding, as torch's CUDA operations do it: ``tl.fma`` says so, and leaves no choice to the
compiler.
"""

import triton
import triton.language as tl
from torch import Tensor

from ...compat import device_of
from ...triton_support import Launches, kinds_of

__all__ = ["apply_on_triton", "momentum_on_triton"]

_BLOCK = 4096


@triton.jit
def _lerp(start: tl.tensor, end: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """As ``torch.lerp``: from the end that is nearer."""
    weight = tl.zeros_like(start) + weight
    near = tl.fma(weight, end - start, start)
    return tl.where(weight < 0.5, near, tl.fma(start - end, 1.0 - weight, end))


@triton.jit
def _momentum_kernel(
    buffer: tl.tensor,
    grad: tl.tensor,
    update: tl.tensor,
    length: tl.tensor,
    stride_buffer: tl.tensor,
    stride_grad: tl.tensor,
    stride_update: tl.tensor,
    momentum: tl.tensor,
    rest: tl.tensor,
    NESTEROV: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # rest: 1 - momentum, rounded once
    matrix = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    g = tl.load(grad + matrix * stride_grad + at, mask=inside, other=0.0)
    m = tl.load(buffer + matrix * stride_buffer + at, mask=inside, other=0.0)
    m = _lerp(m, g, rest)
    tl.store(buffer + matrix * stride_buffer + at, m, mask=inside)
    if NESTEROV:
        m = _lerp(g, m, momentum)
    tl.store(update + matrix * stride_update + at, m, mask=inside)


@triton.jit
def _apply_kernel(
    param: tl.tensor,
    orthogonal: tl.tensor,
    length: tl.tensor,
    stride_param: tl.tensor,
    stride_orthogonal: tl.tensor,
    kept: tl.tensor,
    step: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    matrix = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    w = tl.load(param + matrix * stride_param + at, mask=inside, other=0.0)
    o = tl.load(orthogonal + matrix * stride_orthogonal + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.fma(o, tl.zeros_like(w) + step, w * kept)
    tl.store(param + matrix * stride_param + at, w, mask=inside)


def momentum_on_triton(buffer: Tensor, grad: Tensor, update: Tensor, momentum: float, *, nesterov: bool) -> None:
    """See ``update_momentum``."""
    grid, sizes = _layout(buffer, grad, update)
    key = buffer.get_device(), sizes, nesterov, kinds_of(buffer, grad, update)
    with device_of(buffer):
        _launch_momentum(key, grid, buffer, grad, update, *sizes, momentum, 1 - momentum, nesterov, _BLOCK, num_warps=8)


def apply_on_triton(param: Tensor, orthogonal: Tensor, kept: float, step: float) -> None:
    """``W = kept W + step O``."""
    grid, sizes = _layout(param, orthogonal)
    key = param.get_device(), sizes, kinds_of(param, orthogonal)
    with device_of(param):
        _launch_apply(key, grid, param, orthogonal, *sizes, kept, step, _BLOCK, num_warps=8)


def _layout(*tensors: Tensor) -> tuple[tuple[int, int, int], tuple[int, ...]]:
    """The grid; the elements of a matrix, and those from one matrix to the next, of each tensor."""
    count = tensors[0].shape[0] if tensors[0].dim() == 3 else 1
    length = tensors[0].numel() // count
    return (-(-length // _BLOCK), count, 1), (length, *(each.stride(0) if count > 1 else length for each in tensors))


_launch_momentum = Launches(_momentum_kernel, counts=("length", "stride_buffer", "stride_grad", "stride_update"))
_launch_apply = Launches(_apply_kernel, counts=("length", "stride_param", "stride_orthogonal"))
