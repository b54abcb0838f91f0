"""Writes the weights of a checkpoint or a model to one safetensors file, and reads such a file into a model.

Names are those of the model. A tensor with several names is stored under the first name; the metadata of the file lists
the others. ``dtype`` None keeps the dtype of each parameter. Another dtype is rounded from the fp32 master if there is
one, so ``torch.float32`` gives the masters themselves. Buffers keep their dtype.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..ddp import DistributedOptimizer
from ..ddp.checkpoint.checkpoint import check_same_call
from ..ddp.checkpoint.files.boxes import Parts, part_of_whole
from ..ddp.checkpoint.files.folder import belongs_to_checkpoint
from ..ddp.checkpoint.files.manifest import MANIFEST_FILE, Manifest
from ..ddp.checkpoint.files.opened import open_checkpoint
from ..ddp.checkpoint.files.rank_file import TYPE_NAMES
from ..ddp.checkpoint.source import ModelTensors, model_tensors
from ..ddp.checkpoint.wrapper_source import WrapperSource, source_of

__all__ = ["CheckpointWeights", "export_safetensors", "load_safetensors", "read_weights", "save_safetensors"]

_TIED = "maingrad.tied"
_CHECKSUMS = "maingrad.crc32"
"""Key in the file's metadata: CRC-32 of dtype, shape and bytes of each tensor. Files of other programs lack it."""
_CHECKED = "maingrad.checked"
"""Key that declares the checksums: if one of the two keys is damaged, the other still shows that they exist."""
_KINDS = {name: dtype for dtype, name in TYPE_NAMES.items() if not dtype.is_floating_point} | {"C64": torch.complex64}
"""All dtypes that are not floating point, by their names in the format."""


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
        _check_one_model(manifest.num_expert_sets)
        parts: Parts = {}
        for name, entry in manifest.tensors.items():
            section = "master" if dtype is not None and "master" in entry.dtypes else "model"
            by_name[name] = torch.empty(entry.shape, dtype=entry.dtypes[section], device="cpu")
            parts |= part_of_whole(name, section, by_name[name])
        return parts

    opened = open_checkpoint(Path(checkpoint), lambda: choose)
    opened.read()
    manifest = opened.manifest
    for name, entry in manifest.tensors.items():
        if not entry.is_buffer:
            by_name[name] = _rounded(by_name[name], dtype)
    return CheckpointWeights(by_name, manifest.tied, manifest.extra)


@torch.no_grad()
def save_safetensors(
    target: str | os.PathLike[str],
    model: nn.Module,
    optimizer: DistributedOptimizer | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights of a model to the file ``target``.

    model      a ``DistributedDataParallel`` model: the call is collective over its ranks, and the first rank writes.
               Another module is written by this process alone
    optimizer  its masters are rounded to ``dtype``; None: the parameters are
    dtype      dtype of all floating-point parameters; None: each parameter keeps its dtype

    All ranks raise the same error.
    """
    _check_dtype(dtype)
    source = _whole_source_of(model)
    ranks, tensors = source.ranks, model_tensors(source.module)
    path, _, sets = check_same_call(target, optimizer, source, "save_safetensors")
    _check_one_model(sets.number)
    found: dict[str, Tensor] = {}
    if optimizer is not None:
        optimizer.prepare_state()
        if dtype is not None and ranks.place < ranks.num_writers:
            optimizer.refresh_masters()
            found = {name: master.cpu() for name, master in _gather_masters(optimizer) if ranks.grid.is_first}

    def write() -> None:
        if ranks.grid.is_first:
            _check_target(path)
            # Parameters are whole on every rank.
            weights = {name: found.get(name, param.detach()) for name, param in tensors.parameters.items()}
            rounded = {name: _rounded(weight, dtype).cpu() for name, weight in weights.items()}
            _write(path, {**rounded, **tensors.buffers}, tensors.tied)

    ranks.run_on_all_ranks(write, f"the writing of '{path}'")


@torch.no_grad()
def load_safetensors(
    source: str | os.PathLike[str], model: nn.Module, optimizer: DistributedOptimizer | None = None
) -> None:
    """Read a file of weights into a model, in place. Floating-point values are rounded to the dtypes of the model.

    model      a ``DistributedDataParallel`` model: the call is collective over its ranks, and each rank reads the file.
               Another module is read by this process alone
    optimizer  its masters get the unrounded values; None: masters follow the parameters at the next step. Moments do
               not change

    The file may hold a tied tensor under any of its names. Raises ``ValueError`` for a damaged file, and for tensors
    that are missing, unknown or of another shape. All ranks raise alike, before the model changes.
    """
    whole = _whole_source_of(model)
    ranks, tensors = whole.ranks, model_tensors(whole.module)
    path, *_ = check_same_call(source, optimizer, whole, "load_safetensors")
    present: dict[str, Tensor] = {**tensors.parameters, **tensors.buffers}
    stored_as = ranks.run_on_all_ranks(lambda: _match(path, tensors, present), f"the opening of '{path}'")
    if optimizer is not None:
        optimizer.prepare_state()
    slices = {} if optimizer is None else {part.name: part for part in optimizer.full_slices(to_load=True)}

    def read() -> None:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name, tensor in present.items():
                part = slices.get(name)
                if part is None:
                    tensor.copy_(file.get_tensor(stored_as[name]))
                elif part.start < part.end:
                    part.master.copy_(file.get_tensor(stored_as[name]).flatten()[part.start : part.end])

    ranks.run_on_all_ranks(read, f"the reading of '{path}'")
    if optimizer is not None:
        optimizer.mark_loaded(from_full=True)


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
    stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    checksums = {name: _checksum(tensor) for name, tensor in stored.items()}
    metadata = {
        "format": "pt",
        _TIED: json.dumps(dict(tied)),
        _CHECKED: "crc32",
        _CHECKSUMS: json.dumps(checksums, sort_keys=True),
    }
    try:
        save_file(stored, staging, metadata)
        staging.replace(target)
    except (SafetensorError, OSError) as error:
        staging.unlink(missing_ok=True)  # an incomplete file would keep the disk full
        raise OSError(f"'{target}' could not be written ({error})") from error


def _checksum(tensor: Tensor) -> int:
    """CRC-32 of a contiguous CPU tensor's dtype, shape and bytes."""
    kind = f"{tensor.dtype} {list(tensor.shape)}".encode()
    contents: Any = tensor.view(-1).view(torch.uint8).numpy()  # a buffer; the stubs for Python 3.11 lack this
    return zlib.crc32(contents, zlib.crc32(kind))


def _check_sums(file: Any, path: Path) -> None:
    """Raise ``ValueError`` if a tensor has changed since it was written. A file without checksums passes."""
    metadata = file.metadata() or {}
    if not {_CHECKED, _CHECKSUMS} & metadata.keys():
        return
    try:
        checksums = json.loads(metadata.get(_CHECKSUMS, "null"))
        names = set(checksums)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"'{path}' is damaged: its checksums are none ({error})") from None
    different = names ^ set(file.keys())
    if different:
        raise ValueError(f"'{path}' is damaged: there is a tensor or a checksum of '{min(different)}', and not both")
    for name, checksum in checksums.items():
        if _checksum(file.get_tensor(name)) != checksum:
            raise ValueError(
                f"'{path}' is damaged where '{name}' lies: it has another checksum than when it was written"
            )


