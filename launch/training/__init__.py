"""``maingrad train``: the training loop, its wrappers, its records and its checkpoints.

Imports ``config``, ``data``, ``model`` and ``parallelizing``.
"""
