"""Errors in an iteration; each ``RuntimeError`` names the unit or the parameter, and a remedy."""

from collections.abc import Iterable

from ..unit.bucket import ShardedBucket
from ..unit.unit import Unit

__all__ = ["backward_raised", "delays_left", "past_the_outputs"]


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
        f"backward came to '{bucket.name}' of {unit.label} past the outputs of its forward, after they were freed: "
        f"return from forward all that the loss uses, or pass reshard_after_forward=False. Before the autograd.grad of "
        f"a gradient penalty run all forwards, or use placements='zero2'"
    )
