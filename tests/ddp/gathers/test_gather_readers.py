"""While gathers are under way: modules of torch that read weights in their own ways, averages of weights, and irregular
loops see what they would see without overlap."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.launch import simulate

RANKS = 3
WIDTH = 4


class Wrapped(nn.Module):
    """A module behind a layer of its own, called as ``call`` says."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = inner
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, self.first(x))


def wrap(model: nn.Module, overlap: bool) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=overlap, bucket_size=8
    )
    ddp = DistributedDataParallel(model, config)
    return ddp, DistributedOptimizer(ddp, lr=0.1)


def batch(step: int) -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train_one(ddp: DistributedDataParallel, step: int) -> float:
    loss = ddp(batch(step)).square().sum()
    loss.backward()
    ddp.finish_grad_sync()
    return loss.item()


def in_flight(ddp: DistributedDataParallel) -> bool:
    return any(type(entry.owned.param) is not nn.Parameter for entry in ddp.bucket_params)


def same_with_and_without_overlap(fn: Callable[..., Any], *args: Any) -> None:
    """``fn(overlap, *args)`` returns (gathers were under way, what it saw)."""
    for (waiting, seen), (not_waiting, expected) in zip(
        simulate(fn, RANKS, True, *args, seed=1), simulate(fn, RANKS, False, *args), strict=True
    ):
        assert waiting and not not_waiting, "or the test shows nothing"
        assert len(seen) == len(expected)
        for one, other in zip(seen, expected, strict=True):
            assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


# ---- Modules. ----

MODULES: dict[str, Callable[[], Wrapped]] = {
    "LSTM": lambda: Wrapped(nn.LSTM(WIDTH, WIDTH), lambda m, x: m(x)[0]),
    "attention": lambda: Wrapped(nn.MultiheadAttention(WIDTH, 2), lambda m, x: m(x, x, x)[0]),
    "batch norm": lambda: Wrapped(nn.BatchNorm1d(3), lambda m, x: m(x)),
    "weight norm": lambda: Wrapped(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), lambda m, x: m(x)),
    "orthogonal": lambda: Wrapped(parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)), lambda m, x: m(x)),
    "functional_call": lambda: Wrapped(
        nn.Linear(WIDTH, WIDTH), lambda m, x: torch.func.functional_call(m, dict(m.named_parameters()), (x,))
    ),
    "recompute": lambda: Wrapped(nn.Linear(WIDTH, WIDTH), lambda m, x: checkpoint(m, x, use_reentrant=False)),
    # In evaluation they go their own way, unless they find a hook or a __torch_function__ in them.
    "encoder layer": lambda: Wrapped(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True), lambda m, x: m(x)),
    "encoder": lambda: Wrapped(_encoder(), lambda m, x: m(x, src_key_padding_mask=PADDING[: len(x)])),
    "autocast": lambda: Wrapped(nn.Linear(WIDTH, WIDTH), _under_autocast),
}


PADDING = torch.tensor([[False, False, True], [False, True, True]])


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True), 2)


