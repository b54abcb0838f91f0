"""Tokens for configured runs, and the bigram model that a run has to beat.

Imports ``config``.
"""
