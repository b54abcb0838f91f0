"""Data: every source, its errors, and batches that do not depend on the number of ranks."""

import dataclasses
import errno
import hashlib
import os
import re
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maingrad.launch.config.run import DataConfig, TrainConfig
from maingrad.launch.data import tokens as token_files
from maingrad.launch.data.batches import (
    Batch,
    DataError,
    load_corpus,
    stdlib_files,
    validation_windows,
)
from maingrad.launch.data.bigram import bigram_loss
from maingrad.launch.data.indexed import read_indexed, write_indexed
from maingrad.launch.data.order import Blend
from maingrad.launch.data.replacing import replacing
from maingrad.launch.data.sequences import IGNORED, Body, Sampler, SequenceSet
from maingrad.launch.data.sources import open_body
from maingrad.launch.data.tokenizing import tokenize_files
from maingrad.launch.data.tokens import Digest, FileTokens, Tokens, digest_of, digest_of_borders

RANDOM = [306, 630, 844, 613, 67, 83]
EPOCHS = {0: [80, 890, 730, 420, 300, 680, 420, 950], 1: [240, 530, 540, 930, 500, 50, 310, 140]}
ALPHABET = Body(Tokens([np.arange(1000, dtype=np.uint16)]))


def batch(
    step: int = 0, microbatch: int = 0, rank: int = 0, num_microbatches: int = 1, world_size: int = 1, **changes: Any
) -> Batch:
    """The rows that one rank has of a microbatch, as ``maingrad train`` takes them from the global batch."""
    settings = {"seed": 1, "global_batch_size": 24, "sequence_length": 10, **changes}
    rows = settings["global_batch_size"] // (num_microbatches * world_size)
    first = (microbatch * world_size + rank) * rows
    sampler = Sampler([ALPHABET], DataConfig(), TrainConfig(**settings))
    return sampler.batch(step, slice(first, first + rows))


