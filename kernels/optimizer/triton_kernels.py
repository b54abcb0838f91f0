"""Triton kernels of AdamW on flat shards: one launch for the steps, and one for the elements of all rows.

A table in device memory has the addresses of each row. A program of the elements' kernel updates CHUNK_TILES tiles of
one row; a list says of which row, and where they begin. ``reference.py`` has the arithmetic. Between the two
launches torch takes the powers of beta: Triton's library has an older ``powf`` than torch's fused kernel. Numbers in
bf16 are moved as integers: the interpreter then rounds them as the compiler does.
"""

from bisect import bisect_left
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..compat import device_of
from ..triton_support import Launches, kinds_of
from .eight_bits import BLOCK, CODE_SIZE, DECADES, code_table
from .reference import AdamOptions, AdamTensors, power

__all__ = ["TritonAdamUpdate"]

TILE_BLOCKS = 2
"""Blocks of 256 elements in a tile: 4 elements per thread with 4 warps, a load of 16 bytes in fp32. On an H200 this
gives 0.97 of a copy's bandwidth, and 4 blocks give 0.86."""
CHUNK_TILES = 4
"""Tiles of one program, which reads the row's addresses once."""
_NUM_WARPS = 4

_BLOCK = tl.constexpr(BLOCK)
_CODE_SIZE = tl.constexpr(CODE_SIZE)
_DECADES = tl.constexpr(DECADES)
_FIELDS = tl.constexpr(12)
_SCALARS = tl.constexpr(7)


# ---- Steps. ----


