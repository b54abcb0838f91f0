"""Every operation of ``kernels/`` as the benchmarks run it, and its rivals: what a user would call instead.

Legend: E experts, T rows of all experts, N output features, K input features. ``sizes`` of experts are lists on the
host: rivals that loop over experts need them, and no time counts for reading them from the device.
"""

import warnings
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from maingrad.kernels import (
    grouped_bias_grad,
    grouped_dgrad,
    grouped_linear,
    grouped_wgrad_accumulate,
    permute_rows,
    scaled_glu,
    scaled_glu_backward,
    unpermute_rows,
    wgrad_accumulate,
)
from maingrad.kernels.compat import private_name
from maingrad.kernels.glu.reference import Glu, scaled_glu_backward_reference, scaled_glu_reference
from maingrad.launch.tuning.problems import DENSE_OPS, GROUPED_OPS, error_of

STREAMING_OPS = ("scaled_glu", "scaled_glu_backward", "grouped_bias_grad", "permute_rows", "unpermute_rows")
"""Operations that memory bounds at any shape."""
OURS, POINTERS = "ours", "ours, pointers"
DOES_LESS = "grouped_mm, bf16 result"
"""A rival that writes what autograd leaves in ``.grad``: half the bytes, rounded to bf16."""

_TOP_K = 8
_FEW = slice(256)
"""The rows of a result that are compared with fp64."""
_ROUNDED = 4e-3
"""Largest relative error of results that are rounded once to bf16; sums in fp32 are far closer to fp64."""
_ROUNDED_OFTEN = 1e-2
"""Largest relative error of results that are rounded to bf16 after each of several operations."""
_IN_FP32 = 1e-4

_grouped_mm = private_name(
    "torch.nn.functional.grouped_mm", "torch._grouped_mm", loss="torch's grouped products cannot be measured"
)


class Contender(NamedTuple):
    """One way to compute an operation."""

    run: Callable[[], Tensor | None]
    """Computes once. Returns the result where it is a new tensor; None where it is written in place."""
    tolerance: float
    """Largest relative error against fp64."""


class Case(NamedTuple):
    """One operation at one shape."""

    flops: float
    nbytes: float
    """Operands read once and results written once."""
    contenders: dict[str, Contender]
    error: Callable[[Callable[[], Tensor | None]], float]
    """Runs a contender once into memory that holds NaN; returns its relative error, NaN if a NaN is left."""


def product_work(op, shape, element_size=2):
    """Floating-point operations and bytes of a product of shape (E, T, N, K).

    Accumulators are fp32. They are written, and where the product adds to them they are read as well.
    """
    experts, rows, n, k = shape
    accumulator = {"accumulate": 8, "overwrite": 4}.get(op.rpartition("_")[2], element_size)
    return 2.0 * rows * n * k, float(element_size * rows * (n + k) + accumulator * experts * n * k)


def make_case(op, operands):
    """``op`` at the shape of ``operands``; ``op`` is one of GROUPED_OPS, DENSE_OPS (one expert) or STREAMING_OPS."""
    if op in _CASES:
        return _CASES[op](operands)
    if op.startswith(("wgrad", "grouped_wgrad")):
        contenders = (_dense_wgrad if op in DENSE_OPS else _grouped_wgrad)(operands, op.endswith("_overwrite"))
    else:
        contenders = _gemm(operands, op == "grouped_linear")
    known = op if op in GROUPED_OPS else f"grouped_{op}"
    result = {"grouped_linear": operands.y, "grouped_dgrad": operands.dx}.get(known, operands.grads)

    def error(run):
        def into_result():
            made = run()
            if made is not None:
                result.copy_(made)

        found = operands.check(known, into_result)
        return found if bool(torch.isfinite(result).all()) else float("nan")

    flops, nbytes = product_work(op, operands.shape, operands.x.element_size())
    return Case(flops, nbytes, contenders, error)


# ---- Products. ----


def _gemm(o, forward):
    ours = grouped_linear if forward else grouped_dgrad
    source, result = (o.x, o.y) if forward else (o.dy, o.dx)
    weights = o.weights.mT if forward else o.weights
    ends = o.offsets[1:].int()

    def loop():
        for expert, rows in enumerate(o.slices):
            torch.mm(source[rows], weights[expert], out=result[rows])

    contenders = {OURS: Contender(lambda: _nothing(ours(source, o.weights, o.offsets, out=result)), _ROUNDED)}
    contenders |= _pointer_gemm(o, source, result, transposed=forward)
    contenders["grouped_mm"] = Contender(lambda: _grouped_mm(source, weights, offs=ends), _ROUNDED)
    contenders["loop of mm"] = Contender(loop, _ROUNDED)
    return contenders


