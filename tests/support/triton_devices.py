"""Where a Triton launcher can be tested: in the interpreter on CPU tensors, or compiled on a GPU, not both at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

__all__ = ["LAUNCHER_DEVICES", "LAUNCHER_DTYPES", "nan_filled_memory", "rounding"]

_interpreted = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="Triton compiles for the GPU that is here; its interpreter runs where there is none",
)
_compiled = pytest.mark.gpu
_AROUND = 4096

LAUNCHER_DEVICES = [pytest.param("cpu", marks=_interpreted), pytest.param("cuda", marks=_compiled)]
LAUNCHER_DTYPES = [
    pytest.param(device, dtype, marks=mark)
    for device, mark in (("cpu", _interpreted), ("cuda", _compiled))
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
]


def rounding(device: str, dtype: torch.dtype) -> float:
    """Largest relative error of one store: half a unit; a whole one for bf16 in the interpreter, which truncates."""
    eps = torch.finfo(dtype).eps
    return eps if device == "cpu" and dtype is torch.bfloat16 else eps / 2


@contextmanager
def nan_filled_memory() -> Iterator[None]:
    """What launchers allocate in here starts as NaN (far below zero, for integers): what stays unwritten is seen.

    So is what is written around it: each tensor lies in the middle of a larger one.
    """
    new_empty = torch.Tensor.new_empty
    made: list[tuple[torch.Tensor, int]] = []

    def poisoned(self: torch.Tensor, *size: object, **options: object) -> torch.Tensor:
        like = new_empty(self, *size, **options)
        room = new_empty(self, like.numel() + 2 * _AROUND, dtype=like.dtype, device=like.device)
        room.fill_(float("nan") if like.is_floating_point() else -(2**31))
        made.append((room, like.numel()))
        return room[_AROUND : _AROUND + like.numel()].view(like.shape)

    with mock.patch.object(torch.Tensor, "new_empty", poisoned):
        yield
    for room, numel in made:
        elements = room.view(torch.uint8).view(len(room), -1)
        around = torch.cat([elements[:_AROUND], elements[_AROUND + numel :]])
        assert (around == around[0]).all(), "written outside of the memory"
