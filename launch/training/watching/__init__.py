"""Where people watch a run: TensorBoard and Weights & Biases, traces of torch's profiler, snapshots of CUDA's memory.
Files of results appear whole, without a link being followed (``replacing.py``).

Imports ``config/`` and ``runtime.py``.
"""
