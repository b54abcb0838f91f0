"""Gated activations scaled by row: what stands between an expert's two products.

Imports the files of ``kernels`` itself.
"""
