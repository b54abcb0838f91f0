"""``maingrad verify``: what it prints and its exit status; and the page that describes it."""

import re
from pathlib import Path

import pytest

from maingrad.launch.cli import main
from maingrad.launch.verification.findings import NOTES, Cause
from maingrad.launch.verification.ways import WAYS

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "verify.md").read_text() + (DOCS / "reference/verify.md").read_text()

PROGRAM = """
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from sizes import DIM

@dataclass
class Found:  # whose annotations are looked up in the module
    value: int

def right():
    torch.manual_seed(0)
    return nn.Linear(DIM, 2), torch.randn(8, DIM), lambda output, batch: output.square().mean()

def summed():
    model, batch, loss = right()
    return {"model": model, "batch": batch, "loss": lambda output, batch: output.square().sum(), "ranks": 4}

def misspelt():
    model, batch, loss = right()
    return {"model": model, "batch": batch, "loss": loss, "rank": 4}

def nothing():
    return 3

def four():
    return (*right(), 4)

def odd():
    model, batch, loss = right()
    return model, batch[:7], loss

def without_a_loss():
    return right()[:2]

def dividing():
    model, batch, loss = right()
    return model, batch, lambda output, batch: output.sum() * (1 / 0)

def failing():
    raise KeyError("of the program")

def refusing():
    raise ValueError("of the program")
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "sizes.py").write_text("DIM = 6\n")
    (tmp_path / "a_program.py").write_text(PROGRAM)
    (tmp_path / "a_program.py.txt").write_text(PROGRAM)
    return str(tmp_path / "a_program.py")


def test_status_0(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{program}:right", "--ways", "ddp", "zero1", "--num-microbatches", "1"]) == 0
    said = capsys.readouterr().out
    assert "2 trainable parameters, 14 elements; 8 rows on 2 ranks, 1 microbatches each" in said
    assert [word for word in ("ddp", "zero1", "fsdp") if re.search(rf"^{word} ", said, re.MULTILINE)] == [
        "ddp",
        "zero1",
    ]
    assert said.rstrip().endswith("verified")


@pytest.mark.in_turn
def test_status_1(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{program}:summed", "--ways", "ddp"]) == 1
    said = capsys.readouterr().out
    assert "8 rows on 4 ranks" in said and "error: sum" in said and "weight" in said
    assert main(["verify", f"{program}:summed", "--ways", "ddp", "--ranks", "1", "--accept", "sum"]) == 0
    said = capsys.readouterr().out
    assert "8 rows on 1 ranks" in said and "accepted: sum" in said


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("{}:missing", (), "has no function missing"),
        ("{}", (), "is not FILE.py:FUNCTION"),
        ("{}x:right", (), "is not FILE.py:FUNCTION"),
        ("{}:nothing", (), "returned a int: return (model, batch)"),
        ("{}:four", (), "returned a tuple: return (model, batch)"),
        ("{}:DIM", (), "has no function DIM"),
        ("{}.txt:right", (), "is no Python file"),
        ("{}:misspelt", (), "unexpected keyword argument 'rank'"),
        ("{}:odd", (), "a batch of 7 rows cannot be divided over 2 ranks"),
        ("{}:without_a_loss", (), "pass loss(output, batch) or step(model, batch)"),
        ("{}:right", ("--ways", "zero"), "'zero' is no way"),
        ("{}:right", ("--accept", "dropout"), "'dropout' is no cause"),
    ],
)
def test_status_2(
    program: str, target: str, options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", target.format(program), *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("function", "error"), [("failing", KeyError), ("refusing", ValueError)])
def test_the_programs_own_error_has_its_traceback(program: str, function: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="of the program"):
        main(["verify", f"{program}:{function}"])


def test_an_error_of_the_program_shows_its_frame_first(program: str) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        main(["verify", f"{program}:dividing"])
    files = [Path(entry.path).name for entry in raised.traceback]
    assert files[-1] == "a_program.py"
    assert files[-2] == "verify.py", "nothing between the call and the program"


@pytest.mark.in_turn
def test_the_pages_program_finds_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(block, {})
    said = " ".join(capsys.readouterr().out.split())
    (shown,) = re.findall(r"```\n(6 trainable.*?)```", PAGE, flags=re.DOTALL)
    findings = " ".join(shown.partition("error: ")[2].split())
    assert findings in said
    assert " ".join(shown.partition("\nway")[0].split()) in said


def test_the_page_names_every_way_and_cause() -> None:
    assert all(f"`{name}`" in PAGE for name in WAYS)
    assert all(f"`{cause}`" in PAGE for cause in Cause)
    notes = PAGE.partition("Notes leave `ok` true")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", notes)) == {str(cause) for cause in NOTES}
