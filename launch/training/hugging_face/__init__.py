"""Hugging Face's ``Trainer`` over maingrad. The only room that imports ``transformers`` and ``accelerate`` for training.

Imports ``ddp``, ``fsdp`` and ``te_integration``, and nothing of ``launch``.
"""

from .trainer import Trainer

__all__ = ["Trainer"]