def _rounded(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    return weight if dtype is None or not weight.is_floating_point() else weight.to(dtype)


def _gather_masters(optimizer: DistributedOptimizer) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole masters of half-precision parameters, one at a time. Collective over an instance."""
    group = optimizer.model.grids["dense"].inner
    for part in optimizer.full_slices():
        if part.master.dtype is part.param.dtype:
            continue
        # Ranks have some elements each. The least integer stands for the others: of all ranks' bits the largest count.
        numel = part.bucket_param.owned.param.numel()
        bits = torch.full((numel,), -(2**31), dtype=torch.int32, device=part.master.device)
        bits[part.start : part.end] = part.master.view(torch.int32)
        if group is not None:
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
        yield part.name, bits.view(part.master.dtype).view(part.shape)


def _match(path: Path, tensors: ModelTensors, present: Mapping[str, Tensor]) -> dict[str, str]:
    """Name in the model -> name in the file, for each tensor. Raises ``ValueError`` if they do not match."""
    if not path.exists():
        raise FileNotFoundError(f"there is no file '{path}'")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            _check_sums(file, path)
            stored_as, known = {}, set()
            stored = set(file.keys())
            for name, tensor in present.items():
                aliases = [alias for alias, first in tensors.tied.items() if first == name]
                found = [each for each in (name, *aliases) if each in stored]
                if not found:
                    raise ValueError(f"'{name}' of the model is not in '{path}'")
                for each in found:
                    _check_like(file.get_slice(each), tensor, each, path)
                for alias in found[1:]:
                    if not torch.equal(file.get_tensor(alias), file.get_tensor(found[0])):
                        raise ValueError(f"'{found[0]}' and '{alias}' are one parameter here and differ in '{path}'")
                stored_as[name] = found[0]
                known.update(found)
    except SafetensorError as error:
        raise ValueError(f"'{path}' is truncated, damaged or no safetensors file ({error})") from error
    unknown = sorted(stored - known)
    if unknown:
        raise ValueError(f"'{path}' has {len(unknown)} tensor(s) that the model does not have, such as '{unknown[0]}'")
    return stored_as


def _check_like(stored: Any, tensor: Tensor, name: str, path: Path) -> None:
    shape, dtype = stored.get_shape(), stored.get_dtype()
    if list(shape) != list(tensor.shape):
        raise ValueError(f"'{name}' has shape {list(shape)} in '{path}' and {list(tensor.shape)} in the model")
    # Only floating-point values may be rounded; a conversion of other types would change values.
    same = dtype.startswith(("F", "BF")) if tensor.is_floating_point() else _KINDS.get(dtype) is tensor.dtype
    if not same:
        raise ValueError(f"'{name}' is {dtype} in '{path}' and {tensor.dtype} in the model")


def _whole_source_of(model: nn.Module) -> WrapperSource:
    """The ranks and tensors of the model. Raises ``ValueError`` if no rank has whole parameters."""
    source = source_of(model)
    if not isinstance(source, WrapperSource):
        raise ValueError(
            "no rank has this model's whole parameters: save_checkpoint(path, model) and export_safetensors(path, "
            "target) write them, and a module that is not sharded reads them"
        )
    return source


def _check_one_model(num_expert_sets: int) -> None:
    if num_expert_sets > 1:
        raise ValueError(
            f"ranks have {num_expert_sets} different sets of experts: there is no one model whose weights these are"
        )
