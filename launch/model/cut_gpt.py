"""A GPT whose blocks tensor-parallel ranks hold together: heads of attention, and columns of feed-forwards.

=================  ======================================  =============================================================
weight             rank r of n has                         its input, or output
=================  ======================================  =============================================================
attention.qkv      the r-th part of q's, k's and v's rows  input of all ranks (``enter``)
attention.out      the r-th part of the columns            output summed over ranks (``leave``)
ffn.gate_up        the r-th part of gate's and up's rows   input of all ranks
ffn.down           the r-th part of the columns            output summed over ranks
all others         all of it                               equal on all ranks
=================  ======================================  =============================================================

Each cut parameter is a plain one, which knows its ``ModelSlice``.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...ddp.plan.cut import Box
from ...ddp.plan.model_slice import ModelSlice, set_model_slice
from .feed_forward import FeedForward
from .gpt import GPT, Attention

__all__ = ["cut_gpt", "whole_of"]


def cut_gpt(model: GPT, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
    """Leave ``model`` what the ``rank``-th of ``size`` tensor-parallel ranks has. Before it is compiled or wrapped.

    group  those ranks; None only for a plan, which runs no forward

    The sizes are as ``MeshConfig.check_model`` wants them.
    """

    def cut(linear: Any, dim: int, parts: Sequence[int]) -> None:
        whole = linear.weight
        ends = accumulate(parts)
        starts = [end - part + rank * (part // size) for end, part in zip(ends, parts, strict=True)]
        boxes = []
        for start, part in zip(starts, parts, strict=True):
            offsets, sizes = [0] * whole.ndim, list(whole.shape)
            offsets[dim], sizes[dim] = start, part // size
            boxes.append(Box(tuple(offsets), tuple(sizes)))
        own = [whole.detach().narrow(dim, start, part // size) for start, part in zip(starts, parts, strict=True)]
        linear.weight = nn.Parameter(torch.cat(own, dim))
        linear.out_features, linear.in_features = linear.weight.shape
        linear.mark_delayed_weights()
        set_model_slice(linear.weight, ModelSlice(tuple(whole.shape), tuple(boxes), dim, group, "slice"))

    for module in model.modules():
        if isinstance(module, Attention):
            cut(module.qkv, 0, module.split)
            cut(module.out, 1, module.split[:1])
            module.num_heads, module.num_kv_heads = module.num_heads // size, module.num_kv_heads // size
            module.split = module.qkv.matrix_rows = [rows // size for rows in module.split]
            module.tensor_group = group
        elif isinstance(module, FeedForward):
            width = module.down.in_features
            cut(module.gate_up, 0, [width, width])
            cut(module.down, 1, [width])
            module.tensor_group = group


def whole_of(local: Tensor, held: ModelSlice | None) -> Tensor:
    """The whole parameter, of which ``local`` is this rank's part. Collective over the tensor-parallel ranks."""
    if held is None or held.dim is None or held.group is None:
        return local
    values = [torch.empty_like(local) for _ in range(held.group.size())]
    dist.all_gather(values, local.detach().contiguous(), group=held.group)
    boxes: list[Any] = [None] * len(values)
    dist.all_gather_object(boxes, held.boxes, group=held.group)
    whole = local.new_empty(held.shape)
    for part, of_rank in zip(values, boxes, strict=True):
        pieces = part.split([box.sizes[held.dim] for box in of_rank], held.dim)
        for box, piece in zip(of_rank, pieces, strict=True):
            whole[tuple(slice(at, at + n) for at, n in zip(*box, strict=True))] = piece
    return whole
