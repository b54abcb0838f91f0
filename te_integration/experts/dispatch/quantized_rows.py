"""Rows that travel to experts in 8 bits, as the recipe of the experts quantises them anyway.

::

    rows (bf16) -> elements and scales -> send -> rows (bf16) -> the experts find the same elements and scales

It is so where a scale is that of a part of one row, and a power of two: both survive the way through bf16, and the
products of rows have the same bits as without. Weight gradients, whose operands have scales along the tokens, see rows
that were rounded before.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ....kernels.quantized import Quantized, QuantSpec, ScaleForm, dequantize, quantize_both
from ...recipes import Recipe
from .transport import Meanwhile, TokenTransport

__all__ = ["row_spec", "send_rows"]


def row_spec(recipe: Recipe | None, operand: Literal["input", "grad"]) -> QuantSpec | None:
    """How the recipe quantises rows, if it has scales for parts of a row; None: not."""
    if recipe is None:
        return None
    spec, powers = recipe.specs(operand)[0], (ScaleForm.POWER_OF_TWO, ScaleForm.E8M0)
    survives = spec.block is not None and spec.block[0] == 1 and spec.scale in powers and not spec.stochastic
    return spec if survives else None


def send_rows(
    transport: TokenTransport,
    spec: QuantSpec | None,
    tensors: Sequence[Tensor],
    counts: Tensor,
    sent: Any,
    meanwhile: Meanwhile,
) -> tuple[list[Tensor], Tensor, Any]:
    """``transport.send``, where the first of ``tensors`` are the rows [R, D]."""
    rows, *others = tensors
    if spec is None:
        return transport.send(tensors, counts, sent, meanwhile)
    # A matrix without rows has no elements to find scales of.
    q, _ = quantize_both(rows if len(rows) else rows.new_zeros(1, rows.shape[1]), spec, None)
    assert q is not None and spec.block is not None
    # Without what pads a copy: kernels pad to more columns than the reference, which quantises a rank's only row.
    widths = (q.data, q.columns), (q.scale, -(-q.columns // spec.block[1]))
    travelling = [_words(tensor[: len(rows), :width]) for tensor, width in widths]
    (data, scale, *arrived), splits, sent = transport.send([*travelling, *others], counts, sent, meanwhile)
    received = Quantized(data.view(q.data.dtype), scale.view(q.scale.dtype), None, spec, q.columns)
    return [dequantize(received, rows.dtype) if len(data) else rows.new_empty(0, rows.shape[1]), *arrived], splits, sent


def _words(matrix: Tensor) -> Tensor:
    """The same bytes, in numbers that transports need not know as floats of 8 bits."""
    return matrix.contiguous().view(torch.int64 if matrix.shape[1] * matrix.itemsize % 8 == 0 else torch.uint8)
