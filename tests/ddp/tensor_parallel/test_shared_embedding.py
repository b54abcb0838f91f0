"""An embedding that is tied over the first and the last pipeline stage: copies get the sum of the stages' gradients."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, clip_grad_norm
from maingrad.launch import simulate

VOCABULARY, DIM = 10, 6
WAYS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "ddp": ((1, 2), {}),
    "zero1": ((1, 2), {"use_distributed_optimizer": True}),
    "hybrid": ((2, 2), {"use_distributed_optimizer": True, "overlap_grad_reduce": False}),
}


class Stage(nn.Module):
    """Of three stages the first one embeds, the last one multiplies by the same weight, and each has a layer."""

    def __init__(self, index: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(10 + index)
        self.index, self.layer = index, nn.Linear(DIM, DIM)
        torch.manual_seed(seed)
        if index != 1:
            self.word = nn.Parameter(torch.randn(VOCABULARY, DIM))
            self.word.shared_embedding = True

    def forward(self, data: int) -> Tensor:
        """A loss of this stage alone, so that no stage waits for another."""
        generator = torch.Generator().manual_seed(7 * data + self.index)
        x = torch.randn(4, DIM, generator=generator)
        if self.index == 0:
            x = x + self.word[(torch.arange(4) + data) % VOCABULARY]
        x = self.layer(x)
        return (x @ self.word.t() if self.index == 2 else x).square().mean()


def made(way: str, **options: Any) -> tuple[int, int, DistributedDataParallel, dist.ProcessGroup]:
    """This rank's stage and data, its wrapper, and its pipeline."""
    shape, config = WAYS[way]
    mesh = init_device_mesh("cpu", (3, *shape), mesh_dim_names=("pp", "replicate", "shard"))
    stage = mesh.get_local_rank("pp")
    data = mesh.get_local_rank("replicate") * shape[1] + mesh.get_local_rank("shard")
    pipeline = dist.get_process_group_ranks(mesh.get_group("pp"))
    ends = None if stage == 1 else dist.new_group([pipeline[0], pipeline[2]], use_local_synchronization=True)
    wrapper = DistributedDataParallel(
        Stage(stage, seed=stage),
        DistributedDataParallelConfig(**config, **options),
        process_group=mesh["replicate", "shard"] if shape[0] > 1 else mesh["shard"],
        embedding_group=ends,
    )
    return stage, data, wrapper, mesh.get_group("pp")


