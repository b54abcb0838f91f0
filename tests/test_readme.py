"""Code in the README and in docs runs as it is printed, and its commands exist."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from maingrad.launch import simulate

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
FSDP = re.findall(r"```python\n(.*?)```", (ROOT / "docs/fsdp.md").read_text(), flags=re.DOTALL)
COMPILE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/compile.md").read_text(), flags=re.DOTALL)
SHARDING = re.findall(r"```python\n(.*?)```", (ROOT / "docs/sharding.md").read_text(), flags=re.DOTALL)


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
    assert fused == 2 * (12 if which == 0 else 4)


def test_blocks_compile_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's lines, with a backend that needs no C++ compiler."""
    compile = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: compile(module, backend="aot_eager", **options))
    names: dict[str, Any] = {}
    torch.compiler.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    exec(COMPILE[0], names)
    writes = [record.num_fused_writes for record in names["model"].records if record.name.endswith("weight")]
    assert writes == [2, 2, 2], "one in each iteration"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 2
    torch.compiler.reset()


def test_there_are_three_loops() -> None:
    assert len(BLOCKS) == 3


class NamedLoss(nn.Module):
    """A model that returns a loss, with the names that docs/sharding.md speaks of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x)).relu()).square().mean()


def run_alone(block: str) -> dict[str, Any]:
    """One rank's job: the block with a model and two steps of three microbatches."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch, "model": NamedLoss(), "data": list(torch.randn(2, 3, 5, 8))}
    before = [parameter.detach().clone() for parameter in names["model"].parameters()]
    exec(block, names)
    names["changed"] = [
        not torch.equal(old.to(new.dtype), new)
        for old, new in zip(before, names["model"].parameters(), strict=False)
        if old.shape == new.shape
    ]
    return names


@pytest.mark.parametrize("number", range(len(SHARDING)))
@pytest.mark.sampled(3)
def test_sharding_on_four_ranks(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Each block by itself, on the four ranks that its worked example speaks of."""
    names = simulate(run_alone, 4, SHARDING[number])
    if "for microbatches in data" in SHARDING[number]:
        assert all(all(rank["changed"]) and len(rank["changed"]) == 6 for rank in names)
    if "FloatingPointError" in SHARDING[number]:
        promised = re.findall(r"print\(error\)  # (.*?) \.\.\.", SHARDING[number])
        said = capsys.readouterr().out
        assert said.startswith(promised[0])
        assert said.count("on rank 0") == 4, "every rank says so"


class BlocksLoss(NamedLoss):
    """The same with blocks in between, for docs/fsdp.md."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden).relu()
        return self.head(self.norm(hidden)).square().mean()


def run_sharded(block: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One rank's job; weights before and after."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"torch": torch, "model": BlocksLoss(), "data": list(torch.randn(2, 3, 5, 8))}
    before = [parameter.detach().clone() for parameter in names["model"].parameters()]
    exec(block, names)
    return before, [value.full_tensor() for value in names["model"].state_dict().values()]


@pytest.mark.parametrize("number", range(len(FSDP)))
@pytest.mark.sampled(1)
def test_fsdp_on_four_ranks(number: int) -> None:
    for before, after in simulate(run_sharded, 4, FSDP[number]):
        if "for microbatches in data" in FSDP[number]:
            assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_the_readme_shards_fully() -> None:
    for before, after in simulate(run_sharded, 2, BLOCKS[2]):
        assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_fsdp_has_its_blocks() -> None:
    assert len(FSDP) == 4
    assert sum("peak_nbytes" in block for block in FSDP) == 1


def test_sharding_has_its_blocks() -> None:
    assert len(SHARDING) == 7
    assert sum("assert sum(held.values())" in block for block in SHARDING) == 1


def test_commands_and_links_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+) ", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    for document in documents:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_names_in_docs_exist() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for module, name in re.findall(r"`(maingrad\.\w+)\.(\w+)", document.read_text()):
            try:
                importlib.import_module(f"{module}.{name}")
            except ModuleNotFoundError:
                assert hasattr(importlib.import_module(module), name), f"{document.name}: {module}.{name}"


def test_architecture_names_every_room_of_the_library() -> None:
    """Each folder's own files and sub-packages are in its table, and every file that the text names exists."""
    text = (ROOT / "docs/architecture.md").read_text()
    for folder in ("kernels", "ddp", "fsdp", "te_integration", "launch"):
        table = text.partition(f"\n`{folder}/`\n")[2].partition("\n`")[0].partition("\n## ")[0]
        rooms = [f"{path.parent.name}/" for path in (ROOT / folder).glob("*/__init__.py")]
        files = [path.name for path in (ROOT / folder).glob("*.py") if not path.name.startswith("__")]
        for room in (*rooms, *files):
            assert f"`{room}`" in table, f"{folder}/{room}"
    for path in re.findall(r"`((?:kernels|ddp|fsdp|te_integration|launch)/[\w/]+\.py)`", text):
        assert (ROOT / path).exists(), path
