"""Writes the weights of a checkpoint to one safetensors file.

Names are those of the model. A tensor with several names is stored under the first name; the metadata of the file lists
the others. ``dtype`` None keeps the dtype of each parameter. Another dtype is rounded from the fp32 master if there is
one, so ``torch.float32`` gives the masters themselves. Buffers keep their dtype.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..ddp.checkpoint.files.boxes import Parts, part_of_whole
from ..ddp.checkpoint.files.folder import belongs_to_checkpoint
from ..ddp.checkpoint.files.manifest import MANIFEST_FILE, Manifest
from ..ddp.checkpoint.files.opened import open_checkpoint

__all__ = ["CheckpointWeights", "export_safetensors", "read_weights"]


def export_safetensors(
    checkpoint: str | os.PathLike[str], target: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Write the weights in the folder of a checkpoint to the file ``target``. Needs no process group and no model.

    dtype  dtype of all floating-point parameters; None: each parameter keeps its dtype

    Raises ``FileNotFoundError`` and ``ValueError`` like ``load_checkpoint``.
    """
    _check_dtype(dtype)
    _check_target(target)
    weights = read_weights(checkpoint, dtype=dtype)
    _write(Path(target), weights.tensors, weights.tied)


class CheckpointWeights(NamedTuple):
    """A checkpoint's weights, on the CPU."""

    tensors: dict[str, Tensor]
    """Parameters and buffers, whole."""
    tied: Mapping[str, str]
    """Other names of tensors -> their first names."""
    extra: Any
    """What the program has saved beside the model."""


def read_weights(checkpoint: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> CheckpointWeights:
    """The weights in the folder of a checkpoint. Needs no process group and no model.

    dtype  as for ``export_safetensors``, which raises the same errors
    """
    by_name: dict[str, Tensor] = {}

    def choose(manifest: Manifest) -> Parts:
        if manifest.num_expert_sets > 1:
            raise ValueError(
                f"ranks have {manifest.num_expert_sets} different sets of experts: there is no one model whose weights "
                f"these are"
            )
        parts: Parts = {}
        weights = {name: entry for name, entry in manifest.tensors.items() if "model" in entry.dtypes}
        for name, entry in weights.items():
            section = "master" if dtype is not None and "master" in entry.dtypes else "model"
            by_name[name] = torch.empty(entry.shape, dtype=entry.dtypes[section], device="cpu")
            parts |= part_of_whole(name, section, by_name[name])
        return parts

    opened = open_checkpoint(Path(checkpoint), lambda: choose)
    opened.read()
    manifest = opened.manifest
    for name, tensor in by_name.items():
        if dtype is not None and not manifest.tensors[name].is_buffer and tensor.is_floating_point():
            by_name[name] = tensor.to(dtype)
    return CheckpointWeights(by_name, manifest.tied, manifest.extra)


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype = {dtype}: weights are rounded to a floating-point type, or keep theirs (None)")


def _check_target(target: str | os.PathLike[str]) -> None:
    """Raise ``ValueError`` if ``target`` is no file name, or a file of a checkpoint."""
    place = Path(os.path.realpath(target))
    if not os.fspath(target) or place.is_dir():
        raise ValueError(f"'{target}' is no file to write weights to: name one")
    if belongs_to_checkpoint(place.name) and (place.parent / MANIFEST_FILE).exists():
        raise ValueError(f"'{target}' is a file of a checkpoint: write to another one")


def _write(target: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Write to a temporary file, then rename it, so that ``target`` is never incomplete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f"{target.name}.incomplete")
    metadata = {"format": "pt", "maingrad.tied": json.dumps(dict(tied))}
    try:
        save_file(dict(tensors), staging, metadata)
        staging.replace(target)
    except (SafetensorError, OSError) as error:
        staging.unlink(missing_ok=True)  # an incomplete file would keep the disk full
        raise OSError(f"'{target}' could not be written ({error})") from error
