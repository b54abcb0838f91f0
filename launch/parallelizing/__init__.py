"""One call that wraps a model, and one that makes its optimizer.

``blocks.py`` finds the repeated blocks of a model, ``parallelize.py`` wraps it, ``make_optimizer.py`` steps it.
Imports ``ddp``, ``fsdp`` and ``te_integration``, and no package of an extra.
"""
