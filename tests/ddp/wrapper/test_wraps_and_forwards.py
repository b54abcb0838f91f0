"""What wrapping finds on several ranks, and what a wrapper's forward does around the module's."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import loss_of, make_batches, make_model, wrap
from torch import Tensor, nn

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.launch import simulate


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_that_are_not_sharded_have_no_padding_for_shards(ranks: int) -> None:
    def on_each_rank(sharded: bool) -> list[tuple[int, int]]:
        ddp = wrap(make_model(), use_distributed_optimizer=sharded)
        return [(layout.shard_degree, layout.numel) for layout in ddp.plan.buckets]

    alone = simulate(on_each_rank, 1, False)[0]
    assert simulate(on_each_rank, ranks, False) == [alone] * ranks
    for found in simulate(on_each_rank, ranks, True):
        assert [degree for degree, _ in found] == [ranks] * len(found)
        assert all(numel % ranks == 0 for _, numel in found)


def test_experts_of_each_rank_have_one_shard_beside_others_of_three() -> None:
    def on_each_rank() -> dict[str, int]:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for param in net[1].parameters():
            param.allreduce = False
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        ddp = DistributedDataParallel(net, config, expert_process_group=WORLD_OF_ONE)
        return {layout.grid_name: layout.shard_degree for layout in ddp.plan.buckets}

    assert simulate(on_each_rank, 3) == [{"dense": 3, "expert": 1}] * 3


def pairs() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's data-parallel and tensor-parallel group, of 2 x 2 ranks."""
    rank = dist.get_rank()
    ranks = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
    data, tensor = (dist.new_group(pair, use_local_synchronization=True) for pair in ranks)
    return data, tensor


@pytest.mark.parametrize("offender", [0, 3])
def test_a_slice_that_cannot_be_on_one_rank_is_refused_on_all_data_and_tensor_parallel_ranks(offender: int) -> None:
    def on_each_rank() -> str:
        data, tensor = pairs()
        layer = nn.Linear(4, 3, bias=False)
        layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, 0
        layer.weight.partition_stride = 2 if dist.get_rank() == offender else 1
        with pytest.raises(ValueError, match="partition_stride = 2 does not divide the 3 rows") as raised:
            DistributedDataParallel(layer, process_group=data, tensor_parallel_group=tensor)
        return str(raised.value)

    assert all(f"(on rank {offender})" in text for text in simulate(on_each_rank, 4))


def test_a_wrapper_takes_the_marks_that_it_answers_for_and_leaves_the_others() -> None:
    """Megatron-core's ``finalize_model_grads`` would sum once more."""

    def on_each_rank(told: bool) -> list[bool]:
        data, tensor = pairs()
        net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False))
        for mark in ("sequence_parallel", "average_gradients_across_tp_domain"):
            net[0].register_parameter(mark, nn.Parameter(torch.ones(4)))
            setattr(net[0].get_parameter(mark), mark, True)
        net[1].weight.tensor_model_parallel = True
        marked = [(param, mark) for name, param in net[0].named_parameters() for mark in [name] if "_" in name]
        DistributedDataParallel(net, process_group=data, tensor_parallel_group=tensor if told else None)
        assert net[1].weight.tensor_model_parallel
        return [getattr(param, mark) for param, mark in marked]

    assert simulate(on_each_rank, 4, True) == [[False, False]] * 4


