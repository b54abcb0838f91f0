"""Experts on a mesh of their own: sharded over ranks that hold the same ones, averaged over all that have tokens."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import FEATURES, make
from sharded_twin import assert_same_grads, batches_of, mean_loss, no_sync, plain_grads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.fsdp import fully_shard
from maingrad.launch import simulate


class Mixture(nn.Module):
    """A layer around experts, of which each rank has one variant; the experts' own exchange of tokens is left out."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(5, FEATURES)
        self.experts = experts
        self.last = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.experts(self.first(x).tanh()))


def plain_experts(variant: int) -> nn.Module:
    torch.manual_seed(100 + variant)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, FEATURES))


def build(variant: int, kind: str, fuse: bool) -> Mixture:
    experts = plain_experts(variant) if kind == "plain" else make(kind, fuse=fuse, seed=100 + variant)
    torch.manual_seed(0)
    return Mixture(experts)


def run(model: nn.Module, batches: Any) -> None:
    for index, batch in enumerate(batches):
        loss = mean_loss(model(batch)) / len(batches)
        if index < len(batches) - 1:
            with no_sync(model):
                loss.backward()
        else:
            loss.backward()


def expert_mesh(size: int, num_variants: int, instances: int) -> Any:
    """Ranks r, r + num_variants, ... hold the same experts; in so many instances."""
    shape = (instances, size // num_variants // instances, num_variants)
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner", "variant"))["outer", "inner"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("size", "num_variants", "instances", "row"),
    [(4, 2, 1, "zero3"), (4, 4, 1, "zero3"), (4, 2, 1, "zero2"), (8, 2, 2, "hsdp"), (8, 2, 2, "hsdp_zero1")],
)
@pytest.mark.parametrize("kind", ["plain", "GroupedLinear", "packed GroupedMLP"])
def test_experts_have_seen_all_ranks_tokens(kind: str, size: int, num_variants: int, instances: int, row: str) -> None:
    def on_each_rank() -> None:
        rank = dist.get_rank()
        variant = rank % num_variants
        model = build(variant, kind, fuse=True)
        twins = [build(other, kind, fuse=False) for other in range(num_variants)]
        if row.startswith("hsdp"):
            dense: Any = init_device_mesh("cpu", (instances, size // instances))
            mesh: Any = expert_mesh(size, num_variants, instances)
        else:
            dense = None
            members = [list(range(first, size, num_variants)) for first in range(num_variants)]
            mesh = [dist.new_group(ranks) for ranks in members][variant]
        fully_shard(model.experts, mesh=mesh, placements=row)
        fully_shard(model, mesh=dense, placements=row)
        for step in range(2):
            run(model, batches_of(rank, 2, step=step, dtype=torch.float32))
            sums: dict[str, Tensor] = {}
            for other in range(size):
                twin = twins[other % num_variants]
                twin.zero_grad()
                grads = plain_grads(twin, run, [batches_of(other, 2, step=step, dtype=torch.float32)])
                for name, grad in grads.items():
                    if name.startswith("experts") and other % num_variants != variant:
                        continue
                    sums[name] = sums.get(name, torch.zeros(())) + grad / size
            assert_same_grads(model, sums, 2e-6)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            optimizer.step()
            optimizer.zero_grad()

    simulate(on_each_rank, size)
