"""A Hugging Face model under maingrad's wrappers, with the configuration that ``TrainingArguments`` ask for."""

import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from ....ddp import DistributedDataParallel
from ....fsdp import FSDPModule, MixedPrecisionPolicy
from ...parallelizing.blocks import self_contained
from ...parallelizing.make_optimizer import make_optimizer
from ...parallelizing.parallelize import shard_units

__all__ = [
    "config_of",
    "group_weight_decay",
    "shard",
    "share_buffers",
    "unit_names",
    "whole_weights",
    "written_buffers",
]

_BYTES_OF_A_GRADIENT = 4


def config_of(args: TrainingArguments) -> dict[str, Any]:
    """Options of ``parallelize``, where the user gives no configuration of the wrapper."""
    megabytes = args.ddp_bucket_cap_mb
    return {
        "find_unused_parameters": bool(args.ddp_find_unused_parameters),
        "bucket_size": None if megabytes is None else int(megabytes * 2**20) // _BYTES_OF_A_GRADIENT,
    }


def group_weight_decay(
    model: Any,
    optimizer_class: type,
    options: Mapping[str, Any],
    decayed: Collection[str],
    weight_decay: float,
    matrices: Sequence[Mapping[str, Any]] = (),
) -> torch.optim.Optimizer:
    """An optimizer with transformers' two groups: ``decayed`` parameters, and those without decay.

    matrices  groups of another class, which come first
    """
    module = model.module if isinstance(model, DistributedDataParallel) else model
    taken = {name for group in matrices for name in group["params"]}
    trained = [name for name, param in module.named_parameters() if param.requires_grad and name not in taken]
    inside = [name for name in trained if name in decayed]
    groups = [*matrices, *([{"params": inside, "weight_decay": weight_decay}] if inside else [])]
    options = {**options, "weight_decay": 0.0}
    made: torch.optim.Optimizer = make_optimizer(model, optimizer_class, param_groups=groups, **options)
    return made


def unit_names(model: nn.Module, given: Sequence[str] | None) -> frozenset[str]:
    """Names of the classes whose modules become units. Raises ``ValueError`` where nothing says so."""
    names = frozenset(given if given is not None else getattr(model, "_no_split_modules", None) or ())
    found = {type(module).__name__ for module in model.modules()}
    if given is not None and names - found:
        raise ValueError(f"fsdp_units: the model has no module of class {sorted(names - found)[0]}")
    if not names & found:
        raise ValueError(
            f"{type(model).__name__} does not say which of its modules are blocks: name their classes, "
            f'fsdp_units=["Block"]'
        )
    return names & found


def shard(
    model: nn.Module, names: Collection[str], options: Mapping[str, Any], policy: MixedPrecisionPolicy
) -> FSDPModule:
    """Make units of the blocks, of untied embeddings and of the whole model, from the inside out.

    Output embeddings stay in the outermost unit if a program has replaced the forward around them.
    """
    units = [module for module in model.modules() if module is not model and type(module).__name__ in names]
    units += [end for end in _ends(model) if not any(end in unit.modules() for unit in units)]
    # A parameter that is tied to one elsewhere stays in the outermost unit, which has both inside.
    inside = [*self_contained(model, (unit for unit in units if not isinstance(unit, FSDPModule)))]
    others = {key: value for key, value in options.items() if key not in ("placements", "mesh", "mixed_precision")}
    shard_units(model, inside, options.get("placements", "zero3"), options.get("mesh"), policy, others)
    for module in model.modules():
        # transformers asks for it before a loop whose length depends on data, such as ``generate``: all ranks then run
        # as many forwards as the longest one needs, because each forward gathers.
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
    if hasattr(model, "generate"):
        model.generate = types.MethodType(_generate, model)  # type: ignore[assignment]
    return model  # type: ignore[return-value]  # an instance of both classes


def _ends(model: nn.Module) -> Iterator[nn.Module]:
    """Input and output embeddings. Without the output's where a forward may read their weight, and never call them."""
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    if any(_FORWARD in vars(around) for around in _modules_around(model, ends[1])):
        ends = ends[:1]
    yield from {id(end): end for end in ends if isinstance(end, nn.Module)}.values()


_FORWARD = "forward"
"""The forward of one module alone. Programs put it there for a loss that is fused with the last product, which takes
the weight."""


def _modules_around(model: nn.Module, inner: Any) -> Iterator[nn.Module]:
    """The modules that have ``inner`` inside them."""
    for module in model.modules():
        if module is not inner and any(inside is inner for inside in module.modules()):
            yield module


def _generate(model: Any, *args: Any, **options: Any) -> Any:
    """The model's ``generate``. It may call an encoder outside the forward that gathers the outermost unit."""
    model.unshard()
    try:
        return type(model).generate(model, *args, **options)
    finally:
        model.reshard()


def written_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that a state dict holds: forwards may write them, as running statistics are written."""
    return [
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


@torch.no_grad()
def share_buffers(buffers: Sequence[Tensor]) -> None:
    """Copy the first rank's buffers to all other ranks, in one broadcast for each dtype. Collective."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in buffers:
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for alike in by_dtype.values():
        flat = torch.cat([buffer.flatten() for buffer in alike])
        dist.broadcast(flat, 0)
        for buffer, value in zip(alike, flat.split([buffer.numel() for buffer in alike]), strict=True):
            buffer.copy_(value.view_as(buffer))


@torch.no_grad()
def whole_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """The state dict with whole tensors, on the CPU. Collective over the ranks of a fully sharded model.

    keep  whether this rank wants them: one tensor at a time is whole on the others, and they return nothing

    Names of one tied parameter share one tensor, as in the model.
    """
    first: dict[int, str] = {}
    tied = {name: first.setdefault(id(param), name) for name, param in model.named_parameters(remove_duplicate=False)}
    whole: dict[str, Tensor] = {}
    seen: set[str] = set()
    for name, tensor in model.state_dict().items():
        source = tied.get(name, name)
        if source not in seen:
            seen.add(source)
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if keep:
                whole[source] = full.detach().to("cpu", copy=True)
        if keep:
            whole[name] = whole[source]
    return whole
