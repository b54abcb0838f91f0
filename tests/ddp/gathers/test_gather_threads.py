"""Threads that read the model of a main thread that trains it: by turns with the step, they read gathered values, and
training is the same as without readers."""

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
    """A lock keeps reads and steps apart, and the step waits for its gathers."""
    trained, lock = Trained(), threading.Lock()

    def read() -> None:
        with lock:
            READS[how or ""](trained)
        time.sleep(1e-4)  # let the step have the lock

    with readers(read, READERS if how else 0) as errors:
        for _ in range(STEPS):
            trained.backward()
            with lock:
                trained.step()
                trained.optimizer.finish_param_sync()
    values = trained.values()
    return errors, trained.is_plain(), values


@pytest.mark.in_turn
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


def read_at_once(overlap: bool) -> list[Any]:
    """What threads see that read at once while the gathers of one step are under way: each of them waits.

    One rank's step comes late. Functions in C++ look at a parameter's class once, and a module's forward waits before.
    """
    trained, seen = Trained(overlap), []
    trained.backward()
    if dist.get_rank() == 1:
        time.sleep(0.3)
    trained.step()
    reads: list[Callable[[], list[Tensor]]] = [
        lambda: [param.detach().clone() for param in trained.kept],
        lambda: [trained.model(torch.arange(VOCABULARY)).detach()],
    ]
    with ThreadPoolExecutor(READERS * len(reads)) as pool:
        for reading in [pool.submit(read) for read in reads * READERS]:
            seen += reading.result(20)
    return [*seen, *trained.values()]


@pytest.mark.in_turn
def test_a_thread_reads_what_has_arrived() -> None:
    after = run_ranks(read_at_once, 2, False)
    for seen, expected in zip(run_ranks(read_at_once, 2, True), after, strict=True):
        assert all(map(torch.equal, seen, expected))


# ---- Functions of torch's that look at a parameter's class twice. ----


@contextmanager
def between_two_looks(act: Callable[[], None]) -> Iterator[None]:
    """``act`` runs in this thread's next function of that kind, after the first look."""
    original, calls = F.handle_torch_function, [act]

    def handle(*args: Any, **kwargs: Any) -> Any:
        if calls:
            calls.pop()()
        return original(*args, **kwargs)

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
            pool.submit(trained.kept[0].sum).result()

    with between_two_looks(read_elsewhere), pytest.raises(TypeError):
        rectify(trained)
    return torch.equal(rectify(trained), trained.values()[0].relu()) and trained.is_plain()


def test_another_thread_that_reads_between_two_looks_is_an_error_of_torch() -> None:
    """Not supported, and loud: the next read is right."""
    assert all(run_ranks(another_reads_between_my_looks, 2))


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
