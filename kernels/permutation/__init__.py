"""Tokens into the order of their experts, and back.

Imports the files of ``kernels`` itself.
"""
