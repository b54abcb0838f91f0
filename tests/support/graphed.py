"""Training by a schedule's order, eagerly and by graphed callables, on any device: the same numbers are expected."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.te_integration import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    Sequential,
    graphed_chunks,
    make_graphed_callables,
)
from maingrad.te_integration.pipeline import ScheduleExecutor, parse_order

__all__ = ["KINDS", "ORDERS", "ROWS", "WIDTH", "Case", "make_layers", "samples_of", "train", "weights_of"]

WIDTH = 8
ROWS = 4


def _split(width: int, **options: Any) -> nn.Module:
    qkv = Linear(width, 3 * width, parameters_split=["q", "k", "v"], **options)
    return nn.Sequential(qkv, nn.Linear(3 * width, width))


def _several(width: int, **options: Any) -> nn.Module:
    norm = LayerNormLinear(width, width, normalization="RMSNorm", **options)
    return Sequential(Linear(width, width, **options), nn.GELU(), norm)


class Block(nn.Module):
    """A layer of a transformer: norms and products of torch and of ours, residuals between them."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = Linear(width, width, bias=False, **options)
        self.plain = nn.Linear(width, width)
        self.mlp = LayerNormMLP(width, 2 * width, activation="swiglu", **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.plain(torch.tanh(self.mix(self.norm(x))))
        return x + self.mlp(x)


KINDS: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda width, **options: Linear(width, width, **options),
    "LayerNormLinear": lambda width, **options: LayerNormLinear(width, width, **options),
    "LayerNormMLP": lambda width, **options: LayerNormMLP(width, 2 * width, **options),
    "recomputed LayerNormMLP": lambda width, **options: LayerNormMLP(width, 2 * width, checkpoint=True, **options),
    "split": _split,
    "several": _several,
    "block": Block,
}

# Name -> order with wgrad entries, layers of each chunk. The same without these entries has no delay.
ORDERS: dict[str, tuple[list[float], list[int]]] = {
    "one": ([1, -1, -1.5], [2]),
    "lag 0": ([1, -1, -1.5, 1, -1, -1.5], [1]),
    "lag 1": ([1, 1, -1, -1, -1.5, -1.5], [2]),
    "lag 2": ([1, 1, -1, 1, -1, -1, -1.5, -1.5, -1.5], [1]),
    "lag 3": ([1, 1, -1, -1, 1, -1, 1, -1, -1.5, -1.5, -1.5, -1.5], [3]),
    "two chunks": ([1, 2, -2, -2.5, -1, -1.5], [1, 2]),
    "interleaved": ([1, 2, 1, 2, -2, -1, -2, -2.5, 1, -1, -1.5, 2, -2.5, -2, -1.5, -1, -2.5, -1.5], [2, 1]),
    "W of chunk 2 last": ([1, 2, -2, -1, -1.5, 1, 2, -2, -1, -1.5, -2.5, -2.5], [1, 1]),
    "W of chunk 1 alone": ([1, 2, 1, 2, -2, -2, -1, -1, -1.5, -1.5], [1, 2]),
    "three chunks": ([1, 2, 3, 1, -3, 2, -2, 3, -3, -3.5, -1, -1.5, -2, -1, -2.5, -2.5, -1.5, -3.5], [1, 3, 1]),
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    kind: str = "Linear"
    order: str = "lag 1"
    fused: bool = True
    delayed: bool = True
    way: str = "ddp"
    """"alone": no wrapper. "ddp": whole gradients and torch's SGD. "zero1": the distributed optimizer, overlap on."""
    steps: int = 3
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    width: int = WIDTH
    rows: int = ROWS

    @property
    def schedule(self) -> Any:
        order, counts = ORDERS[self.order]
        if not self.delayed:
            order = [entry for entry in order if entry == int(entry)]
        return parse_order(order, num_layers_per_chunk=counts)


def make_layers(case: Case) -> list[list[nn.Module]]:
    """The layers of each chunk."""
    torch.manual_seed(0)
    options = {"fuse_wgrad_accumulation": case.fused, "delay_wgrad_compute": case.delayed}
    chunks = [
        [KINDS[case.kind](case.width, **options) for _ in range(count)] for count in case.schedule.num_layers_per_chunk
    ]
    return [[layer.to(case.device, case.dtype) for layer in chunk] for chunk in chunks]


def samples_of(case: Case) -> list[tuple[Tensor]]:
    """Arguments for each chunk, microbatch and layer. The model's input requires no gradient."""
    schedule = case.schedule
    return [
        (
            torch.randn(
                case.rows, case.width, device=case.device, dtype=case.dtype, requires_grad=(chunk, layer) != (0, 0)
            ),
        )
        for chunk, layers in enumerate(schedule.num_layers_per_chunk)
        for _ in range(schedule.num_microbatches)
        for layer in range(layers)
    ]


def inputs_of(case: Case, step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    found = [torch.randn(case.rows, case.width, generator=generator) for _ in range(case.schedule.num_microbatches)]
    return [x.to(case.device, case.dtype) for x in found]


def loss_of(y: Tensor, microbatch: int) -> Tensor:
    return (y.float() * (microbatch + 1)).square().mean()


def weights_of(chunks: Sequence[Sequence[nn.Module]]) -> list[Tensor]:
    return [param.detach().clone() for layers in chunks for layer in layers for param in layer.parameters()]


def train(
    case: Case, graphed: bool, between: Callable[..., None] | None = None, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """Losses of each step and the weights at the end.

    between  called after each step with the step, the chunks, the optimizer, the wrapper and the executor
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    chunks = make_layers(case)
    model: Any = nn.ModuleList(nn.ModuleList(layers) for layers in chunks)
    if case.way != "alone":
        zero1 = case.way == "zero1"
        model = DistributedDataParallel(
            model,
            DistributedDataParallelConfig(
                overlap_grad_reduce=True,
                use_distributed_optimizer=zero1,
                overlap_param_gather=zero1,
                bucket_size=5 * case.width**2,
            ),
            process_group=group,
        )
    optimizer: Any = (
        DistributedOptimizer(model, 0.1, optimizer_class=torch.optim.SGD, momentum=0.9)
        if case.way == "zero1"
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    schedule = case.schedule
    parts: Any = chunks
    if graphed:
        layers = [layer for chunk in chunks for layer in chunk]
        callables = make_graphed_callables(
            layers,
            samples_of(case),
            order=schedule.order,
            num_layers_per_chunk=schedule.num_layers_per_chunk,
            num_warmup_iters=1,
        )
        parts = graphed_chunks(callables, schedule)
    executor = ScheduleExecutor(schedule, parts)
    losses = []
    for step in range(case.steps):
        losses += executor.run(inputs_of(case, step, rank), loss_of)
        if case.way != "alone":
            model.finish_grad_sync()
        if case.way == "ddp":
            model.expose_grads()
        optimizer.step()
        optimizer.zero_grad()
        if case.way != "alone":
            model.zero_grad_buffer()
        if between is not None:
            between(step=step, chunks=parts, optimizer=optimizer, model=model, executor=executor)
    return [*losses, *weights_of(chunks)]
