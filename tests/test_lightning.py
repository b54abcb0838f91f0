"""Lightning's automatic optimization, its closure, clipping and accumulation, over each wrapper on two ranks."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import Tensor, nn

import maingrad

ROWS, STEPS = 4, 6


PAGE = (Path(__file__).resolve().parents[1] / "docs/switching.md").read_text()


def batch(step: int, ranks: range) -> Tensor:
    rows = [torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
    return torch.cat(rows).double()


def trained(form: str, accumulated: int) -> list[Tensor]:
    """Weights after an epoch. ``"plain"``: of one process, on the batches of both ranks."""
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.plugins.environments import LightningEnvironment

    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = net if form == "plain" else maingrad.parallelize(net, form)

        def configure_optimizers(self) -> Any:
            if form == "plain":
                return torch.optim.AdamW(self.model.parameters(), lr=0.1)
            return maingrad.make_optimizer(self.model, torch.optim.AdamW, lr=0.1)

        def training_step(self, step: int) -> Tensor:
            ranks = range(2) if form == "plain" else range(dist.get_rank(), dist.get_rank() + 1)
            loss: Tensor = self.model(batch(step, ranks)).square().mean()
            return loss

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, gradient_clip_val=0.5, accumulate_grad_batches=accumulated,
        plugins=[LightningEnvironment()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(range(STEPS), batch_size=None))
    return [torch.cat([whole.reshape(-1) for whole in maingrad_weights(module.model)])]


def maingrad_weights(model: Any) -> list[Tensor]:
    if hasattr(model, "unsharded"):
        with model.unsharded():
            return [param.detach().clone() for param in model.parameters()]
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.in_turn
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(
    "form", ["zero1", *(pytest.param(form, marks=pytest.mark.slow) for form in ("ddp", "zero2", "zero3"))]
)
@pytest.mark.sampled(1)
def test_automatic_optimization_is_plain_pytorch_on_the_whole_batch(form: str, accumulated: int) -> None:
    expected = trained("plain", accumulated)
    for found in run_ranks(trained, 2, form, accumulated):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return (x - 1).square().mean()


def run_the_page(folder: str) -> list[float]:
    names: dict[str, Any] = {}
    os.chdir(folder)
    exec(re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[2], names)
    torch.manual_seed(0)
    module = names["Module"](Loss())
    x = batch(0, range(dist.get_rank(), dist.get_rank() + 1)).float()
    losses = [module.model(x).item()]
    names["trainer"].fit_loop.max_epochs = 1
    names["trainer"].fit(module, torch.utils.data.DataLoader([x] * 20, batch_size=None))
    return [*losses, module.model(x).item()]


@pytest.mark.in_turn
def test_docs_switching_trains(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    for before, after in run_ranks(run_the_page, 2, str(tmp_path)):
        assert after < before
