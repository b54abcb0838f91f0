"""Token files of every format, documents, blends and the order of an epoch."""

import json
import struct
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import tiny_config

from maingrad.__main__ import main
from maingrad.launch import simulate
from maingrad.launch.config.data import DataConfig
from maingrad.launch.config.run import Config, ConfigError
from maingrad.launch.config.train import TrainConfig
from maingrad.launch.data import indexed, sequences
from maingrad.launch.data.batches import load_corpus
from maingrad.launch.data.indexed import read_indexed, write_indexed
from maingrad.launch.data.order import Blend, permuted
from maingrad.launch.data.sequences import IGNORED, Batch, Body, Sampler, SequenceSet, concatenated
from maingrad.launch.data.sources import joined, open_body
from maingrad.launch.data.tokenizing import tokenize_files
from maingrad.launch.data.tokens import DataError, Tokens
from maingrad.launch.training.train import train

DOCUMENTS = [list(range(start, start + length)) for start, length in ((10, 7), (30, 1), (40, 13), (70, 4), (80, 30))]
TOKENS = [token for document in DOCUMENTS for token in document]


def body() -> Body:
    starts = np.cumsum([0, *map(len, DOCUMENTS[:-1])])
    return Body(Tokens([np.concatenate(DOCUMENTS).astype(np.uint16)]), starts)


def sampler(bodies: list[Body], weights: tuple[float, ...] = (), **changes: object) -> Sampler:
    settings: dict[str, Any] = {"order": "epochs", "documents": "join", "seed": 3}
    settings |= {"sequence_length": 4, "global_batch_size": 6} | changes
    about_data = {key: settings.pop(key) for key in ("order", "documents")}
    # The bodies are given: the paths are there for the weights, and say that documents are known.
    data = DataConfig(source="megatron", paths=("a",) * max(1, len(weights)), weights=weights, **about_data)
    return Sampler(bodies, data, TrainConfig(**settings))


def run_of(each: Sampler, steps: int, size: int) -> Batch:
    return concatenated([each.batch(step, slice(0, size)) for step in range(steps)])


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_indexed_files_come_back(tmp_path: Path, dtype: str):
    write_indexed(tmp_path / "set", DOCUMENTS, dtype=dtype)
    tokens, starts = read_indexed(tmp_path / "set")
    assert starts.tolist() == [0, 7, 8, 21, 25]
    assert tokens[:].tolist() == TOKENS


def test_what_is_written_into_a_folder_that_is_not_there_yet(tmp_path: Path):
    """The largest id that fits, and a document without a token, which is left out."""
    for _ in range(2):
        written = write_indexed(tmp_path / "new" / "er" / "set", [[], [255, 0], [], [7]], dtype="uint8")
        assert (written.documents, written.tokens) == (2, 3)
        tokens, starts = read_indexed(tmp_path / "new" / "er" / "set")
        assert (tokens[:].tolist(), starts.tolist()) == ([255, 0, 7], [0, 2])
    assert sorted(path.name for path in (tmp_path / "new" / "er").iterdir()) == ["set.bin", "set.idx"]
    with pytest.raises(DataError, match="token ids -1 to 3 do not fit uint8"):
        write_indexed(tmp_path / "new" / "er" / "set", [[3, -1]], dtype="uint8")
    assert read_indexed(tmp_path / "new" / "er" / "set").tokens[:].tolist() == [255, 0, 7], "those of before stay"


def test_an_index_written_by_hand(tmp_path: Path):
    """Two documents, the second of two sequences, as the format's description says byte for byte."""
    (tmp_path / "set.bin").write_bytes(struct.pack("<6i", 5, 6, 7, 70000, 9, 10))
    (tmp_path / "set.idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 3) + struct.pack("<3i3q3q", 2, 3, 1, 0, 8, 20, 0, 1, 3)
    )
    tokens, starts = read_indexed(tmp_path / "set")
    assert (tokens[:].tolist(), starts.tolist()) == ([5, 6, 7, 70000, 9, 10], [0, 2])
    write_indexed(tmp_path / "again", [[5, 6], [7, 70000, 9, 10]], dtype="int32")
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "set.bin").read_bytes()
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 2, 3) + struct.pack("<2i2q3q", 2, 4, 0, 8, 0, 1, 2)
    assert (tmp_path / "again.idx").read_bytes() == index


