"""The format outlives the code: earlier versions are rewritten, and boxes that no wrapper cuts today are read."""

import itertools
import json
import math
import os
import re
import resource
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Everything, build, files_content, model_state
from loops import assert_same, weights
from python_processes import run_python
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import load as torchs_load

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.ddp.checkpoint.files import rank_file
from maingrad.ddp.checkpoint.files.boxes import Box, Part, boxes_of_range
from maingrad.ddp.checkpoint.files.manifest import (
    MOST_BYTES,
    Manifest,
    assign,
    new_id,
    saved_tensors,
)
from maingrad.ddp.checkpoint.files.rank_file import RankFile, write_rank_file
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.launch.safetensors_io import export_safetensors

ROOT = Path(__file__).parents[3]
VERSION_3 = Path(__file__).parent / "version_3"
"""Saved by two ranks of ZeRO-1 after one step, with the code of version 3: ``build(torch.bfloat16)``."""

# ---- Earlier versions. ----


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_version_3_is_refused_with_the_program_that_rewrites_it(tmp_path: Path) -> None:
    shutil.copytree(VERSION_3, tmp_path / "old")
    with pytest.raises(ValueError, match=r"has version 3 of .* reads version 4: docs/upgrade_checkpoint\.py rewrites"):
        load_checkpoint(tmp_path / "old", Everything(torch.bfloat16))
    done = run_python(ROOT / "docs" / "upgrade_checkpoint.py", tmp_path / "old", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    tensors, _ = files_content(tmp_path / "new")
    torchs: dict[str, Any] = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in tensors["model"].items()},
        "master": {name: torch.zeros_like(tensor) for name, tensor in tensors["master"].items()},
        "optimizer": {
            "state": {
                name: {key: torch.zeros_like(tensor) for key, tensor in state.items()}
                for name, state in tensors["optimizer"]["state"].items()
            }
        },
    }
    torchs_load(torchs, checkpoint_id=tmp_path / "old", no_dist=True)
    for section in ("model", "master"):
        assert_same(tensors[section], torchs[section])
    for name, state in tensors["optimizer"]["state"].items():
        assert_same(state, torchs["optimizer"]["state"][name])

    def load() -> Any:
        ddp, optimizer = build(torch.bfloat16, seed=1, use_distributed_optimizer=True)
        extra = load_checkpoint(tmp_path / "new", ddp, optimizer)
        assert_same({name: model_state(ddp)[name] for name in tensors["model"]}, tensors["model"])
        steps = [part.scalars()["step"].item() for part in optimizer.slices if part.state()]
        assert optimizer.param_groups[0]["lr"] == 0.02 and set(steps) == {1.0}
        return extra

    assert simulate(load, 3) == [{"step": 1}] * 3


def test_a_damaged_version_3_is_not_rewritten(tmp_path: Path) -> None:
    shutil.copytree(VERSION_3, tmp_path / "old")
    place = json.loads((tmp_path / "old" / "maingrad.json").read_text())["tensors"]["model.up.weight"]["chunks"][0]
    name = f"__{place[1]}_0.distcp"
    with (tmp_path / "old" / name).open("r+b") as file:
        file.seek(place[2])
        file.write(b"\1\2\3")
    done = run_python(ROOT / "docs" / "upgrade_checkpoint.py", tmp_path / "old", tmp_path / "new")
    assert re.search(rf"{name}' is damaged where 'model\.up\.weight' lies", done.stderr), done.stderr
    assert not (tmp_path / "new").exists()


def test_a_save_does_not_replace_a_checkpoint_of_version_3(tmp_path: Path) -> None:
    """Its files have names that torch's own checkpoints have too."""
    shutil.copytree(VERSION_3, tmp_path / "c")
    with pytest.raises(FileExistsError, match=r"/c' is there and is not just a checkpoint: .*; save elsewhere"):
        save_checkpoint(tmp_path / "c", nn.Linear(2, 2))
    assert {path.name for path in (tmp_path / "c").iterdir()} == {path.name for path in VERSION_3.iterdir()}


# ---- Cuts that ranks of tensor parallelism would make. ----


