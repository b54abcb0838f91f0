"""``LinearCrossEntropy``: the last layer of a language model with its loss; and the function of the same name.

Legend: K ``in_features``, V ``out_features`` (classes); leading dims of hidden states and targets are any, and equal.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ddp.contract.main_grad import has_main_grad, is_fusable
from ...kernels.cross_entropy.reference import LossTerms, scaled_and_capped, token_losses_reference
from ..dense.compiled_wgrad import mode_of, run_outside_graph
from ..dense.linear import ProductUse, SplitLinear
from ..dense.linear_options import InitMethod, one_dtype
from ..dense.products import cast, dtype_of_products, in_transform, rows_of
from ..wgrad_queue import WgradQueue
from .compiled_head import compiled_losses, compiled_losses_in_forward
from .in_forward import can_write_in_forward, losses_in_forward
from .recomputing import HeadWgrad, recomputed_losses

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]

Reduction: TypeAlias = Literal["mean", "sum", "none"]
Mode: TypeAlias = Literal["recompute", "in_forward"]
Count: TypeAlias = Tensor | float

CHUNK_TOKENS = 2048
"""Tokens of a chunk: each chunk reads and writes the whole fp32 weight gradient once."""


class LinearCrossEntropy(SplitLinear, nn.Linear):
    """An ``nn.Linear`` whose forward takes targets, and returns the cross-entropy: no more logits than a chunk's exist.

    ===========  ==========  ==========================================================================
    hidden       [..., K]    floating, of the weight's dtype, or cast as autocast says
    targets      [...]       integers below V; ``ignore_index`` leaves a token out
    weight       [V, K]      as ``nn.Linear``'s
    bias         [V]         or None
    loss         []          fp32 (fp64 for fp64); [...] with ``reduction="none"``
    ===========  ==========  ==========================================================================

    With ``z = cap tanh(scale (x W^T + b) / cap)`` and ``l = log sum exp z`` a token's loss is
    ``l - (1 - e) z[target] - e mean(z) + zl l^2``; ``e`` is ``label_smoothing``, ``zl`` is ``z_loss``. Logits are
    rounded to the dtype of the product, and the loss is computed in fp32.

    bias, device, dtype      as ``nn.Linear``'s
    ignore_index, reduction  as ``torch.nn.functional.cross_entropy``'s; so is ``label_smoothing``
    z_loss                   weight of the squared log-sum-exp
    logit_softcap            bound of the logits (Gemma 2); None: none
    logit_scale              factor of the logits before the cap (Cohere; 1 / ``logits_scaling`` of Granite)
    mode                     "recompute": forward keeps the log-sum-exps and, until the next head's forward, one chunk's
                             logits; backward computes the other logits again, and any gradient may come. "in_forward":
                             forward computes all gradients from the only logits; see ``forward``'s ``grad_scale``
    chunk_tokens             tokens of a chunk at most
    fuse_wgrad_accumulation  the weight gradient goes into ``main_grad``, where a provider gave the weight one; without
                             a provider, and with False, autograd delivers it
    params_dtype, init_method, name   as ``te_integration.Linear``'s

    The weight gradient is computed in backward also inside ``delayed_wgrad(queue)``: what would wait is as large as
    the logits.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    reduction: Reduction = "mean"
    mode: Mode = "recompute"
    chunk_tokens: int = CHUNK_TOKENS
    fuse_wgrad_accumulation = True
    ignores_recipes = True
    num_products = 0
    needs_provider = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logit_softcap: float | None = None,
        logit_scale: float = 1.0,
        reduction: Reduction = "mean",
        mode: Mode = "recompute",
        chunk_tokens: int = CHUNK_TOKENS,
        fuse_wgrad_accumulation: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        init_method: InitMethod | None = None,
        name: str | None = None,
    ) -> None:
        _check_options(label_smoothing, logit_softcap, reduction, mode, chunk_tokens)
        super().__init__(in_features, out_features, bias, device, one_dtype("LinearCrossEntropy", dtype, params_dtype))
        if init_method is not None:
            self.init_method = init_method
            self.reset_parameters()
        self.ignore_index, self.label_smoothing, self.z_loss = ignore_index, label_smoothing, z_loss
        self.logit_softcap, self.logit_scale = logit_softcap, logit_scale
        self.reduction, self.mode, self.chunk_tokens = reduction, mode, chunk_tokens
        self.set_wgrad_options(fuse=fuse_wgrad_accumulation, delay=False, name=name)

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        *,
        num_tokens: Count | None = None,
        grad_scale: Count | None = None,
        reduction: Reduction | None = None,
        ignore_index: int | None = None,
    ) -> Tensor:
        """The loss; without ``targets`` the ``logits`` [..., V].

        num_tokens  divides the sum of "mean" in place of the number of this call's tokens: a number, or a tensor on the
                    device. For microbatches, and for ranks whose counts differ
        grad_scale  "in_forward": the gradient that backward will bring to the loss (1 without): a number, or a tensor
                    on the device, such as a ``GradScaler``'s scale
        reduction, ignore_index   in place of the module's own

        Raises ``ValueError`` for shapes and options that do not fit.
        """
        if targets is None:
            return self.logits(hidden)
        ignored = self.ignore_index if ignore_index is None else ignore_index
        terms = LossTerms(ignored, self.label_smoothing, self.z_loss, self.logit_softcap, self.logit_scale)
        return self.loss(hidden, targets, terms, reduction or self.reduction, num_tokens, grad_scale)

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        terms: LossTerms,
        how: Reduction,
        num_tokens: Count | None = None,
        grad_scale: Count | None = None,
    ) -> Tensor:
        """The loss by ``terms``, in place of the module's own options."""
        _check_call(self.describe, hidden, self.weight, targets, how, self.mode, num_tokens)

        def losses(rows: Tensor, flat: Tensor, announced: Tensor | None) -> Tensor:
            by = self._losses_in_trace if torch.compiler.is_compiling() else self._losses
            return by(rows, flat, announced, terms)

        return _loss(losses, hidden, self.weight, self.bias, targets, terms, how, self.mode, num_tokens, grad_scale)

    def _losses_in_trace(self, rows: Tensor, targets: Tensor, announced: Tensor | None, terms: LossTerms) -> Tensor:
        mode = mode_of(self, (self.weight,), None, 0)
        if mode == "break":
            outside: Tensor = run_outside_graph(LinearCrossEntropy._losses, self, rows, targets, announced, terms)
            return outside
        options = *terms, self.chunk_tokens
        tensors = rows, self.weight, self.bias, targets
        if mode == "autograd":
            return compiled_losses(*tensors, None, *options)
        if announced is None:
            return compiled_losses(*tensors, self._wgrad_key, *options)
        return compiled_losses_in_forward(*tensors, self._wgrad_key, announced, *options)

    def _losses(self, rows: Tensor, targets: Tensor, announced: Tensor | None, terms: LossTerms) -> Tensor:
        fused = self.fuse_wgrad_accumulation and _goes_into_main_grad(self.weight)
        use = self.use(0, (self.weight,), fused, None, computed_by=HeadWgrad)
        return _losses_by(use, rows, self.weight, self.bias, targets, announced, terms, self.chunk_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """``z`` of hidden states: [..., K] -> [..., V], in the dtype of the product."""
        output = self.multiply(hidden, (self.weight,), self.bias, None)
        return scaled_and_capped(output, LossTerms(logit_softcap=self.logit_softcap, logit_scale=self.logit_scale))

    @property
    def writes_in_forward(self) -> bool:
        """Whether forwards write ``main_grad``."""
        return self.mode == "in_forward"

    def delivery(self, weights: Any, queue: WgradQueue | None) -> tuple[bool, WgradQueue | None]:
        """As ``LinearModule``'s; without a provider autograd delivers."""
        if not all(has_main_grad(weight) for weight in weights):
            return False, None
        return super().delivery(weights, None)

    def queue_now(self) -> None:
        """The weight gradient is not delayed."""

    def sizes(self) -> str:
        """The sizes of the layer, by the names of the constructor's arguments."""
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def extra_repr(self) -> str:
        """The sizes, and what is not as by default."""
        options = (
            f", {name}={getattr(self, name)}"
            for name in ("ignore_index", "label_smoothing", "z_loss", "logit_softcap", "logit_scale")
            if getattr(self, name) != getattr(LinearCrossEntropy, name)
        )
        return (
            f"{self.sizes()}, bias={self.bias is not None}, reduction={self.reduction}, mode={self.mode}, "
            f"chunk_tokens={self.chunk_tokens}{''.join(options)}"
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: Reduction = "mean",
    mode: Mode = "recompute",
    chunk_tokens: int = CHUNK_TOKENS,
    num_tokens: Count | None = None,
    grad_scale: Count | None = None,
) -> Tensor:
    """``LinearCrossEntropy`` for a weight [V, K] that another module owns, such as a tied embedding.

    The weight gradient goes into the weight's ``main_grad`` where a provider gave it one. Call this in the forward of
    the module that owns the weight: sharded weights are whole there. Under ``torch.compile`` a weight with a
    ``main_grad`` is a graph break: use a ``LinearCrossEntropy`` with that weight in place of its own.
    """
    _check_options(label_smoothing, logit_softcap, reduction, mode, chunk_tokens)
    _check_call(lambda: "linear_cross_entropy", hidden, weight, targets, reduction, mode, num_tokens)
    terms = LossTerms(ignore_index, label_smoothing, z_loss, logit_softcap, logit_scale)

    def losses(rows: Tensor, flat: Tensor, announced: Tensor | None) -> Tensor:
        eager = rows, weight, bias, flat, announced, terms, chunk_tokens
        if not torch.compiler.is_compiling():
            return _function_losses(*eager)
        if _goes_into_main_grad(weight):
            outside: Tensor = run_outside_graph(_function_losses, *eager)
            return outside
        return compiled_losses(rows, weight, bias, flat, None, *terms, chunk_tokens)

    return _loss(losses, hidden, weight, bias, targets, terms, reduction, mode, num_tokens, grad_scale)


def _loss(
    losses: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    terms: LossTerms,
    how: Reduction,
    mode: Mode,
    num_tokens: Count | None,
    grad_scale: Count | None,
) -> Tensor:
    """The loss of a call that is checked.

    losses  of each token: of hidden states [T, K], targets [T] and the gradient that "in_forward" announces
    """
    rows, flat = _rows(hidden, targets)
    count = _count(flat, terms.ignore_index, num_tokens) if how == "mean" else None
    announced = _announced(rows, grad_scale, count) if mode == "in_forward" else None
    if in_transform():
        found = _plain_losses(rows, weight, bias, flat, terms)
    else:
        found = losses(rows, flat, announced)
    if how == "none":
        return found.view(targets.shape)
    total = found.sum()
    return total if count is None else total / count


def _function_losses(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    announced: Tensor | None,
    terms: LossTerms,
    chunk_tokens: int,
) -> Tensor:
    wgrad, fused = HeadWgrad((weight,)), _goes_into_main_grad(weight)
    use = ProductUse((weight,), ("weight",), wgrad, "linear_cross_entropy", fused=fused)
    return _losses_by(use, rows, weight, bias, targets, announced, terms, chunk_tokens)


def _losses_by(
    use: ProductUse,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    announced: Tensor | None,
    terms: LossTerms,
    chunk_tokens: int,
) -> Tensor:
    if announced is not None and can_write_in_forward(weight, use.fused):
        return losses_in_forward(rows, weight, bias, targets, announced, terms, chunk_tokens, use)
    return recomputed_losses(rows, weight, bias, targets, terms, chunk_tokens, use)


def _announced(rows: Tensor, grad_scale: Count | None, count: Count | None) -> Tensor:
    """The gradient of each token's loss, computed as autograd will compute it: 0-dim, fp32 (fp64 for fp64)."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    if isinstance(grad_scale, Tensor):
        scale = grad_scale.detach().to(rows.device, dtype).reshape(())
    else:
        scale = torch.full((), 1.0 if grad_scale is None else grad_scale, dtype=dtype, device=rows.device)
    return scale if count is None else scale / count


def _goes_into_main_grad(weight: Tensor) -> bool:
    return torch.is_grad_enabled() and is_fusable(weight) and has_main_grad(weight)


def _rows(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states [T, K] in the dtype of the products, and targets [T] in int64."""
    return rows_of(cast(hidden, dtype_of_products(hidden))), targets.reshape(-1).long()


def _plain_losses(rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, terms: LossTerms) -> Tensor:
    bias = None if bias is None else cast(bias, rows.dtype)
    return token_losses_reference(F.linear(rows, cast(weight, rows.dtype), bias), targets, terms)[0]


def _count(targets: Tensor, ignore_index: int, num_tokens: Count | None) -> Count:
    return (targets != ignore_index).sum() if num_tokens is None else num_tokens


def _check_options(
    label_smoothing: float, logit_softcap: float | None, reduction: str, mode: str, chunk_tokens: int
) -> None:
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap must be above 0, got {logit_softcap}")
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}; got {mode!r}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    _check_reduction(reduction, mode)


def _check_reduction(reduction: str, mode: str) -> None:
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction must be one of {', '.join(get_args(Reduction))}; got {reduction!r}")
    if reduction == "none" and mode == "in_forward":
        raise ValueError(
            'reduction="none" leaves the gradient of each token open until backward, and mode="in_forward" needs it in '
            'forward: use mode="recompute"'
        )


def _check_call(
    owner: Callable[[], str],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    reduction: str,
    mode: str,
    num_tokens: Count | None,
) -> None:
    _check_reduction(reduction, mode)
    if num_tokens is not None and reduction != "mean":
        raise ValueError(f'{owner()}: num_tokens divides the sum of reduction="mean"; here it is "{reduction}"')
    if hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(f"{owner()} takes {weight.shape[1]} features in the last dim, got {tuple(hidden.shape)}")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{owner()} needs targets {tuple(hidden.shape[:-1])} for hidden states {tuple(hidden.shape)}, "
            f"got {tuple(targets.shape)}"
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype is torch.bool:
        raise ValueError(f"{owner()} needs integers as targets, got {targets.dtype}")
    if hidden.dtype is not weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(
            f"{owner()}: the hidden states are {hidden.dtype} and the weight {weight.dtype}; cast one or use autocast"
        )
