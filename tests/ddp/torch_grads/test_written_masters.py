"""Programs that go over ``optimizer.param_groups``, ``optimizer.state`` and ``.grad`` of a sharded optimizer.

What they write reaches every rank's parameters, or is refused by name: never one rank's alone.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    save_checkpoint,
)
from maingrad.ddp.buckets import iteration_ends
from maingrad.ddp.buckets.iteration_ends import IterationWatcher
from maingrad.launch import simulate

RANKS = 2


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


class Job:
    """A model on two ranks and its optimizer."""

    def __init__(self, dtype: torch.dtype = torch.float32, sharded: bool = True, **options: Any) -> None:
        self.net = self.make_net().to(dtype)
        self.dtype = dtype
        config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, **options)
        self.model = DistributedDataParallel(self.net, config)
        self.optimizer = DistributedOptimizer(self.model, lr=0.1)

    @staticmethod
    def make_net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 3))

    def backward(self, step: int = 0) -> None:
        self.model(batch(step, dist.get_rank()).to(self.dtype)).square().mean().backward()
        self.model.finish_grad_sync()

    def step(self, step: int = 0) -> None:
        self.backward(step)
        self.optimizer.step()
        self.model.zero_grad_buffer()

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.model(torch.ones(1, 5, dtype=self.dtype))

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.net.parameters()]

    def masters(self) -> list[Tensor]:
        return [master for group in self.optimizer.param_groups for master in group["params"]]


def on_each(program: Callable[[Job], Any], *args: Any, **options: Any) -> list[Any]:
    return simulate(lambda: program(Job(*args, **options)), RANKS)


def no_grad(job: Job) -> None:
    with torch.no_grad():
        for master in job.masters():
            master.mul_(0.5)


def through_data(job: Job) -> None:
    for master in job.masters():
        master.data.copy_(master.data * 0.5)


def data_set(job: Job) -> None:
    for master in job.masters():
        master.data = master.data * 0.5


def all_at_once(job: Job) -> None:
    with torch.no_grad():
        torch._foreach_mul_(job.masters(), 0.5)


WRITES = (no_grad, through_data, data_set, all_at_once)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.sampled(16)
def test_what_is_written_to_masters_reaches_all_ranks_or_is_refused(
    write: Callable[[Job], None], dtype: torch.dtype, overlap: bool
) -> None:
    def program(job: Job) -> list[Tensor]:
        job.step()
        job.forward()
        before = job.weights()
        write(job)
        for use in (job.forward, job.backward):
            with pytest.raises(
                RuntimeError, match=r"forward: a tensor of optimizer\.param_groups was.*mark_loaded\(\)"
            ):
                use()
        job.optimizer.mark_loaded()
        job.forward()
        after = job.weights()
        torch.testing.assert_close(after, [weight * 0.5 for weight in before], rtol=1e-2, atol=1e-2)
        job.step(1)
        job.forward()
        return job.weights()

    first, second = on_each(program, dtype, overlap_param_gather=overlap)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_beside_whole_parameters_are_watched_too(dtype: torch.dtype) -> None:
    def program(job: Job) -> None:
        job.step()
        with torch.no_grad():
            job.masters()[-1].mul_(0.5)
        assert len(job.model.buckets) > 1
        with pytest.raises(RuntimeError, match=re.escape(f"of bucket '{job.model.buckets[-1].name}'")):
            job.forward()
        job.optimizer.mark_loaded()
        job.forward()

    on_each(program, dtype, sharded=False, bucket_size=1)


def test_a_look_at_a_masters_gradient_shows_that_an_optimizer_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program then decides to skip the step, and watchers of iterations hear so."""
    heard: list[bool] = []

    class Watcher(IterationWatcher):
        def ended(self, *_: Any) -> None: ...

        def stepped(self, *_: Any) -> None: ...

        def discarded(self, _: nn.Module, *, skipped: bool) -> None:
            heard.append(skipped)

    monkeypatch.setattr(iteration_ends, "_watchers", [Watcher()])
    model = DistributedDataParallel(Job.make_net())
    optimizer = DistributedOptimizer(model)
    for looks in (False, True):
        model(batch(0, 0)).sum().backward()
        if looks:
            assert optimizer.param_groups[0]["params"][0].grad.norm() > 0
        model.finish_grad_sync()
        optimizer.zero_grad()
    assert heard == [False, True]


def test_where_parameters_are_the_masters_writing_them_is_right() -> None:
    def program(job: Job) -> list[Tensor]:
        job.step()
        before = job.weights()
        no_grad(job)
        job.forward()
        assert all(torch.equal(now, then * 0.5) for now, then in zip(job.weights(), before, strict=True))
        job.step(1)
        return job.weights()

    first, second = on_each(program, sharded=False)
    assert all(map(torch.equal, first, second))


