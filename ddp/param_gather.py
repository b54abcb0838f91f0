"""All-gathers of updated parameters that run under whatever comes next, and parameters that wait for their own.

While a bucket's gather is in flight its parameters belong to a subclass of their class whose only addition is
``__torch_function__``: torch calls it before any of its functions sees the parameter, wherever that happens (a module's
forward, another module that reads the weight, ``state_dict``, an average over a list of parameters that somebody kept).
It makes the current stream wait for that bucket's gather, gives the bucket's parameters their own class back, and goes
on. So nobody can read an old weight, no module needs a hook, the order in which forward reads the buckets need not be
known, and a bucket costs one such call a step. torch's lazy modules change a parameter's class in the same way.

Gathers are issued in the reverse of the order in which backward fills the buckets, which is the forward's.
"""

import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from .collectives import InFlight, all_gather_shards
from .failure_report import FailureReporter, Watch
from .rank_grid import RankGrid
from .streams import OnStream, current_stream
from .timeline import Timeline

__all__ = ["ParamGather"]

_GATHER = "_maingrad_gather"


class ParamGather:
    """The all-gather of one bucket of parameters.

    name      of the bucket
    flat      [n] the parameters, of which this rank's shard is up to date before ``start``
    params    those whose storage lies in ``flat``
    grid      the ranks
    failures  reports a gather that fails; its parameters raise for ever then
    """

    def __init__(
        self, name: str, flat: Tensor, params: Sequence[nn.Parameter], grid: RankGrid, failures: FailureReporter
    ) -> None:
        self.name = name
        self.flat = flat
        self._params = [TensorWeakRef(param) for param in params]  # which refer to this while they wait
        self._grid = grid
        self._failures = failures
        self._flight: InFlight | None = None
        self._timeline: Timeline | None = None  # recording since this gather was launched
        self._guards = False
        self._event: torch.cuda.Event | None = None  # the last one's end
        self._home: Any = None  # the stream that the last one was issued from, until it has waited

    def start(
        self,
        stream: torch.cuda.Stream | None,
        timeline: Timeline | None,
        *,
        fill: Callable[[], None] | None = None,
        ordered: bool = False,
    ) -> None:
        """Issue it on ``stream`` (CUDA), which waits for the current one.

        fill     puts this rank's shard into ``flat`` first, on ``stream``
        ordered  the caller has made ``stream`` wait for what it must
        """
        if stream is None:
            if fill is not None:
                fill()
            self._flight = self._launch(timeline)
            return
        self._home = current_stream(self.flat.device)
        if not ordered:
            stream.wait_stream(self._home)
        with OnStream(stream), self._watch():
            if fill is not None:
                fill()
            self._flight = self._launch(timeline)
            self._flight.wait()
            if self._event is None:
                self._event = torch.cuda.Event()
            self._event.record(stream)

    def __del__(self) -> None:
        # Let go while it runs: freed memory returns to the stream it came from, which must not overtake the gather.
        if vars(self).get("_home") is not None and not sys.is_finalizing():
            self._home.wait_event(self._event)

    @property
    def under_way(self) -> bool:
        """Started, and nobody has waited for it."""
        return self._flight is not None

    def guard(self) -> None:
        """Have every parameter wait at its first use from now on."""
        if self._flight is None or self._flight.work is None:
            return
        self._guards = True
        for param in self._live_params():
            waiting = _waiting_class(type(param))
            if waiting is None:  # a class of fixed shape: wait now
                self.arrive()
                return
            param.__dict__[_GATHER] = self
            param.__class__ = waiting

    def arrive(self) -> None:
        """Order the current stream (CUDA) or this thread (CPU) behind the gather; nothing waits for it any more."""
        flight = self._flight
        if flight is None:
            return
        if self._home is None:
            with self._watch():
                flight.wait()
        else:
            assert self._event is not None, "recorded when the gather was issued"
            current = current_stream(self.flat.device)
            waits_from = None if self._timeline is None else self._timeline.mark()
            current.wait_event(self._event)
            if self._timeline is not None and waits_from is not None:
                self._timeline.note_wait(self.name, "all_gather", waits_from)
            if current != self._home:  # used on a side stream first; from here on the main one may use it unasked
                self._home.wait_event(self._event)
            self._home = None
        self._flight = None
        if not self._guards:
            return
        self._guards = False
        for param in self._live_params():
            if param.__dict__.pop(_GATHER, None) is not None:
                param.__class__ = type(param).__bases__[0]

    def holds(self, params: set[int]) -> bool:
        """Whether one of these, by ``id``, waits for it."""
        return any(id(param) in params for param in self._live_params())

    def _watch(self) -> Watch:
        return self._failures.watch("all_gather", self.name, len(self._params))

    def _live_params(self) -> Iterator[Tensor]:
        for reference in self._params:
            param = reference()
            if param is not None:
                yield param

    def _launch(self, timeline: Timeline | None) -> InFlight:
        self._timeline = timeline
        if timeline is None:
            return all_gather_shards(self.flat, self._grid.gather, on_stream=self.flat.is_cuda)
        ready = timeline.mark()
        nbytes = self.flat.numel() * self.flat.element_size()
        flight = all_gather_shards(self.flat, self._grid.gather, on_stream=self.flat.is_cuda)
        return timeline.watch(self.name, "all_gather", nbytes, ready, ready, flight)


class _WaitsForGather:
    """Mixed in front of a parameter's own class while its gather is in flight."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _metadata():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        gathers = list(_gathers(args, kwargs))
        assert gathers, "torch asks for the sake of an argument, or of one in a list of them"
        for gather in gathers:
            gather.arrive()
        return func(*args, **kwargs)

    # Python functions that build a tensor of type(self), and so must not see this class.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.__dict__[_GATHER].arrive()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.__dict__[_GATHER].arrive()
        return self.__reduce_ex__(protocol)


def _gathers(args: Any, kwargs: Any) -> Iterator[ParamGather]:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, _WaitsForGather) and _GATHER in leaf.__dict__:  # not one that an earlier one has freed
            yield leaf.__dict__[_GATHER]


@functools.cache
def _waiting_class(cls: type) -> Any:
    """``cls`` with the wait before it; None for classes that cannot be put on and off."""
    if "__torch_function__" in vars(cls) and cls is not nn.Parameter:
        return None  # it has something to say itself
    # The wait comes first in the order of lookup, and cls first among the bases, where arrive() finds it again.
    members = {name: value for name, value in vars(_WaitsForGather).items() if name not in ("__dict__", "__weakref__")}
    try:
        waiting = type(f"Gathering{cls.__name__}", (cls, _WaitsForGather), members)
        probe: Any = torch.Tensor._make_subclass(cls, torch.empty(0))
        probe.__class__ = waiting
    except TypeError:
        return None
    return waiting


@functools.cache
def _metadata() -> frozenset[Any]:
    """What torch may be asked about a parameter without waiting for its values."""
    properties = """
        shape dtype device layout ndim requires_grad grad grad_fn grad_dtype is_leaf _version is_cuda is_cpu is_meta
        is_sparse is_quantized output_nr names _backward_hooks _post_accumulate_grad_hooks
    """
    methods = """
        size stride numel nelement dim element_size storage_offset is_contiguous is_floating_point is_complex get_device
        requires_grad_ register_hook register_post_accumulate_grad_hook
    """
    found = [getattr(torch.Tensor, name) for name in properties.split() if hasattr(torch.Tensor, name)]
    accessors = [access for entry in found for access in (entry.__get__, entry.__set__)]
    return frozenset([*accessors, *(getattr(torch.Tensor, name) for name in methods.split())])
