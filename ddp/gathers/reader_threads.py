"""Which threads read a model's parameters while gathers are under way.

torch's Python functions look at a parameter's class twice: first for whether a ``__torch_function__`` exists, then for
calling it. If another thread resets the class between the two looks, torch raises ``TypeError``. So only the thread
that calls ``step`` (the home thread) resets the waiting class, and only while no other reading thread is alive. A
reading thread is known from its first look. While one lives the waiting class stays, and each torch function over a
parameter costs about 2 us more.
"""

import threading
import weakref
from typing import Protocol
from weakref import WeakSet

from ..torch_internals import NO_BACKWARD, current_backward

__all__ = ["ReaderThreads"]


class _Guarded(Protocol):
    def keep_on(self) -> None: ...


class ReaderThreads:
    """The home thread, which calls ``step``, and the other threads that have read parameters in flight."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while waiting classes are set and reset, never while waiting for a collective. Reentrant, because a
        finalizer may read a parameter at any time."""
        self.gathers: WeakSet[_Guarded] = WeakSet()
        """All gathers of the model: a new reading thread has them ``keep_on``."""
        self.classes: dict[type, type] = {}
        """The waiting class for each class of parameters."""
        self._home = weakref.ref(threading.current_thread())  # weak: a thread's target may refer to the model
        self._home_ident = threading.get_ident()
        self._others: WeakSet[threading.Thread] = WeakSet()

    def come_home(self) -> None:
        """This thread calls ``step``: it is the home thread from now on."""
        thread, left = threading.current_thread(), self._home()
        if thread is left:
            return
        with self.lock:
            if left is not None and left.is_alive():
                self._others.add(left)
            self._others.discard(thread)
            self._home, self._home_ident = weakref.ref(thread), threading.get_ident()

    def note(self) -> None:
        """This thread reads a parameter. Autograd's threads do not count, since ``backward()`` waits for them."""
        if threading.get_ident() == self._home_ident or current_backward() != NO_BACKWARD:
            return
        home = self._home()
        if home is None or not home.is_alive():
            self.come_home()
            return
        thread = threading.current_thread()
        with self.lock:
            if thread not in self._others:
                self._others.add(thread)
                for gather in self.gathers:
                    gather.keep_on()  # this thread may stand between its two looks at a class that was reset since

    def alone(self) -> bool:
        """Whether this is the home thread and no other reading thread is alive. The caller holds the lock."""
        if threading.get_ident() != self._home_ident:
            return False
        return not (self._others and any(thread.is_alive() for thread in self._others))