def cut_by_columns(folder: Path) -> dict[str, torch.Tensor]:
    """Write a checkpoint of a Linear(6, 4) by hand: the weight in two slices of columns, uneven, of two ranks."""
    model = nn.Linear(6, 4)
    save_checkpoint(folder, model, extra="cut")
    whole = load_file(folder / "rank-00000.safetensors")
    weight, manifest = whole["model.weight"], json.loads((folder / "maingrad.json").read_text())
    slices = {"model.weight[0,0]": weight[:, :4].contiguous(), "model.weight[0,4]": weight[:, 4:].contiguous()}
    for rank, (name, data) in enumerate(slices.items()):
        tensors = {name: data, **({"model.bias": whole["model.bias"]} if rank else {})}
        checksums = " ".join(f"{checksum_of(tensors[each]):08x}" for each in sorted(tensors))
        file = f"rank-{rank:05d}.safetensors"
        of = f"{manifest['save_id']} {file}"
        save_file(tensors, folder / file, {"maingrad.of": of, "maingrad.crc32": checksums})
    manifest["tensors"]["weight"]["boxes"] = [[0, [0, 0], [4, 4]], [1, [0, 4], [4, 2]]]
    manifest["tensors"]["bias"]["boxes"] = [[1, [0], [4]]]
    manifest["checksum"] = None
    (folder / "maingrad.json").write_text(json.dumps(manifest))
    return weights(model)


def checksum_of(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.numpy().tobytes())


def test_slices_of_columns_are_read_by_ranks_of_every_kind_and_written_back(tmp_path: Path) -> None:
    expected = cut_by_columns(tmp_path / "c")
    plain = nn.Linear(6, 4)
    assert load_checkpoint(tmp_path / "c", plain) == "cut"
    assert_same(weights(plain), expected)
    export_safetensors(tmp_path / "c", tmp_path / "weights.safetensors")
    assert_same(load_file(tmp_path / "weights.safetensors"), expected)

    def load_sharded() -> dict[str, torch.Tensor]:
        model = fully_shard(nn.Linear(6, 4))
        load_checkpoint(tmp_path / "c", model)
        save_checkpoint(tmp_path / f"again{dist.get_world_size()}", model)
        with model.unsharded():
            return {name: param.detach().clone() for name, param in model.named_parameters()}

    for ranks in (2, 3):
        for found in simulate(load_sharded, ranks):
            assert_same(found, expected)
        plain = nn.Linear(6, 4)
        load_checkpoint(tmp_path / f"again{ranks}", plain)
        assert_same(weights(plain), expected)


