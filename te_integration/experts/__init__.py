"""Experts: grouped products whose split sizes stay on the device, the modules around them, and tokens by expert.

Imports ``dense``, and ``kernels`` for the products.
"""
