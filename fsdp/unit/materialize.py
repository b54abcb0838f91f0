"""A unit's parameters before sharding: from the meta device to memory, and equal on all ranks."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ...ddp.collectives.rank_grid import RankGrid
from ...ddp.plan.cut import Range
from ...ddp.plan.layout import BucketLayout
from ...ddp.plan.owned_params import OwnedParam, buffers_of_experts
from ...ddp.plan.tensor_parallel.localize import whole_while
from ..tensors.parameter import ShardedParameter

__all__ = ["flat_shard", "materialize", "synchronize"]


class _Unwritten(NamedTuple):
    """One tensor that came from the meta device, and that somebody is to write.

    Memory that nobody has written is known by the bits that it was filled with. A version counter would not do, because
    programs write through ``param.data`` too, whose counter is another.
    """

    module: nn.Module
    name: str
    """The tensor's name in the module."""
    is_buffer: bool
    version: int
    """The tensor's version before anybody wrote."""

    @property
    def missing(self) -> str | None:
        """The elements that nobody has written, in words. None if all are written, or another tensor was registered."""
        tensor = (self.module._buffers if self.is_buffer else self.module._parameters).get(self.name)
        if tensor is None or tensor.is_meta or not _can_hold_marks(tensor):
            return None if tensor is None or not tensor.is_meta else "is on it still"
        bits, mark = _bits(tensor.detach())
        marked = int((bits == mark).sum())
        if not marked:
            return None
        if not _is_unmistakable(tensor) and (marked < bits.numel() or tensor._version != self.version):
            return None
        return "has no value" if marked == bits.numel() else f"has no value in {marked} of {bits.numel()} elements"


def materialize(
    modules: Sequence[nn.Module],
    device: torch.device,
    init_fn: Callable[[nn.Module], None] | None,
    ignored: Collection[int] = (),
    *,
    overwritten: bool = False,
) -> None:
    """Move the own parameters and buffers of ``modules`` (not those of their children) to ``device``.

    modules      the first has all others inside
    init_fn      called with each module that has tensors on the meta device, to initialise its own parameters and
                 buffers; None: the module's ``reset_parameters()``
    ignored      ``id`` of parameters that are not moved
    overwritten  another rank's values will replace this rank's: tensors need none

    A parameter that several modules share stays one parameter, and keeps its attributes. Raises ``ValueError`` for a
    module on the meta device without ``init_fn`` and ``reset_parameters()``, for a tensor that these do not write, and
    for a module with an ignored parameter on the meta device beside others.
    """
    fresh_tensors: list[_Unwritten] = []
    count = Counter(id(param) for module in modules for param in module._parameters.values())
    wholes: dict[int, Tensor] = {}  # of slices that several modules share, by their id
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by id of the meta parameter, which the tuple keeps alive
    for module in modules:
        own = {name: param for name, param in module._parameters.items() if param is not None}
        buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
        on_meta = [name for name, tensor in {**own, **buffers}.items() if tensor.is_meta and id(tensor) not in ignored]
        if on_meta and not callable(init_fn or getattr(module, "reset_parameters", None)):
            raise ValueError(
                f"{type(module).__name__} has parameters or buffers on the meta device and no reset_parameters(): give "
                f"fully_shard init_fn, a function that initialises the parameters of the module that it is called with"
            )
        module._apply(lambda tensor: _moved(tensor, device, ignored), recurse=False)
        if not on_meta:
            continue
        for name, param in own.items():
            if param.is_meta and id(param) in ignored:  # a product with memory that is not there does not always fail
                raise ValueError(
                    f"{type(module).__name__}.{name} is ignored and on the meta device: materialise it first"
                )
            if param.is_meta:
                fresh = module._parameters[name]
                assert fresh is not None, "_apply keeps the names"
                fresh.__dict__.update({**param.__dict__, **fresh.__dict__})
                _, module._parameters[name] = made.setdefault(id(param), (param, fresh))
        fresh_tensors += [_Unwritten(module, name, name in buffers, getattr(module, name)._version) for name in on_meta]
        is_shared = any(count[id(param)] > 1 for param in own.values())
        with whole_while(module, on_meta, partial(_whole_of, wholes if is_shared else {})):
            if init_fn is not None:
                init_fn(module)
            else:
                module.reset_parameters()  # type: ignore[operator]
    if not overwritten:
        _check_written(modules[0], fresh_tensors, "init_fn" if init_fn is not None else "reset_parameters()")


