"""Triton kernels of optimizers on flat shards: one for the steps, and one for the elements of all rows.

A table in device memory has the addresses of each row. A program of the elements' kernel updates CHUNK_TILES tiles of
one row; a list says of which row, and where they begin. ``reference.py`` has the arithmetic. Between the two
launches torch takes the powers of beta: Triton's library has an older ``powf`` than torch's fused kernel. Numbers in
bf16 are moved as integers: the interpreter then rounds them as the compiler does.
"""

import triton
import triton.language as tl

from .eight_bits import BLOCK, BORDERS, CODE_SIZE, DECADES, LEAST, LEAST_ONE, LIFT, LOW_SCALE, SLOPES

__all__ = ["NUM_FIELDS", "NUM_SCALARS", "elements_kernel", "steps_kernel"]

NUM_FIELDS = 12
"""Integers of a row of the table."""
NUM_SCALARS = 7
"""Numbers that the first kernel writes for the second, for each step and group."""

_BLOCK = tl.constexpr(BLOCK)
_CODE_SIZE = tl.constexpr(CODE_SIZE)
_LEAST_SIGNED, _LEAST_UNSIGNED = tl.constexpr(LEAST[True]), tl.constexpr(LEAST[False])
_LEAST_ONE_SIGNED, _LEAST_ONE_UNSIGNED = tl.constexpr(LEAST_ONE[True]), tl.constexpr(LEAST_ONE[False])
_DECADES, _SLOPES = tl.constexpr(DECADES), tl.constexpr(SLOPES)
_BORDERS_SIGNED, _BORDERS_UNSIGNED = tl.constexpr(BORDERS[True]), tl.constexpr(BORDERS[False])
_LOW_SCALE, _LIFT = tl.constexpr(LOW_SCALE), tl.constexpr(LIFT)
_FIELDS = tl.constexpr(NUM_FIELDS)
_SCALARS = tl.constexpr(NUM_SCALARS)


# ---- Steps. ----


@triton.jit
def steps_kernel(
    steps: tl.tensor, slots: tl.tensor, groups: tl.tensor, numbers: tl.tensor, found_inf: tl.tensor,
    scalars: tl.tensor, bases: tl.tensor, exponents: tl.tensor,
) -> None:  # fmt: skip
    """A program raises one step, and writes numbers for each group whose rows have this step: its slots.

    numbers  of each group: the learning rate, three of the rule's own, and the decay
    """
    counter = tl.load(steps + tl.program_id(0)).to(tl.pointer_type(tl.float32))
    step = tl.load(counter) + 1.0
    if found_inf is not None:
        tl.store(counter, step - tl.load(found_inf))
    else:
        tl.store(counter, step)
    for slot in range(tl.load(slots + tl.program_id(0)), tl.load(slots + tl.program_id(0) + 1)):
        at = numbers + 5 * tl.load(groups + slot)
        lr = tl.load(at)
        own1 = tl.load(at + 1)
        own2 = tl.load(at + 2)
        decay = tl.load(at + 4)
        to = scalars + slot * _SCALARS
        tl.store(to, decay)
        tl.store(to + 1, lr * decay)
        tl.store(to + 2, own1)
        tl.store(to + 3, own2)
        tl.store(to + 4, lr)
        tl.store(to + 5, tl.load(at + 3))
        tl.store(to + 6, step)
        tl.store(bases + 2 * slot, own1)
        tl.store(bases + 2 * slot + 1, own2)
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
    """Elements of a tile; 0 outside the row. A mask would split accesses of 16 bytes."""
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
    """Values of ``codes``, which have the tile's shape; scale [blocks]."""
    return tl.load(table + codes.to(tl.int32)) * scale[None, :, None, None]


