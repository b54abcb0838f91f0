"""``Embedding``: an ``nn.Embedding`` whose weight gradient goes into ``main_grad`` row by row.

autograd's gradient of an embedding is a dense tensor [V, D], of which a microbatch fills as many rows as it has ids; a
hook then adds all of it to ``main_grad``. Here backward sums the rows of each id right into ``main_grad``.

An embedding is the linear layer of a one-hot input, whose weight gradient has another product. So this module is a
``LinearModule``, and delivers its gradient as the others do. Legend: T tokens (all dims of the input), V ids, D
features.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ddp.torch_internals import current_backward
from ...kernels import embedding_wgrad_accumulate
from ...kernels.permutation.reference import embedding_grad
from .compiled_wgrad import mode_of, run_outside_graph, wgrad
from .hugging_face import MadeClass, is_of_transformers
from .linear import LinearModule, ProductUse, wanted_and_places, weight_grads

__all__ = ["Embedding", "calls_embedding_forward", "fused_embedding_class", "why_autograd"]


class EmbeddingWgrad:
    """``dW[v] = sum of dy[t] over the tokens t of id v``: the ``WgradProduct`` of an embedding."""

    rows_apart = False

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._vocabulary = weights[0].shape[0]

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """See ``WgradProduct``: a vocabulary may grow."""
        return weights[0].shape[0] == self._vocabulary

    def accumulate(
        self, main_grads: Sequence[Tensor | None], overwrite: Sequence[bool], dy: Tensor, tokens: Tensor
    ) -> None:
        """See ``WgradProduct``: dy [T, D]; tokens [T], of which negative ones add nothing."""
        (main_grad,) = main_grads
        assert main_grad is not None, "the only weight has a place, or nothing is delivered"
        embedding_wgrad_accumulate(dy, tokens, main_grad, overwrite=overwrite[0])

    def gradients(self, wanted: Sequence[bool], dtype: torch.dtype, dy: Tensor, tokens: Tensor) -> list[Tensor | None]:
        """See ``WgradProduct``: the dense gradient."""
        return [embedding_grad(dy, tokens, self._vocabulary).to(dtype) if wanted[0] else None]


class Embedding(LinearModule, nn.Embedding):
    """``y = W[x]``, with ``main_grad[v] += sum of dy over the tokens of id v``.

    =========  =========  ========================================
    x          [...]      token ids, int32 or int64
    weight     [V, D]     ``nn.Embedding``'s own
    y          [..., D]   output
    =========  =========  ========================================

    Backward writes ``dW`` to ``weight.main_grad``. The first write of an iteration sets rows without a token to 0;
    later ones touch only the rows of their tokens. Sums are fp32 (fp64 for fp64), in the order of the tokens, without
    atomic additions: equal inputs give equal bits.

    fuse_wgrad_accumulation  True: write the weight gradient to ``weight.main_grad``, which a provider attaches before
                             the first backward; backward raises ``RuntimeError`` without it. False: autograd delivers
                             the weight gradient
    name                     the layer's name in error messages

    Other arguments are ``nn.Embedding``'s. With ``sparse=True`` or ``scale_grad_by_freq=True`` autograd delivers the
    gradient, fused or not. Blocks of ``delayed_wgrad`` delay no embedding: nothing waits for its gradient.
    """

    ignores_recipes = True
    num_products = 0
    wgrad_product = EmbeddingWgrad
    slices = "shown"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        fuse_wgrad_accumulation: bool = False,
        name: str | None = None,
    ) -> None:
        options = padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        super().__init__(num_embeddings, embedding_dim, *options, _weight, _freeze, device, dtype)
        self.set_wgrad_options(fuse=fuse_wgrad_accumulation, delay=False, name=name)

    def forward(self, input: Tensor) -> Tensor:
        """Ids [...] -> [..., D]."""
        output = None
        if self.fuse_wgrad_accumulation and why_autograd(self) is None:
            in_trace = torch.compiler.is_compiling()
            output = self._look_up_in_trace(input) if in_trace else self._look_up(input)
        return super().forward(input) if output is None else output

    def fused_wgrad_weights(self) -> Iterable[str]:
        """The weight, if it is fused."""
        return super().fused_wgrad_weights() if why_autograd(self) is None else ()

    def _look_up(self, input: Tensor) -> Tensor | None:
        """The output, whose backward writes ``main_grad``. None: plain autograd computes it."""
        weights = (self.weight,)
        fused, _ = self.delivery(weights, None)
        if not fused:
            return None
        use = self.use(0, weights, fused, None)
        output: Tensor = _apply_directly(input, use, self.padding_idx, self.max_norm, self.norm_type, *weights)
        return output

    def _look_up_in_trace(self, input: Tensor) -> Tensor | None:
        """``_look_up`` in code that a compiler traces."""
        mode = mode_of(self, (self.weight,), None, 0)
        if mode == "autograd":
            return None
        if mode == "break" or self.max_norm is not None:
            broken: Tensor | None = run_outside_graph(Embedding._look_up, self, input)
            return broken
        output: Tensor = compiled_embedding(input, self.weight, self._wgrad_key, self.padding_idx)
        return output

    def sizes(self) -> str:
        """The sizes of the layer, by the names of the constructor's arguments."""
        return f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}"

    def extra_repr(self) -> str:
        """``nn.Embedding``'s, and what happens to the weight gradient."""
        return f"{nn.Embedding.extra_repr(self)}, fuse_wgrad_accumulation={self.fuse_wgrad_accumulation}"


