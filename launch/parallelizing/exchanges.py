"""What the ranks that compute one sample exchange beside the products of their layers.

Context-parallel ranks have a part of each sequence. ``ulysses`` lets their attention see whole sequences, of some heads
(Jacobs et al., 2023). Tensor-parallel ranks have parts of the weights: ``draws_apart`` is for random numbers of what
they compute apart.

Legend: n ranks of the group, B sequences, H heads, T tokens of a whole sequence, C width of a head.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

__all__ = ["draws_apart", "ulysses"]


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


@contextmanager
def draws_apart(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Random numbers in this context differ between the ranks of ``group``; behind it they are equal again.

    The seed is drawn from the host's generator, so that recomputation draws the same numbers.
    """
    if group is None:
        yield
        return
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed + group.rank())
        yield


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
