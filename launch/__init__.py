"""Running things: simulated ranks here, the training command in the modules that need its extra dependencies."""

from .simulation.simulate import simulate

__all__ = ["simulate"]
