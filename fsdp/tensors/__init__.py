"""Sharded parameters and their gradients, as a program sees them between forwards.

Imports ``ddp``, and nothing else of ``fsdp``.
"""
