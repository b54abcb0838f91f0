"""N ranks of torch.distributed in one process, of which one runs at a time.

Imports torch alone.
"""
