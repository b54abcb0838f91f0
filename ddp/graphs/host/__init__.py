"""What a graphed function reads on the host, and whether that has changed: the surroundings of a call, as each graphed step
compares them, and beside them what Python reads, which ``maingrad.graphed`` alone compares.

May import ``ddp.gathers``, ``ddp.torch_internals`` and ``ddp.wrapper``; nothing else of ``graphs``.
"""
