"""Which models there can be, whatever wraps them."""

from dataclasses import replace

from layers import HUGGING_FACE, IN_HALF, OURS, expert_paths
from programs import Block, Model

ROUNDED = ("bfloat16", "autocast")
"""Dtypes in which a choice by the largest feature may go another way."""


def valid_model(model: Model, dtype: str) -> Model:
    """The nearest model that there can be in a program of this dtype."""
    blocks = [_block(block, dtype) for block in model.blocks]
    model = replace(model, blocks=tuple(blocks), staged=model.staged and len(blocks) > 1)
    if not expert_paths(model):
        model = replace(model, variants=1)
    elif model.variants == 1:
        model = replace(model, variants=2)
    tie = model.tie
    if tie == "blocks" and sum(block.kind == "linear" for block in blocks) < 2:
        tie = "no"
    if tie == "blocks":
        blocks = [replace(block, single=False) if block.kind == "linear" else block for block in blocks]
    if model.frozen_stem:  # what is recomputed by a nested backward has gradients only where its inputs have some
        blocks = [replace(block, recompute=_not_nested(block.recompute)) for block in blocks]
        model = replace(model, recompute=_not_nested(model.recompute))
    stem = "lookup" if tie == "embedding" else model.stem
    if dtype in ROUNDED and stem == "lookup":
        stem, tie = "linear", "no" if tie == "embedding" else tie
    return replace(model, blocks=tuple(blocks), tie=tie, stem=stem)


def _not_nested(recompute: str) -> str:
    return "non-reentrant" if recompute == "reentrant" else recompute


def _block(block: Block, dtype: str) -> Block:
    if dtype in ROUNDED and block.kind not in IN_HALF:
        block = replace(block, kind="mlp")
    kind, plain = block.kind, Block()
    if block.kind not in OURS:
        block = replace(block, library=False)
    if not block.library:
        block = replace(block, fused=plain.fused, delayed=plain.delayed)
    if "grouped" not in kind:
        block = replace(block, packed=False, padded=block.padded and kind == "mixtral experts")
    if kind in HUGGING_FACE:
        block = replace(block, fused=plain.fused, delayed=plain.delayed)
    if not kind.startswith("norm "):
        block = replace(block, rms=False)
    if kind != "norm mlp":
        block = replace(block, gated=False)
    if kind != "branch" and block.frozen == "one way":
        block = replace(block, frozen="no")
    if kind == "lookup" and block.frozen != "no":  # its output may require no gradient
        block = replace(block, recompute=_not_nested(block.recompute))
    if kind == "experts":
        block = replace(block, frozen="no")  # a group of experts without any to train is refused
    if dtype != "float64" or kind in ("experts", "scale", "nothing"):
        block = replace(block, single=False)
    return block
