"""Megatron's gradient machinery for any PyTorch model.

Gradient buckets own ``main_grad``, weight-gradient GEMMs accumulate straight into them, and reduce-scatters run under
the rest of the backward.

Import from the folders: ``maingrad.ddp``, ``maingrad.te_integration``, ``maingrad.kernels``, ``maingrad.launch``.
"""

__version__ = "0.1.0"
