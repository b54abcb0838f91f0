"""Fused weight gradients for the experts of Hugging Face models, whose weights are packed 3-D parameters.

transformers is never imported. Classes that its decorator ``use_experts_implementation`` has changed say how they store
their weights; the fused class is a subclass of such a class. Legend: T tokens, k experts for each token, E experts,
H features of a token, F features between the two products.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..dense.compiled_wgrad import run_outside_graph
from ..dense.hugging_face import MadeClass, is_of_transformers
from .dispatch.dispatcher import TokenDispatcher
from .grouped_module import ExpertLayer, GroupedModule
from .moe_permutation import moe_permute_with_probs, moe_unpermute
from .row_splits import row_offsets
from .scaled_activations import glu_options, scaled_activation

__all__ = ["FusedExperts", "fused_experts_class", "is_experts_class", "weight_names_of", "why_not_experts"]

_DECORATOR = "transformers.integrations.moe"


def is_experts_class(cls: type) -> bool:
    """Whether ``use_experts_implementation`` of transformers has made the forward of ``cls``, with its own registry."""
    return _registry_of(cls) is not None


def _registry_of(cls: type) -> Mapping[str, Callable[..., Tensor]] | None:
    """The implementations among which the decorated forward of ``cls`` chooses, by name; None for other classes."""
    forward: Any = cls.__dict__.get("forward")
    code = getattr(forward, "__code__", None)
    if code is None or "experts_interface" not in code.co_freevars or forward.__globals__["__name__"] != _DECORATOR:
        return None
    registry: Any = forward.__closure__[code.co_freevars.index("experts_interface")].cell_contents
    return registry if registry is forward.__globals__["ALL_EXPERTS_FUNCTIONS"] else None


def _known_implementations(cls: type) -> frozenset[str | None]:
    """Names of the implementations that compute what ``FusedExperts`` computes.

    They are those of transformers, and the eager forward of a class of transformers. A function that a program has
    registered may compute something else, and so may the eager forward of a class from elsewhere.
    """
    registry = _registry_of(cls) or {}
    names: set[str | None] = {name for name, each in registry.items() if is_of_transformers(each)}
    return frozenset(names | {"eager", None} if is_of_transformers(cls) else names)


def why_not_experts(experts: Any, *, may_be_split: bool = False) -> str | None:
    """Why this module, whose class ``is_experts_class`` accepts, computes what cannot be replaced; or None."""
    cls = type(experts)
    if getattr(experts, "_is_expert_parallel", False) and not may_be_split:
        return f"{cls.__name__} is split over ranks by transformers (expert parallelism)"
    if "_apply_gate" in vars(experts):
        return f"{cls.__name__}'s _apply_gate was replaced on this instance"
    chosen = experts.config._experts_implementation
    if chosen not in _known_implementations(cls):
        return f"{cls.__name__} runs experts_implementation={chosen!r}, which is not transformers' own"
    return None


def weight_names_of(experts: nn.Module) -> tuple[str, str]:
    """Names of the weights of the two products."""
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


class _Form(NamedTuple):
    """How a class stores its parameters."""

    weight_names: tuple[str, str]
    has_bias: bool
    transposed: bool
    implementations: frozenset[str | None]
    """Values of ``config._experts_implementation`` that ``FusedExperts`` stands in for."""


def fused_experts_class(experts: Any) -> type[nn.Module]:
    """The fused class for a module of transformers."""
    base: type = type(experts)
    known = _known_implementations(base)
    return _fused_class(base, _Form(weight_names_of(experts), experts.has_bias, experts.is_transposed, known))


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
    members |= {"_made_by": (_fused_class, base, form)}
    members |= {"weight_names": form.weight_names, "transposed": form.transposed}
    return type(f"Fused{base.__name__}", (FusedExperts, base), members)


class FusedExperts(MadeClass, GroupedModule):
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
    split sizes. p scales what enters the second product, in place of what leaves it: results differ by rounding. A
    later choice among transformers' own implementations has no effect; one that a program has registered itself runs,
    and autograd delivers the gradients. This class is a mixin; ``fused_experts_class`` combines it with a class that
    ``is_experts_class`` accepts.
    """

    _form: _Form
    config: Any
    _apply_gate: Callable[[Tensor], Tensor]
    act_fn: nn.Module
    post_expert_norm: nn.Module
    fuse_wgrad_accumulation = True
    slices = "local"
    num_experts: int
    dispatcher: TokenDispatcher | None = None
    """Brings tokens to the ranks of their experts, of which this module has the rank's; None: it has all experts."""

    @property
    def num_gemms(self) -> int:  # type: ignore[override]
        """E."""
        return self.num_experts

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor | None = None,
        top_k_weights: Tensor | None = None,
        *,
        router_indices: Tensor | None = None,
        routing_weights: Tensor | None = None,
    ) -> Tensor:
        """[..., H] -> [..., H]. ``router_indices`` and ``routing_weights`` are other names for the same arguments."""
        top_k_index = router_indices if top_k_index is None else top_k_index
        top_k_weights = routing_weights if top_k_weights is None else top_k_weights
        if top_k_index is None or top_k_weights is None:
            raise TypeError(f"{self.describe()} takes hidden_states, top_k_index and top_k_weights")
        if self.config._experts_implementation not in self._form.implementations:
            if self.dispatcher is not None:
                raise RuntimeError(
                    f"{self.describe()} has this rank's experts alone, to which tokens of other ranks travel: "
                    f"experts_implementation={self.config._experts_implementation!r} knows no other ranks"
                )
            chosen: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return chosen
        dispatcher, queue = self.dispatcher, self.queue_now()
        if torch.compiler.is_compiling() and not (
            self.runs_in_graph(top_k_index) and (dispatcher is None or dispatcher.runs_in_graph(queue))
        ):
            broken: Tensor = run_outside_graph(FusedExperts.forward, self, hidden_states, top_k_index, top_k_weights)
            return broken
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        index = top_k_index.reshape(-1, top_k_index.shape[-1])
        probs = top_k_weights.reshape(index.shape)
        row_probs: Any
        way_back: Any
        if dispatcher is None:
            rows, row_probs, way_back = moe_permute_with_probs(tokens, probs, index, self.num_experts)
            splits = way_back.splits
        else:
            rows, splits, row_probs, way_back = dispatcher.dispatch(tokens, index, probs, queue=queue)
        offsets = row_offsets(splits, self.num_experts, rows.shape[0], rows.device, self.describe())
        up, down = self.expert_layers
        hidden = self.multiply_rows(up, rows, offsets, None, queue)
        normed = bool(getattr(self, "has_post_expert_norm", False))
        activated = self._activate(hidden, None if normed else row_probs)
        scales = row_probs if self._form.has_bias and not normed else None
        output = self.multiply_rows(down, activated, offsets, scales, queue)
        if normed:
            output = (self.post_expert_norm(output) * row_probs[:, None]).to(output.dtype)
        y = moe_unpermute(output, way_back) if dispatcher is None else dispatcher.combine(output, way_back)
        return y.to(hidden_states.dtype).view(hidden_states.shape)

    def _activate(self, hidden: Tensor, scales: Tensor | None) -> Tensor:
        """Rows of the first product -> those of the second, scaled."""
        has_gate = self.weight_names[0] == "gate_up_proj"
        if has_gate and _is_swiglu(self):
            return scaled_activation(hidden, scales, _SWIGLU)
        activated: Tensor = self._apply_gate(hidden) if has_gate else self.act_fn(hidden)
        return activated if scales is None else (activated * scales[:, None]).to(activated.dtype)

    def sizes(self) -> str:
        """The sizes, by the names of attributes and parameters."""
        shapes = (f"{name}={list(getattr(self, name).shape)}" for name in self.weight_names)
        return f"num_experts={self.num_experts}, {', '.join(shapes)}"


_SWIGLU = glu_options("experts", "swiglu")


def _is_swiglu(experts: Any) -> bool:
    """Whether the gate is transformers' own, ``act(first half) * second half``, with SiLU."""
    gate = type(experts)._apply_gate
    silu = type(experts.act_fn).__name__ in ("SiLU", "SiLUActivation") if hasattr(experts, "act_fn") else False
    return silu and gate.__module__ == "transformers.integrations.moe"
