"""One call that wraps a model, and one that makes its optimizer.

``blocks.py`` finds the repeated blocks of a model, ``parallelize.py`` wraps it, ``make_optimizer.py`` steps it.
``experts.py`` shares out experts over ranks.
Imports ``ddp``, ``fsdp`` and ``te_integration``, and no package of an extra.
"""
