"""``convert_linears``: an existing model's linear layers become fused ones, in place; ``unconvert`` takes it back."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..ddp.contract.main_grad import has_main_grad
from ..ddp.contract.module import forms_of
from ..ddp.contract.torch_fsdp import is_sharded_by_torch
from .dense.conv1d import FusedConv1D, fused_conv1d_class, is_conv1d_class
from .dense.layer_norm_linear import LayerNormLinear
from .dense.layer_norm_mlp import LayerNormMLP
from .dense.linear import Linear
from .dense.linear_module import LinearModule
from .experts.grouped_linear import GroupedLinear
from .experts.grouped_mlp import GroupedMLP

__all__ = ["Conversion", "convert_linears", "unconvert"]

_OURS = (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear, GroupedMLP)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ATTENTION_MATRICES = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """What ``convert_linears`` did. A module in several places goes by its first name; the model itself by ''."""

    converted: tuple[str, ...]
    """Names of the modules that are fused now, in ``named_modules`` order."""
    skipped: dict[str, str]
    """Name of each module that holds a linear layer's weight and was left as it is -> why."""


def convert_linears(model: nn.Module) -> Conversion:
    """Fuse the weight gradient of every linear layer of ``model`` into ``main_grad``; convert first, then wrap.

    Converted are modules whose type is exactly ``nn.Linear``, our own modules that were built unfused, and Hugging
    Face's ``Conv1D``. Subclasses compute something else and are skipped by name; their gradients reach ``main_grad``
    through the provider's hook, as those of every other parameter do.

    Only the module's class changes. The module object stays, with its parameters, hooks, buffers, mode and whatever was
    set on it, so that references held elsewhere, tied weights, state-dict keys and ``isinstance(module, nn.Linear)``
    stay true; a copy into new modules would lose some of that. It works on the meta device too.

    Frozen weights are converted as well: a fused layer computes a weight gradient only where ``requires_grad`` asks for
    it, so that freezing and unfreezing up to the wrap need no second conversion.

    Whether a layer runs as a module cannot be known from here. The weight of a converted layer that somebody reads as a
    matrix (as ``nn.TransformerEncoderLayer`` does in its inference path) has a plain gradient there, which the hook
    adds; ``num_fused_writes`` in ``DistributedDataParallel.records`` tells which weights a fused GEMM really wrote.

    A converted model needs a provider of ``main_grad`` by its first backward; ``unconvert`` is the way back.
    ``torch.fx`` traces through fused layers and not around them: trace first, then convert the ``GraphModule``.

    Raises ``TypeError`` if ``model`` is not a module, and ``ValueError``, with the model unchanged, if it is wrapped
    already: how a gradient is stored was decided then, from the modules that there were.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert_linears takes an nn.Module, got {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if has_main_grad(parameter):
            raise ValueError(
                f"parameter '{name}' already has a main_grad: convert_linears(model) comes before the wrapper "
                f"(DistributedDataParallel, FSDP), which decides from the modules how each gradient is written"
            )
    converted: list[str] = []
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if not _holds_linear_weight(module):
            continue
        reason = _why_not(module)
        if reason is None:
            _fuse(module)
            converted.append(name)
        else:
            skipped[name] = reason
    return Conversion(converted=tuple(converted), skipped=skipped)


def unconvert(model: nn.Module) -> tuple[str, ...]:
    """Have autograd deliver every weight gradient of ``model`` again, so that it needs no provider of ``main_grad``.

    What ``convert_linears`` has made of ``nn.Linear`` and ``Conv1D`` has its class back; our own modules, whoever fused
    them, stay ours with ``fuse_wgrad_accumulation=False``, and delay what they delay. As there, module objects stay,
    with parameters, hooks, names and what was set on them; ``convert_linears`` may follow again.

    Returns the names of the modules that were fused, in ``named_modules`` order. Raises ``TypeError`` if ``model`` is
    not a module, and ``ValueError``, with the model unchanged, while it is wrapped or sharded, or where a module still
    has weight gradients to compute.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unconvert takes an nn.Module, got {type(model).__name__}")
    fused = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LinearModule) and module.fuse_wgrad_accumulation
    }
    for name, module in fused.items():
        _check_free(name or type(module).__name__, module)
    for module in fused.values():
        _unfuse(module)
    return tuple(fused)


