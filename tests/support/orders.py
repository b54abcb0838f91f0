"""Orders of pipeline schedules for tests: random valid ones, and the rules once more, by brute force."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

# One rank's order of a real interleaved schedule: 3 chunks, 8 microbatches, each wgrad before the next backward.
INTERLEAVED_3_CHUNKS_8_MICROBATCHES = [
    *(1, 1, 1, 1, 2, 3),
    *(2, -3, -3.5, 3, -2, -2.5, 2, -3, -3.5, 3, -2, -2.5, 2, -3, -3.5, 3, -2, -2.5),
    *(1, -3, -3.5, -2, -2.5, 1, -1, -1.5, 1, -1, -1.5, 1, -1, -1.5, 2, -1, 3, -1.5),
    *(2, -3, -3.5, 3, -2, -2.5, 2, -3, -3.5, 3, -2, -2.5, 2, -3, -3.5, 3, -2, -2.5),
    *(-3, -3.5, -2, -2.5, -1, -1.5, -1, -1.5, -1, -1.5, -1, -1.5),
]


@dataclass(frozen=True)
class Rules:
    """What a random order must satisfy beyond the rules that hold for all."""

    num_chunks: int
    num_microbatches: int
    delayed: frozenset[int]  # chunks whose wgrads are written down
    connected: bool = False  # forwards and dgrads also wait for the neighbouring chunk


def draw_order(rules: Rules, rng: random.Random) -> list[float]:
    """A random topological order: repeatedly one of the entries whose causes are all there."""
    done = {(kind, chunk): 0 for kind in "FDW" for chunk in range(rules.num_chunks + 2)}
    order: list[float] = []

    def ready(kind: str, chunk: int) -> bool:
        microbatch = done[kind, chunk]
        if kind == "W" and chunk not in rules.delayed:
            return False
        if microbatch == rules.num_microbatches:
            return False
        if kind == "F":
            return not rules.connected or chunk == 1 or done["F", chunk - 1] > microbatch
        if kind == "D":
            behind = not rules.connected or chunk == rules.num_chunks or done["D", chunk + 1] > microbatch
            return behind and done["F", chunk] > microbatch
        return done["D", chunk] > microbatch

    while True:
        choices = [(kind, chunk) for kind in "FDW" for chunk in range(1, rules.num_chunks + 1) if ready(kind, chunk)]
        if not choices:
            return order
        kind, chunk = rng.choice(choices)
        done[kind, chunk] += 1
        order.append({"F": chunk, "D": -chunk, "W": -chunk - 0.5}[kind])


@st.composite
def rules(draw: st.DrawFn, *, max_chunks: int = 4, max_microbatches: int = 6, connected: bool = False) -> Rules:
    num_chunks = draw(st.integers(1, max_chunks))
    delayed = draw(st.frozensets(st.integers(1, num_chunks)))
    return Rules(num_chunks, draw(st.integers(1, max_microbatches)), delayed, connected)


def fault(order: Sequence[object], num_chunks: int) -> int | None:
    """Index of the entry at fault, None for a valid order: the rules by slicing and counting, without state."""
    meaningful = {number for chunk in range(1, 100) for number in (chunk, -chunk, -chunk - 0.5)}
    for index, number in enumerate(order):
        if isinstance(number, bool) or number not in meaningful:
            return index
    order = list(order)
    delayed = {chunk for chunk in range(1, num_chunks + 1) if -chunk - 0.5 in order}
    for index, number in enumerate(order):
        if abs(number) >= num_chunks + 1:
            return index
        before = order[:index]
        if number < 0:
            cause = -number if number == int(number) else number + 0.5
            if before.count(cause) <= before.count(number):
                return index
    for index, number in enumerate(order):
        microbatch = order[:index].count(number)
        if number > 0 and any(order.count(chunk) <= microbatch for chunk in range(1, num_chunks + 1)):
            return index
        if number > 0 and order.count(-number) <= microbatch:
            return index
        if -number in delayed and order.count(number - 0.5) <= microbatch:
            return index
    return None


def finished(prefix: Sequence[float], num_chunks: int, delayed: frozenset[int]) -> list[float]:
    """The prefix, and what a whole order lacks: the wgrad of the last dgrad, forwards, backwards in pairs."""
    order = list(prefix)
    backwards = [number for number in order if number < 0]
    if backwards and -backwards[-1] in delayed:
        order.append(backwards[-1] - 0.5)
    chunks = range(1, num_chunks + 1)
    microbatches = max(1, *(order.count(number) for chunk in chunks for number in (chunk, -chunk, -chunk - 0.5)))
    for chunk in chunks:
        order += [chunk] * (microbatches - order.count(chunk))
        if chunk in delayed:
            order += [-chunk - 0.5] * (order.count(-chunk) - order.count(-chunk - 0.5))
        pair = [-chunk, -chunk - 0.5] if chunk in delayed else [-chunk]
        order += pair * (microbatches - order.count(-chunk))
    return order


def single_entry_changes(
    order: Sequence[float], replacements: Sequence[object], rng: random.Random, each: int
) -> list[list]:
    """All drops; ``each`` random copies to any place, swaps of two and replacements (all where there are fewer)."""
    size = len(order)
    drops = [[*order[:i], *order[i + 1 :]] for i in range(size)]
    copies = [(i, j) for i in range(size) for j in range(size + 1)]
    swaps = [(i, j) for i in range(size) for j in range(i) if order[i] != order[j]]
    others = [(i, new) for i in range(size) for new in replacements]
    changes = list(drops)
    changes += [[*order[:j], order[i], *order[j:]] for i, j in _some(copies, rng, each)]
    for i, j in _some(swaps, rng, each):
        swapped = list(order)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        changes.append(swapped)
    changes += [[*order[:i], new, *order[i + 1 :]] for i, new in _some(others, rng, each)]
    return changes


def _some(choices: list, rng: random.Random, most: int) -> list:
    return choices if len(choices) <= most else rng.sample(choices, most)
