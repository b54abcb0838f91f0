"""The code of docs/cuda_graphs.md about whole steps runs."""

import re
from pathlib import Path

import torch

PAGE = (Path(__file__).resolve().parents[3] / "docs/cuda_graphs.md").read_text()


def test_the_code_of_the_page_runs() -> None:
    loop, first, sharded = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(loop, names)
    names = {}
    exec(first, names)
    kept = torch.stack(names["kept"])  # type: ignore[arg-type]
    assert kept.shape == (6, 2)
    assert len(set(kept.flatten().tolist())) == 12
    assert names["step"].num_graphs == 1  # type: ignore[attr-defined]
    names = {}
    exec(sharded, names)
    assert names["step"].num_graphs == 1  # type: ignore[attr-defined]
