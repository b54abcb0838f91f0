"""One wrapper around all of a rank's stages, which may tie an embedding between the first and the last of them."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipelined import reduced_grads
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer, clip_grad_norm
from maingrad.ddp.buckets.bucket import Phase
from maingrad.launch import simulate
from maingrad.te_integration import Linear
from maingrad.te_integration.pipeline import PipelineStage

WIDTH = 8
TOKENS = 11
MICROBATCHES = 4
ROWS = 2
LAYERS = 4
KINDS = {
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "LoopedBFS": pipelining.ScheduleLoopedBFS,
    "ZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
    "ZBV": pipelining.ScheduleZBVZeroBubble,
}


class Layer(nn.Module):
    """A layer; the first embeds tokens, and the last has the same weight for a head."""

    def __init__(self, index: int, embedding: nn.Embedding, fused: bool) -> None:
        super().__init__()
        self.linear = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=fused, name=f"layer {index}")
        self.norm = nn.LayerNorm(WIDTH)
        self.embedding = embedding if index == 0 else None
        self.head = nn.Linear(WIDTH, TOKENS, bias=False) if index == LAYERS - 1 else None
        if self.head is not None:
            self.head.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        x = self.linear(self.norm(x)).tanh()
        return x if self.head is None else self.head(x)


def make_layers(fused: bool) -> list[Layer]:
    torch.manual_seed(0)
    embedding = nn.Embedding(TOKENS, WIDTH)
    return [Layer(index, embedding, fused) for index in range(LAYERS)]


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y.flatten(0, -2), target.flatten())


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    shape = (MICROBATCHES * ROWS, 5)
    return torch.randint(TOKENS, shape, generator=generator), torch.randint(TOKENS, shape, generator=generator)


def plain(num_replicas: int, steps: int) -> list[dict[str, Tensor]]:
    """Gradients of plain PyTorch, all replicas in one process."""
    layers = make_layers(fused=False)
    model = nn.Sequential(*layers)
    grads = []
    for step in range(steps):
        for replica in range(num_replicas):
            for x, target in zip(*(part.chunk(MICROBATCHES) for part in batch(step, replica)), strict=True):
                (loss_fn(model(x), target) / MICROBATCHES / num_replicas).backward()
        grads.append({name: param.grad.clone() for name, param in model.named_parameters()})
        model.zero_grad()
    return grads


class Rank:
    """The stages of this rank in one wrapper: all four, or the first and the last of a V over two ranks."""

    def __init__(self, kind: str, pipes: int, **config: Any) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // pipes, pipes), mesh_dim_names=("dp", "pp"))
        rank = mesh.get_local_rank("pp")
        self.replica = mesh.get_local_rank("dp")
        self.indices = range(LAYERS) if pipes == 1 else (rank, LAYERS - 1 - rank)
        layers = make_layers(fused=True)
        self.ddp = DistributedDataParallel(
            nn.ModuleDict({str(index): layers[index] for index in self.indices}),
            DistributedDataParallelConfig(**config),
            process_group=mesh.get_group("dp"),
        )
        self.stages = [
            PipelineStage(layer, int(index), LAYERS, torch.device("cpu"), group=mesh.get_group("pp"))
            for index, layer in self.ddp.module.items()
        ]
        self.schedule = KINDS[kind](self.stages, MICROBATCHES, loss_fn, scale_grads=False)

    def step(self, step: int) -> None:
        x, target = batch(step, self.replica)
        inputs = (x,) if 0 in self.indices else ()
        self.schedule.step(*inputs, **({"target": target, "losses": []} if LAYERS - 1 in self.indices else {}))

    def grads(self) -> dict[str, Tensor]:
        self.ddp.finish_grad_sync()
        grads = reduced_grads(self.ddp)
        self.ddp.zero_grad_buffer()
        return grads


def run(kind: str, pipes: int, config: dict[str, Any]) -> list[dict[str, Tensor]]:
    rank = Rank(kind, pipes, **config)
    grads = []
    for step in range(2):
        rank.step(step)
        launched = {bucket.phase in (Phase.REDUCING, Phase.REDUCED) for bucket in rank.ddp.buckets}
        assert launched == {"overlap_grad_reduce" in config}
        grads.append(rank.grads())
    return grads


OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "no overlap": {},
    "all-reduce": OVERLAP,
    "one bucket": {"overlap_grad_reduce": True},
    "ZeRO-1": {**OVERLAP, "use_distributed_optimizer": True},
    "unused": {**OVERLAP, "find_unused_parameters": True},
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind, pipes", [("Interleaved1F1B", 1), ("LoopedBFS", 1), ("ZeroBubble", 1), ("ZBV", 2)])
@pytest.mark.sampled(2)
def test_a_tied_embedding_has_the_gradient_of_both_ends(kind: str, pipes: int, config: str) -> None:
    outcomes = simulate(run, 2 * pipes, kind, pipes, CONFIGS[config])
    for step, expected in enumerate(plain(2, steps=2)):
        for first in range(0, 2 * pipes, pipes):
            mine = {name: grad for rank in outcomes[first : first + pipes] for name, grad in rank[step].items()}
            assert mine.keys() == expected.keys()
            for name, grad in expected.items():
                assert (mine[name] - grad).abs().max() < 1e-6, (step, name)


def launches(kind: str) -> list[tuple[str, frozenset[str]]]:
    """After each backward pass and weight slot of a stage: which parameters' reductions are under way."""
    rank = Rank(kind, 1, **OVERLAP)
    seen: list[tuple[str, frozenset[str]]] = []

    def watch(stage: PipelineStage, verb: str) -> None:
        method = getattr(stage, verb)

        def watched(*args: Any, **kwargs: Any) -> None:
            method(*args, **kwargs)
            names = [r.name for b in rank.ddp.buckets if b.phase is Phase.REDUCING for r in b.records]
            seen.append((f"{stage.stage_index} {verb}", frozenset(names)))

        setattr(stage, verb, watched)

    for stage in rank.stages:
        for verb in ("backward_one_chunk", "backward_weight_one_chunk", "perform_reduce_grad"):
            watch(stage, verb)
    rank.step(0)
    rank.grads()
    return seen


