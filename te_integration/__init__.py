"""Modules whose weight-gradient GEMM runs straight into ``main_grad``, and the conversion of existing models."""

from .convert import convert_linears as convert_linears
from .linear import Linear as Linear
from .wgrad_queue import WgradQueue as WgradQueue
from .wgrad_queue import delayed_wgrad as delayed_wgrad

__all__ = ["Linear", "WgradQueue", "convert_linears", "delayed_wgrad"]
