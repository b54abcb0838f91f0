"""Activation functions by Transformer Engine's names, plain and gated.

A gated activation halves its input's last dim: ``[..., 2F] -> [..., F]``, ``act(first half) * second half``. In eager
code on GPUs, bf16 and fp16 run as one kernel for each direction, which rounds once; torch's operations take 3.6 times
as long (docs/benchmarks/pointwise.md).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels import glu_named, scaled_glu, scaled_glu_backward
from ...kernels.compat import HAS_TRITON
from ...kernels.glu.reference import Glu
from .products import in_transform

__all__ = ["ACTIVATIONS", "Activation", "ScaledGlu", "activation_named"]

Pointwise = Callable[[Tensor], Tensor]


class ScaledGlu(torch.autograd.Function):
    """A gated activation with a scale for each row: rows [T, 2F], scales [T] or None."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, scales: Tensor | None, glu: Glu) -> Tensor:
        ctx.save_for_backward(rows, scales)
        ctx.glu = glu
        return scaled_glu(rows, scales, glu)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, scales = ctx.saved_tensors
        # Under create_graph autograd records these calls, which are differentiable.
        d_rows, d_scales = scaled_glu_backward(grads[0], rows, scales, ctx.glu)
        if d_scales is None or not ctx.needs_input_grad[1]:
            return d_rows, None, None
        return d_rows, d_scales.to(scales.dtype), None


class Activation(NamedTuple):
    """The activation between the two products of an MLP."""

    function: Pointwise
    gated: bool
    """True: the function maps [..., 2F] to [..., F], and the first product has 2F output features."""


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _has_kernel(x: Tensor) -> bool:
    """Whether the kernel runs on ``x``. Compilers fuse torch's operations; transforms differentiate them."""
    half = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    return half and HAS_TRITON and not torch.compiler.is_compiling() and not in_transform()


def _by_kernel(x: Tensor, glu: Glu) -> Tensor:
    rows: Tensor = ScaledGlu.apply(x.reshape(-1, x.shape[-1]), None, glu)
    return rows.view(*x.shape[:-1], x.shape[-1] // 2)


def _gated(activate: Pointwise, glu: Glu, x: Tensor) -> Tensor:
    if _has_kernel(x):
        return _by_kernel(x, glu)
    gate, linear = x.chunk(2, dim=-1)
    return activate(gate) * linear


def _clamped_swiglu(x: Tensor, *, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """GPT-OSS's activation ``g sigmoid(alpha g) (1 + l)``; g is clamped from above, l from both sides."""
    if _has_kernel(x):
        return _by_kernel(x, glu_named("clamped_swiglu", limit=limit, alpha=alpha))
    gate, linear = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (linear.clamp(-limit, limit) + 1)


# Partial functions instead of closures, so that modules that hold them can be pickled.
def _gate(name: str, activate: Pointwise) -> Activation:
    return Activation(functools.partial(_gated, activate, glu_named(name)), gated=True)


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": Activation(_gelu, gated=False),  # the tanh approximation, as in Transformer Engine
    "geglu": _gate("geglu", _gelu),
    "glu": _gate("glu", torch.sigmoid),
    "qgelu": Activation(_quick_gelu, gated=False),
    "qgeglu": _gate("qgeglu", _quick_gelu),
    "relu": Activation(F.relu, gated=False),
    "reglu": _gate("reglu", F.relu),
    "srelu": Activation(_squared_relu, gated=False),
    "sreglu": _gate("sreglu", _squared_relu),
    "silu": Activation(F.silu, gated=False),
    "swiglu": _gate("swiglu", F.silu),
    "clamped_swiglu": Activation(_clamped_swiglu, gated=True),
}


def activation_named(name: str, params: Mapping[str, float] | None = None) -> Activation:
    """Look up an activation. Only ``clamped_swiglu`` takes ``params``: ``limit`` (7.0) and ``alpha`` (1.702).

    Raises ``ValueError`` for an unknown name and for unknown parameters.
    """
    found = ACTIVATIONS.get(name)
    if found is None:
        raise ValueError(f"unknown activation '{name}': it is one of {', '.join(ACTIVATIONS)}")
    if not params:
        return found
    unknown = sorted(set(params) - {"limit", "alpha"})
    if name != "clamped_swiglu" or unknown:
        raise ValueError(
            f"activation_params {dict(params)} do not fit '{name}': only clamped_swiglu takes any, limit and alpha"
        )
    given = {"limit": 7.0, "alpha": 1.702, **params}
    return Activation(functools.partial(_clamped_swiglu, limit=given["limit"], alpha=given["alpha"]), gated=True)