@pytest.mark.parametrize("kind", ["Interleaved1F1B", "ZeroBubble"])
def test_a_bucket_launches_after_the_last_backward_of_the_last_stage_that_has_it(kind: str) -> None:
    for seen in simulate(launches, 2, kind):
        first_seen: dict[str, int] = {}
        for index, (_, names) in enumerate(seen):
            for name in names:
                first_seen.setdefault(name, index)
        slots = [slot for slot, _ in seen]
        ends = {stage: slots.index(f"{stage} perform_reduce_grad") for stage in range(LAYERS)}
        backwards = {
            stage: max(i for i, slot in enumerate(slots) if slot == f"{stage} backward_one_chunk")
            for stage in range(LAYERS)
        }
        assert sorted(ends, key=ends.__getitem__) == [3, 2, 1, 0]
        assert len(first_seen) == len(plain(1, 1)[0])
        for name, index in first_seen.items():  # the tied embedding is the first stage's, which ends last
            stage = int(name[0])
            assert backwards[stage] <= index < ends[stage], f"{name}: not too early, and not together at the end"


def trained(kind: str, pipes: int) -> dict[str, Tensor]:
    """Under ZeRO-1 one optimizer has all of the rank's stages, and one norm."""
    rank = Rank(kind, pipes, **CONFIGS["ZeRO-1"], overlap_param_gather=True)
    optimizer = DistributedOptimizer(rank.ddp, lr=0.1, max_grad_norm=0.5, weight_decay=0.0)
    for step in range(2):
        rank.step(step)
        rank.ddp.finish_grad_sync()
        optimizer.step()
        rank.ddp.zero_grad_buffer()
    return {name: param.detach().clone() for name, param in rank.ddp.module.named_parameters()}


def test_one_optimizer_has_all_stages() -> None:
    layers = make_layers(fused=False)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    for grads in plain_training(model, optimizer):
        assert grads > 0.5, "clipped"
    for weights in simulate(trained, 2, "ZeroBubble", 1):
        for name, param in model.named_parameters():
            assert (weights[name] - param).abs().max() < 1e-4, name


