"""The loss of Hugging Face's language models without logits in memory: ``convert_linears(model, fused_loss=...)``.

Two classes change, and no object. The head's becomes ``LossHead``, which multiplies as before, and computes the loss of
its product (``LinearCrossEntropy``). The model's gets a ``forward`` around its own: with labels, the head returns
``DeferredLogits`` in it, and so all that the architecture does to logits before ``F.cross_entropy`` stays the model's.

transformers is never imported.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..dense.linear import Linear
from ..dense.linear_module import brought
from .deferred_logits import DeferredLogits

__all__ = ["LossHead", "fuse_loss", "has_fused_loss", "is_language_model", "unfuse_loss", "why_no_fused_loss"]


class LossHead(Linear):
    """A head that can compute the cross-entropy of its product, of which at most a chunk is in memory at a time."""

    defers = False
    """The model that is around computes a loss: calls return ``DeferredLogits``."""
    mode = "recompute"
    """See ``LinearCrossEntropy``."""

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        is_first_microbatch: bool | None = None,
        *,
        defer: bool = True,
        targets: Tensor | None = None,
        bias: Tensor | None = None,
        **terms: Any,
    ) -> Any:
        """[..., K] -> [..., N], by a ``Linear``'s product.

        defer    False: the product itself, also where the model defers it
        targets  [T]: of rows [T, K] the loss, with ``terms`` as ``LinearCrossEntropy`` takes them
        bias     [N], added to the product
        """
        if targets is not None:
            return self._loss(input, targets, bias, terms)
        if self.defers and defer and brought.recipe_of_forward(self, input) is None:
            return DeferredLogits(self, input)
        return super().forward(input)

    def _loss(self, input: Tensor, targets: Tensor, bias: Tensor | None, terms: dict[str, Any]) -> Tensor:
        import torch.nn.functional as F
        z = super().forward(input)
        if bias is not None: z = z + bias
        s, c = terms.pop("logit_scale"), terms.pop("logit_softcap")
        z = z.float()*s
        if c is not None: z = c*torch.tanh(z/c)
        return F.cross_entropy(z, targets, **terms)


class _FusedLossModel(nn.Module):
    """Mixin of models whose head may compute the loss; ``_fused_class`` combines it with a class of transformers."""

    _unfused: type

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle by the base class: the class is made at run time and no Python module contains it."""
        return _new_model, (self._unfused,), self.__getstate__()  # type: ignore[no-untyped-call]


@functools.cache
def _fused_class(base: type) -> type[nn.Module]:
    """A subclass of ``base`` that goes by its name: transformers tells architectures apart by names."""
    unfused: Any = base.forward  # type: ignore[attr-defined]
    place = _place_of_labels(base)

    @functools.wraps(unfused)
    def forward(self: Any, *args: Any, skip_logits: bool | None = None, **kwargs: Any) -> Any:
        if skip_logits is None:
            labels = kwargs.get("labels") if len(args) <= place else args[place]
            skip_logits = self.training and labels is not None and torch.is_grad_enabled()
        head = self.get_output_embeddings() if skip_logits else None
        if not isinstance(head, LossHead) or head.defers or _replaced_loss(self) is not None:
            return unfused(self, *args, **kwargs)
        head.defers = True
        try:
            return unfused(self, *args, **kwargs)
        finally:
            head.defers = False

    members = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (_FusedLossModel, base), {**members, "_unfused": base, "forward": forward})


def _new_model(base: type) -> nn.Module:
    cls = _fused_class(base)
    return cls.__new__(cls)


def is_language_model(module: nn.Module) -> bool:
    """Whether a forward of ``module`` takes labels, and the module has output embeddings."""
    get = getattr(module, "get_output_embeddings", None)
    return callable(get) and _place_of_labels(type(module)) >= 0 and get() is not None


def has_fused_loss(module: nn.Module) -> bool:
    """Whether ``fuse_loss`` has changed the class of this model."""
    return isinstance(module, _FusedLossModel)


def why_no_fused_loss(model: Any) -> str | None:
    """Why the loss of this language model stays as it is; or None."""
    head = model.get_output_embeddings()
    cls = type(model)
    if "forward" in vars(model):
        return f"{cls.__name__}'s forward was replaced on this instance"
    if not _is_of_transformers(inspect.unwrap(cls.forward)):
        return f"{cls.__name__}'s forward is not transformers' own, and may read the logits in any way"
    replaced = _replaced_loss(model)
    if replaced is not None:
        return f"{cls.__name__}'s loss_function is {replaced}, which is not transformers' own"
    if type(head) not in (Linear, LossHead) or not head.fuse_wgrad_accumulation:
        return f"the head is a {type(head).__name__}, which convert_linears has not made a fused Linear"
    if head.weight_names != ("weight",) or head.return_bias:
        return "the head has several weights, or returns its bias"
    return None


def fuse_loss(model: Any, mode: str) -> None:
    """Change the classes of ``model``, for which ``why_no_fused_loss`` has no reason, and of its head."""
    head = model.get_output_embeddings()
    head.__class__ = LossHead
    head.mode = mode
    if not has_fused_loss(model):
        model.__class__ = _fused_class(type(model))


def unfuse_loss(model: nn.Module) -> None:
    """Undo ``fuse_loss``, for all modules of ``model``."""
    for module in model.modules():
        if isinstance(module, LossHead):
            vars(module).pop("mode", None)
            module.__class__ = Linear
        elif isinstance(module, _FusedLossModel):
            module.__class__ = module._unfused


@functools.cache
def _place_of_labels(cls: type) -> int:
    """Index of ``labels`` among the positional arguments of the forward, without ``self``; -1: it takes none."""
    names = list(inspect.signature(cls.forward).parameters)  # type: ignore[attr-defined]
    return names.index("labels") - 1 if "labels" in names else -1


def _replaced_loss(model: Any) -> str | None:
    """The name of a loss that a program has given to the model; None: it is transformers' own."""
    function = getattr(model, "loss_function", None)
    if function is None or _is_of_transformers(function):
        return None
    return str(getattr(function, "__qualname__", type(function).__name__))


def _is_of_transformers(what: Any) -> bool:
    return str(getattr(what, "__module__", "")).partition(".")[0] == "transformers"
