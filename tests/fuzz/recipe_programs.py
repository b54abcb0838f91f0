"""A fourth family of programs: training under a recipe, with forwards and backwards that are no part of it.

There is no plain PyTorch beside it: the same program without these says what each output, scale and amax must be. As
for the other families: data; a seed makes one; ``valid_recipes`` keeps it within what docs/reference/recipes.md allows.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from programs import Phase

WRAPPERS = ("ddp", "zero1", "stock", "zero2", "zero3")
KINDS = ("delayed", "attribute", "uncompared")
"""``DelayedScaling``, and two ways to write a recipe of one's own."""
AMONG = ("nothing", "look", "kept", "input's gradient", "evaluation")
"""What may come between microbatches."""
BEFORE = (*AMONG, "frozen", "given up", "raises", "skipped", "overflow")
"""What may come between iterations."""


@dataclass(frozen=True)
class Trained:
    """An iteration, and what comes before it or among its microbatches."""

    heights: tuple[int, ...] = (1,)
    """One for each microbatch: of blocks of the weight, in a recipe of one's own."""
    before: str = "nothing"
    among: str = "nothing"
    by_scaler: bool = False


@dataclass(frozen=True)
class Recipes:
    """A wrapper, a recipe, and iterations."""

    wrapper: str = "ddp"
    kind: str = "delayed"
    ranks: int = 1
    iterations: tuple[Trained, ...] = (Trained(), Trained())
    garbage: str = "off"
    order: int = 0

    dtype = "float32"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """As other programs have them: so many ranks."""
        return (Phase(self.ranks, garbage=self.garbage),)


def valid_recipes(program: Recipes) -> Recipes:
    """The nearest one that users may write: without a step before it, a step that does not come is none that was
    skipped."""
    first, *later = program.iterations
    if first.before == "skipped":
        first = replace(first, before="given up")
    return replace(program, iterations=(first, *later))


def draw_recipes(seed: int) -> Recipes:
    """The program of a seed."""
    dice = random.Random(f"recipes {seed}")
    return valid_recipes(
        Recipes(
            wrapper=dice.choice(WRAPPERS),
            kind=dice.choice(("delayed", *KINDS)),
            ranks=dice.choice((1, 2, 2, 3)),
            iterations=tuple(
                Trained(
                    heights=tuple(dice.choice((1, 16)) for _ in range(dice.choice((1, 1, 2, 3)))),
                    before=dice.choice(BEFORE),
                    among=dice.choice(AMONG),
                    by_scaler=dice.random() < 0.3,
                )
                for _ in range(dice.choice((2, 3, 4)))
            ),
            garbage=dice.choice(("off", "off", "often")),
            order=dice.randrange(1000),
        )
    )


def simpler_recipes(program: Recipes) -> Iterator[Recipes]:
    """Fewer iterations first."""
    parts = program.iterations
    for index in range(len(parts) if len(parts) > 1 else 0):
        yield replace(program, iterations=parts[:index] + parts[index + 1 :])
    for changed in ({"garbage": "off"}, {"order": 0}, {"ranks": 1}, {"ranks": 2}, {"wrapper": "ddp"}):
        yield replace(program, **changed)  # type: ignore[arg-type]
    for index, part in enumerate(parts):
        fewer = [{"heights": part.heights[:-1]}] if len(part.heights) > 1 else []
        for changed in (*fewer, {"before": "nothing"}, {"among": "nothing"}, {"by_scaler": False}):
            simpler = replace(part, **changed)  # type: ignore[arg-type]
            yield replace(program, iterations=(*parts[:index], simpler, *parts[index + 1 :]))


def recipes_source(program: Recipes) -> str:
    """The functions ``train_0`` and ``plain``."""
    iterations = [(part.heights, part.before, part.among, part.by_scaler) for part in program.iterations]
    arguments = f"{program.wrapper!r}, {program.kind!r}, {iterations!r}"
    return "\n".join(
        [
            "def train_0(records, folder):",
            f"    records[dist.get_rank()].update(recipe_run({arguments}, True))",
            "",
            "",
            "def plain(everyones):",
            f"    whole = simulate(recipe_run, {program.ranks}, {arguments}, False)",
            "    for seen, wanted in zip(everyones[0], whole, strict=True):",
            "        seen.update(wanted)",
            "",
            "",
        ]
    )
