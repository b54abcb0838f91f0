"""What torch's optimizers and clipping see of gradients in buckets, and what keeps them from silently doing nothing.

Imports ``contract``.
"""
