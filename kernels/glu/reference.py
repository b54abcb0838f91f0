"""The reference implementation of gated activations scaled by row, and of their gradients.

Legend: T rows, F features. ``h`` [T, 2F] holds the gate g, then the linear half l; ``probs`` [T] is p.

Autograd differentiates both functions, for second derivatives and compiled graphs.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["GLU_ACTIVATIONS", "Glu", "scaled_glu_backward_reference", "scaled_glu_reference"]

GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
GELU_CUBE = 0.044715

GLU_ACTIVATIONS: dict[str, tuple[str, float]] = {
    "swiglu": ("sigmoid_linear", 1.0),
    "qgeglu": ("sigmoid_linear", 1.702),
    "clamped_swiglu": ("sigmoid_linear", 1.702),
    "geglu": ("gelu", 1.0),
    "glu": ("sigmoid", 1.0),
    "reglu": ("relu", 1.0),
    "sreglu": ("squared_relu", 1.0),
}
"""Name -> function of the gate, and default alpha."""


class Glu(NamedTuple):
    """A gated activation with its parameters."""

    function: str
    """``sigmoid_linear``: ``g sigmoid(alpha g)``; ``gelu``: its tanh approximation; ``sigmoid``, ``relu``,
    ``squared_relu``."""
    alpha: float
    limit: float | None
    """Upper bound of the gate, and bound of the absolute value of the linear half; None: no clamping."""
    offset: float
    """Added to the linear half after clamping."""


def scaled_glu_reference(h: Tensor, probs: Tensor | None, glu: Glu) -> Tensor:
    """``a[t] = p[t] act(g[t]) (l[t] + offset)``, in fp32 (fp64 for fp64), rounded once: [T, 2F], [T] -> [T, F]."""
    gate, linear = _halves(h, glu)
    value = _value_and_slope(gate, glu)[0] * linear
    if probs is not None:
        value = value * probs.to(value.dtype)[:, None]
    return value.to(h.dtype)


def scaled_glu_backward_reference(
    da: Tensor, h: Tensor, probs: Tensor | None, glu: Glu
) -> tuple[Tensor, Tensor | None]:
    """``dh`` [T, 2F] and ``dp`` [T]: ``dg = da p act'(g) l``, ``dl = da p act(g)``, ``dp = sum of da act(g) l`` over F.

    The gradient of a clamped element is 0.
    """
    gate, linear = _halves(h, glu)
    value, slope = _value_and_slope(gate, glu)
    da = da.to(gate.dtype)
    scaled = da if probs is None else da * probs.to(gate.dtype)[:, None]
    dgate, dlinear = scaled * linear * slope, scaled * value
    if glu.limit is not None:
        raw_gate, raw_linear = h.to(gate.dtype).chunk(2, dim=-1)  # bf16 would round the limit
        dgate = dgate.masked_fill(raw_gate > glu.limit, 0)
        dlinear = dlinear.masked_fill(raw_linear.abs() > glu.limit, 0)
    dprobs = None if probs is None else (da * value * linear).sum(-1)
    return torch.cat((dgate, dlinear), dim=-1).to(h.dtype), dprobs


def _halves(h: Tensor, glu: Glu) -> tuple[Tensor, Tensor]:
    gate, linear = h.to(torch.promote_types(h.dtype, torch.float32)).chunk(2, dim=-1)
    if glu.limit is not None:
        gate, linear = gate.clamp(max=glu.limit), linear.clamp(-glu.limit, glu.limit) + glu.offset
    return gate, linear


def _value_and_slope(gate: Tensor, glu: Glu) -> tuple[Tensor, Tensor]:
    """``act(g)`` and ``act'(g)``."""
    if glu.function == "relu":
        return gate.relu(), (gate > 0).to(gate.dtype)
    if glu.function == "squared_relu":
        return gate.relu().square(), 2 * gate.relu()
    if glu.function == "sigmoid":
        sigmoid = gate.sigmoid()
        return sigmoid, sigmoid * (1 - sigmoid)
    if glu.function == "gelu":  # (1 + tanh(u)) / 2 is sigmoid(2 u)
        square = gate * gate
        sigmoid = (GELU_SLOPE * gate * (1 + GELU_CUBE * square)).sigmoid()
        inner_slope = GELU_SLOPE * (1 + 3 * GELU_CUBE * square)
        return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid) * inner_slope)
    sigmoid = (glu.alpha * gate).sigmoid()
    return gate * sigmoid, sigmoid * (1 + glu.alpha * gate * (1 - sigmoid))
