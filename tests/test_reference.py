"""docs/reference/environment.md is complete, and the API pages cover what is public."""

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from maingrad.ddp import DistributedDataParallelConfig, DistributedOptimizer
from maingrad.fsdp import fully_shard

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kernels", "ddp", "te_integration", "fsdp", "launch")
PAGE = (ROOT / "docs/reference/environment.md").read_text()
READ, NAMED = (PAGE.partition(f"## Variables {which}")[2].partition("\n## ")[0] for which in ("that", "of others"))
ELSEWHERE = r"(?:CUDA|HF|MASTER|NCCL|OMP|PIP|PYTHON|PYTORCH|SLURM|TORCH|TORCHINDUCTOR|TRITON|LOCAL|WORLD)"
NO_VARIABLES = {"WORLD_OF_ONE", "CUDA_GRAPH", "NCCL_CTA_POLICY_ZERO"}


def variables(table: str) -> set[str]:
    """Names in the first column."""
    rows = re.findall(r"^\| (`[^|]+) \|", table, flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def reads(path: Path, text: str) -> Iterator[str]:
    """Variables that a file takes from the environment; what is not a literal name is an error."""
    for node in ast.walk(ast.parse(text)):
        name: ast.expr | None = None
        match node:
            case ast.Call(func=ast.Attribute(attr="getenv"), args=[name, *_]):
                pass
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ")), args=[name, *_]):
                pass
            case ast.Subscript(value=ast.Attribute(attr="environ"), slice=name):
                pass
            case ast.Compare(left=name, comparators=[ast.Attribute(attr="environ")]):
                pass
        if name is not None:
            assert isinstance(name, ast.Constant), f"{path}, line {name.lineno}: give the variable's name as it is"
            yield str(name.value)


def read_by_the_code() -> set[str]:
    paths = [path for room in (*ROOMS, "docs/benchmarks") for path in (ROOT / room).rglob("*.py")]
    return {name for path in paths for name in reads(path, path.read_text())}


@pytest.mark.in_turn
def test_each_variable_that_the_code_reads_is_in_the_table() -> None:
    found = read_by_the_code()
    assert {"WORLD_SIZE", "RANK", "CUDA_DEVICE_MAX_CONNECTIONS"} <= found
    assert found == variables(READ)


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['NEW']",
        "os.environ.get('NEW', '')",
        "os.getenv('NEW')",
        "'NEW' in os.environ",
        "environ_pop = os.environ.pop('NEW')",
    ],
)
def test_a_new_variable_would_be_noticed(line: str) -> None:
    assert list(reads(Path("new.py"), line)) == ["NEW"]


def test_each_variable_that_the_documentation_names_is_in_a_table() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs/examples/train.sbatch"]
    folders = [ROOT / folder for folder in ("docs", "docs/benchmarks", "docs/reference")]
    texts = [path.read_text() for path in (*pages, *(page for folder in folders for page in folder.glob("*.md")))]
    found = {name for text in texts for name in re.findall(rf"\b{ELSEWHERE}_[A-Z_]*[A-Z]\b", text)} - NO_VARIABLES
    assert "NCCL_SOCKET_IFNAME" in found
    assert found <= variables(READ) | variables(NAMED)


def test_versions_are_those_of_the_package() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    for name in ("torch", "triton", "einops", "transformers"):
        (version,) = set(re.findall(rf'"{name}>=([\d.]+)', settings))
        assert re.search(rf"^\| {name} \| {re.escape(version)} or newer", PAGE, flags=re.MULTILINE | re.IGNORECASE), (
            name
        )


@pytest.mark.parametrize("room", ROOMS)
def test_each_folder_has_an_api_page(room: str) -> None:
    assert f"\n::: maingrad.{room}\n" in (ROOT / f"docs/reference/{room}.md").read_text()


def options_of(page: str, table: str) -> set[str]:
    """Names in the first column of the table whose head names ``table``."""
    text = (ROOT / "docs" / page).read_text()
    rows = text.partition(f"| option of `{table}` |")[2].partition("\n\n")[0]
    return {name for row in rows.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}


def test_tables_of_options_are_complete() -> None:
    config = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    assert options_of("reference/optimizer_sharding.md", "DistributedDataParallelConfig") == config
    sharded = set(inspect.signature(fully_shard).parameters) - {"module"}
    assert options_of("reference/full_sharding.md", "fully_shard") == sharded
    optimizer = set(inspect.signature(DistributedOptimizer).parameters) - {"model", "options"}
    assert optimizer <= options_of("reference/optimizer_sharding.md", "DistributedOptimizer")


def test_the_first_part_of_the_benchmarks_has_numbers_of_their_tables() -> None:
    folder = ROOT / "docs/benchmarks"
    first = (folder / "README.md").read_text().partition("\n## ")[0]
    rows = [line for line in first.splitlines() if line.startswith("| ") and ".md)" in line]  # not those with an anchor
    assert len(rows) >= 12
    for row in rows:
        table = (folder / re.findall(r"\((\w+\.md)\)", row)[0]).read_text()
        *cells, _ = row.strip("| ").split(" | ")
        numbers = re.findall(r"\b\d+\.\d+\b(?! B)|\b\d{4}\b", " ".join(cells[1:]))
        assert numbers
        for number in numbers:
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", table), f"{number} of: {row}"
