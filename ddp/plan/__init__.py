"""The plan of gradient memory, in integers: where each gradient lies, where buckets and shards begin and end.

The plan allocates no tensor and calls no process group. Imports ``contract``, ``collectives``, ``ddp/config.py``, and
sizes of blocks and matrices from ``kernels``.
"""
