"""The reference implementation of AdamW, Adam, SGD and Lion on flat shards, in plain PyTorch.

With fp32 masters each operation of AdamW is rounded where torch's fused CUDA kernel rounds, so that masters and moments
have the same bits (ATen/native/cuda/fused_adam_utils.cuh of torch 2.11 to 2.14, as its compiler contracts it). Options,
moments and gradients are fp32; ``fma`` rounds once. Per element, with ``t`` the steps taken, this one included::

    g = grad / divisor                                    and -g under maximize
    p = fma(-(lr weight_decay), p, p)                     decoupled; else g = fma(p, weight_decay, g)
    m = fma(beta1, m, fma(-beta1, g, g))
    v = fma(beta2, v, fma(-beta2, g g, g g))
    p = p - (lr / (1 - beta1^t)) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The powers are the device's fp32 ones on CUDA, as in torch's kernel; elsewhere they are rounded from fp64. SGD, with a
momentum buffer ``b`` where ``momentum`` is not 0, as torch's kernel rounds without a divisor::

    g = fma(p, weight_decay, g)
    b = fma(1 - dampening, g, momentum b)                 in the first step b = g
    g = fma(momentum, b, g)                               under nesterov; else g = b
    p = fma(-lr, g, p)

Lion, with decoupled decay::

    p = fma(-(lr weight_decay), p, p)
    p = p - lr sign(fma(beta1, m, fma(-beta1, g, g)))
    m = fma(beta2, m, fma(-beta2, g, g))
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .eight_bits import dequantize_moment, quantize_moment

__all__ = [
    "AdamOptions",
    "LionOptions",
    "Options",
    "Rule",
    "SGDOptions",
    "UpdateRow",
    "fma",
    "join_master",
    "power",
    "random_bits",
    "round_stochastically",
    "split_master",
    "update_reference",
]


Rule = Literal["adamw", "adam", "sgd", "lion"]


class UpdateRow(NamedTuple):
    """Consecutive elements [n] of one parameter: one row of the update's table. n may be 0."""

    grad: Tensor
    """[n] fp32, bf16 or fp16; fp64 for an fp64 master. It is only read."""
    exp_avg: Tensor | None
    """[n] fp32, bf16 (rounded stochastically) or uint8 codes; fp64 for an fp64 master. The momentum buffer of SGD; None
    where SGD has no momentum."""
    exp_avg_sq: Tensor | None
    """[n] likewise; its dtype may differ from that of ``exp_avg``. None: of SGD and Lion."""
    step: Tensor
    """0-dim fp32: steps taken before. The update raises it by one, once for all rows that share it."""
    master: Tensor | None = None
    """[n] fp32, or fp64 (by the reference only). None: ``param`` and ``remainder`` are the master."""
    param: Tensor | None = None
    """[n] bf16 or fp16, to which the master is rounded. None: the master is the parameter."""
    remainder: Tensor | None = None
    """[n] int16 beside a bf16 ``param``: see ``split_master``. None: the master is a tensor."""
    exp_avg_scale: Tensor | None = None
    """[ceil(n / 256)] fp32 scales of 8-bit ``exp_avg``: see ``quantize_moment``."""
    exp_avg_sq_scale: Tensor | None = None
    """[ceil(n / 256)] fp32 scales of 8-bit ``exp_avg_sq``."""
    first: int = 0
    """Index of the first element within its parameter; a multiple of 256 where a moment has 8 bits."""
    key: int = 0
    """32 bits that name the parameter, for stochastic rounding."""
    group: int = 0
    """Index of the row's options."""


class AdamOptions(NamedTuple):
    """Options of one parameter group of Adam and AdamW."""

    lr: float | Tensor
    """A 0-dim tensor on the device of the rows is read there, by each call and by each replay of a captured one."""
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class SGDOptions(NamedTuple):
    """Options of one parameter group of SGD."""

    lr: float | Tensor
    momentum: float
    dampening: float
    nesterov: bool
    weight_decay: float


class LionOptions(NamedTuple):
    """Options of one parameter group of Lion."""

    lr: float | Tensor
    beta1: float
    beta2: float
    weight_decay: float


Options = AdamOptions | SGDOptions | LionOptions