def _grouped_wgrad(o, once):
    ends = o.offsets[1:].int()

    def loop():
        for expert, rows in enumerate(o.slices):
            _product_into(o.grads[expert], o.dy[rows], o.x[rows], once)

    def then():
        product = _grouped_mm(o.dy.t(), o.x, offs=ends)
        o.grads.copy_(product) if once else o.grads.add_(product)

    contenders = {
        OURS: Contender(lambda: grouped_wgrad_accumulate(o.dy, o.x, o.grads, o.offsets, overwrite=once), _IN_FP32)
    }
    contenders |= _pointer_wgrad(o, once)
    if o.x.is_cuda:
        contenders["loop of mm, fp32 out" if once else "loop of addmm"] = Contender(loop, _IN_FP32)
    contenders[f"grouped_mm, then {'copy' if once else 'add'}"] = Contender(then, _ROUNDED)
    if once:
        contenders[DOES_LESS] = Contender(lambda: _grouped_mm(o.dy.t(), o.x, offs=ends), _ROUNDED)
    return contenders


def _dense_wgrad(o, once):
    dy, x, grad = o.dy[: sum(o.sizes)], o.x[: sum(o.sizes)], o.grads[0]

    def then():
        product = dy.t() @ x
        grad.copy_(product) if once else grad.add_(product)

    contenders = {OURS: Contender(lambda: wgrad_accumulate(dy, x, grad, overwrite=once), _IN_FP32)}
    if x.is_cuda:
        name = "mm, fp32 out" if once else "addmm in place"
        contenders[name] = Contender(lambda: _product_into(grad, dy, x, once), _IN_FP32)
    contenders[f"product, then {'copy' if once else 'add'}"] = Contender(then, _ROUNDED)
    return contenders


def _product_into(grad, dy, x, once):
    """cuBLAS with an fp32 epilogue, in place. cuBLAS takes no matrices without rows: these are handled apart."""
    if not x.shape[0]:
        if once:
            grad.zero_()
    elif once:
        torch.mm(dy.t(), x, out_dtype=torch.float32, out=grad)
    else:
        torch.addmm(grad, dy.t(), x, out_dtype=torch.float32, out=grad)


def _nothing(result):
    """Drop the result of an operation that also writes the result in place."""


# ---- Our kernels without the tensor memory accelerator, which GPUs before sm90 run. ----


def _pointer_gemm(o, source, result, *, transposed):
    if not o.x.is_cuda:
        return {}
    from maingrad.kernels.grouped.gemm_triton import GEMM_CANDIDATES, grouped_gemm_triton

    run = partial(grouped_gemm_triton, source, o.weights, o.offsets, result, transposed=transposed)
    return _fastest(run, GEMM_CANDIDATES, _ROUNDED)


def _pointer_wgrad(o, once):
    if not o.x.is_cuda:
        return {}
    from maingrad.kernels.grouped.wgrad_config import WGRAD_CANDIDATES
    from maingrad.kernels.grouped.wgrad_triton import grouped_wgrad_triton

    return _fastest(partial(grouped_wgrad_triton, o.dy, o.x, o.grads, o.offsets, once), WGRAD_CANDIDATES, _IN_FP32)


def _fastest(run, candidates, tolerance):
    """The fastest configuration without the accelerator; none if no configuration fits this GPU's shared memory."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench

    times = {}
    for config in candidates:
        if not config.tma:
            configured = partial(run, config)
            with suppress(OutOfResources):
                times[configured] = float(do_bench(configured, warmup=5, rep=15, return_mode="median"))
    return {POINTERS: Contender(min(times, key=times.__getitem__), tolerance)} if times else {}


# ---- Passes over memory. ----


@contextmanager
def _poisoned():
    """Within this context torch fills uninitialized memory with NaN, as it does for deterministic algorithms."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of nondeterministic operations, which do not matter here
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _streaming(
    nbytes,
    ours,
    rivals,
    exact,
    part=_FEW,
):
    """A case that compares the rows ``part`` of each result with ``exact`` (fp64). The whole result must be finite."""

    def error(run):
        with _poisoned():
            made = run()
        assert made is not None, "a pass over memory returns its result"
        return error_of(made[part], exact) if bool(torch.isfinite(made).all()) else float("nan")

    contenders = {OURS: Contender(ours, _ROUNDED)}
    contenders |= {name: Contender(run, _ROUNDED_OFTEN) for name, run in rivals.items()}
    return Case(0.0, nbytes, contenders, error)


