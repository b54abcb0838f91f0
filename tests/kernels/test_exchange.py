"""Rows exchanged through a table of addresses: several ranks' buffers in one process, and the phases rank by rank."""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

exchange_triton = pytest.importorskip(
    "maingrad.kernels.permutation.exchange_triton", reason="the kernels are Triton's alone"
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF_NBYTES = 1 << 16


def exchanges(num_ranks: int, number: int = 0) -> list[Any]:
    """What each rank sees, before exchange ``number``. The halves hold what would be noticed."""
    flags = exchange_triton.FLAGS_NBYTES
    buffers = [torch.full((flags + 2 * HALF_NBYTES,), 0xFF, dtype=torch.uint8, device=DEVICE) for _ in range(num_ranks)]
    for buffer in buffers:
        buffer[:flags].view(torch.int32).fill_(number)
    table = torch.tensor([buffer.data_ptr() for buffer in buffers], device=DEVICE)
    return [
        exchange_triton.Exchange(
            table, buffer, torch.full((1,), number, dtype=torch.int32, device=DEVICE),
            torch.zeros(1, dtype=torch.int64, device=DEVICE), rank, num_ranks, HALF_NBYTES,
        )
        for rank, buffer in enumerate(buffers)
    ]  # fmt: skip


class Received(NamedTuple):
    plan: Tensor
    splits: Tensor
    tensors: list[Tensor]


def meet(ranks: list[Any], counts: list[Tensor] | None, received: list[Received], most_rows: int) -> None:
    for phase in ("arrive", "wait"):
        for rank, (exchange, mine) in enumerate(zip(ranks, received, strict=True)):
            told = None if counts is None else counts[rank].to(DEVICE)
            phases = {"arrive": phase == "arrive", "wait": phase == "wait"}
            exchange_triton.meet(exchange, told, mine.plan, mine.splits, most_rows, 60.0, **phases)


def copy(rows: Tensor, place: Any, *arguments: Any, **options: Any) -> None:
    exchange_triton.copy_rows(*place, rows, *arguments, **options)


def places(exchange: Any, num_experts: int, tensors: list[Tensor], most_sent: int) -> list[Any]:
    found, offset = [], 8 * num_experts
    for tensor in tensors:
        offset = (offset + 15) // 16 * 16
        found.append((exchange, offset))
        offset += most_sent * tensor[:1].nbytes
    assert offset <= HALF_NBYTES
    return found


def send(ranks: list[Any], counts: list[Tensor], sources: list[list[Tensor]], most_rows: int) -> list[Received]:
    num_experts, most_sent = len(counts[0]), max(len(rows) for tensors in sources for rows in tensors)
    received, behind = [], []
    for rank, tensors in enumerate(sources):
        plan = torch.full((2 * num_experts + 1,), -1, dtype=torch.int32, device=DEVICE)
        for place, source in zip(places(ranks[rank], num_experts, tensors, most_sent), tensors, strict=True):
            copy(source.to(DEVICE), place, plan, routed=False, write=True)
        own = num_experts // len(ranks)
        splits = torch.full((own + 1,), -1, device=DEVICE)
        rows = [torch.full((most_rows + 1, *each.shape[1:]), 77, dtype=each.dtype, device=DEVICE) for each in tensors]
        behind.append([each[-1] for each in (splits, *rows)])
        received.append(Received(plan, splits[:own], [each[:most_rows] for each in rows]))
    meet(ranks, counts, received, most_rows)
    for exchange, mine in zip(ranks, received, strict=True):
        for place, rows in zip(places(exchange, num_experts, mine.tensors, most_sent), mine.tensors, strict=True):
            copy(rows, place, mine.plan, routed=True, write=False)
    for splits, *tensors in behind:
        assert splits == -1 and all((each == 77).all() for each in tensors), "what lies behind stays"
    return received


def send_back(ranks: list[Any], received: list[Received], like: list[list[Tensor]]) -> list[list[Tensor]]:
    num_experts, most_sent = len(received[0].plan) // 2, max(len(rows) for tensors in like for rows in tensors)
    for exchange, mine in zip(ranks, received, strict=True):
        for place, rows in zip(places(exchange, num_experts, mine.tensors, most_sent), mine.tensors, strict=True):
            copy(rows, place, mine.plan, routed=True, write=True)
    told = [
        [each.clone() for each in (*mine[:2], rank.num_dropped)] for rank, mine in zip(ranks, received, strict=True)
    ]
    meet(ranks, None, received, 0)
    for rank, mine, before in zip(ranks, received, told, strict=True):
        for each, same in zip((*mine[:2], rank.num_dropped), before, strict=True):
            assert torch.equal(each, same), "an exchange back is told no counts, and leaves what follows from them"
    back = []
    for exchange, mine, tensors in zip(ranks, received, like, strict=True):
        out = [torch.full_like(each, 55, device=DEVICE) for each in tensors]
        for place, rows in zip(places(exchange, num_experts, out, most_sent), out, strict=True):
            copy(rows, place, mine.plan, routed=False, write=False)
        back.append(out)
    return back


def expected(counts: list[Tensor], rows: list[Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Rows that a rank receives, by expert and then sender, and how many of each expert."""
    own = len(counts[0]) // len(counts)
    pieces = [each[: int(of.sum())].split(of.tolist()) for each, of in zip(rows, counts, strict=True)]
    experts = range(rank * own, (rank + 1) * own)
    return torch.cat([by[e] for e in experts for by in pieces]), sum(of[experts.start : experts.stop] for of in counts)


def made_of(kind: torch.dtype, rows: int, *shape: int) -> Tensor:
    return (torch.randn if kind.is_floating_point else partial(torch.randint, -9, 9))((rows, *shape)).to(kind)


@pytest.mark.in_turn
@pytest.mark.parametrize(("width", "sent"), [(7, [[1, 4], [2, 4]]), (1, [[12, 9], [8, 30]])])
def test_rows_of_several_programs(width: int, sent: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As rows of more than 16 KB, and more of them than the programs take at once."""
    monkeypatch.setattr(exchange_triton, "_TILE", 4)
    monkeypatch.setattr(exchange_triton, "num_multiprocessors", lambda _: 1)
    ranks, counts = exchanges(2), [torch.tensor(each) for each in sent]
    sources = [[torch.randn(int(each.sum()), width)] for each in counts]
    received = send(ranks, counts, sources, 40)
    for rank, mine in enumerate(received):
        right, _ = expected(counts, [each[0] for each in sources], rank)
        assert torch.equal(mine.tensors[0][: len(right)].cpu(), right)
    for source, back in zip(sources, send_back(ranks, received, sources), strict=True):
        assert torch.equal(back[0].cpu(), source[0])


@pytest.mark.in_turn
@given(st.data())
def test_rows_go_to_their_experts_and_come_back(data: st.DataObject) -> None:
    num_ranks, own = data.draw(st.sampled_from([(1, 3), (2, 2), (3, 1), (3, 3)]))
    # Numbers of exchanges wrap, and a graph may be replayed an odd number of times.
    ranks = exchanges(num_ranks, data.draw(st.sampled_from([0, 1, 2**31 - 1])))
    for _ in range(2):
        lists = st.lists(st.sampled_from([0, 0, 1, 2, 9]), min_size=own * num_ranks, max_size=own * num_ranks)
        counts = [torch.tensor(data.draw(lists)) for _ in range(num_ranks)]
        dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32, torch.float64, torch.uint8]))
        width, nowhere = data.draw(st.sampled_from([1, 5, 24, 40])), data.draw(st.integers(0, 2))
        lengths = [int(each.sum()) + nowhere for each in counts]
        sources = [[made_of(dtype, n, width), made_of(torch.float32, n)] for n in lengths]
        received = send(ranks, counts, sources, sum(lengths) + 1)
        for rank, mine in enumerate(received):
            for index, rows in enumerate(mine.tensors):
                right, splits = expected(counts, [each[index] for each in sources], rank)
                assert torch.equal(mine.splits.cpu(), splits)
                assert torch.equal(rows[: len(right)].cpu(), right)
                assert not rows[len(right) :].any()
        for mine in received:
            for rows in mine.tensors:
                rows[int(mine.splits.sum()) :] = 99  # rows that nobody sent
        for tensors, back, of in zip(sources, send_back(ranks, received, sources), counts, strict=True):
            for source, returned in zip(tensors, back, strict=True):
                source[int(of.sum()) :] = 0
                assert torch.equal(returned.cpu(), source)


