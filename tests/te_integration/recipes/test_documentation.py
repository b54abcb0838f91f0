"""The code of both pages of recipes runs, and tables of errors are measured."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from maingrad.kernels.quantized import dequantize, quantize
from maingrad.te_integration import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from maingrad.te_integration.recipes import Operand, Recipe

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "recipes.md").read_text() + (DOCS / "reference/recipes.md").read_text()
ROWS: dict[str, tuple[Recipe, ...]] = {
    "current": (Float8CurrentScaling(),),
    "block, MXFP8": (Float8BlockScaling(), MXFP8BlockScaling()),
    "NVFP4": (NVFP4BlockScaling(),),
}


def test_the_code_runs() -> None:
    of_training, of_own_recipe = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    for code, rows in ((of_training, 32), (of_own_recipe, 8)):
        names: dict[str, object] = {}
        exec(code, names)
        assert names["y"].shape == (rows, 64)  # type: ignore[attr-defined]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.sampled(3)
def test_errors(row: str) -> None:
    told = next(line for line in PAGE.splitlines() if line.startswith(f"| {row} | 0."))
    torch.manual_seed(0)
    x, w, dy = torch.randn(512, 512), torch.randn(512, 512), torch.randn(512, 512)
    for recipe in ROWS[row]:

        def of(tensor: Tensor, operand: Operand, *, columns: bool = False, recipe: Recipe = recipe) -> Tensor:
            matrix = tensor.t() if columns else tensor
            return dequantize(quantize(matrix, recipe.spec(operand, columns=columns)), torch.float64)

        products = (
            (of(x, "input") @ of(w, "weight").t(), x.double() @ w.double().t()),
            (of(dy, "grad") @ of(w, "weight", columns=True).t(), dy.double() @ w.double()),
            (of(dy, "grad", columns=True) @ of(x, "input", columns=True).t(), dy.double().t() @ x.double()),
        )
        found = [float((product - exact).norm() / exact.norm()) for product, exact in products]
        assert found == pytest.approx([float(each) for each in told.split("|")[2:5]], rel=0.03)
        how_to = re.findall(rf"^\| `{type(recipe).__name__}` \|.*\| (0\.\d+) \|$", PAGE, flags=re.MULTILINE)
        assert how_to == [told.split("|")[4].strip()], "the page to begin with has the error of dW"
