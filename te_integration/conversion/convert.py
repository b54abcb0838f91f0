"""``convert_linears``: make the linear layers of a model fused, in place; ``unconvert`` undoes it."""

from typing import cast

from torch import nn
from torch.nn.parameter import is_lazy

from ...ddp.contract.main_grad import has_main_grad
from ...ddp.contract.module import is_sharded
from ...ddp.plan.tensor_parallel.hugging_face import replace_inner_forward, runs_class_forward
from ...ddp.plan.tensor_parallel.localize import can_localize, is_one_slice
from ..dense.embedding import Embedding, calls_embedding_forward, fused_embedding_class, why_autograd
from ..dense.hugging_face import FusedConv1D, fused_conv1d_class, is_conv1d_class
from ..dense.layer_norm_linear import LayerNormLinear
from ..dense.layer_norm_mlp import LayerNormMLP
from ..dense.linear import Linear, LinearModule
from ..dense.tensor_parallel import TensorParallelModule
from ..experts.grouped_linear import GroupedLinear
from ..experts.grouped_mlp import GroupedMLP
from ..experts.hugging_face_experts import FusedExperts, fused_experts_class, is_experts_class, why_not_experts
from ..head.linear_cross_entropy import Mode
from .fused_loss import FusedLoss, fuse_loss, is_language_model, mode_of, unfuse_loss, why_no_fused_loss
from .report import Conversion, linear_weights

__all__ = ["Conversion", "convert_linears", "unconvert"]

_KNOWN = (nn.Linear, Linear, LayerNormLinear, LayerNormMLP, GroupedLinear, GroupedMLP, nn.Embedding, Embedding)


