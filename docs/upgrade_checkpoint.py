"""Rewrite a checkpoint of version 3 (data files ``__0_0.distcp``) in version 4, which ``load_checkpoint`` reads.

    python docs/upgrade_checkpoint.py runs/step-100 runs/step-100-upgraded

One file is in memory at a time. The old folder stays as it is.
"""

import argparse
import json
import zlib
from pathlib import Path

import torch

from maingrad.ddp.checkpoint.files.assignment import stored_tensors
from maingrad.ddp.checkpoint.files.boxes import Part, Parts, parts_of_range
from maingrad.ddp.checkpoint.files.folder import Staging
from maingrad.ddp.checkpoint.files.manifest import Manifest, SavedOptimizer, SavedTensor, new_id, write_manifest
from maingrad.ddp.checkpoint.files.rank_file import file_name, write_rank_file

# (name, section, shape, dtype, first element, file, position, number of elements, checksum) of a chunk.
Chunk = tuple[str, str, tuple[int, ...], torch.dtype, int, int, int, int, int]


def upgrade(old: Path, new: Path) -> None:
    """Write the checkpoint in the folder ``old`` to the folder ``new``.

    Raises ``ValueError`` for another version, and for bytes that are not those that were written.
    """
    content = json.loads((old / "maingrad.json").read_text())
    if content["version"] != 3:
        raise ValueError(f"'{old}' has version {content['version']}, and this program reads version 3")
    chunks = [chunk for key, entry in content["tensors"].items() for chunk in chunks_of(key, entry, content)]
    save_id = new_id()
    writers: dict[Part, int] = {}
    with Staging(new) as staging:
        staging.begin()
        for number, (name, _) in enumerate(content["files"]):
            parts: Parts = {}
            for chunk in chunks:
                if chunk[5] == number:
                    parts |= parts_of(old / name, chunk)
            write_rank_file(staging.folder / file_name(number), save_id, parts)
            writers |= dict.fromkeys(parts, number)
        entries = {**content["parameters"], **content["buffers"]}
        tensors = {
            name: SavedTensor(
                shape, stored, name in content["buffers"], entries[name]["group"], entries[name]["scalars"]
            )
            for name, (shape, stored) in stored_tensors(writers).items()
        }
        saved = content["optimizer"]
        optimizer = None if saved is None else SavedOptimizer(saved["optimizer_class"], tuple(saved["groups"]))
        num_sets = content["num_expert_sets"]
        manifest = Manifest(save_id, tensors, content["tied"], num_sets, optimizer, content["extra"])
        write_manifest(staging.folder, manifest.encoded())
        staging.complete()


def chunks_of(key: str, entry: dict, content: dict) -> list[Chunk]:
    """The chunks of one tensor. Its key is model.NAME, master.NAME or optimizer.state.NAME.KEY."""
    section, name = key.split(".", 1)
    if section == "optimizer":
        name, state = name.removeprefix("state.").rsplit(".", 1)
        section = f"state.{state}"
    dtype, start, chunks = getattr(torch, entry["dtype"]), 0, []
    for count, file, position, checksum in entry["chunks"]:
        chunks.append((name, section, tuple(entry["shape"]), dtype, start, file, position, count, checksum))
        start += count
    if not chunks:  # a tensor without elements
        chunks.append((name, section, tuple(entry["shape"]), dtype, 0, 0, 0, 0, 0))
    return chunks


def parts_of(path: Path, chunk: Chunk) -> Parts:
    """The elements of one chunk, as boxes."""
    name, section, shape, dtype, start, _, position, count, checksum = chunk
    with path.open("rb") as file:
        file.seek(position)
        content = bytearray(file.read(count * dtype.itemsize))
    if count and zlib.crc32(content) != checksum:
        raise ValueError(f"'{path}' is damaged where '{section}.{name}' lies")
    flat = torch.frombuffer(content, dtype=dtype) if count else torch.empty(0, dtype=dtype)
    return parts_of_range(name, section, shape, start, flat)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    upgrade(**vars(parser.parse_args()))
