"""``maingrad bench data-parallel``: one GPT trained under each kind of data parallelism, with the same work.

Imports ``launch/report``, ``launch/config`` and ``launch/bench/steps.py``.
"""
