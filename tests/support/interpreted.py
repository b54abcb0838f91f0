"""Triton's interpreter without work that it repeats, most of the time of the tests of kernels, and with a true fma."""

import functools
import operator
from typing import Any

import numpy as np

__all__ = [
    "patch_fma_rounds_once",
    "patch_language_once_a_launch",
    "patch_overflow_is_sought_by_numpy",
    "patch_types_are_remembered",
]


class _Nothing:
    """In place of a scope with patches: none were made."""

    def restore(self) -> None: ...


def patch_language_once_a_launch() -> None:
    """Let each launch replace ``triton.language``'s functions by interpreted ones once for each module of kernels.

    Triton does so for every call of a device function in every program of the grid, and finds all replaced already.
    """
    from triton.runtime import interpreter

    patched: set[int] | None = None  # by the launch that is under way; None: there is none
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    @functools.wraps(patch)
    def patch_once(fn: Any) -> Any:
        if patched is None:
            return patch(fn)
        if id(fn.__globals__) in patched:
            return _Nothing()
        patched.add(id(fn.__globals__))
        return patch(fn)

    @functools.wraps(launch)
    def launch_anew(*args: Any, **kwargs: Any) -> Any:
        nonlocal patched
        patched = set()
        try:
            return launch(*args, **kwargs)
        finally:
            patched = None

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


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


def patch_overflow_is_sought_by_numpy() -> None:
    """Let numpy compute each sum, difference and product of integers in 64 bits, where Triton takes ten operations."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    sanitize = TritonSemantic.binary_op_sanitize_overflow_impl
    operators = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}

    def impl(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        scalar = lhs.type.scalar
        if self.builder is interpreter.interpreter_builder and scalar.is_int() and scalar.int_bitwidth < 64:
            wide = [each.handle.data.astype(np.int64) for each in (lhs, rhs)]
            exact = operators[binary_op.__name__](*wide)
            if scalar.get_int_min_value() <= exact.min() and exact.max() <= scalar.get_int_max_value():
                return
        sanitize(self, lhs, rhs, binary_op)  # says what is wrong

    TritonSemantic.binary_op_sanitize_overflow_impl = impl


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
