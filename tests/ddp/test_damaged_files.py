"""Files that were damaged, by accident or on purpose: loaded rightly, or refused by name, soon and in little memory."""

import io
import json
import math
import os
import re
import resource
import shutil
import struct
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Everything, build, model_state, take_steps
from damage import damage
from loops import assert_same, wrap
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from maingrad.ddp import DistributedOptimizer, load_checkpoint, save_checkpoint
from maingrad.ddp.checkpoint_boxes import Piece
from maingrad.ddp.checkpoint_storage import open_checkpoint, read_pieces
from maingrad.launch import simulate
from maingrad.launch.safetensors_io import export_safetensors, load_safetensors

ZERO1 = {"use_distributed_optimizer": True, "bucket_size": 300}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "c"
    ddp, optimizer = build(torch.bfloat16, **ZERO1)
    take_steps(ddp, optimizer, range(1), 0)
    save_checkpoint(folder, ddp, optimizer, extra={"step": 1})
    return folder


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine, tmp_path / "c")
    return tmp_path / "c"


def refusal(folder: Path) -> str:
    """What a load says; within a second, and without much memory of Python's or of the process."""
    ddp, optimizer = build(torch.bfloat16, seed=1, **ZERO1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    began = time.process_time()
    try:
        load_checkpoint(folder, ddp, optimizer)
        said = ""
    except ValueError as error:
        said = str(error)
    seconds, (_, most) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 5.0, "a second, under a tracer"
    assert most < 100e6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100e3, "in KiB"
    return said


# ---- Metadata that was made to hurt. ----


def shared_tuples(depth: int) -> bytes:
    """Tuples of the one before, twice: 2 ** depth elements for whoever walks, hashes or prints them."""
    return b")\x94" + b"".join(
        b"h" + bytes([index]) * 1 + b"h" + bytes([index]) + b"\x86\x94" for index in range(depth)
    )


PREFIX = b"\x80\x04"
METADATA = b"\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93)\x81"
HOSTILE = {
    "a memo of a gigabyte": PREFIX + b"Nr\xff\xff\xff\x07.",
    "a string of a gigabyte": PREFIX + b"X\xff\xff\xff\x3f.",
    "bytes of a terabyte": PREFIX + b"\x8e" + struct.pack("<Q", 2**40) + b".",
    "a frame of a terabyte": PREFIX + b"\x95" + struct.pack("<Q", 2**40) + b"N.",
    "a key that takes years to hash": PREFIX + b"}" + shared_tuples(90) + b"Ns.",
    "a set of it": PREFIX + b"\x8f(" + shared_tuples(90) + b"\x90.",
    "sizes that take years to print": PREFIX + METADATA + b"}\x8c\x0cstorage_data" + shared_tuples(90) + b"sb.",
    "a deep nest": PREFIX + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a deep tuple": PREFIX + b")" + b"\x85" * 100_000 + b".",
    "nothing on the stack": PREFIX + b"\x87.",
    "no mark": PREFIX + b"Nt.",
    "no end": PREFIX + b"N" * 1000,
    "nothing": b"",
    "zeros": bytes(100_000),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.sampled(3)
def test_metadata_that_hurts_is_refused_by_name(checkpoint: Path, name: str) -> None:
    (checkpoint / ".metadata").write_bytes(HOSTILE[name])
    assert "/c/.metadata' is truncated or damaged (" in refusal(checkpoint)


def test_huge_files_are_not_read(checkpoint: Path, pristine: Path) -> None:
    for name in (".metadata", "maingrad.json"):
        os.truncate(checkpoint / name, 10**11)
        assert f"/c/{name}' is " in refusal(checkpoint)
        shutil.copy(pristine / name, checkpoint / name)


def test_few_bytes_that_claim_to_be_much_are_not_exported(tmp_path: Path) -> None:
    """A tensor of one element that all others are."""
    save_checkpoint(tmp_path / "c", torch.nn.Linear(2**9, 1, bias=False))
    for name in (".metadata", "maingrad.json"):
        content = (tmp_path / "c" / name).read_bytes()
        content = content.replace(b"M\x00\x02", b"J\x00\x00\x00\x40").replace(b"   512", b"   1073741824")
        content = re.sub(rb'"checksum": \d+', b'"checksum": null', content)
        (tmp_path / "c" / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata' is truncated or damaged"):
        export_safetensors(tmp_path / "c", tmp_path / "weights")


# ---- Manifests of other types. ----


def edited(folder: Path, path: tuple[str, ...], value: Any) -> None:
    manifest = json.loads((folder / "maingrad.json").read_text())
    manifest["checksum"] = None
    at = manifest
    for key in path[:-1]:
        at = at[key]
    if value is DELETED:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    (folder / "maingrad.json").write_text(json.dumps(manifest))


DELETED = object()
UP = ("parameters", "up.weight")
EDITS: dict[str, tuple[tuple[str, ...], Any]] = {
    "version: true": (("version",), True),
    "version: 1.0": (("version",), 1.0),
    "shape: '34'": ((*UP, "shape"), "34"),
    "shape: Infinity": ((*UP, "shape"), [float("inf"), 15]),
    "shape: a fraction": ((*UP, "shape"), [17.0, 15]),
    "shape: huge": ((*UP, "shape"), [2**40, 2**40]),
    "shape: many": ((*UP, "shape"), [1] * 10_000),
    "shape: another": ((*UP, "shape"), [15, 17]),
    "dtype: a list": ((*UP, "dtype"), ["bfloat16"]),
    "dtype: load": ((*UP, "dtype"), "load"),
    "group: true": ((*UP, "group"), True),
    "group: that is not there": ((*UP, "group"), 7),
    "master: 1": ((*UP, "has_master"), 1),
    "master: none": ((*UP, "has_master"), False),
    "state: emptied": ((*UP, "state"), {}),
    "state: a list": ((*UP, "state"), []),
    "state: many": ((*UP, "state"), {f"more{index}": "float32" for index in range(10_000)}),
    "step: missing": ((*UP, "scalars"), {}),
    "step: a list": ((*UP, "scalars", "step"), {"tensor": [1] * 1000, "dtype": "float32"}),
    "step: beyond": ((*UP, "scalars", "step"), {"tensor": 2**80, "dtype": "int64"}),
    "tied: to nothing": (("tied",), {"head.weight": "nowhere"}),
    "tied: a number": (("tied",), {"head.weight": 1}),
    "experts: Infinity": (("num_expert_sets",), float("inf")),
    "groups: a number": (("optimizer", "groups"), 1),
    "group: a number": (("optimizer", "groups"), [1]),
    "an option of nothing": (("optimizer", "groups"), [{"lr": {}}]),
    "id: a number": (("save_id",), 1),
    "id: another": (("save_id",), "maingrad-" + "0" * 32),
    "no buffers": (("buffers",), DELETED),
    "extra: missing": (("extra",), DELETED),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_manifest_of_other_types_is_refused_by_name(checkpoint: Path, name: str) -> None:
    edited(checkpoint, *EDITS[name])
    said = refusal(checkpoint)
    assert "maingrad.json' " in said or "manifest" in said or "up.weight" in said, said


@pytest.mark.parametrize(
    "field, message",
    [
        ("state", r"'optimizer\.state\.\S+' is in the checkpoint's metadata, though"),
        ("scalars", r"and no 'step', which AdamW"),
    ],
)
def test_what_an_optimizer_knows_may_not_be_missing_everywhere(checkpoint: Path, field: str, message: str) -> None:
    for name in json.loads((checkpoint / "maingrad.json").read_text())["parameters"]:
        edited(checkpoint, ("parameters", name, field), {})
    assert re.search(message, refusal(checkpoint))


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 200_000, b'{"format": 1e999}', b"\xff\xfe", b"null"])
def test_json_that_is_no_manifest_is_refused_by_name(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "maingrad.json").write_bytes(content)
    assert "/c/maingrad.json' " in refusal(checkpoint)


# ---- Damage that is drawn. ----


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and beside it its export."""
    folder = tmp_path_factory.mktemp("two") / "c"

    def save() -> None:
        ddp, optimizer = build(torch.bfloat16, **ZERO1)
        take_steps(ddp, optimizer, range(1), dist.get_rank())
        save_checkpoint(folder, ddp, optimizer, extra={"step": 1, "seconds": 0.25})

    simulate(save, 2)
    export_safetensors(folder, folder.parent / "weights.safetensors", dtype=torch.float32)
    return folder.parent


def assert_equal(found: Any, whole: Any) -> None:
    """Bitwise, in any containers."""
    assert type(found) is type(whole)
    if isinstance(found, dict):
        assert found.keys() == whole.keys()
        found, whole = list(found.values()), list(whole.values())
    if isinstance(found, list | tuple):
        assert len(found) == len(whole)
        for one, other in zip(found, whole, strict=True):
            assert_equal(one, other)
    elif isinstance(found, torch.Tensor):
        assert found.dtype == whole.dtype and torch.equal(found, whole)
    else:
        assert found == whole


def everything_loaded(folder: Path) -> Any:
    """Into a fresh model: its tensors, moments, and what else there is."""
    ddp, optimizer = build(torch.bfloat16, seed=1, **ZERO1)
    before = model_state(ddp)
    try:
        with limited():
            extra = load_checkpoint(folder / "c", ddp, optimizer)
    except ValueError as error:
        if "partly overwritten" not in str(error):
            assert_same(model_state(ddp), before)
        raise
    moments = [(part.name, part.master, part.state(), part.scalars()) for part in optimizer.slices]
    return model_state(ddp), moments, [{**group, "params": None} for group in optimizer.param_groups], extra


def weights_loaded(folder: Path) -> Any:
    model = Everything(torch.float32, seed=1)
    with limited(maps=10**11):
        load_safetensors(folder / "weights.safetensors", model)
    return model.state_dict()


@contextmanager
def limited(maps: int = 0) -> Iterator[None]:
    """A second, and 100 MB of address space beside files that are only mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    old = resource.getrlimit(resource.RLIMIT_AS)
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 100_000_000 + maps, old[1]))
    began = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
        assert time.process_time() - began < 1.0


