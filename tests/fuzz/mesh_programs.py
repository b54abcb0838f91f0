"""A fifth family of programs: models that tensor-parallel ranks hold together, on a mesh of data- and tensor-parallel
ranks, beside training of the whole model in plain PyTorch.

As for the other families: data; a seed makes one; ``valid_meshes`` keeps it within what docs/mesh.md allows.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from programs import Phase

MESHES = ((1, 2), (2, 2), (2, 1))
"""Data-parallel and tensor-parallel ranks."""
WRAPPERS = ("ddp", "zero1", "zero3")
CUTS = ("marks", "torch")
"""By hand, with Megatron-core's marks, or by ``parallelize_module``."""
CONVERTED = ("no", "before", "after")
"""``convert_linears``, before or after the cut."""


@dataclass(frozen=True)
class Meshes:
    """A cut, a wrapper, and iterations."""

    wrapper: str = "ddp"
    cut: str = "marks"
    mesh: tuple[int, int] = (1, 2)
    sequence: bool = False
    """Norms and sums are of parts of the sequence."""
    converted: str = "no"
    hidden: int = 8
    """Width that is cut; odd: unevenly."""
    clip: float | None = None
    adam: bool = False
    iterations: tuple[int, ...] = (1, 1)
    """Microbatches of each."""
    garbage: str = "off"
    order: int = 0

    dtype = "float32"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """As other programs have them: so many ranks."""
        return (Phase(self.mesh[0] * self.mesh[1], garbage=self.garbage),)


def valid_meshes(program: Meshes) -> Meshes:
    """The nearest one that users may write: marks say nothing of uneven cuts, and one rank has whole sequences."""
    program = replace(program, hidden=8 if program.cut == "marks" else program.hidden)
    return replace(program, sequence=program.sequence and program.mesh[1] > 1)


def draw_meshes(seed: int) -> Meshes:
    """The program of a seed."""
    dice = random.Random(f"meshes {seed}")
    return valid_meshes(
        Meshes(
            wrapper=dice.choice(WRAPPERS),
            cut=dice.choice(CUTS),
            mesh=dice.choice((*MESHES, (2, 2))),
            sequence=dice.random() < 0.5,
            converted=dice.choice(CONVERTED),
            hidden=dice.choice((7, 8)),
            clip=dice.choice((None, 0.3)),
            adam=dice.random() < 0.5,
            iterations=tuple(dice.choice((1, 1, 2, 3)) for _ in range(dice.choice((1, 2, 3)))),
            garbage=dice.choice(("off", "off", "often")),
            order=dice.randrange(1000),
        )
    )


def simpler_meshes(program: Meshes) -> Iterator[Meshes]:
    """Fewer iterations first."""
    parts = program.iterations
    for index, count in enumerate(parts):
        if len(parts) > 1:
            yield replace(program, iterations=parts[:index] + parts[index + 1 :])
        if count > 1:
            yield replace(program, iterations=(*parts[:index], count - 1, *parts[index + 1 :]))
    for field in fields(program):
        if field.name != "iterations" and getattr(program, field.name) != field.default:
            yield replace(program, **{field.name: field.default})


def meshes_source(program: Meshes) -> str:
    """The functions ``train_0`` and ``plain``."""
    training = f"{program.clip!r}, {program.adam!r}, {program.iterations!r}"
    given = f"{program.wrapper!r}, {program.cut!r}, {program.sequence!r}, {program.converted!r}"
    return "\n".join(
        [
            "def train_0(records, folder):",
            f"    found = mesh_run({program.mesh!r}, {program.hidden!r}, {training}, {given})",
            "    records[dist.get_rank()].update(found)",
            "",
            "",
            "def plain(everyones):",
            f"    whole = mesh_plain({program.mesh!r}, {program.hidden!r}, {training})",
            "    for seen, wanted in zip(everyones[0], whole, strict=True):",
            "        seen.update(wanted)",
            "",
            "",
        ]
    )