def test_rows_behind_the_bound_are_dropped_and_come_back_as_zeros() -> None:
    ranks = exchanges(2)
    counts = [torch.tensor([3, 2, 0, 1]), torch.tensor([2, 4, 0, 0])]
    sources = [[torch.arange(1.0, 7)[:, None].repeat(1, 8)], [torch.arange(11.0, 17)[:, None].repeat(1, 8)]]
    received = send(ranks, counts, sources, 6)
    assert received[0].splits.tolist() == [5, 1]
    assert received[0].tensors[0][:, 0].tolist() == [1, 2, 3, 11, 12, 4]
    assert [int(each.num_dropped) for each in ranks] == [5, 0]
    first, second = send_back(ranks, received, sources)
    assert first[0][:, 0].tolist() == [1, 2, 3, 4, 0, 6]
    assert second[0][:, 0].tolist() == [11, 12, 0, 0, 0, 0]
    send(ranks, counts, sources, 7)
    assert [int(each.num_dropped) for each in ranks] == [9, 0], "of all exchanges so far"


def test_a_rank_may_be_an_exchange_ahead() -> None:
    """Rank 0 writes the rows of its next exchange, either way, before rank 1 has read those of the last one."""
    ranks, counts = exchanges(2), [torch.tensor([0, 3]), torch.tensor([3, 0])]
    rows, plans = [torch.full((3, 8), rank + 1.0, device=DEVICE) for rank in range(2)], []
    place = [places(each, 2, rows[:1], 3)[0] for each in ranks]
    for rank in range(2):
        plan, splits = (
            torch.zeros(5, dtype=torch.int32, device=DEVICE),
            torch.zeros(1, dtype=torch.int64, device=DEVICE),
        )
        plans.append(Received(plan, splits, [torch.empty(3, 8, device=DEVICE)]))
        copy(rows[rank], place[rank], plan, routed=False, write=True)
    meet(ranks, counts, plans, 3)
    copy(plans[0].tensors[0], place[0], plans[0].plan, routed=True, write=False)
    copy(rows[0] * 10, place[0], plans[0].plan, routed=True, write=True)
    copy(rows[0] * 10, place[0], plans[0].plan, routed=False, write=True)
    copy(plans[1].tensors[0], place[1], plans[1].plan, routed=True, write=False)
    assert (plans[0].tensors[0] == 2).all()
    assert (plans[1].tensors[0] == 1).all()


def test_counts_of_the_next_exchange_leave_those_of_this_one() -> None:
    """Rank 0 tells them before rank 1 has read this one's."""
    first, second = exchanges(2)
    plan, splits = torch.zeros(5, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)

    def meet_one(exchange: Any, counts: list[int], **phase: bool) -> None:
        exchange_triton.meet(exchange, torch.tensor(counts, device=DEVICE), plan, splits, 30, 60.0, **phase)

    meet_one(first, [0, 3], wait=False)
    meet_one(second, [2, 1], wait=False)
    meet_one(first, [0, 3], arrive=False)
    assert splits.item() == 2
    meet_one(first, [0, 9], wait=False)
    meet_one(second, [2, 1], arrive=False)
    assert splits.item() == 4


@pytest.mark.skipif(DEVICE == "cuda", reason="the error is the device's, for all later tests too")
def test_a_rank_that_waits_in_vain_ends_with_an_error() -> None:
    first, _ = exchanges(2)
    plan, splits = torch.zeros(5, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    # The interpreter has no PTX: it raises at the trap.
    with pytest.raises(Exception, match="inline_asm"):
        exchange_triton.meet(first, torch.tensor([1, 1]), plan, splits, 2, 1e-5)
