"""Fused blocks that compile whole, under each wrapper of parameters: training equals the eager run's, bit for bit.

Each wrapper does something between a block's forward and backward: gathers, reductions from hooks, shards in place of
parameters. Graphs are counted, so that a wrapper that compiles blocks again in each iteration is found.

Ranks are gloo processes: torch 2.11 crashes where threads take turns in compiling, with modules of its own too.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import compiling  # noqa: F401  the ranks compile
import pipelined
import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from stock_fsdp2 import PLAIN, Setting, Unit, accumulate, shard, worst_difference
from torch import Tensor, nn
from torch._dynamo.utils import counters

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.fsdp import fully_shard
from maingrad.te_integration import LayerNormLinear, LayerNormMLP, Linear

FEATURES = 8
BLOCKS = 3


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """A product of two slices, a product, and two products around an activation."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        made = {"fuse_wgrad_accumulation": True, **options}
        self.up = LayerNormLinear(FEATURES, 2 * FEATURES, parameters_split=("left", "right"), **made)
        self.out = Linear(FEATURES, FEATURES, **made)
        self.mlp = LayerNormMLP(FEATURES, 2 * FEATURES, activation="swiglu", **made)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.up(x).chunk(2, -1)
        x = x + self.out(left * right.sigmoid())
        return x + self.mlp(x)


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def compile_blocks(self) -> None:
        for block in self.blocks:
            block.compile(backend="aot_eager", fullgraph=True)


def batches(step: int) -> Tensor:
    """[2, 5, FEATURES]: this rank's two microbatches."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(2, 5, FEATURES, generator=torch.Generator().manual_seed(100 * step + rank))


def run_late_wgrads(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "backward_dw"):
            module.backward_dw()


def train_ddp(config: dict[str, Any], compile: bool, **options: Any) -> list[Tensor]:
    """Three steps under the ``DistributedOptimizer``; the weights."""
    net = Net(**options)
    if compile:
        net.compile_blocks()
    ddp = DistributedDataParallel(net, DistributedDataParallelConfig(bucket_size=300, **config))
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    for step in range(3):
        ddp.zero_grad_buffer()
        for index, batch in enumerate(batches(step)):
            with ddp.no_sync() if index == 0 else nullcontext():
                ddp(batch).backward()
                run_late_wgrads(net)
        ddp.finish_grad_sync()
        optimizer.step()
    assert all(record.num_fused_writes == 6 for record in ddp.records if record.first_write_overwrites)
    return [param.detach().clone() for param in ddp.module.parameters()]


def train_sharded(arguments: dict[str, Any], compile: bool, before: bool = False, **options: Any) -> list[Tensor]:
    """Three steps under ``fully_shard``; the whole weights. Blocks are compiled ``before`` it or after it."""
    net = Net(**options)
    if compile and before:
        net.compile_blocks()
    for block in net.blocks:
        fully_shard(block, **arguments)
    model: Any = fully_shard(net, **arguments)
    if compile and not before:
        net.compile_blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        for index, batch in enumerate(batches(step)):
            with model.no_sync() if index == 0 else nullcontext():
                model(batch).backward()
            run_late_wgrads(net)
        optimizer.step()
        optimizer.zero_grad()
    with model.unsharded():
        return [param.detach().clone() for param in model.parameters()]


def compiled_beside_eager(train: Callable[..., list[Tensor]], *args: Any, **options: Any) -> tuple[bool, int, int]:
    """Train on this rank eagerly, then compiled: whether the weights are equal, how many graphs, how many breaks."""
    expected = train(*args, compile=False, **options)
    torch.compiler.reset()  # the processes have run other settings
    counters.clear()
    found = train(*args, compile=True, **options)
    equal = all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    return equal, counters["stats"]["unique_graphs"], len(counters["graph_break"])


def ddp_beside_eager(config: dict[str, Any], delay: bool) -> tuple[bool, int, int]:
    return compiled_beside_eager(train_ddp, config, delay_wgrad_compute=delay)


def sharded_beside_eager(arguments: dict[str, Any], before: bool, delay: bool) -> tuple[bool, int, int]:
    if arguments["placements"] == "hsdp":
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        arguments = {**arguments, "mesh": mesh}
    return compiled_beside_eager(train_sharded, arguments, before=before, delay_wgrad_compute=delay)


ONE_GRAPH = (True, 1, 0)
"""Weights are equal; blocks share one graph, since the input of every block requires a gradient; no break."""

SHARDED_OPTIMIZER = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "all-reduce": (2, {"overlap_grad_reduce": True}),
    "ZeRO-1": (2, {**SHARDED_OPTIMIZER, "overlap_param_gather": True}),
    "released": (2, {**SHARDED_OPTIMIZER, "release_grads": True}),
    "hybrid": (4, {**SHARDED_OPTIMIZER, "num_distributed_optimizer_instances": 2}),
    "unused": (2, {"overlap_grad_reduce": True, "find_unused_parameters": True}),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("delay", [False, True], ids=["", "delayed"])
@pytest.mark.sampled(1)
def test_data_parallel(config: str, delay: bool) -> None:
    ranks, options = CONFIGS[config]
    assert run_ranks(ddp_beside_eager, ranks, options, delay) == [ONE_GRAPH] * ranks


@pytest.mark.in_turn
@pytest.mark.parametrize("placements", ["zero1", "zero2", "zero3", "hsdp"])
@pytest.mark.parametrize("each", [True, False], ids=["each", "once"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("delay", [False, True], ids=["", "delayed"])
@pytest.mark.sampled(1)
def test_fully_sharded(placements: str, each: bool, before: bool, delay: bool) -> None:
    arguments: dict[str, Any] = {"placements": placements}
    if placements != "zero1":  # which always keeps whole gradients
        arguments["reduce_every_microbatch"] = each
    ranks = 4 if placements == "hsdp" else 2
    assert run_ranks(sharded_beside_eager, ranks, arguments, before, delay) == [ONE_GRAPH] * ranks


# ---- Pipelines: a stage delays into its own queue, so that its layers are graph breaks. ----


def pipeline_beside_eager(kind: str) -> tuple[bool, bool]:
    """Whether a pipeline of compiled layers has eager's gradients, and computes each weight gradient in its slot."""
    eager = pipelined.pipelined(kind, 1, 4, True, {})
    make_plain = pipelined.Block.__init__

    def make_compiled(block: pipelined.Block, *args: Any) -> None:
        make_plain(block, *args)
        for layer in (block.up, block.down):
            layer.compile(backend="aot_eager")

    pipelined.Block.__init__ = make_compiled  # type: ignore[method-assign]
    try:
        compiled = pipelined.pipelined(kind, 1, 4, True, {})
    finally:
        pipelined.Block.__init__ = make_plain  # type: ignore[method-assign]
    alike = [
        theirs.keys() == ours.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        for ours, theirs in zip(compiled.grads, eager.grads, strict=True)
    ]
    return all(alike), compiled.slots == eager.slots


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", ["1F1B", "InterleavedZeroBubble"])
@pytest.mark.sampled(1)
def test_pipelines(kind: str) -> None:
    assert run_ranks(pipeline_beside_eager, 2, kind) == [(True, True)] * 2


