"""Which operations pass over tensors of a given size."""

from collections.abc import Callable

import torch

__all__ = ["moves_of_size"]

MOVES = {
    "aten::add",
    "aten::add_",
    "aten::copy_",
    "aten::clone",
    "aten::zero_",
    "aten::fill_",
    "aten::mul_",
    "aten::sum",
}


def moves_of_size(run: Callable[[], None], shape: tuple[int, ...]) -> list[str]:
    """Operations of ``run`` that pass over a tensor of ``shape``, by a profiler's record."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        run()
    return [event.name for event in profile.events() if event.name in MOVES and list(shape) in event.input_shapes]
