"""Host time of a wrapper: of forward and backward under it, minus the same without it."""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from harness import host_seconds, synchronize
from torch import Tensor, nn


class Wrapped(NamedTuple):
    """A model under a wrapper or under none, and what an iteration calls."""

    model: nn.Module
    begin: Callable[[bool], Any]
    """Called before each microbatch; the argument says whether this microbatch is the last."""
    no_sync: Callable[[], AbstractContextManager[Any]]
    """What every microbatch but the last runs in."""
    step: Callable[[], Any]
    """Called at the end."""


def unwrapped(model: nn.Module) -> Wrapped:
    """The model alone. ``.grad`` is cleared before each microbatch, so that autograd assigns instead of adding."""
    return Wrapped(model, lambda _: model.zero_grad(), nullcontext, model.zero_grad)


def medians(one_round: Callable[[], dict[Any, float]], rounds: int) -> dict[Any, float]:
    """The medians of what ``one_round`` returns; one round more, the first, is a warm-up."""
    measured = [one_round() for _ in range(rounds + 1)][1:]
    return {key: statistics.median(each[key] for each in measured) for key in measured[0]}


def beyond_bare(
    contenders: dict[str, tuple[Wrapped, Wrapped]], x: Tensor, *, parts: int, calls: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Host microseconds of one of a model's ``parts`` in the wrapper, by contender; each round measures all of them.

    contenders  the model without and with the wrapper

    ``intermediate_`` is of a microbatch that is not the last, ``final_`` of the last one, ``bare_`` of a microbatch
    without the wrapper: each with ``forward_us`` and ``backward_us``.
    """

    def one_round() -> dict[Any, float]:
        found: dict[Any, float] = {}
        for name, pair in contenders.items():
            bare, wrapped = (_microbatch_us(each, x, parts, calls) for each in pair)
            found |= {(name, part): wrapped[part] - bare[part] for part in bare}
            found |= {(name, part.replace("final", "bare")): bare[part] for part in bare if "final" in part}
        return found

    measured = medians(one_round, rounds)
    return {name: {part: us for (of, part), us in measured.items() if of == name} for name in contenders}


def _microbatch_us(wrapped: Wrapped, x: Tensor, parts: int, calls: int) -> dict[str, float]:
    """Means over iterations of two microbatches. The clock does not run between them."""
    totals: dict[str, float] = {}
    for _ in range(calls):
        for microbatch in ("intermediate", "final"):
            is_last = microbatch == "final"
            x.grad = None
            wrapped.begin(is_last)
            with nullcontext() if is_last else wrapped.no_sync():
                forward, loss = host_seconds(lambda: wrapped.model(x).sum(), x.device)
                backward, _ = host_seconds(loss.backward, x.device)
            for way, seconds in (("forward", forward), ("backward", backward)):
                key = f"{microbatch}_{way}_us"
                totals[key] = totals.get(key, 0.0) + 1e6 * seconds / calls / parts
        synchronize(x.device)
        wrapped.step()
    return totals
