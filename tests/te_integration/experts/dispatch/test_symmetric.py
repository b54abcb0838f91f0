"""``SymmetricExchange`` without GPUs: kernels in Triton's interpreter, and buffers in memory that processes share.

Each process has all ranks' buffers at addresses of its own, and really waits for the others' arrivals.
"""

import mmap
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import Tensor

from maingrad.te_integration import TokenDispatcher
from maingrad.te_integration.experts.dispatch import symmetric
from maingrad.te_integration.experts.dispatch.all_to_all import AllToAll

pytest.importorskip("triton", reason="the kernels are Triton's alone")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: test_symmetric_nccl.py")

EXPERTS = 4


class Mapped(NamedTuple):
    """What a rendezvous returns."""

    buffers: list[Tensor]

    def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype) -> Tensor:
        return self.buffers[rank]


class SharedFiles:
    """In place of ``torch.distributed._symmetric_memory``: buffers are files that all ranks map."""

    def __init__(self) -> None:
        folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folders)
        self.folder = Path(folders[0])
        self.number = 0

    def _map(self, rank: int, nbytes: int) -> Tensor:
        with (self.folder / f"{self.number}-{rank}").open("a+b") as file:
            file.truncate(nbytes)
            return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)

    def empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.number += 1
        return self._map(dist.get_rank(), nbytes).fill_(0xFF)

    def rendezvous(self, own: Tensor, group: str) -> Mapped:
        dist.barrier()
        return Mapped([self._map(rank, own.numel()) for rank in range(dist.get_world_size())])


class Case(NamedTuple):
    """Tokens of each rank, and how experts are drawn: any, or all of rank 0; drop: an id of E here and there."""

    tokens: list[int]
    routing: str = "any"
    dim: int = 6


class OneRank:
    """In place of a process group, and of ``torch.distributed._symmetric_memory``, for a rank without others."""

    group_name = "alone"

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tensor]] = []

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = torch.full((nbytes,), 0xFF, dtype=dtype)
        self.made.append(weakref.ref(memory))
        return memory

    def rendezvous(self, own: Tensor, group: str) -> Mapped:
        return Mapped([own])


CASES = [
    Case([5, 9, 5, 5]),
    Case([9, 9, 9, 9], "drop", 40),
    Case([4, 0, 7, 1]),
    Case([3, 3, 3, 3], "rank 0"),
    Case([0, 0, 0, 0]),
]


def of_experts(dispatcher: TokenDispatcher, x: Tensor, ids: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    rows, splits, row_probs, dispatched = dispatcher.dispatch(x, ids, probs)
    assert row_probs is not None
    return dispatcher.combine(torch.tanh(rows) * row_probs[:, None].to(rows.dtype), dispatched), splits


def block(dispatcher: TokenDispatcher, case: Case, seed: int, run: Callable[..., Any] = of_experts) -> list[Tensor]:
    """y, rows of each expert, and gradients of x and probs."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    count = case.tokens[dist.get_rank()]
    x, dy = (torch.randn(count, case.dim, generator=generator).bfloat16() for _ in range(2))
    ids = torch.rand(count, EXPERTS, generator=generator).topk(2)[1]
    if case.routing == "rank 0":
        ids = ids % (EXPERTS // dist.get_world_size())
    elif case.routing == "drop":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, EXPERTS)
    probs = torch.rand(count, 2, generator=generator).requires_grad_()
    x.requires_grad_()
    y, splits = run(dispatcher, x, ids, probs)
    return [y.detach(), splits, *torch.autograd.grad(y, [x, probs], dy)]


def differences(compiled: bool = False) -> list[str]:
    shared = SharedFiles()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric, "symmetric_memory", lambda: shared)
        wrong = _differences_compiled() if compiled else _differences()
    dist.barrier()
    shutil.rmtree(shared.folder, ignore_errors=True)
    assert shared.number == (3 if compiled else 2), "wider rows need larger buffers, once"
    return wrong


def _differences() -> list[str]:
    exact = TokenDispatcher(EXPERTS, None, AllToAll(EXPERTS, dist.group.WORLD))
    found, wrong = TokenDispatcher(EXPERTS, None, "symmetric"), []
    for seed, case in enumerate(CASES):
        equal = [*map(torch.equal, block(exact, case, seed), block(found, case, seed))]
        if not all(equal):
            wrong.append(f"{case}: {equal}")
    return wrong


def _differences_compiled() -> list[str]:
    """The first call says how many rows there are at most, outside the graph; a transport that was told does not."""
    exact = TokenDispatcher(EXPERTS, None, AllToAll(EXPERTS, dist.group.WORLD))
    told = symmetric.SymmetricExchange(EXPERTS, dist.group.WORLD, max_rows=18)
    wrong = []
    for transport in ("symmetric", told):
        found = TokenDispatcher(EXPERTS, None, transport)
        if transport == "symmetric":
            block(found, Case([9] * 4, dim=40), 9, torch.compile(of_experts, backend="aot_eager"))
        whole = torch.compile(of_experts, backend="aot_eager", fullgraph=True)
        for seed, case in enumerate(CASES):
            equal = [*map(torch.equal, block(exact, case, seed), block(found, case, seed, whole))]
            if not all(equal):
                wrong.append(f"{case}: {equal}")
    return wrong


@pytest.mark.in_turn
def test_a_compiled_graph_holds_both_exchanges() -> None:
    assert run_ranks(differences, 2, True) == [[], []]


@pytest.mark.in_turn
@pytest.mark.parametrize("ranks", [2, 4])
def test_results_and_gradients_are_those_of_all_to_all(ranks: int) -> None:
    assert run_ranks(differences, ranks) == [[]] * ranks


def test_the_count_of_dropped_rows_goes_on_in_larger_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: Any = OneRank()
    monkeypatch.setattr(symmetric, "symmetric_memory", lambda: alone)
    transport = symmetric.SymmetricExchange(2, alone, max_rows=10, capacity_factor=0.5)
    counts, dropped = torch.tensor([3, 7]), []
    for width in (4, 4, 400):  # the last ones need larger buffers
        rows = torch.randn(10, width)
        (received,), splits, sent = transport.send([rows], counts)
        assert splits.tolist() == [3, 2]
        assert torch.equal(received, rows[:5])
        (back,) = transport.send_back([received], sent)
        assert torch.equal(back, torch.cat((rows[:5], torch.zeros(5, width))))
        assert transport.num_dropped is not None
        dropped.append(int(transport.num_dropped))
    assert dropped == [5, 10, 15]
    assert [each() is not None for each in alone.made] == [True, True], "graphs may be captured over the old ones"


@pytest.mark.parametrize("lacks", [{"HAS_TRITON": False}, {"is_interpreted": lambda: False}], ids=["Triton", "GPUs"])
def test_what_it_needs_is_said(lacks: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    alone: Any = OneRank()
    for name, value in {"symmetric_memory": lambda: alone, **lacks}.items():
        monkeypatch.setattr(symmetric, name, value)
    transport = symmetric.SymmetricExchange(2, alone, max_rows=4)
    with pytest.raises(ValueError, match="SymmetricExchange needs Triton and tensors on CUDA; got cpu"):
        transport.send([torch.ones(4, 2)], torch.tensor([2, 2]))
