"""Kernels: one function per operation on tensors, each with a reference implementation in plain PyTorch.

This folder knows no parameters, modules or process groups.
"""

from .glu.scaled_glu import glu_named as glu_named
from .glu.scaled_glu import scaled_glu as scaled_glu
from .glu.scaled_glu import scaled_glu_backward as scaled_glu_backward
from .grouped.products import PerExpert as PerExpert
from .grouped.products import group_offsets as group_offsets
from .grouped.products import grouped_bias_grad as grouped_bias_grad
from .grouped.products import grouped_dgrad as grouped_dgrad
from .grouped.products import grouped_linear as grouped_linear
from .grouped.products import grouped_scale_grad as grouped_scale_grad
from .grouped.products import grouped_wgrad_accumulate as grouped_wgrad_accumulate
from .permutation.embedding import embedding_wgrad_accumulate as embedding_wgrad_accumulate
from .permutation.permute import permute_rows as permute_rows
from .permutation.permute import unpermute_rows as unpermute_rows
from .wgrad import wgrad_accumulate as wgrad_accumulate

__all__ = [
    "PerExpert",
    "embedding_wgrad_accumulate",
    "glu_named",
    "group_offsets",
    "grouped_bias_grad",
    "grouped_dgrad",
    "grouped_linear",
    "grouped_scale_grad",
    "grouped_wgrad_accumulate",
    "permute_rows",
    "scaled_glu",
    "scaled_glu_backward",
    "unpermute_rows",
    "wgrad_accumulate",
]
