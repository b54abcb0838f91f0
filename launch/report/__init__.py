"""Pictures, tables and digests of what runs and benchmarks have recorded.

Imports ``config``, ``data``, ``plan`` and ``training``.
"""