@triton.jit
def _encoded(value: tl.tensor, SIGNED: tl.constexpr) -> tl.tensor:
    """Codes of the tile's shape and scales [blocks], as ``quantize_blocks``."""
    least: tl.constexpr = _LEAST_SIGNED if SIGNED else _LEAST_UNSIGNED
    borders: tl.constexpr = _BORDERS_SIGNED if SIGNED else _BORDERS_UNSIGNED
    least_one: tl.constexpr = _LEAST_ONE_SIGNED if SIGNED else _LEAST_ONE_UNSIGNED
    # As integers magnitudes have the order of the floats, with NaN above infinity.
    bits = value.to(tl.uint32, bitcast=True)
    if SIGNED:  # the lowest bit: not negative
        bits = (bits << 1) | ((bits >> 31) ^ 1)
    most = tl.max(tl.max(tl.max(bits, 3), 2), 0)
    if SIGNED:
        most = (most >> 1) | ((most ^ 1) << 31)
    scale = most.to(tl.float32, bitcast=True)
    lift = tl.where(tl.abs(scale) < _LOW_SCALE, _LIFT, 1.0)
    inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(scale == 0.0, 1.0, scale * lift))
    relative = value * lift[None, :, None, None] * inverse[None, :, None, None]
    magnitude = tl.abs(relative)
    # By comparisons: a table by exponents would cost two scattered loads an element.
    slope = tl.full(magnitude.shape, 0.0, tl.float32) + _SLOPES[0]
    for decade in tl.static_range(1, _DECADES):
        slope = tl.where(magnitude >= borders[decade], _SLOPES[decade], slope)
    y = tl.minimum(magnitude * slope + 8 / 9, 2 - 2.0**-23)
    code = y.to(tl.int32, bitcast=True) - 0x3F000000
    exponent = slope.to(tl.int32, bitcast=True) >> 23
    if SIGNED:
        code = code >> ((exponent * 77 - 5376) >> 8)
        code += (relative >= least_one).to(tl.int32)
        code = tl.where(magnitude >= least, tl.where(relative < 0, code + 128, code), 0)
    else:
        code = code >> ((exponent * 77 - 5632) >> 8)
        code += (magnitude >= least_one).to(tl.int32) - 1
        code = tl.where(magnitude >= least, code, (value > 0).to(tl.int32))
    return code.to(tl.uint8), scale


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
    row: tl.tensor, FIELD: tl.constexpr, block: tl.tensor, at: tl.tensor, inside: tl.tensor,
    value: tl.tensor, random: tl.tensor,
    SIGNED: tl.constexpr, KIND: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    pointer = _pointer(tl.load(row + FIELD), KIND, ALIGNED)
    if KIND == "8 bits":
        codes, scale = _encoded(value, SIGNED)
        _store(pointer, at, codes, inside, WHOLE)
        scales = tl.load(row + FIELD + 5).to(tl.pointer_type(tl.float32))
        tl.store(scales + block, scale, mask=block < tl.cdiv(tl.load(row), _BLOCK))
    elif KIND == "bf16":
        _store(pointer, at, _rounded_stochastically(value, random), inside, WHOLE)
    else:
        _store(pointer, at, value, inside, WHOLE)


@triton.jit
def _stepped(
    grad: tl.tensor, master: tl.tensor, exp_avg: tl.tensor, exp_avg_sq: tl.tensor,
    scalars: tl.tensor, step_size: tl.tensor, correction2: tl.tensor, RULE: tl.constexpr, EXP_AVG: tl.constexpr,
) -> tl.tuple:  # fmt: skip
    """Master and moments after the step; those that the rule lacks are of no meaning."""
    decay = tl.load(scalars)
    if RULE == "adamw" or RULE == "lion":
        master = tl.where(decay != 0.0, tl.fma(tl.zeros_like(master) - tl.load(scalars + 1), master, master), master)
    else:
        grad = tl.where(decay != 0.0, tl.fma(master, tl.zeros_like(master) + decay, grad), grad)
    own1 = tl.zeros_like(master) + tl.load(scalars + 2)
    own2 = tl.load(scalars + 3)
    own3 = tl.load(scalars + 5)
    if RULE == "sgd":  # momentum, dampening, whether it is Nesterov's
        if EXP_AVG != "":
            kept = tl.where(tl.load(scalars + 6) == 1.0, 1.0, 1.0 - own2)
            exp_avg = tl.fma(tl.zeros_like(master) + kept, grad, own1 * exp_avg)
            grad = tl.where(own3 != 0.0, tl.fma(own1, exp_avg, grad), exp_avg)
        master = tl.fma(tl.zeros_like(master) - tl.load(scalars + 4), grad, master)
    else:  # betas, and eps
        own2 = tl.zeros_like(master) + own2
        new = tl.fma(-own1, grad, grad)
        if RULE == "lion":
            blended = tl.fma(own1, exp_avg, new)
            sign = (blended > 0).to(tl.float32) - (blended < 0).to(tl.float32)
            master = master - tl.load(scalars + 4) * tl.where(blended != blended, blended, sign)
            exp_avg = tl.fma(own2, exp_avg, tl.fma(-own2, grad, grad))
        else:
            square = grad * grad
            exp_avg = tl.fma(own1, exp_avg, new)
            exp_avg_sq = tl.fma(own2, exp_avg_sq, tl.fma(-own2, square, square))
            denom = tl.div_rn(tl.sqrt_rn(exp_avg_sq), correction2) + own3
            master = master - tl.div_rn(step_size * exp_avg, denom)

    return master, exp_avg, exp_avg_sq


