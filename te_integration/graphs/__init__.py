"""CUDA graphs of layers, microbatch by microbatch: forwards, input gradients and delayed weight gradients.

Imports ``te_integration/pipeline/order.py``, the modules, and ``ddp/graphs/capture.py``. What a replay must say to a
provider of ``main_grad`` is in ``ddp/contract/capturing.py``.
"""
