"""Mixture of experts: a router sends each token to k of E feed-forwards and sums their weighted outputs.

Legend, used in every shape below:

    T  tokens of all sequences   E  experts              R  rows, T * k: one for each pair of a token and its expert
    D  width of the model        k  experts per token    F  width of one expert

The host reads nothing back: the numbers of rows of the experts stay on the device. All weight gradients go into
``main_grad``: one grouped product writes those of all experts, and a fused ``Linear`` writes the router's. The router
learns through the probabilities that multiply the experts' activations, and from its own two losses.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...te_integration import GroupedMLP, TokenDispatcher, WgradQueue, moe_permute_with_probs, moe_unpermute
from ...te_integration.dense.compiled_wgrad import run_outside_graph
from ..config.run import ModelConfig
from ..parallelizing.experts import keep_own
from .feed_forward import FeedForward, make_linear

__all__ = [
    "MixtureOfExperts",
    "Router",
    "RouterLoss",
    "RouterStats",
    "Routing",
    "load_balancing_loss",
    "router_losses",
    "router_z_loss",
]


class Routing(NamedTuple):
    """What a router chose."""

    expert_ids: Tensor
    """[T, k] int64; the k experts of a token are distinct."""
    probs: Tensor
    """[T, k] fp32: the factor that multiplies each chosen expert's output."""
    all_probs: Tensor
    """[T, E] fp32; each row sums to 1."""
    logits: Tensor
    """[T, E] fp32."""


class RouterStats(NamedTuple):
    """What a router's losses are made of, over the tokens of one microbatch on this rank that are no padding."""

    splits: Tensor
    """[E] int64: rows of each expert."""
    mean_probs: Tensor
    """[E] fp32, with a graph."""
    z: Tensor
    """The router z-loss, with a graph."""


class RouterLoss(NamedTuple):
    """What the routers add to the training loss: fp32 scalars."""

    weighted: Tensor
    """Sum over the routers of both losses below times their coefficients; the only field with a graph."""
    load_balancing: Tensor
    """Mean over the routers, as the next one."""
    z: Tensor
    max_load: Tensor
    """Rows of the fullest expert of all routers, divided by the rows of an even share."""


class Router(nn.Module):
    """``softmax(x W^T)`` over E experts; each token takes its k most probable experts. Shazeer et al., 2017.

    The product is computed in ``config.router_dtype``, the rest in fp32. With ``config.normalize_top_k`` the k
    probabilities are divided by their sum; then ``config.top_k_scaling_factor`` multiplies them.
    """

    def __init__(self, config: ModelConfig, device: torch.device | None, *, delay_wgrad: bool = False) -> None:
        super().__init__()
        self.top_k, self.normalize, self.scale = config.top_k, config.normalize_top_k, config.top_k_scaling_factor
        dtype = config.dtype("router_dtype")
        self.linear = make_linear(config, config.dim, config.num_experts, device, delay_wgrad, dtype)

    def forward(self, x: Tensor) -> Routing:
        """``x`` [T, D]."""
        logits = self.linear(x.to(self.linear.weight.dtype))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        all_probs = logits.softmax(-1)
        probs, expert_ids = all_probs.topk(self.top_k, sorted=False)
        if self.normalize:
            probs = probs / probs.sum(-1, keepdim=True)
        if self.scale != 1.0:
            probs = probs * self.scale
        return Routing(expert_ids, probs, all_probs, logits)


