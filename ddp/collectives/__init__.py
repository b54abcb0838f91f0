"""Ranks, and what they send each other: groups and grids, forms of reduction, agreements, reports of failures.

Knows tensors and process groups, and no parameter. Imports ``ddp/config.py`` and ``ddp/torch_internals.py``.
"""
