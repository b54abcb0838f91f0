"""Linear layers, and what is built of them: one differentiable operation (``fused_linear.py``) and its modules.

Imports ``te_integration/wgrad_queue.py`` and ``ddp/contract``.
"""
