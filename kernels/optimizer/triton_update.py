"""Launches of the kernels in ``triton_kernels.py``: tables of rows in device memory, options, and forms of rows."""

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from ..compat import device_of
from ..triton_support import Launches, kinds_of
from .eight_bits import BLOCK, code_table
from .reference import Options, Rule, UpdateRow, power
from .triton_kernels import NUM_SCALARS, elements_kernel, steps_kernel

__all__ = ["TritonUpdate"]

CHUNK_BLOCKS = 8
"""Blocks of 256 elements of one program, which reads the row's addresses once."""
TILE_BLOCKS = 2
"""Blocks in a tile: 4 elements per thread with 4 warps, a load of 16 bytes in fp32. On an H200 this gives 0.97 of a
copy's bandwidth, and 4 blocks give 0.86."""
_NUM_WARPS = 4
_IN_BYTES = {"num_warps": 1, "maxnreg": 80}
"""For tiles with moments of 8 bits: a program of one warp, with one block, finds the block's scale alone. Codes are
much arithmetic, which many small programs hide best: on an H200 they take 0.64 of the time of four warps with four
blocks and 113 registers."""

# As in torch's kernel nothing is contracted but what is written as fma here, and denormal numbers stay.
_launch_steps = Launches(steps_kernel, num_warps=1)
_launch_elements = Launches(elements_kernel, enable_fp_fusion=False, enable_reflect_ftz=False)

_KINDS = {None: "", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "8 bits"}


class TritonUpdate:
    """``FlatUpdate`` of rows that it has checked, by a launch for steps, torch's for powers, and one for each form."""

    def __init__(self, tensors: Sequence[UpdateRow], rule: Rule, maximize: bool, grads_move: bool = False) -> None:
        # What the table points to is kept.
        self._rows = [row._replace(grad=row.grad.new_empty(0)) for row in tensors] if grads_move else tensors
        self._device = tensors[0].grad.device
        self._rule, self._maximize = rule, maximize
        # A slot is a step with a group; those of one step lie together.
        slots = sorted({(row.step.data_ptr(), row.group) for row in tensors})
        slot_of = {slot: index for index, slot in enumerate(slots)}
        steps = list(dict.fromkeys(step for step, _ in slots))
        first_slots = [bisect_left(slots, (step, 0)) for step in steps]
        self._steps = self._integers(steps, torch.int64)
        self._first_slots = self._integers([*first_slots, len(slots)], torch.int32)
        self._groups = self._integers([group for _, group in slots], torch.int32)
        self._scalars = torch.empty(len(slots), NUM_SCALARS, dtype=torch.float32, device=self._device)
        self._bases, self._exponents, self._powers = self._scalars.new_empty(3, len(slots), 2)
        self._table = self._integers(
            [_fields(row, slot_of[row.step.data_ptr(), row.group]) for row in tensors], torch.int64
        )
        self._made_with = [row.grad.data_ptr() if row.grad.numel() else None for row in tensors]
        """Addresses of the rows' first gradients; None without elements."""
        self._first_grads = self._table[:, 1].clone() if grads_move else None
        """The same, on the device."""
        self._chunks = {form: self._integers(chunks, torch.int32) for form, chunks in _chunks_by_form(tensors).items()}
        self._codes = code_table(self._device)
        num_groups = 1 + max(row.group for row in tensors)
        self._options = torch.empty(num_groups, 5, dtype=torch.float32, device=self._device)
        self._uploaded: tuple[list[float], list[bool]] | None = None

    def __call__(self, options: Sequence[Options], divisor: Tensor | None, found_inf: Tensor | None) -> None:
        with device_of(self._table):
            on_device = self._upload(options[: self._options.shape[0]])
            arguments = self._steps, self._first_slots, self._groups, on_device, found_inf
            key = self._device, kinds_of(divisor, found_inf, self._bases, self._exponents, self._powers)
            grid = self._steps.shape[0], 1, 1
            _launch_steps(key, grid, *arguments, self._scalars, self._bases, self._exponents)
            if self._rule in ("adamw", "adam"):
                power(self._bases, self._exponents, self._powers)
            for form, chunks in self._chunks.items():
                blocks, options_of = (1, _IN_BYTES) if "8 bits" in form else (TILE_BLOCKS, {"num_warps": _NUM_WARPS})
                constants = *form[:4], self._rule, self._maximize, form[4], blocks, CHUNK_BLOCKS // blocks
                _launch_elements(
                    (key, constants), (chunks.shape[0], 1, 1),
                    self._table, chunks, self._scalars, self._powers, self._codes, divisor, found_inf, *constants,
                    **options_of,
                )  # fmt: skip

    def move_grads(self, grads: Sequence[Tensor]) -> None:
        """Have the table point to these gradients, by a launch for each run of rows that have moved together.

        Addresses are numbers in the launch, so that replays of a captured call write those of the capture again.
        """
        assert self._first_grads is not None, "made with grads_move"
        first, by = 0, 0
        for index, (grad, address) in enumerate(zip(grads, self._made_with, strict=True)):
            moved = by if address is None else grad.data_ptr() - address
            if moved != by:
                self._write_grads(first, index, by)
                first, by = index, moved
        self._write_grads(first, len(grads), by)

    def _write_grads(self, first: int, end: int, moved: int) -> None:
        if self._first_grads is not None and first < end:
            torch.add(self._first_grads[first:end], moved, out=self._table[first:end, 1])

    def _integers(self, values: object, dtype: torch.dtype) -> Tensor:
        # From memory that is not page-locked: the copy has arrived on the device when this returns.
        return torch.tensor(values, dtype=dtype).to(self._device)

    def _upload(self, options: Sequence[Options]) -> Tensor:
        """[groups, 5] fp32 on the device: the learning rate first, and the decay last."""
        on_device = [isinstance(group.lr, Tensor) and group.lr.device == self._device for group in options]
        values = [
            0.0 if skipped else float(value)
            for group, skips in zip(options, on_device, strict=True)
            for value, skipped in zip(
                (*group[:-1], *[0.0] * (5 - len(group)), group[-1]), (skips, False, False, False, False), strict=True
            )
        ]
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Replays write these numbers again, into memory of their own.
            made = torch.empty_like(self._options)
            for at, value in zip(made.view(-1), values, strict=True):
                at.fill_(value)
        else:
            made = self._options
            if (values, on_device) != self._uploaded:
                made.view(-1).copy_(torch.tensor(values, dtype=torch.float32), non_blocking=True)
                self._uploaded = values, on_device
        for at, group, is_there in zip(made, options, on_device, strict=True):
            if is_there:
                at[0].copy_(group.lr)
        return made


