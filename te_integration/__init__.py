"""Modules whose weight-gradient GEMM runs straight into ``main_grad``, and the conversion of existing models."""

from .linear import Linear as Linear

__all__ = ["Linear"]
