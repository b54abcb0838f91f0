"""The JSON file of a checkpoint: what was saved, in the names and shapes of the model, beside the tensors' own files.

It is written last, so that a folder with it is complete, and read first, so that a model that does not fit is refused
before any tensor has been touched. What is not a tensor is in it too: no data file holds a pickled object.

    version    what it added
    1
    2          ``checksum``, CRC-32 of the manifest's own content, and ``metadata_file``, the size and the CRC-32 of the
               file beside it; either may be null, which a hand that changed something writes there
"""

import dataclasses
import json
import math
import os
import reprlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from .checkpoint_id import known_id

__all__ = [
    "MANIFEST_FILE",
    "MANIFEST_STAGING",
    "METADATA_FILE",
    "Manifest",
    "SavedOptimizer",
    "SavedTensor",
    "dtype_named",
    "from_json",
    "to_json",
]

MANIFEST_FILE = "maingrad.json"
MANIFEST_STAGING = f"{MANIFEST_FILE}.tmp"
"""It is written here: where there is a manifest it is whole."""
METADATA_FILE = ".metadata"
"""Torch's own, beside it."""
FORMAT = "maingrad.checkpoint"
VERSION = 2
MOST_BYTES = 2**26
"""Of the file."""
_MOST_DIMS = 64

T = TypeVar("T")


@dataclass(frozen=True)
class SavedTensor:
    """A parameter or buffer, and what an optimizer knows of it."""

    shape: tuple[int, ...]
    dtype: str
    """Without ``torch.``: "bfloat16"."""
    group: int | None = None
    """Its parameter group; None without an optimizer, and for buffers and frozen parameters."""
    has_master: bool = False
    """There is a master apart from the parameter: it is in half precision."""
    state: Mapping[str, str] = field(default_factory=dict)
    """Elementwise state: name -> dtype. Empty before the first step."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """The rest of its state, such as the number of steps, as ``to_json`` makes it."""

    @classmethod
    def of(cls, tensor: Tensor, **optimizer: Any) -> "SavedTensor":
        """The entry of ``tensor``."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), **optimizer)

    @property
    def kind(self) -> str:
        """Dtype and shape, in words."""
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer, but for what it knows of each parameter."""

    optimizer_class: str
    groups: tuple[Mapping[str, Any], ...]
    """Hyperparameters of each group, as ``to_json`` makes them."""


@dataclass(frozen=True)
class Manifest:
    """Everything but the tensors."""

    save_id: str | None
    """That of the other files too. None: saved before there were ids."""

    parameters: Mapping[str, SavedTensor]
    buffers: Mapping[str, SavedTensor]
    tied: Mapping[str, str]
    """Further names of parameters -> the name under which they are stored."""
    num_expert_sets: int
    """Ranks with different experts name theirs apart: so many of them."""
    optimizer: SavedOptimizer | None
    extra: Any
    metadata_file: tuple[int, int] | None
    """Size in bytes and CRC-32 of the metadata; None: not known."""

    def write(self, folder: Path) -> None:
        """Write the file, and have its bytes on the disk before it has its name."""
        fields = {**dataclasses.asdict(dataclasses.replace(self, extra=None)), "extra": self.extra}
        content = {"format": FORMAT, "version": VERSION, "torch": torch.__version__, **fields}
        staging = folder / MANIFEST_STAGING
        content = json.loads(json.dumps(content))  # as it will be read
        written = json.dumps({"checksum": _checksum(content), **content}, indent=1)
        if len(written) > MOST_BYTES:
            raise ValueError(
                f"the manifest has {len(written)} bytes, and {MOST_BYTES} at most are read again: keep less in extra"
            )
        try:
            with staging.open("w") as file:
                file.write(written)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:  # a write's does not name the file
            raise OSError(error.errno, error.strerror, str(staging)) from error
        staging.replace(folder / MANIFEST_FILE)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the file. Raises ``ValueError`` where it is not ours, damaged, or of another version."""
        path = folder / MANIFEST_FILE
        try:
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"{path.stat().st_size} bytes are more than any manifest has")
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise ValueError(
                f"'{folder}' is no complete checkpoint of maingrad: it has no {MANIFEST_FILE}, which is written last"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"'{path}' is truncated or damaged ({error})") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"'{path}' does not describe a checkpoint of maingrad: its format is not '{FORMAT}'")
        version = content.get("version")
        if type(version) is not int or not 1 <= version <= VERSION:
            raise ValueError(
                f"'{path}' has version {reprlib.repr(version)} of the format, and this maingrad reads versions 1 to "
                f"{VERSION}"
            )
        try:
            manifest = cls._parse(content)
            _check_sum(content)
            return manifest
        except Exception as error:  # values of any kind in any place raise nearly anything
            raise ValueError(f"'{path}' is damaged ({type(error).__name__}: {error})") from error

    @classmethod
    def _parse(cls, content: Mapping[str, Any]) -> "Manifest":
        optimizer, num_groups = content["optimizer"], 0
        if optimizer is not None:
            groups = tuple(_a(dict, group, "a parameter group") for group in _a(list, optimizer["groups"], "groups"))
            for value in (value for group in groups for value in group.values()):
                from_json(value)  # so that what cannot be read is found here
            optimizer = SavedOptimizer(_a(str, optimizer["optimizer_class"], "optimizer_class"), groups)
            num_groups = len(groups)
        parameters, buffers = (
            {name: _parse_tensor(name, entry, num_groups) for name, entry in _a(dict, content[kind], kind).items()}
            for kind in ("parameters", "buffers")
        )
        num_expert_sets = _a(int, content["num_expert_sets"], "num_expert_sets")
        tied = _a(dict, content["tied"], "tied")
        for alias, first in tied.items():
            if _a(str, first, f"what '{alias}' is tied to") not in parameters:
                raise ValueError(f"'{alias}' is tied to {reprlib.repr(first)}, which is no parameter")
        save_id = known_id(content["save_id"]) if "save_id" in content else None
        if save_id is None and "save_id" in content:
            raise ValueError(f"{reprlib.repr(content['save_id'])} is no id of a save")
        metadata_file = content["metadata_file"] if content["version"] > 1 else None
        if metadata_file is not None:
            size, checksum = (_a(int, value, "metadata_file") for value in _a(list, metadata_file, "metadata_file"))
            metadata_file = size, checksum
        return cls(save_id, parameters, buffers, tied, num_expert_sets, optimizer, content["extra"], metadata_file)


