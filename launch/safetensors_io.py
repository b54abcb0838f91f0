"""Weights as one safetensors file: out of a checkpoint or a model, and into a model.

Names are the model's own; a tensor with several names is stored under the first, and the others are in the file's own
metadata. ``dtype`` None keeps each parameter's; another one is rounded from the fp32 master where there is one, so that
``torch.float32`` gives the masters themselves. Buffers keep theirs.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..ddp import DistributedOptimizer
from ..ddp.checkpoint.files.boxes import TensorSlice
from ..ddp.checkpoint.files.folder import belongs_to_checkpoint
from ..ddp.checkpoint.files.manifest import MANIFEST_FILE
from ..ddp.checkpoint.files.storage import check_stored, open_checkpoint, read_slices
from ..ddp.checkpoint.files.typed_json import dtype_named
from ..ddp.checkpoint.model import ModelTensors
from ..ddp.checkpoint.ranks import CheckpointRanks, check_same_call
from ..ddp.checkpoint.wrapper_source import WrapperSource, source_of

__all__ = ["export_safetensors", "load_safetensors", "save_safetensors"]

_TIED = "maingrad.tied"
_CHECKSUMS = "maingrad.crc32"
"""In the file's own metadata: of each tensor's dtype, shape and bytes. The format has none; other files have none."""
_CHECKED = "maingrad.checked"
"""Says that they are there: where one of the two names is damaged the other one is not."""
_KINDS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "C64": torch.complex64,
}
"""By the format's names, all that is not floating-point."""


