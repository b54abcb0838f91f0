"""``maingrad plan``: what a run would allocate and send, from shapes alone.

Imports ``config`` and ``model``.
"""