def test_an_index_of_another_program_may_have_empty_sequences_and_documents(tmp_path: Path):
    """And a list of documents that ends before the last sequence, or does not begin with the first."""
    (tmp_path / "set.bin").write_bytes(bytes([5, 6, 7, 9]))
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQ", 1, 1, 4)
    sequences = struct.pack("<4i4q", 2, 0, 1, 1, 0, 2, 2, 3)
    for documents, begins in (((0, 1, 1, 2, 4), [0, 2]), ((1, 4), [0, 2]), ((0, 3), [0, 3]), ((), [0])):
        listed = struct.pack(f"<{len(documents)}q", *documents)
        (tmp_path / "set.idx").write_bytes(head + struct.pack("<Q", len(documents)) + sequences + listed)
        for name in ("set", "set.bin", "set.idx"):
            tokens, starts = read_indexed(tmp_path / name)
            assert (tokens[:].tolist(), starts.tolist()) == ([5, 6, 7, 9], begins)


def test_a_document_longer_than_an_int32_is_several_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lengths = indexed._sequences_of(2**31), indexed._sequences_of(2**32)
    assert lengths == ([2**31 - 1, 1], [2**31 - 1, 2**31 - 1, 2])
    assert indexed._sequences_of(2**31 - 1) == [2**31 - 1]
    monkeypatch.setattr(indexed, "_LONGEST", 5)  # 2**31 tokens would take minutes
    write_indexed(tmp_path / "set", DOCUMENTS, dtype="uint16")
    tokens, starts = read_indexed(tmp_path / "set")
    assert (tokens[:].tolist(), starts.tolist()) == (TOKENS, [0, 7, 8, 21, 25])
    sizes = np.frombuffer((tmp_path / "set.idx").read_bytes(), "<i4", 4, 34)
    assert sizes.tolist() == [5, 2, 1, 5], "the first document is two sequences"


def test_damaged_index_files_are_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"set\.idx' cannot be read .*data\.paths names the prefix"):
        read_indexed(tmp_path / "set")
    write_indexed(tmp_path / "set", DOCUMENTS, dtype="uint16")
    index, tokens = tmp_path / "set.idx", tmp_path / "set.bin"
    whole = index.read_bytes()
    lengths, pointers, documents = (whole[34:54], whole[54:94], whole[94:])
    for damaged, message in (
        (b"x" + whole[1:], "does not begin with MMIDIDX"),
        (whole[:20], "does not begin with MMIDIDX"),
        (whole[:9] + b"\x02" + whole[10:], "has version 2 and dtype code 8"),
        (whole[:17] + b"\x07" + whole[18:], "dtype code 7"),
        (whole[:-30], "is cut off"),
        (whole[:-1], "is cut off"),
        (whole[:34] + struct.pack("<5i", -1, 1, 13, 4, 30) + whole[54:], "sequences do not follow each other"),
        (whole[:34] + lengths[4:] + lengths[:4] + whole[54:], "sequences do not follow each other"),
        (whole[:34] + lengths + pointers[8:] + pointers[:8] + documents, "sequences do not follow each other"),
        (whole[:-24] + whole[-16:-8] + whole[-24:-16] + whole[-8:], "names documents beyond its 5 sequences"),
        (whole[:-8] + struct.pack("<q", 6), "names documents beyond its 5 sequences"),
        (whole[:94] + struct.pack("<q", -1) + whole[102:], "names documents beyond its 5 sequences"),
    ):
        index.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            read_indexed(tmp_path / "set")
    index.write_bytes(whole)
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"54 tokens and .* declares 55: they are not of one pair"):
        read_indexed(tmp_path / "set")
    with pytest.raises(DataError, match="do not fit uint8"):
        write_indexed(tmp_path / "small", [[300]], dtype="uint8")
    assert not list(tmp_path.glob("small*"))


