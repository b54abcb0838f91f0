"""Modules whose weight-gradient GEMM writes to ``main_grad``, and the conversion of existing models to them."""

from ..ddp.graphs.capture import GraphPool as GraphPool
from .convert import convert_linears as convert_linears
from .convert import unconvert as unconvert
from .dense.layer_norm_linear import LayerNormLinear as LayerNormLinear
from .dense.layer_norm_mlp import LayerNormMLP as LayerNormMLP
from .dense.linear import Linear as Linear
from .experts.grouped_linear import GroupedLinear as GroupedLinear
from .experts.grouped_mlp import GroupedMLP as GroupedMLP
from .experts.moe_permutation import moe_permute as moe_permute
from .experts.moe_permutation import moe_permute_with_probs as moe_permute_with_probs
from .experts.moe_permutation import moe_unpermute as moe_unpermute
from .experts.scaled_activations import ScaledClampedQGeGLU as ScaledClampedQGeGLU
from .experts.scaled_activations import ScaledSwiGLU as ScaledSwiGLU
from .graphs.chunks import graphed_chunks as graphed_chunks
from .graphs.make_graphed_callables import make_graphed_callables as make_graphed_callables
from .sequential import Sequential as Sequential
from .wgrad_queue import WgradQueue as WgradQueue
from .wgrad_queue import delayed_wgrad as delayed_wgrad

__all__ = [
    "GraphPool",
    "GroupedLinear",
    "GroupedMLP",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "ScaledClampedQGeGLU",
    "ScaledSwiGLU",
    "Sequential",
    "WgradQueue",
    "convert_linears",
    "delayed_wgrad",
    "graphed_chunks",
    "make_graphed_callables",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_unpermute",
    "unconvert",
]
