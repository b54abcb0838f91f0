"""Ranks that take other steps than the others: refused on all ranks, while ranks may differ in all that is right."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from refusals import refusal
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, save_checkpoint
from maingrad.ddp.collectives import step_check
from maingrad.ddp.collectives.failure_report import FailureReporter
from maingrad.ddp.collectives.rank_grid import make_grid
from maingrad.ddp.collectives.step_check import StepCheck
from maingrad.launch import simulate

KINDS = ("ddp", "ddp, overlapped", "zero1")
OURS = "ddp, our optimizer"
WIDTH = 4


class Job:
    """A model in its wrapper, and its optimizer."""

    def __init__(self, kind: str, **config: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        shards = kind == "zero1"
        options = {"use_distributed_optimizer": shards, "overlap_grad_reduce": kind != "ddp", **config}
        self.model = DistributedDataParallel(net, DistributedDataParallelConfig(**options))
        self.optimizer: Any = (
            DistributedOptimizer(self.model, lr=0.1)
            if shards or kind == OURS
            else torch.optim.SGD(self.model.parameters(), lr=0.1)
        )

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        out: Tensor = self.model(torch.randn(3, WIDTH, generator=generator))
        return out.square().mean()

    def reduce(self) -> None:
        self.model.finish_grad_sync()
        if isinstance(self.optimizer, torch.optim.SGD):
            self.model.expose_grads()

    def step(self) -> None:
        self.optimizer.step()
        self.model.zero_grad()

    def train(self, step: int) -> None:
        self.loss(step).backward()
        self.reduce()
        self.step()


def skips_after_the_forward(job: Job, *, bad: bool, step: int) -> None:
    loss = job.loss(step)
    if bad:
        return
    loss.backward()
    job.reduce()
    job.step()


def skips_in_a_plain_loop(job: Job, *, bad: bool, step: int) -> None:
    loss = job.loss(step)
    if bad:
        return
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def skips_after_a_backward(job: Job, *, bad: bool, step: int) -> None:
    with job.model.no_sync():
        job.loss(step).backward()
    if bad:
        job.model.zero_grad()
        return
    job.loss(step).backward()
    job.reduce()
    job.step()


def skips_the_update(job: Job, *, bad: bool, step: int) -> None:
    job.loss(step).backward()
    job.reduce()
    if bad:
        job.model.zero_grad()
        return
    job.step()


SKIPS = {
    "after the forward": (skips_after_the_forward, KINDS),
    "in a plain loop": (skips_in_a_plain_loop, KINDS),
    "after a backward": (skips_after_a_backward, KINDS),
    # Under ZeRO-1 the update gathers parameters: other ranks wait for that gather.
    "the update": (skips_the_update, (*KINDS[:2], OURS)),
}
CASES = [(how, kind) for how, (_, kinds) in SKIPS.items() for kind in kinds]


def each_skips_another_batch(kind: str, how: str) -> tuple[str, list[int]]:
    """Every rank leaves out one batch of four, and no two ranks the same: all ranks reduce equally often."""
    job, done = Job(kind), []

    def run() -> None:
        for step in range(4):
            SKIPS[how][0](job, bad=step == 1 + dist.get_rank(), step=step)
            done.append(step)

    return refusal(run), done


@pytest.mark.parametrize(("how", "kind"), CASES)
def test_ranks_that_skip_different_batches(how: str, kind: str) -> None:
    (first, done), (second, _) = simulate(each_skips_another_batch, 2, kind, how)
    assert first == second
    if how == "the update":
        assert "different numbers of optimizer steps before iteration 3: 0 on rank 0, 1 on rank 1" in first
        assert done == [0, 1]
    else:
        assert "skipped different batches before iteration 2" in first
        assert "1 on rank 0, 0 on rank 1" in first and "torch.no_grad()" in first
        assert 2 not in done, "before the update with mixed gradients"


def reduces_twice(job: Job, *, twice: bool, reads: bool, step: int) -> None:
    job.loss(step).backward()
    if reads:
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
    if twice:
        job.loss(100 + step).backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def each_reduces_twice_in_another_step(kind: str, reads: bool, clips: bool) -> tuple[str, list[int]]:
    """All ranks reduce equally often in the end."""
    job, done = Job(kind), []
    if clips and kind == "zero1":
        job.optimizer.max_grad_norm = 1.0

    def run() -> None:
        for step in range(4):
            reduces_twice(job, twice=step == 1 + dist.get_rank(), reads=reads, step=step)
            done.append(step)

    found = refusal(run)
    if not reads:  # no gradients were mixed: ranks give the iteration up, and train on
        job.model.abandon_iteration()
        for step in range(2):
            reduces_twice(job, twice=step == 1, reads=False, step=step)
        mine = torch.cat([param.detach().flatten() for param in job.model.parameters()])
        dist.all_reduce(both := mine.clone())
        assert torch.equal(both, 2 * mine)
    return found, done


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_ranks_that_reduce_in_different_backwards(kind: str, clips: bool) -> None:
    (first, done), (second, _) = simulate(each_reduces_twice_in_another_step, 2, kind, False, clips)
    assert first == second
    assert "different numbers of backwards outside no_sync() in iteration 2: at least 2 on rank 0, 1 on rank 1" in first
    assert done == [0], "before gradients are mixed"


def test_ranks_that_reduce_in_different_backwards_of_the_first_iteration() -> None:
    def on_each_rank() -> str:
        job = Job("ddp, overlapped")
        return refusal(
            lambda: [reduces_twice(job, twice=s == dist.get_rank(), reads=False, step=s) for s in range(2)] and None
        )

    first, second = simulate(on_each_rank, 2)
    assert first == second
    assert "backwards outside no_sync() in iteration 1: at least 2 on rank 0, 1 on rank 1" in first


def test_a_second_backward_after_a_read_on_one_rank() -> None:
    """The read's comparison knows of no second backward: the next one tells."""
    for found, _ in simulate(each_reduces_twice_in_another_step, 2, "ddp, overlapped", True, False):
        assert "numbers of backwards outside no_sync() in iteration" in found
        assert "at least 2 on rank 0, 1 on rank 1" in found


