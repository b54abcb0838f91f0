"""``DistributedOptimizer``: the step over flat shards, norms, loss scaling, parameter groups.

Imports ``wrapper`` and the folders below it.
"""
