"""``maingrad bench``: one file for each small benchmark, and a folder for each large one.

Imports every folder of ``launch``; ``gathers.py`` alone imports ``simulation``.
"""
