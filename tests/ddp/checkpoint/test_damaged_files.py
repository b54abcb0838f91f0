"""Damaged files, by accident or on purpose, load correctly or are refused by name, fast and in little memory."""

import dataclasses
import json
import math
import os
import re
import resource
import shutil
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import build, model_state, take_steps
from damage import damage, entries_of, exchange_entries
from loops import assert_same, wrap
from torch import nn

from maingrad.ddp import DistributedOptimizer, load_checkpoint, save_checkpoint
from maingrad.ddp.checkpoint.files.boxes import Parts, parts_of_range
from maingrad.ddp.checkpoint.files.manifest import MANIFEST_FILE, Manifest
from maingrad.ddp.checkpoint.files.opened import open_checkpoint
from maingrad.launch import simulate
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
    """A load's error; raised within a second, and without much memory of Python or the process."""
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
    assert most < 80e6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100e3, "in KiB"
    return said


# ---- Files that were made to hurt. ----


def test_a_huge_manifest_is_not_read(checkpoint: Path) -> None:
    for size in (10**8, 10**11):
        os.truncate(checkpoint / "maingrad.json", size)
        assert "/c/maingrad.json' is " in refusal(checkpoint)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("endless", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_a_manifest_that_never_ends_is_refused_at_once(checkpoint: Path, endless: Callable[[Path], None]) -> None:
    (checkpoint / "maingrad.json").unlink()
    endless(checkpoint / "maingrad.json")
    assert "maingrad.json' is truncated or damaged (it is no regular file)" in refusal(checkpoint)


def test_few_bytes_that_claim_to_be_much_are_not_exported(tmp_path: Path) -> None:
    """2 kB of files claim a tensor of a gigabyte."""
    save_checkpoint(tmp_path / "c", torch.nn.Linear(2**9, 1, bias=False))
    content = (tmp_path / "c" / "maingrad.json").read_text()
    content = content.replace("512]", "1073741824]")
    (tmp_path / "c" / "maingrad.json").write_text(re.sub(r'"checksum": \d+', '"checksum": null', content))
    with pytest.raises(
        ValueError, match=r"rank-00000\.safetensors' is truncated: \d+ bytes, for tensors of 4294967296"
    ):
        export_safetensors(tmp_path / "c", tmp_path / "weights")


# ---- Manifests of other types. ----


def edited(folder: Path, path: tuple[str | int, ...], value: Any) -> None:
    manifest = json.loads((folder / "maingrad.json").read_text())
    manifest["checksum"] = None
    at = manifest
    for key in path[:-1]:
        at = at[key]
    if value is DELETED:
        del at[path[-1]]
    elif isinstance(at, list) and path[-1] == len(at):
        at.append(value)
    else:
        at[path[-1]] = value
    (folder / "maingrad.json").write_text(json.dumps(manifest))


DELETED = object()
UP = ("tensors", "up.weight")
OF_GROUP = ("optimizer", "groups", 0)
DTYPES = (*UP, "dtypes")
MASTER = (*DTYPES, "master")
BOXES = (*UP, "boxes")
EDITS: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "version: true": (("version",), True),
    "version: 1.0": (("version",), 1.0),
    "version: missing": (("version",), DELETED),
    "format: missing": (("format",), DELETED),
    "byteorder: missing": (("byteorder",), DELETED),
    "checksum: a word": (("checksum",), "none"),
    "checksum: missing": (("checksum",), DELETED),
    "shape: '34'": ((*UP, "shape"), "34"),
    "shape: Infinity": ((*UP, "shape"), [float("inf"), 15]),
    "shape: a fraction": ((*UP, "shape"), [17.0, 15]),
    "shape: huge": ((*UP, "shape"), [2**40, 2**40]),
    "shape: many": ((*UP, "shape"), [1] * 10_000),
    "shape: another": ((*UP, "shape"), [15, 17]),
    "dtype: a list": ((*DTYPES, "model"), ["bfloat16"]),
    "dtype: load": ((*DTYPES, "model"), "load"),
    "dtype: another": (MASTER, "int32"),
    "dtype: wider": (MASTER, "float64"),
    "buffer: 1": ((*UP, "is_buffer"), 1),
    "buffer: true": ((*UP, "is_buffer"), True),
    "group: true": ((*UP, "group"), True),
    "group: a fraction": ((*UP, "group"), 0.0),
    "group: that is not there": ((*UP, "group"), 7),
    "master: 1": (MASTER, 1),
    "master: none": (MASTER, DELETED),
    "state: emptied": ((*DTYPES, "state.exp_avg"), DELETED),
    "state: many": (DTYPES, {f"state.more{index}": "float32" for index in range(10_000)}),
    "stored: nothing": (DTYPES, {}),
    "stored: a list": (DTYPES, []),
    "step: missing": ((*UP, "scalars"), {}),
    "step: a list": ((*UP, "scalars", "step"), {"tensor": [1] * 1000, "dtype": "float32"}),
    "step: beyond": ((*UP, "scalars", "step"), {"tensor": 2**80, "dtype": "int64"}),
    "tied: to nothing": (("tied",), {"head.weight": "nowhere"}),
    "tied: a number": (("tied",), {"head.weight": 1}),
    "experts: a fraction": (("num_expert_sets",), 1.0),
    "experts: Infinity": (("num_expert_sets",), float("inf")),
    "groups: a number": (("optimizer", "groups"), 1),
    "group: a number": (("optimizer", "groups"), [1]),
    "an option of nothing": (("optimizer", "groups"), [{"lr": {}}]),
    "lr: a word": ((*OF_GROUP, "lr"), "abc"),
    "lr: none": ((*OF_GROUP, "lr"), None),
    "lr: NaN": ((*OF_GROUP, "lr"), float("nan")),
    "lr: true": ((*OF_GROUP, "lr"), True),
    "betas: one": ((*OF_GROUP, "betas"), [0.9]),
    "betas: a word": ((*OF_GROUP, "betas"), [0.9, "fast"]),
    "betas: a number": ((*OF_GROUP, "betas"), 0.9),
    "maximize: a number": ((*OF_GROUP, "maximize"), 1),
    "params: none": ((*OF_GROUP, "params"), []),
    "id: a number": (("save_id",), 1),
    "id: another": (("save_id",), "maingrad-" + "0" * 32),
    "byteorder: the other": (("byteorder",), "big"),
    "tensors: none": (("tensors",), DELETED),
    "tensors: a list": (("tensors",), []),
    "tensor: missing": (UP, DELETED),
    "boxes: none": (BOXES, []),
    "boxes: a number": (BOXES, 1),
    "boxes: many": (BOXES, [[0, [0, 0], [0, 0]]] * 10_000),
    "boxes: one more": ((*BOXES, 1), [0, [0, 0], [1, 1]]),
    "box: a number less": ((*BOXES, 0), [0, [0, 0]]),
    "box: a dim less": ((*BOXES, 0), [0, [0], [255]]),
    "box: shorter": ((*BOXES, 0, 2, 0), 16),
    "box: negative": ((*BOXES, 0, 2, 0), -17),
    "box: huge": ((*BOXES, 0, 2, 0), 2**70),
    "box: true": ((*BOXES, 0, 2, 0), True),
    "box: elsewhere": ((*BOXES, 0, 1, 0), 1),
    "box: before the tensor": ((*BOXES, 0, 1, 0), -1),
    "box: in no file": ((*BOXES, 0, 0), 1),
    "box: in a negative file": ((*BOXES, 0, 0), -1),
    "box: in a file far away": ((*BOXES, 0, 0), 10**4000),
    "box: in a file of a name": ((*BOXES, 0, 0), "../c/rank-00000.safetensors"),
    "extra: missing": (("extra",), DELETED),
}