# ---- PyTorch's own ``fully_shard``. ----


def train_under_fsdp2(setting: Setting) -> tuple[float, int, int]:
    """The largest difference to a twin of plain modules; graphs and breaks."""

    def make_model(fuse: bool) -> nn.Module:
        torch.manual_seed(0)
        blocks = [Unit(Block(fuse_wgrad_accumulation=fuse)) for _ in range(BLOCKS)]
        return nn.Sequential(nn.Linear(FEATURES, FEATURES), *blocks)

    model, twin = make_model(fuse=True), make_model(fuse=False)
    for block in model[1:]:
        block.compile(backend="aot_eager", fullgraph=True)
    torch.compiler.reset()  # the processes have run other settings
    counters.clear()
    both = [shard(each, setting) for each in (model, twin)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in both]
    worst = 0.0
    for step in range(2):
        for each in both:
            accumulate(each, setting, step)
        worst = max(worst, worst_difference(*both))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return worst, counters["stats"]["unique_graphs"], len(counters["graph_break"])


@pytest.mark.in_turn
@pytest.mark.parametrize("bf16", [False, True], ids=["", "bf16"])
@pytest.mark.parametrize("keep", [False, True], ids=["", "keep"])
@pytest.mark.parametrize("reduce_each", [False, True], ids=["once", "each"])
@pytest.mark.sampled(1)
def test_torchs_fully_shard(bf16: bool, keep: bool, reduce_each: bool) -> None:
    setting = PLAIN._replace(bf16=bf16, keep=keep, reduce_each=reduce_each)
    for worst, graphs, breaks in run_ranks(train_under_fsdp2, 2, setting):
        assert worst < (2e-2 if bf16 else 1e-6)
        assert (graphs, breaks) == (1, 0)
