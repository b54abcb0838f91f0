"""Running things: wrapping, simulated ranks and verification here, the training command where its extra is needed."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .parallelizing.exchanges import ulysses
    from .parallelizing.graphed import graphed
    from .parallelizing.make_optimizer import make_optimizer
    from .parallelizing.parallelize import parallelize
    from .simulation.simulate import simulate
    from .verification.verify import verify

__all__ = ["graphed", "make_optimizer", "parallelize", "simulate", "ulysses", "verify"]

_HOMES = {
    "graphed": "parallelizing.graphed",
    "make_optimizer": "parallelizing.make_optimizer",
    "parallelize": "parallelizing.parallelize",
    "simulate": "simulation.simulate",
    "ulysses": "parallelizing.exchanges",
    "verify": "verification.verify",
}


def __getattr__(name: str) -> object:
    """The functions import torch. ``maingrad --help`` imports this package and does not wait for torch."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