def test_forwards_that_train_nothing_may_differ_between_ranks() -> None:
    """An evaluation on the first rank, with gradients: no batch was skipped."""

    def on_each_rank() -> int:
        ddp = wrap(make_model())
        optimizer = DistributedOptimizer(ddp, lr=0.1)
        for step in range(3):
            if dist.get_rank() == 0:
                ddp.eval()
                assert ddp(make_batches(1)[0]).requires_grad
                ddp.train()
            loss_of(ddp, make_batches(1, seed=step)[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return ddp.iteration

    assert simulate(on_each_rank, 2) == [3, 3]


class Records(nn.Linear):
    """Its second forward begins a recording, and its fourth ends it."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.wrapper: list[DistributedDataParallel] = []
        self.stack = ExitStack()
        self.count = 0
        self.timeline: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count == 2:
            self.timeline = self.stack.enter_context(self.wrapper[0].record_timeline())
        if self.count == 4:
            self.stack.close()
        return super().forward(x)


def test_a_recording_that_begins_and_ends_in_forwards_has_the_one_between() -> None:
    net = Records()
    ddp = DistributedDataParallel(net)
    net.wrapper.append(ddp)
    for _ in range(5):
        ddp(torch.ones(1, 2))
    assert len(net.timeline.forwards) == 1
    assert not ddp.observer.recording


@pytest.mark.parametrize("trains", [False, True])
def test_an_evaluation_begins_with_all_parameters_and_a_training_forward_before(trains: bool) -> None:
    """Some modules of torch evaluate in another way where they have hooks."""

    def on_each_rank() -> list[bool]:
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        ddp = wrap(net, use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=32)
        optimizer = DistributedOptimizer(ddp, lr=0.1)
        loss_of(ddp, make_batches(1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        under_way: list[bool] = []
        net.register_forward_pre_hook(
            lambda *_: under_way.append(any(gather.under_way for gather in optimizer.param_sync.gathers))
        )
        ddp.train(trains)
        ddp(make_batches(1)[0])
        return under_way

    assert simulate(on_each_rank, 2) == [[trains]] * 2


def test_elements_of_this_rank_are_flat_and_the_whole_gradient_has_the_parameters_shape() -> None:
    def on_each_rank() -> int:
        ddp = wrap(make_model(), use_distributed_optimizer=True)
        loss_of(ddp, make_batches(1)[0]).backward()
        numel = 0
        for param in ddp.parameters():
            local = param.grad.to_local()
            numel += local.numel()
            assert local.shape in ((local.numel(),), param.shape)
            assert local.shape == param.shape if local.numel() == param.numel() else local.dim() == 1
            assert param.grad.shape == param.grad.full_tensor().shape == param.shape
        return numel

    counts = simulate(on_each_rank, 3)
    assert sum(counts) == sum(param.numel() for param in make_model().parameters())


def test_norms_of_a_stage_whose_tensor_parallel_ranks_are_told_are_allowed() -> None:
    """Other ranks of the program have other stages: they are outside of the model's ranks."""

    def on_each_rank(told: bool) -> float:
        _, tensor = pairs()
        layer = nn.Linear(4, 2, bias=False)
        nn.init.ones_(layer.weight)
        layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, 0
        ddp = DistributedDataParallel(layer, process_group=WORLD_OF_ONE, tensor_parallel_group=tensor if told else None)
        ddp(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
        if told:
            assert not ddp.slices
            return torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9).item()
        assert ddp.slices == {"weight"}
        with pytest.raises(RuntimeError, match="parameter 'weight' is a slice of tensor parallelism"):
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)
        return 0.0

    first, second = (8 * (1 + 4)) ** 0.5, (8 * (9 + 16)) ** 0.5
    assert simulate(on_each_rank, 4, True) == pytest.approx([first, first, second, second])
    simulate(on_each_rank, 4, False)


def test_a_parameter_that_is_no_slice_has_norms_beside_slices_of_unknown_ranks() -> None:
    def on_each_rank() -> tuple[float, float]:
        net = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False))
        nn.init.ones_(net[0].weight)
        net[0].weight.tensor_model_parallel = True
        ddp = DistributedDataParallel(net, process_group=WORLD_OF_ONE)
        ddp(torch.ones(1, 4)).sum().backward()
        norm = net[1].weight.grad.norm().item()
        with pytest.raises(RuntimeError, match=r"parameter '0\.weight' is a slice of tensor parallelism"):
            net[0].weight.grad.norm()
        return norm, net[1].weight.main_grad.norm().item()

    for norm, expected in simulate(on_each_rank, 2):
        assert norm == pytest.approx(expected)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, None])
def test_a_plain_tensor_in_place_of_an_experts_gradient_is_refused_where_each_rank_has_its_own(
    optimizer_class: type[torch.optim.Optimizer] | None,
) -> None:
    def on_each_rank() -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for param in net[1].parameters():
            param.allreduce = False
        ddp = DistributedDataParallel(net, expert_process_group=WORLD_OF_ONE)
        optimizer: Any = (
            DistributedOptimizer(ddp) if optimizer_class is None else optimizer_class(ddp.parameters(), 0.1)
        )
        ddp(torch.ones(1, 4)).sum().backward()
        net[0].weight.grad = torch.ones(4, 4)
        net[1].bias.grad = torch.ones(4)
        with pytest.raises(RuntimeError, match=r"\.grad of parameter '1\.bias' was replaced by a plain tensor"):
            optimizer.step()

    simulate(on_each_rank, 2)
