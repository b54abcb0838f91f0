"""Sharded parameters and their gradients: the tensors that a program sees outside forwards.

Imports ``ddp``, and nothing else of ``fsdp``.
"""
