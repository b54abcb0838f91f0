"""``maingrad plan``: computes, from shapes alone, what a run allocates and sends.

Imports ``training`` and what it imports.
"""
