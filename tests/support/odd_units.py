"""A model of odd shapes as units of this library, and of PyTorch's FSDP2."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

from maingrad.fsdp import MixedPrecisionPolicy, fully_shard


class Odd(nn.Module):
    """Rows that ranks do not divide, fewer rows than ranks, three dims, a tied and a frozen parameter, a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(11, 7)
        self.up = nn.Linear(7, 15)
        self.down = nn.Linear(15, 7, bias=False)
        self.cube = nn.Parameter(torch.randn(2, 5, 3))
        self.fixed = nn.Parameter(torch.randn(7), requires_grad=False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.full((3,), float(seed)))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens) + self.fixed
        return self.head(hidden + self.down(self.up(hidden).tanh()) * self.cube.mean())


def mesh_for(placement: str) -> DeviceMesh | None:
    if not placement.startswith("hsdp"):
        return None
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))


def shard(model: nn.Module, placement: str = "zero3", mesh: DeviceMesh | None = None) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (model.up, model):
        fully_shard(module, mesh=mesh, placements=placement, mixed_precision=policy)
    return model


def shard_by_torch(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    for module in (model.up, model):
        torchs_fully_shard(module, mesh=mesh)
    return model