class MixtureOfExperts(nn.Module):
    """``y[t] = sum over the chosen e of p[t, e] W2_e swiglu(W1_e x[t])``, plus a shared feed-forward of all tokens.

    The factor p multiplies the activations between the two products: the activation kernel passes over these rows
    anyway. No token is dropped.
    """

    def __init__(self, config: ModelConfig, device: torch.device | None, *, delay_wgrad: bool = False) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.dispatcher: TokenDispatcher | None = None
        """Brings tokens to the ranks of their experts; None: ``experts`` are all there are."""
        self.router = Router(config, device, delay_wgrad=delay_wgrad)
        self.experts = GroupedMLP(
            config.num_experts,
            config.dim,
            config.expert_ffn_dim,
            bias=False,
            single_grouped_weight=config.single_grouped_weight,
            fuse_wgrad_accumulation=config.fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad,
            dtype=config.dtype("param_dtype"),
            device=device,
        )
        self.shared: FeedForward | None = None
        if config.shared_expert_ffn_dim:
            self.shared = FeedForward(config, config.shared_expert_ffn_dim, device, delay_wgrad=delay_wgrad)

    def share_experts(self, ranks: DeviceMesh | int, dispatcher: TokenDispatcher | None, queue: WgradQueue) -> None:
        """Keep this rank's part of the experts: ``ranks`` send each other tokens.

        ranks, dispatcher  a number and None only for a plan, which runs no forward
        queue              of experts that delay their weight gradients: one of all blocks, so that the waits of one
                           block's backward compute those of the block behind it
        """
        keep_own(self.experts, self.experts.weight_names, ranks)
        self.experts.num_gemms //= ranks if isinstance(ranks, int) else ranks.size()
        if self.experts.wgrad_queue is not None:
            self.experts.wgrad_queue = queue
        self.dispatcher = dispatcher

    @property
    def has_part(self) -> bool:
        """Whether other ranks have the rest of the experts."""
        return self.experts.num_gemms < self.num_experts

    def forward(self, x: Tensor, is_padding: Tensor | None = None) -> tuple[Tensor, RouterStats | None]:
        """``x`` [..., D] -> [..., D], and in training what the router's losses are made of.

        is_padding  [...] bool: these tokens go to no expert, and the router's losses leave them out. None: no token
        """
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.router(tokens)
        expert_ids = routing.expert_ids
        if is_padding is not None:
            is_padding = is_padding.reshape(-1)
            expert_ids = expert_ids.masked_fill(is_padding[:, None], self.num_experts)
        chosen = tokens, expert_ids, routing.probs
        if torch.compiler.is_compiling() and not self._sends_in_graph():
            y, splits = run_outside_graph(MixtureOfExperts._of_experts, self, *chosen)
        else:
            y, splits = self._of_experts(*chosen)
        y = y.view_as(x)
        if not self.training:
            return y, None
        mean_probs = _token_mean(routing.all_probs, is_padding)
        return y, RouterStats(splits, mean_probs, router_z_loss(routing.logits, is_padding))

    def _sends_in_graph(self) -> bool:
        return self.dispatcher is None or self.dispatcher.runs_in_graph(self.experts.queue_now())

    def _of_experts(self, tokens: Tensor, expert_ids: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """``y`` [T, D], and the rows of each expert that this rank's tokens make."""
        if self.dispatcher is None:
            rows, row_probs, sorting = moe_permute_with_probs(tokens, probs, expert_ids, self.num_experts)
            y = moe_unpermute(self.experts(rows, sorting.splits, row_probs), sorting)
            return y if self.shared is None else y + self.shared(tokens), sorting.splits
        meanwhile = None if self.shared is None else partial(self.shared, tokens)
        rows, splits, travelled, sent = self.dispatcher.dispatch(
            tokens, expert_ids, probs, queue=self.experts.queue_now(), meanwhile=meanwhile
        )
        y = self.dispatcher.combine(self.experts(rows, splits, travelled), sent)
        return y if self.shared is None else y + sent.meanwhile, sent.sorting.splits


def router_losses(
    stats: Sequence[RouterStats], config: ModelConfig, group: dist.ProcessGroup | None = None
) -> RouterLoss:
    """The losses of all routers of a forward. Collective over ``group``: those ranks' tokens count as one microbatch.

    Each rank's gradient is its part: losses of the ranks are averaged, by the numbers of their tokens.
    """
    splits, mean_probs, z = map(torch.stack, zip(*stats, strict=True))
    if group is not None:
        dist.all_reduce(splits, group=group)
    balance = load_balancing_loss(mean_probs, splits)
    weighted = config.aux_loss_coefficient * balance.sum()
    if config.router_z_loss_coefficient:
        weighted = weighted + config.router_z_loss_coefficient * z.sum()
    loads = splits.amax(1) * config.num_experts / splits.sum(1).clamp(min=1)
    return RouterLoss(weighted, balance.detach().mean(), z.detach().mean(), loads.max().float())


def load_balancing_loss(mean_probs: Tensor, splits: Tensor) -> Tensor:
    """``E * sum over e of f_e P_e``, which is 1 at perfect balance and 0 without tokens.

    f_e is expert e's part of all rows, P_e is its mean probability.

    mean_probs  [..., E]  fp32, over all experts
    splits      [..., E]  rows of each expert, integers: no gradient flows through them

    This is the Switch Transformer's loss (Fedus et al., 2021), with f counted over the k choices of each token.
    """
    share = splits.to(mean_probs.dtype) / splits.sum(-1, keepdim=True).clamp(min=1)
    return splits.shape[-1] * (share * mean_probs).sum(-1)


def router_z_loss(logits: Tensor, is_padding: Tensor | None = None) -> Tensor:
    """Mean over tokens of ``logsumexp(logits)^2`` for logits [T, E]; keeps logits small. ST-MoE, Zoph et al., 2022.

    is_padding  [T] bool: tokens that the mean leaves out; the mean of no token is 0
    """
    return _token_mean(logits.logsumexp(-1).square(), is_padding)


def _token_mean(values: Tensor, is_padding: Tensor | None) -> Tensor:
    """Mean of ``values`` [T, ...] over the tokens that are no padding."""
    if is_padding is None:
        return values.mean(0)
    kept = values.masked_fill(is_padding.view(-1, *[1] * (values.dim() - 1)), 0.0)
    return kept.sum(0) / is_padding.logical_not().sum().clamp(min=1)
