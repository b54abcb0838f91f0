"""``save_checkpoint`` and ``load_checkpoint``: any number of ranks and any placement can read the files.

``fsdp`` offers its models through a ``CheckpointSource`` of its own. Imports ``optimizer`` and the folders below it.
"""
