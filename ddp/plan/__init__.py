"""The plan of gradient memory, in integers: where each gradient lies, where buckets and shards are cut.

No tensor is allocated here and no process group is asked. Imports ``contract`` and ``ddp/config.py``.
"""
