"""The manifest, a checkpoint's JSON file: names and shapes of all tensors, and which boxes of them each data file holds.

A save writes the manifest last, so that a folder with a manifest is complete. A load reads the manifest first, so that
a model that does not fit is refused before any tensor changes. The manifest also holds everything that is not a tensor.
``checksum`` is the CRC-32 of the rest; set it to null after a change by hand.

    "files":   ["rank-00000.safetensors", "rank-00001.safetensors"]
    "tensors": {"model.up.weight": [[0, [0, 0], [8, 15]], [1, [8, 0], [9, 15]]]}

A tensor is listed with its boxes: number of the file, offsets, sizes. Every element is in one box. Where in its file a
box lies, the file says (``rank_file.py``). Elements are stored in the byte order of the machine.

Version 4 is the only one that is read. docs/upgrade_checkpoint.py rewrites version 3.
"""

import dataclasses
import json
import os
import reprlib
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .assignment import StoredBox
from .boxes import Box, check_tiling
from .rank_file import FILE_NAME, is_id
from .small_file import open_small_file
from .typed_json import dtype_name, dtype_named, expect, from_json, shape_from_json

__all__ = [
    "MANIFEST_FILE",
    "MANIFEST_STAGING",
    "Manifest",
    "SavedOptimizer",
    "SavedTensor",
]

MANIFEST_FILE = "maingrad.json"
MANIFEST_STAGING = f"{MANIFEST_FILE}.tmp"
"""The manifest is written under this name first, so that a file named as the manifest is whole."""
FORMAT = "maingrad.checkpoint"
VERSION = 4
MOST_BYTES = 2**25
"""Largest manifest, in bytes: some 300,000 boxes."""


@dataclass(frozen=True)
class SavedTensor:
    """A parameter or buffer, and the description of its optimizer state."""

    shape: tuple[int, ...]
    dtype: str
    """Without ``torch.``: "bfloat16"."""
    group: int | None = None
    """Index of the parameter group; None without an optimizer, and for buffers and frozen parameters."""
    has_master: bool = False
    """Whether there is an fp32 master beside the parameter, which is in half precision."""
    state: Mapping[str, str] = field(default_factory=dict)
    """Elementwise state: name -> dtype. Empty before the first step."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """The rest of the optimizer state, such as the number of steps, as ``to_json`` makes it."""

    @classmethod
    def of(cls, tensor: Tensor, **optimizer: Any) -> "SavedTensor":
        """The entry of ``tensor``."""
        return cls(tuple(tensor.shape), dtype_name(tensor.dtype), **optimizer)

    @property
    def description(self) -> str:
        """Dtype and shape, in words."""
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer's class and groups, without the state of parameters."""

    optimizer_class: str
    groups: tuple[Mapping[str, Any], ...]
    """Hyperparameters of each group, as ``to_json`` makes them."""


