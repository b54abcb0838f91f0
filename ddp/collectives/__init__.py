"""Ranks and collectives: groups, grids of ranks, forms of reduction, agreement between ranks, reports of failures.

Knows tensors and process groups, but no parameters. Imports ``ddp/config.py`` and ``ddp/torch_internals``.
"""
