"""``TokenDispatcher``: tokens travel to the ranks that hold their experts, and the outputs of the experts back.

::

    forward   x, probs -> rows by expert -> send ------> the rank's experts -> send_back -> y: sum over a token's rows
    backward  d x      <- d rows         <- send_back <- d of their input   <- send      <- d y

Autograd is in this file: transports move plain tensors, and each of their directions is the other's gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ....ddp.collectives.rank_grid import Ranks, check_member, group_or_default, group_size
from ....ddp.contract.delay_blocks import queue_of_block
from ....kernels import permute_rows, unpermute_rows
from ....kernels.quantized import QuantSpec
from ...dense.compiled_wgrad import run_outside_graph
from ...recipes import recipe_now
from ...wgrad_queue import Filling, WgradQueue, filling
from ..moe_permutation import RowIdMap, moe_permute_with_probs
from .all_to_all import AllToAll, Alone
from .capacity import Capacity
from .compiled_dispatch import Place
from .quantized_rows import row_spec, send_rows
from .symmetric import SymmetricExchange
from .transport import TokenTransport

__all__ = ["Dispatched", "TokenDispatcher"]


_TRANSPORTS: dict[str, Callable[[int, Any], TokenTransport]] = {
    "all_to_all": AllToAll,
    "symmetric": SymmetricExchange,
}


class Dispatched(NamedTuple):
    """What ``dispatch`` tells ``combine``."""

    sorting: RowIdMap
    """This rank's tokens in the order of all E experts."""
    sent: Any
    """How rows have travelled, as the transport keeps it."""
    waiting: Filling = None
    """What backward does while rows travel."""
    of_grad: QuantSpec | None = None
    """How gradients of rows are quantised on their way to experts."""
    meanwhile: Any = None
    """What ``meanwhile`` has returned."""