def _checksum(content: Mapping[str, Any]) -> int:
    """CRC-32 of all but the checksum itself, however it is laid out."""
    told = {key: value for key, value in content.items() if key != "checksum"}
    return zlib.crc32(json.dumps(told, sort_keys=True, separators=(",", ":")).encode())


def _check_sum(content: Mapping[str, Any]) -> None:
    if content["version"] > 1 and content["checksum"] is not None:
        written, found = _a(int, content["checksum"], "checksum"), _checksum(content)
        if found != written:
            raise ValueError(
                f"its content has checksum {found}, and had {written} when it was written; where you have changed it "
                f"yourself, set its checksum to null"
            )


def _a(kind: type[T], value: Any, what: str) -> T:
    """``value``, of this very type: JSON's true is no number. Raises ``TypeError``."""
    if type(value) is not kind:
        raise TypeError(f"{reprlib.repr(value)} as {what}")
    return value


def _parse_tensor(name: str, entry: Mapping[str, Any], num_groups: int) -> SavedTensor:
    shape = tuple(_a(int, size, f"a size of '{name}'") for size in _a(list, entry["shape"], f"the shape of '{name}'"))
    if len(shape) > _MOST_DIMS or min(shape, default=0) < 0 or math.prod(size or 1 for size in shape) >= 2**62:
        raise ValueError(f"'{name}' has shape {reprlib.repr(shape)}")
    group = entry["group"]
    if group is not None and not 0 <= _a(int, group, f"the group of '{name}'") < num_groups:
        raise ValueError(f"'{name}' is in group {reprlib.repr(group)} of {num_groups}")
    scalars = _a(dict, entry["scalars"], f"the scalars of '{name}'")
    for value in scalars.values():
        from_json(value)
    return SavedTensor(
        shape=shape,
        dtype=_dtype_name(entry["dtype"]),
        group=group,
        has_master=_a(bool, entry["has_master"], f"has_master of '{name}'"),
        state={key: _dtype_name(dtype) for key, dtype in _a(dict, entry["state"], f"the state of '{name}'").items()},
        scalars=scalars,
    )


def _dtype_name(name: Any) -> str:
    return str(dtype_named(_a(str, name, "a dtype"))).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """The dtype of this name; raises ``ValueError`` where there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{reprlib.repr(name)} is no dtype")
    return dtype


def to_json(value: Any, what: str) -> Any:
    """A hyperparameter or scalar state as JSON holds it: a 0-dim tensor becomes its value and its dtype, exactly.

    Raises ``ValueError`` that says ``what`` it is, for anything else than tensors, numbers, strings and sequences.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_json(each, what) for each in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    raise ValueError(f"{what} is a {type(value).__name__}, which a checkpoint cannot hold as JSON")


def from_json(value: Any) -> Any:
    """What ``to_json`` was given, tensors on the CPU; sequences come back as tuples."""
    if isinstance(value, list):
        return tuple(from_json(each) for each in value)
    if isinstance(value, dict):
        if not isinstance(value["tensor"], bool | int | float):
            raise TypeError(f"{reprlib.repr(value['tensor'])} as the value of a tensor")
        return torch.tensor(value["tensor"], dtype=dtype_named(value["dtype"]), device="cpu")
    return value
