"""A checkpoint's files: the folder, the manifest with its index of chunks, and the writing and reading of chunks.

These files deal with tensors and bytes, and know no model. Imports ``collectives`` and ``plan/ranges.py``.
"""
