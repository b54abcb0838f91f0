"""``Conversion``: what ``convert_linears`` did and left out, and which share of weight-gradient FLOPs is fused."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ..dense.hugging_face import is_conv1d_class
from ..dense.linear import LinearModule
from ..experts.grouped_module import GroupedModule
from ..experts.hugging_face_experts import is_experts_class, weight_names_of

__all__ = ["Conversion", "linear_weights"]

_ATTENTION_MATRICES = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """The result of ``convert_linears``. A module with several names has its first one; the model's own name is ''."""

    converted: tuple[str, ...]
    """Names of the modules that became fused, in ``named_modules`` order."""
    skipped: dict[str, str]
    """Module name -> why the module, a linear layer or an embedding, was not converted."""
    unfused_losses: dict[str, str]
    """Name of a language model -> why its loss was not fused with its head; empty without ``fused_loss=True``."""
    left_out: dict[str, str]
    """Parameter name -> whose it is: parameters with two dims or more that no module known to ``convert_linears``
    multiplies, such as routers, convolutions and learnt positions. Their gradients reach ``main_grad`` through the
    wrapper's hook. Lookup tables are not among them."""
    fused_share: float
    """The share that fused modules write of the FLOPs that the model's weight gradients take: from 0 to 1. A token
    counts once for each element of a weight. Of experts it counts for those that the token goes to, by the
    experts' ``config`` (``num_experts_per_tok``, ``moe_topk`` or ``top_k_experts``), and else for one. Parameters of
    ``left_out`` count like weights; lookups and frozen parameters take none. 1 for a model without trained weights."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        converted: Iterable[str],
        skipped: Mapping[str, str],
        unfused_losses: Mapping[str, str],
    ) -> "Conversion":
        """The report on a converted model."""
        known: set[int] = set()
        fused = total = 0.0
        for module in model.modules():
            for name in linear_weights(module):
                weight = module._parameters.get(name)
                if weight is None or id(weight) in known or is_lazy(weight):  # which has no size yet
                    continue
                known.add(id(weight))
                work = weight.numel() * _share_of_tokens(module) * weight.requires_grad
                total += work
                if isinstance(module, LinearModule) and module.fuse_wgrad_accumulation:
                    fused += work
        left_out: dict[str, str] = {}
        for name, owner, parameter in _other_parameters(model, known):
            total += parameter.numel() * parameter.requires_grad
            left_out[name] = f"{type(owner).__name__} uses it by itself, shape {tuple(parameter.shape)}"
        share = fused / total if total else 1.0
        return cls(
            converted=tuple(converted),
            skipped=dict(skipped),
            unfused_losses=dict(unfused_losses),
            left_out=left_out,
            fused_share=share,
        )


def linear_weights(module: nn.Module) -> tuple[str, ...]:
    """Names of the weights that the module multiplies its input with; none for lookups, and modules not known."""
    if isinstance(module, nn.Embedding):
        return ()
    if isinstance(module, nn.MultiheadAttention):
        return tuple(name for name in _ATTENTION_MATRICES if module._parameters.get(name) is not None)
    if isinstance(module, LinearModule):
        return tuple(module.weight_names)
    classes = type(module).__mro__
    if isinstance(module, nn.Linear) or any(map(is_conv1d_class, classes)):
        return ("weight",)
    return weight_names_of(module) if any(map(is_experts_class, classes)) else ()


def _share_of_tokens(module: Any) -> float:
    if not isinstance(module, GroupedModule) and not any(map(is_experts_class, type(module).__mro__)):
        return 1.0
    experts: int = module.num_gemms if isinstance(module, GroupedModule) else module.num_experts
    chosen = _experts_per_token(getattr(module, "config", None))
    return min(chosen, experts) / experts


def _experts_per_token(config: Any) -> float:
    """Read the number by the names that configs give to it; of a list, with a number for each layer, the mean."""
    found = next((value for name in _EXPERTS_PER_TOKEN if (value := getattr(config, name, None))), 1)
    return sum(found) / len(found) if isinstance(found, list | tuple) else found


def _other_parameters(model: nn.Module, known: set[int]) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    for prefix, module in model.named_modules():
        if isinstance(module, _LOOKUPS):
            continue
        has_weights = bool(linear_weights(module))
        for name, parameter in module._parameters.items():
            if parameter is None or is_lazy(parameter) or (has_weights and name.endswith("bias")):
                continue  # packed biases of experts have two dims
            if parameter.dim() >= 2 and id(parameter) not in known:
                known.add(id(parameter))
                yield f"{prefix}.{name}" if prefix else name, module, parameter
