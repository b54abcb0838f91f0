"""Grouped products: one linear layer per expert. ``products.py`` chooses the kernel; the other files compute.

Imports the files of ``kernels`` itself.
"""
