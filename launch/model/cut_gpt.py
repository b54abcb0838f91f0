"""A GPT that tensor-parallel ranks hold together: heads of attention, columns of feed-forwards, and words.

=================  =====================================  =============================================================
weight             rank r of n has                        its input, or output
=================  =====================================  =============================================================
attention.qkv      the r-th part of q's, k's and v's rows input of all ranks
attention.out      the r-th part of the columns           output summed over ranks
ffn.gate_up        the r-th part of gate's and up's rows  input of all ranks
ffn.down           the r-th part of the columns           output summed over ranks
embedding          the r-th part of the rows              output summed over ranks
head               the r-th part of the rows              input of all ranks; losses exchange two numbers for each token
all others         all of it                              equal on all ranks
=================  =====================================  =============================================================

With sequence parallelism each rank has, between these, the r-th part of every sequence: inputs are gathered, sums are
scattered, and a norm's gradient is a part of a sum. ``te_integration/dense/tensor_parallel.py`` has the exchanges.

Each parameter is a plain one, which knows its ``ModelSlice``.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn

from ...ddp.plan.model_slice import set_model_slice, slice_of_blocks, slice_of_copy
from ...te_integration import LinearCrossEntropy
from ...te_integration.dense.tensor_parallel import exchange_over_ranks, ranks_of
from .feed_forward import FeedForward
from .gpt import GPT, Attention

__all__ = ["cut_gpt"]


def cut_gpt(model: GPT, group: dist.ProcessGroup, *, sequence_parallel: bool = False, runs: bool = True) -> None:
    """Leave ``model`` what this one of the tensor-parallel ranks has. Before it is compiled or wrapped.

    runs  False: for a plan, and ``group`` has a rank and a size, but no ranks

    The sizes are as ``MeshConfig.check_model`` wants them.
    """
    rank, size = group.rank(), group.size()
    ranks = ranks_of(group, 1 if sequence_parallel else None) if runs else None

    def cut(linear: Any, mode: Literal["column", "row"], parts: Sequence[int]) -> None:
        dim = 0 if mode == "column" else 1
        linear.weight = _cut(linear.weight, dim, parts, group)
        linear.out_features, linear.in_features = linear.weight.shape
        linear.mark_delayed_weights()
        if ranks is not None and not isinstance(linear, LinearCrossEntropy):  # ``loss_in_chunks`` exchanges for it
            exchange_over_ranks(linear, [mode], ranks, group)

    words = None if model.embedding is None else model.embedding.weight
    for module in model.modules():
        if isinstance(module, Attention):
            cut(module.qkv, "column", module.split)
            cut(module.out, "row", module.split[:1])
            module.num_heads, module.num_kv_heads = module.num_heads // size, module.num_kv_heads // size
            module.split = module.qkv.matrix_rows = [rows // size for rows in module.split]
        elif isinstance(module, FeedForward):
            width = module.down.in_features
            cut(module.gate_up, "column", [width, width])
            cut(module.down, "row", [width])
        elif isinstance(module, nn.RMSNorm) and sequence_parallel:
            set_model_slice(module.weight, slice_of_copy(tuple(module.weight.shape), group, "partial"))
    tied = model.head is not None and model.head.weight is words
    if model.head is not None:
        cut(model.head, "column", [model.vocab_size])
    if words is not None:
        model.embedding.weight = model.head.weight if tied else _cut(words, 0, [model.vocab_size], group)
        model.embedding.num_embeddings = len(model.embedding.weight)
        model.mark_shared_embedding()
    model.tensor_ranks, model.first_word = ranks, rank * -(-model.vocab_size // size)


def _cut(whole: Tensor, dim: int, blocks: Sequence[int], group: dist.ProcessGroup) -> nn.Parameter:
    """A rank's part of each of the ``blocks`` of ``whole`` along ``dim``."""
    held = slice_of_blocks(tuple(whole.shape), dim, blocks, group, group.rank())
    param = nn.Parameter(held.part_of(whole.detach()))
    set_model_slice(param, held)
    return param