def update_reference(
    tensors: Sequence[UpdateRow],
    options: Sequence[Options],
    *,
    divisor: Tensor | None = None,
    found_inf: Tensor | None = None,
    rule: Rule = "adamw",
    maximize: bool = False,
) -> None:
    """See ``FlatUpdate``. Reads no tensor on the host, so that a captured step may have it."""
    steps = {row.step.data_ptr(): row.step for row in tensors}
    for step in steps.values():
        step += 1 if found_inf is None else 1 - found_inf
    for row in tensors:
        if row.grad.numel():
            _update_row(row, options[row.group], divisor, found_inf, rule, maximize)


def _update_row(
    row: UpdateRow,
    options: Options,
    divisor: Tensor | None,
    found_inf: Tensor | None,
    rule: Rule,
    maximize: bool,
) -> None:
    dtype = torch.float32 if row.master is None else row.master.dtype

    def scalar(value: float | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=dtype, device=row.grad.device)

    step, (lr, *own, decay) = scalar(row.step), map(scalar, options)
    grad = row.grad.to(dtype)
    if divisor is not None:
        grad = grad / divisor.to(dtype)
    if maximize:
        grad = -grad
    if row.master is not None:
        master = row.master
    else:
        assert row.param is not None and row.remainder is not None, "FlatUpdate has checked the row"
        master = join_master(row.param, row.remainder)
    if options.weight_decay != 0:
        if rule in ("adamw", "lion"):
            master = fma(-(lr * decay), master, master)
        else:
            grad = fma(master, decay, grad)
    first = None if row.exp_avg is None else _read_moment(row.exp_avg, row.exp_avg_scale, signed=True)
    second = None if row.exp_avg_sq is None else _read_moment(row.exp_avg_sq, row.exp_avg_sq_scale, signed=False)
    if rule == "sgd":
        momentum, dampening, nesterov = own
        if first is not None:
            first = fma(torch.where(step == 1, 1, 1 - dampening), grad, momentum * first)
            grad = torch.where(nesterov != 0, fma(momentum, first, grad), first)
        master = fma(-lr, grad, master)
    elif rule == "lion":
        assert first is not None, "FlatUpdate has checked the row"
        beta1, beta2 = own
        blend = fma(beta1, first, fma(-beta1, grad, grad))
        master = master - lr * torch.where(blend.isnan(), blend, blend.sign())  # torch's sign of NaN is 0
        first = fma(beta2, first, fma(-beta2, grad, grad))
    else:
        assert first is not None and second is not None, "FlatUpdate has checked the row"
        beta1, beta2, eps = own
        correction1, correction2 = 1 - power(beta1, step), _sqrt(1 - power(beta2, step))
        square = grad * grad
        first = fma(beta1, first, fma(-beta1, grad, grad))
        second = fma(beta2, second, fma(-beta2, square, square))
        master = master - lr / correction1 * first / (_sqrt(second) / correction2 + eps)
    bits = random_bits(row.grad.numel(), row.first, row.key, row.step, row.grad.device)
    written = [
        *_new_master(row, master),
        *_new_moment(row.exp_avg, row.exp_avg_scale, first, bits & 0xFFFF, signed=True),
        *_new_moment(row.exp_avg_sq, row.exp_avg_sq_scale, second, bits >> 16, signed=False),
    ]
    for target, value in written:
        new = value.to(target.dtype)
        target.copy_(new if found_inf is None else torch.where(found_inf == 1, target, new))


def power(base: Tensor, exponent: Tensor, out: Tensor | None = None) -> Tensor:
    """``base ^ exponent``: on CUDA by the function that torch's fused kernel calls; elsewhere rounded from fp64."""
    if base.is_cuda:
        return torch.pow(base, exponent, out=out)
    rounded = torch.pow(base.double(), exponent.double()).to(base.dtype)
    return rounded if out is None else out.copy_(rounded)


