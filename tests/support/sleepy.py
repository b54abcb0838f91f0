"""Backwards that take a given time."""

import time
from typing import Any

import torch
from torch import Tensor

__all__ = ["SleepInBackward"]


class SleepInBackward:
    """``y = x``, whose backward sleeps for ``seconds`` and notes when: ``intervals`` of ``time.perf_counter``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.intervals: list[tuple[float, float]] = []

    def __call__(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sleep: SleepInBackward) -> Tensor:
        ctx.sleep = sleep
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        start = time.perf_counter()
        if ctx.sleep.seconds:
            time.sleep(ctx.sleep.seconds)
        ctx.sleep.intervals.append((start, time.perf_counter()))
        return dy, None
