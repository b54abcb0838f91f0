"""Triton's interpreter without work that it repeats, most of the time of the tests of kernels, and with a true fma."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

__all__ = [
    "addresses_are_checked",
    "patch_fma_rounds_once",
    "patch_language_once",
    "patch_overflow_is_not_sought_in_vain",
    "patch_types_are_remembered",
]


class _Nothing:
    """In place of a scope with patches: none are taken back."""

    def restore(self) -> None: ...


def patch_language_once() -> None:
    """Let ``triton.language``'s functions be replaced by interpreted ones once for each module of kernels.

    Triton does so for each launch and for every call of a device function in every program of the grid, and finds all
    replaced already. Nothing is compiled in a process whose kernels are interpreted, so they stay replaced.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched: dict[int, Any] = {}  # names of modules by id, which stays theirs while they are here

    @functools.wraps(patch)
    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) not in patched:
            patched[id(fn.__globals__)] = fn.__globals__
            patch(fn)
        return _Nothing()

    interpreter._patch_lang = patch_once


def patch_overflow_is_not_sought_in_vain() -> None:
    """Leave out what each sum, difference and product of integers computes for an assertion of debug builds alone."""
    from triton.language.semantic import TritonSemantic

    sanitize = TritonSemantic.binary_op_sanitize_overflow_impl

    @functools.wraps(sanitize)
    def impl(self: Any, *args: Any) -> None:
        if self.builder.options.debug:
            sanitize(self, *args)

    TritonSemantic.binary_op_sanitize_overflow_impl = impl


def patch_types_are_remembered() -> None:
    """Let blocks of one shape share what follows from it: each operation makes some, and looks through it again."""
    from triton.language import core
    from triton.runtime import interpreter

    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    arrays: dict[str, Any] = {}
    init_block, init_tensor, get_np_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        values = shape.values if isinstance(shape, core.tuple) else shape
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            return init_block(self, element_ty, shape)
        key = (element_ty.name, getattr(element_ty, "address_space", None), *values)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        self.element_ty = element_ty
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            init_tensor(self, handle, type)
            shapes[key] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shapes[key]

    def np_dtype(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar
        if scalar.name not in arrays:
            arrays[scalar.name] = get_np_dtype(scalar)
        return arrays[scalar.name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block, tensor, np_dtype


def patch_fma_rounds_once() -> None:
    """Let ``tl.fma`` round once, as on a GPU: the interpreter rounds the product and then the sum."""
    from triton.runtime import interpreter

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return interpreter.TensorHandle(_fma(x.data, y.data, z.data), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma


@np.errstate(all="ignore")
def _fma(x: Any, y: Any, z: Any) -> Any:
    """fp32 ``x y + z``: the product is exact in fp64, and the sum's last bit says whether more was cut off."""
    assert x.dtype == y.dtype == z.dtype == np.float32, "no kernel has another fma"
    product, addend = x.astype(np.float64) * y, z.astype(np.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    toward_zero = np.where(lost * np.sign(total) < 0, np.nextafter(total, 0), total)
    bits = np.where(np.isfinite(lost) & (lost != 0), toward_zero, total).view(np.int64)
    sticky = (np.isfinite(lost) & (lost != 0)).astype(np.int64)
    return (bits | sticky).view(np.float64).astype(np.float32)


class _Memory:
    """Addresses of the tensors whose address somebody has asked for: arguments of kernels, and what tables point to."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        self._ranges: tuple[Any, Any] | None = None

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if self._ends.get(start, start) < end:
            self._ends[start] = end
            self._ranges = None

    def check(self, addresses: Any, nbytes: int) -> None:
        """Raise ``IndexError`` for elements of ``nbytes`` that lie in no tensor."""
        if not addresses.size:
            return
        starts, ends = self._merged()
        index = np.searchsorted(starts, int(addresses.min()), "right") - 1
        if index >= 0 and int(addresses.max()) + nbytes <= ends[index]:
            return
        places = np.searchsorted(starts, addresses.astype(np.int64), "right") - 1
        outside = (places < 0) | (addresses.astype(np.int64) + nbytes > ends[places])
        if outside.any():
            raise IndexError(f"{int(outside.sum())} of {addresses.size} elements lie outside of all tensors")

    def _merged(self) -> tuple[Any, Any]:
        if self._ranges is None:
            merged: list[list[int]] = []
            for start, end in sorted(self._ends.items()):
                if merged and start <= merged[-1][1]:
                    merged[-1][1] = max(end, merged[-1][1])
                else:
                    merged.append([start, end])
            table = np.array(merged, np.int64).reshape(-1, 2)
            self._ranges = table[:, 0], table[:, 1]
        return self._ranges


def _poison(kind: Any) -> Any:
    """NaN, in bf16 and 8 bits by its bits; of integers one far from 0, whose bits are no -0.0 either."""
    if kind.is_bf16():
        return 0x7FC0
    if kind.is_floating():
        return 0xFF if kind.primitive_bitwidth == 8 else np.nan
    half = 2 ** (kind.primitive_bitwidth - 1)
    return 1 - half if kind.is_int_signed() else half + 1


@contextmanager
def addresses_are_checked() -> Iterator[None]:
    """Kernels that read or write an element outside of all tensors raise; on a GPU they may, or read what lies there.

    A load without ``other`` gives NaN or odd integers where its mask is False: on a GPU it gives anything.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    load, store, rmw = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    data_ptr = torch.Tensor.data_ptr
    memory = _Memory()

    def check(pointers: Any, mask: Any) -> None:
        nbytes = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        active = mask if isinstance(mask, np.ndarray) else mask.data  # a descriptor's is no handle
        memory.check(pointers.data[active.astype(bool)], nbytes)

    def create_masked_load(self: Any, pointers: Any, mask: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        check(pointers, mask)
        if other is None and pointers.data.size > 1:  # the interpreter takes a 0 for one element for None
            kind = pointers.get_element_ty()
            poison = np.full(pointers.data.shape, _poison(kind), interpreter._get_np_dtype(kind))
            other = interpreter.TensorHandle(poison, kind)
        return load(self, pointers, mask, other, *args, **kwargs)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *args)

    def create_atomic_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        check(pointers, mask)
        return rmw(self, operation, pointers, value, mask, *args)

    def noted(self: torch.Tensor) -> int:
        address = data_ptr(self)
        memory.note(self)
        return address

    with (
        mock.patch.object(builder, "create_masked_load", create_masked_load),
        mock.patch.object(builder, "create_masked_store", create_masked_store),
        mock.patch.object(builder, "create_atomic_rmw", create_atomic_rmw),
        mock.patch.object(torch.Tensor, "data_ptr", noted),
    ):
        yield
