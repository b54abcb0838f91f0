"""``maingrad bench host``: host time of a tiny layer, of hooks, of gathers and of sharded units, a file each.

Imports ``ddp``, ``fsdp`` and ``te_integration``; ``gathers.py`` alone imports ``simulation``.
"""
