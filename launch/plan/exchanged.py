"""What ranks that compute one sample, or hold the experts, together send each other in a step, from shapes alone.

Legend: n ranks, B sequences, T tokens of a rank's part of a sequence, D width of the model, H and K heads of queries
and of keys and values on a rank, C width of a head, k experts of a token.

========================  =============================================================  ==============================
in each block             all ranks hold                                                 each rank sends
========================  =============================================================  ==============================
tensor-parallel ranks     the inputs [B, T, D] of attention and feed-forward in          2 (n-1)/n of each
                          backward, their outputs in forward, as parts of sums
ranks with other experts  the T k rows of the chosen experts, sent and brought back, and      (n-1)/n of each, where
                          their probabilities; in backward their gradients               experts are chosen evenly
context-parallel ranks    q and the mixture [B, H, T, C], k and v [B, K, T, C], of all   (n-1)/n of each
                          n parts of a sequence; their gradients in backward
========================  =============================================================  ==============================
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
    rows = settings.sequences_per_microbatch(mesh.data_ranks(ranks))
    tokens = rows * (settings.sequence_length // mesh.cp)
    size = tokens * model.dtype("param_dtype").itemsize
    passes = 2 * model.num_layers * settings.num_microbatches
    heads, kv_heads = model.num_heads // mesh.tp, math.lcm(model.num_kv_heads // mesh.tp, mesh.cp)
    summed, sent = 2 * model.dim * size, 2 * (heads + kv_heads) * model.head_dim * size
    # A row goes with its fp32 probability, and comes back without; in backward it is the other way round.
    of_experts = settings.num_microbatches * sum(map(model.has_experts, range(model.num_layers)))
    travelling, calls = 2 * of_experts * model.top_k * (2 * model.dim * size + 4 * tokens), 7 * of_experts
    found = (
        Exchange("sums of tensor-parallel ranks", mesh.tp, 2 * passes, passes * 2 * summed * (mesh.tp - 1) // mesh.tp),
        Exchange("parts of sequences for heads", mesh.cp, 4 * passes, passes * sent * (mesh.cp - 1) // mesh.cp),
        Exchange("rows to experts and back", mesh.ep, calls, travelling * (mesh.ep - 1) // mesh.ep),
    )
    return tuple(each for each in found if each.ranks > 1)
