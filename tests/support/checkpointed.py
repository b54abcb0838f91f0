"""A model with one of everything that a checkpoint has to keep, a run over it, and a look into the files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from loops import weights, wrap
from safetensors.torch import load_file
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer
from maingrad.te_integration import Linear

VOCABULARY = 11


class Everything(nn.Module):
    """Tied and frozen parameters, odd shapes, four dims, a scalar, no elements, buffers of both kinds, two dtypes."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, 15, dtype=dtype)
        self.up = Linear(15, 17, dtype=dtype, fuse_wgrad_accumulation=True)
        self.norm = nn.LayerNorm(17, dtype=torch.float32)
        self.scale = nn.Parameter(torch.tensor(0.5 + seed, dtype=dtype))
        self.cube = nn.Parameter(torch.randn(3, 5, 2, 7).to(dtype))
        self.down = nn.Linear(17, 15, bias=False, dtype=dtype)
        self.head = nn.Linear(15, VOCABULARY, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.nothing = nn.Parameter(torch.empty(0, 4, dtype=dtype))
        self.fixed = nn.Parameter(torch.randn(7, 15).to(dtype).t(), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.randn(3), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += tokens.numel()
        hidden = self.embed(tokens) + self.fixed[:, 0] * self.scale
        hidden = self.norm(self.up(hidden).float()).to(hidden.dtype)
        return self.head(self.down(hidden).tanh() * self.cube.square().mean())


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(100 * rank + step))


def take_steps(ddp: DistributedDataParallel, optimizer: DistributedOptimizer, steps: Sequence[int], rank: int) -> None:
    for step in steps:
        tokens = batch(step, rank).to(ddp.device)
        nn.functional.cross_entropy(ddp(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten()).backward()
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()


def build(
    dtype: torch.dtype = torch.float32, *, seed: int = 0, optimizer: dict[str, Any] | None = None, **config: Any
) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    """config: fields of ``DistributedDataParallelConfig``; optimizer: arguments of ``DistributedOptimizer``."""
    ddp = wrap(Everything(dtype, seed=seed), **config)
    return ddp, DistributedOptimizer(ddp, **{"lr": 0.02, "weight_decay": 0.1, **(optimizer or {})})


def model_state(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    return {**weights(ddp), **{name: buffer.clone() for name, buffer in ddp.module.named_buffers()}}


def left_by_a_save(folder: Path, name: str) -> Path:
    """Put a checkpoint where a save that died has left it, under this name, with the mark of such a folder."""
    (folder / "maingrad.saving").touch()
    return folder.rename(folder.with_name(name))


def files_content(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """All tensors, as the safetensors library reads them, and the manifest but for the save's id and where things lie.

    Tensors are {"model": {name: tensor}, "master": {name: tensor}, "optimizer": {"state": {name: {key: tensor}}}},
    without what is empty.
    """
    manifest = json.loads((folder / "maingrad.json").read_text())
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    tensors: dict[str, Any] = {}
    for name, entry in manifest["tensors"].items():
        boxes = entry.pop("boxes")
        for section, dtype in entry["dtypes"].items():
            whole = torch.empty(entry["shape"], dtype=getattr(torch, dtype))
            for rank, offsets, sizes in boxes:
                is_plain = sizes == entry["shape"] and not name.endswith("]")
                key = f"{section}.{name}" + ("" if is_plain else f"[{','.join(map(str, offsets))}]")
                place = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
                whole[place] = files[f"rank-{rank:05d}.safetensors"][key]
            if section.startswith("state."):
                state = tensors.setdefault("optimizer", {"state": {}})["state"].setdefault(name, {})
                state[section.removeprefix("state.")] = whole
            else:
                tensors.setdefault(section, {})[name] = whole
    del manifest["save_id"], manifest["checksum"]
    return tensors, manifest


def assert_same_files(first: Path, second: Path) -> None:
    """Bitwise, however the elements are cut."""
    (tensors, manifest), (others, other_manifest) = files_content(first), files_content(second)
    assert manifest == other_manifest
    _assert_same_tree(tensors, others, "")


def _assert_same_tree(one: Any, other: Any, where: str) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            _assert_same_tree(one[key], other[key], f"{where}/{key}")
        return
    assert one.dtype == other.dtype and one.shape == other.shape, where
    assert torch.equal(one, other), where


class Experts(nn.Module):
    """A dense layer on all ranks, and an expert that ranks of one parity share; ``marked`` as Megatron-core does."""

    def __init__(self, seed: int, parity: int, *, marked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.dense = nn.Linear(5, 7)
        torch.manual_seed(100 * seed + parity)
        self.expert = nn.Linear(7, 5)
        if marked:
            for param in self.expert.parameters():
                param.allreduce = False

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.dense(x))
