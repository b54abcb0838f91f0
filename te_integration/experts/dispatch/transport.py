"""``TokenTransport``: what moves rows between ranks for a ``TokenDispatcher``. It may be somebody else's object.

Legend: R rows of the sender, S rows that it receives, E experts, ep ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

__all__ = ["Meanwhile", "TokenTransport"]

Meanwhile = Callable[[], object] | None
"""What the caller's stream does while rows travel. A transport calls it once, behind the start and before the wait."""


class TokenTransport(Protocol):
    """Moves rows to the ranks of their experts, and back. The two methods are each other's adjoint.

    Rank r of the ep ranks holds the experts ``r E / ep`` to ``(r + 1) E / ep - 1``. All tensors of a call have the same
    rows; they are plain tensors without a graph, of any dtype and of one dim or two.
    """

    def send(
        self, tensors: Sequence[Tensor], counts: Tensor, sent: Any = None, meanwhile: Meanwhile = None
    ) -> tuple[list[Tensor], Tensor, Any]:
        """Each row goes to its expert's rank.

        tensors  [R, ...] each, sorted by expert. Rows behind the last expert's go nowhere
        counts   [E] int64 on the device: rows of each expert
        sent     what an earlier call for these counts returned: rows take the same way again

        Returns the tensors as received, [S, ...] each, sorted by local expert and then by sender; the rows of each
        local expert, [E / ep] int64 on the device; and what ``send_back`` needs. Rows behind the last expert's may
        hold anything.
        """

    def send_back(self, tensors: Sequence[Tensor], sent: Any, meanwhile: Meanwhile = None) -> list[Tensor]:
        """Each received row goes back to where it came from: [S, ...] -> [R, ...] each, in the sender's order.

        Rows that went nowhere are zeros.
        """
