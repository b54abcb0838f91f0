"""Threads that read the model while the main thread trains it: no thread fails, all read gathered values, and training
is the same as without readers."""

import copy
import io
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from native_reader import build_native_reader, read_natively
from torch import Tensor, nn
from torch.nn import functional as F

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

STEPS = 12
READERS = 3
VOCABULARY, WIDTH = 16, 8


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))


class Trained:
    """A model, and one step of its training."""

    def __init__(self, overlap: bool = True) -> None:
        self.model = make_model()
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=overlap, bucket_size=64
        )
        self.ddp = DistributedDataParallel(self.model, config)
        self.optimizer = DistributedOptimizer(self.ddp, lr=0.05)
        self.kept = list(self.model.parameters())
        self.steps = 0

    def backward(self) -> None:
        generator = torch.Generator().manual_seed(100 * self.steps + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (4, 5), generator=generator)
        F.cross_entropy(self.ddp(tokens).flatten(0, 1), tokens.flatten()).backward()
        self.ddp.finish_grad_sync()

    def step(self) -> None:
        self.optimizer.step()
        self.ddp.zero_grad_buffer()
        self.steps += 1

    def values(self) -> list[Tensor]:
        self.optimizer.finish_param_sync()
        return [param.detach().clone() for param in self.kept]

    def is_plain(self) -> bool:
        """Whether parameters and modules are plain again."""
        modules = list(self.model)
        return (
            all(type(param) is nn.Parameter for param in self.kept)
            and all(type(module.__dict__["_parameters"]) is dict for module in modules)
            and not any(module._forward_pre_hooks for module in modules)
        )


@contextmanager
def readers(read: Callable[[], Any], count: int = READERS) -> Iterator[list[str]]:
    """Threads that call ``read`` again and again; yields their errors. All switch threads as often as can be."""
    stop, errors = threading.Event(), []

    def run() -> None:
        with torch.no_grad():
            while not stop.is_set():
                try:
                    read()
                except BaseException:
                    errors.append(traceback.format_exc())
                    return

    before = sys.getswitchinterval()
    if count:
        sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=run) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
        yield errors
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)


def forward(trained: Trained) -> None:
    trained.model(torch.arange(VOCABULARY))


def functions_in_python(trained: Trained) -> None:
    """Functions of torch that look at a parameter's class twice."""
    for param in trained.kept:
        assert len(param) > 0 and param.norm() >= 0 and F.relu(param).shape == param.shape
    x = F.embedding(torch.arange(VOCABULARY), trained.kept[0])
    for module in trained.model:
        if isinstance(module, nn.LayerNorm):
            x = F.layer_norm(x, (WIDTH,), module.weight, module.bias)


def kept_parameters(trained: Trained) -> None:
    torch._foreach_norm(trained.kept)
    for param in trained.kept:
        param * 1


def copies(trained: Trained) -> None:
    twin = copy.deepcopy(trained.model)
    assert all(type(param) is nn.Parameter for param in twin.parameters())
    assert all(type(param) is nn.Parameter for param in copy.deepcopy(trained.kept))
    assert all(type(value) is Tensor for value in trained.model.state_dict().values())


def averages(trained: Trained) -> None:
    """What a thread that averages weights, or writes them to a file, does."""
    vector = torch.nn.utils.parameters_to_vector(trained.model.parameters())
    assert type(vector) is Tensor
    torch.save(trained.model.state_dict(), io.BytesIO())


READS: dict[str, Callable[[Trained], None]] = {
    "forwards": forward,
    "functions in Python": functions_in_python,
    "kept parameters": kept_parameters,
    "copies": copies,
    "averages": averages,
}


def train_under_readers(how: str | None) -> tuple[list[str], bool, list[Tensor]]:
    trained = Trained()
    with readers(lambda: READS[how or ""](trained), READERS if how else 0) as errors:
        for _ in range(STEPS):
            trained.backward()
            trained.step()
    values = trained.values()
    return errors, trained.is_plain(), values


