"""``maingrad bench data-parallel``: one GPT trained by every data parallelism, the same work for all.

Imports ``launch/report``, ``launch/config`` and ``launch/bench/accumulation.py``.
"""
