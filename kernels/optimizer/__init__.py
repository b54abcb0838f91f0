"""Optimizers on flat shards: one pass over gradients, masters, moments and parameters.

Another optimizer needs three things here: options and equations in ``reference.py`` (``Rule``), a branch of the kernel
in ``triton_kernels.py``, and a ``FlatUpdate`` in a file of its own (``lion.py`` is the shortest).
``tests/kernels/test_optimizer.py`` compares the two. In ``ddp/optimizer``, ``IN_ONE_PASS`` (``param_groups.py``) lists
the classes whose steps run so, and ``steps.py`` has the rule of each.

Imports the files of ``kernels`` itself.
"""
