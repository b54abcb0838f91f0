"""Running things: simulated ranks here, the training command in the modules that need its extra dependencies."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .simulation.simulate import simulate

__all__ = ["simulate"]


def __getattr__(name: str) -> object:
    """``simulate`` imports torch. ``maingrad --help`` imports this package and does not wait for torch."""
    if name != "simulate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .simulation.simulate import simulate

    return simulate
