"""The loss of Hugging Face's language models without logits in memory: ``convert_linears(model, fused_loss=True)``.

Two classes change, and no object. The head's becomes ``LossHead``, which multiplies as before, and computes the loss of
its product as ``LinearCrossEntropy`` does. The model's gets a ``forward`` around its own: with labels, the head returns
``DeferredLogits`` in it, and so all that the architecture does to logits before ``F.cross_entropy`` stays the model's.

transformers is never imported.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any, TypeAlias, get_args

import torch
from torch import Tensor, nn

from ...ddp.plan.model_slice import model_slice_of
from ...ddp.plan.tensor_parallel.localize import is_one_slice
from ...kernels.cross_entropy.reference import LossTerms
from ..dense.hugging_face import MadeClass, is_of_transformers
from ..dense.linear import Linear
from ..head.linear_cross_entropy import LinearCrossEntropy, Mode, Reduction, linear_cross_entropy
from .deferred_logits import DeferredLogits

__all__ = ["FusedLoss", "LossHead", "fuse_loss", "is_language_model", "mode_of", "unfuse_loss", "why_no_fused_loss"]


FusedLoss: TypeAlias = bool | Mode
"""Values of ``fused_loss``; True: "recompute"."""


def mode_of(fused_loss: FusedLoss) -> Mode | None:
    """The mode of the head; None: the loss is not fused. Raises ``ValueError`` for other values."""
    if fused_loss not in (False, True, *get_args(Mode)):
        raise ValueError(f"fused_loss is True, False or one of {', '.join(get_args(Mode))}; got {fused_loss!r}")
    return ("recompute" if fused_loss else None) if isinstance(fused_loss, bool) else fused_loss


class LossHead(LinearCrossEntropy):
    """A model's head that can compute the cross-entropy of its product, with a chunk of logits in memory at a time."""

    defers = False
    """A forward of the model that wants a loss runs: calls return ``DeferredLogits``."""
    grad_of_mean: Any = None
    """"in_forward", while the model's forward runs: the gradient that backward will bring to a loss that is a mean."""
    grad_of_sum: Any = None
    """To a sum."""

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Within, calls return ``DeferredLogits``, whose loss is fused: for a module that takes the loss of a model's
        logits in its own forward."""
        self.defers = True
        try:
            yield
        finally:
            self.defers = False

    def forward(  # type: ignore[override]
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        defer: bool = True,
        terms: LossTerms | None = None,
        reduction: Reduction = "mean",
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Any:
        """[..., K] -> [..., V]; with ``targets`` the loss of rows [T, K], as ``LinearCrossEntropy`` computes it.

        defer  False: the product itself, also where the model defers it
        terms  what the architecture has done to logits, and the arguments of its loss; None: nothing, and torch's own
        bias   [V], in place of the head's own, which is None
        dtype  to which the caller casts the loss: backward rounds the gradient to it
        """
        if targets is None:
            if self.defers and defer:
                return DeferredLogits.of_forward(self, hidden)
            return self.multiply(hidden, (self.weight,), self.bias, None)
        terms = LossTerms() if terms is None else terms
        announced = self.grad_of_sum if reduction == "sum" else self.grad_of_mean
        if announced is not None and dtype.itemsize < torch.float32.itemsize:
            announced = torch.as_tensor(announced, dtype=dtype, device=hidden.device)
        if bias is None:
            return self.loss(hidden, targets, terms, reduction, None, announced)
        options: dict[str, Any] = terms._asdict() | {
            "reduction": reduction,
            "mode": self.mode,
            "chunk_tokens": self.chunk_tokens,
            "grad_scale": announced,
        }
        return linear_cross_entropy(hidden, self.weight, targets, bias=bias, **options)


class _FusedLossModel(MadeClass, nn.Module):
    """Mixin of models whose head may compute the loss; ``_fused_class`` combines it with a class of transformers."""


@functools.cache
def _fused_class(base: type) -> type[nn.Module]:
    """A subclass of ``base`` that goes by its name: transformers tells architectures apart by names."""
    unfused: Any = base.forward  # type: ignore[attr-defined]
    place = _place_of_labels(base)

    @functools.wraps(unfused)
    def forward(self: Any, *args: Any, skip_logits: bool | None = None, grad_scale: Any = None, **kwargs: Any) -> Any:
        if skip_logits is None:
            labels = kwargs.get("labels") if len(args) <= place else args[place]
            skip_logits = self.training and labels is not None and torch.is_grad_enabled()
        head = self.get_output_embeddings() if skip_logits else None
        if not isinstance(head, LossHead) or head.defers or _replaced_loss(self) is not None:
            return unfused(self, *args, **kwargs)
        count = kwargs.get("num_items_in_batch")  # the model divides a sum by it
        head.grad_of_mean = grad_scale
        head.grad_of_sum = grad_scale if count is None else (1.0 if grad_scale is None else grad_scale) / count
        head.defers = True
        try:
            return unfused(self, *args, **kwargs)
        finally:
            head.defers, head.grad_of_mean, head.grad_of_sum = False, None, None

    members: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    members |= {"_unfused": base, "_made_by": (_fused_class, base), "forward": forward}
    return type(base.__name__, (_FusedLossModel, base), members)


def is_language_model(module: nn.Module) -> bool:
    """Whether a forward of the module's class, or of one that it derives from, takes labels, and there is a head."""
    get = getattr(module, "get_output_embeddings", None)
    if not callable(get) or not any(
        _place_of_labels(cls) >= 0 for cls in type(module).__mro__ if "forward" in vars(cls)
    ):
        return False
    return get() is not None


