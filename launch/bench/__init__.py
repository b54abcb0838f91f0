"""``maingrad bench``: one file for each small benchmark, and a folder for each of the three large ones.

Imports every folder of ``launch``; ``gathers.py`` alone imports ``simulation``.
"""
