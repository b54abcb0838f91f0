"""Optimizers on flat shards: one pass over gradients, masters, moments and parameters.

Imports the files of ``kernels`` itself.
"""
