"""Triton's interpreter without work that it repeats, half of the time of the tests of kernels, and with a true fma."""

import functools
from typing import Any

import numpy as np

__all__ = ["patch_fma_rounds_once", "patch_language_once_a_launch"]


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
