"""``maingrad bench``: one file for each question, and a folder for each of the two that take several files.

Imports every folder of ``launch`` but ``simulation``, which one question needs.
"""