def _fields(row: UpdateRow, slot: int) -> list[int]:
    """The row of the table: 12 integers, of which the kernels read some by number."""
    tensors = row.grad, row.exp_avg, row.exp_avg_sq, row.master, row.param, row.remainder
    addresses = [0 if each is None else each.data_ptr() for each in (*tensors, row.exp_avg_scale, row.exp_avg_sq_scale)]
    return [row.grad.numel(), *addresses, row.first, row.key & 0xFFFFFFFF, slot]


def _chunks_by_form(tensors: Sequence[UpdateRow]) -> dict[tuple[str, str, str, str, bool], list[tuple[int, int]]]:
    """For each set of dtypes and alignment: the row and the number within the row of each chunk."""
    forms: dict[tuple[str, str, str, str, bool], list[tuple[int, int]]] = {}
    chunk = CHUNK_BLOCKS * BLOCK
    for index, row in enumerate(tensors):
        if not row.grad.numel():
            continue
        if row.remainder is not None:
            param = "remainder"
        else:
            param = "" if row.param is None else _KINDS[row.param.dtype]
        moved = row.grad, row.exp_avg, row.exp_avg_sq, row.master, row.param, row.remainder
        aligned = all(each is None or each.data_ptr() % 16 == 0 for each in moved)
        kinds = [_KINDS[None if each is None else each.dtype] for each in (row.grad, row.exp_avg, row.exp_avg_sq)]
        form = kinds[0], kinds[1], kinds[2], param, aligned
        forms.setdefault(form, []).extend((index, number) for number in range(-(-row.grad.numel() // chunk)))
    return forms