def test_a_file_of_wider_integers_is_refused(tmp_path: Path):
    """A vocabulary of less than 65,536 tokens in uint32: as uint16, the default, half of the tokens would be 0."""
    tokens = np.random.default_rng(0).integers(0, 50257, 500)
    for stored in ("uint16", "uint32", "int64"):
        tokens.astype(stored).tofile(tmp_path / stored)

    def opened(stored: str, dtype: str) -> Body:
        path = str(tmp_path / stored)
        return open_body(DataConfig(source="tokens", paths=(path,), token_dtype=dtype), path)  # type: ignore[arg-type]

    for stored, read in (("uint32", "uint16"), ("int64", "uint32"), ("int64", "uint16")):
        with pytest.raises(
            DataError, match=f"every second {read} .*{stored}' is 0.* wider integers; correct data.token"
        ):
            opened(stored, read)
    for right in ("uint16", "uint32"):
        assert opened(right, right).tokens[:500].tolist() == tokens.tolist()
    np.array([5, 0] * 32, np.uint16).tofile(tmp_path / "64")
    with pytest.raises(DataError, match="every second uint16"):
        opened("64", "uint16")
    for few in ([5, 0] * 31, [0] * 200, [0, 5] * 100):
        np.array(few, np.uint16).tofile(tmp_path / "few")
        assert opened("few", "uint16").tokens[: len(few)].tolist() == few


def test_the_order_of_an_epoch_is_that_of_other_versions():
    """A run goes on from a checkpoint that another version has written: the order is no detail of this one."""
    assert permuted(np.arange(12), 12, "maingrad 0 0 0").tolist() == [0, 3, 1, 8, 5, 7, 4, 6, 11, 10, 9, 2]
    of_16 = [14, 3, 1, 8, 5, 7, 4, 15, 11, 10, 9, 2, 12, 13, 0, 6]
    assert permuted(np.arange(16), 16, "maingrad 0 0 0").tolist() == of_16
    assert permuted(np.array([0, 10**6, 10**9]), 10**9 + 7, "key").tolist() == [722160863, 339853264, 235116725]
    few = {size: permuted(np.arange(size), size, "maingrad 7 0 0").tolist() for size in range(1, 6)}
    assert few == {1: [0], 2: [1, 0], 3: [1, 2, 0], 4: [1, 3, 0, 2], 5: [3, 2, 4, 0, 1]}


@pytest.mark.parametrize("size", [1, 2, 3, 17, 256, 1000])
def test_an_epoch_has_each_sequence_once(size: int):
    found = permuted(np.arange(size), size, "key")
    assert sorted(found.tolist()) == list(range(size))
    if size > 16:
        assert found.tolist() != permuted(np.arange(size), size, "other").tolist() != list(range(size))


def test_blends_keep_their_shares_everywhere():
    blend = Blend.of([0.7, 0.2, 0.1])
    sets, earlier = blend.locate(np.arange(20_000))
    shares = np.cumsum(np.eye(3)[sets], axis=0) / np.arange(1, 20_001)[:, None]
    assert np.abs(shares[1000:] - [0.7, 0.2, 0.1]).max() < 2e-3
    for number in range(3):
        assert np.array_equal(earlier[sets == number], np.arange((sets == number).sum()))


def test_a_set_of_little_weight_is_in_a_blend():
    sets, _ = Blend.of([1.0, 1e-9]).locate(np.arange(10_000))
    assert 2 <= sets.sum() <= 3, "once in 4,097 sequences"


def test_no_set_of_a_blend_is_a_whole_sequence_ahead():
    weights = [0.7, 0.2, 0.1]
    sets, _ = Blend.of(weights).locate(np.arange(500))
    had = np.cumsum(np.eye(3)[sets], axis=0)
    assert np.abs(had - np.arange(1, 501)[:, None] * weights).max() < 1


def test_epochs_are_complete_and_differ_and_go_on_at_any_step():
    each = sampler([body()])
    assert len(SequenceSet(body(), 4, "join")) == 13
    begins = run_of(each, 13, 6).inputs[:, 0].tolist()
    epochs = [begins[start : start + 13] for start in range(0, 78, 13)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert torch.equal(sampler([body()]).batch(9, slice(0, 6)).inputs, run_of(each, 10, 6).inputs[54:])


@pytest.mark.parametrize("documents", ["join", "mask", "pad"])
def test_ranks_and_microbatches_divide_one_order(documents: str):
    """Two sets, one of them three times as often."""
    other = Body(Tokens([np.arange(200, 240, dtype=np.uint16)]), np.zeros(1, np.int64))
    each = sampler([body(), other], (3.0, 1.0), documents=documents)
    whole = each.batch(5, slice(0, 6))
    for size in (1, 2, 3):
        parts = concatenated([each.batch(5, slice(first, first + size)) for first in range(0, 6, size)])
        assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True) if a is not None)
        assert (parts.positions is None) is (whole.positions is None) is (documents != "mask")
    assert each.counted(5) == int((whole.targets != IGNORED).sum())
    begins = run_of(each, 20, 6).inputs[:, 0]
    assert int((begins >= 200).sum()) == 30


