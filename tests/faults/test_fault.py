"""Changes find their snippet whatever stands around it, and say what is wrong with them."""

from pathlib import Path

import pytest
from fault import Change, Fault, FaultError, changed_sources, listed_numbers, load_faults

ROOT = Path(__file__).resolve().parents[2]
SOURCE = """\
class Sums:
    def add(self, x):
        if x:
            self.sum = max(
                x,
                self.sum + x,
            )
        for each in x:

            self.sum += each
        return x

    def take(self, x):
        return x
"""
ONCE = "take(self, x):\n"
MORE = "take(self, x):\n        for y in x:\n            x = y\n"


def changed(tmp_path: Path, *changes: tuple[str, str, str]) -> str:
    """``SOURCE`` with changes (function, old, new)."""
    (tmp_path / "sums.py").write_text(SOURCE)
    made = [Change("maingrad.sums", *change) for change in changes]
    return changed_sources(Fault("01-a-fault", "It is wrong.", ["a test"], made), tmp_path)["maingrad.sums"]


@pytest.mark.parametrize(
    ("function", "old", "new", "now", "then"),
    [
        ("Sums.add", "return x", "return 1", "return x\n\n", "return 1\n\n"),
        ("Sums.take", "x)", "x, y)", "take(self, x)", "take(self, x, y)"),
        ("Sums", "def take", "def give", "take", "give"),
        ("", "class Sums", "class Products", "class Sums", "class Products"),
        ("Sums.add", "if x:\n    self.sum = max(", "if x:\n    self.sum = min(", "max", "min"),
        ("Sums.add", "max(\n    x,\n    self.sum", "max(\n    1,\n    self.sum", "    x,", "    1,"),
        ("Sums.take", "return x", "for y in x:\n    x = y\nreturn x", ONCE, MORE),
        (
            "Sums.add",
            """
            for each in x:

                self.sum += each
            """,
            "",
            "        for each in x:\n\n            self.sum += each\n",
            "",
        ),
    ],
)  # fmt: skip
def test_what_is_changed(tmp_path: Path, function: str, old: str, new: str, now: str, then: str) -> None:
    assert SOURCE.count(now) == 1
    assert changed(tmp_path, (function, old, new)) == SOURCE.replace(now, then)


def test_changes_are_looked_for_in_the_source_as_it_is(tmp_path: Path) -> None:
    swapped = changed(tmp_path, ("", "def add", "def take"), ("", "def take", "def add"))
    assert swapped == SOURCE.replace("def add", "def X").replace("def take", "def add").replace("def X", "def take")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("Sums.add", "return y", "")], "'Sums.add' has the snippet 0 times"),
        ([("Sums", "return x", "")], "'Sums' has the snippet 2 times"),
        ([("Sums.add", "for each in x:\n  self", "")], "has the snippet 0 times"),
        ([("Sums.give", "return x", "")], "there is no 'Sums.give'"),
        ([("take", "return x", "")], "there is no 'take'"),
        ([("Sums.take", " ", "")], "no snippet to look for"),
        ([("Sums.take", "return", "give"), ("Sums.take", "return x", "")], "two changes of one place"),
        ([("Sums.take", "return x", "")], "expected an indented block"),
    ],
)
def test_a_change_that_is_wrong_is_named(tmp_path: Path, changes: list[tuple[str, str, str]], message: str) -> None:
    with pytest.raises(FaultError, match=r"^01-a-fault: maingrad\.sums: ") as raised:
        changed(tmp_path, *changes)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ("[Fault('1-a-fault', 'It is.', ['a test'], [1])]", "1-a-fault: a name is two digits"),
        ("[Fault('01', 'It is.', ['a test'], [1])]", "01: a name is two digits"),
        ("[Fault('01-a', '', ['a test'], [1])]", "01-a: no sentence"),
        ("[Fault('01-a', 'It is.', [], [1])]", "01-a: no tests"),
        ("[Fault('01-a', 'It is.', ['a test'], [])]", "01-a: no changes"),
        ("[Fault('01-a', 'It is.', 'a test', [1])]", "01-a: tests is a list"),
        ("2 * [Fault('01-a', 'It is.', ['a test'], [1])]", "01-a: two faults have this name"),
    ],
)
def test_a_fault_that_is_wrong_is_named(tmp_path: Path, faults: str, message: str) -> None:
    (tmp_path / "some.py").write_text(f"from fault import Fault\n\nFAULTS = {faults}\n")
    with pytest.raises(FaultError, match=message):
        load_faults(tmp_path)


@pytest.mark.in_turn
def test_known_faults_are_found_in_the_library() -> None:
    for fault in load_faults():
        changed_sources(fault, ROOT)


def test_the_page_lists_the_numbers_of_the_faults() -> None:
    assert {fault.number for fault in load_faults()} == listed_numbers(ROOT / "docs/main_grad.md")