@triton.jit
def _update_tile(
    row: tl.tensor, start: tl.tensor, scalars: tl.tensor, step_size: tl.tensor, correction2: tl.tensor,
    codes: tl.tensor, divisor: tl.tensor,
    GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, PARAM: tl.constexpr, RULE: tl.constexpr,
    MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr, TILE_BLOCKS: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """Elements from ``start`` on; WHOLE: all of them lie in the row."""
    in_tile = tl.arange(0, TILE_BLOCKS)
    block = start // _BLOCK + in_tile  # [blocks]
    if EXP_AVG == "8 bits" or EXP_AVG_SQ == "8 bits":
        # [2, blocks, 32, 4]: a warp reads 128 elements at once, 4 adjacent ones a thread, and has a whole block.
        at = start + tl.arange(0, 2)[:, None, None, None] * 128 + in_tile[None, :, None, None] * _BLOCK
        at += tl.arange(0, 32)[None, None, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    else:
        at = start + tl.arange(0, TILE_BLOCKS * _BLOCK)
    inside = at < tl.load(row)

    # Read everything first: loads that no store separates are in flight together.
    grad = _to_float(_load(_pointer(tl.load(row + 1), GRAD, ALIGNED), at, inside, WHOLE), GRAD)
    exp_avg = grad  # where the rule has none
    exp_avg_sq = grad
    if EXP_AVG != "":
        exp_avg = _read_moment(row, 2, block, at, inside, codes, EXP_AVG, ALIGNED, WHOLE)
    if EXP_AVG_SQ != "":
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
        grad *= -1.0  # the compiler's minus makes +0 of +0
    master, exp_avg, exp_avg_sq = _stepped(
        grad, master, exp_avg, exp_avg_sq, scalars, step_size, correction2, RULE, EXP_AVG
    )

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
    if EXP_AVG != "":
        _write_moment(row, 2, block, at, inside, exp_avg, random & 0xFFFF, True, EXP_AVG, ALIGNED, WHOLE)
    if EXP_AVG_SQ != "":
        _write_moment(row, 3, block, at, inside, exp_avg_sq, random >> 16, False, EXP_AVG_SQ, ALIGNED, WHOLE)


@triton.jit
def elements_kernel(
    table: tl.tensor, chunks: tl.tensor, scalars: tl.tensor, powers: tl.tensor, codes: tl.tensor, divisor: tl.tensor,
    found_inf: tl.tensor,
    GRAD: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, PARAM: tl.constexpr, RULE: tl.constexpr,
    MAXIMIZE: tl.constexpr, ALIGNED: tl.constexpr, TILE_BLOCKS: tl.constexpr, CHUNK_TILES: tl.constexpr,
) -> None:  # fmt: skip
    """A program updates a chunk of one row. PARAM: "remainder", the dtype beside a master, or "" without one.

    EXP_AVG, EXP_AVG_SQ: the dtype of a moment, "8 bits", or "" without it.
    """
    row = table + tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64) * _FIELDS
    tile: tl.constexpr = TILE_BLOCKS * _BLOCK
    first = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64) * (CHUNK_TILES * tile)
    end = tl.load(row)
    if found_inf is not None:
        end = tl.where(tl.load(found_inf) == 1.0, 0, end)
    slot = tl.load(row + 11)
    scalars += slot * _SCALARS
    step_size = tl.load(scalars + 4)
    correction2 = step_size
    if RULE == "adamw" or RULE == "adam":
        step_size = tl.div_rn(step_size, 1.0 - tl.load(powers + 2 * slot))
        correction2 = tl.sqrt_rn(1.0 - tl.load(powers + 2 * slot + 1))
    for index in range(CHUNK_TILES):
        start = first + index * tile
        if start + tile <= end:
            _update_tile(
                row, start, scalars, step_size, correction2, codes, divisor,
                GRAD, EXP_AVG, EXP_AVG_SQ, PARAM, RULE, MAXIMIZE, ALIGNED, TILE_BLOCKS, True,
            )  # fmt: skip
        elif start < end:
            _update_tile(
                row, start, scalars, step_size, correction2, codes, divisor,
                GRAD, EXP_AVG, EXP_AVG_SQ, PARAM, RULE, MAXIMIZE, ALIGNED, TILE_BLOCKS, False,
            )  # fmt: skip
