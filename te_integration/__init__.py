"""Modules whose weight-gradient GEMM runs straight into ``main_grad``, and the conversion of existing models."""

from .convert import convert_linears as convert_linears
from .linear import Linear as Linear

__all__ = ["Linear", "convert_linears"]