def convert_linears(model: nn.Module, *, fused_loss: FusedLoss = False) -> Conversion:
    """Fuse the weight gradient of every linear layer and embedding of ``model`` into ``main_grad``; then wrap it.

    Converted are modules whose type is exactly ``nn.Linear`` or ``nn.Embedding``, maingrad modules that were built
    unfused, and Hugging Face's ``Conv1D``, embeddings that scale or shift (Gemma's, Bart's), and experts (the classes
    whose implementation a model's ``experts_implementation`` chooses, as in Mixtral, Qwen3-MoE, DeepSeek-V3 and
    GPT-OSS; from then on ours runs in place of transformers' own). Embeddings with ``sparse`` or
    ``scale_grad_by_freq`` stay autograd's. A subclass may compute something else, so it is skipped and listed by name;
    its gradients reach ``main_grad`` through the wrapper's hook, like those of every other parameter. The result also
    names parameters that nothing known multiplies, such as routers, and says which share of the FLOPs of weight
    gradients is fused.

    Only the class of a module changes. The module object keeps its parameters, hooks, buffers, mode and attributes.
    References to it, tied weights, state-dict keys and ``isinstance(module, nn.Linear)`` therefore stay valid. Models
    on the meta device can be converted too.

    Frozen weights are converted as well. A fused layer computes a weight gradient only if ``requires_grad`` is set, so
    parameters may be frozen and unfrozen until the model is wrapped.

    Some code reads the weight of a layer instead of calling the layer (the inference path of
    ``nn.TransformerEncoderLayer``). That weight then has an ordinary gradient, which the hook adds.
    ``num_fused_writes`` in ``DistributedDataParallel.records`` counts what fused GEMMs wrote to each weight.

    fused_loss  a language model of Hugging Face that is given ``labels`` in training computes its loss by the head,
                whose logits are in memory a chunk at a time. True or "recompute", "in_forward": the modes of
                ``LinearCrossEntropy``. All that the model does to logits before the loss stays: scale, cap, shift,
                ``num_items_in_batch``, losses of routers. ``logits`` of its output are computed if something reads
                them before backward. The model's forward has two more arguments: ``skip_logits`` (False: logits and
                loss as they were, in this call; True: no logits in evaluation either), and ``grad_scale``, for
                "in_forward": the gradient that backward will bring to the loss (1 without). Recipes leave such a head
                as it is. Models whose loss stays as it was are in ``unfused_losses``, with the reason

    Models that torch's tensor parallelism has cut (``parallelize_module``, transformers' ``tp_plan``) are converted
    before they are cut or after, and always before wrapping: see docs/mesh.md.

    A converted model needs a provider of ``main_grad`` by its first backward; ``unconvert`` undoes the conversion.
    ``torch.fx`` traces into fused layers: trace first, then convert the ``GraphModule``.

    Raises ``TypeError`` if ``model`` is not a module. Raises ``ValueError``, with the model unchanged, if the model is
    wrapped already: the wrapper has then decided how each gradient is stored.
    """
    mode = mode_of(fused_loss)
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert_linears takes an nn.Module, got {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if has_main_grad(parameter):
            raise ValueError(
                f"parameter '{name}' already has a main_grad: convert_linears(model) comes before the wrapper "
                f"(DistributedDataParallel, FSDP), which decides from the modules how each gradient is written. Two "
                f"models that share a module are wrapped together, inside one module"
            )
    converted: list[str] = []
    skipped: dict[str, str] = {}
    cut = can_localize(model)
    for name, module in model.named_modules():
        if not _weights(module):
            continue
        reason = _why_not(module, cut)
        if reason is None:
            _fuse(module)
            converted.append(name)
        else:
            skipped[name] = reason
    unfused_losses = {} if mode is None else _fuse_losses(model, mode)
    return Conversion.of(model, converted, skipped, unfused_losses)


def _fuse_losses(model: nn.Module, mode: Mode) -> dict[str, str]:
    """Fuse the losses of all language models in ``model``. Returns name -> why not, of the others."""
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        if not is_language_model(module):
            continue
        reason = why_no_fused_loss(module)
        if reason is None and not isinstance(module.get_output_embeddings(), LinearModule):
            reason = f"{type(module).__name__}'s head was not converted: see skipped"
        if reason is None:
            fuse_loss(module, mode)
        else:
            reasons[name] = reason
    return reasons


def unconvert(model: nn.Module) -> tuple[str, ...]:
    """Let autograd deliver every weight gradient of ``model`` again, so that no provider of ``main_grad`` is needed.

    Converted ``nn.Linear`` and ``Conv1D`` modules and experts get their class back. maingrad modules keep their class,
    get ``fuse_wgrad_accumulation=False``, and still delay weight gradients if they did. Module objects keep their
    parameters, hooks, names and attributes. ``convert_linears`` may be called again later.

    Returns the names of the modules that were fused, in ``named_modules`` order. Raises ``TypeError`` if ``model`` is
    not a module. Raises ``ValueError``, with the model unchanged, if the model is wrapped or sharded, or if a module
    has delayed weight gradients that are not computed yet.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unconvert takes an nn.Module, got {type(model).__name__}")
    fused = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LinearModule) and module.fuse_wgrad_accumulation
    }
    cut = can_localize(model)
    for name, module in fused.items():
        _check_free(name or type(module).__name__, module, cut)
    unfuse_loss(model)
    for module in fused.values():
        _unfuse(module)
    return tuple(fused)


def _check_free(name: str, module: LinearModule, cut: bool) -> None:
    for local, weight in module._parameters.items():
        if weight is not None and is_sharded(weight) and not (cut and is_one_slice(weight)):
            raise ValueError(f"unconvert: '{name}' is sharded already; call unconvert(model) before fully_shard")
        if weight is not None and has_main_grad(weight):
            raise ValueError(
                f"unconvert: '{name}.{local}' has a main_grad, and its wrapper has decided how each gradient is "
                f"written: take the model out first (model.unwrap(), or let the wrapper go)"
            )
    if isinstance(module, FusedExperts) and module.dispatcher is not None:
        raise ValueError(
            f"unconvert: '{name}' has this rank's experts alone, and transformers sends no tokens to others"
        )
    if module.need_backward_dw():
        raise ValueError(f"unconvert: '{name}' has delayed weight gradients; call its backward_dw() first")


def _fuse(module: nn.Module) -> None:
    cls: type = type(module)
    if "forward" in vars(module):
        from ...ddp.plan.tensor_parallel.forwards import run_own_forward  # with torch.distributed.tensor

        replace_inner_forward(module, run_own_forward)
    if is_conv1d_class(cls):
        module.__class__ = fused_conv1d_class(cls)
    elif is_experts_class(cls):
        module.__class__ = fused_experts_class(module)
    elif calls_embedding_forward(cls):
        module.__class__ = fused_embedding_class(cls)
        cast(Embedding, module).fuse_wgrad_accumulation = True
    else:
        if cls is nn.Linear:
            module.__class__ = Linear
        cast(LinearModule, module).fuse_wgrad_accumulation = True
    cast(LinearModule, module).make_handle()


def _unfuse(module: LinearModule) -> None:
    own = vars(module)
    own.pop("_uses", None)  # these describe fused products
    if isinstance(module, FusedConv1D | FusedExperts):
        _drop_handle(module)
        module.__class__ = module._unfused
    elif "label" not in own and (unfused := _unfused_class(type(module))) is not None:
        _drop_handle(module)
        del own["fuse_wgrad_accumulation"]
        cast(nn.Module, module).__class__ = unfused
    else:
        module.fuse_wgrad_accumulation = False


def _unfused_class(cls: type) -> type | None:
    """The class of a module that ``cls``'s constructor has not made: such a module was converted."""
    unfused: dict[type, type] = {Linear: nn.Linear, Embedding: nn.Embedding}
    return unfused.get(cls, getattr(cls, "_unfused", None))


def _drop_handle(module: LinearModule) -> None:
    own = vars(module)
    module.drop_scaling()
    own.pop("_wgrad_handle", None)
    own.pop("_wgrad_key", None)


def _why_not(module: nn.Module, cut: bool) -> str | None:
    """Why this module cannot be fused, or None. ``cut``: its DTensors are those of tensor parallelism."""
    cls = type(module)
    weights = [module._parameters.get(name) for name in _weights(module)]
    if isinstance(module, nn.MultiheadAttention):
        matrices = " and ".join(linear_weights(module))
        return f"{cls.__name__}: {matrices} is read as a matrix by F.multi_head_attention_forward, not run as a module"
    if isinstance(module, LinearModule) and module.fuse_wgrad_accumulation and None not in weights:
        return "already fused"
    if any(weight is not None and is_lazy(weight) for weight in weights):
        return f"{cls.__name__} has no weight yet: run one forward, then convert"
    if not _is_known(cls):
        if any(weight is not None and is_sharded(weight) for weight in weights):
            return f"{cls.__name__} is sharded already (fully_shard): call convert_linears before it"
        parent = next(filter(_is_known, cls.__mro__)).__name__
        return f"{cls.__module__}.{cls.__qualname__} is a subclass of {parent} and may use its weight in another way"
    if "forward" in module.__dict__ and not runs_class_forward(module):
        return f"{cls.__name__}'s forward was replaced on this instance"
    reason = why_not_experts(module) if is_experts_class(cls) else None
    if isinstance(module, nn.Embedding):
        option = why_autograd(module)
        reason = option and f"{cls.__name__} has {option}=True, whose gradient autograd delivers"
    return reason or next(filter(None, (_why_not_weight(cls.__name__, weight, cut) for weight in weights)), None)


def _weights(module: nn.Module) -> tuple[str, ...]:
    """Names of the weights of a module that may be fused."""
    return ("weight",) if isinstance(module, nn.Embedding) else linear_weights(module)


def _is_known(cls: type) -> bool:
    if issubclass(cls, TensorParallelModule):
        cls = getattr(cls, "_unfused", cls)  # the mixin itself has none
    return cls in _KNOWN or is_conv1d_class(cls) or is_experts_class(cls) or calls_embedding_forward(cls)


def _why_not_weight(module: str, weight: nn.Parameter | None, cut: bool) -> str | None:
    if weight is None:
        return f"{module}'s weight is computed from other parameters (weight_norm, spectral_norm, prune)"
    if nn.Parameter not in type(weight).__mro__ and not (cut and is_one_slice(weight)):  # wrappers make it local
        before = "; convert before it is sharded (fully_shard, tensor parallelism)" if is_sharded(weight) else ""
        return f"{module}'s weight is a {type(weight).__name__}, whose gradient is not a plain tensor{before}"
    if not weight.is_floating_point() or weight.itemsize < 2:
        return f"{module}'s weight is {weight.dtype}: fused weight gradients are floating point of 16 to 64 bits"
    return None
