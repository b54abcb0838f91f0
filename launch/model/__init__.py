"""The GPT that configured runs train: dense or with experts.

Imports ``config``.
"""
