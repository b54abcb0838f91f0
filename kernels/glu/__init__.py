"""Gated activations scaled by row: the operation between the two products of an expert.

Imports the files of ``kernels`` itself.
"""
