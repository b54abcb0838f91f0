"""Orthogonalisation of matrices by Newton-Schulz iterations.

Imports the files of ``kernels`` itself.
"""
