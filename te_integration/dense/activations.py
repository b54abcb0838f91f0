"""Activation functions by Transformer Engine's names, plain and gated.

A gated activation halves its input's last dim: ``[..., 2F] -> [..., F]``, ``act(first half) * second half``.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["ACTIVATIONS", "Activation", "activation_named"]

Pointwise = Callable[[Tensor], Tensor]


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


def _gated(activate: Pointwise, x: Tensor) -> Tensor:
    gate, linear = x.chunk(2, dim=-1)
    return activate(gate) * linear


def _clamped_swiglu(x: Tensor, *, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """GPT-OSS's activation ``g sigmoid(alpha g) (1 + l)``; g is clamped from above, l from both sides."""
    gate, linear = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (linear.clamp(-limit, limit) + 1)


# Partial functions instead of closures, so that modules that hold them can be pickled.
def _gate(activate: Pointwise) -> Activation:
    return Activation(functools.partial(_gated, activate), gated=True)


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": Activation(_gelu, gated=False),  # the tanh approximation, as in Transformer Engine
    "geglu": _gate(_gelu),
    "glu": _gate(torch.sigmoid),
    "qgelu": Activation(_quick_gelu, gated=False),
    "qgeglu": _gate(_quick_gelu),
    "relu": Activation(F.relu, gated=False),
    "reglu": _gate(F.relu),
    "srelu": Activation(_squared_relu, gated=False),
    "sreglu": _gate(_squared_relu),
    "silu": Activation(F.silu, gated=False),
    "swiglu": _gate(F.silu),
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