def test_a_program_that_catches_the_number_of_backwards_goes_on() -> None:
    """The gradients of the iteration that was refused are discarded, and ranks count anew."""

    def on_each_rank() -> list[Tensor]:
        job = Job("ddp, overlapped")
        first = dist.get_rank() == 0
        said = refusal(
            lambda: [reduces_twice(job, twice=first and s == 1, reads=True, step=s) for s in range(3)] and None
        )
        assert "numbers of backwards outside no_sync()" in said
        job.model.abandon_iteration()
        for step in range(3):
            reduces_twice(job, twice=step == 1, reads=False, step=step)
        return [param.detach().clone() for param in job.model.parameters()]

    simulate(on_each_rank, 2)


def test_iterations_that_are_reduced_twice_count_once() -> None:
    def on_each_rank() -> str:
        job = Job("ddp, overlapped")
        for step in range(2):
            reduces_twice(job, twice=True, reads=True, step=step)
        return refusal(
            lambda: [skips_in_a_plain_loop(job, bad=s == dist.get_rank(), step=s) for s in range(3)] and None
        )

    first, second = simulate(on_each_rank, 2)
    assert first == second
    assert "skipped different batches before iteration 3" in first


def test_over_gloo() -> None:
    (first, _), (second, _) = run_ranks(each_reduces_twice_in_another_step, 2, "zero1", False, False)
    assert first == second
    assert "at least 2 on rank 0, 1 on rank 1" in first
    for how in ("after the forward", "the update"):
        (first, _), (second, _) = run_ranks(each_skips_another_batch, 2, "ddp", how)
        assert first == second
        assert "on rank 0" in first


def test_a_program_that_catches_it_goes_on() -> None:
    def on_each_rank() -> list[Tensor]:
        job = Job("ddp, overlapped")
        assert "skipped" in refusal(
            lambda: [skips_after_the_forward(job, bad=s == 1 + dist.get_rank(), step=s) for s in range(3)] and None
        )
        job.model.abandon_iteration()
        for step in range(3):
            job.train(step)
        return [param.detach().clone() for param in job.model.parameters()]

    first, second = simulate(on_each_rank, 2)
    assert all(map(torch.equal, first, second))