def plain_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    norms = []
    for step in range(2):
        for replica in range(2):
            for x, target in zip(*(part.chunk(MICROBATCHES) for part in batch(step, replica)), strict=True):
                (loss_fn(model(x), target) / MICROBATCHES / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def failing(kind: str, at: int | str) -> list[dict[str, Tensor]]:
    """A step fails on one replica, and all stages of all replicas abandon it: in the forward of that number, or in a
    weight slot of the last stage, before it has computed anything."""
    rank = Rank(kind, 1, **OVERLAP)
    fails = rank.replica == 0
    seen = 0

    def fail(module: nn.Module, args: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == at:
            raise ArithmeticError("in the middle")

    def fail_at_once(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("in the middle")

    grads = []
    for step in range(2):
        rank.step(step)
        grads.append(rank.grads())
        seen = 0
        handles = [stage.submod.register_forward_pre_hook(fail) for stage in rank.stages if fails]
        with pytest.MonkeyPatch.context() as patch:
            if fails and at == "weight slot":
                patch.setattr(rank.stages[-1], "backward_weight_one_chunk", fail_at_once)
            with pytest.raises(RuntimeError) if fails else nullcontext():
                rank.step(step + 1)
        for handle in handles:
            handle.remove()
        for stage in rank.stages:
            stage.abandon_step()
    return grads


@pytest.mark.parametrize(
    "kind, at",
    [
        ("Interleaved1F1B", 3),
        ("Interleaved1F1B", LAYERS * MICROBATCHES),
        ("ZeroBubble", 3),
        ("ZeroBubble", "weight slot"),
    ],
)
@pytest.mark.sampled(2)
def test_stages_of_one_wrapper_abandon_a_step_together(kind: str, at: int | str) -> None:
    expected = plain(2, steps=2)
    for grads in simulate(failing, 2, kind, at):
        for step, mine in enumerate(grads):
            for name, grad in expected[step].items():
                assert (mine[name] - grad).abs().max() < 1e-6, (step, name)


def only_stages_are_kept() -> list[bool]:
    """Only the stages hold a reference to the wrapper."""
    rank = Rank("Interleaved1F1B", 1, **OVERLAP)
    stages, schedule = rank.stages, rank.schedule
    del rank
    x, target = batch(0, dist.get_rank())
    schedule.step(x, target=target, losses=[])
    return [all(param.main_grad.any() for param in stage.submod.parameters()) for stage in stages]


def test_stages_keep_the_wrapper_around_them() -> None:
    assert simulate(only_stages_are_kept, 2) == [[True] * LAYERS] * 2


def tied_over_ranks(stages: str, config: dict[str, Any]) -> list[dict[str, Tensor]]:
    """One stage a rank, so that both ends hold a copy of the embedding: gradients, and weights after two steps."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // LAYERS, LAYERS), mesh_dim_names=("dp", "pp"))
    index, replica, pipeline = mesh.get_local_rank("pp"), mesh.get_local_rank("dp"), mesh.get_group("pp")
    layer = make_layers(fused=True)[index]
    ends = None
    if index in (0, LAYERS - 1):
        weight: Any = layer.embedding.weight if layer.embedding is not None else layer.head.weight
        weight.shared_embedding = True
        ranks = dist.get_process_group_ranks(pipeline)
        ends = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True)
    ddp = DistributedDataParallel(
        nn.ModuleDict({str(index): layer}),
        DistributedDataParallelConfig(use_distributed_optimizer=True, **config),
        process_group=mesh.get_group("dp"),
        embedding_group=ends,
    )
    optimizer, found = DistributedOptimizer(ddp, lr=0.1), []
    make = PipelineStage if stages == "ours" else pipelining.PipelineStage
    loss = loss_fn if stages == "ours" else lambda y, target: loss_fn(y, target) / MICROBATCHES
    stage = make(ddp.module[str(index)], index, LAYERS, torch.device("cpu"), group=pipeline)
    schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss, scale_grads=False)
    last = {"losses": []} if index == LAYERS - 1 else {}
    for step in range(2):
        x, target = batch(step, replica)
        with nullcontext() if stages == "ours" else ddp.no_sync():
            schedule.step(*((x,) if index == 0 else ()), **({"target": target, **last} if last else {}))
        ddp.finish_grad_sync()
        found.append(reduced_grads(ddp))
        clip_grad_norm(ddp, 0.5, pipeline_group=pipeline)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish_param_sync()
    return [found[0], {name: param.detach().clone() for name, param in ddp.module.named_parameters()}]


@pytest.mark.in_turn
@pytest.mark.parametrize("config", ["no overlap", "all-reduce"])
@pytest.mark.parametrize("stages", ["ours", "torch's"])
def test_an_embedding_tied_over_ranks_has_the_gradient_of_both_ends(stages: str, config: str) -> None:
    found = simulate(tied_over_ranks, 2 * LAYERS, stages, CONFIGS[config])
    (expected,) = plain(2, steps=1)
    expected[f"{LAYERS - 1}.head.weight"] = expected["0.embedding.weight"]
    seen = set()
    for grads, _ in found:
        for name, grad in grads.items():
            assert (grad - expected[name]).abs().max() < 1e-6, name
            seen.add(name)
    assert seen == expected.keys()
    copies = [param for _, params in found for name, param in params.items() if "embedding" in name or "head" in name]
    assert len(copies) == 4 and all(torch.equal(copy, copies[0]) for copy in copies)
