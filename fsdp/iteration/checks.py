"""Checks in an iteration; each ``RuntimeError`` names the unit or the parameter, and a remedy."""

from collections.abc import Iterable, Sequence

import torch

from ...ddp.buckets.checks import check_nothing_bypassed
from ...ddp.torch_internals import DisableTorchFunctionSubclass
from ..unit.bucket import ShardedBucket
from ..unit.unit import Unit

__all__ = ["UnitChecks", "backward_raised", "check_nothing_beside", "delays_left", "past_the_outputs"]


class UnitChecks:
    """Finds what a program has changed in a model since it was sharded: parameters, modules, ranks.

    units  the outermost first
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._all_checked = False  # since the last backward
        self.frozen = False
        """The whole model was frozen in the last outermost forward. A backward then only goes through."""

    def before_forward(self, unit: Unit) -> None:
        """Raise in an outermost forward, of ``unit``, for changes after ``fully_shard``.

        Where the program calls the units one by one, the first call after a backward checks all of them, and each later
        call its own unit.
        """
        trains = torch.is_grad_enabled()
        self.frozen = self.is_frozen()
        if self.frozen:
            return
        one_by_one = trains and self._all_checked and unit is not self._units[0]
        with DisableTorchFunctionSubclass():  # for speed: the checks read no values of shards
            for each in [unit] if one_by_one else self._units:
                each.check()
        self._all_checked = trains

    def before_backward(self) -> None:
        """Raise in a backward that trains, for what the program has changed since the forward."""
        self.begin_anew()
        with DisableTorchFunctionSubclass():
            for unit in self._units:
                unit.registered.check(unit.label)

    def begin_anew(self) -> None:
        """The next forward checks all units."""
        self._all_checked = False

    def is_frozen(self) -> bool:
        """The program has frozen all trained parameters for now."""
        with DisableTorchFunctionSubclass():
            return any(unit.trains for unit in self._units) and all(unit.registered.is_frozen for unit in self._units)


def check_nothing_beside(buckets: Sequence[ShardedBucket]) -> None:
    """Raise for a gradient that has come to ``.grad`` of a whole parameter at the iteration's end, and discard it."""
    pairs = [entry for bucket in buckets for entry in zip(bucket.pairs, bucket.records, strict=True)]
    try:
        check_nothing_bypassed(((pair.whole, record) for pair, record in pairs), "the end of the iteration")
    except RuntimeError:
        for pair, _ in pairs:
            pair.whole.grad = None
        raise


def backward_raised(caller: str, inside: Iterable[Unit]) -> RuntimeError:
    """The error of ``caller``, which ends an iteration whose last backward has not ended; ``inside``: its units."""
    where = next((f" in {unit.label}" for unit in inside), "")
    return RuntimeError(
        f"{caller} after a backward that raised an exception{where}: gradients are not complete; call zero_grad(), and "
        f"the next forward begins a new iteration"
    )


def delays_left(what: str, unit: str) -> RuntimeError:
    """The error of ``what``, which gathers, before delayed gradients of ``unit`` are reduced."""
    return RuntimeError(
        f"{what} after the iteration's last backward, in which weight gradients of {unit} were delayed: compute these "
        f"and call model.finish_grad_sync() first; or run all backwards but the last within model.no_sync(), and call "
        f"torch.autograd.grad before the last"
    )


def past_the_outputs(bucket: ShardedBucket, unit: Unit) -> RuntimeError:
    """The error of a backward that reaches freed parameters without entering their unit."""
    return RuntimeError(
        f"backward came to '{bucket.name}' of {unit.label} past the outputs of its forward, and whole parameters were "
        f"not there: return from forward all that the loss uses (a penalty too), or pass reshard_after_forward=False. "
        f"An earlier backward frees them too: run all forwards before the autograd.grad of a gradient penalty, or use "
        f"placements='zero2', which keeps them to the step"
    )
