"""The code of docs/cuda_graphs.md runs."""

import re
from pathlib import Path

import torch

PAGE = (Path(__file__).resolve().parents[3] / "docs/cuda_graphs.md").read_text()
SECTION = PAGE.split("## A layer at a time")[1].split("\n## ")[0]


def test_the_code_of_the_section_about_layers_runs():
    names = {}
    for code in re.findall(r"```python\n(.*?)```", SECTION, flags=re.DOTALL):
        exec(code, names)
    assert len(names["losses"]) == 2
    assert torch.isfinite(names["layer"].fc1_weight.main_grad).all()
