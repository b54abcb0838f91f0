"""A small GPT: RMSNorm, rotary positions, grouped-query attention, and SwiGLU feed-forwards or experts.

Legend, used in every shape below:

    B  sequences          H  query heads            F  width of the feed-forward
    T  tokens             K  key and value heads    V  vocabulary
    D  width of the model C  width of one head (D = H * C)

The matrices are ``maingrad.te_integration.Linear``, the embedding is its ``Embedding``: with
``fuse_wgrad_accumulation`` their weight gradients go straight into ``main_grad``. Norms are ordinary modules, whose
gradients reach ``main_grad`` through the hook.
"""

import math
import re
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...te_integration import Embedding, Linear, LinearCrossEntropy, TokenDispatcher, WgradQueue, autocast
from ...te_integration.dense.products import Ranks
from ...te_integration.dense.tensor_parallel import from_rows
from ..config.mesh import WHOLE, Stage
from ..config.run import ModelConfig
from ..parallelizing.exchanges import ALONE, ContextRanks, ring_attention, ulysses
from .feed_forward import FeedForward, make_linear
from .loss import count_targets, find_padding, loss_in_chunks, mean_loss
from .moe import MixtureOfExperts, RouterStats, router_losses

__all__ = [
    "GPT",
    "Attention",
    "Block",
    "FeedForward",
    "LossParts",
    "build_model",
    "rotary_tables",
    "rotate",
]

_WRITES_TO_RESIDUAL = re.compile(r"attention\.out\.weight$|ffn\.(shared\.)?down\.weight$|ffn\.experts\.fc2_weight")


def rotary_tables(length: int, head_dim: int, base: float, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines, fp32 [T, C / 2] each, of ``position * base ** (-2 i / C)``. Su et al., 2021."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + C / 2) of the last dim of ``x`` [B, heads, T, C] by its position's angle -> fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention: each of K key and value heads serves H / K query heads. Ainslie et al., 2023."""

    def __init__(self, config: ModelConfig, device: torch.device | None, *, delay_wgrad: bool = False) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.dropout = config.num_heads, config.num_kv_heads, config.dropout
        kv_dim = config.num_kv_heads * config.head_dim
        self.split = [config.dim, kv_dim, kv_dim]
        self.qkv = make_linear(config, config.dim, sum(self.split), device, delay_wgrad)
        self.qkv.matrix_rows = self.split  # for Muon
        self.out = make_linear(config, config.dim, config.dim, device, delay_wgrad)
        self.context = ALONE
        """The ranks that have the other parts of the sequences."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """``x`` [B, T, D] -> [B, T, D]; ``cos`` and ``sin`` [T, C / 2]; ``mask`` [B, 1, T, T] bool, None: causal.

        With ``context`` T is that of this rank's part of the sequences, but in ``mask`` that of the whole ones.
        """
        q, k, v = self.qkv(x).split(self.split, dim=-1)
        q = rotate(rearrange(q, "b t (h c) -> b h t c", h=self.num_heads), cos, sin)
        k = rotate(rearrange(k, "b t (k c) -> b k t c", k=self.num_kv_heads), cos, sin)
        v = rearrange(v, "b t (k c) -> b k t c", k=self.num_kv_heads)
        # The CPU's attention kernel takes twice as long in bf16 as in fp32 (B 16, T 128, C 64: 14.7 against 7.9 ms).
        dtype = torch.float32 if x.device.type == "cpu" else x.dtype
        dropout = self.dropout if self.training else 0.0

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            gqa = k.shape[1] != q.shape[1]
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None, enable_gqa=gqa)

        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if self.context.ring and self.context.group is not None:
            mixed = ring_attention(q, k, v, self.context.group)
        else:
            mixed = ulysses(attend, q, k, v, self.context.group)
        y: Tensor = self.out(rearrange(mixed, "b h t c -> b t (h c)").to(x.dtype))
        return y


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``; dropout on both branches."""

    def __init__(
        self, config: ModelConfig, device: torch.device | None, *, has_experts: bool = False, delay_wgrad: bool = False
    ) -> None:
        super().__init__()
        dtype = config.dtype("param_dtype")
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6, device=device, dtype=dtype)
        self.attention = Attention(config, device, delay_wgrad=delay_wgrad)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-6, device=device, dtype=dtype)
        self.ffn: nn.Module
        if has_experts:
            self.ffn = MixtureOfExperts(config, device, delay_wgrad=delay_wgrad)
        else:
            self.ffn = FeedForward(config, config.ffn_dim, device, delay_wgrad=delay_wgrad)
        self.has_experts = has_experts
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        is_padding: Tensor | None = None,
    ) -> tuple[Tensor, RouterStats | None]:
        """``x`` [B, T, D] -> [B, T, D], and of a block with experts in training what its router's losses are made of.

        is_padding  [B, T] bool: what a block with experts leaves out
        """
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin, mask))
        normed = self.ffn_norm(x)
        y, stats = self.ffn(normed, is_padding) if self.has_experts else (self.ffn(normed), None)
        return x + self.dropout(y), stats


