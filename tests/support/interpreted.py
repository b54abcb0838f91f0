"""Triton's interpreter without work that it repeats: half of the time of the tests of kernels."""

import functools
from typing import Any

__all__ = ["patch_language_once_a_launch"]


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
