"""The frame of an optimizer's step on flat shards: one pass over gradients, masters, moments and parameters."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..compat import HAS_TRITON, runs_on_triton
from .eight_bits import BLOCK, blocks_of
from .reference import Options, Rule, UpdateRow, update_reference

if HAS_TRITON:
    from .triton_update import TritonUpdate

__all__ = ["FlatUpdate"]

_GRADS = (torch.float32, torch.bfloat16, torch.float16)
_MOMENTS = (torch.float32, torch.bfloat16, torch.uint8)
_PARAMS = (torch.bfloat16, torch.float16)


class FlatUpdate:
    """Steps of an optimizer on rows of flat tensors: ``update = FlatUpdate(tensors)``, then ``update(options)`` each
    step. ``AdamUpdate``, ``SGDUpdate`` and ``LionUpdate`` have the equations.

    The masters' new values are rounded into the parameters. All arithmetic is fp32, whatever is stored; fp64 for fp64
    masters. ``reference.py`` has each rounding.

    - fp32 masters, with or without a parameter in bf16 or fp16: rounded to nearest, halves to even.
    - A bf16 parameter and 16 bits of remainder are the master (``split_master``): the same masters, bit for bit.
    - Moments in bf16 are rounded stochastically, by random bits of (key, element of the parameter, step, moment); or
      in 8 bits, in blocks of 256 elements from the parameter's start (``quantize_moment``). How parameters are cut
      into rows changes nothing.

    On CUDA three launches update all rows: steps, powers of beta where the rule has them, elements. They read addresses
    from device memory, written there once, and options, written there when they change. Rows of other dtypes, or at
    addresses that 16 does not divide, have a launch of their own. Rows must keep their memory, but for gradients
    under ``grads_move``. Nothing waits for the device, and calls can be captured in CUDA graphs: a float in ``options``
    is then the graph's, a tensor ``lr`` is read by each replay, and so are gradients where the captured call has found
    them.
    """

    moments: ClassVar[tuple[int, int]]
    """The least and the largest number of moments of a row: ``exp_avg``, then ``exp_avg_sq``."""

    def __init__(
        self, tensors: Sequence[UpdateRow], rule: Rule, *, maximize: bool = False, grads_move: bool = False
    ) -> None:
        """
        tensors     rows, on one device; see ``UpdateRow`` for shapes and dtypes
        maximize    ascend
        grads_move  each call is given the gradients, for which ``takes`` is True. None is kept, so that their memory
                    may be freed between steps

        Raises ``ValueError`` for shapes, devices or layouts that do not fit, for moments that the rule does not have,
        and for a ``first`` of 8-bit moments that 256 does not divide; ``TypeError`` for dtypes.
        """
        for index, row in enumerate(tensors):
            _check_row(type(self).__name__, self.moments, index, row, tensors[0].grad.device)
        self._tensors = tuple(tensors)
        self._rule, self._maximize = rule, maximize
        self._num_groups = 1 + max((row.group for row in tensors), default=-1)
        self._grads = [_kind_of(row.grad) for row in tensors]
        self._device = tensors[0].grad.device if tensors else None
        self._on_triton = None
        if tensors and all(runs_on_triton(type(self).__name__, row.grad) for row in tensors):
            self._on_triton = TritonUpdate(self._tensors, rule, maximize, grads_move)
        if grads_move:
            self._tensors = tuple(row._replace(grad=row.grad.new_empty(0)) for row in tensors)

    def takes(self, grads: Sequence[Tensor]) -> bool:
        """Whether a call may be given these gradients, [n] adjacent elements for each row, as after the constructor."""
        return [_kind_of(grad) for grad in grads] == self._grads

    @torch.no_grad()
    def __call__(
        self,
        options: Sequence[Options],
        *,
        grads: Sequence[Tensor] | None = None,
        divisor: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Take a step.

        options    by group
        grads      under ``grads_move``: for each row
        divisor    0-dim fp32: gradients are divided by it, and not written. None: 1
        found_inf  0-dim fp32: at 1.0 nothing changes, steps neither; otherwise 0.0. None: 0.0

        Raises ``ValueError`` where a row's group has no options, or a number is not 0-dim fp32 on the rows' device.
        """
        if len(options) < self._num_groups:
            raise ValueError(f"{type(self).__name__} needs options for {self._num_groups} groups, got {len(options)}")
        if not self._tensors:
            return
        for name, number in (("divisor", divisor), ("found_inf", found_inf)):
            if number is not None and not _is_number(number, self._device):
                raise ValueError(f"{type(self).__name__} needs {name} as a 0-dim fp32 tensor on the rows' device")
        if self._on_triton is not None:
            if grads is not None:
                self._on_triton.move_grads(grads)
            self._on_triton(options, divisor, found_inf)
        else:
            tensors = self._tensors
            if grads is not None:
                tensors = tuple(row._replace(grad=grad) for row, grad in zip(tensors, grads, strict=True))
            update_reference(
                tensors,
                options,
                divisor=divisor,
                found_inf=found_inf,
                rule=self._rule,
                maximize=self._maximize,
            )


