"""A torch that lacks a private name: every package is imported, and what needs it is right or refused by name."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "absent_names.py"
PROGRAMS = ["ddp", "zero1", "sharded"]

NEEDED_BY_TORCH = (
    "torch._C._are_functorch_transforms_active",
    "torch._C._DisableTorchDispatch",
    "torch.Tensor._make_subclass",
    "torch._dynamo.",
    "torch._foreach_norm",
)
"""torch's own Python code calls them in what the programs do."""


LATE = (
    "torch._dynamo.",
    "torch.distributed._symmetric_memory",
    "torch.distributed.pipelining.",
    "torch.distributed.tensor.parallel.",
)
"""Names that are fetched when somebody needs them: their import takes long."""


IN_TWO_FOLDERS = ("torch.distributed.distributed_c10d._world",)
"""What ddp loses without it is another thing than what launch loses."""


class OtherTorch:
    """Asks ``absent_names.py``."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.plain = self.without([])
        self.names: dict[str, bool] = self.plain["names"]
        assert all(isinstance(weights, list) for weights in self.plain["programs"].values()), self.plain

    def without(self, names: Sequence[str], programs: Sequence[str] = PROGRAMS) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([list(names), list(programs)]) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        assert found["import"] is None, f"importing maingrad without {names}:\n{found['import']}"
        return found


@pytest.fixture(scope="module")
def torch() -> Iterator[OtherTorch]:
    with subprocess.Popen(
        [sys.executable, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield OtherTorch(process)


def test_without_any_private_name_every_package_is_imported_with_one_warning_for_each(torch: OtherTorch) -> None:
    found = torch.without(list(torch.names), programs=[])
    said = {name: sum(f"has no {name}:" in each for each in found["warnings"]) for name in torch.names}
    late = {name for name in said if name.startswith(LATE)}
    wanted = {name: 0 if name in late else 2 if name in IN_TWO_FOLDERS else 1 for name in said}
    assert said == wanted
    assert torch.plain["warnings"] == []


@pytest.mark.in_turn
def test_without_all_names_that_something_can_replace_training_gives_the_same_weights(torch: OtherTorch) -> None:
    names = [name for name, is_replaced in torch.names.items() if is_replaced and not name.startswith(NEEDED_BY_TORCH)]
    assert len(names) > 15
    assert torch.without(names)["programs"] == torch.plain["programs"]


@pytest.mark.in_turn
def test_without_operators_that_have_effects_a_compiled_layer_breaks_the_graph_and_warns_at_import(
    torch: OtherTorch,
) -> None:
    found = torch.without(["torch._higher_order_ops.effects._EffectType"], ["compiled"])
    assert found["programs"] == {"compiled": 0.0}
    assert sum("each fused layer under torch.compile is a graph break" in each for each in found["warnings"]) == 1


def test_a_wrapper_says_which_name_it_cannot_do_without(torch: OtherTorch) -> None:
    found = torch.without(["torch.autograd.Variable._execution_engine.queue_callback"])
    for program, error in found["programs"].items():
        assert isinstance(error, str), f"{program} has trained"
        assert re.search("RuntimeError: torch .* has no .*queue_callback: maingrad's wrappers", error), program


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_any_one_name_training_gives_the_same_weights_or_is_refused_by_name(torch: OtherTorch) -> None:
    wrong = {}
    for name in torch.names:
        found = torch.without([name])
        if name.startswith(NEEDED_BY_TORCH):
            continue
        for program, got in found["programs"].items():
            if got != torch.plain["programs"][program] and f"has no {name}:" not in got:
                wrong[name, program] = got
    assert not wrong, "\n".join(f"{name}, {program}: {got}" for (name, program), got in wrong.items())