class TokenDispatcher:
    """Sends tokens to their experts, which are spread over the ranks of ``group``, and sums what comes back::

        rows, m_splits, row_probs, dispatched = dispatcher.dispatch(x, expert_ids, probs)
        y = dispatcher.combine(experts(rows, m_splits, row_probs), dispatched)

    Rank r of ep holds the experts ``r E / ep`` to ``(r + 1) E / ep - 1``: ``experts`` is a ``GroupedMLP`` of E / ep.
    Mark its parameters ``allreduce = False``, and name the ranks that hold the same experts to the wrapper.

    num_experts    E, those of all ranks
    group          the ranks that hold one of each expert together, a process group or a mesh of one dim; None: all
    transport      "all_to_all": any ranks, and the host waits for the split sizes once in each ``dispatch``;
                   "capacity": any ranks, equal parts, no wait, and rows beyond ``capacity`` are dropped;
                   "symmetric": GPUs of one NVLink domain, no wait but in the first call, which says how many rows a
                   rank has at most (``SymmetricExchange``);
                   or a ``TokenTransport``
    capacity       most rows that a rank sends to one expert, the same on all ranks. ``transport.num_dropped`` counts
                   those beyond, on the device
    quantize_rows  under a recipe with scales for parts of a row (``Float8BlockScaling``, ``MXFP8BlockScaling``) rows,
                   and in backward their gradients, travel to the experts in 8 bits

    All ranks call it in one order, a rank without tokens too. One dispatcher may serve all layers. Backward computes
    a half of what a ``WgradQueue(fill_waits=True)`` holds while rows travel. Compiled code holds both methods in its
    graph, or breaks it: see ``runs_in_graph``.
    Raises ``ValueError`` for a transport that is not known, and experts that do not divide over the ranks.
    """

    def __init__(
        self,
        num_experts: int,
        group: Ranks = None,
        transport: str | TokenTransport = "all_to_all",
        *,
        capacity: int | None = None,
        quantize_rows: bool = False,
    ) -> None:
        check_member(group, "group")
        self.num_experts, self.quantize_rows = num_experts, quantize_rows
        self.group = group.get_group() if isinstance(group, DeviceMesh) else group_or_default(group, "group")
        ranks = group_size(self.group)
        if num_experts < 1 or num_experts % ranks:
            raise ValueError(f"TokenDispatcher: {num_experts} experts do not divide over {ranks} ranks")
        if (capacity is not None) != (transport == "capacity"):
            raise ValueError("TokenDispatcher: transport='capacity' needs capacity=, and no other transport takes it")
        self.transport: Any  # a TokenTransport
        if not isinstance(transport, str):
            self.transport = transport
        elif capacity is not None:
            self.transport = Capacity(num_experts, self.group, capacity)
        elif transport in _TRANSPORTS:
            self.transport = Alone() if ranks == 1 else _TRANSPORTS[transport](num_experts, self.group)
        else:
            raise ValueError(f"TokenDispatcher: transport={transport!r} is none of capacity, {', '.join(_TRANSPORTS)}")
        self._place = Place(self.transport)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TokenDispatcher":
        return self  # ranks cannot be copied, and nothing here belongs to one model

    def dispatch(
        self,
        x: Tensor,
        expert_ids: Tensor,
        probs: Tensor,
        *,
        queue: WgradQueue | None = None,
        meanwhile: Callable[[], Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Dispatched]:
        """Returns rows [S, D], their numbers by local expert [E / ep] on the device, probabilities [S], and a handle.

        x           [T, D]  tokens of this rank
        expert_ids  [T, k]  see ``row_id_map``: an id of E drops the copy
        probs       [T, k]  travel with the rows
        queue               with ``fill_waits``: backward computes half of it meanwhile; None: that of ``delayed_wgrad``
        meanwhile           runs while rows travel, as a shared expert: its result is the handle's ``meanwhile``

        Rows are sorted by expert, then by sender. Rows behind the last expert's may hold anything.
        """
        if torch.compiler.is_compiling() and not self.runs_in_graph(queue):
            given: Any = {"queue": queue, "meanwhile": meanwhile}
            return run_outside_graph(TokenDispatcher.dispatch, self, x, expert_ids, probs, **given)  # type: ignore[no-any-return]
        *travelling, sorting = moe_permute_with_probs(x, probs, expert_ids, self.num_experts)
        if torch.compiler.is_compiling():
            (rows, row_probs), splits, sent = self._place.send(travelling, sorting.splits)
            found = None if meanwhile is None else meanwhile()
            return rows, splits, row_probs, Dispatched(sorting, sent, meanwhile=found)
        waiting = filling(queue_of_block() if queue is None else queue)
        result: list[Any] = []
        recipe = recipe_now() if self.quantize_rows else None
        received, splits, sent = send_rows(
            self.transport,
            row_spec(recipe, "input"),
            [tensor.detach() for tensor in travelling],
            sorting.splits,
            None,
            None if meanwhile is None else lambda: result.append(meanwhile()),
        )

        def back(grads: list[Tensor]) -> list[Tensor]:
            returned: list[Tensor] = self.transport.send_back(grads, sent, waiting)
            return returned

        rows, row_probs = _Travelled.apply(back, received, *travelling)
        return rows, splits, row_probs, Dispatched(sorting, sent, waiting, row_spec(recipe, "grad"), *result)

    def combine(self, rows: Tensor, dispatched: Dispatched, *, meanwhile: Callable[[], object] | None = None) -> Tensor:
        """y [T, D]: the sum over each token's k copies, in fp32, rounded once.

        rows       [S, D]  outputs of the experts, for ``dispatch``'s rows
        meanwhile          runs while rows travel, as the experts of another microbatch
        """
        in_graph = self._place.is_usable and dispatched.waiting is None and dispatched.of_grad is None
        if torch.compiler.is_compiling() and not in_graph:
            broken: Tensor = run_outside_graph(TokenDispatcher.combine, self, rows, dispatched, meanwhile=meanwhile)
            return broken
        (places, _, splits), sent, waiting, of_grad, _ = dispatched
        if torch.compiler.is_compiling():
            y = self._place.send_back(rows, sent, places)
            if meanwhile is not None:
                meanwhile()
            return y
        (arrived,) = self.transport.send_back([rows.detach()], sent, meanwhile)

        def again(grads: list[Tensor]) -> list[Tensor]:
            of_rows = [permute_rows(grads[0], places)]
            return send_rows(self.transport, of_grad, of_rows, splits, sent, waiting)[0]

        # As one function, which saves no tensor: a recompute for backward's sake ends before these rows travel.
        (y,) = _Travelled.apply(again, [unpermute_rows(arrived, places)], rows)
        return y  # type: ignore[no-any-return]

    def runs_in_graph(self, queue: WgradQueue | None = None) -> bool:
        """Whether ``torch.compile`` takes ``dispatch`` and ``combine`` into its graph; if not, each breaks it.

        The transport must know how many rows a rank receives at most. Rows in 8 bits, and backwards that compute what
        the queue holds while rows travel, need eager code.
        """
        queue = queue_of_block() if queue is None else queue
        return self._place.is_usable and not self.quantize_rows and (queue is None or not queue.fill_waits)


class _Travelled(torch.autograd.Function):
    """Tensors -> ``arrived``, what a transport has made of them. The gradient of each direction is the other one.

    Rows have travelled before, outside of the function, so that autograd sees what ran meanwhile.
    """

    @staticmethod
    def forward(
        ctx: Any, back: Callable[[list[Tensor]], list[Tensor]], arrived: list[Tensor], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("TokenDispatcher: second derivatives (create_graph=True) through it are not defined")
        # All go back, whatever has reached this rank: other ranks wait for each. One function has permuted them, so
        # that all need a gradient if one does.
        return None, None, *ctx.back(list(grads))
