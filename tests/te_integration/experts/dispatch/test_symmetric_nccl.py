"""``SymmetricExchange`` on GPUs: as ``AllToAll`` bit for bit, under skew, without a host wait, and replayed.

Legend: T tokens of a rank, k experts per token, E experts, ep ranks, R = T k rows that a rank sends.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from host_syncs import cuda_waits_are_errors
from sharded_on_gpus import nccl
from torch import Tensor

from maingrad.te_integration import TokenDispatcher
from maingrad.te_integration.experts.dispatch.all_to_all import AllToAll
from maingrad.te_integration.experts.dispatch.symmetric import SymmetricExchange

EXPERTS, TOP_K = 8, 2
RANKS = [pytest.param(2, marks=pytest.mark.gpu(2)), pytest.param(4, marks=pytest.mark.gpu(4))]


class Tokens(NamedTuple):
    x: Tensor
    ids: Tensor
    probs: Tensor
    dy: Tensor


def make_tokens(seed: int, tokens: int, dim: int, routing: str, dtype: torch.dtype = torch.bfloat16) -> Tokens:
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if routing == "skewed":
        scores = scores * torch.arange(1.0, EXPERTS + 1)
    elif routing == "one rank":
        scores[:, : EXPERTS // dist.get_world_size()] += 1
    elif routing == "none to the last":
        scores[:, -1] -= 1
        scores[:, EXPERTS // 2 :] -= 2
    ids = scores.topk(TOP_K)[1]
    if routing == "dropped":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, EXPERTS)
    x, dy = (torch.randn(tokens, dim, generator=generator).to(dtype) for _ in range(2))
    return Tokens(x.cuda(), ids.cuda(), torch.rand(tokens, TOP_K, generator=generator).cuda(), dy.cuda())


def block(dispatcher: TokenDispatcher, tokens: Tokens, meanwhile: Any = None) -> list[Tensor]:
    """y, and the gradients of x and probs, of experts that know rows and their probabilities."""
    x, probs = tokens.x.detach().requires_grad_(), tokens.probs.detach().requires_grad_()
    rows, splits, row_probs, dispatched = dispatcher.dispatch(x, tokens.ids, probs, meanwhile=meanwhile)
    assert row_probs is not None
    y = dispatcher.combine(torch.tanh(rows) * row_probs[:, None].to(rows.dtype), dispatched)
    return [y.detach(), splits, *torch.autograd.grad(y, [x, probs], tokens.dy)]


ROUTINGS = ["any", "skewed", "one rank", "none to the last", "dropped"]


def differences() -> list[str]:
    group = nccl()
    exact = TokenDispatcher(EXPERTS, group, AllToAll(EXPERTS, group))
    symmetric = TokenDispatcher(EXPERTS, group, "symmetric")
    uneven = TokenDispatcher(EXPERTS, group, SymmetricExchange(EXPERTS, group, max_rows=300 * TOP_K))
    wrong = []
    for dim, dtype in ((2048, torch.bfloat16), (40, torch.bfloat16), (1, torch.float32), (2880, torch.float16)):
        for seed, routing in enumerate(ROUTINGS):
            for name, dispatcher, count in (
                ("even", symmetric, 256),
                ("fewer", symmetric, 64 + dist.get_rank()),
                ("uneven", uneven, 300 - 97 * dist.get_rank()),
                ("a rank without tokens", uneven, 123 if dist.get_rank() == 0 else 0),
            ):
                tokens = make_tokens(seed, count, dim, routing, dtype)
                expected = block(exact, tokens)
                for beside in (None, lambda: torch.cuda._sleep(100_000)):
                    found = block(dispatcher, tokens, beside)
                    if not all(map(torch.equal, expected, found)):
                        wrong.append(f"{dim=} {routing} {name} {beside=}: {[*map(torch.equal, expected, found)]}")
    return wrong


@pytest.mark.parametrize("ranks", RANKS)
def test_results_and_gradients_are_those_of_all_to_all(ranks: int) -> None:
    assert run_ranks(differences, ranks, timeout=110.0) == [[]] * ranks


def replays() -> list[bool]:
    """Graphs of the whole block, and of one ``dispatch``: an odd number of exchanges, so halves take turns."""
    group, equal = nccl(), []
    exact = TokenDispatcher(EXPERTS, group, AllToAll(EXPERTS, group))
    symmetric = TokenDispatcher(EXPERTS, group, SymmetricExchange(EXPERTS, group))

    def sent(dispatcher: TokenDispatcher, tokens: Tokens) -> list[Tensor]:
        rows, splits, row_probs, _ = dispatcher.dispatch(tokens.x, tokens.ids, tokens.probs)
        assert row_probs is not None
        return [rows, splits, row_probs]

    runs: list[Callable[[TokenDispatcher, Tokens], list[Tensor]]] = [block, sent]
    for run in runs:
        static = make_tokens(0, 128, 512, "any")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(symmetric, static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = run(symmetric, static)
        for seed in range(1, 8):
            tokens = make_tokens(seed, 128, 512, ROUTINGS[seed % len(ROUTINGS)])
            for into, value in zip(static, tokens, strict=True):
                into.copy_(value)
            graph.replay()
            if seed % 3 == 0:
                graph.replay()
            expected = run(exact, tokens)
            equal.append(all(torch.equal(a, b[: len(a)]) for a, b in zip(expected, outputs, strict=True)))
            equal.append(all(map(torch.equal, expected[:1], run(symmetric, tokens)[:1])) or run is sent)
    return equal


@pytest.mark.parametrize("ranks", RANKS)
def test_a_captured_graph_replays_with_another_routing(ranks: int) -> None:
    for equal in run_ranks(replays, ranks, timeout=100.0):
        assert len(equal) == 28
        assert all(equal), equal


def mismatches_under_skew(iterations: int) -> tuple[int, int]:
    """Wrong elements, and rows that were compared, of exchanges before which each rank sleeps as long as it likes.

    A row holds its sender and its number, so that each rank knows what it must receive.
    """
    group, rank, ranks = nccl(), dist.get_rank(), dist.get_world_size()
    transport = SymmetricExchange(EXPERTS, group, max_rows=2048)
    draws = torch.Generator().manual_seed(rank)
    alike = torch.Generator("cuda").manual_seed(7)  # what all ranks send, drawn by each
    wrong, compared = (
        torch.zeros((), dtype=torch.int64, device="cuda"),
        torch.zeros((), dtype=torch.int64, device="cuda"),
    )
    experts = torch.arange(EXPERTS, device="cuda")
    for iteration in range(iterations):
        length, dim = [(256, 64), (2048, 512), (37, 8)][iteration % 3]
        ids = (torch.rand(ranks, length, device="cuda", generator=alike) ** (1 + iteration % 4) * EXPERTS).long()
        ids = ids.clamp(max=EXPERTS - 1).sort(1)[0]
        numbers = torch.arange(ranks * length, device="cuda", dtype=torch.float32).view(ranks, length)
        numbers = numbers + iteration * 7
        mine = numbers[rank][:, None].expand(length, dim).contiguous()
        if torch.rand(1, generator=draws) < 0.5:
            torch.cuda._sleep(int(torch.randint(1, 300_000, (1,), generator=draws)))
        counts = (ids[rank][:, None] == experts).sum(0)
        (rows, alone), splits, sent = transport.send([mine, numbers[rank]], counts)
        if torch.rand(1, generator=draws) < 0.3:
            torch.cuda._sleep(int(torch.randint(1, 300_000, (1,), generator=draws)))
        # All rows of all ranks by expert, then sender; this rank's experts first.
        local = (ids - rank * (EXPERTS // ranks)).flatten()
        keys = local.masked_fill((local < 0) | (local >= EXPERTS // ranks), EXPERTS)
        is_row = torch.arange(len(rows), device="cuda") < splits.sum()
        expected = torch.zeros_like(alone)
        expected[: ranks * length] = numbers.flatten()[keys.sort(stable=True)[1]]
        expected = expected.where(is_row, 0)
        wrong += (rows != expected[:, None]).sum() + (alone != expected).sum()
        back, alone_back = transport.send_back([rows * 2, alone * 3], sent)
        wrong += (back != mine * 2).sum() + (alone_back != numbers[rank] * 3).sum()
        compared += is_row.sum()
    return int(wrong), int(compared)


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_that_wait_for_each_other_at_random_get_their_rows(ranks: int) -> None:
    found = run_ranks(mismatches_under_skew, ranks, 600, timeout=110.0)
    assert [wrong for wrong, _ in found] == [0] * ranks
    assert sum(compared for _, compared in found) == ranks * 200 * (256 + 2048 + 37)


def without_a_host_wait() -> bool:
    group = nccl()
    symmetric = TokenDispatcher(EXPERTS, group, "symmetric")
    tokens = make_tokens(0, 64, 128, "any")
    block(symmetric, tokens)
    torch.cuda.synchronize()
    with cuda_waits_are_errors():
        for _ in range(3):
            block(symmetric, tokens, lambda: torch.cuda._sleep(1000))
    return True


@pytest.mark.gpu(2)
def test_the_host_waits_for_nothing() -> None:
    assert all(run_ranks(without_a_host_wait, 2, timeout=60.0))


def dropped() -> tuple[int, list[int], bool]:
    group, rank = nccl(), dist.get_rank()
    transport = SymmetricExchange(2, group, capacity_factor=1.0)
    counts = torch.tensor([10, 0], device="cuda")
    rows = torch.full((10, 16), rank + 1.0, device="cuda")
    (received,), splits, sent = transport.send([rows], counts)
    (back,) = transport.send_back([received], sent)
    assert transport.num_dropped is not None
    kept = rows if rank == 0 else torch.zeros_like(rows)
    return int(transport.num_dropped), splits.tolist(), torch.equal(back, kept)


@pytest.mark.gpu(2)
def test_rows_beyond_the_capacity_are_counted_and_come_back_as_zeros() -> None:
    assert run_ranks(dropped, 2, timeout=60.0) == [(10, [10], True), (0, [0], True)]
