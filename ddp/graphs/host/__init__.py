"""What a graphed function reads on the host, and whether that has changed.

May import ``ddp.gathers``, ``ddp.torch_internals`` and ``ddp.wrapper``; nothing else of ``graphs``.
"""
