"""The README's code runs as it is printed, and its commands exist."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


class Loss(nn.Module):
    """A model that returns a loss, as the README's does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


def train(*blocks: str, data: list) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    names = {"torch": torch, "model": Loss(), "data": data}
    before = [parameter.detach().clone() for parameter in names["model"].parameters()]
    for block in blocks:
        exec(block, names)
    return names["model"], before


@pytest.mark.parametrize("which", [0, 1], ids=["distributed optimizer", "stock optimizer"])
def test_the_loops_train(which: int) -> None:
    batches = torch.randn(3, 4, 5, 8)
    data = list(batches) if which == 0 else list(batches[0])
    imports = BLOCKS[0].partition("\n\n")[0]
    model, before = train(imports, BLOCKS[which], data=data)
    assert all(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    fused = sum(record.num_fused_writes for record in model.records)
    assert fused == (2 * 12 if which == 0 else 0)


def test_there_are_two_loops() -> None:
    assert len(BLOCKS) == 2


def test_commands_and_links_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+) ", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for document in documents:
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_architecture_names_every_file_of_the_library() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    for room in ("kernels", "ddp", "te_integration", "launch"):
        for path in (ROOT / room).glob("*.py"):
            if path.name not in ("__init__.py", "__main__.py"):
                assert f"`{path.name}`" in text, f"{room}/{path.name}"
