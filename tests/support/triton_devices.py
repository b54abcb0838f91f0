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
    """What launchers allocate in here starts as NaN (far below zero, for integers): what stays unwritten is seen."""
    new_empty = torch.Tensor.new_empty

    def poisoned(self: torch.Tensor, *size: object, **options: object) -> torch.Tensor:
        made = new_empty(self, *size, **options)
        return made.fill_(float("nan") if made.is_floating_point() else -(2**31))

    with mock.patch.object(torch.Tensor, "new_empty", poisoned):
        yield
