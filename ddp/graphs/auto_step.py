"""``AutoStep``: a training step that becomes a CUDA graph where that is right, and stays eager where not.

::

    eager    the function, with its own arguments, on the stream of captures. Afterwards: has anything changed that a
             replay would not change?  Twice not, for calls of one kind: the next of that kind is
    capture  of which nothing has run if it fails; then the same call runs eagerly, and all later ones
    replay   as long as arguments, model, options and all that Python reads are those of the capture

Ranks decide together in each call, and where one must run eagerly, all do: the arguments of one rank alone may be of
another shape. An eager iteration has collectives that a replay lacks (ranks compare their steps), and NCCL may run a
captured collective by another algorithm than the same one outside of a graph (it registers the graph's memory). For
that reason they capture together too: where one must, a rank that has a graph of its call captures that call anew. The
reduction is one number between hosts. It runs under the previous replay, which the host does not wait for, and while
this call's arguments are copied.
"""

import logging
import traceback
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, Generic

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives.rank_grid import RankGrid, backends_of
from ..torch_internals import tree_flatten, tree_map_only
from ..torch_internals.distributed import new_group_of_members
from .host.host_code import is_installed, is_torch_or_ours
from .host.host_state import HostState
from .inputs import check_outputs
from .step_graphs import Kind, P, StepGraphs, T

__all__ = ["AutoStep"]

logger = logging.getLogger(__name__)

_NUM_WARMUP = 2
_MOST_CHANGES = 4
"""Eager calls in which something has changed, between two replays. The first ones make caches and counters."""
_MOST_EAGER = 32
"""Eager calls between two replays: after so many, no kind of call seems to come again."""
_MOST_CAPTURES, _REPLAYS_OF_A_CAPTURE = 8, 50
"""Captures beyond the first eight must have had fifty replays each: a capture takes as long as some fifty."""
_STOP, _EAGER, _CAPTURE, _REPLAY = -1, 0, 1, 2