@dataclass(frozen=True)
class Manifest:
    """Everything but the tensors."""

    save_id: str
    """The id that is in the data files too."""

    parameters: Mapping[str, SavedTensor]
    buffers: Mapping[str, SavedTensor]
    tied: Mapping[str, str]
    """Further names of parameters -> the name under which they are stored."""
    num_expert_sets: int
    """Number of different sets of experts over the ranks; the experts of each set have names of their own."""
    optimizer: SavedOptimizer | None
    extra: Any
    tensors: Mapping[str, Sequence[StoredBox]]
    """Where the elements of each tensor are, by key: "model.NAME", "master.NAME", "optimizer.state.NAME.KEY"."""

    @property
    def kinds(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor, by key."""
        kinds = {
            f"model.{name}": (entry.shape, dtype_named(entry.dtype))
            for name, entry in {**self.parameters, **self.buffers}.items()
        }
        for name, entry in self.parameters.items():
            if entry.has_master:
                kinds[f"master.{name}"] = entry.shape, torch.float32
            for key, dtype in entry.state.items():
                kinds[f"optimizer.state.{name}.{key}"] = entry.shape, dtype_named(dtype)
        return kinds

    @property
    def files(self) -> list[str]:
        """The data files."""
        return sorted({stored.file for boxes in self.tensors.values() for stored in boxes})

    def write(self, folder: Path) -> None:
        """Write the file. Its bytes are on the disk before the file gets its name."""
        fields = dataclasses.asdict(dataclasses.replace(self, extra=None, tensors={}))
        about = {"format": FORMAT, "version": VERSION, "torch": torch.__version__, "byteorder": sys.byteorder}
        place = {name: number for number, name in enumerate(self.files)}
        tensors = {key: [[place[file], *box] for file, box in boxes] for key, boxes in self.tensors.items()}
        content = {**about, **fields, "extra": self.extra, "files": self.files, "tensors": tensors}
        content = json.loads(json.dumps(content))  # as a load will read it
        written = _laid_out({"checksum": _checksum(content), **content})
        if len(written) > MOST_BYTES:
            raise ValueError(
                f"the manifest has {len(written)} bytes, and {MOST_BYTES} at most are read again: keep less in extra, "
                f"or save from fewer ranks"
            )
        staging = folder / MANIFEST_STAGING
        try:
            with staging.open("w") as file:
                file.write(written)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # the error of a write does not name the file
            raise OSError(error.errno, error.strerror, str(staging)) from error
        staging.replace(folder / MANIFEST_FILE)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the file. Raises ``ValueError`` where it is not ours, damaged, or of a version that is not read."""
        path = folder / MANIFEST_FILE
        try:
            content = json.loads(_bytes_of(path))
        except FileNotFoundError:
            raise ValueError(
                f"'{folder}' is no complete checkpoint of maingrad: it has no {MANIFEST_FILE}, which is written last"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"'{path}' is truncated or damaged ({error})") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"'{path}' does not describe a checkpoint of maingrad: its format is not '{FORMAT}'")
        _check_version(path, content.get("version"))
        try:
            _check_sum(content)
            return cls._parse(content)
        except Exception as error:  # wrong values raise nearly anything
            raise ValueError(f"'{path}' is damaged ({type(error).__name__}: {error})") from error

    @classmethod
    def _parse(cls, content: Mapping[str, Any]) -> "Manifest":
        optimizer, num_groups = content["optimizer"], 0
        if optimizer is not None:
            all_groups = expect(list, optimizer["groups"], "groups")
            groups = tuple(expect(dict, group, "a parameter group") for group in all_groups)
            for value in (value for group in groups for value in group.values()):
                from_json(value)  # raises for a value that a load could not read
            optimizer = SavedOptimizer(expect(str, optimizer["optimizer_class"], "optimizer_class"), groups)
            num_groups = len(groups)
        parameters, buffers = (
            {name: _parse_tensor(name, entry, num_groups) for name, entry in expect(dict, content[part], part).items()}
            for part in ("parameters", "buffers")
        )
        num_expert_sets = expect(int, content["num_expert_sets"], "num_expert_sets")
        tied = expect(dict, content["tied"], "tied")
        for alias, first in tied.items():
            if expect(str, first, f"what '{alias}' is tied to") not in parameters:
                raise ValueError(f"'{alias}' is tied to {reprlib.repr(first)}, which is no parameter")
        save_id = content["save_id"]
        if not is_id(save_id):
            raise ValueError(f"{reprlib.repr(save_id)} is no id of a save")
        if content["byteorder"] != sys.byteorder:
            raise ValueError(f"its tensors are {reprlib.repr(content['byteorder'])}-endian, which this machine is not")
        extra = content["extra"]
        manifest = cls(save_id, parameters, buffers, tied, num_expert_sets, optimizer, extra, _parse_boxes(content))
        kinds = manifest.kinds
        for key in kinds.keys() ^ manifest.tensors.keys():
            where = "only among its tensors" if key in manifest.tensors else "not among its tensors"
            raise ValueError(f"'{key}' is {where}")
        for key, boxes in manifest.tensors.items():
            shape, _ = kinds[key]
            try:
                check_tiling(shape, [stored.box for stored in boxes])
            except ValueError as error:
                raise ValueError(f"'{key}' of shape {list(shape)}: {error}") from None
        return manifest


