"""Times of calls on one GPU: by the clock, and of the device's work alone."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["device_microseconds", "time_calls", "time_captured"]


def device_microseconds(step: Callable[[], Any]) -> float:
    """The sum of the times of all kernels of a call, from a profiler's trace."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in trace.events() or () if event.device_type.name == "CUDA"]
    return float(sum(event.time_range.elapsed_us() for event in kernels))


def time_calls(step: Callable[[], Any], count: int) -> float:
    """Microseconds of a call, the mean of consecutive ones."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / count * 1e3


def time_captured(run: Callable[[], Any], count: int = 20) -> float:
    """Microseconds of the device's work of a call; the host's time does not count."""
    run()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    graph.replay()
    return statistics.median(time_calls(graph.replay, 1) for _ in range(5)) / count
