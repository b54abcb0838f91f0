"""Hugging Face's ``Trainer`` over maingrad. No other room of ``training`` imports ``transformers`` or ``accelerate``.

Imports ``ddp``, ``fsdp`` and ``te_integration``, and of ``launch`` ``parallelizing`` alone.
"""

from .trainer import Trainer

__all__ = ["Trainer"]