def test_the_other_remedy_writes_parameters() -> None:
    """Lookahead over the model's parameters, which are whole."""

    def program(job: Job) -> list[Tensor]:
        slow = job.weights()
        for step in range(4):
            job.step(step)
            if step % 2:
                with torch.no_grad():
                    for mine, param in zip(slow, job.net.parameters(), strict=True):
                        param.copy_(mine.lerp_(param, 0.5))
        job.step(9)
        return job.weights()

    plain = Job.make_net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    slow = [param.detach().clone() for param in plain.parameters()]
    for step in (0, 1, 2, 3, 9):
        optimizer.zero_grad()
        (sum(plain(batch(step, rank)).square().mean() for rank in range(RANKS)) / RANKS).backward()
        optimizer.step()
        if step % 2 and step < 9:
            with torch.no_grad():
                for mine, param in zip(slow, plain.parameters(), strict=True):
                    param.copy_(mine.lerp_(param, 0.5))
    for found in on_each(program):
        torch.testing.assert_close(found, [param.detach() for param in plain.parameters()])


# ---- .grad. ----


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("moment", ["at once", "after a read"])
@pytest.mark.sampled(4)
def test_a_whole_gradient_that_is_put_in_place_of_another_is_stepped(moment: str, overlap: bool) -> None:
    def program(job: Job) -> list[Tensor]:
        for step in range(3):
            job.model(batch(step, dist.get_rank())).square().mean().backward()
            if moment == "after a read":
                clip_grad_norm_(job.net.parameters(), 0.1)
            if step == 1:
                job.net[0].weight.grad = torch.full_like(job.net[0].weight, 0.25)
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.forward()
        return job.weights()

    plain = Job.make_net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        (sum(plain(batch(step, rank)).square().mean() for rank in range(RANKS)) / RANKS).backward()
        if moment == "after a read":
            clip_grad_norm_(plain.parameters(), 0.1)
        if step == 1:
            plain[0].weight.grad = torch.full_like(plain[0].weight, 0.25)
        optimizer.step()
        optimizer.zero_grad()
    for found in on_each(program, overlap_grad_reduce=overlap):
        torch.testing.assert_close(found, [param.detach() for param in plain.parameters()], rtol=1e-4, atol=1e-4)


def test_a_gradient_of_a_master_that_nobody_reads_is_refused() -> None:
    def program(job: Job) -> None:
        job.backward()
        job.masters()[-1].grad = torch.zeros_like(job.masters()[-1])  # one is enough
        with pytest.raises(RuntimeError, match=r"\.grad of a tensor of optimizer\.param_groups.*reduced_grads\(\)"):
            job.optimizer.step()

    on_each(program, bucket_size=1)


def test_clipping_of_masters_clips_the_whole_model() -> None:
    """Lightning clips the tensors of ``optimizer.param_groups``, of which each rank has its own."""

    def program(job: Job) -> None:
        twin = Job()
        for each in (job, twin):
            each.backward()
        expected = clip_grad_norm_(list(twin.model.parameters()), 1e-3)
        torch.testing.assert_close(clip_grad_norm_(job.masters(), 1e-3), expected)
        job.optimizer.step()
        twin.optimizer.step()
        for mine, theirs in zip(job.masters(), twin.masters(), strict=True):
            torch.testing.assert_close(mine.data, theirs.data)

    on_each(program)


# ---- State and groups. ----


def test_state_that_is_assigned_is_the_state_that_steps() -> None:
    def program(job: Job) -> None:
        fresh = Job()
        job.step()
        for mine, theirs in zip(job.masters(), fresh.masters(), strict=True):
            with torch.no_grad():
                mine.copy_(theirs)
        job.optimizer.mark_loaded()
        job.optimizer.state = defaultdict(dict)  # moments begin anew
        for each in (job, fresh):
            each.step(1)
            each.forward()
        assert all(map(torch.equal, job.weights(), fresh.weights()))
        assert all(part.state() for part in job.optimizer.slices if part.end > part.start)
        assert job.optimizer.state_dict()["state"]
        job.optimizer.state = {job.net[0].weight: {}}
        with pytest.raises(KeyError, match=r"none of parameter '0\.weight'.*slices"):
            job.optimizer.state_dict()

    on_each(program)


def test_groups_that_are_assigned_are_the_groups_that_step() -> None:
    def program(job: Job) -> None:
        job.step()
        before = job.weights()
        job.optimizer.param_groups = [{**group, "lr": 0.0} for group in job.optimizer.param_groups]
        job.step(1)
        job.forward()
        assert all(map(torch.equal, job.weights(), before))

    on_each(program)


def test_state_of_a_parameter_says_where_it_is(tmp_path: Path) -> None:
    def program(job: Job) -> None:
        job.step()
        with pytest.raises(KeyError, match=r"none of parameter '0\.weight': optimizer\.slices say"):
            job.optimizer.state[job.net[0].weight]
        assert job.optimizer.state.get(job.net[0].weight) is None
        job.optimizer.load_state_dict(job.optimizer.state_dict())
        with pytest.raises(KeyError, match="none of this key"):
            job.optimizer.state["step"]
        save_checkpoint(tmp_path / "saved", job.model, job.optimizer)
        part = next(part for part in job.optimizer.slices if part.end > part.start)
        assert part.state()["exp_avg"].shape == (part.end - part.start,)
        assert job.optimizer.state[part.updated] is not None

    on_each(program)
