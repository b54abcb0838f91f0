"""The permutation of tokens into the order of their experts, and its inverse.

Imports the files of ``kernels`` itself.
"""