def export_safetensors(
    checkpoint: str | os.PathLike[str], target: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> None:
    """Write the weights in a checkpoint's folder to the file ``target``; no process group, no model.

    dtype  None: each parameter's own; else that of all floating-point parameters

    Raises ``FileNotFoundError`` and ``ValueError`` as ``load_checkpoint`` does.
    """
    _check_dtype(dtype)
    stored = open_checkpoint(Path(checkpoint))
    manifest = stored.manifest
    _check_one_model(manifest.num_expert_sets)
    _check_target(target)
    slices, by_name = [], {}
    for name, entry in {**manifest.parameters, **manifest.buffers}.items():
        master = dtype is not None and entry.has_master
        data = torch.empty(entry.shape, dtype=torch.float32 if master else dtype_named(entry.dtype), device="cpu")
        slices.append(TensorSlice(("master" if master else "model", name), entry.shape, 0, data.numel(), data))
        by_name[name] = data
    check_stored(manifest.index, slices)
    read_slices(stored, slices)
    for name in manifest.parameters:
        by_name[name] = _rounded(by_name[name], dtype)
    _write(Path(target), by_name, manifest.tied)


@torch.no_grad()
def save_safetensors(
    target: str | os.PathLike[str],
    model: nn.Module,
    optimizer: DistributedOptimizer | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model's weights to the file ``target``.

    model      a ``DistributedDataParallel`` model: collective over its ranks, the first of which writes; any other
               module is written by this process alone
    optimizer  has the masters that ``dtype`` is rounded from; None: it is rounded from the parameters
    dtype      None: each parameter's own; else that of all floating-point parameters

    All ranks raise alike.
    """
    _check_dtype(dtype)
    source = _whole_source_of(model)
    ranks, tensors = source.ranks, source.tensors
    path, *_, num_expert_sets = check_same_call(target, optimizer, ranks, source.expert_axes, "save_safetensors")
    _check_one_model(num_expert_sets)
    found: dict[str, Tensor] = {}
    if optimizer is not None:
        optimizer.settle()
        if dtype is not None and ranks.writes:
            optimizer.refresh_masters()
            found = {name: master.cpu() for name, master in _gather_masters(optimizer, ranks)}

    def write() -> None:
        if ranks.leads:
            _check_target(path)
            # Parameters are whole on every rank.
            weights = {name: found.get(name, param.detach()) for name, param in tensors.parameters.items()}
            rounded = {name: _rounded(weight, dtype).cpu() for name, weight in weights.items()}
            _write(path, {**rounded, **tensors.buffers}, tensors.tied)

    ranks.alike(write, f"the writing of '{path}'")


@torch.no_grad()
def load_safetensors(
    source: str | os.PathLike[str], model: nn.Module, optimizer: DistributedOptimizer | None = None
) -> None:
    """Read a file of weights into a model, in place; floating-point values are rounded to the model's dtypes.

    model      a ``DistributedDataParallel`` model: collective over its ranks, each of which reads the file; any other
               module is filled by this process alone
    optimizer  its masters get the file's values unrounded; None: they follow the parameters at the next step. Moments
               stay as they are

    A tied tensor may be in the file under any of its names. Raises ``ValueError``, alike on all ranks and before the
    model has changed, for a file that is damaged, tensors that are missing, unknown or of another shape.
    """
    whole = _whole_source_of(model)
    ranks, tensors = whole.ranks, whole.tensors
    path, *_ = check_same_call(source, optimizer, ranks, None, "load_safetensors")
    present: dict[str, Tensor] = {**tensors.parameters, **tensors.buffers}
    stored_as = ranks.alike(lambda: _match(path, tensors, present), f"the opening of '{path}'")
    if optimizer is not None:
        optimizer.settle()
    slices = {} if optimizer is None else {part.name: part for part in optimizer.slices}

    def read() -> None:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name, tensor in present.items():
                part = slices.get(name)
                if part is None:
                    tensor.copy_(file.get_tensor(stored_as[name]))
                elif part.start < part.end:
                    part.master.copy_(file.get_tensor(stored_as[name]).flatten()[part.start : part.end])

    ranks.alike(read, f"the reading of '{path}'")
    if optimizer is not None:
        optimizer.mark_loaded()


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype = {dtype}: weights are rounded to a floating-point type, or keep theirs (None)")


def _check_target(target: str | os.PathLike[str]) -> None:
    """Raise ``ValueError`` for what is no name of a file, or a file of a checkpoint."""
    place = Path(os.path.realpath(target))
    if not os.fspath(target) or place.is_dir():
        raise ValueError(f"'{target}' is no file to write weights to: name one")
    if belongs_to_checkpoint(place.name) and (place.parent / MANIFEST_FILE).exists():
        raise ValueError(f"'{target}' is a file of a checkpoint: write to another one")


def _write(target: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """Beside its place first: ``target`` is never half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f"{target.name}.incomplete")
    stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    checksums = {name: _checksum(tensor) for name, tensor in stored.items()}
    metadata = {"format": "pt", _TIED: json.dumps(dict(tied)), _CHECKED: "crc32", _CHECKSUMS: json.dumps(checksums)}
    try:
        save_file(stored, staging, metadata)
        staging.replace(target)
    except (SafetensorError, OSError) as error:
        staging.unlink(missing_ok=True)  # half a file would keep the disk full
        raise OSError(f"'{target}' could not be written ({error})") from error


def _checksum(tensor: Tensor) -> int:
    """CRC-32 of a contiguous CPU tensor's dtype, shape and bytes."""
    kind = f"{tensor.dtype} {list(tensor.shape)}".encode()
    contents: Any = tensor.view(-1).view(torch.uint8).numpy()  # a buffer, which its stubs for Python 3.11 do not say
    return zlib.crc32(contents, zlib.crc32(kind))


def _check_sums(file: Any, path: Path) -> None:
    """Raise ``ValueError`` where a tensor is another than was written; a file from elsewhere has no checksums."""
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


def _gather_masters(optimizer: DistributedOptimizer, ranks: CheckpointRanks) -> Iterator[tuple[str, Tensor]]:
    """On the first rank of an instance the masters of parameters in half precision, one at a time; else nothing.

    Collective over the instance.
    """
    slices = [part for part in optimizer.slices if part.master.dtype is not part.param.dtype]
    mine = [(part.start, part.end) for part in slices]
    ranges, here = [mine], 0
    if ranks.group is not None:
        ranges, here = [[]] * ranks.group.size(), ranks.group.rank()
        dist.all_gather_object(ranges, mine, group=ranks.group)
    for index, part in enumerate(slices):
        numel = part.wired.owned.param.numel()
        owners = [rank for rank, parts in enumerate(ranges) if parts[index][0] < parts[index][1]]
        if ranges[0][index] == (0, numel):
            owners = [0]  # all of it is there, whoever else has it
        if here == 0:
            whole = torch.empty(numel, dtype=part.master.dtype, device=part.master.device)
            for rank in owners:
                start, end = ranges[rank][index]
                if rank == 0:
                    whole[start:end] = part.master
                else:
                    dist.recv(whole[start:end], group=ranks.group, group_src=rank)
            yield part.name, whole.view(part.shape)
        elif here in owners:
            dist.send(part.master, group=ranks.group, group_dst=0)


def _match(path: Path, tensors: ModelTensors, present: Mapping[str, Tensor]) -> dict[str, str]:
    """Under which name of the file each tensor of the model lies. Raises where they do not match."""
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
    # Floating-point values are rounded; a number of another kind would be another number.
    same = dtype.startswith(("F", "BF")) if tensor.is_floating_point() else _KINDS.get(dtype) is tensor.dtype
    if not same:
        raise ValueError(f"'{name}' is {dtype} in '{path}' and {tensor.dtype} in the model")


def _whole_source_of(model: nn.Module) -> WrapperSource:
    """The model's ranks and tensors. Raises ``ValueError`` where no rank has whole parameters."""
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
