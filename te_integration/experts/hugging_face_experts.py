"""Fused weight gradients for the experts of Hugging Face models, whose weights are packed 3-D parameters.

transformers is never imported. Classes that its decorator ``use_experts_implementation`` has made say how they store
their weights; the fused class is a subclass of such a class. Legend: T tokens, k experts for each token, E experts,
H features of a token, F features between the two products.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..dense.fused_linear import run_outside_graph
from .grouped_module import ExpertLayer, GroupedModule
from .moe_permutation import moe_permute_with_probs, moe_unpermute
from .row_splits import row_offsets
from .scaled_activations import glu_options, scaled_activation

__all__ = ["FusedExperts", "fused_experts_class", "is_experts_class", "weight_names_of"]


def is_experts_class(cls: type) -> bool:
    """Whether ``cls`` is a class of transformers whose forward ``use_experts_implementation`` chooses."""
    forward = cls.__dict__.get("forward")
    code = getattr(forward, "__code__", None)
    return (
        cls.__module__.partition(".")[0] == "transformers"
        and code is not None
        and "experts_interface" in code.co_freevars
    )


def weight_names_of(experts: nn.Module) -> tuple[str, str]:
    """Names of the weights of the two products."""
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


class _Form(NamedTuple):
    """How a class stores its parameters."""

    weight_names: tuple[str, str]
    has_bias: bool
    transposed: bool


def fused_experts_class(experts: Any) -> type[nn.Module]:
    """The fused class for a module of transformers."""
    base: type = type(experts)
    return _fused_class(base, _Form(weight_names_of(experts), experts.has_bias, experts.is_transposed))


@functools.cache
def _fused_class(base: type, form: _Form) -> type[nn.Module]:
    """Cached, so that all modules of one class have the same type."""
    layers = tuple(
        ExpertLayer(
            name,
            (name,),
            (f"{name}_bias",) if form.has_bias else (),
            packed_weight=True,
            packed_bias=form.has_bias,
        )
        for name in form.weight_names
    )
    members = {"_unfused": base, "_form": form, "expert_layers": layers, "__doc__": FusedExperts.__doc__}
    members |= {"weight_names": form.weight_names, "transposed": form.transposed}
    return type(f"Fused{base.__name__}", (FusedExperts, base), members)


class FusedExperts(GroupedModule):
    """``y_t`` is the sum over a token's k experts of ``p (W2_e act(W1_e x_t + b1_e) + b2_e)``.

    ==================  ==============  =====================================================================
    hidden_states       [..., H]        x: T tokens
    top_k_index         [T, k]          integers: the token's experts; E drops the choice
    top_k_weights       [T, k]          p: their probabilities
    gate_up_proj        [E, 2F, H]      W1, of a gated activation; ``up_proj`` [E, F, H] of another
    down_proj           [E, H, F]       W2
    ..._proj_bias       [E, 2F], ...    b1 and b2, where the class has biases
    y                   [..., H]        dtype of ``hidden_states``
    ==================  ==============  =====================================================================

    Weights are the class's own parameters; some classes store the transpose of each expert's matrix. The host reads no
    split sizes. p scales what enters the second product, in place of what leaves it: results differ by rounding. The
    choice of ``config.experts_implementation`` has no effect. This class is a mixin; ``fused_experts_class`` combines
    it with a class of transformers.
    """

    _unfused: type
    _form: _Form
    _apply_gate: Callable[[Tensor], Tensor]
    act_fn: nn.Module
    post_expert_norm: nn.Module
    fuse_wgrad_accumulation = True
    num_experts: int

    @property
    def num_gemms(self) -> int:  # type: ignore[override]
        """E."""
        return self.num_experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        if torch.compiler.is_compiling() and not self.runs_in_graph(top_k_index):
            output: Tensor = run_outside_graph(FusedExperts._forward, self, hidden_states, top_k_index, top_k_weights)
            return output
        return self._forward(hidden_states, top_k_index, top_k_weights)

    def _forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        index = top_k_index.reshape(len(tokens), -1)
        probs = top_k_weights.reshape(index.shape)
        rows, row_probs, sorting = moe_permute_with_probs(tokens, probs, index, self.num_experts)
        offsets = row_offsets(sorting.splits, self.num_experts, rows.shape[0], rows.device, self.describe())
        up, down = self.expert_layers
        queue = self.queue_now()
        hidden = self.multiply_rows(up, rows, offsets, None, queue)
        normed = bool(getattr(self, "has_post_expert_norm", False))
        activated = self._activate(hidden, None if normed else row_probs)
        scales = row_probs if self._form.has_bias and not normed else None
        output = self.multiply_rows(down, activated, offsets, scales, queue)
        if normed:
            output = (self.post_expert_norm(output) * row_probs[:, None]).to(output.dtype)
        return moe_unpermute(output, sorting).to(hidden_states.dtype).view(hidden_states.shape)

    def _activate(self, hidden: Tensor, scales: Tensor | None) -> Tensor:
        """Rows of the first product -> those of the second, scaled."""
        has_gate = self.weight_names[0] == "gate_up_proj"
        if has_gate and _is_swiglu(self):
            return scaled_activation(hidden, scales, _SWIGLU)
        activated: Tensor = self._apply_gate(hidden) if has_gate else self.act_fn(hidden)
        return activated if scales is None else (activated * scales[:, None]).to(activated.dtype)

    def describe(self) -> str:
        """For errors: which experts these are."""
        return self.label or f"{self._unfused.__name__}({self.sizes()})"

    def sizes(self) -> str:
        """The sizes, by the names of attributes and parameters."""
        shapes = (f"{name}={list(getattr(self, name).shape)}" for name in self.weight_names)
        return f"num_experts={self.num_experts}, {', '.join(shapes)}"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by the base class: the fused class is made at run time and no Python module contains it."""
        return _new_fused_experts, (self._unfused, self._form), self.__getstate__()  # type: ignore[no-untyped-call]


_SWIGLU = glu_options("experts", "swiglu")


def _is_swiglu(experts: Any) -> bool:
    """Whether the gate is transformers' own, ``act(first half) * second half``, with SiLU."""
    gate = type(experts)._apply_gate
    silu = type(experts.act_fn).__name__ in ("SiLU", "SiLUActivation") if hasattr(experts, "act_fn") else False
    return silu and gate.__module__ == "transformers.integrations.moe"


def _new_fused_experts(base: type, form: _Form) -> nn.Module:
    cls = _fused_class(base, form)
    return cls.__new__(cls)
