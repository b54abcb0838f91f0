"""A checkpoint's files: the folder, the manifest with its index of chunks, and how chunks are written and read.

Knows tensors and bytes, and no model. Imports ``collectives``.
"""
