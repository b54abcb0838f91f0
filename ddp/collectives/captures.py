"""Whether work is being captured now, for code whose effects on the host a replay must do again.

``torch.cuda.is_current_stream_capturing()`` asks one stream and tells nothing of who captures. Here is what this
library captures itself: whoever captures does the host's effects again at each replay.
"""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["capturing", "is_capturing"]

_under_way = 0
"""In this process and not in this thread: backward runs on threads of autograd's."""


@contextmanager
def capturing() -> Iterator[None]:
    """The block captures."""
    global _under_way
    _under_way += 1
    try:
        yield
    finally:
        _under_way -= 1


def is_capturing() -> bool:
    """Whether a ``capturing`` block runs."""
    return _under_way > 0