def five_steps(way: str, microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    stage, data, model, pipeline = made(way)
    optimizer = DistributedOptimizer(model, lr=0.1)
    norms = []
    for _ in range(5):
        with model.no_sync():
            for micro in range(microbatches - 1):
                (model(data * microbatches + micro) / microbatches).backward()
        (model((data + 1) * microbatches - 1) / microbatches).backward()
        norms.append(clip_grad_norm(model, 0.3, pipeline_group=pipeline).item())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish_param_sync()
    return norms, {f"{stage}.{name}": param.detach().clone() for name, param in model.module.named_parameters()}


def plain_steps(num_data: int) -> tuple[list[float], dict[str, Tensor]]:
    stages = [Stage(0), Stage(1), Stage(2)]
    stages[2].word = stages[0].word
    params = {f"{each.index}.{name}": param for each in stages for name, param in each.named_parameters()}
    optimizer = torch.optim.AdamW(set(params.values()), lr=0.1, eps=1e-8, weight_decay=0.01)
    norms = []
    for _ in range(5):
        sum(stage(data) / num_data for stage in stages for data in range(num_data)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(set(params.values()), 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, params


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_copies_train_as_one_weight(way: str, microbatches: int) -> None:
    ranks = WAYS[way][0][0] * WAYS[way][0][1]
    norms, params = plain_steps(ranks * microbatches)
    found = simulate(five_steps, 3 * ranks, way, microbatches)
    for own, trained in found:
        assert own == pytest.approx(norms, rel=1e-5)
        for name, param in trained.items():
            torch.testing.assert_close(param, params[name].detach(), rtol=1e-4, atol=1e-5)
    words = [trained[name] for _, trained in found for name in trained if name.endswith("word")]
    assert all(torch.equal(word, words[0]) for word in words)


def step_alone(way: str) -> Tensor | None:
    stage, data, model, _ = made(way)
    optimizer = DistributedOptimizer(model, lr=0.5, optimizer_class=torch.optim.SGD)
    model(data).backward()
    optimizer.step()
    optimizer.finish_param_sync()
    return None if stage == 1 else model.module.word.detach().clone()


@pytest.mark.parametrize("way", WAYS)
def test_a_step_without_clipping_takes_the_sum_too(way: str) -> None:
    """It would update buckets one by one, while others are reduced."""
    ranks = WAYS[way][0][0] * WAYS[way][0][1]
    stages = [Stage(0), Stage(2)]
    word = stages[1].word = stages[0].word
    sum(stage(data) / ranks for stage in stages for data in range(ranks)).backward()
    assert word.grad is not None
    for found in simulate(step_alone, 3 * ranks, way):
        if found is not None:
            torch.testing.assert_close(found, word.detach() - 0.5 * word.grad)


def with_tokens() -> Tensor:
    """Data 0 has 2 tokens, data 1 has 3."""
    stage, data, model, _ = made("ddp", calculate_per_token_loss=True)
    model(data).backward()
    model.finish_grad_sync(data + 2)
    return torch.zeros(()) if stage == 1 else model.module.word.main_grad.clone()


def test_tokens_divide_the_sum() -> None:
    stages = [Stage(0), Stage(2)]
    stages[1].word = stages[0].word
    sum(stage(data) for stage in stages for data in range(2)).backward()
    assert stages[0].word.grad is not None
    for found in simulate(with_tokens, 6):
        if found.dim():
            torch.testing.assert_close(found, stages[0].word.grad / 5)


def two_backwards(under_no_sync: bool) -> Tensor:
    """Both reduce: the sum over stages comes once, behind the second."""
    _, data, model, _ = made("zero1", overlap_grad_reduce=True)
    with model.no_sync() if under_no_sync else nullcontext():
        model(data).backward()
    model(data + 2).backward()
    model.finish_grad_sync()
    return torch.zeros(()) if model.shared_embedding is None else model.shared_embedding.bucket.reduced.clone()


def test_a_second_backward_before_the_sum_is_added() -> None:
    for found, expected in zip(simulate(two_backwards, 6, False), simulate(two_backwards, 6, True), strict=True):
        torch.testing.assert_close(found, expected)


def backward_behind_the_sum() -> None:
    """Stages with a copy cannot take the sum apart again; the one between them has nothing that was summed."""
    stage, data, model, _ = made("ddp")
    model(data).backward()
    model.finish_grad_sync()
    before = [bucket.reduced.clone() for bucket in model.buckets]
    refused = pytest.raises(RuntimeError, match=r"was reduced: run earlier backwards of an iteration under no_sync\(\)")
    with nullcontext() if stage == 1 else refused:
        model(data + 2).backward()
    if stage != 1:
        for bucket, reduced in zip(model.buckets, before, strict=True):
            assert torch.equal(bucket.reduced, reduced)


def test_a_second_backward_behind_the_sum_is_refused() -> None:
    simulate(backward_behind_the_sum, 6)


class BesideExperts(nn.Module):
    """Each stage has an expert of its own, which backward reaches first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.word, self.expert = (nn.Parameter(torch.zeros(size)) for size in (5, 3, 4))
        self.word.shared_embedding = True
        self.expert.allreduce = False

    def forward(self) -> Tensor:
        return self.layer.sum() + 2 * self.word.sum() + 3 * self.expert.sum()


def norm_beside_experts() -> float:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = DistributedDataParallel(
        BesideExperts(), process_group=alone, expert_process_group=alone, embedding_group=dist.group.WORLD
    )
    model().backward()
    return clip_grad_norm(model, 100.0, pipeline_group=dist.group.WORLD).item()


@pytest.mark.parametrize("stages", [2, 3])
def test_the_shared_weight_counts_once_beside_experts(stages: int) -> None:
    square = stages * 5 * 1**2 + 3 * (2 * stages) ** 2 + stages * 4 * 3**2
    assert simulate(norm_beside_experts, stages) == pytest.approx([square**0.5] * stages)


def on_one_stage() -> bool:
    """The first stage is the last one, as in a pipeline of one rank; and a rank outside of the group."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = DistributedDataParallel(Stage(2), process_group=alone, embedding_group=alone)
    outside = DistributedDataParallel(Stage(1), process_group=alone, embedding_group=dist.GroupMember.NON_GROUP_MEMBER)
    return model.shared_embedding is None and outside.shared_embedding is None


def test_a_group_without_other_copies_sums_nothing() -> None:
    assert all(simulate(on_one_stage, 2))


def refused(what: str) -> str:
    stage, _, model, pipeline = made("zero1")
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    if stage == 1 and what == "a group without a copy":
        with pytest.raises(ValueError, match="0 have it") as raised:
            DistributedDataParallel(nn.Linear(2, 2), process_group=alone, embedding_group=pipeline)
        return str(raised.value)
    if stage != 1 and what == "the norm of a stage":
        with pytest.raises(ValueError, match="copies of the shared embedding") as raised:
            DistributedOptimizer(model, lr=0.1, max_grad_norm=1.0)
        model(0).backward()
        with pytest.raises(ValueError, match="without pipeline_group would treat each pipeline stage"):
            clip_grad_norm(model, 1.0)
        other = DistributedDataParallel(nn.Linear(2, 2), process_group=alone)
        other(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ValueError, match="without pipeline_group would treat each pipeline stage"):
            clip_grad_norm([other, model], 1.0)
        return str(raised.value)
    return "nothing to refuse"


@pytest.mark.parametrize("what", ["a group without a copy", "the norm of a stage"])
def test_what_would_part_the_copies_is_refused(what: str) -> None:
    assert any(text != "nothing to refuse" for text in simulate(refused, 6, what))


COPIES: dict[str, tuple[torch.dtype, dict[str, Any], dict[str, Any], str]] = {
    "another shape": (torch.float32, {"out_features": 6}, {}, r"\[6, 4\] torch.float32 with"),
    "another dtype": (torch.bfloat16, {"dtype": torch.float32}, {}, "torch.float32 with torch.float32 gradients"),
    "gradients of another dtype": (
        torch.bfloat16, {}, {"grad_reduce_in_fp32": False}, "torch.bfloat16 with torch.bfloat16 gradients"
    ),
    "other shards": (torch.float32, {}, {"use_distributed_optimizer": False}, "in 1 shards"),
}  # fmt: skip
"""dtype of the first stage's copy; what the last stage's has in its place; its configuration; and the error's end."""


def copies_that_differ(what: str) -> None:
    """Ranks 0 and 1 are the first stage, 2 and 3 the last one."""
    rank, (dtype, features, config, text) = dist.get_rank(), COPIES[what]
    first = rank < 2
    data = dist.new_group([0, 1] if first else [2, 3], use_local_synchronization=True)
    ends = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    options = {"in_features": 4, "out_features": 4, "bias": False, "dtype": dtype, **({} if first else features)}
    word = nn.Linear(**options)
    word.weight.shared_embedding = True
    zero1 = DistributedDataParallelConfig(**{"use_distributed_optimizer": True, **({} if first else config)})
    with pytest.raises(ValueError, match=rf"the shared embedding differs between ranks .*where rank \d has .*{text}"):
        DistributedDataParallel(word, zero1, process_group=data, embedding_group=ends)


@pytest.mark.parametrize("what", COPIES)
def test_copies_that_cannot_be_summed_are_refused(what: str) -> None:
    simulate(copies_that_differ, 4, what)


def test_one_parameter_of_a_stage_is_shared() -> None:
    def two() -> None:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for layer in net:
            layer.weight.shared_embedding = True
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        with pytest.raises(ValueError, match="2 have it"):
            DistributedDataParallel(net, process_group=alone, embedding_group=dist.group.WORLD)

    simulate(two, 2)
