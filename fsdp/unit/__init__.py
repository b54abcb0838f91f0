"""One unit: its plan, its buckets with shards and whole parameters, and the hooks around its forward and backward.

Imports ``tensors``.
"""
