"""Where people watch a run: TensorBoard and Weights & Biases, traces of torch's profiler, snapshots of CUDA's memory.

Imports ``config/`` and ``runtime.py``.
"""