def _scaled_glu(o):
    h, probs = _activation(o)
    rows, width = h.shape

    def eager():
        gate, linear = h.chunk(2, dim=-1)
        return F.silu(gate) * linear * probs.to(h.dtype)[:, None]

    exact = scaled_glu_reference(h[_FEW].double(), probs[_FEW].double(), _SWIGLU)
    nbytes = h.element_size() * rows * width * 1.5 + 4 * rows
    return _streaming(nbytes, lambda: scaled_glu(h, probs), {"torch, eager": eager}, exact)


def _scaled_glu_backward(o):
    h, probs = _activation(o)
    rows, width = h.shape
    da = torch.randn_like(h[:, : width // 2])

    def eager():
        gate, linear = h.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        value = gate * sigmoid
        scaled = da * probs.to(h.dtype)[:, None]
        (da * value * linear).sum(-1, dtype=torch.float32)  # the gradient of probs
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((scaled * linear * slope, scaled * value), dim=-1)

    exact, _ = scaled_glu_backward_reference(da[_FEW].double(), h[_FEW].double(), probs[_FEW].double(), _SWIGLU)
    nbytes = h.element_size() * rows * width * 2.5 + 8 * rows
    rivals = {"torch, eager": eager}
    return _streaming(nbytes, lambda: scaled_glu_backward(da, h, probs)[0], rivals, exact)


_SWIGLU = Glu("sigmoid_linear", 1.0, None, 0.0)


def _activation(o):
    """dy in the role of fc1's output (gate half and linear half), and a routing probability for each row."""
    return o.dy, torch.rand(o.dy.shape[0], device=o.dy.device)


def _bias_grad(o):
    experts, rows, n, _ = o.shape

    def loop():
        return torch.stack([o.dy[each].sum(0) for each in o.slices])

    most = max(range(experts), key=o.sizes.__getitem__)
    exact = o.dy[o.slices[most]].double().sum(0)
    nbytes = o.dy.element_size() * (rows + experts) * n
    return _streaming(nbytes, lambda: grouped_bias_grad(o.dy, o.offsets), {"loop of sum": loop}, exact, most)


def _permutation(o):
    """(tokens, the rows that hold each token's copies, the token that each row is a copy of, the bytes of one pass)."""
    rows, k = o.x.shape
    tokens = o.x[: rows // _TOP_K]
    order = torch.randperm(tokens.shape[0] * _TOP_K, device=o.x.device)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=o.x.device)
    size = o.x.element_size() * k
    return tokens, inverse.view(-1, _TOP_K), order // _TOP_K, tokens.shape[0] * (size * (1 + _TOP_K) + 8.0 * _TOP_K)


def _permute(o):
    tokens, row_id_map, source, nbytes = _permutation(o)
    rivals = {"index_select": lambda: tokens.index_select(0, source)}
    exact = tokens[source[_FEW]].double()
    return _streaming(nbytes, lambda: permute_rows(tokens, row_id_map), rivals, exact)


def _unpermute(o):
    _, row_id_map, source, nbytes = _permutation(o)
    rows = o.x[: source.numel()]

    def eager():
        return rows.index_select(0, row_id_map.view(-1)).view(*row_id_map.shape, -1).sum(1)

    exact = rows[row_id_map[_FEW].reshape(-1)].double().view(-1, _TOP_K, rows.shape[1]).sum(1)
    rivals = {"index_select, then sum": eager}
    return _streaming(nbytes, lambda: unpermute_rows(rows, row_id_map), rivals, exact)


_CASES = {
    "scaled_glu": _scaled_glu,
    "scaled_glu_backward": _scaled_glu_backward,
    "grouped_bias_grad": _bias_grad,
    "permute_rows": _permute,
    "unpermute_rows": _unpermute,
}
