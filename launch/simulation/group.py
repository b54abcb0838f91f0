"""The process group of a simulated rank and the work handles of its operations, for ``torch.distributed``.

Every rank has its own `SimulatedProcessGroup` for each group. ``meeting.py`` has the state that a group's ranks share.

A collective that tests on simulated ranks are to see needs a method here, of the name that torch.distributed calls, and
a function in ``collectives.py`` that says what the collective does to tensors.
"""

# mypy: disable-error-code="override"
# The methods take the arguments that torch.distributed passes, not every overload of ProcessGroup.

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from ...ddp.graphs.recorded import RecordedLaunch, record_launch
from ...ddp.torch_internals import current_backward
from ..simulation import collectives as move
from .collectives import Operation, Payload, reduce_op_name
from .meeting import Pending, SharedGroup, Transfer, describe_launch
from .schedule import Scheduler, SimulatedRank, current_rank

__all__ = ["BACKEND", "SimulatedProcessGroup", "SimulatedWork"]

BACKEND = "simulated"
"""The name that ``dist.get_backend()`` returns."""


class _SimulatedFuture(Future):  # type: ignore[type-arg]
    """A future whose wait passes the baton. Its callbacks run on the thread of the rank that requested the future."""

    def __init__(self, work: "SimulatedWork") -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        self._work.wait()
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> "_SimulatedFuture":
        following = _SimulatedFuture(self._work)

        def run(future: Any) -> None:
            try:
                following.set_result(callback(future))
            except Exception as error:
                following.set_exception(error)

        self.add_done_callback(run)
        return following


class SimulatedWork(dist.Work):
    """One rank's handle of an operation."""

    def __init__(self, group: "SimulatedProcessGroup", pending: Sequence[Pending], results: list[Any]) -> None:
        super().__init__()
        self._group = group
        self._pending = pending
        self._results = results
        self.recorded: RecordedLaunch | None = None
        """Where the operation was launched in a capture: what a replay launches."""

    def wait(self, timeout: Any = None) -> bool:
        if self.recorded is not None:
            self.recorded.record_wait()
        for pending in self._pending:
            self._group.scheduler.wait(self._group.own_rank(), pending)
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return all(self._group.scheduler.poll(self._group.own_rank(), pending) for pending in self._pending)

    def is_success(self) -> bool:
        return all(pending.done for pending in self._pending)

    def exception(self) -> None:
        return None

    def result(self) -> list[Any]:
        return self._results

    def source_rank(self) -> int:
        transfer = self._pending[0]
        if not isinstance(transfer, Transfer) or transfer.source is None:
            raise RuntimeError("source_rank() is known for a receive that has completed only")
        return transfer.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        # Inside a backward C++ code may wait for the future (torch's DDP does), and a wait in C++ cannot pass the
        # baton. So the operation completes before its future is returned; likewise for coalesced operations.
        if current_backward() != -1 or len(self._pending) > 1:
            self.wait()
        future = _SimulatedFuture(self)
        if self.is_success():
            future.set_result(self._results)
        else:
            self._pending[0].waiters.append((self._group.own_rank(), lambda: future.set_result(self._results)))
        return future


