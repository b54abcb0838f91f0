"""Quantised operands of matrix products: elements of 8 or 4 bits with scales, and products of them.

One idea holds all of it: a product contracts the last dim of two quantised matrices, ``a [M, K] b [N, K]^T``. A matrix
that two products contract along different dims is quantised twice, as it is and transposed. ``grouped.py`` has the same
for experts, each of which has some of the rows.
"""

from .grouped import GroupedQuantized as GroupedQuantized
from .grouped import dequantize_grouped as dequantize_grouped
from .grouped import quantize_grouped as quantize_grouped
from .operands import has_kernels as has_kernels
from .operands import lacking as lacking
from .operands import quantize_both as quantize_both
from .operands import quantize_experts as quantize_experts
from .operands import quantize_grouped_both as quantize_grouped_both
from .operands import quantized_like as quantized_like
from .products import scaled_grouped_product as scaled_grouped_product
from .products import scaled_grouped_wgrad_accumulate as scaled_grouped_wgrad_accumulate
from .products import scaled_product as scaled_product
from .products import scaled_wgrad_accumulate as scaled_wgrad_accumulate
from .quantize import dequantize as dequantize
from .quantize import quantize as quantize
from .spec import Element as Element
from .spec import Quantized as Quantized
from .spec import QuantSpec as QuantSpec
from .spec import ScaleForm as ScaleForm
from .spec import restored as restored

__all__ = [
    "Element",
    "GroupedQuantized",
    "QuantSpec",
    "Quantized",
    "ScaleForm",
    "dequantize",
    "dequantize_grouped",
    "has_kernels",
    "lacking",
    "quantize",
    "quantize_both",
    "quantize_experts",
    "quantize_grouped",
    "quantize_grouped_both",
    "quantized_like",
    "restored",
    "scaled_grouped_product",
    "scaled_grouped_wgrad_accumulate",
    "scaled_product",
    "scaled_wgrad_accumulate",
]
