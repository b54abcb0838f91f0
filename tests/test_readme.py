"""Code in the README and in docs runs as it is printed, and its commands exist."""

import importlib
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import data_parallel
import models
import pytest
import torch
import tyro
from torch import nn

from maingrad.launch import simulate

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/reference").glob("*.md")])


def blocks_of(*pages: str) -> list[str]:
    """The Python programs of pages, in their order."""
    return [
        block
        for page in pages
        for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    ]


BLOCKS = blocks_of("README.md")
FSDP = blocks_of("docs/fsdp.md", "docs/reference/full_sharding.md")
COMPILE = blocks_of("docs/compile.md")
SHARDING = blocks_of("docs/sharding.md", "docs/reference/optimizer_sharding.md")
CHECKPOINTING = blocks_of("docs/gradient_checkpointing.md")

(DIFF,) = re.findall(r"```diff\n(.*?)```", README, flags=re.DOTALL)
WITH_TORCH, WITH_MAINGRAD = (
    "".join(line[1:] + "\n" for line in DIFF.splitlines() if line[0] in kept) for kept in (" -", " +")
)
LOOP, LOOP_OF_TORCH = (code[code.index("def train_step") :] for code in (WITH_MAINGRAD, WITH_TORCH))
IMPORTS = """
import maingrad
import torch
"""


class Loss(nn.Module):
    """A model that returns a loss, as the README's does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


class Alone(nn.Module):
    """torch's wrapper in a process without a group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.no_sync, self.forward = nullcontext, module.forward


def train(code: str) -> tuple[list[torch.Tensor], nn.Module]:
    """Weights before, and the model after three steps of four microbatches, which are the same on all ranks."""
    torch.manual_seed(0)
    model = Loss()
    names: dict[str, Any] = {"model": model, "data": list(torch.randn(3, 4, 5, 8))}
    before = [param.detach().clone() for param in model.parameters()]
    exec(IMPORTS + code, names)
    return before, names["model"]


def train_on_a_rank() -> tuple[list[torch.Tensor], int]:
    _, model = train(WITH_MAINGRAD)
    return [param.detach().clone() for param in model.parameters()], sum(
        record.num_fused_writes for record in model.records
    )


def test_both_sides_of_the_diff_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", Alone)
    before, model = train(WITH_TORCH)
    weights = list(model.parameters())
    assert all(not torch.equal(old, new) for old, new in zip(before, weights, strict=True))
    for got, fused in simulate(train_on_a_rank, 2):
        torch.testing.assert_close(got, weights, rtol=1e-5, atol=1e-6)
        assert fused == 3 * 4 * 2, "each microbatch, two layers"


def test_there_is_one_loop() -> None:
    assert len(BLOCKS) == 1
    assert DIFF.count(" for batch in data") == 1
    assert not any("backward()" in block for block in BLOCKS)
    assert sum(line[0] in "+-" for line in DIFF.splitlines()) == 6


