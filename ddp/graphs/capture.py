"""``CapturedGraph``: work on a device, captured as a CUDA graph. On CPUs a stand-in records operations.

A replay runs kernels on the memory of the capture, and no Python. Several graphs may share a ``GraphPool``: then they
must be replayed in the order in which they were captured, since memory that is free after one graph serves the next.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..collectives.streams import capturing
from ..torch_internals import end_allocations
from .recorded import RecordedGraph

__all__ = ["CapturedGraph", "GraphPool"]


class GraphPool:
    """Memory that graphs of one device share, and the stream that captures them.

    device  a CUDA device with an index, or the CPU
    stream  captures run on it; None: a stream of the pool's own
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        self.stream = stream or (torch.cuda.Stream(device) if device.type == "cuda" else None)
        """Captures run on this stream. Warm-ups should too: autograd remembers the stream of a forward."""
        self.forget()

    def forget(self) -> None:
        """Later captures take new memory: no graph of the pool is left."""
        self.handle: Any = torch.cuda.graph_pool_handle() if self.stream is not None else None
        """torch's name of the memory."""

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run a block on ``stream``, ordered behind the current stream, which then waits for the block's work."""
        if self.stream is None:
            yield
            return
        around = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(around)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            around.wait_stream(self.stream)


class CapturedGraph:
    """Work that was captured once and can be replayed.

    pool  the memory, device and stream
    """

    def __init__(self, pool: GraphPool) -> None:
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | RecordedGraph | None = None

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the work of this block. On CUDA nothing runs; on the CPU the work runs, and is recorded.

        If the block raises, the capture ends, its memory returns to the pool, and the error goes on. Errors of the
        device about operations that cannot be captured get a note that says what they mean.
        """
        torch.clear_autocast_cache()  # casts made before would be read at replays, after their parameters have changed
        try:
            with capturing(), self._recorded() if self._pool.stream is None else self._capture_cuda(self._pool.stream):
                yield
        finally:
            torch.clear_autocast_cache()

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        recorded = RecordedGraph()
        with recorded.recording():
            yield
        self._graph = recorded

    @contextmanager
    def _capture_cuda(self, stream: torch.cuda.Stream) -> Iterator[None]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._pool.device)
        gc.collect()  # what is garbage may hold memory of the pool; and freeing it in the capture would break that
        torch.cuda.empty_cache()
        with torch.cuda.stream(stream):
            # Other threads go on (NCCL's watchdog asks events), so their calls are no errors.
            graph.capture_begin(pool=self._pool.handle, capture_error_mode="thread_local")
            try:
                yield
            except BaseException as error:
                _end_broken(graph, self._pool)
                if isinstance(error, RuntimeError) and "captur" in str(error):
                    error.add_note(_explain(error))
                raise
            graph.capture_end()
        self._graph = graph

    @property
    def ran(self) -> bool:
        """Whether the captured work has run in the capture, as on CPUs."""
        return self._pool.stream is None

    @property
    def is_captured(self) -> bool:
        """Whether there is something to replay."""
        return self._graph is not None

    def replay(self) -> None:
        """Run the captured work on the current stream, behind what is queued there."""
        assert self._graph is not None, "captured before"
        self._graph.replay()

    def undo(self) -> None:
        """Free the graph after its capture, and take back what has run in it: on CPUs."""
        if isinstance(self._graph, RecordedGraph):
            self._graph.undo()
        self.reset()

    def reset(self) -> None:
        """Free the graph. Its memory is free when the last graph of the pool is."""
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.reset()


def _explain(error: RuntimeError) -> str:
    """What an error of the device in a capture means for the program."""
    if "legacy stream" in str(error):
        return (
            "An autograd graph from before the capture is alive, and holds nodes of the parameters that belong to the "
            "default stream: let go of losses and outputs that were kept without detach()."
        )
    return (
        "This work was being captured into a CUDA graph, where the host can neither read a value of the device "
        "(.item(), float(tensor), a mask that selects rows, printing) nor wait for it, nor copy from memory that is "
        "not pinned: keep such work outside of the captured function."
    )


def _end_broken(graph: torch.cuda.CUDAGraph, pool: GraphPool) -> None:
    """End a capture that has failed: torch raises again, and the first error is the one that tells something."""
    try:
        graph.capture_end()
    except RuntimeError:
        end_allocations(pool.device, pool.handle)
        pool.forget()  # torch takes the old memory for one that is captured into
        _recover_generator()


def _recover_generator() -> None:
    """torch's generator believes that it is captured still, and refuses to draw; a capture that ends sets it right."""
    sound = torch.cuda.CUDAGraph()
    sound.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device="cuda")
    sound.capture_end()
