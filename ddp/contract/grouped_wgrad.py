"""``GroupedWgrad``: the weight gradients of a grouped product, where one kernel writes those of all experts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import grouped_wgrad_accumulate
from ...kernels.quantized import GroupedQuantized, scaled_grouped_wgrad_accumulate

__all__ = ["GroupedWgrad", "grouped_gradients"]

Operand = Tensor | GroupedQuantized
"""An operand of ``dy_e^T x_e``: [T, features]; or quantised along each expert's tokens: [features, T]."""


def grouped_wgrad(
    dy: Operand,
    x: Operand,
    main_grads: Tensor | Sequence[Tensor | None],
    offsets: Tensor,
    *,
    overwrite: bool | Sequence[bool] = False,
) -> None:
    """``grouped_wgrad_accumulate``, which describes the arguments. Quantised operands have offsets of their own."""
    if isinstance(dy, GroupedQuantized) or isinstance(x, GroupedQuantized):
        assert isinstance(dy, GroupedQuantized) and isinstance(x, GroupedQuantized), "both alike"
        scaled_grouped_wgrad_accumulate(dy, x, main_grads, overwrite=overwrite)
    else:
        grouped_wgrad_accumulate(dy, x, main_grads, offsets, overwrite=overwrite)


class GroupedWgrad:
    """``dW_e = dy_e^T x_e``: the ``WgradProduct`` of experts. A packed weight is one parameter with one ``main_grad``.

    weights  the experts' weights [N, K] each, or one packed weight [E, N, K]
    """

    rows_apart = True

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._packed = weights[0].dim() == 3
        self._tied = len(set(map(id, weights))) < len(weights)

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """See ``WgradProduct``: operands tell the shapes."""
        return True

    def accumulate(
        self, main_grads: Sequence[Tensor | None], overwrite: Sequence[bool], dy: Operand, x: Operand, offsets: Tensor
    ) -> None:
        """See ``WgradProduct``.

        =======  =======  =============================================================
        dy       [T, N]   gradient of the output
        x        [T, K]   input of the forward; or both quantised along each expert's rows
        offsets  [E + 1]  the rows of each expert, on the device
        =======  =======  =============================================================
        """
        if self._packed:
            (packed,) = main_grads
            assert packed is not None, "a packed weight whose gradient is not wanted has no place"
            grouped_wgrad(dy, x, packed, offsets, overwrite=overwrite[0])
        elif not self._tied:
            grouped_wgrad(dy, x, main_grads, offsets, overwrite=overwrite)
        else:  # experts share a weight: one kernel gives no order of writes, so each expert gets a kernel of its own
            for expert, main_grad in enumerate(main_grads):
                alone = [main_grad if other == expert else None for other in range(len(main_grads))]
                grouped_wgrad(dy, x, alone, offsets, overwrite=overwrite)

    def gradients(
        self, wanted: Sequence[bool], dtype: torch.dtype, dy: Operand, x: Operand, offsets: Tensor
    ) -> list[Tensor | None]:
        """See ``WgradProduct`` and ``grouped_gradients``."""
        return grouped_gradients(dy, x, offsets, wanted, dtype, packed=self._packed)


def grouped_gradients(
    dy: Operand,
    x: Operand,
    offsets: Tensor,
    wanted: Sequence[bool],
    dtype: torch.dtype,
    *,
    packed: bool,
) -> list[Tensor | None]:
    """``dy_e^T x_e`` as new tensors, for autograd: [N, K] for each expert wanted, or one packed [E, N, K].

    An expert without rows gets zeros. Sums are fp32 and rounded once where ``dtype`` is fp32 or ``dy``'s dtype, and of
    quantised operands.
    """
    experts = offsets.shape[0] - 1 if packed else sum(wanted)
    summed = dy.dtype if isinstance(dy, Tensor) else torch.float32
    into = dtype if dtype in (torch.float32, summed) else summed
    buffer = offsets.new_empty(experts, _features(dy), _features(x), dtype=into)
    if packed or experts == len(wanted):
        grouped_wgrad(dy, x, buffer, offsets, overwrite=True)
    elif experts:
        parts = iter(buffer.unbind())
        grouped_wgrad(dy, x, [next(parts) if want else None for want in wanted], offsets, overwrite=True)
    buffer = buffer.to(dtype)
    if packed:
        return [buffer]
    found = iter(buffer.unbind())
    return [next(found) if want else None for want in wanted]


def _features(operand: Operand) -> int:
    return operand.matrix.shape[0] if isinstance(operand, GroupedQuantized) else operand.shape[1]
