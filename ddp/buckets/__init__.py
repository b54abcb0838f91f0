"""Buckets at run time: which parameters lie in a bucket, when a bucket is ready, when its reduction starts and ends.

Imports ``contract``, ``plan``, ``collectives`` and ``gathers``. Serves ``DistributedDataParallel`` and ``fsdp`` alike.
"""