# ---- What is right on ranks that differ. ----


def a_look_before_training(job: Job) -> Iterator[None]:
    if dist.get_rank() == 0:
        job.loss(0)  # a summary of shapes
        with job.model.no_sync():
            job.loss(0).backward()  # a profile
        job.model.zero_grad()
    yield


def another_number_of_microbatches(job: Job) -> Iterator[None]:
    for step in range(3):
        for index in range(1 + (dist.get_rank() + step) % 3):
            with job.model.no_sync():
                job.loss(step + index).backward()
        yield


def microbatches_without_a_loss(job: Job) -> Iterator[None]:
    """All targets of some microbatches are padding: the program leaves out their backward."""
    for step in range(3):
        if dist.get_rank() != step:
            job.loss(step)
        else:
            job.loss(step).backward()
        yield
        with job.model.no_sync():
            job.loss(step).backward()
            if dist.get_rank() == 1:
                job.loss(step)
            else:
                job.loss(step).backward()
        yield


def backwards_through_one_forward(job: Job) -> Iterator[None]:
    """Which count once, like the forward."""
    for step in range(3):
        with job.model.no_sync():
            loss = job.loss(step)
            loss.backward(retain_graph=True)
            (loss if dist.get_rank() == step else job.loss(step)).backward()
        job.loss(10 + step).backward()
        yield


def no_batch_at_all(job: Job) -> Iterator[None]:
    for step in range(3):
        if dist.get_rank() == step:
            job.loss(step).backward()
        yield


def evaluations_on_one_rank(job: Job) -> Iterator[None]:
    for step in range(3):
        if dist.get_rank() == 1:
            with torch.no_grad():
                job.loss(step)
            job.model.eval()
            job.loss(step)
            job.model.train()
            tokens = job.model.module.register_forward_hook(lambda _, args, output: output.argmax(-1).float())
            job.loss(step)
            tokens.remove()
            weight = job.model.module.register_forward_hook(lambda module, args, output: module[0].weight)
            job.loss(step)  # of a parameter itself, as a module does that looks at its table
            weight.remove()
        job.loss(step).backward()
        yield


def two_losses(job: Job) -> Iterator[None]:
    for step in range(3):
        job.loss(step).backward()
        if step == 1:
            next(job.model.parameters()).grad.norm()  # type: ignore[union-attr]
        job.loss(10 + step).backward()
        yield


def a_batch_that_one_rank_could_not_load(job: Job) -> Iterator[None]:
    """All ranks hear of it, and give the iteration up."""
    for step in range(3):
        failed = torch.tensor(float(dist.get_rank() == step))
        if not failed:
            job.loss(step)
        dist.all_reduce(failed)
        if failed:
            job.model.abandon_iteration()
        job.loss(step).backward()
        yield


def all_skip_alike(job: Job) -> Iterator[None]:
    for step in range(4):
        loss = job.loss(step)
        if step % 2:
            continue
        with job.model.no_sync():
            loss.backward()
        if step == 2:
            job.model.zero_grad()
            continue
        yield


def parameters_copied_from_the_first_rank(job: Job) -> Iterator[None]:
    job.loss(0).backward()
    yield
    if isinstance(job.optimizer, torch.optim.SGD):
        job.loss(1).backward()
        job.reduce()
        if dist.get_rank() == 0:
            job.optimizer.step()
        job.model.broadcast_params()
        job.model.zero_grad()
    job.loss(2).backward()
    yield


RIGHT = [
    a_look_before_training,
    another_number_of_microbatches,
    microbatches_without_a_loss,
    backwards_through_one_forward,
    no_batch_at_all,
    evaluations_on_one_rank,
    two_losses,
    a_batch_that_one_rank_could_not_load,
    all_skip_alike,
    parameters_copied_from_the_first_rank,
]


def trains(kind: str, program: Callable[[Job], Iterator[None]]) -> list[Tensor]:
    job = Job(kind, find_unused_parameters=kind != "ddp")
    for _ in program(job):
        job.reduce()
        job.step()
    job.train(9)
    return [param.detach().clone() for param in job.model.parameters()]


