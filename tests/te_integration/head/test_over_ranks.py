"""Heads and logits of which tensor-parallel ranks have some classes each, against one rank with all of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from maingrad.launch import simulate
from maingrad.te_integration import LinearCrossEntropy
from maingrad.te_integration.dense.tensor_parallel import exchange_over_ranks, ranks_of
from maingrad.te_integration.head.over_ranks import cross_entropy_over_ranks

TOKENS, K, V = 12, 8, 33
FIRST = {1: [0, V], 2: [0, 17, V], 3: [0, 2, 30, V]}
"""Borders of the ranks' classes, by the number of ranks."""


def operands() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, 2, K, generator=draw, dtype=torch.float64)
    targets = torch.randint(V, (TOKENS, 2), generator=draw)
    targets[1:3] = 7  # ignored
    return hidden, targets


def head_of(**options: Any) -> LinearCrossEntropy:
    torch.manual_seed(1)
    return LinearCrossEntropy(K, V, dtype=torch.float64, ignore_index=7, bias=True, **options)


def part_of(head: LinearCrossEntropy, sequence_dim: int | None) -> LinearCrossEntropy:
    """What this rank has of ``head``."""
    group: Any = dist.group.WORLD
    start, end = FIRST[group.size()][group.rank() :][:2]
    head.weight, head.bias = (nn.Parameter(whole.detach()[start:end]) for whole in (head.weight, head.bias))
    head.first_class = start
    exchange_over_ranks(head, ["column"], ranks_of(group, sequence_dim), group)
    return head


@pytest.mark.in_turn
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("sequence_dim", [None, 0])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "options", [{"reduction": "sum"}, {"logit_softcap": 2.0, "logit_scale": 0.5}, {"chunk_tokens": 5}], ids=str
)
def test_a_head_of_some_classes(ranks: int, sequence_dim: int | None, compiled: bool, options: dict[str, Any]) -> None:
    hidden, targets = operands()
    hidden.requires_grad_()
    whole = head_of(**options)
    expected = whole(hidden, targets)
    expected.backward()

    def job() -> None:
        head, rank = part_of(head_of(**options), sequence_dim), dist.get_rank()

        def own(x: Tensor) -> Tensor:
            return x if sequence_dim is None else x.chunk(ranks, sequence_dim)[rank]

        mine = own(hidden.detach()).clone().requires_grad_()
        loss = (torch.compile(head, backend="eager") if compiled else head)(mine, targets)
        loss.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(mine.grad, own(hidden.grad))
        start, end = FIRST[ranks][rank:][:2]
        for part, of_whole in ((head.weight, whole.weight), (head.bias, whole.bias)):
            torch.testing.assert_close(part.grad, of_whole.grad[start:end])

    simulate(job, ranks)


class LargestTensor(TorchDispatchMode):
    """The most elements that any result of an operation has."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, result.numel() if isinstance(result, Tensor) else 0)
        return result


def test_ranks_have_no_more_logits_than_a_chunks() -> None:
    def job() -> int:
        head, (hidden, targets) = part_of(head_of(chunk_tokens=3), None), operands()
        with LargestTensor() as seen:
            head(hidden.requires_grad_(), targets).backward()
        return seen.most

    assert max(simulate(job, 2)) == 2 * TOKENS * K, "the hidden states"


def test_logits_of_some_classes() -> None:
    draw = torch.Generator().manual_seed(2)
    logits = 300 * torch.randn(TOKENS, V, generator=draw, dtype=torch.float64)  # beyond what exp can take
    logits.requires_grad_()
    targets = torch.randint(V, (TOKENS,), generator=draw)
    targets[2] = -100
    expected = F.cross_entropy(logits, targets, reduction="none")
    expected.sum().backward()

    def job() -> None:
        start, end = FIRST[3][dist.get_rank() :][:2]
        part = logits.detach()[:, start:end].clone().requires_grad_()
        losses = cross_entropy_over_ranks(part, targets, ranks_of(dist.group.WORLD), start)
        losses.sum().backward()
        torch.testing.assert_close(losses, expected.detach())
        torch.testing.assert_close(part.grad, logits.grad[:, start:end])

    simulate(job, 3)


@pytest.mark.parametrize("options", [{"z_loss": 0.1}, {"label_smoothing": 0.1}, {"mode": "in_forward"}], ids=str)
def test_what_needs_all_classes_is_refused(options: dict[str, Any]) -> None:
    def job() -> None:
        hidden, targets = operands()
        with pytest.raises(ValueError, match="need the logits of all classes"):
            part_of(head_of(**options), None)(hidden, targets)

    simulate(job, 2)
