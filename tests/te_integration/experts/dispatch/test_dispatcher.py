"""``TokenDispatcher``: results and gradients are those of the block with all experts in one process."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dispatched import DIM, EXPERTS, Tokens, experts_of, make_tokens, number, routed
from stale_memory import stale_empty
from torch import Tensor, nn

from maingrad.ddp import WORLD_OF_ONE
from maingrad.launch import simulate
from maingrad.te_integration import GroupedLinear, TokenDispatcher
from maingrad.te_integration.experts.dispatch.transport import Meanwhile

ROUTINGS = {
    "any": ([7, 5, 9, 1], 2, "any"),
    "one expert": ([7, 5, 9, 1], 1, "one"),
    "none to the last ranks": ([7, 5, 9, 1], 2, "low"),
    "all experts": ([3, 4, 2, 5], EXPERTS, "any"),
    "a rank without tokens": ([7, 0, 9, 0], 2, "any"),
    "no tokens": ([0, 0, 0, 0], 2, "any"),
    "dropped": ([7, 5, 9, 11], 2, "dropped"),
}
TRANSPORTS: dict[str, dict[str, Any]] = {"all_to_all": {}, "capacity": {"transport": "capacity", "capacity": 40}}
FOREIGN = "somebody else's"
Grads = tuple[list[Tensor], dict[tuple[str, int], Tensor]]


class Exact(nn.Module):
    """Experts whose sums are exact: one product, and each row is multiplied by its probability."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.linear = GroupedLinear(EXPERTS // ranks, DIM, DIM, bias=False)
        for name, param in self.linear.named_parameters():
            random = torch.Generator().manual_seed(number(name, rank, ranks))
            param.data.copy_(torch.randint(-4, 5, param.shape, generator=random) / 8)

    def forward(self, rows: Tensor, splits: Tensor, probs: Tensor) -> Tensor:
        return self.linear(rows * probs[:, None], splits)


class Gathering:
    """Somebody else's transport, which shows all ranks everything. The memory behind its rows holds NaN."""

    def send(self, tensors: Sequence[Tensor], counts: Tensor, sent: Any = None, meanwhile: Meanwhile = None) -> Any:
        if sent is None:
            ends = self._shown(counts.cumsum(0))
            size, local = len(ends), EXPERTS // len(ends)
            own = range(dist.get_rank() * local, (dist.get_rank() + 1) * local)
            takes = [
                [(each, slice(([0, *ends[each].tolist()])[e], ends[each][e])) for each in range(size)] for e in own
            ]
            sent = [take for of_expert in takes for take in of_expert], self._shown(len(tensors[0]))[dist.get_rank()]
        shown = self._shown(tensors)
        if meanwhile is not None:
            meanwhile()
        rows = [torch.cat([shown[rank][each][part] for rank, part in sent[0]]) for each in range(len(tensors))]
        local = EXPERTS // dist.get_world_size()
        splits = torch.tensor([int(part.stop) - int(part.start) for _, part in sent[0]]).view(local, -1).sum(1)
        return [torch.cat((each, each.new_full((3, *each.shape[1:]), torch.nan))) for each in rows], splits, sent

    def send_back(self, tensors: Sequence[Tensor], sent: Any, meanwhile: Meanwhile = None) -> list[Tensor]:
        takes, num_rows = sent
        shown = self._shown((takes, tensors))
        if meanwhile is not None:
            meanwhile()
        results = [tensor.new_zeros(num_rows, *tensor.shape[1:]) for tensor in tensors]
        for of_rank, theirs in shown:
            begin = 0
            for rank, part in of_rank:
                end = begin + int(part.stop) - int(part.start)
                if rank == dist.get_rank():
                    for result, tensor in zip(results, theirs, strict=True):
                        result[part] = tensor[begin:end]
                begin = end
        return results

    def _shown(self, value: Any) -> list[Any]:
        shown: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shown, value)
        return shown


def tokens_of(rank: int, case: str) -> Tokens:
    counts, top_k, routing = ROUTINGS[case]
    return make_tokens(rank, counts[rank], top_k, routing)


def dy_of(rank: int, tokens: Tokens) -> Tensor:
    return torch.randint(-4, 5, tokens.x.shape, generator=torch.Generator().manual_seed(100 + rank)) / 4


def gradients(
    make: Callable[[int, int], nn.Module], tokens: Tokens, dy: Tensor, rank: int, ranks: int, **options: Any
) -> Grads:
    """y and the gradients of x and probs; those of the weights by product and number of the expert."""
    experts = make(rank, ranks)
    leaves = Tokens(tokens.x.requires_grad_(), tokens.ids, tokens.probs.requires_grad_())
    y = routed(leaves, experts, TokenDispatcher(EXPERTS, None if ranks > 1 else WORLD_OF_ONE, **options))
    y.backward(dy)
    assert leaves.probs.grad is not None
    of_weights = {}
    for name, param in experts.named_parameters():
        assert param.grad is not None, name  # zeros without rows
        of_weights[name.rpartition("weight")[0], number(name, rank, ranks)] = param.grad
    return [y.detach(), leaves.x.grad, leaves.probs.grad], of_weights


def over_ranks(make: Callable[[int, int], nn.Module], case: str, transport: str) -> Grads:
    rank, tokens = dist.get_rank(), tokens_of(dist.get_rank(), case)
    options = {"transport": Gathering()} if transport == FOREIGN else TRANSPORTS[transport]
    return gradients(make, tokens, dy_of(rank, tokens), rank, dist.get_world_size(), **options)


@pytest.mark.parametrize("case", ROUTINGS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("make", [Exact, experts_of])
@pytest.mark.parametrize("transport", [*TRANSPORTS, FOREIGN])
def test_results_and_gradients_are_those_of_one_process(
    transport: str, make: Callable[..., nn.Module], ranks: int, case: str
) -> None:
    with stale_empty():
        parts = simulate(over_ranks, ranks, make, case, transport)
    tokens = [tokens_of(rank, case) for rank in range(ranks)]
    whole = Tokens(*(torch.cat(tensors) for tensors in zip(*tokens, strict=True)))
    dy = torch.cat([dy_of(rank, each) for rank, each in enumerate(tokens)])
    own, of_weights = gradients(make, whole, dy, 0, 1)
    # The rounding of an expert's products and activations depends on where in memory its rows are.
    near = {"rtol": 0.0, "atol": 0.0} if make is Exact else {"rtol": 1e-5, "atol": 1e-6}
    for found, wanted in zip(zip(*(part[0] for part in parts), strict=True), own, strict=True):
        torch.testing.assert_close(torch.cat(found), wanted, **near)
    found_of_weights = {key: grad for part in parts for key, grad in part[1].items()}
    assert found_of_weights.keys() == of_weights.keys()
    for key, wanted in of_weights.items():
        torch.testing.assert_close(found_of_weights[key], wanted, **near)
