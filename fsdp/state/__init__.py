"""State dicts, optimizer state and checkpoints of sharded models.

Imports ``unit`` and ``tensors``.
"""