def test_masked_rows_show_documents():
    inputs, targets, positions = SequenceSet(body(), 12, "mask").row_at(0)
    assert inputs.tolist() == [10, 11, 12, 13, 14, 15, 16, 30, 40, 41, 42, 43]
    assert targets.tolist() == [11, 12, 13, 14, 15, 16, IGNORED, IGNORED, 41, 42, 43, 44]
    assert positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2, 3]
    # The same borders from a token that ends documents: it is a target of the document that it ends.
    ended = Body(Tokens([np.array([5, 6, 1, 7, 1, 8, 9], np.uint16)]), None, 1)
    inputs, targets, positions = SequenceSet(ended, 6, "mask").row_at(0)
    assert targets.tolist() == [6, 1, IGNORED, 1, IGNORED, 9]
    assert positions.tolist() == [0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize("scan", [1, 2, 3, 5, 100])
def test_ends_of_documents_are_found_in_every_piece(monkeypatch: pytest.MonkeyPatch, scan: int):
    """Tokens are searched piece by piece; and documents that a file knows count besides."""
    monkeypatch.setattr(sequences, "_SCAN", scan)
    tokens = Tokens([np.array([5, 1, 1, 7, 8, 1, 9, 6, 1, 4, 1], np.uint16)])
    assert Body(tokens, None, 1).document_starts().tolist() == [0, 2, 3, 6, 9]
    assert Body(tokens, np.array([0, 4]), 1).document_starts().tolist() == [0, 2, 3, 4, 6, 9]


def test_rows_that_are_joined_show_no_documents():
    assert [len(SequenceSet(body(), length, "join")) for length in (6, 9, 27, 54, 55)] == [9, 6, 2, 1, 0]
    row = SequenceSet(body(), 12, "join").row(2)
    assert (row.inputs.tolist(), row.targets.tolist()) == (TOKENS[24:36], TOKENS[25:37])
    assert row.positions.tolist() == list(range(12))


def test_a_part_begins_with_a_document_and_has_those_inside_it():
    assert [body().part(*span).document_starts().tolist() for span in ((0, 7), (3, 21), (7, 8), (8, 55))] == [
        *([0], [0, 4, 5], [0], [0, 13, 17]),
    ]
    assert body().part(0, 7).starts is not None and body().part(0, 7).starts.tolist() == [0]


def test_a_path_without_a_sequence_is_named():
    short = Body(Tokens([np.arange(4, dtype=np.uint16)]), np.zeros(1, np.int64))
    with pytest.raises(DataError, match=r"path 2 of data\.paths has no sequence: 4 training tokens"):
        sampler([body(), short], (1.0, 1.0))
    assert sampler([body(), short], (1.0, 1.0), sequence_length=3).batch(0, slice(0, 6)).inputs.shape == (6, 3)


def test_documents_of_several_files_lie_one_after_the_other(tmp_path: Path):
    for name, documents in (("a", DOCUMENTS[:2]), ("b", DOCUMENTS[2:]), ("c", [[1, 2, 3, 4, 5]])):
        write_indexed(tmp_path / name, documents, dtype="uint16")
    paths = {"paths": (str(tmp_path / "a"), str(tmp_path / "b")), "validation_paths": (str(tmp_path / "c"),)}
    (found,) = load_corpus(DataConfig(source="megatron", **paths), sequence_length=4).bodies  # type: ignore[arg-type]
    assert found.document_starts().tolist() == [0, 7, 8, 21, 25]
    (tmp_path / "text").write_bytes(bytes(20))
    for source, begins in (("text", [0, 20, 40]), ("tokens", [0, 10, 20])):
        settings = {"source": source, "end_of_document": 9, "paths": (str(tmp_path / "text"),) * 3}
        config = DataConfig(**settings)  # type: ignore[arg-type]
        bodies = [open_body(config, path) for path in config.paths]
        assert joined(bodies).document_starts().tolist() == begins, "each file begins with one"


def test_no_document_begins_behind_the_last_token():
    ended = Body(Tokens([np.array([5, 6, 1, 7, 8, 1], np.uint16)]), None, 1)
    assert ended.document_starts().tolist() == [0, 3]
    rows = SequenceSet(ended, 1, "pad")
    assert [(row.inputs.item(), row.targets.item()) for row in map(rows.row, range(len(rows)))] == [
        (5, 6),
        (6, 1),
        (7, 8),
        (8, 1),
    ]


def test_an_end_of_document_counts_in_each_of_several_files(tmp_path: Path):
    """Files that are read one after the other are one body, with the token that ends documents."""
    for name, tokens in (("a", [5, 1, 6, 7]), ("b", [8, 9, 1, 4, 3, 2])):
        np.array(tokens, np.uint16).tofile(tmp_path / name)
    np.array([3, 1, 4, 2], np.uint16).tofile(tmp_path / "held")
    paths = {"paths": (str(tmp_path / "a"), str(tmp_path / "b")), "validation_paths": (str(tmp_path / "held"),)}
    data = DataConfig(source="tokens", documents="mask", end_of_document=1, **paths)  # type: ignore[arg-type]
    (joined,) = load_corpus(data, sequence_length=3).bodies
    assert joined.document_starts().tolist() == [0, 2, 4, 7]
    rows = SequenceSet(joined, 3, "mask").row_at(0)
    assert rows.targets.tolist() == [1, IGNORED, 7] and rows.positions.tolist() == [0, 1, 0]


def test_documents_keep_their_borders_in_the_tokens_that_are_held_back(tmp_path: Path):
    """Training tokens and those of validation are parts of one file, the second of which begins inside a document."""
    write_indexed(tmp_path / "set", DOCUMENTS, dtype="uint16")
    settings = {"paths": (str(tmp_path / "set"),), "documents": "mask", "validation_fraction": 0.8}
    corpus = load_corpus(DataConfig(source="megatron", **settings), sequence_length=4)  # type: ignore[arg-type]
    assert len(corpus.train) == 11
    borders = {"before": [0, 7, 8], "after": [0, 10, 14]}
    (before,), (after,) = corpus.bodies, corpus.validation_bodies
    assert {"before": before.document_starts().tolist(), "after": after.document_starts().tolist()} == borders
    inputs, targets, positions = SequenceSet(after, 16, "mask").row_at(0)
    assert inputs.tolist() == TOKENS[11:27]
    assert targets.tolist() == [*TOKENS[12:21], IGNORED, *TOKENS[22:25], IGNORED, 81, 82]
    assert positions.tolist() == [*range(10), *range(4), *range(2)]


def test_tokens_of_several_parts_are_read_from_any_place_to_any_other():
    parts = [np.array(DOCUMENTS[index], np.uint16) for index in (0, 1, 2)]
    together, whole = Tokens([*parts[:2], parts[1][:0], parts[2]]), np.concatenate(parts)
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            assert together[start:stop].tolist() == whole[start:stop].tolist()
            assert together.part(start, stop)[:].tolist() == whole[start:stop].tolist()


def test_padded_rows_are_documents_or_pieces_of_them():
    found = SequenceSet(body(), 12, "pad")
    rows = [found.row(index) for index in range(len(found))]
    counted = [row.targets[row.targets != IGNORED].tolist() for row in rows]
    assert counted == [
        list(range(11, 17)),
        list(range(41, 53)),
        list(range(71, 74)),
        *(list(range(81, 93)), list(range(93, 105)), list(range(105, 110))),
    ], "the document of one token has no target"
    assert all((row.inputs[row.targets != IGNORED] + 1 == row.targets[row.targets != IGNORED]).all() for row in rows)


def tokenizer_file(path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["def f(x):\n    return x * 2\n"] * 20, trainer)
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_that_is_none_is_named(tmp_path: Path):
    pytest.importorskip("tokenizers")
    (tmp_path / "text").write_text("x")
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    for path in (tmp_path / "tokenizer.json", tmp_path / "nowhere.json"):
        with pytest.raises(ConfigError, match=rf"--tokenizer '{path}': is no readable tokenizer\.json \("):
            tokenize_files(tmp_path / "set", [tmp_path / "text"], path, None, key=None)
    assert not list(tmp_path.glob("*set*"))


def test_padding_and_truncation_of_a_tokenizer_do_not_change_documents(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    text, path = tmp_path / "a.txt", tokenizer_file(tmp_path / "tokenizer.json")
    text.write_text("def f(x):\n    return x * 2\n" * 20)
    plain = tokenizers.Tokenizer.from_file(str(path))
    ids = plain.encode(text.read_text()).ids
    begin = tokenizers.processors.TemplateProcessing(single="[X] $A", special_tokens=[("[X]", 1)])
    plain.post_processor = begin
    assert plain.encode("a").ids[0] == 1, "of a model's inputs"
    plain.enable_truncation(4)
    plain.enable_padding(length=10**9)  # 4 GB of ids for each document
    plain.save(str(path))
    assert main(["tokenize", str(tmp_path / "set"), str(text), "--tokenizer", str(path)]) == 0
    assert read_indexed(tmp_path / "set").tokens[:].tolist() == ids


def test_the_command_tokenize_writes_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    files = [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]
    assert main(["tokenize", str(tmp_path / "set"), *files, "--end-of-document", "0"]) == 0
    assert "3 documents, 14 tokens" in capsys.readouterr().out
    tokens, starts = read_indexed(tmp_path / "set")
    assert bytes(tokens[:].tolist()) == b"hello\0one\0two\0" and starts.tolist() == [0, 6, 10]
    tokenizer = str(tokenizer_file(tmp_path / "tokenizer.json"))
    assert main(["tokenize", str(tmp_path / "other"), *files, "--tokenizer", tokenizer, "--end-of-document", "2"]) == 0
    tokens, starts = read_indexed(tmp_path / "other")
    assert len(starts) == 3 and tokens[:][[*(starts[1:] - 1), -1]].tolist() == [2, 2, 2]
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    assert main(["tokenize", str(tmp_path / "lines"), str(tmp_path / "a.txt")]) == 0
    assert bytes(read_indexed(tmp_path / "lines").tokens[:].tolist()) == b"one\r\ntwo\r\n"
    capsys.readouterr()
    assert main(["tokenize", str(tmp_path / "set.bin"), *files]) == 2
    assert "set.bin' is to be a prefix" in capsys.readouterr().err
    assert main(["tokenize", str(tmp_path / "set"), *files, "--end-of-document", "-1"]) == 2
    assert "--end-of-document -1: must not be negative" in capsys.readouterr().err
    (tmp_path / "b.jsonl").write_text('{"text": "half a pair: \\ud83d"}\n')
    assert main(["tokenize", str(tmp_path / "set"), *files]) == 2
    assert "b.jsonl' line 1 has text that is no Unicode" in capsys.readouterr().err
    (tmp_path / "b.jsonl").write_text('{"txt": "one"}\n')
    assert main(["tokenize", str(tmp_path / "set"), *files]) == 2
    assert "b.jsonl' line 1 has no string under 'text'" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["\u2028", "\u0085", "\x0b"])
def test_a_line_of_jsonl_ends_with_a_line_feed_alone(tmp_path: Path, end: str):
    """Other characters at which Python's ``splitlines`` cuts may stand in a string of JSON."""
    text = f"one{end}two"
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"text": text}, ensure_ascii=end < " ").encode() + b"\r\n")
    assert tokenize_files(tmp_path / "set", [tmp_path / "a.jsonl"], None, None, "text")
    assert bytes(read_indexed(tmp_path / "set").tokens[:].tolist()).decode() == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", None, r"data file '.*a\.txt' cannot be read \(No such file"),
        ("a.txt", b"caf\xe9", r"data file '.*a\.txt' is not UTF-8 "),
        ("a.txt", b"", r"no text in .*a\.txt"),
        ("a.jsonl", b'{"text": ""}\n\n', r"no text in .*a\.jsonl"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text"\n', r"'.*a\.jsonl' line 3 is not JSON"),
        ("a.jsonl", b'"text"\n', r"a\.jsonl' line 1 has no string under 'text'"),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, name: str, content: bytes | None, message: str):
    """And no file appears, or is another one than before."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        tokenize_files(tmp_path / "set", [tmp_path / name], None, 0, "text")
    assert not list(tmp_path.glob("*set*"))


@pytest.mark.parametrize(
    ("end", "dtype"), [(None, "uint8"), (255, "uint8"), (256, "uint16"), (2**16 - 1, "uint16"), (2**16, "uint32")]
)
def test_tokens_are_as_wide_as_the_largest_id_needs(tmp_path: Path, end: int | None, dtype: str):
    (tmp_path / "a.jsonl").write_text('{"text": "\u00e9"}\n \t\n{"text": ""}\n{"other": 1, "text": "b"}\n')
    written = tokenize_files(tmp_path / "set", [tmp_path / "a.jsonl"], None, end, "text")
    tokens, starts = read_indexed(tmp_path / "set")
    ended = [] if end is None else [end]
    assert tokens[:].tolist() == [0xC3, 0xA9, *ended, ord("b"), *ended], "none behind a document without a token"
    assert (tokens.dtype, starts.tolist()) == (np.dtype(dtype), [0, 2 + len(ended)])
    assert (written.documents, written.tokens) == (2, 3 + 2 * len(ended))
    tokenize_files(tmp_path / "whole", [tmp_path / "a.jsonl"], None, None, key=None)
    assert bytes(read_indexed(tmp_path / "whole").tokens[:].tolist()) == (tmp_path / "a.jsonl").read_bytes()


def test_rows_of_a_dataset_on_disk(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    table = pytest.importorskip("pyarrow").table({"ids": DOCUMENTS, "other": ["x"] * 5})
    datasets.Dataset(table, fingerprint="some").save_to_disk(str(tmp_path / "set"))
    config = DataConfig(source="hugging_face", paths=(str(tmp_path / "set"),), column="ids", documents="mask")
    corpus = load_corpus(config, sequence_length=2)
    (found,) = corpus.bodies
    assert found.tokens[:].tolist() == TOKENS[:52]
    assert found.tokens[5:22].tolist() == TOKENS[5:22]
    assert found.starts is not None and found.starts.tolist() == [0, 7, 8, 21, 25]


class Numbers:
    """Integers of Arrow, as a dataset's column has them."""

    def __init__(self, values: list[int]) -> None:
        self.values = np.array(values, dtype=np.int64)

    def to_numpy(self, *, zero_copy_only: bool) -> np.ndarray:
        assert not zero_copy_only, "Arrow copies what it holds in another form"
        return self.values


class Chunk(list[list[int]]):
    """Lists of Arrow, one for each row."""

    def value_lengths(self) -> Numbers:
        return Numbers([len(row) for row in self])

    def flatten(self) -> Numbers:
        return Numbers([value for row in self for value in row])


class Dataset:
    """A dataset of the package, whose rows lie in chunks."""

    def __init__(self, *chunks: list[list[int]]) -> None:
        self.chunks = [Chunk(chunk) for chunk in chunks]
        self.data, self.column_names = self, ["ids", "other"]

    def __len__(self) -> int:
        return sum(map(len, self.chunks))

    def column(self, name: str) -> "Dataset":
        assert name == "ids"
        return self


def test_a_dataset_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for ``datasets``: rows in several chunks, one of which is empty, and all that is refused."""
    folders: dict[str, Any] = {
        "whole": Dataset(DOCUMENTS[:2], [], [*DOCUMENTS[2:4], []], [*DOCUMENTS[4:], []]),
        "split": {"train": Dataset(DOCUMENTS)},
        "empty": Dataset([]),
    }

    def load_from_disk(path: str) -> Any:
        if path not in folders:
            raise (ValueError if path == "damaged" else FileNotFoundError)(f"{path} is not there")
        return folders[path]

    package: Any = types.ModuleType("datasets")
    package.Dataset, package.load_from_disk = Dataset, load_from_disk
    monkeypatch.setitem(sys.modules, "datasets", package)

    def opened(path: str, column: str = "ids") -> Body:
        return open_body(DataConfig(source="hugging_face", paths=(path,), column=column), path)

    body = opened("whole")
    assert body.tokens[:].tolist() == TOKENS
    assert body.starts is not None and body.starts.tolist() == [0, 7, 8, 21, 25] and body.end is None
    ended = DataConfig(source="hugging_face", paths=("whole",), column="ids", end_of_document=16)
    assert open_body(ended, "whole").end == 16
    for path, column, message in (
        ("split", "ids", "'split' holds several splits: name one, such as 'split/train'"),
        ("whole", "text", "'whole' has no column 'text', but ids, other; set data.column"),
        ("empty", "ids", "'empty' is empty"),
        ("none", "ids", r"'none' is no dataset of save_to_disk \(none is not there\)"),
        ("damaged", "ids", r"'damaged' is no dataset of save_to_disk \(damaged is not there\)"),
    ):
        with pytest.raises(DataError, match=message):
            opened(path, column)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        load_corpus(DataConfig(source="hugging_face", paths=("x",)), sequence_length=2)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "text").write_text("x")
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        tokenize_files(tmp_path / "set", [tmp_path / "text"], tmp_path / "text", None, key=None)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"weights": (1.0,)}, r"data\.weights = .*one number for each of the 2"),
        ({"weights": (1.0, 0.0), "order": "epochs"}, "must be positive"),
        ({"weights": (1.0, 2.0)}, r'set data\.order = "epochs"'),
        ({"documents": "pad"}, r'no random places: set data\.order = "epochs"'),
        ({"source": "tokens", "documents": "mask"}, r"set data\.end_of_document"),
        ({"source": "tokens", "end_of_document": -1}, r"data\.end_of_document = -1: must not be negative"),
    ],
)
def test_contradictions_name_key_and_remedy(values: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**{"source": "megatron", "paths": ("a", "b")} | values)  # type: ignore[arg-type]


def megatron_config(folder: Path, name: str, **sections: object) -> Config:
    generator = np.random.default_rng(0)
    for part in ("a", "b"):
        if not (folder / f"{part}.idx").exists():
            lengths = generator.integers(1, 40, size=60)
            write_indexed(folder / part, [generator.integers(0, 256, size=n) for n in lengths], dtype="uint16")
    data = {"source": "megatron", "paths": [str(folder / "a"), str(folder / "b")], "weights": [2.0, 1.0]}
    data |= {"order": "epochs", **sections.pop("data", {})}  # type: ignore[dict-item]
    changes = {"train": {"out_dir": str(folder / name), **sections.pop("train", {})}}  # type: ignore[dict-item]
    return tiny_config(folder, data=data, **changes, **sections)  # type: ignore[arg-type]


@pytest.mark.in_turn
@pytest.mark.parametrize("documents", ["mask", "pad"])
@pytest.mark.sampled(1)
def test_the_mean_is_over_all_counted_tokens(tmp_path: Path, documents: str):
    """One process with one microbatch, two ranks with three microbatches each: other parts, the same means."""
    data, whole = {"documents": documents}, {"num_microbatches": 1}
    one = train(megatron_config(tmp_path, "one", data=data, train=whole))
    parts = {"num_microbatches": 3}
    two, _ = simulate(train, 2, megatron_config(tmp_path, "two", data=data, train=parts))
    shards, _ = simulate(train, 2, megatron_config(tmp_path, "fsdp", data=data, train=parts, parallel="fsdp"))
    for other in (two, shards):
        assert other.losses == pytest.approx(one.losses, rel=1e-4)
        assert other.validation_loss == pytest.approx(one.validation_loss, rel=1e-4)
    # The first loss is that of all counted targets of the batch.
    config = megatron_config(tmp_path, "one", data=data)
    from maingrad.launch.model.gpt import build_model

    corpus = load_corpus(config.data, sequence_length=24)
    batch = Sampler(corpus.bodies, config.data, config.train).batch(0, slice(0, 24))
    logits = build_model(config.model, seed=0)(batch.inputs, positions=batch.positions)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert one.losses[0] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.in_turn
def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path):
    data = {"documents": "mask"}
    whole = train(megatron_config(tmp_path, "whole", data=data))
    train(megatron_config(tmp_path, "cut", data=data, train={"save_every": 3}))
    resumed = {"resume": str(tmp_path / "cut" / "checkpoints" / "step-00000003"), "num_microbatches": 4}
    rest, *_ = simulate(train, 3, megatron_config(tmp_path, "rest", data=data, train=resumed))
    assert rest.losses == pytest.approx(whole.losses[3:], rel=1e-4)
