"""Training steps as benchmarks measure them: tokens, microbatches, time and memory."""

import gc
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ..training.runtime import peak_nbytes

__all__ = ["accumulate", "free_memory", "peak_gib", "random_tokens", "reset_peak", "time_steps"]


class _Sizes(Protocol):
    @property
    def num_microbatches(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


def random_tokens(sizes: _Sizes, seed: int, device: torch.device) -> Tensor:
    """[M, 1, T + 1] int64: M microbatches of one sequence of T tokens and its last target. The same for every step."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shape = (sizes.num_microbatches, 1, sizes.num_tokens + 1)
    return torch.randint(0, sizes.vocab_size, shape, device=device, generator=generator)


def accumulate(
    forward: Callable[[Tensor, Tensor], Tensor],
    tokens: Tensor,
    *,
    not_last: Callable[[], AbstractContextManager[Any]] = nullcontext,
    before: Callable[[bool], None] | None = None,
) -> Tensor:
    """``accumulate_losses`` of ``forward``, which takes tokens and targets: tokens [M, 1, T + 1]."""
    return accumulate_losses(lambda row: forward(row[:, :-1], row[:, 1:]), tokens, not_last=not_last, before=before)


def accumulate_losses(
    loss_of: Callable[[Tensor], Tensor],
    microbatches: Tensor,
    *,
    not_last: Callable[[], AbstractContextManager[Any]] = nullcontext,
    before: Callable[[bool], None] | None = None,
) -> Tensor:
    """Forward and backward of all microbatches; returns the last one's loss, detached.

    not_last  the context of every microbatch but the last (``no_sync``)
    before    called before each microbatch; its argument says whether this microbatch is the last
    """
    num_microbatches = len(microbatches)
    for index, microbatch in enumerate(microbatches):
        is_last = index == num_microbatches - 1
        if before is not None:
            before(is_last)
        with nullcontext() if is_last else not_last():
            loss = loss_of(microbatch)
            (loss / num_microbatches).backward()
    return loss.detach()


def time_steps(step: Callable[[], Tensor], num_steps: int, device: torch.device) -> tuple[float, float]:
    """Mean milliseconds of consecutive steps, and the last loss. The device is idle at the start and at the end."""
    loss = torch.zeros(())
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(num_steps):
            loss = step()
        return (time.perf_counter() - began) * 1e3 / num_steps, loss.item()
    torch.cuda.synchronize(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(num_steps):
        loss = step()
    torch.cuda.synchronize(device)  # work that other streams still have belongs to these steps
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / num_steps, loss.item()


def reset_peak(device: torch.device) -> None:
    """Begin to measure what ``peak_gib`` returns."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """``peak_nbytes`` since ``reset_peak`` in GiB; 0 on the CPU."""
    return (peak_nbytes(device) or 0) / 2**30


def free_memory(device: torch.device) -> None:
    """Give back the memory of a model that nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
