"""The code of docs/graphed_layers.md runs."""

import re
from pathlib import Path

import torch

PAGE = (Path(__file__).resolve().parents[3] / "docs/graphed_layers.md").read_text()


def test_the_code_of_the_page_runs():
    names = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(code, names)
    assert len(names["losses"]) == 2
    assert torch.isfinite(names["layer"].fc1_weight.main_grad).all()
