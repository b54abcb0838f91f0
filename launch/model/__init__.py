"""The models that configured runs train: the GPT, dense or with experts, and those of Hugging Face.

Imports ``config``, ``parallelizing``, ``safetensors_io.py`` and ``te_integration``.
"""