def _bytes_of(path: Path) -> bytes:
    """The file's bytes. Raises ``ValueError`` for a file that is too long, before it is read."""
    with open_small_file(path, MOST_BYTES) as file:
        file.seek(0, os.SEEK_END)
        size = file.tell()
        file.seek(max(0, size - 1))
        if file.read() not in (b"}", b"\n"):
            raise ValueError(f"of its {size} bytes the last is not a manifest's")
        file.seek(0)
        return file.read()


def _check_version(path: Path, version: Any) -> None:
    """Raise ``ValueError`` for another version than ours; the error names a remedy."""
    if type(version) is int and version == VERSION:
        return
    found = f"'{path}' has version {reprlib.repr(version)} of the format, and this maingrad reads version {VERSION}"
    if type(version) is int and 1 <= version < VERSION:
        raise ValueError(
            f"{found}: docs/upgrade_checkpoint.py rewrites version 3, and torch.distributed.checkpoint.load reads the "
            f"tensors of all before (model.NAME, master.NAME, optimizer.state.NAME.KEY)"
        )
    raise ValueError(f"{found}: a newer maingrad has written it, or it is damaged")


def _laid_out(content: Mapping[str, Any]) -> str:
    """JSON that people can read: a line for each value, and a line for each tensor of the index."""
    rest = json.dumps({key: value for key, value in content.items() if key != "tensors"}, indent=1)
    lines = (f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in content["tensors"].items())
    return rest.removesuffix("\n}") + ',\n "tensors": {\n' + ",\n".join(lines) + "\n }\n}\n"


def _checksum(content: Mapping[str, Any]) -> int:
    """CRC-32 of everything but the checksum itself; does not depend on the layout of the file."""
    told = {key: value for key, value in content.items() if key != "checksum"}
    return zlib.crc32(json.dumps(told, sort_keys=True, separators=(",", ":")).encode())


def _check_sum(content: Mapping[str, Any]) -> None:
    if content["checksum"] is not None:
        written, found = expect(int, content["checksum"], "checksum"), _checksum(content)
        if found != written:
            raise ValueError(
                f"its content has checksum {found}, and had {written} when it was written; where you have changed it "
                f"yourself, set its checksum to null"
            )


def _parse_boxes(content: Mapping[str, Any]) -> dict[str, list[StoredBox]]:
    files = expect(list, content["files"], "files")
    if not all(isinstance(name, str) and FILE_NAME.fullmatch(name) for name in files):
        raise ValueError(f"{reprlib.repr(files)} are no names of data files")
    tensors = {}
    for key, boxes in expect(dict, content["tensors"], "tensors").items():
        tensors[key] = []
        for stored in expect(list, boxes, f"the boxes of '{key}'"):
            number, offsets, sizes = stored
            if not 0 <= expect(int, number, f"a file of '{key}'") < len(files):
                raise ValueError(f"'{key}' is in file {reprlib.repr(number)} of {len(files)}")
            box = Box(shape_from_json(offsets, key), shape_from_json(sizes, key))
            tensors[key].append(StoredBox(files[number], box))
    return tensors


def _parse_tensor(name: str, entry: Mapping[str, Any], num_groups: int) -> SavedTensor:
    group = entry["group"]
    if group is not None and not 0 <= expect(int, group, f"the group of '{name}'") < num_groups:
        raise ValueError(f"'{name}' is in group {reprlib.repr(group)} of {num_groups}")
    scalars = expect(dict, entry["scalars"], f"the scalars of '{name}'")
    for value in scalars.values():
        from_json(value)
    state = {
        key: dtype_name(dtype_named(dtype))
        for key, dtype in expect(dict, entry["state"], f"the state of '{name}'").items()
    }
    return SavedTensor(
        shape=shape_from_json(entry["shape"], name),
        dtype=dtype_name(dtype_named(entry["dtype"])),
        group=group,
        has_master=expect(bool, entry["has_master"], f"has_master of '{name}'"),
        state=state,
        scalars=scalars,
    )
