"""Buckets at run time: which parameters lie in them, when each is ready, when its reduction starts and ends.

Imports ``contract``, ``plan``, ``collectives`` and ``gathers``. Serves ``DistributedDataParallel`` and ``fsdp`` alike.
"""
