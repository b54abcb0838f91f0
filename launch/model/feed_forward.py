"""The dense feed-forward part of a block, and the linear layer of all parts of the model.

Legend: D width of the model, F width of the feed-forward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...te_integration import Linear
from ..config.run import ModelConfig

__all__ = ["FeedForward", "make_linear"]


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020): ``down(silu(gate(x)) * up(x))``. One matrix holds gate and up."""

    def __init__(
        self, config: ModelConfig, ffn_dim: int, device: torch.device | None, *, delay_wgrad: bool = False
    ) -> None:
        super().__init__()
        self.gate_up = make_linear(config, config.dim, 2 * ffn_dim, device, delay_wgrad)
        self.down = make_linear(config, ffn_dim, config.dim, device, delay_wgrad)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., D] -> [..., D]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


def make_linear(
    config: ModelConfig,
    in_features: int,
    out_features: int,
    device: torch.device | None,
    delay_wgrad: bool,
    dtype: torch.dtype | None = None,
) -> Linear:
    """``Linear`` without bias, which computes weight gradients as ``config`` says.

    dtype  of the weight; None: ``config.dtype("param_dtype")``
    """
    return Linear(
        in_features,
        out_features,
        bias=False,
        device=device,
        dtype=config.dtype("param_dtype") if dtype is None else dtype,
        fuse_wgrad_accumulation=config.fuse_wgrad_accumulation,
        delay_wgrad_compute=delay_wgrad,
    )