@pytest.mark.parametrize(
    "boxes, said",
    [
        ([[0, [0, 0], [4, 4]]], "8 elements are missing"),
        ([[0, [0, 0], [4, 4]], [1, [0, 3], [4, 3]]], "4 elements are there twice"),
    ],
)
def test_slices_that_do_not_fit_together_are_refused_by_name(tmp_path: Path, boxes: Any, said: str) -> None:
    cut_by_columns(tmp_path / "c")
    manifest = json.loads((tmp_path / "c" / "maingrad.json").read_text())
    manifest["tensors"]["weight"]["boxes"] = boxes
    (tmp_path / "c" / "maingrad.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=rf"{said}.* in manifest\.tensors\['weight'\]"):
        load_checkpoint(tmp_path / "c", nn.Linear(6, 4))


# ---- Many ranks. ----


def test_the_manifest_of_a_thousand_ranks_can_be_read_again() -> None:
    """80 units of a 70 B model, each cut over 1,024 ranks, with masters and two moments: far below the limit."""
    shapes = {"wide": (28672, 8192), "tall": (8192, 28672), "square": (8192, 8192), "norm": (8192,)}
    numel = sum(math.prod(shape) for shape in shapes.values())
    edges = [numel * rank // 1024 for rank in range(1025)]
    kept = [(section, torch.float32) for section in ("master", "state.exp_avg", "state.exp_avg_sq")]
    dtypes = (("model", torch.bfloat16), *kept)
    held: list[list[Part]] = []
    for start, end in itertools.pairwise(edges):
        held.append([])
        first = 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            low, high = max(start, first) - first, min(end, first + size) - first
            for box in boxes_of_range(shape, low, high) if low < high else ():
                held[-1].append(Part(name, shape, box, dtypes))
            first += size
    manifest = Manifest(new_id(), saved_tensors(assign(held)), {}, 1, None, None)
    nbytes = len(manifest.encoded())
    assert 80 * nbytes < MOST_BYTES, nbytes
    assert sum(manifest.nbytes.values()) == numel * 14


def test_ranks_that_hold_the_same_share_the_writing() -> None:
    """Each part goes to the one with the least to write so far, in bytes of all its sections."""

    def part(name: str, numel: int, *dtypes: torch.dtype) -> Part:
        sections = tuple((f"state.{index}", dtype) for index, dtype in enumerate(dtypes))
        return Part(name, (numel,), Box((0,), (numel,)), sections)

    wide, narrow = part("wide", 4, torch.float32, torch.float32), part("narrow", 8, torch.bfloat16)
    more, last, own = part("more", 5, torch.float32), part("last", 1, torch.uint8), part("own", 1, torch.uint8)
    shared = [wide, narrow, more, last]
    writers = assign([shared, [*shared, own]])
    assert writers == {wide: 0, narrow: 1, more: 1, last: 0, own: 1}
    assert assign([[own], shared])[last] == 1


LOADS_WITH_FEW_FILES = """
import os, resource, sys
import torch
from maingrad.ddp import load_checkpoint
model = torch.nn.Linear(64, 64)
def held_files():
    return list(map(int, os.listdir("/proc/self/fd"))) if os.path.exists("/proc/self/fd") else [0] * 8
for number in held_files():  # of the server that has forked this process: as many as the tests before have opened
    link = f"/proc/self/fd/{number}"
    if number > 2 and os.path.lexists(link) and os.readlink(link) == os.devnull:
        os.close(number)
held = len(held_files())
resource.setrlimit(resource.RLIMIT_NOFILE, (held + 24, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
load_checkpoint(sys.argv[1], model)
"""


@pytest.mark.in_turn
def test_more_files_are_read_than_a_process_may_open_at_first(tmp_path: Path) -> None:
    simulate(lambda: save_checkpoint(tmp_path / "c", fully_shard(nn.Linear(64, 64))), 40)
    assert len(list((tmp_path / "c").glob("rank-*"))) > 32
    done = run_python("-c", LOADS_WITH_FEW_FILES, tmp_path / "c")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("hard", [resource.RLIM_INFINITY, 3])
def test_a_process_is_allowed_as_many_files_as_a_load_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard: int
) -> None:
    """Where it may have no more, the load tries all the same: others of the process's files may be closed by then."""
    save_checkpoint(tmp_path / "c", nn.Linear(4, 4))
    asked: list[tuple[int, int]] = []

    def allow(kind: int, limits: tuple[int, int]) -> None:
        assert kind == resource.RLIMIT_NOFILE
        asked.append(limits)
        if hard == 3:
            raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", allow)
    for soft in (1, 2, 100):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, soft=soft: (soft, hard))
        load_checkpoint(tmp_path / "c", nn.Linear(4, 4))
    assert asked == [(2, hard)]


# ---- Kinds of elements. ----


