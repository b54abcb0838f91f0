"""``DistributedDataParallel``: the user's methods, and what is set up and checked around a model.

Imports ``buckets`` and the folders below it.
"""
