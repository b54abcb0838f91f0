"""A checkpoint's files: the folder, the manifest with its index of boxes, and the writing and reading of boxes.

These files deal with tensors and bytes, and know no model. Imports ``plan``, ``collectives``, and ``source.py`` of the
folder around it.
"""
