"""Rewrite a checkpoint of version 3 (data files ``__0_0.distcp``) in version 4, which ``load_checkpoint`` reads.

    python docs/upgrade_checkpoint.py runs/step-100 runs/step-100-upgraded

The new file of one rank is in memory at a time. The old folder stays as it is.
"""

import argparse
import json
import zlib
from pathlib import Path
from typing import NamedTuple

import torch

from maingrad.ddp.checkpoint.files.boxes import Part, Parts, parts_of_range
from maingrad.ddp.checkpoint.files.folder import Staging
from maingrad.ddp.checkpoint.files.manifest import (
    Manifest,
    SavedOptimizer,
    new_id,
    saved_tensors,
    write_manifest,
)
from maingrad.ddp.checkpoint.files.rank_file import file_name, write_rank_file


class Chunk(NamedTuple):
    """Consecutive elements of a flattened tensor, in a data file of version 3."""

    section: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    count: int
    file: int
    position: int
    checksum: int


def upgrade(old: Path, new: Path) -> None:
    """Write the checkpoint in the folder ``old`` to the folder ``new``.

    Raises ``ValueError`` for another version, and for bytes that are not those that were written.
    """
    content = json.loads((old / "maingrad.json").read_text())
    if content["version"] != 3:
        raise ValueError(f"'{old}' has version {content['version']}, and this program reads version 3")
    # A tensor's master and state are cut as it is, and go into one file with it, wherever they were.
    cut: dict[tuple[str, int], list[Chunk]] = {}
    for key, entry in content["tensors"].items():
        for chunk in chunks_of(key, entry):
            cut.setdefault((chunk.name, chunk.start), []).append(chunk)
    files = [old / name for name, _ in content["files"]]
    save_id = new_id()
    writers: dict[Part, int] = {}
    with Staging(new) as staging:
        staging.begin()
        for number in range(len(files)):
            parts: Parts = {}
            for chunks in cut.values():
                first = next(chunk for chunk in chunks if chunk.section == "model")
                if first.file == number:
                    flat = {chunk.section: elements_of(files[chunk.file], chunk) for chunk in chunks}
                    parts |= parts_of_range(first.name, first.shape, first.start, flat)
            write_rank_file(staging.folder / file_name(number), save_id, parts)
            writers |= dict.fromkeys(parts, number)
        entries = {**content["parameters"], **content["buffers"]}
        fields = {
            name: {"is_buffer": name in content["buffers"], "group": entry["group"], "scalars": entry["scalars"]}
            for name, entry in entries.items()
        }
        tensors = saved_tensors(writers, fields.items())
        saved = content["optimizer"]
        optimizer = None if saved is None else SavedOptimizer(saved["optimizer_class"], tuple(saved["groups"]))
        num_sets = content["num_expert_sets"]
        manifest = Manifest(save_id, tensors, content["tied"], num_sets, optimizer, content["extra"])
        write_manifest(staging.folder, manifest.encoded())
        staging.complete()


def chunks_of(key: str, entry: dict) -> list[Chunk]:
    """The chunks of one tensor. Its key is model.NAME, master.NAME or optimizer.state.NAME.KEY."""
    section, name = key.split(".", 1)
    if section == "optimizer":
        name, state = name.removeprefix("state.").rsplit(".", 1)
        section = f"state.{state}"
    about = section, name, tuple(entry["shape"]), getattr(torch, entry["dtype"])
    chunks: list[Chunk] = []
    start = 0
    for count, file, position, checksum in entry["chunks"]:
        chunks.append(Chunk(*about, start, count, file, position, checksum))
        start += count
    return chunks or [Chunk(*about, 0, 0, 0, 0, 0)]  # a tensor without elements


def elements_of(path: Path, chunk: Chunk) -> torch.Tensor:
    """The elements of one chunk."""
    with path.open("rb") as file:
        file.seek(chunk.position)
        content = bytearray(file.read(chunk.count * chunk.dtype.itemsize))
    if not chunk.count:
        return torch.empty(0, dtype=chunk.dtype)
    if zlib.crc32(content) != chunk.checksum:
        raise ValueError(f"'{path}' is damaged where '{chunk.section}.{chunk.name}' lies")
    return torch.frombuffer(content, dtype=chunk.dtype)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    upgrade(**vars(parser.parse_args()))
