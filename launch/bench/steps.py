"""Training steps as benchmarks measure them: tokens, microbatches, time and memory."""

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ..training.runtime import peak_nbytes

__all__ = [
    "accumulate",
    "free_memory",
    "in_rounds",
    "mark",
    "milliseconds",
    "peak_gib",
    "random_tokens",
    "reset_peak",
    "stepping",
    "synchronize",
    "time_steps",
]


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


def stepping(accumulated: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    """A training step. ``accumulated`` computes the gradients of all microbatches, and returns the loss."""

    def step(*args: Any) -> Tensor:
        loss = accumulated(*args)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark(device: torch.device) -> Any:
    """This moment: an event on the current stream; on the CPU the clock's time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Any, end: Any) -> float:
    """Between two of ``mark``, which the device has passed."""
    between: float = (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)
    return between


def time_steps(step: Callable[[], Tensor], num_steps: int, device: torch.device) -> tuple[float, float]:
    """Mean milliseconds of consecutive steps, and the last loss. The device is idle at the start and at the end."""
    loss = torch.zeros(())
    synchronize(device)
    start = mark(device)
    for _ in range(num_steps):
        loss = step()
    synchronize(device)  # work that other streams still have belongs to these steps
    end = mark(device)
    synchronize(device)
    return milliseconds(start, end) / num_steps, loss.item()


def in_rounds(
    num_rounds: int,
    names: Iterable[str],
    measure: Callable[[str], dict[str, Any]],
    device: torch.device,
    log: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Numbers by name: ``measure(name)`` in several rounds, each of which measures all in turn, so that drift hits all.

    Numbers whose key ends with "_ms" are medians over the rounds; others are the last round's. "spread_ms" is the
    largest minus the smallest "step_ms". Only the measured name's model exists, so that the peak memory is its own.
    """
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for index in range(num_rounds):
        for name, measured in rounds.items():
            measured.append(measure(name))
            numbers = ", ".join(f"{key} {value:.6g}" for key, value in measured[-1].items())
            log(f"round {index + 1}: {name:25s} {numbers}")
            free_memory(device)
    found = {}
    for name, measured in rounds.items():
        by_key = {key: [each[key] for each in measured] for key in measured[0]}
        found[name] = {key: statistics.median(of) if key.endswith("_ms") else of[-1] for key, of in by_key.items()}
        found[name]["spread_ms"] = max(by_key["step_ms"]) - min(by_key["step_ms"])
    return found


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