def _under_autocast(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module(x).float()


def train_a_module(overlap: bool, kind: str) -> tuple[bool, list[float]]:
    torch.manual_seed(0)
    ddp, optimizer = wrap(MODULES[kind](), overlap)
    losses, waiting = [], []
    for step in range(5):
        losses.append(train_one(ddp, step))
        optimizer.step()
        ddp.zero_grad_buffer()
        waiting.append(in_flight(ddp))
        if step % 2:
            ddp.eval()
            with torch.no_grad():
                losses.append(ddp(torch.ones(2, 3, WIDTH)).sum().item())
            ddp.train()
    return any(waiting), losses


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.sampled(2)
def test_modules_of_torch(kind: str) -> None:
    same_with_and_without_overlap(train_a_module, kind)


# ---- Averages of weights. ----


def average_a_kept_list(overlap: bool) -> tuple[bool, list[Tensor]]:
    """The parameters are listed once; after every step the average moves a tenth of the way."""
    torch.manual_seed(0)
    ddp, optimizer = wrap(MODULES["batch norm"](), overlap)
    kept = list(ddp.module.parameters())
    average = [param.detach().clone() for param in kept]
    waiting = []
    for step in range(4):
        train_one(ddp, step)
        optimizer.step()
        waiting.append(in_flight(ddp))
        with torch.no_grad():
            torch._foreach_lerp_(average, kept, 0.1)
        ddp.zero_grad_buffer()
    return all(waiting), average


def average_a_model(overlap: bool, multi: bool) -> tuple[bool, list[Tensor]]:
    torch.manual_seed(0)
    ddp, optimizer = wrap(MODULES["batch norm"](), overlap)
    average = AveragedModel(ddp.module, multi_avg_fn=get_ema_multi_avg_fn(0.9) if multi else None)
    waiting = []
    for step in range(4):
        train_one(ddp, step)
        optimizer.step()
        waiting.append(in_flight(ddp))
        average.update_parameters(ddp.module)
        ddp.zero_grad_buffer()
    return all(waiting), [param.detach() for param in average.module.parameters()]


@pytest.mark.in_turn
def test_averages_right_after_a_step() -> None:
    same_with_and_without_overlap(average_a_kept_list)
    for multi in (False, True):
        same_with_and_without_overlap(average_a_model, multi)


# ---- Irregular loops. ----


def train_irregularly(overlap: bool, seed: int) -> tuple[bool, list[Any]]:
    """Steps, skipped steps, evaluations, steps without a forward and unfinished microbatches, in a random order."""
    order = torch.Generator().manual_seed(seed)  # alike on all ranks
    torch.manual_seed(0)
    ddp, optimizer = wrap(MODULES["batch norm"](), overlap)
    seen: list[Any] = []
    waiting = []
    for turn in range(12):
        what = int(torch.randint(5, (), generator=order))
        if what == 0:  # train
            seen.append(train_one(ddp, turn))
            optimizer.step()
        elif what == 1:  # gradients that nobody wants
            seen.append(train_one(ddp, turn))
        elif what == 2:  # evaluation
            ddp.eval()
            with torch.no_grad():
                seen.append(ddp(batch(turn)).sum().item())
            ddp.train()
            continue
        elif what == 3:  # two steps without a forward
            for _ in range(2):
                ddp.finish_grad_sync()
                optimizer.step()
                ddp.zero_grad_buffer()
        else:  # microbatches of which none is the last, thrown away
            with ddp.no_sync() if turn % 2 else nullcontext():
                seen.append(ddp(batch(turn)).sum().item())
        waiting.append(in_flight(ddp))
        ddp.zero_grad_buffer()
    seen += [value.detach().clone() for value in ddp.module.state_dict().values()]
    return any(waiting), seen


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled(1)
def test_irregular_loops(seed: int) -> None:
    same_with_and_without_overlap(train_irregularly, seed)


def test_an_evaluation_takes_torchs_fast_path_while_gathers_are_under_way() -> None:
    """It is taken by layers without hooks, and gives zeros for padding; the slow path does not."""

    def evaluate() -> tuple[bool, Tensor, Tensor]:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        ddp, optimizer = wrap(nn.TransformerEncoder(layer, 1), overlap=True)
        train_one(ddp, 0)
        optimizer.step()
        optimizer.zero_grad()
        padding = torch.tensor([[False, False, True], [False, True, True]])
        waiting = in_flight(ddp)
        ddp.eval()
        with torch.no_grad():
            first, second = (ddp(batch(1), src_key_padding_mask=padding) for _ in range(2))
        return waiting, first, second

    for waiting, first, second in simulate(evaluate, RANKS):
        assert waiting
        assert torch.equal(first, second)
        assert not second[1, 2].any(), "the fast path"