@pytest.mark.parametrize(
    "dtype",
    [
        torch.complex128,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e8m0fnu,
        torch.bool,
        torch.uint16,
        torch.int64,
    ],
)
def test_buffers_of_every_dtype_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also of those for which the safetensors format has no name, beside narrower ones."""
    bits = torch.arange(96, dtype=torch.uint8) % 2 if dtype is torch.bool else torch.arange(96, dtype=torch.uint8)
    model, other = nn.Module(), nn.Module()
    model.register_buffer("odd", torch.ones(3, dtype=torch.uint8))
    model.register_buffer("table", bits.view(dtype).clone().view(2, -1))
    model.register_buffer("one", bits.view(dtype)[1].clone())
    for name, buffer in model.named_buffers():
        other.register_buffer(name, torch.zeros_like(buffer))
    save_checkpoint(tmp_path / "c", model)
    load_checkpoint(tmp_path / "c", other)
    in_file = load_file(tmp_path / "c" / "rank-00000.safetensors")["model.table"]  # or its bytes, along one more dim
    assert in_file.shape == (model.table.shape if in_file.dtype is dtype else (*model.table.shape, dtype.itemsize))
    for name, buffer in model.named_buffers():
        found = other.get_buffer(name)
        assert found.dtype is dtype or name == "odd"
        assert torch.equal(found.reshape(-1).view(torch.uint8), buffer.reshape(-1).view(torch.uint8)), name


KNOWN = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
KNOWN += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8]
KNOWN += [torch.bool]


def of_every_dtype(sizes: list[int]) -> nn.Module:
    module = nn.Module()
    for index, (dtype, size) in enumerate(zip(KNOWN[::-1], itertools.cycle(sizes))):
        module.register_buffer(f"of_{index}", torch.ones(size, dtype=torch.uint8).to(dtype))
    return module


def test_other_programs_see_the_dtypes_that_the_format_has(tmp_path: Path) -> None:
    model = of_every_dtype([1, 3, 5])
    save_checkpoint(tmp_path / "c", model)
    found = load_file(tmp_path / "c" / "rank-00000.safetensors")
    assert {name: found[f"model.{name}"].dtype for name, _ in model.named_buffers()} == {
        name: buffer.dtype for name, buffer in model.named_buffers()
    }


def test_the_manifests_checksum_is_that_of_the_files_of_before(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", nn.Linear(3, 2))
    content = json.loads((tmp_path / "c" / "maingrad.json").read_text())
    written = content.pop("checksum")
    assert written == zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def test_readers_may_view_the_bytes_of_an_entry_in_place(tmp_path: Path) -> None:
    """Whatever its neighbours' dtypes are: mapped into memory, it lies at a multiple of its element's size."""
    save_checkpoint(tmp_path / "c", of_every_dtype([1, 3, 5]))
    content = (tmp_path / "c" / "rank-00000.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"]
    assert (8 + length) % 64 == 0 and len(header) == len(KNOWN)
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        assert start % ((end - start) // math.prod(entry["shape"])) == 0, name


def test_a_long_header_can_be_read_again(tmp_path: Path) -> None:
    """Of a rank with a part of each of many parameters."""
    box, data = Box((0,), (2,)), torch.arange(2.0)
    parts = {
        Part(f"layers.{index}.experts.weight", (4,), box, (("model", torch.float32),)): {"model": data}
        for index in range(10_000)
    }
    write_rank_file(tmp_path / "rank-00000.safetensors", "of a test", parts)
    assert (tmp_path / "rank-00000.safetensors").stat().st_size > 10**6
    file = RankFile(tmp_path / "rank-00000.safetensors", "of a test")
    found = torch.zeros(2)
    entry = file.find([*parts][-1], "model", box, torch.float32)
    entry.wanted.append((box, found))
    entry.read()
    assert torch.equal(found, data)


def test_what_is_written_goes_to_the_disk_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stretch of bytes is named once; and where a system cannot be told, nothing is."""
    told: list[tuple[int, int]] = []

    def tell(descriptor: int, begin: int, length: int, advice: int) -> None:
        assert advice == getattr(os, "POSIX_FADV_DONTNEED", 4)
        told.append((begin, begin + length))

    monkeypatch.setattr(rank_file, "_SENT", 1000)
    monkeypatch.setattr(rank_file, "_BLOCK", 400)
    monkeypatch.setattr(os, "posix_fadvise", tell, raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    save_checkpoint(tmp_path / "c", nn.Linear(32, 32))
    assert told[0][0] == 0 and len(told) > 2
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(told))
    assert all(1000 < end - begin <= 1400 for begin, end in told[1:])
    monkeypatch.delattr(os, "posix_fadvise")
    save_checkpoint(tmp_path / "d", nn.Linear(32, 32))
    load_checkpoint(tmp_path / "d", nn.Linear(32, 32))


