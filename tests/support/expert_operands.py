"""What the tests of grouped kernels draw from: split sizes, dtypes, and the ways in which experts' tensors can lie."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["DTYPES", "NUM_PAD_ROWS", "SPLITS", "forms", "offsets_of"]

# The interpreter's tl.dot multiplies the bit patterns of bf16, and takes 10 ms for a tile.
DTYPES = {"cpu": [torch.float32, torch.float16], "cuda": [torch.float32, torch.float16, torch.bfloat16]}
SPLITS = {
    "uneven": [0, 37, 33, 1, 49],
    "all to one": [0, 0, 80, 0, 0],
    "whole tiles": [32, 64, 32, 32, 32],
    "nobody": [0, 0, 0, 0, 0],
}
NUM_PAD_ROWS = 20


def offsets_of(splits: Sequence[int], device: str) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(splits)], device=device)


def forms(packed: Tensor, form: str) -> Any:
    """The same matrices, lying otherwise."""
    if form == "packed":
        return packed
    if form == "backwards":
        flipped = packed.flip(0)
        return [flipped[len(packed) - 1 - e] for e in range(len(packed))]
    return [each.clone() for each in packed]
