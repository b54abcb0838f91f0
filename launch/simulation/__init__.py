"""Simulates N ranks of torch.distributed in one process. One rank runs at a time.

Imports torch alone.
"""
