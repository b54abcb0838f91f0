"""A step leaves gathers under way that nobody has waited for yet, and whatever comes next may write to their memory.

Gathers keep to the letter here (``strict_gathers``): before somebody waits nothing has arrived, and what a rank sends
must stay as it is. A backend that is fast hides both.
"""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from strict_gathers import strict_gathers
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.launch import simulate

RANKS = 2
DTYPES = [torch.float32, torch.bfloat16]
"""Parameters that are their own masters, and some that are rounded."""


class Heads(nn.Module):
    """A trunk and two heads, of which each step uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.trunk(x).tanh())


class Job:
    """A training program of one rank."""

    def __init__(self, dtype: torch.dtype, *, overlap: bool) -> None:
        torch.manual_seed(0)
        self.net = Heads().to(dtype)
        self.dtype = dtype
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=overlap, bucket_size=1
        )
        self.model = DistributedDataParallel(self.net, config)
        self.optimizer = DistributedOptimizer(self.model, lr=0.05)
        self.storage = [param.detach() for param in self.net.parameters()]  # as a captured graph has it: it never waits

    def step(self, index: int, head: int) -> None:
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))
        self.model(rows.to(self.dtype), head).square().mean().backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.model.zero_grad_buffer()

    def masters(self) -> list[Tensor]:
        return [master for group in self.optimizer.param_groups for master in group["params"]]

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.net.parameters()]


def step_again(job: Job) -> None:
    """A step without a read of the other head."""
    job.step(2, head=0)


def step_without_forward(job: Job) -> None:
    job.model.finish_grad_sync()
    job.optimizer.step()


def load_its_state(job: Job) -> None:
    state = copy.deepcopy(job.optimizer.state_dict())
    job.step(2, head=0)
    job.optimizer.load_state_dict(state)


def write_to_masters(job: Job) -> None:
    job.optimizer.finish_param_sync()
    step_without_forward(job)
    if job.dtype is torch.float32:  # they are what is being gathered
        job.optimizer.finish_param_sync()
    with torch.no_grad():
        for master in job.masters():
            master.mul_(0.5)
    job.optimizer.mark_loaded()


PROGRAMS: list[Callable[[Job], None]] = [step_again, step_without_forward, load_its_state, write_to_masters]


def run(program: Callable[[Job], None], dtype: torch.dtype, overlap: bool) -> list[Tensor]:
    job = Job(dtype, overlap=overlap)
    for index in range(2):
        job.step(index, head=0)
    program(job)
    return job.weights()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.sampled(1)
def test_what_comes_after_a_step_waits_for_its_gathers(program: Callable[[Job], None], dtype: torch.dtype) -> None:
    expected = simulate(run, RANKS, program, dtype, False)
    with strict_gathers() as launched:
        found = simulate(run, RANKS, program, dtype, True)
    assert launched
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("how", ["without overlap", "finish_param_sync", "mark_loaded"])
def test_memory_that_nobody_asks_for_has_arrived(how: str) -> None:
    """Without overlap, or when the program has waited: what reads parameters by their address sees no difference."""

    def train() -> None:
        job = Job(torch.float32, overlap=how != "without overlap")
        job.step(0, head=0)
        if how == "finish_param_sync":
            job.optimizer.finish_param_sync()
        elif how == "mark_loaded":
            job.optimizer.mark_loaded()
        assert all(bool(part.isfinite().all()) for part in job.storage)

    with strict_gathers() as launched:
        simulate(train, RANKS)
    assert launched