class Kinds(nn.Module):
    """Whole, cut, tied, frozen and an expert's parameters, one without elements, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 3, bias=False, dtype=torch.bfloat16)
        self.down, self.other = nn.Linear(8, 16), nn.Linear(8, 16, bias=False)
        self.other.weight = self.down.weight
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)
        self.expert = nn.Linear(4, 2, bias=False)
        self.expert.weight.allreduce = False
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def save_of_kinds(folder: Path) -> None:
    ddp = DistributedDataParallel(
        Kinds(), DistributedDataParallelConfig(use_distributed_optimizer=True), expert_process_group=WORLD_OF_ONE
    )
    groups = [{"params": "*.bias", "lr": 0.5, "betas": [0.5, 0.75]}, {"params": "up.*", "optimizer": torch.optim.SGD}]
    optimizer = DistributedOptimizer(ddp, lr=0.25, param_groups=groups)
    save_checkpoint(folder / "new", ddp, optimizer)
    ddp.finish_grad_sync()
    optimizer.step()
    save_checkpoint(folder / "stepped", ddp, optimizer, extra={"step": 1})
    save_checkpoint(folder / "weights", ddp)


def test_a_manifest_says_what_is_where(tmp_path: Path) -> None:
    simulate(save_of_kinds, 2, tmp_path)
    new, stepped, weights_alone = (Manifest.read(tmp_path / name) for name in ("new", "stepped", "weights"))
    for manifest in (new, stepped, weights_alone):
        assert manifest.tied == {"other.weight": "down.weight"}
        assert manifest.num_expert_sets == 2
        assert {name: entry.shape for name, entry in manifest.tensors.items()} == {
            "up.weight": (3, 64),
            "down.weight": (16, 8),
            "down.bias": (16,),
            "frozen.weight": (2, 2),
            "expert.weight@expert_set_0_of_2": (2, 4),
            "expert.weight@expert_set_1_of_2": (2, 4),
            "empty": (0, 2),
            "count": (),
        }
        assert {name for name, entry in manifest.tensors.items() if entry.is_buffer} == {"count"}
    assert stepped.extra == {"step": 1} and new.extra is weights_alone.extra is weights_alone.optimizer is None
    fp32, half = torch.float32, torch.bfloat16
    for name, entry in weights_alone.tensors.items():
        assert [*entry.dtypes] == ["model"] and entry.group is None and entry.scalars == {}
        assert len(entry.boxes) == 1 and entry.boxes[0][1].sizes == entry.shape, name
    assert {rank for entry in weights_alone.tensors.values() for rank, _ in entry.boxes} == {0, 1}
    moments = {"state.exp_avg": fp32, "state.exp_avg_sq": fp32}
    step = {"step": {"tensor": 1.0, "dtype": "float32"}}
    for name, entry in new.tensors.items():
        assert entry.dtypes == {"model": half, "master": fp32} if name == "up.weight" else "model" in entry.dtypes
        assert not entry.state and entry.scalars == {}
    assert {name: (entry.group, entry.dtypes, entry.scalars) for name, entry in stepped.tensors.items()} == {
        "up.weight": (1, {"model": half, "master": fp32}, {}),
        "down.weight": (2, {"model": fp32, **moments}, step),
        "down.bias": (0, {"model": fp32, **moments}, step),
        "frozen.weight": (None, {"model": fp32}, {}),
        "expert.weight@expert_set_0_of_2": (2, {"model": fp32, **moments}, step),
        "expert.weight@expert_set_1_of_2": (2, {"model": fp32, **moments}, step),
        "empty": (2, {"model": fp32}, {}),
        "count": (None, {"model": torch.int64}, {}),
    }
    for index in range(2):
        ((rank, box),) = stepped.tensors[f"expert.weight@expert_set_{index}_of_2"].boxes
        assert (rank, box.offsets, box.sizes) == (index, (0, 0), (2, 4))
    cut = sorted((box.offsets, box.sizes, rank) for rank, box in stepped.tensors["up.weight"].boxes)
    assert cut == [((0, 0), (2, 64), 0), ((2, 0), (1, 64), 1)]
    assert stepped.optimizer is not None
    assert stepped.optimizer.optimizer_class == "AdamW, SGD, AdamW"
    assert [group["lr"] for group in stepped.optimizer.groups] == [0.5, 0.001, 0.25]
    assert [group.get("betas") for group in stepped.optimizer.groups] == [[0.5, 0.75], None, [0.9, 0.999]]
    known = {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}
    assert all(known.isdisjoint(group) for group in stepped.optimizer.groups)
