"""Modules whose weight-gradient GEMM writes to ``main_grad``, and the conversion of existing models to them."""

from ..ddp.graphs.capture import GraphPool as GraphPool
from .conversion.convert import convert_linears as convert_linears
from .conversion.convert import unconvert as unconvert
from .dense import compiled_linear as compiled_linear  # how layers run in traced code
from .dense import quantized_linear as quantized_linear  # and under recipes
from .dense import tensor_parallel as tensor_parallel  # and over tensor-parallel ranks
from .dense.embedding import Embedding as Embedding
from .dense.layer_norm_linear import LayerNormLinear as LayerNormLinear
from .dense.layer_norm_mlp import LayerNormMLP as LayerNormMLP
from .dense.linear import Linear as Linear
from .experts.dispatch.dispatcher import TokenDispatcher as TokenDispatcher
from .experts.dispatch.symmetric import SymmetricExchange as SymmetricExchange
from .experts.dispatch.transport import TokenTransport as TokenTransport
from .experts.grouped_linear import GroupedLinear as GroupedLinear
from .experts.grouped_mlp import GroupedMLP as GroupedMLP
from .experts.moe_permutation import moe_permute as moe_permute
from .experts.moe_permutation import moe_permute_with_probs as moe_permute_with_probs
from .experts.moe_permutation import moe_unpermute as moe_unpermute
from .experts.scaled_activations import ScaledClampedQGeGLU as ScaledClampedQGeGLU
from .experts.scaled_activations import ScaledSwiGLU as ScaledSwiGLU
from .graphs.chunks import graphed_chunks as graphed_chunks
from .graphs.make_graphed_callables import make_graphed_callables as make_graphed_callables
from .head.linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
from .head.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from .recipes import DelayedScaling as DelayedScaling
from .recipes import Float8BlockScaling as Float8BlockScaling
from .recipes import Float8CurrentScaling as Float8CurrentScaling
from .recipes import Format as Format
from .recipes import MXFP8BlockScaling as MXFP8BlockScaling
from .recipes import NVFP4BlockScaling as NVFP4BlockScaling
from .recipes import Recipe as Recipe
from .recipes import autocast as autocast
from .sequential import Sequential as Sequential
from .wgrad_queue import WgradQueue as WgradQueue
from .wgrad_queue import delayed_wgrad as delayed_wgrad

__all__ = [
    "DelayedScaling",
    "Embedding",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "GraphPool",
    "GroupedLinear",
    "GroupedMLP",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "LinearCrossEntropy",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Recipe",
    "ScaledClampedQGeGLU",
    "ScaledSwiGLU",
    "Sequential",
    "SymmetricExchange",
    "TokenDispatcher",
    "TokenTransport",
    "WgradQueue",
    "autocast",
    "convert_linears",
    "delayed_wgrad",
    "graphed_chunks",
    "linear_cross_entropy",
    "make_graphed_callables",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_unpermute",
    "unconvert",
]
