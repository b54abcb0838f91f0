"""What a graphed function reads on the host, and whether that has changed.

Every graphed step compares the surroundings of its calls; ``maingrad.graphed`` also what Python reads.

May import ``ddp.gathers``, ``ddp.torch_internals`` and ``ddp.wrapper``; nothing else of ``graphs``.
"""
