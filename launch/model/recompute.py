"""``train.recompute``: what backward computes again, instead of keeping it since the forward.

Regions are non-reentrant ``torch.utils.checkpoint``s inside a block's or its attention's forward. A unit of
``fully_shard`` is gathered around the whole block, so that recomputing gathers nothing.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..config.run import Config
from ..parallelizing.blocks import recompute

__all__ = ["recompute_blocks"]

_ATTENTION = ("attention", "self_attn", "attn")
"""What blocks call their attention."""
_aten = torch.ops.aten
_KEPT_OPERATORS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
"""Operators whose results ``operators`` keeps: they take most of a block's time."""


def recompute_blocks(blocks: Iterable[nn.Module], config: Config) -> None:
    """Recompute in every ``train.recompute_every``-th block as ``train.recompute`` says.

    blocks  with an ``attention`` (``self_attn``, ``attn``) for ``recompute = "attention"``

    Call this before the blocks are compiled, wrapped or sharded.
    Random numbers of the forward are drawn again alike.
    """
    settings = config.train
    if settings.recompute == "none":
        return
    for block in list(blocks)[:: settings.recompute_every]:
        region: nn.Module = block
        if settings.recompute == "attention":
            found = [getattr(block, name) for name in _ATTENTION if isinstance(getattr(block, name, None), nn.Module)]
            remedy = f'{type(block).__name__} has no module {" or ".join(_ATTENTION)}; use "blocks" or "operators"'
            settings.require(len(found) == 1, "recompute", remedy)
            region = found[0]
        # A graph cannot restore the state of a generator.
        how: dict[str, Any] = {"preserve_rng_state": config.may_draw or settings.cuda_graph is False}
        if settings.recompute == "operators":
            how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _KEPT_OPERATORS)
        recompute(region, **how)
