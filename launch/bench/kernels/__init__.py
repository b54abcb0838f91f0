"""``maingrad bench kernels`` and ``maingrad bench tune``: kernels against rooflines and rivals, and against each other.

Imports ``launch/report`` and ``launch/config``.
"""
