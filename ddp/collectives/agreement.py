"""Errors of one rank are raised on all ranks, before the next collective.

A check may fail on some ranks only: a damaged file, a parameter that differs. Without agreement the other ranks would
enter the next collective and wait there for the ranks that raised.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TypeVar, cast

import torch.distributed as dist

from .failure_report import CollectiveError, FailureReporter
from .world import own_rank

__all__ = ["gather", "run_and_gather", "run_on_all_ranks", "with_more_text"]

T = TypeVar("T")
U = TypeVar("U")

_KINDS: tuple[type[Exception], ...] = (
    FileNotFoundError,
    FileExistsError,
    OSError,
    ValueError,
    TypeError,
    RuntimeError,
)
"""Classes of errors that other ranks raise too. An error of any other class becomes a ``RuntimeError`` there."""


def gather(value: T, axes: Iterable[dist.ProcessGroup], failures: FailureReporter | None, what: str) -> dict[int, T]:
    """All-gather of Python objects over a grid: every rank's value, by rank, in the same order on all ranks.

    axes      the grid's groups: inside an instance, then across instances
    failures  names the rank in the ``CollectiveError`` that is raised where a rank is gone
    what      the value, for that error
    """
    values = {own_rank(): value}
    with failures.watch(what) if failures is not None else nullcontext():
        for group in axes:
            parts: list[dict[int, T]] = [{}] * group.size()
            dist.all_gather_object(parts, values, group=group)
            values = {rank: each for part in parts for rank, each in part.items()}
    return values


def run_on_all_ranks(
    action: Callable[[], T], axes: Iterable[dist.ProcessGroup], failures: FailureReporter | None, what: str
) -> T:
    """Run ``action`` on every rank. If it raises on some ranks, all ranks raise the first such rank's error.

    what  the action, for the ``CollectiveError`` of ranks that get no answer; ``axes``, ``failures`` as in ``gather``
    """
    return run_and_gather(action, lambda _: None, axes, failures, what)[0]


def run_and_gather(
    action: Callable[[], T],
    telling: Callable[[T], U],
    axes: Iterable[dist.ProcessGroup],
    failures: FailureReporter | None,
    what: str,
) -> tuple[T, list[U]]:
    """``run_on_all_ranks``, and an all-gather of what each rank tells about its result, in the same order on all ranks.

    telling  called with ``action``'s result; returns the object that the other ranks get
    """
    axes = list(axes)
    if not axes:
        result = action()
        return result, [telling(result)]
    result, told = cast(T, None), cast(U, None)
    cause: Exception | None = None
    mine: tuple[int, str] | None = None
    try:
        result = action()
        told = telling(result)
    except Exception as error:
        mine, cause = (_kind_of(error), str(error) or type(error).__name__), error
    answers = gather((mine, told), axes, failures, f"word from all ranks after {what}")
    raised = {rank: failure for rank, (failure, _) in answers.items() if failure is not None}
    if raised:
        rank, (kind, text) = next(iter(raised.items()))
        if len(raised) < len(answers) or len(set(raised.values())) > 1:
            text += f" (on rank {rank})"
        raise _KINDS[kind](text) from cause
    return result, [each for _, each in answers.values()]


def _kind_of(error: BaseException) -> int:
    return next((index for index, kind in enumerate(_KINDS) if isinstance(error, kind)), len(_KINDS) - 1)


def with_more_text(error: BaseException, more: str) -> BaseException:
    """``error`` with the text ``more`` added, as an error of the same class. ``KeyboardInterrupt`` stays as it is."""
    if isinstance(error, CollectiveError):
        report = f"{error}\n  {more.lstrip('; ')}"
        return CollectiveError(report, rank=error.rank, silent=error.silent)
    return _KINDS[_kind_of(error)](f"{error}{more}") if isinstance(error, Exception) else error
