"""What ranks that compute one sample, or hold the experts, together send each other in a step, from shapes alone.

Legend: n ranks, B sequences, T tokens of a rank's part of a sequence, D width of the model, H and K heads of queries
and of keys and values on a rank, C width of a head, k experts of a token.

========================  =============================================================  ==============================
in each block             all ranks hold                                                 each rank sends
========================  =============================================================  ==============================
tensor-parallel ranks     the inputs [B, T, D] of attention and feed-forward in          2 (n-1)/n of each
                          backward, their outputs in forward, as parts of sums
with sequence parallelism inputs and sums in forward and in backward, and inputs once     (n-1)/n of each
                          more for weight gradients of eager code
ranks with other experts  the T k rows of the chosen experts, sent and brought back, and      (n-1)/n of each, where
                          their probabilities; in backward their gradients               experts are chosen evenly
context-parallel ranks    q and the mixture [B, H, T, C], k and v [B, K, T, C], of all   (n-1)/n of each
                          n parts of a sequence; their gradients in backward
pipeline's ranks          between two stages [B, T, D] of each microbatch, and its        what a stage in the middle
                          gradient                                                       sends
in a ring                 k and v [B, H, T, C] in forward and in backward; their         n-1 of each, and n of the
                          gradients in backward, in fp32                                 gradients
========================  =============================================================  ==============================

Embedding and head of tensor-parallel ranks are together as one feed-forward, and the loss sums three numbers for each
token, in fp32: of a chunk of tokens, and in backward once more, with ``model.fused_loss``.
"""

import math
from typing import NamedTuple

from ...te_integration import LinearCrossEntropy
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
    mesh, settings = config.mesh, config.train
    tokens = settings.sequences_per_microbatch(mesh.data_ranks(ranks)) * (settings.sequence_length // mesh.cp)
    found = _over_tp(config, tokens), _over_cp(config, tokens), _over_pp(config, tokens), _over_ep(config, tokens)
    return tuple(each for each in found if each.ranks > 1)


def _over_tp(config: Config, tokens: int) -> Exchange:
    model, mesh, settings = config.model, config.mesh, config.train
    layers = -(-model.num_layers // mesh.pp)
    sums = 4 * layers + 2
    calls, whole = sums, 2 * sums  # a sum on all ranks is a scattered one, which is gathered
    if mesh.sequence_parallel:
        # What the products of eager code gather again. Heads that compute the loss keep what they have gathered.
        fuses = model.fuse_wgrad_accumulation or model.delay_wgrad_layers > 0
        blocks = 2 * layers * (fuses and not settings.compile and settings.recipe == "none")
        calls = whole = 2 * sums + blocks + (fuses and not model.fused_loss)
    losses = 1 + model.fused_loss  # whose backward computes them again
    nbytes = tokens * (whole * model.dim * model.dtype("param_dtype").itemsize + losses * 2 * 3 * 4)
    calls += 2 * losses * (-(-tokens // LinearCrossEntropy.chunk_tokens) if model.fused_loss else 1)
    times = settings.num_microbatches
    what = "sums and gathers of tensor-parallel ranks"
    return Exchange(what, mesh.tp, times * calls, times * nbytes * (mesh.tp - 1) // mesh.tp)


def _over_cp(config: Config, tokens: int) -> Exchange:
    model, cp, item = config.model, config.mesh.cp, config.model.dtype("param_dtype").itemsize
    times = -(-model.num_layers // config.mesh.pp) * config.train.num_microbatches
    heads = model.num_heads // config.mesh.tp
    size = 2 * tokens * model.head_dim  # keys and values of a head
    if config.mesh.cp_attention == "ring":
        nbytes = heads * size * (2 * (cp - 1) * item + cp * 4)
        return Exchange("keys and values of a ring", cp, times * (2 + cp), times * nbytes)
    kv_heads = math.lcm(model.num_kv_heads // config.mesh.tp, cp)
    nbytes = 2 * (heads + kv_heads) * size * item
    return Exchange("parts of sequences for heads", cp, 8 * times, times * nbytes * (cp - 1) // cp)


def _over_pp(config: Config, tokens: int) -> Exchange:
    model, mesh, calls = config.model, config.mesh, 2 * config.train.num_microbatches
    nbytes = tokens * model.dim * model.dtype("param_dtype").itemsize
    if mesh.sequence_parallel:
        nbytes //= mesh.tp
    return Exchange("activations to the next stage, gradients back", mesh.pp, calls, calls * nbytes)


def _over_ep(config: Config, tokens: int) -> Exchange:
    model, ep, times = config.model, config.mesh.ep, config.train.num_microbatches
    blocks = times * sum(map(model.has_experts, range(model.num_layers)))
    # A row goes with its fp32 probability, and comes back without; in backward it is the other way round.
    row = 2 * model.dim * model.dtype("param_dtype").itemsize + 4
    nbytes = 2 * blocks * model.top_k * tokens * row
    return Exchange("rows to experts and back", ep, 7 * blocks, nbytes * (ep - 1) // ep)
