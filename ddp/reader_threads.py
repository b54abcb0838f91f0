"""Which threads read a model's parameters while gathers are under way."""

import threading
from weakref import WeakSet

import torch

__all__ = ["ReaderThreads"]


class ReaderThreads:
    """The thread that steps, and others that came to read what its steps left under way.

    What makes parameters wait is taken off by the thread that steps, and only while no other thread reads. torch looks
    at a parameter's class twice in each of its functions that are written in Python, first whether somebody is to be
    asked, then who; a class that another thread takes off in between makes torch raise ``TypeError``.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Of what is put on and taken off. Nobody waits for a collective while holding it. A finalizer may come to read
        at any time, hence reentrant."""
        self._home = threading.get_ident()
        self._others: WeakSet[threading.Thread] = WeakSet()

    def come_home(self) -> None:
        """This thread steps."""
        with self.lock:
            self._home = threading.get_ident()
            self._others.discard(threading.current_thread())

    def note(self) -> None:
        """This thread comes to read. Threads of autograd's are passed over: the thread that steps waits for those."""
        if threading.get_ident() == self._home or torch._C._current_graph_task_id() != -1:
            return
        thread = threading.current_thread()
        if thread not in self._others:
            with self.lock:
                self._others.add(thread)

    def alone(self) -> bool:
        """Whether this is the thread that steps, and no other one that has come to read is alive."""
        if threading.get_ident() != self._home:
            return False
        return not (self._others and any(thread.is_alive() for thread in self._others))