FILES = ("c/maingrad.json", "c/.metadata", "c/__0_0.distcp", "c/__1_0.distcp", "weights.safetensors")


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(50, 1000, 50))])
def test_drawn_damage_is_refused_by_name_or_harmless(of_two_ranks: Path, tmp_path: Path, first: int) -> None:
    whole = {load: load(of_two_ranks) for load in (everything_loaded, weights_loaded)}
    refused = 0
    for seed in range(first, first + 50):
        folder = tmp_path / str(seed)
        shutil.copytree(of_two_ranks, folder)
        path = folder / FILES[seed % len(FILES)]
        done = damage(path, seed)
        load = weights_loaded if path.parent == folder else everything_loaded
        try:
            found = load(folder)
        except ValueError as error:
            refused += 1
            said = str(error)
        else:
            assert_equal(found, whole[load])
            said = path.name
        assert path.name in said, (seed, done, said)
        shutil.rmtree(folder)
    assert refused > 35, "most damage is damage"


def places_of_tensors(folder: Path) -> list[tuple[str, str, int, int]]:
    """(tensor, data file, place of its bytes, how many) of each chunk."""
    places = []
    for index, info in FileSystemReader(folder).read_metadata().storage_data.items():
        content = (folder / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entry = archive.getinfo("archive/data/0")
        name_length, extra_length = struct.unpack_from("<HH", content, entry.header_offset + 26)
        start = info.offset + entry.header_offset + 30 + name_length + extra_length
        places.append((index.fqn, info.relative_path, start, entry.file_size))
    return places


def with_another_bit(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_in_a_tensor_is_noticed(of_two_ranks: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two" / "c"
    shutil.copytree(of_two_ranks, folder.parent)
    places = [place for place in places_of_tensors(folder) if place[3]]
    assert any(key == "model.fixed" for key, *_ in places), "one that lies transposed is among them"
    for key, name, start, length in places:
        with_another_bit(folder / name, start + length // 2)
        with pytest.raises(ValueError, match=rf"/c/{name}' is damaged where '{re.escape(key)}' lies .*checksum"):
            read_everything(folder)
        with_another_bit(folder / name, start + length // 2)
    assert_equal(everything_loaded(folder.parent), everything_loaded(of_two_ranks))


def read_everything(folder: Path) -> None:
    """As a fully sharded model's rank does, whose pieces are not the chunks."""
    stored = open_checkpoint(folder)
    pieces = []
    for key, entry in stored.metadata.state_dict_metadata.items():
        numel = math.prod(entry.size)
        cut = min(1, numel)
        for start, end in ((0, cut), (cut, numel)):
            data = torch.empty(end - start, dtype=entry.properties.dtype)
            pieces.append(Piece((key,), tuple(entry.size), start, end, data))
    read_pieces(stored, pieces, None)


@pytest.mark.parametrize("name", ["weights.safetensors"])
def test_a_flipped_bit_in_an_export_is_noticed(of_two_ranks: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(of_two_ranks / name, tmp_path)
    size = (tmp_path / name).stat().st_size
    whole = weights_loaded(of_two_ranks)
    said = []
    for at in range(0, size, 97):
        with_another_bit(tmp_path / name, at)
        try:
            assert_equal(weights_loaded(tmp_path), whole)
        except ValueError as error:
            said.append(str(error))
        with_another_bit(tmp_path / name, at)
    assert all(name in each for each in said)
    assert len(said) > size // 97 - 5


def test_files_of_one_checkpoint_in_each_others_place_are_refused(tmp_path: Path) -> None:
    def save() -> None:
        model = wrap(nn.Linear(64, 64, bias=False), use_distributed_optimizer=True)
        save_checkpoint(tmp_path / "c", model, DistributedOptimizer(model))

    simulate(save, 2)
    load_checkpoint(tmp_path / "c", nn.Linear(64, 64, bias=False))
    first, second = (tmp_path / "c" / f"__{rank}_0.distcp" for rank in range(2))
    assert first.stat().st_size == second.stat().st_size
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(ValueError, match=r"/c/__0_0\.distcp' was written as '__1_0\.distcp': files of this"):
        load_checkpoint(tmp_path / "c", nn.Linear(64, 64, bias=False))


def test_a_save_without_checksums_loads(tmp_path: Path) -> None:
    """Torch has been told to write none."""
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(tmp_path / "c", Everything(seed=1))
    finally:
        torch.serialization.set_crc32_options(True)
    model = Everything()
    load_checkpoint(tmp_path / "c", model)
    assert_same(model.state_dict(), Everything(seed=1).state_dict())


def test_a_manifest_that_was_changed_by_hand_says_so(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "maingrad.json").read_text())
    manifest["extra"] = {"step": 2}
    (checkpoint / "maingrad.json").write_text(json.dumps(manifest))
    assert "where you have changed it yourself, set its checksum to null" in refusal(checkpoint)
    edited(checkpoint, ("extra",), {"step": 2})
    ddp, optimizer = build(torch.bfloat16, seed=1, **ZERO1)
    assert load_checkpoint(checkpoint, ddp, optimizer) == {"step": 2}
