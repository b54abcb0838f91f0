"""The main_grad contract: who owns gradient memory, who computes weight gradients, and what each says to the other.

A gradient's way starts here. The attributes themselves are touched in ``main_grad.py`` alone. Imports ``kernels`` and
``ddp/torch_internals``; every other folder may import this one.
"""
