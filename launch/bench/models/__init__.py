"""``maingrad bench models``: architectures of Hugging Face, each trained by maingrad and by FSDP2, eager and compiled.

Imports ``launch/report``, ``launch/config``, ``launch/bench/accumulation.py`` and ``launch/bench/data_parallel``.
"""
