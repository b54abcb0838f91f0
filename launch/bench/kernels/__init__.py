"""``maingrad bench kernels`` and ``maingrad bench tune``: kernels against rooflines, rivals and each other.

Imports ``launch/report`` and ``launch/config``.
"""