@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(len(RIGHT))
def test_what_ranks_may_do_differently(kind: str, program: Callable[[Job], Iterator[None]]) -> None:
    first, *others = simulate(trains, 3, kind, program)
    assert all(all(map(torch.equal, first, other)) for other in others)


def test_hybrid_ranks_and_a_checkpoint(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks in two instances: the ranks that differ are in one of them, and all four raise, before a save too.

    On CUDA the comparison is read an iteration later, or by a save. Here it is left unread.
    """
    monkeypatch.setattr(step_check.StepCheck, "finish", lambda self: None)

    def on_each_rank(saves: bool) -> str:
        job = Job("zero1", num_distributed_optimizer_instances=2)

        def run() -> None:
            for step in range(4):
                skips_after_the_forward(job, bad=step == (1 if dist.get_rank() == 2 else 2), step=step)
            if saves:
                save_checkpoint(tmp_path / "saved", job.model, job.optimizer)
            else:
                job.train(4)

        return refusal(run)

    for saves in (False, True):
        found = simulate(on_each_rank, 4, saves)
        assert len(set(found)) == 1
        assert "forwards whose gradients were not used: 0 on ranks 0, 1, 3, 1 on rank 2" in found[0], found[0]


@pytest.mark.parametrize("weights_alone", [False, True])
def test_a_save_finds_what_the_last_step_did(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, weights_alone: bool
) -> None:
    """No iteration comes after it that would."""
    monkeypatch.setattr(step_check.StepCheck, "finish", lambda self: None)

    def on_each_rank() -> str:
        job = Job("zero1")
        for step in range(3):
            skips_after_the_forward(job, bad=step == (1 if dist.get_rank() == 1 else 2), step=step)
        return refusal(lambda: save_checkpoint(tmp_path / "saved", job.model, None if weights_alone else job.optimizer))

    for said in simulate(on_each_rank, 2):
        assert "forwards whose gradients were not used" in said, said
    assert not (tmp_path / "saved").exists()


def test_a_world_of_one_compares_nothing() -> None:
    def on_each_rank() -> None:
        for step in range(2):
            Job("ddp").train(step)

    launched: dict[int, list[str]] = {}
    for size in (1, 2):
        schedule: list[tuple[int, str]] = []
        simulate(on_each_rank, size, schedule=schedule)
        launched[size] = [event for _, event in schedule if event.startswith("launch all_reduce MAX int64")]
    assert launched[1] == []
    assert len(launched[2]) == 2 * 2, "one for each reduction"


# ---- Ranks that gather and reduce other units than the others: the error names the first difference, on all ranks.

UNITS = ("first", "second", "third")


def compared(
    gathers: list[str], reductions: list[list[str]], instances: int = 1, *, experts: bool = False
) -> list[str]:
    """What each rank is told after one comparison, and after an equal one behind it.

    gathers     for each rank the units that it gathers, by letter
    reductions  the same of its reductions
    experts     units over two neighbours each, whose comparison comes before those of the model's ranks
    """

    differ = len(set(gathers)) > 1 or len(set(map(tuple, reductions))) > 1

    def on_each_rank() -> str:
        grid, failures = make_grid(None, num_instances=instances), FailureReporter()
        steps = StepCheck(grid, failures, torch.device("cpu"), None)
        first = dist.get_rank() // 2 * 2
        of = dist.new_group([first, first + 1], use_local_synchronization=True) if experts else grid.inner
        log = steps.log_of(of)
        assert log is not None
        assert steps.log_of(of) is log, "one row for each group"
        index = {name[0]: log.add_name(name) for name in UNITS}
        for unit in gathers[dist.get_rank()]:
            log.record_gather(index[unit])
        for unit in reductions[dist.get_rank()]:
            log.record_reduction(index[unit])
        text = "alike"
        try:
            steps.start()
            if dist.get_rank() == 0 and differ:  # on CUDA the host reads the comparison an iteration later
                log.record_gather(index["t"])
            steps.finish()
        except RuntimeError as error:
            text = str(error)
        steps.next_iteration()
        log.record_gather(index["f"])
        steps.start()
        steps.finish()  # nothing of the difference is left
        return text

    return simulate(on_each_rank, len(gathers))


OTHER_UNITS = {
    "another unit": (["fs", "ft"], ["f", "f"], "gathered second on rank 0, third on rank 1"),
    "one unit more": (["fs", "f"], ["f", "f"], "gathered second on rank 0, nothing more on rank 1"),
    "another order": (["fst", "fst", "fts"], ["f"] * 3, "gathered second on ranks 0, 1, third on rank 2"),
    "gathers for reductions": (["f", "s"], ["s", "f"], "gathered first on rank 0, second on rank 1"),
    "reductions": (["f", "f"], ["fs", "sf"], "reduced first on rank 0, second on rank 1"),
}


@pytest.mark.parametrize("case", OTHER_UNITS)
def test_the_first_difference_is_named_on_all_ranks(case: str) -> None:
    gathers, reductions, expected = OTHER_UNITS[case]
    for text in compared(gathers, [list(each) for each in reductions]):
        assert text.startswith("ranks have run different units")
        assert expected in text
        assert "before the end of iteration 1" in text


def test_equal_orders_are_taken() -> None:
    assert compared(["fsf", "fsf"], [["s"], ["s"]]) == ["alike"] * 2


def test_ranks_of_other_instances_raise_too() -> None:
    """Their own groups are alike, and they would wait for the others."""
    texts = compared(["fs", "ft", "fs", "fs"], [["f"]] * 4, instances=2)
    assert all("gathered second on rank 0, third on rank 1" in text for text in texts)


def test_experts_that_differ_are_told_to_all_instances() -> None:
    """Two comparisons later: those inside instances and across them are alike."""
    texts = compared(["fs", "fs", "fs", "ft"], [["f"]] * 4, instances=2, experts=True)
    assert all("gathered second on rank 2, third on rank 3" in text for text in texts), texts


def test_steps_before_an_iteration_that_was_given_up_count() -> None:
    """Ranks give it up together, and their weights have parted before."""

    def on_each_rank() -> str:
        steps = StepCheck(make_grid(None), FailureReporter(), torch.device("cpu"), None)
        steps.start()
        steps.finish()
        if dist.get_rank() == 1:
            steps.record_update()
        steps.record_given_up()
        steps.next_iteration()
        steps.start()
        return refusal(steps.finish)

    for text in simulate(on_each_rank, 2):
        assert "different numbers of optimizer steps before iteration 2: 0 on rank 0, 1 on rank 1" in text


class Event:
    """Of a GPU: what a row holds is known to the host when the host has waited for the event."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def record(self, stream: Any) -> None:
        self.log.append("recorded")

    def synchronize(self) -> None:
        assert self.log == ["recorded"]
        self.log.append("waited for")


def test_on_a_gpu_all_ranks_raise_at_one_place_of_the_next_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of other instances too, whose own groups have taken the same steps."""
    empty, events = torch.empty, []
    monkeypatch.setattr(step_check, "OnStream", nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(Event()) or events[-1])  # type: ignore[func-returns-value]
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **more: empty(*size, **more))

    def on_each_rank() -> list[str]:
        stream: Any = SimpleNamespace()
        steps = StepCheck(make_grid(None, num_instances=2), FailureReporter(), torch.device("cpu"), stream)
        texts = []
        for iteration in range(4):
            if iteration == 1 and dist.get_rank() == 3:
                steps.record_update()
            texts.append(refusal(steps.start))
            steps.finish()
            steps.next_iteration()
        steps.read()
        return texts

    for texts in simulate(on_each_rank, 4):
        (found,) = [text for text in texts if "0 on ranks 0, 1, 2, 1 on rank 3" in text]
        assert texts.index(found) == 2
        assert texts.count("nothing was raised") == 3
    assert len(events) == 3 * 4
    assert all(event.log == ["recorded", "waited for"] for event in events)


def test_a_difference_behind_what_is_kept_has_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_check, "_LIMIT", 2)
    for text in compared(["fst", "fss"], [[], []]):
        assert "gathered in an order that differs after 2 units of a long evaluation" in text
