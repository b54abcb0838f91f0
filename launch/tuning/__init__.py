"""``maingrad tune``: the fastest configuration of each kernel on the GPU at hand, as a table that the kernels read.

Imports ``kernels``, ``launch/config`` and ``launch/report``.
"""
