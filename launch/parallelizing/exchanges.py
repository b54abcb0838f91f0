"""What context-parallel ranks exchange for attention.

Context-parallel ranks have a part of each sequence. ``ulysses`` lets their attention see whole sequences, of some heads
(Jacobs et al., 2023). In ``ring_attention`` keys and values travel (Liu et al., 2023).

Legend: n ranks of the group, B sequences, H heads, T tokens of a whole sequence, C width of a head.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from ...kernels.compat import on_first_use

__all__ = ["ALONE", "ContextRanks", "ring_attention", "ulysses"]

_RING = "torch.distributed.tensor.experimental._context_parallel._attention._templated_ring_attention"
_LOSS = 'mesh.cp_attention = "ring" has no attention'
_ring, _ring_backward = on_first_use(_RING, loss=_LOSS), on_first_use(f"{_RING}_backward", loss=_LOSS)


class ContextRanks(NamedTuple):
    """The ranks that have parts of the same sequences."""

    group: dist.ProcessGroup | None = None
    ring: bool = False
    """Attention is ``ring_attention``: a rank has a part from the front and one from the back."""

    @property
    def size(self) -> int:
        """Number of parts."""
        return 1 if self.group is None else self.group.size()

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of ``x`` along ``dim``, that of sequences."""
        if self.group is None:
            return x
        rank = self.group.rank()
        if not self.ring:
            return x.chunk(self.size, dim)[rank]
        parts = x.chunk(2 * self.size, dim)
        return torch.cat((parts[rank], parts[-1 - rank]), dim)


ALONE = ContextRanks()
"""Each rank has whole sequences."""


def ulysses(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Attention over whole sequences, of which each rank of ``group`` has a part -> [B, H, T / n, C]. Collective.

    attend  maps ``q`` [B, H / n, T, C] with ``k`` and ``v`` of as many heads, or of fewer that serve several of ``q``,
            to [B, H / n, T, C]: it sees all tokens, in their order, so that causal masks and others are as without
            ranks. Heads are independent in it
    q       [B, H, T / n, C]: this rank's part, the rank-th of n equal ones, with rotary positions of the whole sequence
    k, v    the same with H heads, or a divisor of H
    group   the context-parallel ranks; None, or a group of one: ``attend(q, k, v)``

    In backward the same exchanges run in reverse. Gradients of weights are of this rank's tokens: the wrapper's ranks
    are the data-parallel and the context-parallel ones together, ``mesh["dp", "cp"]._flatten()``, whose losses are
    averaged.

    Raises ``ValueError`` if the group's size does not divide the heads of ``q``.
    """
    if group is None or group.size() == 1:
        return attend(q, k, v)
    size, heads, kv_heads = group.size(), q.shape[1], k.shape[1]
    if heads % size:
        raise ValueError(
            f"{heads} heads do not divide among {size} context-parallel ranks: take as many ranks as divide the heads"
        )
    if kv_heads % size:  # several ranks need one of them: a copy for each, whose gradients autograd adds
        copies = math.lcm(kv_heads, size) // kv_heads
        k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
    q, k, v = (_exchange(rearrange(x, "b (n h) t c -> n b h t c", n=size), group) for x in (q, k, v))
    q, k, v = (rearrange(x, "n b h t c -> b h (n t) c") for x in (q, k, v))
    mixed = attend(q, k, v)
    return rearrange(_exchange(rearrange(mixed, "b h (n t) c -> n b h t c", n=size), group), "n b h t c -> b (n h) t c")


def ring_attention(q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Causal attention, whose keys and values travel from rank to rank -> [B, H, T / n, C]. Collective.

    q, k, v  [B, H, T / n, C], k and v of as many heads or a divisor: this rank's part, as ``ContextRanks.own`` has it.
             A causal mask then costs all ranks the same

    It is torch's, of ``torch.distributed.tensor.experimental.context_parallel``, with the flash kernels of the device.

    Raises ``TypeError`` on a GPU for other dtypes than bfloat16 and float16.
    """
    if q.is_cuda and q.dtype.itemsize != 2:
        raise TypeError(f"ring attention multiplies bfloat16 or float16 on a GPU, got {q.dtype}")
    copies = q.shape[1] // k.shape[1]
    mixed: Tensor = _Ring.apply(q, k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1), group)
    return mixed


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``parts`` [n, ...]: each rank sends its r-th part to rank r, and gets as its r-th that of rank r."""
    received: Tensor = _Exchange.apply(parts, group)
    return received


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _exchange(dy, ctx.group), None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        aten = torch.ops.aten
        attend = aten._scaled_dot_product_flash_attention
        if not q.is_cuda:
            attend = aten._scaled_dot_product_flash_attention_for_cpu
        mixed, lse, *rest = _ring()(group, 2, attend, query=q, key=k, value=v, is_causal=True, dropout_p=0.0)
        ctx.save_for_backward(q, k, v, mixed, lse)
        names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
        ctx.group, ctx.rest = group, dict(zip(names, rest, strict=False))  # of the GPU's kernel
        found: Tensor = mixed
        return found

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mixed, lse = ctx.saved_tensors
        aten = torch.ops.aten
        attend = aten._scaled_dot_product_flash_attention_backward
        if not q.is_cuda:
            attend = aten._scaled_dot_product_flash_attention_for_cpu_backward
        operands = {"query": q, "key": k, "value": v, "out": mixed, "logsumexp": lse, "grad_out": dy.contiguous()}
        options = {"grad_out_name": "grad_out", "is_causal": True, "dropout_p": 0.0}
        grads = _ring_backward()(ctx.group, 2, attend, **operands, **options, **ctx.rest)
        return *grads[:3], None