def why_no_fused_loss(model: Any) -> str | None:
    """Why the loss of this language model cannot be fused with its head, converted or not; or None."""
    head, cls = model.get_output_embeddings(), type(model)
    if "forward" in vars(model):
        return f"{cls.__name__}'s forward was replaced on this instance"
    if not is_of_transformers(inspect.unwrap(cls.forward)):
        return f"{cls.__module__}.{cls.__qualname__}'s forward is not transformers' own"
    replaced = _replaced_loss(model)
    if replaced is not None:
        return f"{cls.__name__}'s loss_function is {replaced}, which is not transformers' own"
    if type(head) not in (nn.Linear, Linear, LossHead) or ("label" in vars(head) and type(head) is Linear):
        return f"{cls.__name__}'s head is a {type(head).__name__}, and not an nn.Linear"
    if is_one_slice(head.weight) or model_slice_of(head.weight) is not None:
        return f"{cls.__name__}'s head is a slice of tensor parallelism, and the loss takes all classes"
    return None


def fuse_loss(model: Any, mode: Mode) -> None:
    """Change the classes of ``model``, for which ``why_no_fused_loss`` has no reason, and of its head."""
    head = model.get_output_embeddings()
    head.__class__ = LossHead
    # Of the instance from the start: a compiler would compile again where an attribute appears.
    head.mode, head.defers, head.grad_of_mean, head.grad_of_sum = mode, False, None, None
    if not isinstance(model, _FusedLossModel):
        model.__class__ = _fused_class(type(model))  # type: ignore[arg-type]  # classes are hashable


def unfuse_loss(model: nn.Module) -> None:
    """Undo ``fuse_loss``: the head is a ``Linear`` again, as ``convert_linears`` has made it."""
    for module in model.modules():
        if isinstance(module, LossHead):
            for name in _OF_LOSS_HEAD & vars(module).keys():
                delattr(module, name)
            module.__class__ = Linear  # type: ignore[assignment]
        elif isinstance(module, _FusedLossModel):
            module.__class__ = module._unfused


_OF_LOSS_HEAD = {"defers", "grad_of_mean", "grad_of_sum", "mode"}


@functools.cache
def _place_of_labels(cls: type) -> int:
    """Index of ``labels`` among the positional arguments of the forward, without ``self``; -1: it takes none."""
    names = list(inspect.signature(cls.forward).parameters)  # type: ignore[attr-defined]
    return names.index("labels") - 1 if "labels" in names else -1


def _replaced_loss(model: Any) -> str | None:
    """The name of a loss that a program has given to the model, or compiled; None: it is transformers' own."""
    function = getattr(model, "loss_function", None)
    if function is None or (is_of_transformers(function) and not hasattr(function, "_torchdynamo_orig_callable")):
        return None
    return str(getattr(function, "__qualname__", type(function).__name__))
