"""One unit: its plan, its buckets, its shards at rest, and the whole parameters that its forward and backward use.

Imports ``tensors``.
"""
