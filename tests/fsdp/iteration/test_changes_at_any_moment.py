"""A model that a program changes at any moment after ``fully_shard``: plain PyTorch's weights, or a refusal that names
the parameter before a wrong step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from changing import CHANGES, MOMENTS, outcome, sharded_run, unfreeze
from torch import Tensor, nn

from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (2, {"placements": "zero1"}),
    "zero2": (2, {"placements": "zero2"}),
    "zero3": (2, {"placements": "zero3"}),
    "zero3, once": (2, {"placements": "zero3", "reduce_every_microbatch": False}),
    "hsdp": (4, {"placements": "hsdp"}),
    "by a method": (2, {"placements": "zero2", "by_method": True}),
}
"""On how many ranks, and how."""


@pytest.mark.sampled(14)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_served_as_plain_pytorch_serves_it_or_refused_by_name(
    change: Callable[[nn.Module], None], moment: str, way: str
) -> None:
    ranks, options = WAYS[way]
    found = outcome(sharded_run(**options), change, moment, ranks=ranks)
    if not CHANGES[change]:
        assert found == "served"


@pytest.mark.parametrize("way", ["zero2", "zero3"])
def test_unfreezing_between_microbatches_is_refused(way: str) -> None:
    def on_rank() -> None:
        run = sharded_run(way)()
        with run.no_sync():
            run.loss_of(torch.ones(2, 6)).backward()
        unfreeze(run.module)
        with pytest.raises(RuntimeError, match=r"parameter 'frozen.\w+' was unfrozen .* after fully_shard"):
            run.loss_of(torch.ones(2, 6))

    simulate(on_rank, 2)


def test_a_parameter_that_replaces_a_whole_one_is_not_lost_silently() -> None:
    """``reshard()`` registers the shards again, and would leave the program with the old values."""

    def on_rank() -> None:
        run = sharded_run("zero3")()
        with run.module.unsharded():
            run.module.middle.weight = nn.Parameter(torch.zeros(6, 6))
        with pytest.raises(RuntimeError, match=r"parameter 'middle.weight' was replaced after fully_shard"):
            run.loss_of(torch.ones(2, 6))
        with pytest.raises(RuntimeError, match=r"parameter 'middle.weight' was replaced"), run.module.unsharded():
            pass

    simulate(on_rank, 2)


class ReplacesOnce(nn.Module):
    """Its first forward gives it another weight, as a lazy initialisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.replaced = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.replaced:
            self.weight, self.replaced = nn.Parameter(torch.zeros(3)), True
        return x * self.weight


def test_a_unit_that_replaces_its_parameter_and_runs_again_is_refused() -> None:
    """The second forward has registered the unit's own parameters again."""
    block = fully_shard(ReplacesOnce())
    model: Any = fully_shard(nn.Sequential(block, block))
    loss = model(torch.ones(2, 3)).sum()
    with pytest.raises(RuntimeError, match=r"parameter '0.weight' was replaced after fully_shard"):
        loss.backward()
    with pytest.raises(RuntimeError, match=r"parameter '0.weight' was replaced after fully_shard"):
        model(torch.ones(2, 3))
