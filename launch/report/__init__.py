"""Pictures, tables and digests of what runs and benchmarks have recorded.

Imports ``config``, ``plan`` and ``training``'s records.
"""