NAMED = r"/maingrad\.json' |in the checkpoint's manifest|the data file '|'up\.weight'|/c' does not fit this model: "
"""The path of a test has words too: these are followed by more."""


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.sampled(1)
def test_a_manifest_of_other_types_is_refused_by_name(checkpoint: Path, name: str) -> None:
    edited(checkpoint, *EDITS[name])
    said = refusal(checkpoint)
    assert re.search(NAMED, said), said


def test_each_edit_of_a_manifest_is_refused(checkpoint: Path) -> None:
    """One by one, before the model changes."""
    ddp, optimizer = build(torch.bfloat16, seed=1, **ZERO1)
    before = [param.detach().clone() for param in ddp.parameters()]
    manifest = (checkpoint / "maingrad.json").read_text()
    for name, (path, value) in EDITS.items():
        edited(checkpoint, path, value)
        with pytest.raises(ValueError, match=NAMED):
            load_checkpoint(checkpoint, ddp, optimizer)
        assert all(map(torch.equal, ddp.parameters(), before)), name
        (checkpoint / "maingrad.json").write_text(manifest)


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 200_000, b'{"format": 1e999}', b"\xff\xfe", b"null"])
def test_json_that_is_no_manifest_is_refused_by_name(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "maingrad.json").write_bytes(content)
    assert "/c/maingrad.json' " in refusal(checkpoint)


