"""``convert_linears`` and ``unconvert``: the linear layers and experts of an existing model, fused in place.

Imports ``dense`` and ``experts``.
"""
