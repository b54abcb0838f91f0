"""Rows of tokens in another order: by their experts and back, and summed by their ids for an embedding's gradient.

Imports the files of ``kernels`` itself.
"""
