"""The models of a thread whose parameters are gathered: a captured step may read them beside its own (a teacher)."""

import threading
import weakref
from typing import Protocol

__all__ = ["GatheredModel", "gathered_models", "record_gathered_model"]


class GatheredModel(Protocol):
    """The gathers of one model. Subclasses leave out what does not concern them."""

    def finish(self) -> None:
        """Wait for the gathers under way."""

    def begin_capture(self) -> None:
        """A capture that may read the model begins."""
        return

    def end_capture(self) -> None:
        """Note that capture is over. Nothing of it has run."""
        return

    def record_replay(self) -> None:
        """A captured step was replayed, which may have changed the model: no version counter tells."""
        return


_thread = threading.local()
"""``models``: each simulated rank is a thread."""


def record_gathered_model(model: GatheredModel) -> None:
    """This thread uses ``model``, which is referred to weakly."""
    vars(_thread).setdefault("models", weakref.WeakSet()).add(model)


def gathered_models() -> list[GatheredModel]:
    """The models that this thread has used, and that are alive."""
    return list(vars(_thread).get("models", ()))