@triton.jit
def _steps_kernel(
    steps: tl.tensor, slots: tl.tensor, groups: tl.tensor, numbers: tl.tensor, found_inf: tl.tensor,
    scalars: tl.tensor, bases: tl.tensor, exponents: tl.tensor,
) -> None:  # fmt: skip
    """A program raises one step, and writes numbers for each group whose rows have this step: its slots."""
    counter = tl.load(steps + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    step = tl.load(counter) + 1.0
    if found_inf is not None:
        tl.store(counter, step - tl.load(found_inf))
    else:
        tl.store(counter, step)
    for slot in range(tl.load(slots + tl.program_id(0)), tl.load(slots + tl.program_id(0) + 1)):
        at = numbers + 5 * tl.load(groups + slot)
        lr = tl.load(at)
        beta1 = tl.load(at + 1)
        beta2 = tl.load(at + 2)
        decay = tl.load(at + 4)
        to = scalars + slot * _SCALARS
        tl.store(to, decay)
        tl.store(to + 1, lr * decay)
        tl.store(to + 2, beta1)
        tl.store(to + 3, beta2)
        tl.store(to + 4, lr)
        tl.store(to + 5, tl.load(at + 3))
        tl.store(to + 6, step)
        tl.store(bases + 2 * slot, beta1)
        tl.store(bases + 2 * slot + 1, beta2)
        tl.store(exponents + 2 * slot, step)
        tl.store(exponents + 2 * slot + 1, step)


# ---- Elements. ----


@triton.jit
def _pointer(address: tl.tensor, KIND: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    """The row's tensor of this kind: bf16 is read and written as int16."""
    if KIND == "fp32":
        pointer = address.to(tl.pointer_type(tl.float32))
    elif KIND == "fp16":
        pointer = address.to(tl.pointer_type(tl.float16))
    elif KIND == "8 bits":
        pointer = address.to(tl.pointer_type(tl.uint8))
    else:
        pointer = address.to(tl.pointer_type(tl.int16))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load(pointer: tl.tensor, at: tl.tensor, inside: tl.tensor, WHOLE: tl.constexpr) -> tl.tensor:
    """Elements at [blocks, 256]; 0 outside the row. A mask would split accesses of 16 bytes."""
    if WHOLE:
        return tl.load(pointer + at)
    else:
        return tl.load(pointer + at, mask=inside, other=0)


@triton.jit
def _store(pointer: tl.tensor, at: tl.tensor, value: tl.tensor, inside: tl.tensor, WHOLE: tl.constexpr) -> None:
    if WHOLE:
        tl.store(pointer + at, value)
    else:
        tl.store(pointer + at, value, mask=inside)


@triton.jit
def _to_float(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    if KIND == "bf16":
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _quiet(bits: tl.tensor, value: tl.tensor, other: tl.tensor) -> tl.tensor:
    """``other``, and the NaN 0x7FC0 or 0xFFC0 where ``value`` is NaN."""
    return tl.where(value != value, (bits & -0x80000000) | 0x7FC00000, other)


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """See ``random_bits``; x is uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _random_bits(element: tl.tensor, key: tl.tensor, step: tl.tensor) -> tl.tensor:
    """uint32, as ``random_bits`` of the reference."""
    seed1 = _mix(_mix(key.to(tl.uint32)) + step.to(tl.int32).to(tl.uint32))
    seed2 = _mix(seed1 + 0x9E3779B9)
    high = (element >> 32).to(tl.uint32) * 0x9E3779B9
    return _mix(_mix(element.to(tl.uint32) ^ high ^ seed1) + seed2)


@triton.jit
def _rounded_stochastically(value: tl.tensor, random: tl.tensor) -> tl.tensor:
    """bf16 as int16, as ``round_stochastically`` of the reference."""
    bits = value.to(tl.int32, bitcast=True)
    raised = bits + random.to(tl.int32)
    kept = tl.where((raised & 0x7F800000) == 0x7F800000, bits, raised)
    return (_quiet(bits, value, kept) >> 16).to(tl.int16)


@triton.jit
def _decoded(codes: tl.tensor, scale: tl.tensor, table: tl.tensor) -> tl.tensor:
    """[blocks, 256] values of ``codes``; scale [blocks]."""
    return tl.load(table + codes.to(tl.int32)) * scale[:, None]


@triton.jit
def _encoded(value: tl.tensor, table: tl.tensor, SIGNED: tl.constexpr) -> tl.tensor:
    """Codes [blocks, 256] and scales [blocks], as ``quantize_blocks``."""
    # As integers magnitudes have the order of the floats, with NaN above infinity.
    scale = tl.max(tl.abs(value).to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
    magnitude = tl.div_rn(tl.abs(value), tl.where(scale == 0.0, 1.0, scale)[:, None])
    above = tl.zeros_like(value).to(tl.int32)
    slope = tl.load(table + _BLOCK + _DECADES + 1) + tl.zeros_like(value)
    for decade in tl.static_range(_DECADES + 1):
        is_above = magnitude >= tl.load(table + _BLOCK + decade)
        above += is_above.to(tl.int32)
        if decade < _DECADES:
            slope = tl.where(is_above, tl.load(table + _BLOCK + _DECADES + 1 + decade), slope)
    if SIGNED:
        above = tl.where(value < 0, tl.minimum(above, _DECADES), above)
        count = 1 << tl.minimum(tl.maximum(above - 1, 0), _DECADES - 1)
    else:
        above = tl.where(value > 0, tl.maximum(above, 1), above)
        count = 2 << tl.minimum(tl.maximum(above - 1, 0), _DECADES - 1)
    interval = tl.floor(magnitude * slope - count.to(tl.float32) * (1 / 9)).to(tl.int32)
    interval = tl.minimum(tl.maximum(interval, 0), count - 1)
    if SIGNED:
        code = tl.where(above > _DECADES, 128, count + interval)
        code = tl.where((value < 0) & (above > 0), code + 128, code)
    else:
        code = tl.where(above > _DECADES, 255, count + interval - 1)
    return tl.where(above == 0, 0, code).to(tl.uint8), scale


@triton.jit
def _read_moment(
    row: tl.tensor, FIELD: tl.constexpr, block: tl.tensor, at: tl.tensor, inside: tl.tensor, table: tl.tensor,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    stored = _load(_pointer(tl.load(row + FIELD), KIND, ALIGNED), at, inside, WHOLE)
    if KIND == "8 bits":
        scales = tl.load(row + FIELD + 5).to(tl.pointer_type(tl.float32))
        blocks = tl.cdiv(tl.load(row), _BLOCK)
        return _decoded(stored, tl.load(scales + block, mask=block < blocks, other=0.0), table)
    else:
        return _to_float(stored, KIND)


@triton.jit
def _write_moment(
    row: tl.tensor, FIELD: tl.constexpr, block: tl.tensor, at: tl.tensor, inside: tl.tensor, table: tl.tensor,
    value: tl.tensor, random: tl.tensor,
    SIGNED: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    pointer = _pointer(tl.load(row + FIELD), KIND, ALIGNED)
    if KIND == "8 bits":
        codes, scale = _encoded(value, table, SIGNED)
        _store(pointer, at, codes, inside, WHOLE)
        scales = tl.load(row + FIELD + 5).to(tl.pointer_type(tl.float32))
        tl.store(scales + block, scale, mask=block < tl.cdiv(tl.load(row), _BLOCK))
    elif KIND == "bf16":
        _store(pointer, at, _rounded_stochastically(value, random), inside, WHOLE)
    else:
        _store(pointer, at, value, inside, WHOLE)


@triton.jit
def _update_tile(
    row: tl.tensor, start: tl.tensor, scalars: tl.tensor, step_size: tl.tensor, correction2: tl.tensor,
    codes: tl.tensor, divisor: tl.tensor,
    GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, PARAM: tl.constexpr, DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr, TILE_BLOCKS: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """Elements from ``start`` on; WHOLE: all of them lie in the row."""
    in_tile = tl.arange(0, TILE_BLOCKS)
    block = start // _BLOCK + in_tile  # [blocks]
    at = start + (in_tile[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :])  # [blocks, 256]
    inside = at < tl.load(row)
    decay = tl.load(scalars)
    beta1 = tl.load(scalars + 2)
    beta2 = tl.load(scalars + 3)

    # Read everything first: loads that no store separates are in flight together.
    grad = _to_float(_load(_pointer(tl.load(row + 1), GRAD, ALIGNED), at, inside, WHOLE), GRAD)
    exp_avg = _read_moment(row, 2, block, at, inside, codes, EXP_AVG, ALIGNED, WHOLE)
    exp_avg_sq = _read_moment(row, 3, block, at, inside, codes + _CODE_SIZE, EXP_AVG_SQ, ALIGNED, WHOLE)
    to_param = _pointer(tl.load(row + 5), PARAM, ALIGNED)
    if PARAM == "remainder":
        to_remainder = _pointer(tl.load(row + 6), PARAM, ALIGNED)
        high = _load(to_param, at, inside, WHOLE).to(tl.int32) << 16
        master = (high + _load(to_remainder, at, inside, WHOLE)).to(tl.float32, bitcast=True)
    else:
        to_master = _pointer(tl.load(row + 4), "fp32", ALIGNED)
        master = _load(to_master, at, inside, WHOLE)

    if divisor is not None:
        grad = tl.div_rn(grad, tl.load(divisor))
    if MAXIMIZE:
        grad = -grad
    if DECOUPLED:
        master = tl.where(decay != 0.0, tl.fma(tl.zeros_like(master) - tl.load(scalars + 1), master, master), master)
    else:
        grad = tl.where(decay != 0.0, tl.fma(master, tl.zeros_like(master) + decay, grad), grad)
    square = grad * grad
    beta1 = tl.zeros_like(master) + beta1
    beta2 = tl.zeros_like(master) + beta2
    exp_avg = tl.fma(beta1, exp_avg, tl.fma(-beta1, grad, grad))
    exp_avg_sq = tl.fma(beta2, exp_avg_sq, tl.fma(-beta2, square, square))
    # Rows of an embedding that no token has chosen have moments of zero, for which roots and quotients take far longer.
    # Their values are known: one is computed in their place.
    unseen = tl.where(correction2 > 0.0, exp_avg_sq, 1.0) == 0.0
    root = tl.div_rn(tl.sqrt_rn(tl.where(unseen, 1.0, exp_avg_sq)), correction2)
    denom = tl.where(unseen, 0.0, root) + tl.load(scalars + 5)
    change = step_size * exp_avg
    is_zero = tl.where(denom > 0.0, change, 1.0) == 0.0
    master = master - tl.where(is_zero, change, tl.div_rn(tl.where(is_zero, 1.0, change), denom))

    bits = master.to(tl.int32, bitcast=True)
    if PARAM == "remainder":
        bits = _quiet(bits, master, bits)
        remainder = bits.to(tl.int16)
        _store(to_param, at, ((bits - remainder) >> 16).to(tl.int16), inside, WHOLE)
        _store(to_remainder, at, remainder, inside, WHOLE)
    else:
        _store(to_master, at, master, inside, WHOLE)
    if PARAM == "bf16":  # to nearest, halves to even
        rounded = _quiet(bits, master, bits + 0x7FFF + ((bits >> 16) & 1))
        _store(to_param, at, (rounded >> 16).to(tl.int16), inside, WHOLE)
    elif PARAM == "fp16":
        _store(to_param, at, master.to(tl.float16), inside, WHOLE)
    random = tl.zeros_like(bits).to(tl.uint32)
    if EXP_AVG == "bf16" or EXP_AVG_SQ == "bf16":
        random = _random_bits(tl.load(row + 9) + at, tl.load(row + 10), tl.load(scalars + 6))
    _write_moment(row, 2, block, at, inside, codes, exp_avg, random & 0xFFFF, True, EXP_AVG, ALIGNED, WHOLE)
    codes += _CODE_SIZE
    _write_moment(row, 3, block, at, inside, codes, exp_avg_sq, random >> 16, False, EXP_AVG_SQ, ALIGNED, WHOLE)


@triton.jit
def _elements_kernel(
    table: tl.tensor, chunks: tl.tensor, scalars: tl.tensor, powers: tl.tensor, codes: tl.tensor, divisor: tl.tensor,
    found_inf: tl.tensor,
    GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, PARAM: tl.constexpr, DECOUPLED: tl.constexpr,
    MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr, TILE_BLOCKS: tl.constexpr, CHUNK_TILES: tl.constexpr,
) -> None:  # fmt: skip
    """A program updates a chunk of one row. PARAM: "remainder", the dtype beside a master, or "" without one."""
    row = table + tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64) * _FIELDS
    tile: tl.constexpr = TILE_BLOCKS * _BLOCK
    first = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * (CHUNK_TILES * tile)
    end = tl.load(row)
    if found_inf is not None:
        end = tl.where(tl.load(found_inf) == 1.0, 0, end)
    slot = tl.load(row + 11)
    scalars += slot * _SCALARS
    step_size = tl.div_rn(tl.load(scalars + 4), 1.0 - tl.load(powers + 2 * slot))
    correction2 = tl.sqrt_rn(1.0 - tl.load(powers + 2 * slot + 1))
    for index in range(CHUNK_TILES):
        start = first + index * tile
        if start + tile <= end:
            _update_tile(
                row, start, scalars, step_size, correction2, codes, divisor,
                GRAD, EXP_AVG, EXP_AVG_SQ, PARAM, DECOUPLED, MAXIMIZE, ALIGNED, TILE_BLOCKS, True,
            )  # fmt: skip
        elif start < end:
            _update_tile(
                row, start, scalars, step_size, correction2, codes, divisor,
                GRAD, EXP_AVG, EXP_AVG_SQ, PARAM, DECOUPLED, MAXIMIZE, ALIGNED, TILE_BLOCKS, False,
            )  # fmt: skip


# As in torch's kernel nothing is contracted but what is written as fma here, and denormal numbers stay.
_launch_steps = Launches(_steps_kernel, num_warps=1)
_launch_elements = Launches(_elements_kernel, num_warps=_NUM_WARPS, enable_fp_fusion=False, enable_reflect_ftz=False)


# ---- Launches. ----

_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "8 bits"}


class TritonAdamUpdate:
    """``AdamUpdate`` of rows that it has checked, by a launch for steps, torch's for powers, and one for each form."""

    def __init__(
        self, tensors: Sequence[AdamTensors], decoupled: bool, maximize: bool, grads_move: bool = False
    ) -> None:
        # What the table points to is kept.
        self._rows = [row._replace(grad=row.grad.new_empty(0)) for row in tensors] if grads_move else tensors
        self._device = tensors[0].grad.device
        self._decoupled, self._maximize = decoupled, maximize
        # A slot is a step with a group; those of one step lie together.
        slots = sorted({(row.step.data_ptr(), row.group) for row in tensors})
        slot_of = {slot: index for index, slot in enumerate(slots)}
        steps = list(dict.fromkeys(step for step, _ in slots))
        first_slots = [bisect_left(slots, (step, 0)) for step in steps]
        self._steps = self._integers(steps, torch.int64)
        self._first_slots = self._integers([*first_slots, len(slots)], torch.int32)
        self._groups = self._integers([group for _, group in slots], torch.int32)
        self._scalars = torch.empty(len(slots), _SCALARS.value, dtype=torch.float32, device=self._device)
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

    def __call__(self, options: Sequence[AdamOptions], divisor: Tensor | None, found_inf: Tensor | None) -> None:
        with device_of(self._table):
            on_device = self._upload(options[: self._options.shape[0]])
            arguments = self._steps, self._first_slots, self._groups, on_device, found_inf
            key = self._device, kinds_of(divisor, found_inf, self._bases, self._exponents, self._powers)
            grid = self._steps.shape[0], 1, 1
            _launch_steps(key, grid, *arguments, self._scalars, self._bases, self._exponents)
            power(self._bases, self._exponents, self._powers)
            for form, chunks in self._chunks.items():
                constants = *form[:4], self._decoupled, self._maximize, form[4], TILE_BLOCKS, CHUNK_TILES
                _launch_elements(
                    (key, constants), (chunks.shape[0], 1, 1),
                    self._table, chunks, self._scalars, self._powers, self._codes, divisor, found_inf, *constants,
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

    def _upload(self, options: Sequence[AdamOptions]) -> Tensor:
        """[groups, 5] fp32 on the device."""
        on_device = [isinstance(group.lr, Tensor) and group.lr.device == self._device for group in options]
        values = [
            0.0 if skipped else float(value)
            for group, skips in zip(options, on_device, strict=True)
            for value, skipped in zip(group, (skips, False, False, False, False), strict=True)
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


def _fields(row: AdamTensors, slot: int) -> list[int]:
    """The row of the table: 12 integers, of which the kernels read some by number."""
    tensors = row.grad, row.exp_avg, row.exp_avg_sq, row.master, row.param, row.remainder
    addresses = [0 if each is None else each.data_ptr() for each in (*tensors, row.exp_avg_scale, row.exp_avg_sq_scale)]
    return [row.grad.numel(), *addresses, row.first, row.key & 0xFFFFFFFF, slot]


def _chunks_by_form(tensors: Sequence[AdamTensors]) -> dict[tuple[str, str, str, str, bool], list[tuple[int, int]]]:
    """For each set of dtypes and alignment: the row and the number within the row of each chunk."""
    forms: dict[tuple[str, str, str, str, bool], list[tuple[int, int]]] = {}
    chunk = TILE_BLOCKS * BLOCK * CHUNK_TILES
    for index, row in enumerate(tensors):
        if not row.grad.numel():
            continue
        if row.remainder is not None:
            param = "remainder"
        else:
            param = "" if row.param is None else _KINDS[row.param.dtype]
        moved = row.grad, row.exp_avg, row.exp_avg_sq, row.master, row.param, row.remainder
        aligned = all(each is None or each.data_ptr() % 16 == 0 for each in moved)
        form = _KINDS[row.grad.dtype], _KINDS[row.exp_avg.dtype], _KINDS[row.exp_avg_sq.dtype], param, aligned
        forms.setdefault(form, []).extend((index, number) for number in range(-(-row.grad.numel() // chunk)))
    return forms
