"""``save_checkpoint`` and ``load_checkpoint``: files that any number of ranks and any placement can read.

``fsdp`` registers its own source of tensors here. Imports ``optimizer`` and the folders below it.
"""
