"""What the units of a model do in an iteration: gathers ahead of use, rounds of gradients, the end of a backward.

Imports ``unit`` and ``tensors``.
"""
