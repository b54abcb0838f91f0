"""Counts which values each dimension had, and what became of the programs."""

import re
from collections import Counter, defaultdict

from mesh_programs import Meshes
from pipeline_programs import Pipeline
from programs import Program, dimensions
from recipe_programs import Recipes
from run_programs import Run
from running import Outcome


class Tally:
    """Of one run."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.seeds: defaultdict[str, list[int]] = defaultdict(list)
        """By what was found."""
        self._programs: Counter[tuple[str, str]] = Counter()
        self._refused: Counter[tuple[str, str]] = Counter()
        self._times: Counter[tuple[str, str]] = Counter()

    def add(self, seed: int, program: Program | Pipeline | Run | Recipes | Meshes, outcome: Outcome) -> None:
        """One more program."""
        self.outcomes["found" if outcome.is_finding else outcome.kind] += 1
        if outcome.is_finding:
            self.seeds[outcome.kind].append(seed)
        values = dimensions(program)
        self._times.update(values)
        self._programs.update(set(values))
        if outcome.kind == "refused":
            self._refused.update(set(values))
            self.refusals[re.sub(r"\d+", "N", re.sub(r"'[^']*'", "'...'", outcome.message))] += 1

    @property
    def count(self) -> int:
        """Of programs."""
        return sum(self.outcomes.values())

    def table(self) -> str:
        """How often each dimension's values came; how many programs with them were refused, in percent."""
        lines = ["dimension: value, times it came (of programs that have it, percent refused)", ""]
        by_dimension: defaultdict[str, list[str]] = defaultdict(list)
        for (name, value), times in sorted(self._times.items(), key=lambda entry: (entry[0][0], -entry[1])):
            refused = 100 * self._refused[name, value] / self._programs[name, value]
            by_dimension[name].append(f"{value} {times}" + (f" ({refused:.0f}%)" if refused else ""))
        lines += [f"{name}: {'; '.join(values)}" for name, values in by_dimension.items()]
        lines += [
            "",
            f"{self.count} programs: " + ", ".join(f"{count} {kind}" for kind, count in self.outcomes.items()),
        ]
        lines += [f"  refused {count} times: {message}" for message, count in self.refusals.most_common()]
        lines += [f"  {kind}: seeds {', '.join(map(str, seeds[:20]))}" for kind, seeds in self.seeds.items()]
        return "\n".join(lines)