class AutoStep(Generic[P, T]):
    """What ``maingrad.graphed`` returns.

    train_step  the function
    graphs      captures and replays it; None: it stays eager, and nobody is told
    module      the trained model
    grid        the ranks that decide together
    device      where the model trains
    """

    def __init__(
        self,
        train_step: Callable[P, T],
        graphs: StepGraphs[P, T, Any] | None,
        module: nn.Module,
        grid: RankGrid,
        device: torch.device,
    ) -> None:
        self.__wrapped__ = train_step
        self.why_eager: str | None = None
        """Why all later calls run eagerly; None: they do not, or there is no GPU."""
        self._train_step = train_step
        self._name = getattr(train_step, "__qualname__", type(train_step).__name__)
        self._module, self._device = module, device
        self._graphs = graphs
        self._groups = [] if graphs is None else [_on_host(group, device) for group in grid.axes]
        self._speaks = grid.is_first
        self._since_replay: list[str | None] = []
        """For each eager call since the last replay, what has changed in it."""
        self._reason = ""
        self._num_captures = self._num_replays = 0
        self._changed: str | None = None
        self._confirmed = False
        """Whether the latest capture has gone well, and what it has changed on the host."""
        if graphs is not None:
            graphs.after_capture = self._confirm
            graphs.make_state = partial(HostState, train_step)
            graphs.most_states = _MOST_CAPTURES

    @property
    def num_graphs(self) -> int:
        """Number of kinds of calls that are replayed."""
        return 0 if self._graphs is None else self._graphs.num_graphs

    def reset(self) -> None:
        """Free all graphs and their memory; later calls may be captured anew. Before ``destroy_process_group``."""
        if self._graphs is not None:
            self._graphs.reset()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one step."""
        if self._graphs is None:
            return self._train_step(*args, **kwargs)
        call = (args, kwargs)
        state, changed = self._graphs.state()
        assert isinstance(state, HostState), "as make_state says"
        self._reason = "" if changed is None else f"'{changed}' has changed since the call before"
        kind = self._kind_of(self._graphs, call, state)
        choice = self._choice(self._graphs, kind)
        agreed = self._tell(choice)
        if choice == _REPLAY and kind is not None:
            self._graphs.load(kind, call)  # while the other ranks' choices come
        decided = agreed()
        if decided == _STOP:
            self.stop(self.why_eager or self._reason or "another rank does")
            return self._train_step(*args, **kwargs)
        if decided == _REPLAY and kind is not None:
            self._num_replays += 1
            self._since_replay.clear()
            return self._graphs.replay(kind)
        if decided == _CAPTURE and kind is not None:
            return self._capture(self._graphs, kind, call)
        return self._run_eagerly(self._graphs, kind, call, state)

    # ---- Which way. ----

    def _kind_of(self, graphs: StepGraphs[P, T, Any], call: Any, state: HostState) -> Kind | None:
        """The kind of a call; None where the call can have no graph, and ``_reason`` says why."""
        if state.lost is not None:
            self.why_eager = f"it {state.lost}"
            return None
        try:
            kind = graphs.kind_of(call, state)
            graphs.check_startable(kind)
        except (RuntimeError, TypeError, ValueError) as error:
            self._reason = str(error)
            return None
        return kind

    def _choice(self, graphs: StepGraphs[P, T, Any], kind: Kind | None) -> int:
        """What this rank would do."""
        if self.why_eager is not None:
            return _STOP
        if kind is not None and graphs.is_captured(kind):
            return _REPLAY
        warm = kind is not None and graphs.num_eager(kind) >= _NUM_WARMUP
        full = warm and not graphs.has_room()
        if full:
            self._reason = "calls have more shapes and options than there may be graphs (max_graphs)"
        changes = [change for change in self._since_replay if change is not None]
        if len(changes) >= _MOST_CHANGES:
            self.why_eager = changes[-1]
        elif len(self._since_replay) >= _MOST_EAGER:
            self.why_eager = self._reason or "no kind of call comes often enough"
        elif self._num_captures >= _MOST_CAPTURES + self._num_replays // _REPLAYS_OF_A_CAPTURE:
            self.why_eager = f"it was captured {self._num_captures} times, for few calls each: {self._reason}"
        if self.why_eager is not None:
            return _STOP
        return _CAPTURE if warm and not full else _EAGER

    def _tell(self, choice: int) -> Callable[[], int]:
        """Tell the other ranks; returns a function that waits for the least choice of all."""
        if not self._groups:
            return lambda: choice
        least = torch.tensor(choice)
        *before, last = self._groups
        for group in before:
            dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
        work: Any = dist.all_reduce(least, dist.ReduceOp.MIN, group=last, async_op=True)

        def wait() -> int:
            work.wait()
            return int(least)

        return wait

    def _confirm(self, change: str | None) -> None:
        """After a capture that has gone well. Raises ``RuntimeError`` where another rank's has not."""
        self._confirmed, self._changed = True, change
        if self._tell(_CAPTURE)() != _CAPTURE:
            raise RuntimeError("another rank's capture has failed")

    def stop(self, why: str) -> None:
        """Run eagerly from now on."""
        self.why_eager = why
        if self._graphs is not None:
            self._graphs.reset()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # what eager calls have left on the stream of captures
        self._graphs = None
        level = logging.WARNING if self._speaks else logging.INFO
        logger.log(level, "%s stays eager, and is no CUDA graph: %s", self._name, " ".join(why.split()))

    # ---- Eager, or a graph. ----

    def _run_eagerly(self, graphs: StepGraphs[P, T, Any], kind: Kind | None, call: Any, state: HostState) -> T:
        args, kwargs = call
        state.begin_call()
        given = _shape_of(call)
        finished, change, result = False, None, None
        with graphs.beside():
            try:
                with graphs.one_iteration():
                    result = self._train_step(*args, **kwargs)
                    finished = True
            except RuntimeError as error:
                if not finished:
                    raise
                change = str(error)
        change = change or self._change_in_call(state, given, result, call)
        self._since_replay.append(change)
        if change is not None or kind is None:
            return result  # type: ignore[return-value]
        graphs.record_eager(kind)
        detached: T = tree_map_only(Tensor, Tensor.detach, result)
        return detached  # as from a replay; and a kept loss keeps no activations

    def _change_in_call(self, state: HostState, given: Hashable, result: Any, call: Any) -> str | None:
        """What a replay would not have done; None: it would have done all.

        given  the structure of the arguments before the call
        """
        if (drawn := state.draws()) is not None:
            return f"it draws from {drawn}, and replays would see the numbers of the capture"
        if (changed := state.change()) is not None:
            return f"it changes '{changed}', which no replay would"
        if _shape_of(call) != given:
            return "it changes its arguments: a list or dict in them has other items after the call"
        try:
            check_outputs(result, self._name)
        except TypeError as error:
            return str(error)
        return None

    def _capture(self, graphs: StepGraphs[P, T, Any], kind: Kind, call: Any) -> T:
        self._confirmed, why = False, None
        try:
            result = graphs.capture(kind, call)
        except Exception as error:
            if graphs.is_captured(kind):  # the device's work has failed
                raise
            why = f"{_place_of(error)}{type(error).__name__}: {error}"
        if why is not None:  # outside of the handler, whose error holds the capture's tensors
            if not self._confirmed:
                self._tell(_STOP)()
            self.stop(why)
            args, kwargs = call
            return self._train_step(*args, **kwargs)
        self._num_captures += 1
        logger.info("%s is a CUDA graph from here on", self._name)
        if self._changed is None:
            self._since_replay.clear()
        else:  # Python has run once, and the device's work too: as in an eager call
            graphs.forget(kind[2])
            self._since_replay.append(f"it changes '{self._changed}', which no replay would")
        return result


def _on_host(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A group of the same ranks whose collectives run between hosts. Collective."""
    if device.type == "cpu":
        return group
    if "gloo" in backends_of([group], torch.device("cpu")):
        return group
    return new_group_of_members(dist.get_process_group_ranks(group), backend="gloo")


def _shape_of(call: Any) -> Hashable:
    """The arguments' structure, with the identity of what is no tensor."""
    leaves, spec = tree_flatten(call)
    return spec, *map(id, leaves)


def _place_of(error: BaseException) -> str:
    """The innermost line of the program in which ``error`` was raised, and that of a library of models behind it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [at for at, frame in enumerate(frames) if not is_installed(frame.filename)][-1:]
    behind = frames[own[0] + 1 :] if own else frames
    models = [frame for frame in behind if not is_torch_or_ours(frame.filename)]
    found = [*(frames[at] for at in own), *models[-1:]]
    lines = (f" ({frame.line})" if frame.line else "" for frame in found)
    return "".join(f"{frame.filename}:{frame.lineno}{line}: " for frame, line in zip(found, lines, strict=True))
