"""``DistributedOptimizer``: its step over flat buckets, gradient norms, loss scaling, parameter groups.

Imports ``wrapper`` and the folders below it.
"""
