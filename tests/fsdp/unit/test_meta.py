"""Models that are made on the meta device, and become memory as their units are made."""

from typing import Any

import pytest
import torch
from modules import FEATURES, make
from sharded_twin import (
    KINDS,
    Net,
    assert_same_weights,
    batches_of,
    mean_loss,
    options_of,
    rank_and_size,
    shard_blocks,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.fsdp import fully_shard
from maingrad.launch import simulate


def on_meta(make_model: Any) -> Any:
    with torch.device("meta"):
        return make_model()


def ones(module: nn.Module) -> None:
    """Initialises a module's own parameters and buffers."""
    with torch.no_grad():
        for number, tensor in enumerate((*module.parameters(recurse=False), *module.buffers(recurse=False))):
            tensor.fill_(1.0 + number)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(3)
def test_parameters_are_those_of_init_fn(kind: str) -> None:
    def on_each_rank() -> None:
        twin = Net()
        for module in twin.modules():
            ones(module)
        model = on_meta(Net)
        shard_blocks(
            model,
            device="cpu" if kind in ("alone", "zero1", "zero2", "zero3") else None,
            init_fn=ones,
            **options_of(kind),
        )
        assert_same_weights(model, twin)
        mean_loss(model(torch.ones(2, 5))).backward()

    if KINDS[kind]:
        simulate(on_each_rank, KINDS[kind])
    else:
        on_each_rank()


def test_parameters_are_those_of_reset_parameters_and_the_first_ranks() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 4)
            self.norm = nn.BatchNorm1d(4)
            self.scale = nn.Parameter(torch.empty(()))

        def reset_parameters(self) -> None:
            nn.init.constant_(self.scale, 0.5)

        def forward(self, x: Any) -> Any:
            return self.norm(self.linear(x)) * self.scale

    def on_each_rank() -> None:
        rank, _ = rank_and_size()
        model = on_meta(Scaled)
        torch.manual_seed(rank)
        fully_shard(model, device="cpu")
        torch.manual_seed(0)
        twin = nn.Linear(5, 4)
        with model.unsharded():
            assert torch.equal(model.linear.weight, twin.weight)
            assert model.scale == 0.5
        assert model.norm.running_var.tolist() == [1.0] * 4
        mean_loss(model(torch.ones(2, 5))).backward()

    simulate(on_each_rank, 2)


def test_a_module_that_nobody_initialises_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Net has parameters or buffers on the meta device and no reset_parameters\(\)"
    ):
        shard_blocks(on_meta(Net), device="cpu")


def test_without_a_device() -> None:
    with pytest.raises(
        ValueError, match="parameters on the meta device: say by device, or a DeviceMesh, where they are"
    ):
        fully_shard(on_meta(lambda: nn.Linear(2, 2)))


def test_tied_parameters_stay_one_and_keep_their_marks() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 5, bias=False)
            self.second = nn.Linear(5, 5)
            self.second.weight = self.first.weight
            self.first.weight.mark = "kept"

        def forward(self, x: Any) -> Any:
            return self.second(self.first(x).tanh())

    def on_each_rank() -> None:
        model = fully_shard(on_meta(Tied), device="cpu")
        assert model.second.weight is model.first.weight
        assert model.first.weight.mark == "kept"
        assert len(list(model.parameters())) == 2
        mean_loss(model(torch.ones(2, 5))).backward()

    simulate(on_each_rank, 2)


def test_a_part_on_meta_and_a_part_with_values() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loaded = nn.Linear(5, 5)
            self.fresh = on_meta(lambda: nn.Linear(5, 5))

        def forward(self, x: Any) -> Any:
            return self.fresh(self.loaded(x))

    model = Half()
    before = model.loaded.weight.detach().clone()
    fully_shard(model, device="cpu", init_fn=ones)
    with model.unsharded():
        assert torch.equal(model.loaded.weight, before)
        assert (model.fresh.weight == 1).all()


def test_frozen_parameters_stay_frozen_and_dtypes_what_they_are() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 5, dtype=torch.bfloat16), nn.LayerNorm(5))
        return model.requires_grad_(False)

    model = fully_shard(on_meta(build), device="cpu")
    assert [param.dtype for param in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert not any(param.requires_grad for param in model.parameters())


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "packed GroupedMLP"])
@pytest.mark.sampled(4)
def test_our_modules(name: str) -> None:
    """Modules delay after ``fully_shard`` too: the marks on parameters are kept."""

    def on_each_rank() -> None:
        mesh = init_device_mesh("cpu", (2,))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, FEATURES), nn.Identity())
        torch.manual_seed(0)
        inner = make(name, delay=True).to("meta")
        model[1] = inner
        fully_shard(model[1], mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert any(bucket.layout.delayed for unit in model.units for bucket in unit.buckets)
        mean_loss(model(batches_of(0, 1, dtype=torch.float32)[0])).backward()
        assert model[1].need_backward_dw()
        model[1].backward_dw()
        model.finish_grad_sync()
        assert all(param.grad is not None for param in model.parameters())

    simulate(on_each_rank, 2)
