"""Simulates N ranks of torch.distributed in one process. One rank runs at a time.

Imports torch, the private names of torch that ``ddp`` and ``kernels`` keep, and ``ddp/graphs/recorded.py``, so that the
CPU's stand-in of a CUDA graph records collectives. Imports nothing else of ``launch``.
"""