def rows_of_numbers() -> list[str]:
    table = README.partition("## Numbers")[2].partition("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("| ") and "docs/benchmarks/" in line]


def test_the_table_has_numbers_of_the_benchmarks() -> None:
    """Each number, the GPU, the version and a date stand on the page that its row links to."""
    rows = rows_of_numbers()
    assert len(rows) >= 10
    assert sum("**Slower**" in row or "**Larger**" in row for row in rows) >= 3
    for row in rows:
        page = (ROOT / re.findall(r"\((docs/benchmarks/\w+\.md)\)", row)[0]).read_text()
        numbers = re.findall(r"\b\d+\.\d+\b|\b\d{4}\b", " ".join(row.strip("| ").split(" | ")[1:3]))
        assert len(numbers) >= 2, row
        for number in numbers:
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", page), f"{number} of: {row}"
        assert "NVIDIA H200" in page
        assert "torch 2.11" in page
        assert re.search(r"2026-11-2[1236]", page)


def test_the_commands_of_the_table_are_commands() -> None:
    commands = {row.rpartition(" | ")[2].strip("`| ") for row in rows_of_numbers()} - {"the same"}
    for script, *arguments in map(str.split, commands):
        module = importlib.import_module(script.removesuffix(".py"))
        bench = tyro.cli(module.main.args[0], args=arguments)
        if script in ("models.py", "data_parallel.py"):
            assert models.choose(bench) if script == "models.py" else data_parallel.choose_rows(bench)


def test_gradient_checkpointing_trains() -> None:
    (block,) = CHECKPOINTING
    names: dict[str, Any] = {}
    exec(block, names)
    assert sum(record.num_fused_writes for record in names["model"].records) == 3 * 4 * 2, "steps, blocks, layers"


@pytest.mark.in_turn
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


@pytest.mark.in_turn
@pytest.mark.parametrize("number", range(len(FSDP)))
@pytest.mark.sampled(1)
def test_fsdp_on_four_ranks(number: int) -> None:
    for before, after in simulate(run_sharded, 4, FSDP[number]):
        if "for microbatches in data" in FSDP[number]:
            assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_the_readme_shards_fully() -> None:
    for before, after in simulate(run_sharded, 2, f"{IMPORTS}{BLOCKS[0]}\n{LOOP}"):
        assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def weights_after(code: str, loop: str = LOOP) -> list[torch.Tensor]:
    """Whole weights of a model with blocks after two steps, whose data are the same on all ranks."""
    torch.manual_seed(0)
    names: dict[str, Any] = {"model": BlocksLoss(), "data": list(torch.randn(2, 3, 5, 8))}
    exec(f"{IMPORTS}{code}\n{loop}", names)
    values = names["model"].state_dict().values()
    return [value.full_tensor() if hasattr(value, "full_tensor") else value.clone() for value in values]


@pytest.mark.parametrize("form", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("dtype", "atol"), [("", 1e-6), (", param_dtype=torch.bfloat16", 5e-3)], ids=["fp32", "bf16"])
def test_one_call_for_every_form(form: str, dtype: str, atol: float) -> None:
    """The README's two lines and its loop, beside plain PyTorch in the same loop."""
    plain = """
from contextlib import nullcontext
model.no_sync = nullcontext
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
"""
    code = WITH_MAINGRAD.removesuffix(LOOP).replace('"zero1"', f'"{form}"{dtype}')
    assert f'(model, "{form}"{dtype})' in code
    expected = weights_after(plain, LOOP_OF_TORCH)
    for got in simulate(weights_after, 2, code):
        torch.testing.assert_close([each.float() for each in got], expected, rtol=0, atol=atol)


def test_fsdp_has_its_blocks() -> None:
    assert len(FSDP) == 6
    assert sum("peak_nbytes" in block for block in FSDP) == 1


def test_sharding_has_its_blocks() -> None:
    assert len(SHARDING) == 8
    assert sum("assert sum(held.values())" in block for block in SHARDING) == 1


def test_commands_and_links_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+) ", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for document in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", text):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\((docs/\w+\.md)[)#]", README))
    assert linked == {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize(
    ("wanted", "page", "answer"),
    [
        ("accumulation", "docs/programs.md", "## Gradient accumulation"),
        ("clipping", "docs/programs.md", "## Clipping"),
        ("parameter groups", "docs/programs.md", "## Parameter groups"),
        ("FSDP2", "docs/switching.md", "## From FSDP2"),
        ("ZeRO-3", "docs/fsdp.md", "fully_shard(model"),
        ("resume", "docs/checkpoints.md", "load_checkpoint("),
        ("less memory", "docs/gradient_checkpointing.md", "# Gradient checkpointing"),
        ("bf16", "docs/programs.md", "## Mixed precision"),
        ("Hugging Face", "docs/hugging_face.md", "trainer.train()"),
        ("several nodes", "docs/multi_node.md", "docs/examples/train.sbatch"),
    ],
)
@pytest.mark.sampled(10)
def test_a_new_user_finds(wanted: str, page: str, answer: str) -> None:
    """Each row of the table of how-tos leads to a page that has the answer."""
    table = README.partition("## How to")[2]
    (row,) = (line for line in table.splitlines() if line.startswith("| ") and wanted in line.split(" | ")[0])
    assert f"({page}" in row
    assert answer in (ROOT / page).read_text()


def test_names_in_docs_exist() -> None:
    for document in PAGES:
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
