"""Compares a model under every wrapper with plain PyTorch, and finds out by experiment why they differ.

``verify.py`` tells the order of things; ``experiments.py`` has the experiments, ``judge.py`` one way's verdict. Imports
``ddp``, ``fsdp``, ``te_integration``, ``parallelizing/`` and ``simulation/``.
"""
