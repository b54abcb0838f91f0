"""Tokens for configured runs, and the bigram model whose loss a trained model must beat. Files that a run writes appear
whole, without a link being followed (``replacing.py``).

Imports ``config``.
"""
