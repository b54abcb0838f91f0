"""Dispatched experts in what programs do around them: recompute, compile, freeze, copy, and end by an error."""

import copy
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatched import DIM, EXPERTS, Tokens, experts_of, make_tokens, routed
from ending_ranks import assert_silent, run_to_the_end, the_report
from gloo import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import WORLD_OF_ONE
from maingrad.launch import simulate
from maingrad.te_integration import Linear, TokenDispatcher, WgradQueue, delayed_wgrad
from maingrad.te_integration.experts.dispatch import compiled_dispatch

TOKENS = [5, 0]
"""Of each rank."""


class Block(nn.Module):
    """A router and dispatched experts."""

    def __init__(self, transport: dict[str, Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = Linear(DIM, EXPERTS)
        self.dispatcher = TokenDispatcher(EXPERTS, **(transport or {}))
        self.experts = experts_of(dist.get_rank(), dist.get_world_size())

    def forward(self, x: Tensor) -> Tensor:
        probs, ids = self.router(x).softmax(-1).topk(2)
        return x + routed(Tokens(x, ids, probs), self.experts, self.dispatcher)


def run(how: str, frozen: Sequence[str] = ()) -> list[Tensor | None]:
    """The output of two blocks and all gradients."""
    blocks = [Block(), Block()]
    for name, param in nn.ModuleList(blocks).named_parameters():
        param.requires_grad_(not any(f".{part}" in name for part in frozen))
    y = x = make_tokens(dist.get_rank(), TOKENS[dist.get_rank()]).x.requires_grad_("x" not in frozen)
    queue = WgradQueue(fill_waits=True)
    for block in blocks:
        if how == "compile":
            with delayed_wgrad(queue):
                y = torch.compile(block, backend="aot_eager")(y)
        elif how == "copy":
            duplicate = copy.deepcopy(block)
            duplicate.load_state_dict(block.state_dict())
            y = torch.func.functional_call(duplicate, dict(block.named_parameters()), (y,))
        elif how.startswith("recompute"):
            y = checkpoint(block, y, use_reentrant=how.endswith("reentrant"))
        elif how.startswith("delay"):
            with delayed_wgrad(queue):
                y = checkpoint(block, y, use_reentrant=False) if how.endswith("recompute") else block(y)
        else:
            y = block(y)
    y.square().sum().backward()
    queue.drain()
    return [y.detach(), x.grad, *(param.grad for block in blocks for param in block.parameters())]


@pytest.mark.parametrize(
    "how",
    [
        "recompute",
        "recompute, reentrant",
        "delay",
        "delay, recompute",
        "copy",
        pytest.param("compile", marks=pytest.mark.in_turn),
    ],
)
def test_gradients_are_the_same(how: str) -> None:
    for found, expected in zip(simulate(run, 2, how), simulate(run, 2, "plainly"), strict=True):
        assert all(grad is not None for grad in expected)
        # Compiled code has other memory, and on some CPUs the rounding of products depends on where operands are.
        tolerance = 1e-6 if how == "compile" else 0.0
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance)


STATIC: dict[str, Any] = {"transport": "capacity", "capacity": 5}


def run_whole(how: str) -> list[Tensor | None]:
    """As ``run``, by a transport that compiled graphs hold: a break is an error."""
    blocks = [Block(STATIC), Block(STATIC)]
    y = x = make_tokens(dist.get_rank(), 5).x.requires_grad_()
    recomputed, queue = partial(checkpoint, use_reentrant=False), WgradQueue(fill_waits=True)
    for block in blocks:
        if how == "compiled":
            y = torch.compile(block, backend="aot_eager", fullgraph=True)(y)
        elif how == "delayed, compiled":
            with delayed_wgrad(queue):
                y = torch.compile(block, backend="aot_eager")(y)
        elif how == "recomputed, compiled":
            y = torch.compile(partial(recomputed, block), backend="aot_eager")(y)  # torch loses an effect's order there
        elif how == "compiled, recomputed":
            y = recomputed(torch.compile(block, backend="aot_eager", fullgraph=True), y)
        else:
            y = block(y)
    y.square().sum().backward()
    queue.drain()
    return [y.detach(), x.grad, *(param.grad for block in blocks for param in block.parameters())]


@pytest.mark.in_turn
@pytest.mark.parametrize("how", ["compiled", "delayed, compiled", "recomputed, compiled", "compiled, recomputed"])
def test_a_graph_that_holds_its_exchanges_has_the_same_gradients(how: str) -> None:
    for found, expected in zip(simulate(run_whole, 2, how), simulate(run_whole, 2, "plainly"), strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one is not None and other is not None and other.any()
            torch.testing.assert_close(one, other, rtol=0.0, atol=1e-6)


def run_unlike(compiled: bool) -> list[Tensor | None]:
    block, x = Block(STATIC), make_tokens(dist.get_rank(), 5).x.requires_grad_(dist.get_rank() == 0)
    y = (torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block)(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(param.grad for param in block.parameters())]


@pytest.mark.in_turn
def test_x_may_need_a_gradient_on_some_ranks_alone() -> None:
    """Probabilities need one on all: the same tensors travel in each rank's backward."""
    for found, expected in zip(simulate(run_unlike, 2, True), simulate(run_unlike, 2, False), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)


def test_the_traced_form_computes_what_the_eager_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by Python, without a compiler; rows beyond the capacity are dropped."""

    def run(traced: bool) -> list[Tensor | None]:
        x, ids, probs = make_tokens(0, 6)
        leaves, order = [x.requires_grad_(), probs.requires_grad_()], []

        def beside(name: str) -> str:
            order.append(name)
            return name

        dispatcher = TokenDispatcher(EXPERTS, WORLD_OF_ONE, "capacity", capacity=3)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: traced)
            patch.setattr(compiled_dispatch, "is_tracing_recomputed", lambda: False)
            assert dispatcher.runs_in_graph()
            rows, splits, row_probs, sent = dispatcher.dispatch(x, ids, probs, meanwhile=partial(beside, "shared"))
            y = dispatcher.combine(torch.tanh(rows) * row_probs[:, None], sent, meanwhile=partial(beside, "half"))
        y.square().sum().backward()
        assert order == ["shared", "half"] and sent.meanwhile == "shared"
        dropped = dispatcher.transport.num_dropped
        assert dropped > 0
        return [y.detach(), splits, dropped, *(leaf.grad for leaf in leaves)]

    for one, other in zip(run(True), run(False), strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


@pytest.mark.in_turn
def test_a_compiled_graph_keeps_every_exchange() -> None:
    """Equal ones, and those whose results nobody reads: another rank may need its part of them."""
    events: list[tuple[int, str]] = []

    def both(compiled: bool) -> list[Tensor]:
        x, ids, probs = make_tokens(dist.get_rank(), 5)
        leaves = [x.requires_grad_(), probs.requires_grad_()]
        dispatcher, order = TokenDispatcher(EXPERTS, **STATIC), []

        def twice(x: Tensor, probs: Tensor) -> Tensor:
            y = x
            for _ in range(2):
                rows, _, row_probs, sent = dispatcher.dispatch(x, ids, probs, meanwhile=lambda: order.append(1))
                rows = rows * row_probs[:, None]
                y = y + dispatcher.combine(rows, sent, meanwhile=lambda: order.append(2))
                dispatcher.combine(rows, sent)
            return y

        y = (torch.compile(twice, backend="aot_eager", fullgraph=True) if compiled else twice)(*leaves)
        y.square().sum().backward()
        assert order == [1, 2, 1, 2]
        return [y, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    found = []
    for compiled in (False, True):
        events.clear()
        results = simulate(both, 2, compiled, schedule=events)
        found.append((results, sum(rank == 0 and event.startswith("launch all_to_all") for rank, event in events)))
    (eager, expected), (in_graph, launched) = found
    assert launched == expected > 0
    for one, other in zip(in_graph, eager, strict=True):
        assert len(one) == len(other) == 3 and all(map(torch.equal, one, other))


@pytest.mark.in_turn
def test_graphs_break_where_backward_fills_its_waits_or_rows_are_quantised() -> None:
    def kinds() -> list[bool]:
        dispatcher, filled = TokenDispatcher(EXPERTS, **STATIC), WgradQueue(fill_waits=True)
        with delayed_wgrad(filled):
            of_block = dispatcher.runs_in_graph()
        return [
            dispatcher.runs_in_graph(),
            dispatcher.runs_in_graph(WgradQueue()),
            dispatcher.runs_in_graph(filled),
            of_block,
            TokenDispatcher(EXPERTS, quantize_rows=True, **STATIC).runs_in_graph(),
            TokenDispatcher(EXPERTS).runs_in_graph(),
        ]

    assert simulate(kinds, 2) == [[True, True, False, False, False, False]] * 2


def test_a_recompute_sends_no_row_back() -> None:
    """Backward needs the rows of the experts again, and not what the block returns."""
    events: list[tuple[int, str]] = []

    def launches(recompute: bool) -> None:
        block, x = Block(), make_tokens(dist.get_rank(), 5).x.requires_grad_()
        (checkpoint(block, x, use_reentrant=False) if recompute else block(x)).sum().backward()

    numbers = []
    for recompute in (False, True):
        events.clear()
        simulate(launches, 2, recompute, schedule=events)
        numbers.append(sum(rank == 0 and event.startswith("launch all_to_all") for rank, event in events))
    assert numbers == [7, 10]  # counts, rows and probabilities once more


def test_real_ranks_compute_what_simulated_ones_do() -> None:
    for found, expected in zip(run_ranks(run, 2, "delay"), simulate(run, 2, "delay"), strict=True):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("frozen", [["experts"], ["router"], ["experts", "router"], ["x"], ["x", "router"], ["fc1"]])
def test_what_is_frozen_gets_none_and_the_rest_the_same(frozen: list[str]) -> None:
    for found, expected in zip(simulate(run, 2, "plainly", frozen), simulate(run, 2, "plainly"), strict=True):
        assert None in found
        for one, other in zip(found, expected, strict=True):
            assert one is None or torch.equal(one, other)


def test_a_queue_without_fill_waits_is_left_alone() -> None:
    """Its owner, such as a pipeline's schedule, says when weight gradients are computed."""

    def pending() -> tuple[int, ...]:
        x = make_tokens(dist.get_rank(), 5).x
        numbers = []
        for fill_waits in (False, True):
            block, queue = Block(), WgradQueue(fill_waits=fill_waits)
            with delayed_wgrad(queue):
                loss = block(x).square().sum()
            loss.backward()
            numbers.append(len(queue))
            queue.drain()
        return tuple(numbers)

    # Half of the experts' two is for a wait that does not come, and the router's is behind the last exchange.
    assert simulate(pending, 2) == [(3, 2)] * 2


def test_second_derivatives_are_refused_by_name() -> None:
    def refused() -> None:
        tokens = make_tokens(dist.get_rank(), 3)
        y = routed(
            tokens._replace(x=tokens.x.requires_grad_()), experts_of(dist.get_rank(), 2), TokenDispatcher(EXPERTS)
        )
        with pytest.raises(RuntimeError, match="second derivatives"):
            torch.autograd.grad(y.sum(), tokens.x, create_graph=True)

    simulate(refused, 2)


def of_the_docs() -> tuple[float, list[Tensor], list[Tensor]]:
    page = Path(__file__).resolve().parents[4] / "docs/mixture_of_experts.md"
    section = page.read_text().partition("\n## Experts over ranks\n")[2]
    program, *_ = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    experts = [param for param in names["model"].parameters() if not getattr(param, "allreduce", True)]
    dense = [param for param in names["model"].parameters() if getattr(param, "allreduce", True)]
    return float(names["loss"].detach()), values(experts), values(dense)


def values(params: list[nn.Parameter]) -> list[Tensor]:
    return [param.detach().clone() for param in params]


@pytest.mark.in_turn
def test_the_program_of_the_docs() -> None:
    losses, experts, dense = zip(*simulate(of_the_docs, 4), strict=True)
    assert max(losses) < 1.5, "2.9 at the start"
    for rank in range(4):
        assert all(map(torch.equal, dense[0], dense[rank]))
        assert all(map(torch.equal, experts[rank % 2], experts[rank]))
    assert not any(map(torch.equal, experts[0], experts[1]))


# ---- A rank that raises while rows are away. ----


class Trap(nn.Module):
    """Experts of which one rank's raise."""

    def __init__(self, experts: nn.Module, when: str) -> None:
        super().__init__()
        self.experts, self.when = experts, when

    def forward(self, rows: Tensor, *others: Any) -> Tensor:
        if dist.get_rank() == 1:
            if self.when == "forward":
                raise KeyError("a mistake in somebody's experts")
            rows.register_hook(self._raise)
        return self.experts(rows, *others)

    def _raise(self, grad: Tensor) -> None:
        raise KeyError("a mistake in somebody's experts")


def one_raises(when: str, transport: dict[str, Any]) -> None:
    tokens = make_tokens(dist.get_rank(), 6)
    experts = Trap(experts_of(dist.get_rank(), dist.get_world_size()), when)
    y = routed(tokens._replace(x=tokens.x.requires_grad_()), experts, TokenDispatcher(EXPERTS, **transport))
    y.sum().backward()


@pytest.mark.in_turn
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_rank_that_raises_between_the_exchanges_is_named_by_all_others(when: str) -> None:
    transport = {"transport": "capacity", "capacity": 2} if when == "forward" else {}
    ended = run_to_the_end(one_raises, 4, when, transport, collective_timeout=60.0)
    assert "a mistake in somebody's experts" in ended[1].output
    for rank in (0, 2, 3):
        report = the_report(rank, ended[rank])
        assert report["what"] == "an exchange of experts' rows"
        assert_silent(report, 1)
