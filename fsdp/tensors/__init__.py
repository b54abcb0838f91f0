"""Parameters in both forms, sharded and whole, as a program sees them.

Imports ``ddp``, and nothing else of ``fsdp``.
"""
