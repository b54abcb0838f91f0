"""Quantised operands of matrix products: elements of 8 or 4 bits with scales, and products of them.

One idea holds all of it: a product contracts the last dim of two quantised matrices, ``a [M, K] b [N, K]^T``. A matrix
that two products contract along different dims is quantised twice, as it is and transposed.
"""

from .operands import has_kernels as has_kernels
from .operands import lacking as lacking
from .operands import quantize_both as quantize_both
from .operands import quantized_like as quantized_like
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
    "QuantSpec",
    "Quantized",
    "ScaleForm",
    "dequantize",
    "has_kernels",
    "lacking",
    "quantize",
    "quantize_both",
    "quantized_like",
    "restored",
    "scaled_product",
    "scaled_wgrad_accumulate",
]
