"""What moves rows: the order of starts and waits, capacity, and what a captured step may hold."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatched import DIM, EXPERTS, Tokens, experts_of, make_tokens, rank_groups, routed
from torch import Tensor, nn

from maingrad import fsdp
from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GraphedTrainingStep,
)
from maingrad.ddp.collectives import failure_report
from maingrad.ddp.collectives.failure_report import CollectiveError
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import Linear, TokenDispatcher, WgradQueue, delayed_wgrad
from maingrad.te_integration.experts.dispatch import all_to_all
from maingrad.te_integration.experts.dispatch.symmetric import SymmetricExchange

C = 3


def test_a_send_and_its_way_back_are_adjoint() -> None:
    """With Inf in rows that nobody has filled: they reach no result."""

    def products(**options: Any) -> Any:
        rank = dist.get_rank()
        transport = TokenDispatcher(EXPERTS, **options).transport
        draws = torch.Generator().manual_seed(rank)
        x = torch.randint(-4, 5, (DIM, 12), generator=draws).t() / 4  # its rows are not adjacent
        counts = torch.tensor([[5, 0, 3, 2], [1, 4, 0, 5], [0, 0, 12, 0], [0, 0, 0, 0]][rank])
        (received,), splits, sent = transport.send([x], counts)
        y = torch.randint(-4, 5, received.shape, generator=draws) / 4
        y[int(splits.sum()) :] = float("inf")
        (back,) = transport.send_back([y], sent)
        (again,), same_splits, _ = transport.send([x], counts, sent)
        filled = slice(int(splits.sum()))
        assert torch.equal(splits, same_splits) and torch.equal(received[filled], again[filled])
        return (received[filled] * y[filled]).sum(), (x * back).sum(), splits, received.shape

    for options in ({}, {"transport": "capacity", "capacity": C}):
        results = simulate(products, 4, **options)
        there, back, splits, shapes = zip(*results, strict=True)
        assert sum(there) == sum(back) != 0
        assert torch.cat(splits).tolist() == ([6, 4, 15, 7] if not options else [4, 3, 6, 5])
        assert not options or set(shapes) == {(EXPERTS * C, DIM)}


def with_ids_of_no_expert(tokens: Tokens) -> Tokens:
    """The rows beyond the capacity dropped by their ids."""
    ids, seen = tokens.ids.clone(), [0] * EXPERTS
    for row in range(ids.shape[0]):
        for choice in range(ids.shape[1]):
            expert = int(ids[row, choice])
            seen[expert] += 1
            if seen[expert] > C:
                ids[row, choice] = EXPERTS
    return tokens._replace(ids=ids)


def test_rows_beyond_the_capacity_are_dropped_as_by_their_ids() -> None:
    def run(capacity: bool) -> Any:
        rank = dist.get_rank()
        tokens = make_tokens(rank, 8)
        dispatcher = TokenDispatcher(EXPERTS, **({"transport": "capacity", "capacity": C} if capacity else {}))
        cut = with_ids_of_no_expert(tokens)
        leaves = Tokens(tokens.x.requires_grad_(), tokens.ids if capacity else cut.ids, tokens.probs.requires_grad_())
        experts = experts_of(rank, 2)
        y = routed(leaves, experts, dispatcher)
        y.square().sum().backward()
        if capacity:
            assert dispatcher.transport.num_dropped == (cut.ids == EXPERTS).sum() > 0
        return [y, leaves.x.grad, leaves.probs.grad, *(param.grad for param in experts.parameters())]

    for dropped, by_ids in zip(simulate(run, 2, True), simulate(run, 2, False), strict=True):
        for found, expected in zip(dropped, by_ids, strict=True):
            torch.testing.assert_close(found, expected)


class Events(list[tuple[int, str]]):
    """What ranks do, in order; as a queue's log it hears of weight gradients."""

    def append(self, event: Any) -> None:
        super().append(event if type(event) is tuple else (dist.get_rank(), f"weight gradient of {event.owner}"))


