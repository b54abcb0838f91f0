"""``maingrad bench data-parallel``: one GPT trained under each kind of data parallelism, with the same work.

Imports ``launch/report``, ``launch/config``, ``launch/parallelizing`` and ``launch/bench/steps.py``. ``rounds.py`` and
``sections.py`` measure rows and write tables for ``bench models`` too.
"""