def _check_free(name: str, module: LinearModule) -> None:
    for local, weight in module._parameters.items():  # type: ignore[attr-defined]  # nn.Module's
        if weight is not None and _is_sharded(weight):
            raise ValueError(f"unconvert: '{name}' is sharded already; call unconvert(model) before fully_shard")
        if weight is not None and has_main_grad(weight):
            raise ValueError(
                f"unconvert: '{name}.{local}' has a main_grad, and its wrapper has decided how each gradient is "
                f"written: take the model out first (model.unwrap(), or let the wrapper go)"
            )
    if module.need_backward_dw():
        raise ValueError(f"unconvert: '{name}' has delayed weight gradients; call its backward_dw() first")


def _fuse(module: nn.Module) -> None:
    cls: type = type(module)
    if is_conv1d_class(cls):
        module.__class__ = fused_conv1d_class(cls)
        return
    if cls is nn.Linear:
        module.__class__ = Linear
    cast(LinearModule, module).fuse_wgrad_accumulation = True


def _unfuse(module: LinearModule) -> None:
    own = vars(module)
    own.pop("_uses", None)  # of products that were fused
    if isinstance(module, FusedConv1D):
        module.__class__ = module._unfused
    elif type(module) is Linear and "label" not in own:  # which its constructor would have set
        del own["fuse_wgrad_accumulation"]
        cast(nn.Module, module).__class__ = nn.Linear
    else:
        module.fuse_wgrad_accumulation = False


def _holds_linear_weight(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return bool(_attention_matrices(module))
    return isinstance(module, nn.Linear | LinearModule) or any(map(is_conv1d_class, type(module).__mro__))


def _why_not(module: nn.Module) -> str | None:
    """Why this module cannot be fused, or None."""
    cls = type(module)
    weights = [module._parameters.get(name) for name in getattr(module, "weight_names", ("weight",))]
    if isinstance(module, nn.MultiheadAttention):
        matrices = " and ".join(_attention_matrices(module))
        return f"{cls.__name__}: {matrices} is read as a matrix by F.multi_head_attention_forward, not run as a module"
    if isinstance(module, LinearModule) and module.fuse_wgrad_accumulation and None not in weights:
        return "already fused"
    if any(weight is not None and is_lazy(weight) for weight in weights):
        return f"{cls.__name__} has no weight yet: run one forward, then convert"
    if not (cls in (nn.Linear, *_OURS) or is_conv1d_class(cls)):
        if any(weight is not None and _is_sharded(weight) for weight in weights):
            return f"{cls.__name__} is sharded already (fully_shard): call convert_linears before it"
        parents = {"nn.Linear": nn.Linear, **{each.__name__: each for each in _OURS[1:]}}
        parent = next((name for name, each in parents.items() if isinstance(module, each)), "Conv1D")
        return f"{cls.__module__}.{cls.__qualname__} is a subclass of {parent} and may use its weight in another way"
    if "forward" in module.__dict__:
        return f"{cls.__name__}'s forward was replaced on this instance"
    return next(filter(None, (_why_not_weight(cls.__name__, weight) for weight in weights)), None)


def _why_not_weight(module: str, weight: nn.Parameter | None) -> str | None:
    if weight is None:
        return f"{module}'s weight is computed from other parameters (weight_norm, spectral_norm, prune)"
    if nn.Parameter not in type(weight).__mro__:
        before = "; convert before it is sharded (fully_shard, tensor parallelism)" if _is_sharded(weight) else ""
        return f"{module}'s weight is a {type(weight).__name__}, whose gradient is not a plain tensor{before}"
    if weight.dtype not in _DTYPES:
        return f"{module}'s weight is {weight.dtype}: fused weight gradients are floating point of 16 to 64 bits"
    return None


def _is_sharded(weight: nn.Parameter) -> bool:
    """By ``maingrad.fsdp``, which is not imported here, or by torch."""
    return any(hasattr(form, "shard") for form in forms_of(weight)) or is_sharded_by_torch(weight)


def _attention_matrices(module: nn.MultiheadAttention) -> list[str]:
    return [name for name in _ATTENTION_MATRICES if module._parameters.get(name) is not None]