def test_weight_gradients_and_a_shared_expert_run_while_rows_travel() -> None:
    events = Events()

    def run() -> None:
        rank = dist.get_rank()
        queue = WgradQueue(fill_waits=True)
        dispatcher = TokenDispatcher(EXPERTS)
        layers = [experts_of(rank, 2) for _ in range(2)]
        shared = Linear(DIM, DIM)

        def shared_expert() -> Tensor:
            events.append((rank, "shared"))
            return shared(x)

        tokens = make_tokens(rank, 6)
        x = tokens.x.requires_grad_()
        with delayed_wgrad(queue):
            for layer in layers:
                rows, splits, probs, dispatched = dispatcher.dispatch(x, *tokens[1:], meanwhile=shared_expert)
                x = dispatcher.combine(layer(rows, splits, probs), dispatched) + dispatched.meanwhile
        queue.log = events
        events.append((rank, "backward"))
        x.sum().backward()
        owners = [entry.pending.owner.split("(")[0] for entry in queue]
        assert owners == ["GroupedMLP", "Linear"]  # half of the last exchange's, and the shared expert's behind it
        queue.log = None
        queue.drain()
        assert all(param.grad is not None for module in (*layers, shared) for param in module.parameters())

    simulate(run, 2, schedule=events)
    # In backward all exchanges but the first have work: one of the last layer's, its other one, one of the first's.
    for part, work, times in ((0, "shared", 2), (1, "weight gradient of GroupedMLP", 3)):
        assert_between_starts_and_waits(events, work, times, part)


def assert_between_starts_and_waits(events: Events, work: str, times: int, part: int = 0) -> None:
    """Where ``work`` runs, the exchange that was started last has not been waited for.

    part  0: before an event "backward", 1: behind it
    """
    for rank in range(2):
        own = [event for number, event in events if number == rank]
        middle = own.index("backward") if "backward" in own else len(own)
        own = own[middle:] if part else own[:middle]
        places = [place for place, event in enumerate(own) if event.startswith(work)]
        assert len(places) == times
        for place in places:
            around = [event for event in own[:place] if event.startswith(("launch", "wait"))]
            assert around[-1].startswith("launch all_to_all_single float32"), (own, place)


