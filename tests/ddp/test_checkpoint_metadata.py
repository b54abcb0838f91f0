"""torch's pickled metadata is read without running anything of it, and believed in nothing that can be checked."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import Everything
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.ddp.checkpoint_metadata import read_metadata


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "c", Everything())
    return tmp_path / "c"


def test_it_reads_what_torch_reads(checkpoint: Path) -> None:
    ours, torchs = read_metadata(checkpoint), FileSystemReader(checkpoint).read_metadata()
    assert ours.state_dict_metadata == torchs.state_dict_metadata
    assert {index: (info.relative_path, info.offset, info.length) for index, info in ours.storage_data.items()} == {
        index: (info.relative_path, info.offset, info.length) for index, info in torchs.storage_data.items()
    }
    assert str(checkpoint.parent) not in repr(torchs), "the file does not say where it was written"


# ---- Pickles that would do something. ----


class Calls:
    """Pickles to a call."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        self.call = (fn, args)

    def __reduce__(self) -> Any:
        return self.call


def hostile_pickles(witness: Path) -> dict[str, bytes]:
    touch = f"touch {witness}"
    as_text = f"open({str(witness)!r}, 'w')"
    return {
        "posix.system": pickle.dumps(Calls(os.system, touch)),
        "builtins.eval": pickle.dumps(Calls(eval, as_text)),
        "builtins.getattr": b"cbuiltins\ngetattr\n.",
        "torch.load": b"ctorch\nload\n(S'" + str(witness).encode() + b"'\ntR.",
        "torch.hub": b"ctorch\nhub\n.",
        "torch.distributed.checkpoint.metadata.os": b"ctorch.distributed.checkpoint.metadata\nos\n.",
        # Attributes of a name that is allowed, which protocol 4 can walk.
        "torch.distributed.checkpoint.metadata.Metadata.__init__.__globals__": (
            b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x1dMetadata.__init__.__globals__\x93."
        ),
        "a persistent id": b"\x8c\x01xQ.",
        "torch.distributed.checkpoint.filesystem.FileSystemReader": (
            b"ctorch.distributed.checkpoint.filesystem\nFileSystemReader\n."
        ),
    }


@pytest.mark.parametrize("name", hostile_pickles(Path()))
def test_a_pickle_that_names_anything_else_is_refused_by_that_name(checkpoint: Path, tmp_path: Path, name: str) -> None:
    witness = tmp_path / "it-ran"
    (checkpoint / ".metadata").write_bytes(hostile_pickles(witness)[name])
    with pytest.raises(ValueError, match=rf"is no checkpoint metadata: it asks for {name}, which could run"):
        load_checkpoint(checkpoint, Everything())
    assert not witness.exists()


def test_a_call_hidden_in_real_metadata_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    metadata = FileSystemReader(checkpoint).read_metadata()
    metadata.planner_data = {"model.scale": Calls(os.system, f"touch {tmp_path / 'it-ran'}")}
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"it asks for posix\.system"):
        load_checkpoint(checkpoint, Everything())
    assert not (tmp_path / "it-ran").exists()


@pytest.mark.parametrize(
    "tail",
    [
        b"}S'x'\nI1\nsb.",  # state for the class itself, as if it were an object of it
        b"(N}S'fields'\nI1\nstb.",
    ],
)
def test_a_pickle_cannot_change_a_class_that_outlives_it(checkpoint: Path, tail: bytes) -> None:
    before = dict(vars(Metadata))
    (checkpoint / ".metadata").write_bytes(b"ctorch.distributed.checkpoint.metadata\nMetadata\n" + tail)
    with pytest.raises(ValueError, match="truncated or damaged"):
        load_checkpoint(checkpoint, Everything())
    assert dict(vars(Metadata)) == before
    save_checkpoint(checkpoint, Everything())
    load_checkpoint(checkpoint, Everything())


# ---- Metadata that is not true. ----


def tensor(size: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorStorageMetadata:
    parts = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), parts)


def at(path: Any, offset: Any = 0, length: Any = 24) -> dict[MetadataIndex, Any]:
    return {MetadataIndex("a", (0, 0)): _StorageInfo(path, offset, length)}


WHOLE = tensor((2, 3), ((0, 0), (2, 3)))
HERE = at("__0_0.distcp")
TWO = {**HERE, MetadataIndex("a", (1, 0)): _StorageInfo("__0_0.distcp", 24, 12)}
UNTRUE: dict[str, tuple[Metadata, str]] = {
    "a gap": (Metadata({"a": tensor((2, 3), ((0, 0), (1, 3)))}, storage_data=HERE), r"elements \[3, 6\) are missing"),
    "an overlap": (
        Metadata({"a": tensor((2, 3), ((0, 0), (2, 3)), ((1, 0), (1, 3)))}, storage_data=TWO),
        r"elements \[3, 6\) are there twice",
    ),
    "outside": (Metadata({"a": tensor((2, 3), ((0, 0), (3, 3)))}, storage_data=HERE), "are no run of elements"),
    "nowhere": (Metadata({"b": WHOLE}, storage_data=HERE), "a chunk of 'b' lies nowhere"),
    "too much": (
        Metadata({"a": WHOLE}, storage_data={**HERE, MetadataIndex("b", (0,)): _StorageInfo("x", 0, 8)}),
        "1 chunks in 2 places",
    ),
    "an object": (Metadata({"a": BytesStorageMetadata()}, storage_data=HERE), "a BytesStorageMetadata where a Tensor"),
    "another folder": (Metadata({"a": WHOLE}, storage_data=at("../x")), "outside the checkpoint"),
    "the root": (Metadata({"a": WHOLE}, storage_data=at("/etc/hostname")), "outside the checkpoint"),
    "negative": (Metadata({"a": WHOLE}, storage_data=at("x", -1)), "-1 where a size"),
    "no number": (Metadata({"a": WHOLE}, storage_data=at("x", "1")), "'1' where a size"),
    "one place for two": (
        Metadata(
            {"a": WHOLE, "b": WHOLE},
            storage_data={**HERE, MetadataIndex("b", (0, 0)): _StorageInfo("__0_0.distcp", 23, 24)},
        ),
        "'b' lies where another chunk does",
    ),
    "one chunk for many": (
        Metadata(dict.fromkeys("abc", WHOLE), storage_data=HERE),
        "more chunks than the 1 places",
    ),
    "few bytes for many": (Metadata({"a": WHOLE}, storage_data=at("x", 0, 23)), r"of sizes \[2, 3\] in 23 bytes"),
    "beyond numbers": (Metadata({"a": WHOLE}, storage_data=at("x", 2**70)), r"where a size"),
    "no places": (Metadata({"a": WHOLE}), "'NoneType' object"),
}


@pytest.mark.parametrize("metadata, message", UNTRUE.values(), ids=UNTRUE.keys())
def test_metadata_that_cannot_be_true_is_refused(tmp_path: Path, metadata: Metadata, message: str) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata' is truncated or damaged .*" + message):
        read_metadata(tmp_path)


def test_every_truncation_is_an_error_that_names_the_file(checkpoint: Path) -> None:
    path = checkpoint / ".metadata"
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"\.metadata' is truncated or damaged"):
            read_metadata(checkpoint)
