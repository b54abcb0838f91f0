"""``Launches``: a compiled form is asked for once a key, and launched with the arguments of each call."""

from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton", reason="the launches are Triton's")
from maingrad.kernels import triton_support
from maingrad.kernels.triton_support import Launches

GRID = 3, 2, 1


class Compiled:
    def __init__(self, log: list[Any], number: int) -> None:
        self.log, self.number = log, number

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.log.append((self.number, grid, arguments))


class Kernel:
    """Like ``triton.jit``'s: it launches, and returns the compiled form; the interpreter returns none."""

    def __init__(self, compiles: bool) -> None:
        self.log: list[Any] = []
        self.asked: list[Any] = []
        self.compiles = compiles
        self.arg_names: list[str] = []
        self.fn: object = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, num_warps: int) -> Compiled | None:
            compiled = Compiled(self.log, len(self.asked))
            self.asked.append((arguments, num_warps))
            compiled[grid](*arguments)
            return compiled if self.compiles else None

        return run


def test_a_form_is_asked_for_once_a_key() -> None:
    kernel = Kernel(compiles=True)
    launch = Launches(kernel, num_warps=4)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("b", 4)):
        launch(key, GRID, value, None)
    assert kernel.asked == [((1, None), 4), ((2, None), 4)]
    assert kernel.log == [(0, GRID, (1, None)), (1, GRID, (2, None)), (0, GRID, (3, None)), (1, GRID, (4, None))]


def test_counts_of_one_are_no_constants() -> None:
    """On this device; the compiler's form of such a launch is tested with the kernels."""
    kernel = Kernel(compiles=True)
    kernel.arg_names, kernel.fn = ["x", "rows"], object()
    other = Kernel(compiles=True)
    with mock.patch.object(triton_support.triton, "jit", mock.Mock(return_value=other)) as jit:
        launch = Launches(kernel, ["rows"], num_warps=4)
        launch("a", GRID, 1, 2)
        assert not jit.called
        launch("b", GRID, 2, 1)
        launch("b", GRID, 3, 1)
        launch("c", GRID, 4, 1)
    jit.assert_called_once_with(kernel.fn, do_not_specialize=["rows"])
    assert (len(kernel.asked), len(other.asked), len(other.log)) == (1, 2, 3)


def test_the_interpreter_has_no_forms() -> None:
    kernel = Kernel(compiles=False)
    launch = Launches(kernel, num_warps=4)
    for value in (1, 2):
        launch("a", GRID, value)
    assert [arguments for arguments, _ in kernel.asked] == [(1,), (2,)]


def test_keys_without_end_are_forgotten() -> None:
    kernel = Kernel(compiles=True)
    launch = Launches(kernel, num_warps=4)
    with mock.patch.object(triton_support, "_MOST_FORMS", 2):
        for key in (1, 2, 3, 3, 1):
            launch(key, GRID, key)
    assert [arguments for arguments, _ in kernel.asked] == [(1,), (2,), (3,), (1,)]
    assert len(kernel.log) == 5
