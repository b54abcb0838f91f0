"""Models whose layers sleep in backward, and one iteration of them with its times."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from delayed_group import CollectiveInterval, DelayedGroup
from sleepy import SleepInBackward
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import Linear

WIDTH = 8
LAYER_NUMEL = WIDTH * WIDTH + 2 * WIDTH  # weight, bias and spare: a bucket for each layer


class Layer(nn.Module):
    """A linear layer and a scale that some layers have and do not use; its backward takes a while."""

    def __init__(self, *, fused: bool, uses_spare: bool, sleep: SleepInBackward) -> None:
        super().__init__()
        self.linear = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=fused)
        self.spare = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.uses_spare = uses_spare
        self.sleep = sleep

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.linear(x).tanh()
        return self.sleep(y * self.spare if self.uses_spare else y)


class Tower(nn.Module):
    """Layers that run in the order of their names; ``registered`` says in which order they are registered."""

    def __init__(
        self,
        sleep: SleepInBackward,
        *,
        fused: bool,
        registered: Sequence[int] = range(8),
        unused_spares: Sequence[int] = (),
        skipped: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.running = [i for i in sorted(registered) if i not in skipped]
        layers = [Layer(fused=fused, uses_spare=i not in unused_spares, sleep=sleep) for i in sorted(registered)]
        for i in registered:
            self.add_module(f"layer{i}", layers[i])

    def forward(self, x: Tensor) -> Tensor:
        for i in self.running:
            x = self.get_submodule(f"layer{i}")(x)
        return x


class IterationTimes(NamedTuple):
    backward: tuple[float, float]
    collectives: list[CollectiveInterval]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batches_of(iteration: int, rank: int, num_microbatches: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(num_microbatches)]


def run_iteration(ddp: DistributedDataParallel, batches: Sequence[Tensor], group: DelayedGroup) -> IterationTimes:
    """All microbatches of one iteration, reduced; the last backward and the collectives that were run."""
    ddp.zero_grad_buffer()
    group.intervals.clear()
    backward = (0.0, 0.0)
    for i, batch in enumerate(batches):
        with ddp.no_sync() if i < len(batches) - 1 else nullcontext():
            loss = loss_of(ddp, batch) / len(batches)
            start = time.perf_counter()
            loss.backward()
            backward = (start, time.perf_counter())
    ddp.finish_grad_sync()
    return IterationTimes(backward, list(group.intervals))


def repeat_on_a_busy_machine(measure: Callable[[], dict[str, str]], attempts: int = 6) -> None:
    """Repeat ``measure``, which returns what was too slow by the name of what was timed, until each was once in time.

    Other processes' load stretches sleeps and collectives unequally. It can only spoil a measurement, so that one good
    one of a few proves the point; what does not overlap never gets there. Wrong results must raise, not be returned.
    """
    late = measure()
    for _ in range(attempts - 1):
        if not late:
            return
        time.sleep(0.2)
        again = measure()
        late = {name: again[name] for name in late if name in again}
    assert not late, f"too slow each time: {late}"
