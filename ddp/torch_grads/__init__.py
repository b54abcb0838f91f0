"""What torch's optimizers and clipping functions see of gradients in buckets, and errors where they would see nothing.

Imports ``plan`` and the folders below it, and ``kernels`` for the updates of ``Muon``.
"""
