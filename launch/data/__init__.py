"""Tokens for configured runs, and the bigram model whose loss a trained model must beat.

Imports ``config``.
"""
