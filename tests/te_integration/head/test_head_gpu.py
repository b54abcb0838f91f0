"""``LinearCrossEntropy`` on a GPU: errors and bits, no host waits, and a whole step as one CUDA graph."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from host_syncs import cuda_waits_are_errors
from loops import wrap
from torch import Tensor

from maingrad.ddp import DistributedOptimizer, GraphedTrainingStep
from maingrad.te_integration import LinearCrossEntropy

pytestmark = pytest.mark.gpu

K, V, TOKENS = 256, 5000, 1000


def make(mode: Any, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    torch.manual_seed(0)
    return wrap(LinearCrossEntropy(K, V, mode=mode, chunk_tokens=300, device="cuda", dtype=dtype, **options))


def batch(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    hidden = torch.randn(TOKENS, K, generator=generator, device="cuda").to(dtype).requires_grad_()
    targets = torch.randint(V, (TOKENS,), generator=generator, device="cuda")
    targets[:100] = -100
    return hidden, targets


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("mode", ["recompute", "in_forward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3, "logit_softcap": 2.0}], ids=str)
def test_errors_and_bits(mode: Any, dtype: torch.dtype, terms: dict[str, float]) -> None:
    model = make(mode, dtype, **terms)
    head, found = model.module, []
    scale = 1024.0 if dtype is torch.float16 else 1.0
    for _ in range(2):
        model.zero_grad()
        hidden, targets = batch(dtype)
        loss = model(hidden, targets, grad_scale=scale)
        (loss * scale).backward()
        found.append((loss.detach(), hidden.grad / scale, head.weight.main_grad / scale))
    assert all(map(torch.equal, *found))
    x, w = (each.detach().double().requires_grad_() for each in (hidden, head.weight))
    z = F.linear(x, w)
    cap = terms.get("logit_softcap")
    z = z if cap is None else cap * torch.tanh(z / cap)
    losses = F.cross_entropy(z, targets, label_smoothing=terms.get("label_smoothing", 0.0), reduction="sum")
    squares = torch.where(targets == -100, 0.0, z.logsumexp(1).square()).sum()
    exact = (losses + terms.get("z_loss", 0.0) * squares) / (targets != -100).sum()
    exact.backward()
    rounding = max(torch.finfo(dtype).eps, 1e-3)  # TF32 may multiply fp32
    for actual, expected in zip(found[0], (exact.detach(), x.grad, w.grad), strict=True):
        assert error(actual, expected) <= 2 * rounding


@pytest.mark.parametrize("mode", ["recompute", "in_forward"])
def test_the_host_waits_for_nothing(mode: Any) -> None:
    model = make(mode)
    hidden, targets = batch()
    for _ in range(2):
        model.zero_grad()
        model(hidden, targets).backward()
    model.zero_grad()
    with cuda_waits_are_errors():
        model(hidden, targets).backward()


def test_another_gradient_than_the_announced_one_poisons() -> None:
    model = make("in_forward")
    hidden, targets = batch()
    (2 * model(hidden, targets)).backward()
    assert hidden.grad.isnan().all()
    assert model.module.weight.main_grad.view(-1)[0].isnan()


@pytest.mark.parametrize("mode", ["recompute", "in_forward"])
def test_a_whole_step_as_a_graph(mode: Any) -> None:
    hidden, targets = batch()
    weights = []
    for graphed in (False, True):
        model = make(mode)
        optimizer = DistributedOptimizer(model, lr=1e-2)

        def train_step(hidden: Tensor, targets: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss: Tensor = model(hidden, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = GraphedTrainingStep(train_step, model, optimizer) if graphed else train_step
        for _ in range(6):
            step(hidden.detach(), targets)
        weights.append(model.module.weight.detach().clone())
    assert torch.equal(*weights)
