"""What ranks that compute one sample together send each other in a step, from shapes alone.

Legend: n ranks, B sequences, T tokens of a rank's part of a sequence, D width of the model, H and K heads of queries
and of keys and values on a rank, C width of a head.

========================  =============================================================  ==============================
in each block             all ranks hold                                                 each rank sends
========================  =============================================================  ==============================
tensor-parallel ranks     the inputs [B, T, D] of attention and feed-forward in          2 (n-1)/n of each
                          backward, their outputs in forward, as parts of sums
with sequence parallelism inputs and sums in forward and in backward, and inputs once     (n-1)/n of each
                          more for weight gradients of eager code
context-parallel ranks    q and the mixture [B, H, T, C], k and v [B, K, T, C], of all   (n-1)/n of each
                          n parts of a sequence; their gradients in backward
in a ring                 k and v [B, H, T, C] in forward and in backward; their         n-1 of each, and n of the
                          gradients in backward, in fp32                                 gradients
========================  =============================================================  ==============================

Embedding and head of tensor-parallel ranks are together as one feed-forward, and the loss sums three numbers for each
token, in fp32.
"""

import math
from typing import NamedTuple

from ..config.run import Config

__all__ = ["Exchange", "exchanges_of"]


class Exchange(NamedTuple):
    """Collectives of one kind in a step, over all blocks and microbatches. What is recomputed is not counted."""

    what: str
    ranks: int
    calls: int
    nbytes: int
    """What each rank sends, on a GPU; on a CPU attention is in fp32."""


def exchanges_of(config: Config, ranks: int) -> tuple[Exchange, ...]:
    """What a run on so many ranks exchanges in a step; nothing where every rank has samples of its own."""
    model, mesh, settings = config.model, config.mesh, config.train
    if mesh.ranks_of_sample == 1:
        return ()
    rows = settings.sequences_per_microbatch(mesh.data_ranks(ranks))
    tokens = rows * (settings.sequence_length // mesh.cp)
    item = model.dtype("param_dtype").itemsize
    size = tokens * item
    passes = 2 * model.num_layers * settings.num_microbatches
    whole, sums = model.dim * size, 4 * model.num_layers + 2
    calls, summed = sums, 2 * sums * whole
    if mesh.sequence_parallel:
        # What the products of eager code gather again. Heads that compute the loss keep what they have gathered.
        fuses = model.fuse_wgrad_accumulation or model.delay_wgrad_layers > 0
        blocks = 2 * model.num_layers * (fuses and not settings.compile and settings.recipe == "none")
        calls = 2 * sums + blocks + (fuses and not model.fused_loss)
        summed = calls * whole
    calls, summed = calls + 2, summed + 2 * 3 * 4 * tokens
    heads, kv_heads = model.num_heads // mesh.tp, math.lcm(model.num_kv_heads // mesh.tp, mesh.cp)
    sent = 2 * (heads + kv_heads) * model.head_dim * size
    around = 2 * heads * model.head_dim * size  # keys and values
    ring = passes // 2 * (2 * (mesh.cp - 1) * around + mesh.cp * around // item * 4)
    found = (
        Exchange(
            "sums and gathers of tensor-parallel ranks",
            mesh.tp,
            calls * settings.num_microbatches,
            settings.num_microbatches * summed * (mesh.tp - 1) // mesh.tp,
        ),
        Exchange("parts of sequences for heads", mesh.cp, 4 * passes, passes * sent * (mesh.cp - 1) // mesh.cp),
    )
    if mesh.cp_attention == "ring":
        found = found[0], Exchange("keys and values of a ring", mesh.cp, passes // 2 * (2 + mesh.cp), ring)
    return tuple(each for each in found if each.ranks > 1)