def _sqrt(x: Tensor) -> Tensor:
    """Rounded to nearest: PyTorch's fp32 roots on CPUs are not."""
    return x.double().sqrt().to(x.dtype)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a b + c``, rounded once from fp32; twice for fp64.

    An fp64 product of two fp32 numbers is exact. The sum is rounded to odd, so that rounding to fp32 is the only one
    that counts (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008).
    """
    if c.dtype is torch.float64:
        return a * b + c
    product, addend = torch.broadcast_tensors(a.double() * b.double(), c.double())
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # exact; NaN where the sum is not finite
    bits = total.view(torch.int64)
    inexact = (error > 0) | (error < 0)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact & (bits & 1 == 0), bits + toward, bits).view(torch.float64).float()


# ---- A master of a bf16 parameter and 16 bits more. ----


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [n] -> ``param`` bf16 [n] and ``remainder`` int16 [n], with the bits ``master = (param << 16) + remainder``.

    ``param`` is the master rounded to nearest, halves away from zero: halves to even would give 0x3F818000 and
    0x3F828000 the same parameter, with remainders -32768 and +32768. (Transformer Engine's FusedAdam has the idea.)

    - A finite master from 0x7F7F8000 on, in magnitude, has an infinite parameter, as every rounding to nearest gives,
      and a negative remainder, so that the master stays exact.
    - Infinity is itself, with remainder 0. NaN becomes the NaN 0x7FC0 or 0xFFC0, with remainder 0: its other bits
      are lost, because some would round to infinity, and others to -0.
    """
    bits = master.view(torch.int32)
    bits = torch.where(master.isnan(), (bits & -0x80000000) | 0x7FC00000, bits)
    remainder = bits.to(torch.int16)
    return ((bits - remainder) >> 16).to(torch.int16).view(torch.bfloat16), remainder


def join_master(param: Tensor, remainder: Tensor) -> Tensor:
    """fp32 [n] from what ``split_master`` returned; exact for every master that is no NaN."""
    return ((param.view(torch.int16).int() << 16) + remainder).view(torch.float32)


def _new_master(row: UpdateRow, master: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Tensors to write, each with its new values."""
    if row.remainder is None:
        assert row.master is not None, "FlatUpdate has checked the row"
        return [(row.master, master)] if row.param is None else [(row.master, master), (row.param, master)]
    assert row.param is not None, "FlatUpdate has checked the row"
    param, remainder = split_master(master)
    return [(row.param, param), (row.remainder, remainder)]


# ---- Moments in fewer bits. ----


def _read_moment(moment: Tensor, scale: Tensor | None, *, signed: bool) -> Tensor:
    if scale is None:
        return moment.to(torch.promote_types(moment.dtype, torch.float32))
    return dequantize_moment(moment, scale, signed=signed)


def _new_moment(
    moment: Tensor | None, scale: Tensor | None, value: Tensor | None, bits: Tensor, *, signed: bool
) -> list[tuple[Tensor, Tensor]]:
    """Tensors to write, each with its new values."""
    if moment is None or value is None:
        return []
    if moment.dtype is torch.bfloat16:
        return [(moment, round_stochastically(value, bits))]
    if scale is None:
        return [(moment, value)]
    codes, scales = quantize_moment(value, signed=signed)
    return [(moment, codes), (scale, scales)]


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 [n] to one of the two nearest bf16 [n], by ``bits`` [n] from 0 to 65535: 0 on average.

    The magnitude goes up where ``bits`` and the 16 bits that are cut off sum to 65536 or more. bf16 numbers, zeros and
    infinities stay, and no finite number becomes infinite. NaN is 0x7FC0 or 0xFFC0.
    """
    exact = values.view(torch.int32)
    raised = exact + bits.to(torch.int32)
    overflows = (raised & 0x7F800000) == 0x7F800000
    kept = torch.where(overflows, exact, raised)
    kept = torch.where(values.isnan(), (exact & -0x80000000) | 0x7FC00000, kept)
    return (kept >> 16).to(torch.int16).view(torch.bfloat16)


def random_bits(count: int, first: int, key: int, step: int | Tensor, device: torch.device) -> Tensor:
    """int64 [count]: 32 random bits for each element from ``first`` on of the parameter ``key`` in this step.

    The first moment takes the lower 16 bits, the second the upper ones. Two rounds of a permutation of 32-bit integers
    whose every input bit flips every output bit with a probability within 0.2 % of a half (Wellons, Prospecting for
    hash functions, 2018; constants of "lowbias32"), keyed before each round by key and step. Philox would take five
    times the instructions, and its four words would have to be handed to four neighbours. Nothing but
    the arguments decides, so shards, ranks and layouts change no bit.
    """
    number = torch.as_tensor(step, device=device).long()
    seed1 = _mix(_mix(torch.tensor(key & 0xFFFFFFFF, device=device)) + number & 0xFFFFFFFF)
    seed2 = _mix(seed1 + 0x9E3779B9 & 0xFFFFFFFF)
    element = torch.arange(first, first + count, device=device)
    low, high = element & 0xFFFFFFFF, element >> 32
    return _mix(_mix(low ^ (high * 0x9E3779B9 & 0xFFFFFFFF) ^ seed1) + seed2 & 0xFFFFFFFF)


def _mix(x: Tensor) -> Tensor:
    """A permutation of [0, 2^32), in int64."""
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16
