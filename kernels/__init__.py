"""Maths on tensors: one function per operation, each with its plain PyTorch oracle in ``reference.py``.

Nothing here knows parameters, modules or process groups.
"""

from .wgrad import wgrad_accumulate as wgrad_accumulate

__all__ = ["wgrad_accumulate"]
