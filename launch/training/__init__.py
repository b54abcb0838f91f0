"""The training command: the loop, what it wraps, writes, and goes on from.

Imports ``config``, ``data`` and ``model``.
"""
