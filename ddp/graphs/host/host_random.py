"""Generators of random numbers on the host, and their states."""

import random
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from .host_places import Place

__all__ = ["default_generators", "state_of_generator"]


def default_generators(on_gpu: bool) -> Iterator[Place]:
    yield Place(lambda: {"": random.getstate()}, "the random numbers of Python (random)")
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield Place(lambda: {"": _of_numpy(numpy.random.get_state())}, "the random numbers of NumPy")
    if on_gpu:  # without a GPU they are those of the device, which replays draw
        yield Place(lambda: {"": _bytes(torch.get_rng_state())}, "torch's random numbers on the CPU")


def _of_numpy(state: Any) -> Hashable:
    _, keys, *rest = state
    return keys.tobytes(), *rest


def _bytes(state: Tensor) -> bytes:
    return bytes(state.tolist())  # NumPy may be missing


def state_of_generator(value: Any) -> Callable[[], Any] | None:
    """A function that tells the state of a generator of random numbers on the host; None for all else."""
    if isinstance(value, random.Random):
        return value.getstate
    if isinstance(value, torch.Generator):
        return (lambda: _bytes(value.get_state())) if value.device.type == "cpu" else None
    if type(value).__module__.startswith("numpy.random"):
        if hasattr(value, "bit_generator"):
            return lambda: str(value.bit_generator.state)
        if hasattr(value, "get_state"):
            return lambda: _of_numpy(value.get_state())
    return None
