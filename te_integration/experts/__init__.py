"""Experts: grouped products whose split sizes stay on the device, their modules, and the permutation of tokens.

Imports ``dense``, and ``kernels`` for the products.
"""