def _kind_of(grad: Tensor) -> tuple[int, torch.dtype, int]:
    """What decides which kernel reads a gradient, and how."""
    return grad.numel(), grad.dtype, grad.data_ptr() % 16


def _is_number(tensor: Tensor, device: torch.device | None) -> bool:
    return tensor.dim() == 0 and tensor.dtype is torch.float32 and tensor.device == device


def _check_row(own: str, moments: tuple[int, int], index: int, row: UpdateRow, device: torch.device) -> None:
    """Raise for a row that does not fit.

    own      name of the update
    moments  see ``FlatUpdate.moments``
    """

    def check(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
        if tensor.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"{own} needs {name} of row {index} in {names}, got {tensor.dtype}")

    count = row.grad.numel()
    for name, tensor in row._asdict().items():
        if not isinstance(tensor, Tensor) or name == "step":
            continue
        expected = (blocks_of(count) if name.endswith("_scale") else count,)
        if tensor.shape != expected or tensor.device != device or not tensor.is_contiguous():
            raise ValueError(
                f"{own} needs {name} of row {index} as adjacent elements {expected} on {device}, got "
                f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
            )
    if not _is_number(row.step, device):
        raise ValueError(f"{own} needs step of row {index} as a 0-dim fp32 tensor on {device}")
    is_wide = row.master is not None and row.master.dtype is torch.float64
    check("grad", row.grad, *([torch.float64] if is_wide else _GRADS))
    given = [
        ("exp_avg", row.exp_avg, row.exp_avg_scale),
        ("exp_avg_sq", row.exp_avg_sq, row.exp_avg_sq_scale),
    ]
    for number, (name, moment, scale) in enumerate(given):
        if moment is None and number < moments[0]:
            raise ValueError(f"{own} needs {name} of row {index}")
        if moment is not None and number >= moments[1]:
            raise ValueError(f"{own} has no {name}, and row {index} has one")
        if moment is not None:
            check(name, moment, *([torch.float64] if is_wide else _MOMENTS))
        if (moment is not None and moment.dtype is torch.uint8) != (scale is not None):
            raise ValueError(f"{own} needs {name}_scale of row {index} for 8-bit moments, and only for those")
        if scale is not None:
            check(f"{name}_scale", scale, torch.float32)
            if row.first % BLOCK:
                raise ValueError(
                    f"row {index} begins at element {row.first} of its parameter: 8-bit moments have blocks of {BLOCK} "
                    f"elements from the parameter's start, so rows must begin at a multiple of {BLOCK}"
                )
    if row.master is not None:
        check("master", row.master, torch.float32, torch.float64)
        if row.remainder is not None:
            raise ValueError(f"row {index} has a master and a remainder: {own} needs one of them")
        if row.param is not None:
            check("param", row.param, *_PARAMS)
    elif row.param is None or row.remainder is None:
        raise ValueError(f"{own} needs row {index} with a master, or with a param and its remainder")
    else:
        check("param", row.param, torch.bfloat16)
        check("remainder", row.remainder, torch.int16)
