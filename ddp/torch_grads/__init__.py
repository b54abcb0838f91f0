"""What torch's optimizers and clipping functions see of gradients in buckets, and errors where they would see nothing.

Imports ``contract`` and ``ddp/torch_internals``.
"""
