"""Compares a model under every wrapper with plain PyTorch, and finds out by experiment why they differ.

``verify.py`` tells the order of things; ``diagnosis.py`` has the experiments. Imports ``ddp``, ``fsdp``,
``te_integration`` and ``simulation/``.
"""