def _as_list(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _sum_unless_given(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp


class SimulatedProcessGroup(dist.ProcessGroup):
    """One rank's end of a group. The methods have the names that torch.distributed calls on its own backends."""

    def __init__(self, scheduler: Scheduler, shared: SharedGroup, rank: int, store: c10d.Store, desc: str) -> None:
        super().__init__(rank, len(shared.members))  # type: ignore[call-arg]  # subclasses take no store
        self._store = store
        self._desc = desc
        self.scheduler = scheduler
        self.shared = shared
        self._coalescing: list[Pending] | None = None

    def __repr__(self) -> str:
        return f"SimulatedProcessGroup(rank {self.rank()} of {self.shared.describe()})"

    def getBackendName(self) -> str:
        return BACKEND

    # torch keeps these properties in a group's C++ backend, which a simulated group does not have.

    @property
    def group_name(self) -> str:
        return self.shared.name

    @property
    def group_desc(self) -> str:
        return self._desc

    def get_group_store(self) -> c10d.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def own_rank(self) -> SimulatedRank:
        """The rank that this group belongs to. Raises where another rank's thread calls."""
        rank = current_rank()
        owner = self.shared.members[self.rank()]
        if rank is None or rank is not self.scheduler.ranks[owner]:
            caller = "a thread that is not a simulated rank" if rank is None else f"rank {rank.index}"
            raise RuntimeError(
                f"{caller} uses a process group of simulated rank {owner}: simulated ranks cannot share process groups "
                "or communicate from threads of their own (asynchronous checkpoints need real processes)"
            )
        return rank

    def _join(self, description: str, operation: Operation, payload: Payload) -> SimulatedWork:
        """Launch a collective, whose results are the outputs of ``payload``."""

        def launch() -> Pending:
            return self.shared.join(self.rank(), description, operation, payload)

        again = partial(self._join, description, operation, payload)
        return self._launch(f"{description} of {self.shared.describe()}", launch, payload.outputs, again)

    def _transfer(self, tensor: Tensor, source: int | None, target: int, tag: int, *, sending: bool) -> SimulatedWork:
        transfer = Transfer(self.shared, "send" if sending else "recv", tensor, source, target, tag)

        def launch() -> Pending:
            self.shared.transfer(transfer, sending=sending)
            return transfer

        again = partial(self._transfer, tensor, source, target, tag, sending=sending)
        return self._launch(transfer.describe(), launch, [tensor], again)

    def _launch(
        self,
        description: str,
        launch: Callable[[], Pending],
        results: Sequence[Any],
        again: Callable[[], SimulatedWork],
    ) -> SimulatedWork:
        """Launch an operation now, and ``again`` where a capture is replayed."""
        rank = self.own_rank()
        self.scheduler.raise_if_stopped()
        self.scheduler.record(rank, f"launch {description}")
        recorded = record_launch(again)
        try:
            pending = launch()
        except Exception as error:  # it ends the simulation, even if the rank that arrived last catches it
            self.scheduler.fail(rank, error)
            raise
        if self._coalescing is not None:
            self._coalescing.append(pending)
        self.scheduler.pass_baton(rank)
        work = SimulatedWork(self, [pending], list(results))
        work.recorded = recorded
        return work

    # Reductions.

    def allreduce(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        return self._reduce("all_reduce", tensors, _sum_unless_given(opts), None)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        return self._reduce("all_reduce_coalesced", tensors, _sum_unless_given(opts), None)

    def reduce(self, tensors: Any, opts: Any) -> SimulatedWork:
        return self._reduce("reduce", tensors, opts.reduceOp, opts.rootRank)

    def _reduce(self, name: str, tensors: Any, reduce_op: Any, root: int | None) -> SimulatedWork:
        tensors = _as_list(tensors)
        detail, operation = reduce_op_name(reduce_op), move.reduce
        if root is not None:
            detail, operation = f"{detail} to rank {self.shared.members[root]}", move.reduce_to_root
        payload = Payload(tensors, tensors, reduce_op, root or 0)
        return self._join(describe_launch(name, tensors, detail), operation, payload)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, name: str = "reduce_scatter"
    ) -> SimulatedWork:
        reduce_op = _sum_unless_given(opts)
        description = describe_launch(name, outputs, reduce_op_name(reduce_op))
        return self._join(description, move.reduce_scatter, Payload(inputs, outputs, reduce_op))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter([output], self._chunks([input], [output]), opts, "reduce_scatter_single")

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        return self.reduce_scatter(outputs, self._chunks(inputs, outputs), opts, "reduce_scatter_single_coalesced")

    # Gathers.

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        # Shapes may differ between ranks, so they are compared when the data moves.
        description = f"all_gather {_dtype(inputs[0])}"
        return self._join(description, move.all_gather, Payload(inputs, outputs))

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        # ``outputs`` is indexed by rank first here, and by tensor first in all other collectives.
        return self._gather_all("all_gather_coalesced", list(zip(*outputs, strict=True)), inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        return self._gather_all("all_gather_single", self._chunks([output], [input]), [input])

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        return self._gather_all("all_gather_single_coalesced", self._chunks(outputs, inputs), inputs)

    def _gather_all(self, name: str, outputs: Any, inputs: Any) -> SimulatedWork:
        return self._join(describe_launch(name, inputs), move.all_gather, Payload(inputs, outputs))

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        root = opts.rootRank
        description = describe_launch("gather", inputs, f"to rank {self.shared.members[root]}")
        places = outputs[0] if outputs else []
        return self._join(description, move.gather, Payload(inputs, places, None, root))

    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> SimulatedWork:
        places = self._chunks([output], [input]) if self.rank() == opts.rootRank else []
        return self.gather(places, [input], opts)

    def _chunks(self, wholes: Any, parts: Any) -> list[list[Tensor]]:
        """Views of each whole tensor, one for each rank."""
        return [_chunks(whole, part, self.size()) for whole, part in zip(wholes, parts, strict=True)]

    # From one rank, and between all.

    def broadcast(self, tensors: Any, opts: Any) -> SimulatedWork:
        tensors, root = _as_list(tensors), opts.rootRank
        description = describe_launch("broadcast", tensors, f"from rank {self.shared.members[root]}")
        return self._join(description, move.broadcast, Payload((), tensors, None, root))

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> SimulatedWork:
        root = opts.rootRank
        description = describe_launch("scatter", outputs, f"from rank {self.shared.members[root]}")
        values = inputs[0] if inputs else []
        return self._join(description, move.scatter, Payload(values, outputs, None, root))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        # Shapes differ between ranks by design, so they are compared when the data moves.
        description = f"all_to_all {_dtype(inputs[0])}"
        return self._join(description, move.all_to_all, Payload(inputs, outputs))

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> SimulatedWork:
        description = f"all_to_all_single {_dtype(input)}"
        payload = Payload(_splits(input, input_splits, self.size()), _splits(output, output_splits, self.size()))
        return self._join(description, move.all_to_all, payload)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        return self._join("barrier", move.barrier, Payload())

    # Point to point.

    def send(self, tensors: Any, target: int, tag: int = 0) -> SimulatedWork:
        return self._transfer(_as_list(tensors)[0], self.rank(), target, tag, sending=True)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> SimulatedWork:
        return self._transfer(_as_list(tensors)[0], source, self.rank(), tag, sending=False)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> SimulatedWork:
        return self._transfer(_as_list(tensors)[0], None, self.rank(), tag, sending=False)

    # Coalescing: the operations run as launched, and one handle waits for all of them.

    supports_coalescing = False

    def _get_backend(self, device: torch.device) -> "SimulatedProcessGroup":
        """What torch 2.14 asks for ``supports_coalescing``."""
        return self

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> SimulatedWork:
        pending, self._coalescing = self._coalescing or [], None
        return SimulatedWork(self, pending, [])

    # Names of torch 2.11 and 2.12.
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _chunks(whole: Tensor, part: Tensor, size: int) -> list[Tensor]:
    """One view of ``whole`` per rank, in the shape of ``part``; ``whole`` may be concatenated or stacked."""
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise ValueError(
            f"a {whole.dtype} tensor of shape {tuple(whole.shape)} does not hold {size} of {part.dtype} "
            f"{tuple(part.shape)}, one for each rank"
        )
    return list(whole.data.view(size, *part.shape).unbind(0))


def _splits(tensor: Tensor, sizes: list[int], size: int) -> list[Tensor]:
    """``tensor`` cut along its first dim, evenly unless ``sizes`` are given."""
    if not sizes:
        if tensor.shape[0] % size:
            raise ValueError(f"all_to_all_single: {tensor.shape[0]} rows do not divide among {size} ranks; give splits")
        sizes = [tensor.shape[0] // size] * size
    return list(tensor.data.split(sizes))
