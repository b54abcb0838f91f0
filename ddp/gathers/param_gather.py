"""``ParamGather``: the all-gather of one bucket's updated parameters, which runs while the program goes on.

Gathers are issued in the order in which the next forward is expected to use the buckets: the reverse of the order in
which backward fills them. A forward in another order is right too: while a gather is in flight, its parameters
and the modules that register them (``waiting_params.py``) wait for it. The first wait of a
step makes all parameters and modules of the bucket plain again. Several threads may wait at once.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from ..collectives.failure_report import FailureReporter, Watch
from ..collectives.in_flight import InFlight, all_gather_shards
from ..collectives.rank_grid import RankGrid
from ..collectives.streams import OnStream, current_stream
from ..collectives.timeline import UNOBSERVED, Observer
from ..torch_internals import current_raw_stream, is_tracing, weak_method
from .waiting_params import (
    call_before_compiled_code,
    call_before_forward,
    have_wait,
    let_go,
    params_in_forward,
    waiting_class,
)

__all__ = ["ParamGather", "guard_reads", "wait_for_all"]


class _Flight(NamedTuple):
    """One gather under way."""

    collective: InFlight
    home: torch.cuda.Stream | None
    """CUDA: the stream that was current when the gather was issued."""
    observer: Observer
    """The observer at launch, which is told of the wait too."""


class ParamGather:
    """The all-gather of one bucket of parameters.

    name      of the bucket
    flat      [n] memory of all parameters of the bucket; this rank's shard in it is up to date before ``start``
    params    the parameters whose storage lies in ``flat``
    grid      the ranks
    failures  reports a gather that fails; reading its parameters raises from then on
    in_graph  a graph that captures reads of the parameters captures the gather too
    """

    def __init__(
        self,
        name: str,
        flat: Tensor,
        params: Sequence[nn.Parameter],
        grid: RankGrid,
        failures: FailureReporter,
        *,
        in_graph: bool = False,
    ) -> None:
        self.name = name
        self.flat = flat
        self._params = [TensorWeakRef(param) for param in params]  # weak: waiting parameters refer to this
        self._grid = grid
        self._failures = failures
        self._flight: _Flight | None = None
        self.guards = False
        """Parameters have the waiting class now."""
        self.refusal: str | None = None
        """No gather can come now: a read raises ``RuntimeError`` with this text. See ``guard_reads``."""
        # Code that reads these parameters was compiled while they waited. It has guards on plain parameters.
        self._traced = False
        self.wait_weakly = weak_method(self.wait)
        """``wait``, for modules, which keep no gather alive."""
        self.unhook: list[Callable[[], object]] = []
        """Each has one module's forward wait no longer."""
        self._in_graph = in_graph
        self._captured: InFlight | None = None  # keeps the tensors of a captured gather
        self._event: torch.cuda.Event | None = None  # the end of the latest gather
        self._streams: set[int] = set()  # raw addresses of streams that wait for _event already

    def start(
        self,
        stream: torch.cuda.Stream | None,
        observer: Observer = UNOBSERVED,
        *,
        fill: Callable[[], None] | None = None,
        ordered: bool = False,
    ) -> None:
        """Issue the gather on ``stream``, which waits for the current stream first; ``stream`` is None on CPU.

        fill     writes this rank's shard into ``flat`` before the gather, on ``stream``
        ordered  ``stream`` need not wait for the current stream: the caller has ordered it
        """
        if stream is None:
            if fill is not None:
                fill()
            self._flight = _Flight(self._launch(observer), None, observer)
            return
        home = current_stream(self.flat.device)
        if not ordered:
            stream.wait_stream(home)
        with OnStream(stream), self._watch():
            if fill is not None:
                fill()
            collective = self._launch(observer)
            collective.wait()
            if self._event is None:
                # External: where only waits are captured, each replay waits for the gather that was started last.
                self._event = torch.cuda.Event(external=not self._in_graph)
            self._event.record(stream)
        self._streams = set()
        self._flight = _Flight(collective, home, observer)

    def __del__(self) -> None:
        # Freed while the gather runs: the memory goes back to the stream it came from, which must wait for the gather.
        flight = vars(self).get("_flight")
        if flight is not None and flight.home is not None and not sys.is_finalizing():
            flight.home.wait_event(self._event)

    @property
    def under_way(self) -> bool:
        """Started, and nobody has waited for its end."""
        return self._flight is not None

    def guard(self) -> None:
        """Have every parameter wait at its first use. Waits now where parameters cannot."""
        if self.refusal is None and (self._flight is None or self._flight.collective.work is None):
            return
        params = list(self.live_params())
        self.guards = not self._traced and None not in map(waiting_class, set(map(type, params)))
        if self.guards:
            for param in params:
                have_wait(param, self.wait)
        elif self.refusal is None:
            self.wait()

    def wait(self, *_: object) -> None:
        """Order the current stream (CUDA) or this thread (CPU) behind the gather, and make parameters plain again.

        Several threads may call this at once; each returns when the gather is complete for that thread. Arguments are
        those of a hook, and unused.
        """
        if self.refusal is not None:
            raise RuntimeError(self.refusal)
        if self.guards:
            self._traced = self._traced or is_tracing()
        flight = self._flight
        if flight is not None:
            self._wait_for(flight)
            if self._flight is flight:  # another thread may have issued the next gather meanwhile
                self._flight = None
        if self._event is not None and not torch.cuda.is_current_stream_capturing():
            self._order_stream(self._event)
        if self.guards and self._flight is None:
            for param in self.live_params():
                let_go(param)
            for unhook in self.unhook:
                unhook()
            self.unhook = []
            self.guards = False  # in the end: until then a thread that reads meanwhile waits too

    def allow_reads(self) -> None:
        """``refusal`` is over: parameters and modules that it has guarded are plain again."""
        if self.refusal is not None:
            self.refusal = None
            self.wait()

    def wait_in_graph(self) -> None:
        """At the start of a capture: wait here where no read of a parameter will; ``wait`` does not in a capture."""
        if self._event is not None and not (self.under_way and self.guards):
            current_stream(self.flat.device).wait_event(self._event)

    def record_replay(self, observer: Observer = UNOBSERVED) -> None:
        """The gather was launched by the replay of a graph that has captured ``start``."""
        flight = self._captured
        assert flight is not None, "captured before"
        self._streams = set()
        self._flight = _Flight(flight, current_stream(self.flat.device), observer)

    def leave_capture(self) -> None:
        """``start`` was captured, and has not run."""
        if self._flight is not None:
            self._captured, self._flight = self._flight.collective, None

    def forget_capture(self) -> None:
        """Starts and waits were captured, and have not run."""
        self._flight = self._event = None
        self._streams = set()

    def leave_graph(self) -> None:
        """A capture of waits is over: the current stream waits for the gather, since those waits ordered nothing."""
        self._streams = set()
        if self._event is not None:
            self._order_stream(self._event)

    def _wait_for(self, flight: _Flight) -> None:
        if flight.home is None:
            with self._watch():
                flight.collective.wait()
            return
        assert self._event is not None, "recorded when the gather was issued"
        current = current_stream(self.flat.device)
        flight.observer.wait(self.name, "all_gather", partial(self._order_stream, self._event))
        if current != flight.home:  # plain parameters ask no stream to wait, so the main stream waits too
            flight.home.wait_event(self._event)

    def _order_stream(self, event: torch.cuda.Event) -> None:
        """Have the current stream wait for ``event``, once for each stream."""
        raw = current_raw_stream(self.flat.device.index)
        if raw not in self._streams:
            current_stream(self.flat.device).wait_event(event)
            self._streams.add(raw)

    def live_params(self) -> Iterator[Tensor]:
        """The parameters that are still alive."""
        for reference in self._params:
            param = reference()
            if param is not None:
                yield param

    def _watch(self) -> Watch:
        return self._failures.watch("all_gather", self.name)

    def _launch(self, observer: Observer) -> InFlight:
        start = partial(all_gather_shards, self.flat, self._grid.gather, on_stream=self.flat.is_cuda)
        return observer.launch(self.name, "all_gather", lambda: self.flat.nbytes, start)


