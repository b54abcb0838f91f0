"""Modules whose weight-gradient GEMM runs straight into ``main_grad``, and the conversion of models that have others."""

from .linear import Linear as Linear

__all__ = ["Linear"]