# ---- Data files whose header is of other types. ----


def with_header(path: Path, header: Any, length: int | None = None) -> None:
    """Give a data file another header, which says that it has so many bytes."""
    content = path.read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    written = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(written) if length is None else length).to_bytes(8, "little") + written + data)


def test_each_header_of_other_types_is_refused_by_name(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    path = tmp_path / "c" / "rank-00000.safetensors"
    content = path.read_bytes()
    good = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    about, bias = good["__metadata__"], good["model.bias"]
    headers = [
        *(3, None, [], "words", {}, b"[" * 100_000, b"\xff\xfe", b"{", b""),
        *(good | {"__metadata__": each} for each in (None, 3, {}, {"maingrad.of": about["maingrad.of"]})),
        *(good | {"__metadata__": about | {"maingrad.crc32": each}} for each in (None, 3, "", "0" * 8, "0 1 2")),
        *(good | {"model.bias": each} for each in (None, 3, {}, [1])),
        *(
            good | {"model.bias": bias | {"data_offsets": each}}
            for each in (None, 3, {}, [], ["0", "8"], [0], [0, "8"])
        ),
        *(good | {"model.bias": bias | {"data_offsets": each}} for each in ([0.0, 8.0], [None, 8], [0, None])),
    ]
    for header in headers:
        with_header(path, header)
        with pytest.raises(ValueError, match=r"data file '\S+/rank-00000\.safetensors' is truncated"):
            load_checkpoint(tmp_path / "c", nn.Linear(2, 2))
        path.write_bytes(content)
    with_header(path, good)
    load_checkpoint(tmp_path / "c", nn.Linear(2, 2))


def test_an_entry_outside_of_its_file_is_refused_before_the_model_changes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    path = tmp_path / "c" / "rank-00000.safetensors"
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    model = nn.Linear(2, 2)
    before = [param.detach().clone() for param in model.parameters()]
    header["model.bias"]["data_offsets"] = [-8, 0]
    with_header(path, header)
    with pytest.raises(ValueError, match=r"is damaged where 'model\.bias' lies \(it is .*\[-8, 0\]"):
        load_checkpoint(tmp_path / "c", model)
    for cut in (1, 8):
        path.write_bytes(content[:-cut])
        with pytest.raises(ValueError, match=rf"is truncated: {len(content) - cut} bytes of {len(content)}$"):
            load_checkpoint(tmp_path / "c", model)
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("length", [2**63, 10**11, 10**8])
def test_a_header_that_claims_to_be_long_is_not_made_room_for(checkpoint: Path, length: int) -> None:
    with_header(checkpoint / "rank-00000.safetensors", b" " * 10_000, length)
    assert "rank-00000.safetensors' is truncated or damaged" in refusal(checkpoint)


# ---- Damage that is drawn. ----


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder around a checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("two") / "c"

    def save() -> None:
        ddp, optimizer = build(torch.bfloat16, **ZERO1)
        take_steps(ddp, optimizer, range(1), dist.get_rank())
        save_checkpoint(folder, ddp, optimizer, extra={"step": 1, "seconds": 0.25})

    simulate(save, 2)
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
    """Load into a fresh model; returns its tensors, moments and everything else."""
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


@contextmanager
def limited() -> Iterator[None]:
    """Limit to a second, and to 100 MB of address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    old = resource.getrlimit(resource.RLIMIT_AS)
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 100_000_000, old[1]))
    began = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
        assert time.process_time() - began < 1.0


FILES = (
    "c/maingrad.json",
    "c/exchanged",
    "c/rank-00000.safetensors",
    "c/rank-00001.safetensors",
)


@pytest.mark.in_turn
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(50, 1000, 50))])
def test_drawn_damage_is_refused_by_name_or_harmless(of_two_ranks: Path, tmp_path: Path, first: int) -> None:
    whole = everything_loaded(of_two_ranks)
    refused = 0
    for seed in range(first, first + 50):
        folder = tmp_path / str(seed)
        shutil.copytree(of_two_ranks, folder)
        path = folder / FILES[seed % len(FILES)]
        if path.name == "exchanged":
            done = exchange_entries(folder / "c", seed)
            path = path.with_name(done.split()[0])
        else:
            done = damage(path, seed)
        try:
            found = everything_loaded(folder)
        except ValueError as error:
            refused += 1
            said = str(error)
        else:
            assert_equal(found, whole)
            said = path.name
        assert path.name in said, (seed, done, said)
        shutil.rmtree(folder)
    assert refused > 25, "most damage is damage"


def places_of_tensors(folder: Path) -> list[tuple[str, str, int, int]]:
    """(entry, data file, position of the bytes, number of bytes) of all that is stored."""
    return [
        (name, path.name, *place) for path in sorted(folder.glob("rank-*")) for name, place in entries_of(path).items()
    ]


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
        with pytest.raises(ValueError, match=rf"/c/{name}' is damaged where '{re.escape(key)}' lies: .*checksum"):
            read_everything(folder)
        with_another_bit(folder / name, start + length // 2)
    assert_equal(everything_loaded(folder.parent), everything_loaded(of_two_ranks))


def read_everything(folder: Path) -> None:
    """Read as a rank of a fully sharded model: its ranges are not the boxes that are stored."""

    def choose(manifest: Manifest) -> Parts:
        parts: Parts = {}
        for name, entry in manifest.tensors.items():
            numel = math.prod(entry.shape)
            cut = min(1, numel)
            for start, end in ((0, cut), (cut, numel)):
                data = {section: torch.empty(end - start, dtype=dtype) for section, dtype in entry.dtypes.items()}
                parts |= parts_of_range(name, entry.shape, start, data)
        return parts

    open_checkpoint(folder, lambda: choose).read()


def test_bytes_of_two_tensors_in_each_others_place_are_noticed(of_two_ranks: Path, tmp_path: Path) -> None:
    """Of one dtype and size: nothing else in the data file tells them apart."""
    folder = tmp_path / "two" / "c"
    shutil.copytree(of_two_ranks, folder.parent)
    for seed in range(4):
        name = exchange_entries(folder, seed).split()[0]
        with pytest.raises(ValueError, match=rf"/c/{name}' is damaged where '\S+' lies: .*checksum"):
            read_everything(folder)
        shutil.copy(of_two_ranks / "c" / name, folder)
    assert_equal(everything_loaded(folder.parent), everything_loaded(of_two_ranks))


def test_files_of_one_checkpoint_in_each_others_place_are_refused(tmp_path: Path) -> None:
    def save() -> None:
        model = wrap(nn.Linear(64, 64, bias=False), use_distributed_optimizer=True)
        save_checkpoint(tmp_path / "c", model, DistributedOptimizer(model))

    simulate(save, 2)
    load_checkpoint(tmp_path / "c", nn.Linear(64, 64, bias=False))
    first, second = (tmp_path / "c" / f"rank-0000{rank}.safetensors" for rank in range(2))
    assert first.stat().st_size == second.stat().st_size
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    said = r"/c/rank-00000\.safetensors' is 'maingrad-\w+ rank-00001\.safetensors', .* or have been renamed"
    with pytest.raises(ValueError, match=said):
        load_checkpoint(tmp_path / "c", nn.Linear(64, 64, bias=False))


def test_a_manifest_that_was_changed_by_hand_says_so(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "maingrad.json").read_text())
    manifest["extra"] = {"step": 2}
    (checkpoint / "maingrad.json").write_text(json.dumps(manifest))
    assert "where you have changed it yourself, set its checksum to null" in refusal(checkpoint)
    edited(checkpoint, ("extra",), {"step": 2})
    ddp, optimizer = build(torch.bfloat16, seed=1, **ZERO1)
    assert load_checkpoint(checkpoint, ddp, optimizer) == {"step": 2}


def test_entries_of_a_manifest_that_cannot_be_are_refused(pristine: Path) -> None:
    manifest = Manifest.read(pristine)
    name, entry = next((name, each) for name, each in manifest.tensors.items() if each.group is not None)
    entries: list[tuple[dict[str, Any], str]] = [
        ({"shape": (1,) * 65}, "a tensor of shape"),
        ({"shape": (2**31, 2**31)}, "a tensor of shape"),
        ({"shape": (2**62, 0)}, "a tensor of shape"),
        ({"dtypes": {"exp_avg": torch.float32}}, "a tensor is not stored"),
        ({"boxes": tuple((-1, box) for _, box in entry.boxes)}, "in the file of a rank that cannot be"),
        ({"boxes": tuple((2**40, box) for _, box in entry.boxes)}, "in the file of a rank that cannot be"),
    ]
    for change, message in entries:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(entry, **change)
    beside = {"GG": {"beside": "GG", "order": [0]}}
    manifests: list[tuple[dict[str, Any], str]] = [
        ({"tensors": {name: dataclasses.replace(entry, group=1)}}, f"'{name}' is in group 1 of 1"),
        ({"tensors": {name: dataclasses.replace(entry, group=-1)}}, f"'{name}' is in group -1 of 1"),
        ({"optimizer": None}, "is in group 0 of 0"),
        ({"tied": {"again": "gone"}}, "'again' is tied to 'gone', which is not stored"),
        ({"tensors": {name: dataclasses.replace(entry, scalars=beside)}}, "state of 'GG' is missing"),
    ]
    for change, message in manifests:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(manifest, **change)


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", "fast"), ("lr", True), ("lr", math.nan), ("lr", math.inf), ("betas", 0.9), ("fused", True)],
)
def test_options_that_no_optimizer_steps_with_are_refused(checkpoint: Path, key: str, value: Any) -> None:
    manifest = Manifest.read(checkpoint)
    assert manifest.optimizer is not None
    groups = [group | {key: value} for group in manifest.optimizer.groups]
    changed = dataclasses.replace(manifest, optimizer=dataclasses.replace(manifest.optimizer, groups=groups))
    (checkpoint / MANIFEST_FILE).write_text(changed.encoded())
    assert f"option '{key}' of parameter group 0 is" in refusal(checkpoint)


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("{}")
    with pytest.raises(ValueError, match="c' is a file, and a checkpoint is a folder"):
        load_checkpoint(tmp_path / "c", nn.Linear(2, 2))
