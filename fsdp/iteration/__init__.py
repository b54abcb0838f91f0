"""All units of a model in an iteration: gathers ahead of use, rounds of gradients, and the end of a backward.

Imports ``unit`` and ``tensors``.
"""