@torch.no_grad()
def synchronize(modules: Sequence[nn.Module], grid: RankGrid, ignored: Collection[int] = ()) -> None:
    """Copy the first rank's own parameters and buffers of ``modules`` to all other ranks. Collective over ``grid``.

    modules  the first has all others inside

    Buffers of experts (``buffers_of_experts``) are copied between the ranks that hold the same experts: a module around
    units of experts, which have a smaller mesh, may have some.
    """
    grids = [param.shard.grid for param in modules[0].parameters() if _is_of_fewer(param, grid)]
    of_experts = buffers_of_experts(modules[0], partial(_is_of_fewer, grid=grid)) if grids else set()
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in ignored:
                (grids[0] if id(tensor) in of_experts else grid).broadcast(tensor.detach())


def flat_shard(layout: BucketLayout, owned: Sequence[OwnedParam], mine: Range, device: torch.device) -> Tensor:
    """[mine.numel]: a copy of this rank's elements of the bucket; padding is 0."""
    flat = torch.zeros(layout.numel, dtype=owned[0].param.dtype, device=device)
    for slot, entry in zip(layout.slots, owned, strict=True):
        flat[slot.start : slot.end].view(slot.spec.shape).copy_(entry.param.detach())
    return flat[mine.start : mine.end].clone()


def _is_of_fewer(param: nn.Parameter, grid: RankGrid) -> TypeGuard[ShardedParameter]:
    """``param`` is sharded already, over fewer ranks than ``grid`` has."""
    return isinstance(param, ShardedParameter) and param.shard.grid.size < grid.size


def _moved(tensor: torch.Tensor, device: torch.device, ignored: Collection[int]) -> torch.Tensor:
    if id(tensor) in ignored:
        return tensor
    return _fill_unwritten(torch.empty_like(tensor, device=device)) if tensor.is_meta else tensor.to(device)


def _whole_of(wholes: dict[int, Tensor], part: Tensor, shape: torch.Size) -> Tensor:
    """The whole of a slice, unwritten before its first module has it."""
    if id(part) not in wholes:
        wholes[id(part)] = _fill_unwritten(part.detach().new_empty(shape))
    return wholes[id(part)]


def _check_written(root: nn.Module, tensors: Sequence[_Unwritten], writer: str) -> None:
    """Raise ``ValueError`` for the first of ``tensors`` that is not written; ``writer``: who was to write it."""
    for each in tensors:
        missing = each.missing
        if missing is None:
            continue
        prefix = next((f"{name}." for name, module in root.named_modules() if module is each.module and name), "")
        raise ValueError(
            f"{'buffer' if each.is_buffer else 'parameter'} '{prefix}{each.name}' of {type(root).__name__} was on the "
            f"meta device, and {missing} after {writer} of {type(each.module).__name__}: give fully_shard an init_fn "
            f"that writes it, as module.{each.name}.copy_(...) does, or make this module on a device that keeps values"
        )


@torch.no_grad()
def _fill_unwritten(tensor: Tensor) -> Tensor:
    """Fill ``tensor`` with the bits by which ``_Unwritten`` knows it; NaN, if it is floating-point. Returns it."""
    if _can_hold_marks(tensor):
        bits, mark = _bits(tensor)
        bits.fill_(mark)
    return tensor


_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _can_hold_marks(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and tensor.element_size() in (1, 2, 4, 8, 16)


def _is_unmistakable(tensor: Tensor) -> bool:
    """No program writes an element with the bits of the mark, except by chance of one in 2^32."""
    return (tensor.is_floating_point() and tensor.element_size() > 1) or tensor.element_size() >= 4


def _bits(tensor: Tensor) -> tuple[Tensor, int]:
    """The elements as integers, in the same memory, and the mark: of floats a NaN that no computation makes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    size = tensor.element_size()
    byte = b"\xff" if tensor.is_floating_point() else b"\xa5"
    return tensor.view(_AS_INTEGERS[size]), int.from_bytes(byte * size, "little", signed=size > 1)
