"""``RecordedGraph``: the CPU's stand-in of a CUDA graph, so that tests without a GPU see every effect that is lost.

It records each operation of a block with its tensors, and a replay runs the operations again on the same memory. No
Python around them runs again, no version counter rises, and no hook is called: what a CUDA graph does not replay, this
does not either. Different from a CUDA graph in two ways. The recorded block has run once: if it raises, or is given up
before its first replay, what it wrote is written back. And memory that the block has freed is kept, where a CUDA graph
gives it to a later graph of its pool.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..collectives.streams import recording
from ..torch_grads.shown_grad import ShownGrad
from ..torch_internals import DisableTorchFunctionSubclass, TorchDispatchMode, tree_leaves, tree_map

__all__ = ["RecordedGraph", "RecordedLaunch", "record_launch"]

_HOST_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique_consecutive", "_unique2", "unique_dim"}
_IN_MODELS = "_c10d_functional"
"""Namespace of collectives that return tensors: those of layers over tensor-parallel ranks, and of DTensors."""
_MAKE_NO_VALUES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class RecordedGraph:
    """The operations of one block."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []
        self._before: tuple[_Written, Tensor] | None = None
        """What the block has written, as it was, and the generator's state; until the first replay."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run a block of this thread and record it. A thread records one block at a time."""
        if getattr(recording, "graph", None) is not None:
            raise RuntimeError("a capture within a capture")
        recording.graph = self
        written = _Written()
        self._before = written, torch.get_rng_state()
        try:
            with _compiled_code_runs_eagerly(), _Recorder(self, written):
                yield
        except BaseException:
            self.undo()
            raise
        finally:
            recording.graph = None

    def undo(self) -> None:
        """Take back what the block has done, and forget it."""
        if self._before is not None:
            written, generator = self._before
            written.restore()
            torch.set_rng_state(generator)
        self.reset()

    def replay(self) -> None:
        """Run the operations again."""
        self._before = None
        with torch.no_grad(), DisableTorchFunctionSubclass():
            for call in self.calls:
                call()

    def reset(self) -> None:
        """Forget the operations, and with them the memory."""
        self.calls.clear()
        self._before = None


_stances: list[Any] = []
_stance_lock = threading.Lock()
_num_eager = 0


@contextmanager
def _compiled_code_runs_eagerly() -> Iterator[None]:
    """torch.compile does not run under a ``TorchDispatchMode``. Its stance is one for all threads of the process."""
    global _num_eager
    with _stance_lock:
        _num_eager += 1
        if _num_eager == 1:
            _stances.append(torch.compiler.set_stance("force_eager"))
            _stances[-1].__enter__()
    try:
        yield
    finally:
        with _stance_lock:
            _num_eager -= 1
            if _num_eager == 0:
                _stances.pop().__exit__(None, None, None)


class RecordedLaunch:
    """An operation of a process group that a replay launches again."""

    def __init__(self, graph: RecordedGraph, start: Callable[[], Any]) -> None:
        self._graph = graph
        self._start = start
        self._work: Any = None
        graph.calls.append(self._launch)

    def record_wait(self) -> None:
        """The program waits for the operation now: replays do too."""
        if getattr(recording, "graph", None) is self._graph:
            self._graph.calls.append(lambda: self._work.wait())

    def _launch(self) -> None:
        self._work = self._start()


def record_launch(start: Callable[[], Any]) -> RecordedLaunch | None:
    """Have replays call ``start``, which returns a ``Work``; None where this thread does not record.

    For process groups whose collectives are no operations of torch (simulated ranks).
    """
    graph: RecordedGraph | None = getattr(recording, "graph", None)
    return None if graph is None else RecordedLaunch(graph, start)


class _Written:
    """Memory from before the block that its operations write, as it was: nothing of a failed capture has run."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: set[int] = set()

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Before an operation: keep the memory that it writes."""
        if func.namespace == "c10d":  # whose schemas do not say what they write
            tensors = tree_leaves((args, kwargs))
        else:
            arguments = func._schema.arguments
            places = [at for at, argument in enumerate(arguments) if argument.is_write]
            tensors = [args[at] if at < len(args) else kwargs.get(arguments[at].name) for at in places]
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                memory = _memory(tensor)
                if memory and memory not in self._own and memory not in self._kept:
                    with DisableTorchFunctionSubclass():
                        storage = tensor.data.untyped_storage()
                    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                    self._kept[memory] = (whole, whole.clone())

    def note_made(self, result: Any) -> None:
        """After an operation: its results are the block's own."""
        self._own |= {_memory(tensor) for tensor in tree_leaves(result) if isinstance(tensor, Tensor)}

    def restore(self) -> None:
        """Write everything back, but to memory that the block has freed (whole parameters)."""
        with torch.no_grad():
            for whole, before in self._kept.values():
                if whole.untyped_storage().nbytes():
                    whole.copy_(before)


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph, written: _Written) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph
        self._written = written

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if ShownGrad in types:  # autograd accumulates into a .grad without memory: nothing that a replay could repeat
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if any(map(_is_around, types)):
            return NotImplemented  # a DTensor has no memory: its own operations on local tensors come here
        if name in _HOST_READS:
            raise RuntimeError(f"operation not permitted when capturing: {func} reads a value on the host")
        self._written.note(func, args, kwargs)
        if func.namespace == _IN_MODELS:
            # Below it a simulated process group would record the collective a second time.
            recording.graph = None
            try:
                result = func(*args, **kwargs)
            finally:
                recording.graph = self._graph
        else:
            result = func(*args, **kwargs)
        if any(_is_around(type(each)) for each in tree_leaves(result)):
            return result  # around an argument, whose collective still runs
        if not func.is_view:  # a view's memory was there before
            self._written.note_made(result)
        if not func.is_view and name not in _MAKE_NO_VALUES:
            self._record(func, *tree_map(_plain, (args, kwargs, result)))
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs = {_memory(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        made = [
            (place, tensor)
            for place, tensor in enumerate(tree_leaves(result))
            if isinstance(tensor, Tensor) and tensor.numel() and _memory(tensor) not in inputs
        ]
        collective, in_model = func.namespace == "c10d", func.namespace == _IN_MODELS

        def call() -> None:
            again = tree_leaves(func(*args, **kwargs))
            if in_model:  # the program's wait is for the tensor of the recording
                again = [torch.ops._c10d_functional.wait_tensor(each) for each in again]
            for place, tensor in made:
                tensor.copy_(again[place])
            if collective:
                _wait(again)

        self._graph.calls.append(call)


def _is_around(cls: type) -> bool:
    """Whether such tensors are around others, and have no memory."""
    return hasattr(cls, "__tensor_flatten__")


def _plain(value: Any) -> Any:
    """A tensor's memory without its graph and version counter."""
    if not isinstance(value, Tensor):
        return value
    with DisableTorchFunctionSubclass():
        return value.data


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _wait(results: Sequence[Any]) -> None:
    for result in results:
        if isinstance(result, torch.ScriptObject):  # a Work
            result.wait()  # type: ignore[attr-defined]