@pytest.mark.in_turn
def test_standard_library_is_real_text():
    corpus = load_corpus(DataConfig(), sequence_length=128)
    files = stdlib_files()
    assert len(corpus.train) > 2_000_000
    assert 0.01 < len(corpus.validation) / len(corpus.train) < 0.3
    assert len(corpus.train) + len(corpus.validation) == sum(path.stat().st_size for path in files)
    assert not any({"test", "site-packages"}.intersection(path.parts) for path in files)
    assert b"def " in corpus.train[:].tobytes()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of 300 small files, each of 9 bytes that name it, and of files that are none of it."""
    for number in range(300):
        path = tmp_path / "lib" / f"{number % 7}" / f"{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"f({number:05})\n")
    for other in ("test/a.py", "0/__pycache__/b.py", "site-packages/c/d.py", "0/e.txt"):
        (tmp_path / "lib" / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / other).write_text("no source of the library")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))
    return tmp_path / "lib"


def sides(**settings: Any) -> tuple[set[bytes], set[bytes]]:
    """The files to train on, and those that are held back."""
    corpus = load_corpus(DataConfig(**settings), sequence_length=8)
    both = [set(part[:].tobytes().splitlines()) for part in (corpus.train, corpus.validation)]
    return both[0], both[1]


def test_files_stay_on_their_side_when_more_is_held_back_and_others_come(library: Path):
    train, held = sides()
    assert "(300 files under " in load_corpus(DataConfig(), sequence_length=8).description
    assert len(train) + len(held) == 300 and 3 <= len(held) <= 30
    less_train, more_held = sides(validation_fraction=0.5)
    assert 100 < len(more_held) < 200 and held < more_held and less_train < train
    (library / "0" / "new.py").write_text("f(new11)\n")
    new_train, new_held = sides(validation_fraction=0.5)
    assert (new_train | new_held) - (train | held) == {b"f(new11)"}
    assert less_train <= new_train and more_held <= new_held


def test_files_of_a_standard_library_come_in_order(library: Path):
    tokens = load_corpus(DataConfig(), sequence_length=8).train[:].tobytes().splitlines()
    names = [path.read_bytes().strip() for path in sorted(library.rglob("[0-9]*.py"))]
    assert tokens == [name for name in names if name in set(tokens)]
    assert len(load_corpus(DataConfig(max_tokens=100), sequence_length=8).train) == 100


def test_a_standard_library_whose_documents_end(library: Path):
    (body,) = load_corpus(DataConfig(end_of_document=10), sequence_length=8).bodies
    assert body.document_starts().tolist() == list(range(0, len(body.tokens), 9))


def test_text_is_bytes_and_its_tail_is_held_back(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    (tmp_path / "b").write_bytes(bytes(range(100, 200)))
    config = DataConfig(source="text", paths=(str(tmp_path / "a"), str(tmp_path / "b")), validation_fraction=0.25)
    corpus = load_corpus(config, sequence_length=8)
    assert corpus.train[:].tolist() == list(range(150))
    assert corpus.validation[:].tolist() == list(range(150, 200))


def test_validation_files_of_their_own_and_max_tokens(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    (tmp_path / "b").write_bytes(bytes(range(100, 130)))
    config = DataConfig(
        source="text", paths=(str(tmp_path / "a"),), validation_paths=(str(tmp_path / "b"),), max_tokens=60
    )
    corpus = load_corpus(config, sequence_length=8)
    assert (corpus.train[:].tolist(), corpus.validation[:].tolist()) == (list(range(60)), list(range(100, 130)))
    short = load_corpus(dataclasses.replace(config, max_tokens=20), sequence_length=8)
    assert (len(short.train), len(short.validation)) == (20, 30), "validation data stay whole"
    weighted = dataclasses.replace(config, paths=config.paths * 2, weights=(1.0, 2.0), order="epochs", max_tokens=None)
    found = load_corpus(weighted, sequence_length=8)
    assert [len(body.tokens) for body in found.bodies] == [100, 100]
    assert [len(body.tokens) for body in found.validation_bodies] == [30]


def test_what_is_held_back_is_rounded_to_the_nearest_token(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(range(99)))
    for fraction, held in ((0.1, 10), (0.2, 20), (0.25, 25), (0.33, 33), (0.104, 10)):
        config = DataConfig(source="text", paths=(str(tmp_path / "a"),), validation_fraction=fraction)
        assert len(load_corpus(config, sequence_length=4).validation) == held


def test_the_side_of_a_file_does_not_depend_on_where_the_library_lies(library: Path, monkeypatch: pytest.MonkeyPatch):
    before = sides(validation_fraction=0.5)
    library.rename(library.with_name("moved"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(library.with_name("moved")))
    assert sides(validation_fraction=0.5) == before


def test_a_pair_of_files_of_different_lengths_is_no_pair(tmp_path: Path):
    """More tokens than the index declares, and an index whose sequences have less than no token."""
    write_indexed(tmp_path / "set", [[5, 6, 7]], dtype="uint8")
    (tmp_path / "set.bin").write_bytes(bytes(4))
    with pytest.raises(DataError, match=r"holds 4 tokens and .* declares 3: they are not of one pair"):
        read_indexed(tmp_path / "set")
    sequences = struct.pack("<3i3q2q", 3, -1, 2, 0, 3, 2, 0, 3)
    (tmp_path / "set.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, 3, 2) + sequences)
    with pytest.raises(DataError, match="sequences do not follow each other"):
        read_indexed(tmp_path / "set")


def test_the_largest_token_is_that_of_inputs_and_targets():
    assert Batch(torch.tensor([[9, 2]]), torch.tensor([[2, 3]])).largest == 9
    assert Batch(torch.tensor([[1, 2]]), torch.tensor([[2, 8]])).largest == 8


def test_a_target_that_begins_a_document_does_not_count():
    """Also the last target, whose token is no input; a token before the sequence begins nothing in it."""
    body = Body(Tokens([np.arange(12, dtype=np.uint16)]), np.array([0, 4, 8]))
    row = SequenceSet(body, 4, "mask").row_at(4)
    assert (row.targets.tolist(), row.positions.tolist()) == ([5, 6, 7, IGNORED], [0, 1, 2, 3])
    row = SequenceSet(body, 4, "mask").row_at(5)
    assert (row.targets.tolist(), row.positions.tolist()) == ([6, 7, IGNORED, 9], [0, 1, 2, 0])


def test_weighted_paths_are_cut_one_by_one(tmp_path: Path):
    """Each has its own end for validation, and its own ``max_tokens``."""
    for number, length in enumerate((40, 80)):
        (tmp_path / str(number)).write_bytes(bytes(range(100 * number, 100 * number + length)))
    settings: dict[str, Any] = {"paths": (str(tmp_path / "0"), str(tmp_path / "1")), "validation_fraction": 0.25}
    config = DataConfig(source="text", weights=(1.0, 3.0), order="epochs", max_tokens=35, **settings)
    corpus = load_corpus(config, sequence_length=8)
    found = [[body.tokens[:].tolist() for body in bodies] for bodies in (corpus.bodies, corpus.validation_bodies)]
    assert found == [[[*range(30)], [*range(100, 135)]], [[*range(30, 40)], [*range(160, 180)]]]
    held = DataConfig(source="text", paths=settings["paths"], validation_paths=settings["paths"])
    assert load_corpus(held, sequence_length=8).validation[:].tolist() == [*range(40), *range(100, 180)]


@pytest.mark.parametrize(
    ("code", "stored", "dtype"),
    [(1, "u1", "uint8"), (2, "i1", "uint8"), (3, "<i2", "uint16"), (4, "<i4", "uint32"), (5, "<i8", "uint64")],
)
def test_an_index_of_another_program_may_have_signed_tokens(tmp_path: Path, code: int, stored: str, dtype: str):
    np.array([5, 100, 7], dtype=stored).tofile(tmp_path / "set.bin")
    sequences = struct.pack("<iq2q", 3, 0, 0, 1)
    (tmp_path / "set.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 1, 2) + sequences)
    tokens, starts = read_indexed(tmp_path / "set")
    assert (tokens[:].tolist(), tokens.dtype.name, starts.tolist()) == ([5, 100, 7], dtype, [0])


@pytest.mark.parametrize("source", ["text", "tokens", "megatron"])
def test_an_end_of_document_counts_beside_the_documents_of_a_source(tmp_path: Path, source: Any):
    write_indexed(tmp_path / "set", [[5, 1, 6], [7]], dtype="uint8")
    path = str(tmp_path / ("set" if source == "megatron" else "set.bin"))
    config = DataConfig(source=source, paths=(path,), end_of_document=1)
    assert open_body(config, path).end == 1
    assert open_body(DataConfig(source=source, paths=(path,)), path).end is None


def test_a_token_that_was_added_to_a_tokenizer_counts_in_the_width(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {chr(1000 + number): number for number in range(256)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=chr(1000)))
    tokenizer.add_tokens(["<more>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text("<more>")
    tokenize_files(tmp_path / "set", [tmp_path / "text"], tmp_path / "tokenizer.json", None, None)
    assert read_indexed(tmp_path / "set").tokens[:].tolist() == [256]


def test_files_of_several_widths_are_one_row_of_tokens() -> None:
    tokens = Tokens([np.array([5, 250], np.uint8), np.array([60000], np.uint16), np.array([70000], np.uint32)])
    assert tokens[:].tolist() == [5, 250, 60000, 70000]


@pytest.mark.parametrize("dtype, largest", [("uint16", 2**16 - 1), ("uint32", 2**31)])
def test_token_files_stay_on_the_disk(tmp_path: Path, dtype: Any, largest: int):
    tokens = np.array([5, largest] * 100, dtype=np.dtype(dtype).newbyteorder("<"))
    tokens.tofile(tmp_path / "tokens.bin")
    config = DataConfig(source="tokens", paths=(str(tmp_path / "tokens.bin"),), token_dtype=dtype)
    corpus = load_corpus(config, sequence_length=8)
    (part,) = corpus.bodies[0].tokens._parts
    assert isinstance(part, FileTokens)
    assert corpus.train[3:5].tolist() == [largest, 5]
    read = validation_windows(corpus.bodies[0], count=1, sequence_length=8)
    assert read.inputs.tolist() == [[5, largest] * 4]
    assert read.inputs.dtype == torch.int64


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    path = tmp_path / "data.bin"
    path.write_bytes(b"x" * 1000)

    def refuse(*args: Any, **kwargs: Any) -> None:  # the user who runs the tests may have permission to read every file
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=rf"data file '{path}' cannot be read \({os.strerror(number)}\)"):
        load_corpus(DataConfig(source="text", paths=(str(path),)), sequence_length=8)


def test_a_read_that_gives_less_than_it_was_asked_for_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "tokens.bin"
    np.arange(100, dtype=np.uint16).tofile(path)
    tokens, pread = FileTokens(path, np.dtype(np.uint16)), os.pread
    monkeypatch.setattr(os, "pread", lambda file, wanted, at: pread(file, min(wanted, 7), at))
    assert tokens[10:40].tolist() == list(range(10, 40))
    assert tokens[40:10].tolist() == [] and len(tokens) == 100


def test_a_file_whose_disk_fails_while_it_is_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "tokens"
    np.arange(50, dtype=np.uint16).tofile(path)
    tokens = FileTokens(path, np.dtype(np.uint16))

    def fail(*args: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(DataError, match=rf"data file '{path}' cannot be read \({os.strerror(errno.EIO)}\)"):
        tokens[3:5]


def test_a_file_that_takes_the_place_of_an_open_one_is_not_read(tmp_path: Path):
    for name, first in (("tokens", 0), ("later", 100)):
        np.arange(first, first + 50, dtype=np.uint16).tofile(tmp_path / name)
    tokens = FileTokens(tmp_path / "tokens", np.dtype(np.uint16))
    (tmp_path / "later").rename(tmp_path / "tokens")
    assert tokens[5:8].tolist() == [5, 6, 7]


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path):
    path = tmp_path / "tokens.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    corpus = load_corpus(DataConfig(source="tokens", paths=(str(path),)), sequence_length=8)
    assert sample_of(corpus.bodies[0]).inputs.max() > 900
    os.truncate(path, 1001)
    with pytest.raises(DataError, match=rf"data file '{path}' has become shorter since the run began: 1001 bytes"):
        sample_of(corpus.bodies[0])
    with pytest.raises(DataError, match="has become shorter"):
        validation_windows(corpus.validation_bodies[0], count=1, sequence_length=8)
    assert corpus.train[:500].tolist() == list(range(500)), "what is there can be read"


def sample_of(body: Body) -> Batch:
    sampler = Sampler([body], DataConfig(), TrainConfig(seed=0, sequence_length=8, global_batch_size=64))
    return sampler.batch(0, slice(0, 64))


def test_a_part_of_a_part_is_counted_from_its_beginning(tmp_path: Path) -> None:
    tokens = np.arange(100, dtype=np.uint8)
    (tmp_path / "tokens.bin").write_bytes(tokens.tobytes())
    inner = Tokens([FileTokens(tmp_path / "tokens.bin", tokens.dtype)]).part(10, 90).part(5, 20)
    assert inner[:].tolist() == tokens[15:30].tolist()
    assert inner.part(10, 99)[:].tolist() == tokens[25:30].tolist()


def digest_of_array(tokens: np.ndarray) -> Digest:
    return digest_of(Tokens([tokens]))


def test_a_digest_is_of_every_block() -> None:
    tokens = np.zeros(3 * token_files._DIGEST_BLOCK, dtype=np.uint8)
    digest = digest_of_array(tokens)
    for place in (0, token_files._DIGEST_BLOCK, len(tokens) - 1):
        tokens[place] = 1
        assert digest_of_array(tokens) != digest
        tokens[place] = 0


def test_digests_tell_data_apart_and_parts_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "tokens.bin"
    tokens = np.arange(5000, dtype=np.uint16)
    tokens.tofile(path)
    whole = Tokens([FileTokens(path, tokens.dtype)])
    assert digest_of(whole) == digest_of_array(tokens) == digest_of(whole.part(0, 5000))
    assert digest_of(whole.part(7, 4000)) == digest_of_array(tokens[7:4000]) != digest_of_array(tokens[8:4001])
    assert digest_of(whole).sha256 == hashlib.sha256(tokens.tobytes()).hexdigest(), "checkpoints hold it"
    tokens[4321] += 1
    assert digest_of_array(tokens) != digest_of(whole)
    monkeypatch.setattr(token_files, "_DIGEST_BLOCK", 64)
    monkeypatch.setattr(token_files, "_DIGEST_BLOCKS", 16)
    assert digest_of(whole.part(0, 4000)) == digest_of_array(tokens[:4000]), "a sample of what is large"
    assert digest_of_array(tokens[:4000]) != digest_of_array(np.roll(tokens[:4000], 1))
    blocks = [tokens[start : start + 32].tobytes() for start in (np.arange(16) * (4000 - 32) / 15).astype(int)]
    assert digest_of_array(tokens[:4000]).sha256 == hashlib.sha256(b"".join(blocks)).hexdigest()
    for length in (33, 500, 511, 512):
        whole_of = hashlib.sha256(tokens[:length].tobytes()).hexdigest()
        assert digest_of_array(tokens[:length]).sha256 == whole_of, "all of what is small"
    assert digest_of_array(tokens[:520]).sha256 != hashlib.sha256(tokens[:520].tobytes()).hexdigest()
    sampled = digest_of_array(tokens[:4000])
    tokens[3999] += 1
    assert digest_of_array(tokens[:4000]) != sampled, "from the first to the last"


def test_what_differs_is_said_and_borders_only_where_they_were_noted():
    """Of data that have grown or shrunk, that are others, or that have other borders."""
    noted, unknown = Digest(10, "a", "b"), Digest(10, "a")
    for now in (noted, unknown, Digest(10, "a", "c")):
        assert unknown.says_otherwise(now) is None
        assert noted.says_otherwise(now) == (None if now is noted else "had other borders of documents or paths")
    for tokens in (9, 11):
        assert noted.says_otherwise(Digest(tokens, "z", "b")) == f"had 10 tokens, and now {tokens}"
    assert noted.says_otherwise(Digest(10, "z", "b")) == "had other tokens"


def test_borders_belong_to_a_digest(tmp_path: Path):
    """Where documents begin, and where weighted paths end, which the tokens alone do not tell."""

    def digests(documents: str, *paths: list[int]) -> dict[str, Digest]:
        names = []
        for number, lengths in enumerate(paths):
            names.append(str(tmp_path / f"{number}"))
            first = sum(map(sum, paths[:number]))
            ends = np.cumsum([first, *lengths])
            rows = [np.arange(a, b) % 200 for a, b in pairwise(ends.tolist())]
            write_indexed(names[-1], rows, dtype="uint8")
        weights = (1.0,) * len(paths) if len(paths) > 1 else ()
        settings: dict[str, Any] = {"order": "epochs", "documents": documents, "weights": weights}
        config = DataConfig(source="megatron", paths=tuple(names), **settings)
        return load_corpus(config, sequence_length=8).digests(documents)

    assert digests("mask", [100, 300]) == digests("mask", [100, 300])
    for documents, differ in (("mask", True), ("pad", True), ("join", False)):
        assert (digests(documents, [100, 300])["training"] != digests(documents, [101, 299])["training"]) is differ
    one, other = digests("join", [100, 100], [200]), digests("join", [100, 120], [180])
    assert one["training"].says_otherwise(other["training"]) is not None
    assert one["training"].borders != other["training"].borders, "as many tokens, otherwise shared out to paths"
    ids = np.array([0, 4])
    borders = [(10, None)], [(10, ids)], [(10, ids + 1)], [(11, None)], [(5, None), (5, None)], [(10, ids[:1])]
    assert len({digest_of_borders(each) for each in borders}) == len(borders)
    assert digest_of_borders([(10, ids.astype(">i8"))]) == digest_of_borders([(10, ids)])
    assert digest_of_borders([(10, None)]) == hashlib.sha256(b"10 unknown ").hexdigest(), "checkpoints hold it"
    other = digests("join", [100, 100], [200])
    write_indexed(tmp_path / "1", [np.zeros(200)], dtype="uint8")
    settings = {"weights": (1.0, 1.0), "paths": (str(tmp_path / "0"), str(tmp_path / "1"))}
    changed = load_corpus(DataConfig(source="megatron", order="epochs", **settings), sequence_length=8).digests("join")
    for name in ("training", "validation"):
        assert changed[name].borders == other[name].borders and changed[name].sha256 != other[name].sha256
    before_borders_were_noted = one["training"]._replace(borders="")
    assert before_borders_were_noted.says_otherwise(one["training"]) is None


@pytest.mark.parametrize(
    "content, settings, message",
    [
        (None, {}, r"'.*data\.bin' does not exist .*correct data\.paths"),
        (b"", {}, r"'.*data\.bin' is empty"),
        (
            b"abc",
            {"source": "tokens"},
            r"'.*data\.bin' holds 3 bytes, not a whole number of uint16 tokens.*token_dtype",
        ),
        (b"x" * 64, {"validation_fraction": 0.5}, r"32 training tokens are too few for one sequence of 32 tokens"),
        (b"x" * 66, {"max_tokens": 32}, r"32 training tokens are too few.*train\.sequence_length below 32"),
        (b"x" * 8, {}, r"8 training tokens are too few for one sequence of 32 tokens.*lower train\.sequence_length"),
        (b"x" * 100, {"validation_fraction": 0.1}, r"10 validation tokens are too few.*data\.validation_fraction"),
    ],
)
def test_unusable_files(tmp_path: Path, content: bytes | None, settings: dict[str, Any], message: str):
    path = tmp_path / "data.bin"
    if content is not None:
        path.write_bytes(content)
    settings = {"source": "text", "validation_fraction": 0.01, **settings}
    with pytest.raises(DataError, match=message):
        load_corpus(DataConfig(paths=(str(path),), **settings), sequence_length=32)


def test_a_folder_is_no_file(tmp_path: Path):
    with pytest.raises(DataError, match="is a folder"):
        load_corpus(DataConfig(source="text", paths=(str(tmp_path),)), sequence_length=8)


def test_sequence_longer_than_the_standard_library(library: Path):
    with pytest.raises(DataError, match=re.escape("standard library source")):
        load_corpus(DataConfig(), sequence_length=10**9)


def test_no_standard_library_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match=r'no Python source under .*set data\.source = "text"'):
        load_corpus(DataConfig(), sequence_length=8)


def test_targets_are_the_next_tokens():
    inputs, targets, _ = batch()
    assert inputs.shape == targets.shape == (24, 10)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, inputs + 1)


def test_same_seed_same_batch_other_step_other_batch():
    assert torch.equal(batch(step=3).inputs, batch(step=3).inputs)
    assert not torch.equal(batch(step=3).inputs, batch(step=4).inputs)
    assert not torch.equal(batch(step=3).inputs, batch(step=3, seed=2).inputs)


def test_which_rows_are_read_is_that_of_other_versions(tmp_path: Path):
    """A run goes on from a checkpoint that another version has written, in either order, with and without weights."""
    assert batch(step=3).inputs[:6, 0].tolist() == RANDOM
    assert Blend.of([2.0, 1.0]).sets[:7].tolist() == [0, 1, 0, 0, 1, 0, 0]
    assert Blend.of([1.0, 1.0, 2.0]).sets.tolist() == [2, 0, 1, 2]
    data = DataConfig(source="text", paths=("a", "b"), weights=(1.0, 1.0), order="epochs")
    for seed, begins in EPOCHS.items():
        sampler = Sampler([ALPHABET] * 2, data, TrainConfig(seed=seed, global_batch_size=8, sequence_length=10))
        assert sampler.batch(2, slice(0, 8)).inputs[:, 0].tolist() == begins


def test_documents_without_a_target_make_no_sequence():
    body = Body(Tokens([np.arange(20, dtype=np.uint8)]), np.arange(20))
    data = DataConfig(source="megatron", paths=("a",), documents="pad", order="epochs")
    with pytest.raises(DataError, match=r"path 1 of data\.paths has no sequence: 20 training tokens"):
        Sampler([body], data, TrainConfig(sequence_length=8))


@given(
    ranks=st.sampled_from([1, 2, 3, 4, 6]),
    num_microbatches=st.sampled_from([1, 2, 4]),
    step=st.integers(0, 10**6),
    seed=st.integers(0, 2**63),
)
def test_ranks_together_read_what_one_process_reads(ranks: int, num_microbatches: int, step: int, seed: int):
    """In each microbatch and in the same order, so that means over ranks are means over the same rows."""
    for microbatch in range(num_microbatches):
        common = {"num_microbatches": num_microbatches, "global_batch_size": 24 * num_microbatches, "seed": seed}
        alone = batch(step, microbatch, **common)
        parts = [batch(step, microbatch, rank, world_size=ranks, **common) for rank in range(ranks)]
        assert torch.equal(alone.inputs, torch.cat([part.inputs for part in parts]))
        assert torch.equal(alone.targets, torch.cat([part.targets for part in parts]))


@pytest.mark.in_turn
def test_every_place_can_be_drawn():
    starts = {int(row[0]) for step in range(300) for row in batch(step, sequence_length=990).inputs}
    assert starts == set(range(10)), "1000 tokens hold 10 sequences of 990 and their targets"


def test_validation_windows_are_spread_and_do_not_overlap():
    inputs, targets, _ = validation_windows(ALPHABET, count=4, sequence_length=10)
    assert inputs[0, 0] == 0
    assert targets[-1, -1] == 999
    assert inputs.shape == (4, 10)
    many = validation_windows(ALPHABET, count=10**6, sequence_length=10)
    assert many.inputs.unique().numel() == many.inputs.numel() == 990


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path: Path):
    for mode, content in (("w", "ü"), ("wb", b"x")):
        with replacing(tmp_path / "file", mode) as file:
            file.write(content)
        before = (tmp_path / "file").read_bytes()
        assert before == (content if isinstance(content, bytes) else content.encode())
        writing = replacing(tmp_path / "file", mode)
        writing.__enter__().write(content)
        error = RuntimeError("in the middle")
        assert not writing.__exit__(type(error), error, None), "the error goes on"
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        assert (tmp_path / "file").read_bytes() == before


# ---- The bigram model. ----


def test_bigram_against_counting_by_hand():
    tokens = Tokens([np.array([0, 1, 0, 1], dtype=np.uint8), np.array([2, 0, 1], dtype=np.uint8)])
    scored = Batch(torch.tensor([[0, 1]]), torch.tensor([[1, 0]]))
    # 0 is followed by 1 three times, 1 by 0 once and by 2 once; one is added to each of 256 counts.
    assert bigram_loss(tokens, scored) == pytest.approx(-(np.log(4 / 259) + np.log(2 / 258)) / 2)
    assert bigram_loss(tokens, Batch(torch.tensor([[0]]), torch.tensor([[1]]))) == pytest.approx(-np.log(4 / 259))
    assert bigram_loss(tokens, Batch(torch.tensor([[1]]), torch.tensor([[2]]))) == pytest.approx(-np.log(2 / 258))


@pytest.mark.slow
def test_bigram_on_the_standard_library_is_the_known_yardstick():
    corpus = load_corpus(DataConfig(), sequence_length=128)
    windows = validation_windows(corpus.validation_bodies[0], count=256, sequence_length=128)
    assert 2.1 < bigram_loss(corpus.train, windows) < 2.7