def why_autograd(module: nn.Embedding) -> str | None:
    """The option that leaves the gradient to autograd, or None."""
    return next((name for name in ("sparse", "scale_grad_by_freq") if getattr(module, name)), None)


def _operands(dy: Tensor, tokens: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    """dy [T, D] and tokens [T], with -1 for padding."""
    ids = tokens.reshape(-1)
    if padding_idx is not None:
        ids = ids.masked_fill(ids == padding_idx, -1)
    return dy.reshape(ids.shape[0], dy.shape[-1]), ids


class _FusedEmbedding(torch.autograd.Function):
    """``apply`` takes tokens, use, padding_idx, max_norm, norm_type, and the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        use: ProductUse,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        weight: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.use, ctx.padding_idx, ctx.weight_dtype = use, padding_idx, weight.dtype
        # A forward inside a backward is a reentrant recompute; its nested backward counts as part of the outer one.
        ctx.outer_backward = current_backward()
        return F.embedding(tokens, weight, padding_idx, max_norm, norm_type)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted, places = wanted_and_places(ctx, ctx.needs_input_grad[-1:])
        (tokens,) = ctx.saved_tensors
        operands = _operands(grads[0], tokens, ctx.padding_idx)
        return (None,) * 5 + tuple(weight_grads(ctx, wanted, places, operands))


_apply_directly = super(torch.autograd.Function, _FusedEmbedding).apply  # as in ``linear.py``


def compiled_embedding(tokens: Tensor, weight: Tensor, key: Tensor, padding_idx: int | None) -> Tensor:
    """``W[x]`` inside a graph.

    key  of the module: ``WgradHandle.key``
    """
    output: Tensor = _CompiledEmbedding.apply(tokens, key, padding_idx, weight)
    return output


torch.compiler.allow_in_graph(compiled_embedding)  # as ``compiled_linear``


class _CompiledEmbedding(torch.autograd.Function):
    """See ``compiled_embedding``."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, key: Tensor, padding_idx: int | None, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, key)
        ctx.padding_idx = padding_idx
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        tokens, key = ctx.saved_tensors
        if ctx.needs_input_grad[-1]:
            assert wgrad is not None, "can_compile was asked"
            wgrad(list(_operands(grads[0], tokens, ctx.padding_idx)), key, 0)
        return (None,) * 4


# ---- Hugging Face's subclasses of nn.Embedding, which scale the output, or shift the ids. ----


def calls_embedding_forward(cls: type) -> bool:
    """Whether ``cls`` is ``nn.Embedding``, or a subclass of transformers' that calls the forward of the class above it.

    Only such a forward may be fused by a class between: see ``fused_embedding_class``.
    """
    if cls is nn.Embedding:
        return True
    below = cls.__mro__[: cls.__mro__.index(nn.Embedding)] if nn.Embedding in cls.__mro__ else ()
    return bool(below) and all(is_of_transformers(each) and _calls_super(vars(each).get("forward")) for each in below)


def _calls_super(forward: Any) -> bool:
    code = getattr(forward, "__code__", None)
    return forward is None or (code is not None and "__class__" in code.co_freevars and "forward" in code.co_names)


@functools.cache
def fused_embedding_class(base: type) -> type[nn.Module]:
    """The fused class of ``base``, for which ``calls_embedding_forward``.

    Of a subclass it is one in which ``Embedding`` stands between ``base`` and ``nn.Embedding``: the forward of ``base``
    runs as it is, and what it calls by ``super()`` is the fused one.
    """
    if base is nn.Embedding:
        return Embedding
    members = {"_unfused": base, "_made_by": (fused_embedding_class, base), "__doc__": base.__doc__}
    return type(f"Fused{base.__name__}", (MadeClass, base, Embedding), members)
