"""``DistributedDataParallel``: hooks, iterations and checks around a user's model.

Imports ``buckets`` and the folders below it.
"""
