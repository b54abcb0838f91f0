"""Gives memory and values to a model of ``transformers`` that was built on the meta device, some modules at a time.

Stored values are read from safetensors, one tensor after the other. New ones are drawn by the model's own
``_init_weights``, with a seed for each module's name: they do not depend on which modules are filled together. Buffers
that are in no file (rotary frequencies) come from ``_init_weights`` too, as in ``from_pretrained``.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..config.error import ConfigError
from .hugging_face_folder import shard_files

__all__ = ["DeferredValues", "stored_tensors"]

_INITIALISED = "_is_hf_initialized"
"""The attribute by which transformers' initialisers know what to leave alone."""


class DeferredValues:
    """Fills the modules of one model.

    model   of ``transformers``, on the meta device, before ``convert_linears``
    files   the file of each stored tensor, by name (``stored_tensors``); None: all values are drawn
    seed    of drawn values
    device  where tensors are to be
    """

    def __init__(self, model: Any, files: Mapping[str, Path] | None, *, seed: int, device: torch.device) -> None:
        self._model, self._files, self._seed, self._device = model, files or {}, seed, device
        self._classes = {id(module): (name, type(module)) for name, module in model.named_modules()}
        self._drawers = dict(_drawers(model))
        self._names = _names(model)
        self._shared: dict[int, Tensor] = {}
        """By ``id`` of a tensor on meta that several modules have: the tensor in its place."""
        self._kept_alive = [*model.parameters(), *model.buffers()]
        """The tensors on meta, so that an ``id`` stays theirs."""
        for holder in (*model.modules(), *self._kept_alive):
            holder.__dict__.pop(_INITIALISED, None)

    @torch.no_grad()
    def fill(self, modules: Iterable[nn.Module]) -> None:
        """Fill the own tensors of ``modules`` that are on meta. Tensors that several modules share stay shared.

        Raises ``ConfigError`` for a tensor that is neither stored nor initialised by the model's class, and for a file
        that cannot be read.
        """
        chosen = {id(module) for module in modules}
        inside = [module for module in _children_first(self._model) if id(module) in chosen]
        for parameter in self._model.parameters():  # those of earlier calls, which may be shards by now, stay
            if not parameter.is_meta:
                setattr(parameter, _INITIALISED, True)
        drawn = {name: tensor for module in inside for name, tensor in self._allocate(module)}
        versions = {name: tensor._version for name, tensor in drawn.items()}
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            for module in inside:
                self._draw(module)
        for name, tensor in drawn.items():
            if _is_unset(tensor, versions[name]):
                raise ConfigError(
                    f"model.hugging_face: {type(self._model).__name__} leaves '{name}' without a value in _init_weights"
                )

    def _allocate(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Allocate the module's own tensors, and read those that are stored; yields the others with their names."""
        for places in (module._parameters, module._buffers):
            for key, tensor in places.items():
                if tensor is None or not tensor.is_meta:
                    continue
                found = self._shared.get(id(tensor))
                if found is None:
                    found = _like(tensor, self._device)
                    names = self._names[id(tensor)]
                    stored = next((name for name in names if name in self._files), None)
                    if stored is None:
                        _unset(found)
                        yield names[0], found
                    else:
                        _read(self._files[stored], stored, found)
                        setattr(found, _INITIALISED, True)
                    if len(names) > 1:
                        self._shared[id(tensor)] = found
                places[key] = found  # type: ignore[assignment]

    def _draw(self, module: nn.Module) -> None:
        """Have the model's class initialise the module, as the class that it was built of."""
        if id(module) not in self._classes:
            return
        name, built_as = self._classes[id(module)]
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        converted = type(module)
        module.__class__ = built_as
        try:
            self._drawers[id(module)]._init_weights(module)
        finally:
            module.__class__ = converted
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and any(tensor is each for each in self._shared.values()):
                setattr(tensor, _INITIALISED, True)  # the next module that has it does not draw it again


def stored_tensors(model: Any, folder: str, dtype: torch.dtype) -> dict[str, Path] | str:
    """The safetensors file of each tensor of ``model`` in ``folder``, by name; a string: why they cannot be read one
    by one, and ``from_pretrained`` is needed.

    model  of ``transformers``, on meta
    dtype  of its parameters

    Reads headers alone.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        return "the weights are quantised"
    keeps = [getattr(model, f"_keep_in_fp32_modules{kind}", None) for kind in ("", "_strict")]
    if dtype is not torch.float32 and any(keeps):
        return "the model keeps some modules in fp32"
    try:
        files = _files_of(Path(folder))
        shapes = {name: shape for path in set(files.values()) for name, shape in _shapes(path)}
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return f"its safetensors cannot be listed ({error})"
    if set(shapes) != set(files):
        return "its index names other tensors than its files"
    converted = _converted(model, files)
    if converted is not None:
        return f"transformers converts '{converted}' as it loads it"
    wanted: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        wanted.setdefault(id(tensor), []).append(name)
        if name in shapes and shapes[name] != list(tensor.shape):
            return f"'{name}' has another shape"
    for names in wanted.values():
        found = [name for name in names if name in shapes]
        if len(found) != 1:
            return f"'{names[0]}' is {'stored twice' if found else 'not stored'}"
    unknown = sorted(set(shapes) - {name for names in wanted.values() for name in names})
    return f"the model has no '{unknown[0]}'" if unknown else files


def _converted(model: Any, names: Iterable[str]) -> str | None:
    """A stored name that transformers renames or converts as it loads the model; None: there is none."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    patterns = [pattern for each in get_model_conversion_mapping(model) for pattern in each.source_patterns]
    # A star stands for a number, as in `experts.*.w1`; a pattern is a regular expression otherwise.
    compiled = [re.compile(pattern.replace(".*.", r"\.\d+\.")) for pattern in patterns]
    return next((name for name in names if any(each.search(name) for each in compiled)), None)


def _files_of(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return shard_files(index)
    path = folder / "model.safetensors"
    return {name: path for name, _ in _shapes(path)}


def _shapes(path: Path) -> list[tuple[str, list[int]]]:
    with safe_open(path, framework="pt", device="cpu") as file:
        return [(name, list(file.get_slice(name).get_shape())) for name in file.keys()]  # noqa: SIM118  no dict


def _read(path: Path, name: str, target: Tensor) -> None:
    try:
        # The file is mapped only for this tensor: pages of the others would count as this process's memory.
        with safe_open(path, framework="pt", device="cpu") as file:
            target.copy_(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.hugging_face: '{name}' of '{path}' cannot be read ({error})") from None


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    found = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        found = nn.Parameter(found, requires_grad=tensor.requires_grad)
    found.__dict__.update(tensor.__dict__)
    return found


def _unset(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.zero_()


def _is_unset(tensor: Tensor, version: int) -> bool:
    """Whether a tensor of ``_unset`` is as it was.

    version  of the tensor, behind ``_unset``: tells integers that were set to 0 from those that nobody has written
    """
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.numel() > 0 and tensor._version == version and not tensor.any()


def _names(model: nn.Module) -> dict[int, list[str]]:
    """All names of each tensor, by ``id``."""
    found: dict[int, list[str]] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        found.setdefault(id(tensor), []).append(name)
    return found


def _drawers(model: Any) -> Iterator[tuple[int, Any]]:
    """By ``id`` of a module: the innermost model of ``transformers`` around it, which initialises it."""
    from transformers import PreTrainedModel

    def visit(module: nn.Module, drawer: Any) -> Iterator[tuple[int, Any]]:
        drawer = module if isinstance(module, PreTrainedModel) else drawer
        yield id(module), drawer
        for child in module.children():
            yield from visit(child, drawer)

    return visit(model, model)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Each module once, behind those inside it."""
    seen: set[int] = set()

    def visit(found: nn.Module) -> Iterator[nn.Module]:
        if id(found) not in seen:
            seen.add(id(found))
            for child in found.children():
                yield from visit(child)
            yield found

    return visit(module)