def guard_reads(modules: Iterable[nn.Module], gathers: Sequence[ParamGather], refusal: str | None = None) -> None:
    """From here on, every read of a parameter whose gather is under way waits for that gather.

    modules  all modules of the model now: the modules that register a parameter may have changed since wrapping
    gathers  all gathers of the model
    refusal  no gather can come now: until ``allow_reads`` every read that could wait raises ``RuntimeError`` with
             this text, with ``{name}`` for the bucket
    """
    of: dict[int, ParamGather] = {}
    for gather in gathers:
        gather.refusal = refusal and refusal.format(name=gather.name)
        gather.guard()
        of.update(dict.fromkeys(map(id, gather.live_params()), gather))

    def wait_of(param: Tensor) -> Callable[[], None] | None:
        return of[id(param)].wait_weakly if id(param) in of else None

    for module in modules:
        call_before_compiled_code(module, wait_of)
        for gather in {of[key]: None for param in params_in_forward(module) if (key := id(param)) in of}:
            if isinstance(module, torch.jit.ScriptModule):
                if refusal is None:  # TorchScript reads in C++, where nothing here is asked
                    gather.wait()
            elif gather.guards:
                gather.unhook.append(call_before_forward(module, gather.name, gather.wait_weakly))


def wait_for_all(gathers: Iterable[ParamGather]) -> None:
    """Wait for all of ``gathers`` that are under way."""
    for gather in gathers:
        gather.wait()
