"""Buckets at run time: which parameters lie in a bucket, when a bucket is ready, when its reduction starts and ends.

Imports ``contract``, ``plan``, ``collectives``, ``gathers`` and ``torch_grads``. Serves ``DistributedDataParallel`` and
``fsdp`` alike.
"""