@pytest.mark.parametrize("how", READS)
@pytest.mark.sampled(1)
def test_training_goes_on_as_if_nobody_read(how: str) -> None:
    undisturbed = run_ranks(train_under_readers, 2, None)
    for (errors, plain, values), (_, _, expected) in zip(
        run_ranks(train_under_readers, 2, how, timeout=100.0), undisturbed, strict=True
    ):
        assert errors == []
        assert plain
        for one, other in zip(values, expected, strict=True):
            assert torch.equal(one, other)


# ---- What is read has arrived. ----


def seen_after_each_step(built: str, overlap: bool) -> list[Any]:
    """(step, weights) of every read; without overlap and readers, after every step.

    A lock keeps reads and steps apart. One rank's step comes late, so that the gathers of the others are under way.
    """
    trained, seen, lock = Trained(overlap), [], threading.Lock()

    def read() -> None:
        with lock:
            if trained.steps:
                own = [param for module in trained.model for param in module._parameters.values()]
                seen.append((trained.steps, [read_natively(built, param) for param in own]))
        time.sleep(1e-4)

    with readers(read, READERS if overlap else 0) as errors:
        for step in range(6):
            trained.backward()
            if dist.get_rank() == step % 2:
                time.sleep(0.05)
            with lock:
                trained.step()
            if not overlap:
                seen.append((trained.steps, trained.values()))
    assert errors == []
    return seen


@pytest.mark.slow
def test_a_thread_reads_what_has_arrived() -> None:
    built = build_native_reader()
    after = run_ranks(seen_after_each_step, 2, built, False)
    for seen, expected in zip(run_ranks(seen_after_each_step, 2, built, True), after, strict=True):
        assert len({step for step, _ in seen}) > 2, "or the test shows nothing"
        for step, values in seen:
            assert all(map(torch.equal, values, dict(expected)[step]))


# ---- Functions of torch's that look at a parameter's class twice. ----


@contextmanager
def between_two_looks(act: Callable[[], None]) -> Iterator[None]:
    """``act`` runs in this thread's next function of that kind, after the first look."""
    original, thread = F.handle_torch_function, threading.get_ident()
    calls = [act]

    def handle(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and calls:
            calls.pop()()
        try:
            return original(*args, **kwargs)
        except TypeError as error:  # what torch says that finds no class with __torch_function__ any more
            raise AssertionError(f"the class was taken off between two looks: {error}") from None

    F.handle_torch_function = handle
    try:
        yield
    finally:
        F.handle_torch_function = original
    assert not calls, "or the test shows nothing"


def rectify(trained: Trained) -> Tensor:
    return F.relu(trained.kept[0])


def another_reads_between_my_looks() -> bool:
    trained = Trained()
    trained.backward()
    trained.step()

    def read_elsewhere() -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(rectify, trained).result()

    with between_two_looks(read_elsewhere):
        seen = rectify(trained)
    return torch.equal(seen, trained.values()[0].relu()) and trained.is_plain()


def i_read_between_anothers_looks() -> bool:
    trained = Trained()
    trained.backward()
    trained.step()
    inside, go = threading.Event(), threading.Event()

    def pause() -> None:
        inside.set()
        assert go.wait(20)

    def read() -> Tensor:
        with between_two_looks(pause):
            return rectify(trained)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        assert inside.wait(20)
        forward(trained)
        go.set()
        seen = reading.result()
    return torch.equal(seen, trained.values()[0].relu()) and trained.is_plain()


def test_another_thread_reads_between_two_looks() -> None:
    assert all(run_ranks(another_reads_between_my_looks, 2))
    assert all(run_ranks(i_read_between_anothers_looks, 2))


# ---- Which thread is the one that steps. ----


def train_in_threads(num_threads: int) -> tuple[list[Tensor], bool]:
    """Iterations run in turn on threads that all stay alive; without threads on this one."""
    trained = Trained()
    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(num_threads)]
        for step in range(6):
            for part in (trained.backward, trained.step):
                if pools:
                    pools[step % num_threads].submit(part).result()
                else:
                    part()
    return trained.values(), trained.is_plain()


def test_any_thread_may_step() -> None:
    expected = run_ranks(train_in_threads, 2, 0)
    for num_threads in (1, 2):
        for (values, plain), (others, _) in zip(run_ranks(train_in_threads, 2, num_threads), expected, strict=True):
            assert all(map(torch.equal, values, others))
            assert plain
