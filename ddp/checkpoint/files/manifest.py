"""The manifest, a checkpoint's JSON file: all tensors, and which boxes of them each rank's data file holds.

A save writes the manifest last, so that a folder with a manifest is complete. A load reads the manifest first, so that
a model that does not fit is refused before any tensor changes. The manifest also holds everything that is not a tensor.
``checksum`` is the CRC-32 of the rest; set it to null after a change by hand. A line for each parameter and buffer::

    "up.weight": {"shape": [17, 15], "dtypes": {"model": "bfloat16"}, "boxes": [[0, [0, 0], [8, 15]], ...

A box is the number of the rank whose file has it, offsets, and sizes. Each element is in one box. Where in its file a
box lies, the file says (``rank_file.py``). Elements are stored in the byte order of the machine.

Version 4 is the only one that is read. docs/upgrade_checkpoint.py rewrites version 3. A new field of ``SavedTensor``,
``SavedOptimizer`` or ``Manifest`` is written by ``encoded`` without more, and read where ``_manifest_of`` names it:
files of before have none.
"""

import json
import math
import operator
import reprlib
import sys
import uuid
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .boxes import Box, Part, check_tiling
from .whole_file import open_small_file, whole_file

__all__ = [
    "MANIFEST_FILE",
    "Manifest",
    "SavedOptimizer",
    "SavedTensor",
    "assign",
    "dtype_name",
    "from_json",
    "new_id",
    "saved_tensors",
    "to_json",
    "write_manifest",
]

MANIFEST_FILE = "maingrad.json"
FORMAT = "maingrad.checkpoint"
VERSION = 4
MOST_BYTES = 2**25
"""Largest manifest, in bytes: some 300,000 boxes."""
_MOST_DIMS = 64
_MOST_RANKS = 10**9


def new_id() -> str:
    """An id that no other save has."""
    return f"maingrad-{uuid.uuid4().hex}"


@dataclass(frozen=True)
class SavedTensor:
    """A parameter or buffer, with its master and optimizer state."""

    shape: tuple[int, ...]
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """"model": the tensor itself. "master": in fp32, beside a parameter in half precision. "state.KEY": elementwise
    state of the optimizer; none before the first step. "state" alone: the entry is no parameter or buffer, but a
    tensor of another shape in a parameter's state, under the name PLACE@NAME. A place is the key of the state, and the
    index in a list: "GG.0"."""
    boxes: tuple[tuple[int, Box], ...] = ()
    """The boxes of each of these, which are cut alike: the rank, in the group that wrote, whose file has the box
    (``rank_file.file_name``), and where in the tensor its elements are."""
    is_buffer: bool = False
    group: int | None = None
    """Index of the parameter group; None without an optimizer, and for buffers and frozen parameters."""
    scalars: dict[str, Any] = field(default_factory=dict)
    """The rest of the optimizer state, such as the number of steps, as ``to_json`` makes it. A tensor that has an entry
    of its own is {"beside": PLACE, "order": its dims, from the one with the longest stride}."""

    def __post_init__(self) -> None:
        if len(self.shape) > _MOST_DIMS or math.prod(size or 1 for size in self.shape) >= 2**62:
            raise ValueError(f"a tensor of shape {reprlib.repr(self.shape)}")
        if self.dtypes.keys().isdisjoint(("model", "state")):
            raise ValueError("a tensor is not stored")
        check_tiling(self.shape, [box for _, box in self.boxes])
        if not all(0 <= rank < _MOST_RANKS for rank, _ in self.boxes):
            raise ValueError("a box is in the file of a rank that cannot be")

    @property
    def state(self) -> dict[str, torch.dtype]:
        """Elementwise state: key -> dtype."""
        return {key.removeprefix("state."): dtype for key, dtype in self.dtypes.items() if key.startswith("state.")}

    @property
    def places(self) -> dict[str, list[int]]:
        """Where in the state tensors of other shapes are, which have entries of their own -> their dims, from the one
        with the longest stride.

        Raises for a value that a load could not read.
        """
        found: dict[str, list[int]] = {}
        from_json([*self.scalars.values()], found.setdefault)
        return found


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer's class and groups, without the state of parameters."""

    optimizer_class: str
    """Name of the class; or those of the groups' classes, separated by commas."""
    groups: tuple[dict[str, Any], ...]
    """Hyperparameters of each group, as ``to_json`` makes them."""

    def class_of_group(self, index: int) -> str:
        """Name of the class that updates a group."""
        names = self.optimizer_class.split(", ")
        return names[index % len(names)]


