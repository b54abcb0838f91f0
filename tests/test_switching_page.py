"""The loops of docs/switching.md train on two ranks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from maingrad.launch import simulate

PAGE = (Path(__file__).resolve().parents[1] / "docs/switching.md").read_text()
LOOPS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


class Loss(nn.Module):
    """A model with blocks that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return (x - 1).square().mean()


def loss_before_and_after(code: str) -> tuple[float, float]:
    torch.manual_seed(0)
    data = list(torch.rand(20, 16, 8))
    names: dict[str, Any] = {"model": Loss(), "data": data}
    before = names["model"](data[0]).item()
    exec(code, names)
    with torch.no_grad():
        return before, float(names["model"](data[0]))


@pytest.mark.parametrize("number", range(2))
def test_the_loops_train(number: int) -> None:
    assert len(LOOPS) == 3, "tests/test_lightning.py has the third"
    for before, after in simulate(loss_before_and_after, 2, LOOPS[number]):
        assert after < before