@pytest.mark.parametrize("options", [{}, {"transport": "capacity", "capacity": C}], ids=str)
def test_rows_and_their_probabilities_are_both_awaited(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited: list[tuple[int, ...]] = []

    class Work:
        def __init__(self, result: Tensor, *arguments: Any, **given: Any) -> None:
            self.shape, self.work = result.shape, dist.all_to_all_single(result, *arguments, **given)

        def wait(self) -> None:
            awaited.append(tuple(self.shape))
            self.work.wait()

    monkeypatch.setattr(all_to_all, "dist", SimpleNamespace(all_to_all_single=Work))

    def run() -> tuple[Tensor, ...]:
        return TokenDispatcher(EXPERTS, **options).dispatch(*make_tokens(dist.get_rank(), 2))[:3]

    for rows, _, probs in simulate(run, 2):
        assert tuple(rows.shape) in awaited and tuple(probs.shape) in awaited


def test_one_half_of_a_batch_is_computed_while_the_other_travels() -> None:
    events = Events()

    def run(in_halves: bool) -> list[Tensor]:
        rank = dist.get_rank()
        experts, dispatcher = experts_of(rank, 2), TokenDispatcher(EXPERTS)
        tokens = make_tokens(rank, 6)
        x, probs = tokens.x.requires_grad_(), tokens.probs.requires_grad_()
        if not in_halves:
            y = routed(tokens, experts, dispatcher)
        else:
            out: list[Tensor] = []

            def compute(rows: Tensor, splits: Tensor, row_probs: Tensor) -> None:
                events.append((rank, "experts"))
                out.append(experts(rows, splits, row_probs))

            first, second = zip(*(tensor.split(3) for tensor in (x, tokens.ids, probs)), strict=True)
            *rows, one = dispatcher.dispatch(*first)
            *others, two = dispatcher.dispatch(*second, meanwhile=lambda: compute(*rows))
            y = dispatcher.combine(out[0], one, meanwhile=lambda: compute(*others))
            y = torch.cat([y, dispatcher.combine(out[1], two)])
        y.square().sum().backward()
        return [y, x.grad, probs.grad, *(param.grad for param in experts.parameters())]

    for whole, halves in zip(simulate(run, 2, False), simulate(run, 2, True, schedule=events), strict=True):
        for one, other in zip(whole, halves, strict=True):
            torch.testing.assert_close(one, other)
    assert_between_starts_and_waits(events, "experts", 2)


class DenseExperts(nn.Module):
    """Every row by every expert, then one is chosen: a step on a CPU that reads no split sizes on the host."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, num_experts * DIM * DIM).view(num_experts, DIM, DIM))
        self.weight.allreduce = False

    def forward(self, rows: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
        row = torch.arange(len(rows))
        expert = torch.searchsorted(splits.cumsum(0), row, right=True)
        own = expert[:, None] == torch.arange(len(splits))
        masked = torch.where(own.any(1)[:, None], rows * probs[:, None], 0.0)
        return torch.einsum("re,rd,edf->rf", own.to(rows.dtype), masked, self.weight)


class Routed(nn.Module):
    """A router and its experts, of which this rank has a half."""

    def __init__(self, dispatcher: TokenDispatcher) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        self.router, self.experts = Linear(DIM, EXPERTS, fuse_wgrad_accumulation=True), DenseExperts(EXPERTS // 2)

    def forward(self, x: Tensor) -> Tensor:
        probs, ids = self.router(x).softmax(-1).topk(2)
        return routed(Tokens(x, ids, probs), self.experts, self.dispatcher)


def train(transport: dict[str, Any], form: str, graphed: bool) -> Any:
    group, edp = rank_groups(2)
    torch.manual_seed(0)
    dispatcher = TokenDispatcher(EXPERTS, group, **transport)
    model: Any = Routed(dispatcher)
    optimizer: Any
    make_graph: Any = GraphedTrainingStep
    same = edp if edp.size() > 1 else WORLD_OF_ONE
    if form == "zero3":
        fully_shard(model.experts, same)
        fully_shard(model, dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.05, fused=True)
        make_graph = fsdp.GraphedTrainingStep
    else:
        model = DistributedDataParallel(model, DistributedDataParallelConfig(), expert_process_group=same)
        optimizer = DistributedOptimizer(model, 0.05, max_grad_norm=1.0)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = make_graph(step, model, optimizer, num_warmup_steps=1) if graphed else step
    draws = torch.Generator().manual_seed(dist.get_rank())
    losses = [run(torch.randn(8, DIM, generator=draws)) for _ in range(5)]
    return (
        losses,
        [value.clone() for value in map(local_of, model.parameters())],
        getattr(dispatcher.transport, "num_dropped", 0),
    )


def local_of(param: Any) -> Tensor:
    value: Tensor = getattr(param, "_local_tensor", param).detach()
    return value


@pytest.mark.in_turn
@pytest.mark.parametrize("form", ["ddp", "zero3"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_captured_step_replays_with_other_routing(ranks: int, form: str) -> None:
    transport = {"transport": "capacity", "capacity": 4}
    runs = (simulate(train, ranks, transport, form, each) for each in (False, True))
    for eager, graphed in zip(*runs, strict=True):
        for found, expected in zip(graphed[:2], eager[:2], strict=True):
            assert all(map(torch.equal, found, expected))
        assert graphed[2] == eager[2] > 0


@pytest.mark.parametrize("fails", ["start", "wait"])
def test_a_failed_exchange_says_who_is_missing_and_closes_its_group(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    transport, closed = all_to_all.AllToAll(EXPERTS, group), []

    def raise_if(when: str) -> None:
        if fails == when:
            raise RuntimeError("connection closed by peer")

    def start(*args: Any, **kwargs: Any) -> Any:
        raise_if("start")
        return SimpleNamespace(wait=lambda: raise_if("wait"))

    monkeypatch.setattr(dist, "all_to_all_single", start)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(failure_report, "ask_others", lambda *args: ([1], ["silent: rank 1"]))
    monkeypatch.setattr(failure_report, "_close_connections", closed.append)
    transport._reporter.active, transport._reporter._store = True, dist.HashStore()
    with pytest.raises(CollectiveError, match=r"an exchange of experts' rows, which failed: connection") as raised:
        transport.send([torch.ones(EXPERTS, DIM)], torch.ones(EXPERTS, dtype=torch.int64))
    assert raised.value.silent == (1,) and "silent: rank 1" in str(raised.value)
    assert closed == [group]


def test_a_capture_refuses_splits_on_the_host_by_name() -> None:
    with pytest.raises(Exception, match="all_to_all transport reads split sizes on the host"):
        simulate(train, 2, {}, "ddp", True)


def test_arguments_that_do_not_fit_are_refused() -> None:
    for wrong, text in (
        ({"transport": "nvlink"}, "'nvlink' is none of capacity, all_to_all"),
        ({"transport": "capacity"}, "needs capacity="),
        ({"capacity": 3}, "no other transport takes it"),
        ({"transport": "capacity", "capacity": 0}, "capacity=0"),
        ({"num_experts": 0}, "0 experts do not divide over 1 ranks"),
    ):
        with pytest.raises(ValueError, match=text):
            TokenDispatcher(**{"num_experts": EXPERTS, "group": WORLD_OF_ONE, **wrong})
    with pytest.raises(TypeError, match=r"group is a ProcessGroup, a DeviceMesh, .* got list"):
        TokenDispatcher(EXPERTS, [0])

    def uneven() -> str:
        with pytest.raises(ValueError, match="3 experts do not divide over 2 ranks") as caught:
            TokenDispatcher(3)
        return str(caught.value)

    assert simulate(uneven, 2)


def test_the_ranks_may_be_a_mesh() -> None:
    def outputs() -> list[Tensor]:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        tokens, experts = make_tokens(dist.get_rank(), 6), experts_of(mesh.get_local_rank("ep"), 2)
        return [
            routed(tokens, experts, TokenDispatcher(EXPERTS, ranks)) for ranks in (mesh["ep"], mesh.get_group("ep"))
        ]

    assert all(torch.equal(*found) for found in simulate(outputs, 4))


@pytest.mark.parametrize("options", [{}, {"transport": "capacity", "capacity": 12}], ids=str)
def test_one_process_alone_computes_meanwhile_and_fills_its_waits_too(options: dict[str, Any]) -> None:
    dispatcher, queue, events = TokenDispatcher(EXPERTS, WORLD_OF_ONE, **options), WgradQueue(fill_waits=True), []
    behind, tokens = Linear(DIM, DIM), make_tokens(0, 6)
    x = tokens.x.requires_grad_()
    rows, _, probs, dispatched = dispatcher.dispatch(x, *tokens[1:], queue=queue, meanwhile=lambda: "shared")
    y = dispatcher.combine(rows * probs[:, None], dispatched, meanwhile=lambda: events.append("another half"))
    assert dispatched.meanwhile == "shared" and events == ["another half"]
    with delayed_wgrad(queue):
        loss = behind(y).sum()
    loss.backward()
    assert not queue and behind.weight.grad.any(), "computed in the way back through the dispatcher"


def test_rows_that_were_dropped_are_counted_over_all_calls() -> None:
    dispatcher = TokenDispatcher(EXPERTS, WORLD_OF_ONE, "capacity", capacity=2)
    for calls in range(1, 3):
        dispatcher.dispatch(torch.ones(5, DIM), torch.ones(5, 1, dtype=torch.int64), torch.ones(5, 1))
        assert dispatcher.transport.num_dropped == 3 * calls


def test_a_copy_of_a_model_has_the_same_dispatcher() -> None:
    dispatcher = TokenDispatcher(EXPERTS, WORLD_OF_ONE, "capacity", capacity=2)
    assert copy.deepcopy(dispatcher) is dispatcher


def test_how_many_rows_a_symmetric_exchange_takes_and_gives() -> None:
    def sizes() -> list[int | None]:
        group, found = dist.group.WORLD, []
        for options in ({}, {"max_rows": 9}, {"max_rows": 9, "capacity_factor": 1.5}):
            exchange = SymmetricExchange(EXPERTS, group, **options)
            found.append(exchange.num_received)
        with pytest.raises(ValueError, match="10 rows, and max_rows=9: give a larger one"):
            exchange.send([torch.ones(10, DIM)], torch.tensor([10, 0, 0, 0]))
        return found

    assert simulate(sizes, 2) == [[None, 18, 14]] * 2
