"""Files that were damaged, by accident or on purpose: loaded rightly, or refused by name, soon and in little memory.

What is drawn: a file of the checkpoint, and what becomes of it. Files have no checksums: a value that became another of
its kind (a learning rate, an element of a tensor) loads as that.
"""

import json
import os
import random
import re
import resource
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import build, take_steps

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.launch.safetensors_io import export_safetensors

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
        (tmp_path / "c" / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata' is truncated or damaged"):
        export_safetensors(tmp_path / "c", tmp_path / "weights")


# ---- Manifests of other types. ----


def edited(folder: Path, path: tuple[str, ...], value: Any) -> None:
    manifest = json.loads((folder / "maingrad.json").read_text())
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


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def swapped(content: bytes, draw: random.Random) -> bytes:
    """Two runs in each other's place."""
    length = draw.randrange(1, 65)
    first, second = sorted(draw.randrange(max(1, len(content) - length)) for _ in range(2))
    second = max(second, min(first + length, len(content)))
    return (
        content[:first]
        + content[second : second + length]
        + content[first + length : second]
        + content[first : first + length]
        + content[second + length :]
    )


def repeated(content: bytes, draw: random.Random) -> bytes:
    at, length = draw.randrange(len(content)), draw.randrange(1, 2000)
    return content[:at] + content[at : at + length] * draw.choice((2, 3, 500)) + content[at + length :]


def noisy(content: bytes, draw: random.Random) -> bytes:
    at, length = draw.randrange(len(content)), draw.randrange(1, 100)
    return content[:at] + draw.randbytes(length) + content[at + length :]


def retyped(content: bytes, draw: random.Random) -> bytes:
    """One value of the JSON becomes one of another kind; of other files, one opcode another."""
    if content[:1] != b"{":
        at = draw.randrange(len(content))
        return content[:at] + bytes([draw.choice(b"()]}N\x85\x86\x87hjqr\x94RbuseatXKMJ.")]) + content[at + 1 :]
    manifest = json.loads(content)
    holder: Any = manifest
    while True:
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if not (isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.85):
            break
        holder = holder[key]
    holder[key] = draw.choice((None, True, -1, 2**70, 1.5, float("inf"), float("nan"), "34", "", [], {}, [[]], [{}], 7))
    return json.dumps(manifest).encode()


DAMAGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (cut, flipped, swapped, repeated, noisy, retyped)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(40, 1000, 40))])
def test_drawn_damage_is_refused_by_name_or_harmless(pristine: Path, tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 40):
        draw = random.Random(seed)
        folder = tmp_path / f"c{seed}"
        shutil.copytree(pristine, folder)
        # Most of what can go wrong is in the two small files.
        path = folder / draw.choice(("maingrad.json", "maingrad.json", ".metadata", ".metadata", "__0_0.distcp"))
        damage = draw.choice(DAMAGES)
        path.write_bytes(damage(path.read_bytes(), draw))
        said = refusal(folder)
        assert not said or any(word in said for word in (path.name, "manifest", "metadata", "checkpoint")), (seed, said)
        shutil.rmtree(folder)
