"""Grouped products: a linear layer with a weight for each expert. ``products.py`` chooses, the others compute.

Imports the files of ``kernels`` itself.
"""
