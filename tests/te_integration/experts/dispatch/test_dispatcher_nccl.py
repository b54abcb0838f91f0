"""``TokenDispatcher`` over NCCL: the results of CPUs, and a capacity that a CUDA graph holds."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatched import EXPERTS, Tokens, make_tokens
from gloo import run_ranks
from host_syncs import cuda_waits_are_errors
from sharded_on_gpus import nccl
from torch import Tensor

from maingrad.launch import simulate
from maingrad.te_integration import TokenDispatcher

TRANSPORTS: dict[str, dict[str, Any]] = {
    "all_to_all": {},
    "capacity": {"transport": "capacity", "capacity": 3},
}
ROUTINGS = ("any", "one", "low", "dropped")


def block(dispatcher: TokenDispatcher, tokens: Tokens) -> list[Tensor]:
    """y and gradients, of experts that multiply by their number: sums are exact."""
    x, probs = tokens.x.detach().requires_grad_(), tokens.probs.detach().requires_grad_()
    rows, splits, row_probs, dispatched = dispatcher.dispatch(x, tokens.ids, probs)
    assert row_probs is not None
    expert = torch.searchsorted(splits.cumsum(0), torch.arange(len(rows), device=x.device), right=True) + 1
    y = dispatcher.combine(rows * (row_probs * expert)[:, None], dispatched)
    return [y.detach(), splits, *torch.autograd.grad(y.square().sum(), [x, probs])]


def results(transport: str, device: str) -> list[Tensor]:
    group = nccl() if device == "cuda" else None
    dispatcher = TokenDispatcher(EXPERTS, group, **TRANSPORTS[transport])
    found = []
    for seed, routing in enumerate(ROUTINGS):
        for count in (9, 0 if dist.get_rank() else 5):
            tokens = make_tokens(10 * seed + dist.get_rank(), count, 2, routing)
            found += [each.cpu() for each in block(dispatcher, Tokens(*(each.to(device) for each in tokens)))]
    return found


@pytest.mark.gpu(2)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_results_are_those_of_cpus(transport: str) -> None:
    on_gpus, on_cpus = run_ranks(results, 2, transport, "cuda"), simulate(results, 2, transport, "cpu")
    for found, expected in zip(on_gpus, on_cpus, strict=True):
        assert all(map(torch.equal, found, expected))


def replays() -> list[bool]:
    dispatcher = TokenDispatcher(EXPERTS, nccl(), **TRANSPORTS["capacity"])
    static = Tokens(*(each.cuda() for each in make_tokens(dist.get_rank(), 9)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        block(dispatcher, static)
        with cuda_waits_are_errors():
            block(dispatcher, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = block(dispatcher, static)
    equal = []
    for seed, routing in enumerate(ROUTINGS):
        tokens = make_tokens(100 + 10 * seed + dist.get_rank(), 9, 2, routing)
        for into, value in zip(static, tokens, strict=True):
            into.copy_(value)
        before = dispatcher.transport.num_dropped.clone()
        graph.replay()
        dropped = dispatcher.transport.num_dropped - before
        expected = block(dispatcher, static)
        equal.append(all(map(torch.equal, outputs, expected)))
        equal.append(bool(dispatcher.transport.num_dropped == before + 2 * dropped))
    return equal


@pytest.mark.gpu(2)
def test_a_graph_of_a_capacity_replays_with_another_routing() -> None:
    for equal in run_ranks(replays, 2):
        assert len(equal) == 2 * len(ROUTINGS)
        assert all(equal), equal
