"""Buffers that modules make when they need them: a checkpoint may hold or lack them, and so may the model."""

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import DistributedDataParallel, load_checkpoint, save_checkpoint
from maingrad.ddp.checkpoint.files.manifest import Manifest
from maingrad.launch import simulate


class Remembers(nn.Linear):
    """Keeps its last inputs, in rows, as many as it was told, and their mean."""

    def __init__(self, rows: int = 0, value: float = 0.0, width: int = 2) -> None:
        super().__init__(width, width)
        self.began_anew = False
        if rows:
            self.register_buffer("seen", torch.full((rows, width), value))
            self.register_buffer("mean", torch.full((), value))

    def on_demand_buffers(self) -> tuple[str, ...]:
        return ("seen", "mean")

    def fits_stored(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return tuple(shapes.get("seen", ()))[1:] == (self.in_features,)

    def adopt_stored(self, stored: Mapping[str, Tensor]) -> None:
        self.began_anew = not stored
        for name, value in stored.items():
            self.register_buffer(name, value.clone())

    def contents(self) -> list[float]:
        if not hasattr(self, "seen"):
            return []
        assert self.mean == self.seen.mean()
        return self.seen[:, 0].tolist()


def model_of(*parts: Remembers) -> nn.Module:
    """Of one part: the part itself, whose buffers lie in no other module."""
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


@pytest.mark.parametrize(
    ("rows_there", "rows_here", "parts", "wrapped"),
    [(3, 0, 2, False), (3, 1, 1, False), (3, 0, 1, True), (0, 1, 2, False), (0, 1, 1, True), (0, 0, 1, False)],
)
def test_the_model_has_afterwards_what_the_checkpoint_has(
    tmp_path: Path, rows_there: int, rows_here: int, parts: int, wrapped: bool
) -> None:
    save_checkpoint(tmp_path / "c", model_of(*(Remembers(rows_there, 5.0 + index) for index in range(parts))))
    here = [Remembers(rows_here, 1.0) for _ in range(parts)]
    model = model_of(*here)
    load_checkpoint(tmp_path / "c", DistributedDataParallel(model) if wrapped else model)
    for index, each in enumerate(here):
        assert each.began_anew is (rows_there == 0)
        assert each.contents() == ([5.0 + index] * rows_there if rows_there else [1.0] * rows_here)


def test_one_that_does_not_fit_its_module_is_refused_by_name(tmp_path: Path) -> None:
    other = Remembers()
    other.register_buffer("seen", torch.ones(3, 7))
    save_checkpoint(tmp_path / "c", nn.Sequential(nn.Tanh(), other))
    model = Remembers(2, 1.0)
    with pytest.raises(ValueError, match=r"'1\.seen' is missing in the model and a buffer of float32 \[3, 7\] in the"):
        load_checkpoint(tmp_path / "c", nn.Sequential(nn.Tanh(), model))
    assert model.contents() == [1.0, 1.0] and not model.began_anew


def test_a_pipelines_stage_takes_what_its_own_modules_need(tmp_path: Path) -> None:
    """Other stages' modules are not there, and have no buffer yet that could tell their names."""
    save_checkpoint(tmp_path / "c", nn.Sequential(Remembers(3, 5.0), Remembers(3, 6.0)))

    def load() -> list[float]:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
        mine = Remembers()
        stage = DistributedDataParallel(nn.ModuleDict({str(dist.get_rank()): mine}), process_group=mesh.get_group("dp"))
        load_checkpoint(tmp_path / "c", stage, pipeline_group=mesh.get_group("pp"))
        return mine.contents()

    assert simulate(load, 2) == [[5.0] * 3, [6.0] * 3]


def test_one_of_a_checkpoint_that_is_replaced_meanwhile_is_not_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load opens the next checkpoint, which has no such buffer, and has read nothing of the first one's."""
    save_checkpoint(tmp_path / "c", Remembers(3, 5.0))
    original, count = Manifest.read, itertools.count()

    def replaced(folder: Path) -> Manifest:
        found = original(folder)
        if not next(count):
            save_checkpoint(tmp_path / "c", Remembers())
        return found

    monkeypatch.setattr(Manifest, "read", replaced)
    model = Remembers()
    load_checkpoint(tmp_path / "c", model)
    assert next(count) == 2 and not model.contents()
