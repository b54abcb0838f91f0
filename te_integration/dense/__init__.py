"""Linear layers: one differentiable operation (``linear.py``) and the modules that use it.

Imports ``te_integration/wgrad_queue.py`` and ``ddp/contract``.
"""
