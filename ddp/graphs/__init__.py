"""Training under CUDA graphs: what is captured and replayed, and what Python does again around each replay.

May import all of ``ddp``. The capture itself (``capture.py``, ``recorded.py``) knows torch alone.
"""
