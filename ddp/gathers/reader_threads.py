"""Which threads read a model's parameters while gathers are under way.

torch looks at a parameter's class twice in each of its functions that are written in Python: first whether somebody is
to be asked, then who. A class that another thread takes off between the two looks makes torch raise ``TypeError``. So
the class that makes parameters wait is taken off by the thread that steps alone, and only while no other thread reads.
Any other one is known from its first look on, and counts for as long as it lives; meanwhile the class stays on, and
torch asks before each function that is given a parameter, which takes about two microseconds.
"""

import threading
import weakref
from typing import Protocol
from weakref import WeakSet

from ..torch_internals import current_backward

__all__ = ["ReaderThreads"]


class _Guarded(Protocol):
    def keep_on(self) -> None: ...


class ReaderThreads:
    """The thread that steps, and others that came to read what its steps left under way."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Of what is put on and taken off. Nobody waits for a collective while holding it. A finalizer may come to read
        at any time, hence reentrant."""
        self.gathers: WeakSet[_Guarded] = WeakSet()
        """All of the model's, for the moment when another thread comes."""
        self.classes: dict[type, type] = {}
        """The class that makes parameters of each class wait, and tells of each thread that looks."""
        self._home = weakref.ref(threading.current_thread())  # a thread refers to what it runs
        self._home_ident = threading.get_ident()
        self._others: WeakSet[threading.Thread] = WeakSet()

    def come_home(self) -> None:
        """This thread steps."""
        thread, left = threading.current_thread(), self._home()
        if thread is left:
            return
        with self.lock:
            if left is not None and left.is_alive():
                self._others.add(left)
            self._others.discard(thread)
            self._home, self._home_ident = weakref.ref(thread), threading.get_ident()

    def note(self) -> None:
        """This thread reads. Threads of autograd's are passed over: the thread that steps waits for those."""
        if threading.get_ident() == self._home_ident or current_backward() != -1:
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
                    gather.keep_on()  # it may have looked once at what has been taken off since

    def alone(self) -> bool:
        """Whether this is the thread that steps, and no other one that has come to read is alive. For who holds the
        lock."""
        if threading.get_ident() != self._home_ident:
            return False
        return not (self._others and any(thread.is_alive() for thread in self._others))