class LossParts(NamedTuple):
    """The parts of a training loss: fp32 scalars without a graph, on the model's device."""

    cross_entropy: Tensor
    """Mean cross-entropy in nats per token."""
    load_balancing: Tensor
    """Load-balancing loss, mean over the routers, without its coefficient; 1 at perfect balance."""
    router_z: Tensor
    """Router z-loss, mean over the routers, without its coefficient."""
    max_load: Tensor
    """Rows of the fullest expert of all routers, divided by the rows of an even share."""


class GPT(nn.Module):
    """Decoder-only language model.

    Parameters are made in ``config.param_dtype`` on ``device`` (``meta`` allocates nothing). The rotary tables stay in
    fp32. Weights are drawn by :meth:`reset_parameters` from torch's default generator.

    stage  what a pipeline's rank has of the model, under the names of the whole: its blocks; the embedding on the first
           stage, and where it is tied on the last one too; norm and head on the last one. What is not here is None
    """

    def __init__(self, config: ModelConfig, device: torch.device | None = None, stage: Stage = WHOLE) -> None:
        super().__init__()
        self.config, self.stage = config, stage
        dtype = config.dtype("param_dtype")
        fuse = config.fuse_wgrad_accumulation
        self.embedding: Any = Embedding(
            config.vocab_size, config.dim, device=device, dtype=dtype, fuse_wgrad_accumulation=fuse
        )
        self.dropout = nn.Dropout(config.dropout)
        first_delayed = config.num_layers - config.delay_wgrad_layers
        self.blocks = nn.ModuleList()
        for index in range(config.num_layers):  # the other stages' too: modules draw when they are made
            block = Block(config, device, has_experts=config.has_experts(index), delay_wgrad=index >= first_delayed)
            if index in stage.blocks(config.num_layers):
                self.blocks.add_module(str(index), block)
        self.norm: Any = nn.RMSNorm(config.dim, eps=1e-6, device=device, dtype=dtype)
        self.head: Any = _make_head(config, device)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
            self.head.mark_delayed_weights()
        if not (stage.is_first or (stage.is_last and config.tie_embeddings)):
            self.embedding = None
        if not stage.is_last:
            self.norm = self.head = None
        self.mark_shared_embedding()
        cos, sin = rotary_tables(config.context_length, config.head_dim, config.rotary_base, device)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)
        self.rotary_cos: Tensor
        self.rotary_sin: Tensor
        self.context = ALONE
        """The ranks that have the other parts of the sequences; ``share_sequences`` sets it."""
        self.tensor_ranks: Ranks | None = None
        """The ranks that have the other words' rows of embedding and head; ``cut_gpt`` sets it."""
        self.first_word = 0
        """The token id of this rank's first row."""
        self.loss_group: dist.ProcessGroup | None = None
        """The ranks whose losses are averaged: routers balance experts over the tokens of all of them."""
        self.loss_parts: LossParts | None = None
        """Parts of the loss of the last training forward with targets; None without experts."""
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw normal weights of standard deviation ``init_std``, as GPT-2 does.

        Matrices that write to the residual stream get ``init_std / sqrt(2 * layers)``.

        Weights are drawn in fp32 and then rounded: bf16 and fp32 models of one seed start from the same weights. A
        stage draws the other stages' weights too, and drops them.
        """
        device = self.rotary_cos.device
        if device.type == "meta":
            return
        residual_std = self.config.init_std / math.sqrt(2 * self.config.num_layers)
        own = dict(self.named_parameters())
        whole = self if self.stage.count == 1 else GPT(self.config, torch.device("meta"))
        for name, parameter in whole.named_parameters():
            if parameter.dim() < 2:
                continue
            std = residual_std if _WRITES_TO_RESIDUAL.search(name) else self.config.init_std
            # Drawn expert by expert, so that packed and discrete weights of one seed are the same.
            for place, matrix in enumerate(parameter if parameter.dim() == 3 else [parameter]):
                drawn = torch.randn(matrix.shape, device=device) * std
                if name in own:
                    own[name].view(-1, *matrix.shape)[place].copy_(drawn)

    def mark_shared_embedding(self) -> None:
        """Say of the embedding's weight that two stages have copies, where it is so."""
        if self.stage.count > 1 and self.config.tie_embeddings and self.embedding is not None:
            self.embedding.weight.shared_embedding = True

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    def share_sequences(self, context: ContextRanks) -> None:
        """From here on tokens and targets are this rank's part of sequences, as ``context.own`` has it."""
        for module in self.modules():
            if isinstance(module, GPT | Attention):
                module.context = context

    def share_experts(self, ranks: DeviceMesh | int, transport: str = "all_to_all") -> None:
        """Keep this rank's part of the experts: see ``MixtureOfExperts``."""
        dispatcher = None
        if not isinstance(ranks, int):
            dispatcher = TokenDispatcher(self.config.num_experts, ranks, transport)
        queue = WgradQueue(fill_waits=True)
        for block in self.blocks:
            if isinstance(block.ffn, MixtureOfExperts):
                block.ffn.share_experts(ranks, dispatcher, queue)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """``tokens`` [B, T] int64 -> logits [B, T, V], or with ``targets`` [B, T] the mean cross-entropy in nats, fp32.

        Between a pipeline's stages travel activations [B, T, D], in place of ``tokens`` and of the result. Under
        sequence parallelism they are this rank's part of T; each stage knows T from ``targets``.

        Negative targets do not count, and experts and their routers leave out padding: the places of a row behind its
        last target that counts. With ``positions`` [B, T] int64, which begin at 0 with each document, attention
        stays within documents; rotary positions are relative, so those of the sequence serve all documents. They are
        those of whole sequences where ranks share sequences. Logits of tensor-parallel ranks are those of their words.

        In training, the returned loss includes the losses of all routers; ``loss_parts`` holds the parts.
        Raises ``ValueError`` for sequences longer than ``context_length``.
        """
        length = (tokens if targets is None else targets).shape[1] * self.context.size
        if length > self.config.context_length:
            raise ValueError(
                f"a sequence of {length} tokens is longer than model.context_length = {self.config.context_length}"
            )
        cos, sin = (self.context.own(table[:length], 0) for table in (self.rotary_cos, self.rotary_sin))
        mask = None if positions is None else _within_documents(positions)
        is_padding = None if targets is None or not self.config.num_experts else find_padding(targets, self.context)
        x = self.dropout(self._embedded(tokens)) if self.stage.is_first else tokens
        routers: list[RouterStats] = []
        for block in self.blocks:
            x, stats = block(x, cos, sin, mask, is_padding)
            if stats is not None:
                routers.append(stats)
        if not self.stage.is_last:
            return x
        with autocast(enabled=False):  # recipes leave the head as it is: its errors are the loss's
            if targets is None:
                logits: Tensor = self.head(self.norm(x))
                return logits
            if not self.config.fused_loss:
                loss = mean_loss(self.head(self.norm(x)), targets, self.tensor_ranks, self.first_word)
            elif self.tensor_ranks is None:
                loss = self.head(self.norm(x), targets, num_tokens=count_targets(targets))
            else:
                loss = loss_in_chunks(self.head, self.norm(x), targets, self.tensor_ranks, self.first_word)
        if routers:
            of_routers = router_losses(routers, self.config, self.loss_group)
            self.loss_parts = LossParts(loss.detach(), *of_routers[1:])
            loss = loss + of_routers.weighted
        return loss

    def _embedded(self, tokens: Tensor) -> Tensor:
        """``tokens`` [B, T] -> [B, T, D]; under sequence parallelism this rank's part of T."""
        if self.tensor_ranks is None:
            whole: Tensor = self.embedding(tokens)
            return whole
        rows, own = self.embedding.num_embeddings, tokens - self.first_word
        # Other ranks' words get any rows: many of one row would make its gradient one long sum.
        found = self.embedding(own.remainder(rows)).masked_fill(((own < 0) | (own >= rows))[..., None], 0.0)
        return from_rows(found, self.tensor_ranks)


def _make_head(config: ModelConfig, device: torch.device | None) -> Linear | LinearCrossEntropy:
    """The last layer, ``weight`` [V, D]."""
    if not config.fused_loss:
        return make_linear(config, config.dim, config.vocab_size, device, config.delay_wgrad_layers > 0)
    return LinearCrossEntropy(
        config.dim,
        config.vocab_size,
        fuse_wgrad_accumulation=config.fuse_wgrad_accumulation,
        device=device,
        dtype=config.dtype("param_dtype"),
    )


def _within_documents(positions: Tensor) -> Tensor:
    """``positions`` [B, T] -> which keys each query sees, bool [B, 1, T, T]."""
    document = (positions == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


def build_model(config: ModelConfig, *, seed: int, device: torch.device | None = None, stage: Stage = WHOLE) -> GPT:
    """The model, or a stage of it, with weights drawn from ``seed``: the same on every rank, whatever the state of the
    default generator."""
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        return GPT(config, device, stage)
