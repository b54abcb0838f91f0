"""The manifest's index says where tensors lie; everything in the index that can be checked is checked."""

import copy
from typing import Any

import pytest
import torch

from maingrad.ddp.checkpoint.files.index import Chunk, Index, StoredTensor

TRUE: dict[str, Any] = {
    "files": [["__0_0.distcp", 1000], ["__1_0.distcp", 100]],
    "tensors": {
        "model.a": {"dtype": "float32", "shape": [2, 3], "chunks": [[4, 0, 64, 7], [2, 1, 92, 8]]},
        "model.b": {"dtype": "bfloat16", "shape": [], "chunks": [[1, 0, 128, 9]]},
        "model.c": {"dtype": "int64", "shape": [0, 4], "chunks": []},
    },
}


def test_it_is_what_was_written() -> None:
    index = Index.from_json(copy.deepcopy(TRUE))
    assert index.to_json() == TRUE
    assert index.files == {"__0_0.distcp": 1000, "__1_0.distcp": 100}
    first, second = Chunk(0, 4, "__0_0.distcp", 64, 7), Chunk(4, 6, "__1_0.distcp", 92, 8)
    stored = index.tensors["model.a"]
    assert stored == StoredTensor(torch.float32, (2, 3), [first, second])
    for start, end, found in ((0, 6, [first, second]), (3, 4, [first]), (4, 5, [second]), (3, 5, [first, second])):
        assert list(stored.overlapping(start, end)) == found
    assert not list(stored.overlapping(4, 4)) and not list(index.tensors["model.c"].overlapping(0, 0))


A = ("tensors", "model.a")
LIES: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "a gap": ((*A, "chunks"), [[4, 0, 64, 7]], r"'model\.a' of shape \[2, 3\] has chunks of 4 elements"),
    "too many": ((*A, "chunks", 0, 0), 5, "has chunks of 7 elements"),
    "behind its file": ((*A, "chunks", 1, 2), 93, r"2 elements does not fit into '__1_0\.distcp'"),
    "far behind its file": ((*A, "chunks", 1, 2), 2**70, "does not fit into"),
    "before its file": ((*A, "chunks", 1, 2), -8, r"\[2, 1, -8, 8\] as a chunk"),
    "in no file": ((*A, "chunks", 1, 1), 2, r"\[2, 2, 92, 8\] as a chunk"),
    "fewer than none": ((*A, "chunks", 1, 0), -2, r"\[-2, 1, 92, 8\] as a chunk"),
    "another number": ((*A, "chunks", 1, 0), 2.0, r"\[2\.0, 1, 92, 8\] as a chunk"),
    "no numbers": ((*A, "chunks", 1), "2", "'2' as a chunk"),
    "a number less": ((*A, "chunks", 1), [2, 1, 92], "as a chunk"),
    "no chunks": ((*A, "chunks"), {}, r"\{\} as the chunks"),
    "more than there is": ((*A, "shape"), [2**30, 2**31], "has chunks of 6 elements"),
    "beyond numbers": ((*A, "shape"), [2**40, 2**40], r"'model\.a' has shape"),
    "wider": ((*A, "dtype"), "complex128", "does not fit into"),
    "no dtype": ((*A, "dtype"), "Tensor", "'Tensor' is no dtype"),
    "one place for many": (
        ("tensors",),
        {f"model.{each}": {"dtype": "float32", "shape": [20], "chunks": [[20, 1, 0, 0]]} for each in "ab"},
        r"a chunk of 'model\.b' of 20 elements does not fit into '__1_0\.distcp'",
    ),
    "a file twice": (("files", 1, 0), "__0_0.distcp", "a data file is listed twice"),
    "a file elsewhere": (("files", 1, 0), "../__1_0.distcp", "is no name of a data file"),
    "a file of the system": (("files", 1, 0), "/etc/hostname", "is no name of a data file"),
    "a file's size is none": (("files", 1, 1), None, "None as the size"),
}


@pytest.mark.parametrize("path, value, message", LIES.values(), ids=LIES.keys())
def test_an_index_that_cannot_be_true_is_refused(path: tuple[str | int, ...], value: Any, message: str) -> None:
    content = copy.deepcopy(TRUE)
    at: Any = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises((TypeError, ValueError), match=message):
        Index.from_json(content)


def test_a_name_that_begins_as_one_of_a_data_file_is_refused() -> None:
    for name in ("__1_0.distcp.bak", "__1_0.distcp/../../secret", "__1_0.distcp\n"):
        content = copy.deepcopy(TRUE)
        content["files"][1][0] = name
        with pytest.raises(ValueError, match="is no name of a data file"):
            Index.from_json(content)
