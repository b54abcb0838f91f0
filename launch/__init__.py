"""Running things: simulated ranks and verification here, the training command in modules that need its extra."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .simulation.simulate import simulate
    from .verification.verify import verify

__all__ = ["simulate", "verify"]


def __getattr__(name: str) -> object:
    """The functions import torch. ``maingrad --help`` imports this package and does not wait for torch."""
    if name == "simulate":
        from .simulation.simulate import simulate

        return simulate
    if name == "verify":
        from .verification.verify import verify

        return verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
