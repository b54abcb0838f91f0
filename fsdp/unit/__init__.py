"""One unit: its plan, its buckets with shards and whole parameters, and which of these its modules register.

When a unit gathers, frees and reduces is decided in ``iteration``, which has the hooks on forwards and backwards too.
Imports ``tensors``.
"""