@dataclass(frozen=True)
class Manifest:
    """Everything but the elements."""

    save_id: str
    """The id that is in the data files too."""
    tensors: dict[str, SavedTensor]
    """By the name in the checkpoint."""
    tied: dict[str, str]
    """Further names of parameters -> the name under which they are stored."""
    num_expert_sets: int
    """Number of different sets of experts over the ranks; the experts of each set have names of their own."""
    optimizer: SavedOptimizer | None
    extra: Any

    def __post_init__(self) -> None:
        num_groups = len(self.optimizer.groups) if self.optimizer else 0
        for name, entry in self.tensors.items():
            if entry.group is not None and not 0 <= entry.group < num_groups:
                raise ValueError(f"'{name}' is in group {reprlib.repr(entry.group)} of {num_groups}")
            for place, order in entry.places.items():
                other = self.tensors.get(f"{place}@{name}")
                if other is None or "state" not in other.dtypes or sorted(order) != [*range(len(other.shape))]:
                    raise ValueError(f"state of '{place}' is missing, of parameter '{name}', or has not its dims")
        for alias, first in self.tied.items():
            if first not in self.tensors:
                raise ValueError(f"'{alias}' is tied to {reprlib.repr(first)}, which is not stored")

    @property
    def nbytes(self) -> dict[int, int]:
        """Bytes of tensors in the data file of each rank that has one."""
        nbytes = Counter[int]()
        for entry in self.tensors.values():
            itemsize = sum(dtype.itemsize for dtype in entry.dtypes.values())
            for rank, box in entry.boxes:
                nbytes[rank] += box.numel * itemsize
        return nbytes

    def encoded(self) -> str:
        """The file's content, a line for each tensor.

        Raises ``ValueError`` where it would be too long to be read again, and ``TypeError`` for ``extra`` that JSON
        does not hold.
        """
        about = {"format": FORMAT, "version": VERSION, "torch": torch.__version__, "byteorder": sys.byteorder}
        try:
            json.dumps(self.extra)  # without ``_as_json``, which would take a dtype
            content = json.loads(json.dumps({**about, **vars(self)}, default=_as_json))  # as a load will read it
            content["checksum"] = _checksum(content)
            tensors = content.pop("tensors").items()
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in tensors)
            rest = json.dumps(content, indent=1).removesuffix("\n}")
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"extra must be something that JSON holds ({error})") from None
        written = f'{rest},\n "tensors": {{\n{lines}\n }}\n}}\n'
        if len(written) > MOST_BYTES:
            raise ValueError(
                f"the manifest has {len(written)} bytes, and {MOST_BYTES} at most are read again: keep less in extra, "
                f"or save from fewer ranks"
            )
        return written

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the file. Raises ``ValueError`` where it is not ours, damaged, or of a version that is not read."""
        path = folder / MANIFEST_FILE
        try:
            with open_small_file(path, MOST_BYTES) as file:
                content = json.load(file)
        except FileNotFoundError:
            raise ValueError(
                f"'{folder}' is no complete checkpoint of maingrad: it has no {MANIFEST_FILE}, which is written last"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"'{path}' is truncated or damaged ({error})") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"'{path}' does not describe a checkpoint of maingrad: its format is not '{FORMAT}'")
        version = content.get("version")
        if version != VERSION:
            raise ValueError(
                f"'{path}' has version {reprlib.repr(version)} of the format, and this maingrad reads version "
                f"{VERSION}: docs/upgrade_checkpoint.py rewrites version 3, a newer maingrad reads later ones, and "
                f"torch.distributed.checkpoint.load all before (model.NAME, master.NAME, optimizer.state.NAME.KEY)"
            )
        try:
            written, found = content.pop("checksum"), _checksum(content)
            if written is not None and found != written:
                raise ValueError(
                    f"its content has checksum {found}, and had {reprlib.repr(written)} when it was written; where you "
                    f"have changed it yourself, set its checksum to null"
                )
            if content["byteorder"] != sys.byteorder:
                raise ValueError(f"its tensors are {content['byteorder']!r}-endian, which this machine is not")
            return _manifest_of(content)
        except Exception as error:  # wrong values raise nearly anything
            raise ValueError(f"'{path}' is damaged ({type(error).__name__}: {error})") from error


def _manifest_of(content: Mapping[str, Any]) -> Manifest:
    """The manifest, from values of any type. Raises an error of some kind where one is of another type than ours."""
    tensors = {}
    for name, entry in content["tensors"].items():
        try:
            group, boxes = entry["group"], entry["boxes"]
            tensors[name] = SavedTensor(
                _integers(entry["shape"]),
                {section: _dtype_named(dtype) for section, dtype in entry["dtypes"].items()},
                tuple([(operator.index(rank), Box(_integers(at), _integers(sizes))) for rank, at, sizes in boxes]),
                entry["is_buffer"],
                None if group is None else operator.index(group),
                entry["scalars"],
            )
        except Exception as error:  # wrong values raise nearly anything
            raise ValueError(f"{error!r} in manifest.tensors['{name}']") from error
    optimizer = content["optimizer"]
    if optimizer is not None:
        optimizer = SavedOptimizer(optimizer["optimizer_class"], tuple(optimizer["groups"]))
        # Raises for a value that a load could not read.
        from_json([[*group.values()] for group in optimizer.groups])
    return Manifest(
        content["save_id"],
        tensors,
        content["tied"],
        operator.index(content["num_expert_sets"]),
        optimizer,
        content["extra"],
    )


def _integers(value: Any) -> tuple[int, ...]:
    """A list of JSON, of integers."""
    return tuple(map(operator.index, value))


def dtype_name(dtype: torch.dtype) -> str:
    """Without ``torch.``: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _dtype_named(name: Any) -> torch.dtype:
    """The dtype that ``dtype_name`` gives this name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{reprlib.repr(name)} is no dtype")
    return dtype


def to_json(value: Any, what: str, place: str = "", others: dict[str, Tensor] | None = None) -> Any:
    """A hyperparameter or state that is not elementwise as a value of JSON.

    Takes None, numbers, strings, tensors of one element, and lists and tuples of these. Raises ``ValueError`` for
    anything else; ``what`` names the value in the error.

    place   key of the state; in lists, with the index
    others  gets the tensors with dims, which are to have entries of their own, by their place; None: there are none
    """
    if isinstance(value, int | float | str | None):
        return value
    if isinstance(value, list | tuple):
        return [to_json(each, what, f"{place}.{index}", others) for index, each in enumerate(value)]
    if others is not None and isinstance(value, Tensor) and value.ndim and others.setdefault(place, value) is value:
        # Products of matrices differ in bits where one lies column by column, as those of torch.linalg do.
        return {"beside": place, "order": value.dim_order()}
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": dtype_name(value.dtype)}
    raise ValueError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold as JSON; tensors of state it holds where "
        f"their parameter is whole on a rank and updated alone (keep_params_whole=True; shard_atoms='whole')"
    )


def from_json(value: Any, take: Callable[[str, list[int]], object] | None = None) -> Any:
    """The value that ``to_json`` was given; tensors are on the CPU, lists come back as tuples.

    take  of state: gives a tensor that has an entry of its own, by its place and the order of its dims. Then lists come
          back as lists, which optimizers change
    """
    if isinstance(value, list):
        items = [from_json(each, take) for each in value]
        return items if take else tuple(items)
    if isinstance(value, dict):
        if take and "beside" in value:
            return take(value["beside"], value["order"])
        return torch.scalar_tensor(value["tensor"], dtype=_dtype_named(value["dtype"]), device="cpu")
    return value


def assign(held: Sequence[Sequence[Part]]) -> dict[Part, int]:
    """The rank that writes each part, of what each rank holds. Alike on all ranks.

    A part that several ranks hold alike is written by the one with the least to write so far.
    """
    holders: dict[Part, list[int]] = defaultdict(list)
    for rank, parts in enumerate(held):
        for part in parts:
            holders[part].append(rank)
    writers: dict[Part, int] = {}
    nbytes = [0] * len(held)
    for part, ranks in holders.items():
        writers[part] = rank = min(ranks, key=nbytes.__getitem__)
        nbytes[rank] += part.box.numel * sum(dtype.itemsize for _, dtype in part.dtypes)
    return writers


def saved_tensors(
    writers: Mapping[Part, int], told: Iterable[tuple[str, Mapping[str, Any]]] = ()
) -> dict[str, SavedTensor]:
    """All tensors, from the rank that writes each part, and what ranks tell: names, and other fields of the tensors.

    Raises ``ValueError`` where ranks tell different things of one name, and for elements that no rank holds.
    """
    boxes: dict[str, list[tuple[int, Box]]] = defaultdict(list)
    for part, rank in writers.items():
        boxes[part.name].append((rank, part.box))
    of_parts = [(part.name, {"shape": part.shape, "dtypes": dict(part.dtypes)}) for part in writers]
    fields: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, about in [*of_parts, *told]:
        for key, value in about.items():
            if fields[name].setdefault(key, value) != value:
                raise ValueError(
                    f"ranks disagree on '{name}': its {key.rstrip('s')}s are {fields[name][key]} on one, and {value} "
                    f"on another"
                )
    tensors = {}
    for name, known in fields.items():
        try:
            tensors[name] = SavedTensor(**known, boxes=tuple(boxes[name]))
        except ValueError as error:
            raise ValueError(
                f"'{name}' of shape {list(known['shape'])} is not held by all ranks together: {error}"
            ) from None
    return tensors


def write_manifest(folder: Path, encoded: str) -> None:
    """Write the file, so that a file named as the manifest is whole."""
    with whole_file(folder / MANIFEST_FILE) as file:
        file.write(encoded.encode())


def _as_json(value: Any) -> Any:
    if isinstance(value, SavedTensor):
        return {**vars(value), "boxes": [(rank, *box) for rank, box in value.boxes]}
    return dtype_name(value) if isinstance(value, torch.dtype) else vars(value)


def _checksum(content: Mapping[str, Any]) -> int:
    """CRC-32 of everything but the checksum itself; does not depend on the layout of the file."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
