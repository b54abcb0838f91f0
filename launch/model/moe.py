"""Mixture of experts: a router sends each token to k of E feed-forwards and sums their weighted outputs.

Legend, used in every shape below:

    T  tokens of all sequences   E  experts              R  rows, T * k: one for each pair of a token and its expert
    D  width of the model        k  experts per token    F  width of one expert

The host reads nothing back: the numbers of rows of the experts stay on the device. All weight gradients go into
``main_grad``: one grouped product writes those of all experts, and a fused ``Linear`` writes the router's. The router
learns through the probabilities that multiply the experts' activations, and from its own two losses.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...te_integration import GroupedMLP, moe_permute_with_probs, moe_unpermute
from ..config.run import ModelConfig
from .feed_forward import FeedForward, make_linear

__all__ = ["MixtureOfExperts", "Router", "RouterLoss", "Routing", "load_balancing_loss", "router_z_loss"]


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


class RouterLoss(NamedTuple):
    """What one router adds to the training loss: fp32 scalars."""

    weighted: Tensor
    """Sum of both losses below times their coefficients; the only field with a graph."""
    load_balancing: Tensor
    z: Tensor
    max_load: Tensor
    """Rows of the fullest expert, divided by the rows of an even share."""


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
        self.aux_loss_coefficient = config.aux_loss_coefficient
        self.router_z_loss_coefficient = config.router_z_loss_coefficient
        self.router = Router(config, device, delay_wgrad=delay_wgrad)
        self.experts: nn.Module = GroupedMLP(
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

    def forward(self, x: Tensor, is_padding: Tensor | None = None) -> tuple[Tensor, RouterLoss | None]:
        """``x`` [..., D] -> [..., D], and in training the router's losses for these tokens.

        is_padding  [...] bool: these tokens go to no expert, and the router's losses leave them out. None: no token
        """
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.router(tokens)
        expert_ids = routing.expert_ids
        if is_padding is not None:
            is_padding = is_padding.reshape(-1)
            expert_ids = expert_ids.masked_fill(is_padding[:, None], self.num_experts)
        rows, row_probs, sorting = moe_permute_with_probs(tokens, routing.probs, expert_ids, self.num_experts)
        y = moe_unpermute(self.experts(rows, sorting.splits, row_probs), sorting).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        return y, self._losses(routing, sorting.splits, is_padding) if self.training else None

    def _losses(self, routing: Routing, splits: Tensor, is_padding: Tensor | None) -> RouterLoss:
        balance = load_balancing_loss(routing.all_probs, splits, is_padding)
        z = router_z_loss(routing.logits, is_padding)
        weighted = self.aux_loss_coefficient * balance
        if self.router_z_loss_coefficient:
            weighted = weighted + self.router_z_loss_coefficient * z
        max_load = splits.max() * self.num_experts / splits.sum().clamp(min=1)
        return RouterLoss(weighted, balance.detach(), z.detach(), max_load.float())


def load_balancing_loss(probs: Tensor, splits: Tensor, is_padding: Tensor | None = None) -> Tensor:
    """``E * sum over e of f_e P_e``, which is 1 at perfect balance and 0 without tokens.

    f_e is expert e's part of all rows, P_e is its mean probability.

    probs       [T, E]  fp32, over all experts
    splits      [E]     rows of each expert, integers: no gradient flows through them
    is_padding  [T]     bool: tokens that P_e leaves out; ``splits`` must not count them either

    This is the Switch Transformer's loss (Fedus et al., 2021), with f counted over the k choices of each token. The
    tokens are those of one microbatch on one rank.
    """
    share = splits.to(probs.dtype) / splits.sum().clamp(min=1)
    return probs.shape[1] * (share * _token_mean(probs, is_padding)).sum()


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
