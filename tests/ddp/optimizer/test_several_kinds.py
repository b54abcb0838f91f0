"""Models of several dtypes, classes of which one has nothing, and slices: what each optimizer gets of them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import wrap
from torch import Tensor, nn, optim

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, DistributedOptimizer, Lion
from maingrad.ddp.gathers.param_gather import ParamGather
from maingrad.launch import simulate


class ByTurns(nn.Module):
    """Layers in fp32 and bf16 by turns: their buckets, of two buffers, are reduced by turns too."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16) * 2
        self.layers = nn.ModuleList(nn.Linear(width, width + index, dtype=each) for index, each in enumerate(dtypes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x[:, : layer.in_features].to(layer.weight.dtype))
        return x.float()


def test_masters_of_several_dtypes_come_in_the_order_in_which_buckets_are_reduced() -> None:
    """A state dict has them in this order, whatever the order of buffers is."""

    def on_each_rank() -> None:
        ddp = wrap(ByTurns(), use_distributed_optimizer=True, bucket_size=64, overlap_param_gather=True)
        assert len({bucket.layout.slots[0].spec.param_dtype for bucket in ddp.buckets[:2]}) == 2
        optimizer = DistributedOptimizer(ddp)
        numels = [bucket.layout.numel // 2 for bucket in ddp.buckets]
        assert [master.numel() for master in optimizer.state_dict()["masters"]] == numels
        names = [bucket.name for bucket in reversed(ddp.buckets)]
        assert [gather.name for gather in optimizer.param_sync.gathers] == names
        assert [held.name for held in optimizer.slices] == [
            slot.spec.name for bucket in ddp.buckets for slot in bucket.layout.slots
        ]

    simulate(on_each_rank, 2)


@pytest.mark.parametrize(
    "form",
    [{}, {"state": "compact"}, {"offload_state": "host"}, {"state": "compact", "offload_state": "host"}],
    ids=str,
)
@pytest.mark.parametrize("cls", [optim.SGD, Lion])
def test_the_class_of_all_other_parameters_may_have_none(cls: Any, form: dict[str, Any]) -> None:
    ddp = wrap(ByTurns(), use_distributed_optimizer=True)
    groups = [{"params": "*.weight", "optimizer": cls, "lr": 0.1}, {"params": "*", "optimizer": cls, "lr": 0.2}]
    optimizer = DistributedOptimizer(ddp, lr=0.3, param_groups=groups, **form)
    assert [len(group["params"]) > 0 for group in optimizer.param_groups] == [True, True, False]
    before = [param.detach().clone() for param in ddp.parameters()]
    for _ in range(2):
        ddp(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not any(map(torch.equal, before, ddp.parameters()))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("cls", [optim.Adafactor, optim.Muon])
def test_a_class_of_whole_parameters_is_refused_over_slices_alone(cls: Any) -> None:
    def on_each_rank() -> None:
        net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        net[0].weight.tensor_model_parallel, net[0].weight.partition_dim = True, 0
        ddp = DistributedDataParallel(net, process_group=WORLD_OF_ONE, tensor_parallel_group=dist.group.WORLD)
        with pytest.raises(ValueError, match=rf"{cls.__name__} updates whole parameters, and .* slices of '0\.weight'"):
            DistributedOptimizer(ddp, optimizer_class=cls)
        DistributedOptimizer(ddp, param_groups=[{"params": "1.weight", "optimizer": cls}])

    simulate(on_each_rank, 2)


def test_each_gather_that_a_replay_has_launched_is_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers then wait for it, and a recording has it."""
    noted: list[tuple[int, str, Any]] = []
    monkeypatch.setattr(
        ParamGather, "record_replay", lambda gather, observer: noted.append((dist.get_rank(), gather.name, observer))
    )

    def on_each_rank() -> None:
        ddp = wrap(ByTurns(), use_distributed_optimizer=True, bucket_size=64, overlap_param_gather=True)
        sync = DistributedOptimizer(ddp).param_sync
        launched: list[bool] = []
        sync.publish_replayed(lambda: launched.append(not any(each[0] == dist.get_rank() for each in noted)))
        assert launched == [True], "before they are noted"
        mine = [(name, observer) for rank, name, observer in noted if rank == dist.get_rank()]
        assert mine == [(gather.name, ddp.observer) for gather in sync.gathers]

    simulate(on_each_rank, 2)
