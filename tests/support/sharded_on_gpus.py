"""A small model, sharded over NCCL groups in every form, and ways to slow its streams: for tests on several GPUs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from maingrad.ddp.collectives.reduction import GradReduction
from maingrad.ddp.gathers import param_gather as gathering
from maingrad.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from maingrad.te_integration import Linear

__all__ = [
    "COPYING",
    "FORMS",
    "HYBRIDS",
    "MAX_NORM",
    "NUM_BLOCKS",
    "OFFLOADED",
    "SLEEP_CYCLES",
    "Form",
    "Model",
    "Pause",
    "batch",
    "here",
    "loss_of",
    "nccl",
    "relative_error",
    "shard",
    "slowed",
    "two_instances",
    "whole",
]

NUM_BLOCKS = 4
WIDTH, VOCABULARY = 48, 50
SLEEP_CYCLES = 200_000_000  # about 100 ms
MAX_NORM = 0.5


class Form(NamedTuple):
    """How a model is sharded and run."""

    placements: str
    prefetch: bool = True
    """False: each unit is gathered when it is needed, under nothing."""
    delayed: bool = False
    """Weight gradients of the fused layers come after each backward."""
    kept: bool = False
    """Whole parameters stay from forward to backward."""
    offload: bool = False
    copy_engines: bool = False
    bf16: bool = False
    """Computes in bf16 over fp32 shards."""
    once: bool = False
    """Gradients are reduced once in an iteration."""


FORMS = {
    "zero1": Form("zero1"),
    "zero2": Form("zero2"),
    "zero2, no prefetch": Form("zero2", prefetch=False),
    "zero2, delayed wgrads": Form("zero2", delayed=True),
    "zero3": Form("zero3"),
    "zero3, no prefetch": Form("zero3", prefetch=False),
    "zero3, delayed wgrads": Form("zero3", delayed=True),
    "zero3, kept until backward": Form("zero3", kept=True),
    "zero3, bf16": Form("zero3", bf16=True),
    "zero2, once": Form("zero2", once=True),
    "zero2, once, delayed wgrads": Form("zero2", once=True, delayed=True),
    "zero3, once": Form("zero3", once=True),
    "zero3, once, delayed wgrads": Form("zero3", once=True, delayed=True),
}
COPYING = {
    "zero2, copy engines": Form("zero2", copy_engines=True),
    "zero3, copy engines": Form("zero3", copy_engines=True),
}
OFFLOADED = {
    "zero2, offloaded": Form("zero2", offload=True),
    "zero3, offloaded": Form("zero3", offload=True),
    "zero3, once, offloaded": Form("zero3", once=True, offload=True),
}
HYBRIDS = {
    "hsdp": Form("hsdp"),
    "hsdp, no prefetch": Form("hsdp", prefetch=False),
    "hsdp, delayed wgrads": Form("hsdp", delayed=True),
    "hsdp_zero1": Form("hsdp_zero1"),
    "hsdp, once": Form("hsdp", once=True),
    "hsdp_zero1, once": Form("hsdp_zero1", once=True),
}
Pause = Callable[[str], None]


class Block(nn.Module):
    """A residual of a fused and a plain layer, which tells where it computes."""

    def __init__(self, pause: Pause, delayed: bool) -> None:
        super().__init__()
        self.pause = pause
        self.up = Linear(WIDTH, 2 * WIDTH, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.pause("compute")
        y = x + self.down(self.norm(nn.functional.gelu(self.up(x))))
        if y.requires_grad:
            y.register_hook(lambda _: self.pause("compute"))
        return y


class Model(nn.Module):
    """Blocks between a tied embedding, which the root reads itself; an unused and a frozen parameter."""

    def __init__(self, pause: Pause = lambda where: None, *, delayed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(pause, delayed) for _ in range(NUM_BLOCKS))
        self.unused = nn.Parameter(torch.ones(17, 5))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        with torch.no_grad():
            self.embedding.weight.mul_(0.1)  # logits about one, so that there is something to learn to the end
            for parameter in self.parameters():  # what bf16 can say, so that fp32 and bf16 begin alike
                parameter.copy_(parameter.bfloat16())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x * self.frozen, self.embedding.weight)

    def drain(self) -> None:
        """Delayed weight gradients of one backward, in its order."""
        for block in reversed(self.blocks):
            block.up.backward_dw()


def batch(step: int, microbatch: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    return torch.randint(0, VOCABULARY, (6, 9), generator=generator)


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def nccl() -> dist.ProcessGroup:
    """All ranks, beside the gloo group that the processes came with."""
    torch.cuda.set_device(dist.get_rank())
    return dist.new_group(backend="nccl")


def two_instances() -> DeviceMesh:
    """(outer, inner) of four ranks: 0 1 | 2 3."""
    rank = dist.get_rank()
    ranks = torch.arange(4).view(2, 2)
    inner = [dist.new_group(row.tolist(), backend="nccl") for row in ranks]
    outer = [dist.new_group(column.tolist(), backend="nccl") for column in ranks.t()]
    groups = [outer[rank % 2], inner[rank // 2]]
    return DeviceMesh.from_group(groups, "cuda", mesh=ranks, mesh_dim_names=("outer", "inner"))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of telling the token before each one."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.roll(1, 1).flatten())


def shard(model: Model, form: Form, mesh: Any) -> FSDPModule:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if form.bf16 else None)
    reshard = False if form.kept else None
    for unit in (*model.blocks, model):
        on_engines = form.copy_engines and unit is model
        fully_shard(
            unit,
            mesh,
            form.placements,
            policy,
            reshard_after_forward=reshard,
            reduce_every_microbatch=False if form.once else None,
            offload_to_cpu=form.offload,
            copy_engine_gather=on_engines,
        )
    if not form.prefetch:
        for unit in (*model.blocks, model):
            unit.set_modules_to_forward_prefetch([])
            unit.set_modules_to_backward_prefetch([])
    return model


def whole(param: Any, part: Tensor) -> Tensor:
    """All ranks' parts of one parameter, or of its gradient, on the CPU."""
    info = param.shard
    found = torch.zeros(info.shape, device=here(), dtype=part.dtype)
    found.view(-1)[info.start : info.end] = getattr(part, "to_local", part.detach)().flatten().to(found.device)
    return (info.grid.sum(found) / info.num_replicas).cpu()


@contextmanager
def slowed(where: str, rank: int) -> Iterator[Pause]:
    """Have the device sleep on the stream of every gather, reduction or block: on one rank at a time, in turn."""
    count = 0

    def pause(at: str) -> None:
        nonlocal count
        if at == where:
            count += 1
            if count % 13 == rank:
                torch.cuda._sleep(SLEEP_CYCLES)

    gather, reduce = gathering.all_gather_shards, GradReduction.inside

    def slow_gather(*args: Any, **kwargs: Any) -> Any:
        pause("gather")
        return gather(*args, **kwargs)

    def slow_reduce(*args: Any) -> Any:
        pause("reduce")
        return reduce(*args)

    gathering.all_gather_shards, GradReduction.inside = slow_gather, slow_reduce  # type: ignore[method-assign]
    try:
        yield pause
    finally:
        gathering.all_gather_shards, GradReduction.inside = gather, reduce  # type: ignore[method-assign]
    assert count > 0


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm; nothing may differ from zeros."""
    difference, norm = (value.double() - expected.double()).norm(), expected.double().norm()
    return float(difference / norm) if norm else float(difference)
