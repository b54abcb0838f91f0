"""Models with everything that a data-parallel wrapper can get wrong, and twenty steps of training on them.

What two trainings must have in common is in ``Trained``; ``assert_bitwise`` compares them, also where one is sharded.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.te_integration import Linear

__all__ = ["Everything", "Piece", "Trained", "Wide", "assert_bitwise", "expert_group", "run_steps", "train"]

STEPS = 20
ROWS = 3
BUCKET_SIZE = 300  # a handful of buckets, some of one parameter, some of many


class Everything(nn.Module):
    """Odd shapes, a scalar, bf16 beside fp32, tied, unused, half and wholly frozen parameters, and two experts.

    fused, delayed  of the linear layers, which are ours
    experts         parameters marked ``allreduce = False``
    variant         which experts these are: ranks with the same variant hold the same
    """

    features = 7

    def __init__(self, *, fused: bool, delayed: bool, experts: bool = True, variant: int = 0) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.delayed = delayed

        def linear(inputs: int, outputs: int, **options: Any) -> Linear:
            return Linear(inputs, outputs, fuse_wgrad_accumulation=fused, delay_wgrad_compute=delayed, **options)

        self.odd = linear(7, 15)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.plain = nn.Linear(15, 16)
        self.prime = linear(16, 17)
        self.tied = linear(16, 17, bias=False)
        self.tied.weight = self.prime.weight
        self.tied.mark_delayed_weights()
        self.norm = nn.LayerNorm(17)
        self.low = linear(17, 17, dtype=torch.bfloat16)
        self.frozen = nn.Linear(17, 17).requires_grad_(False)
        self.frozen_weight = linear(17, 17)
        self.frozen_weight.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3, 5))
        self.unused_layer = linear(5, 3)
        self.experts = nn.ModuleList()
        if experts:
            torch.manual_seed(100 + variant)
            self.experts.extend([linear(17, 13), linear(13, 17)])
            for parameter in self.experts.parameters():
                parameter.allreduce = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.odd(x).tanh() * self.scale
        x = self.plain(x).tanh()
        x = self.norm(self.prime(x) + self.tied(x.sin()))
        x = x + self.low(x.bfloat16()).float()
        x = x + self.frozen_weight(self.frozen(x)).tanh()
        if len(self.experts):
            x = x + self.experts[1](self.experts[0](x).tanh())
        return x

    def backward_dw(self) -> None:
        """Every delayed weight gradient, in the order of backward."""
        for module in reversed(list(self.modules())):
            if module is not self and hasattr(module, "backward_dw"):
                module.backward_dw()


class Wide(nn.Module):
    """A hidden width of 2880 = 45 x 64: whole multiples of 64, not of 128."""

    features = 9

    def __init__(self, *, fused: bool, delayed: bool) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.delayed = delayed
        options: dict[str, Any] = {"fuse_wgrad_accumulation": fused, "delay_wgrad_compute": delayed}
        self.up = Linear(9, 2880, **options)
        self.norm = nn.LayerNorm(2880)
        self.down = Linear(2880, 5, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).tanh())

    def backward_dw(self) -> None:
        self.down.backward_dw()
        self.up.backward_dw()


def expert_group(num_variants: int) -> dist.ProcessGroup | None:
    """The ranks that hold the same experts as this one: every ``num_variants``-th. None: all of them do."""
    if num_variants == 1:
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = list(range(rank % num_variants, size, num_variants))
    return dist.new_group(ranks, use_local_synchronization=True)


class Piece(NamedTuple):
    """What this rank holds of one parameter's gradient: elements [start, start + len(values))."""

    start: int
    values: Tensor


class Trained(NamedTuple):
    losses: list[float]
    grads: list[dict[str, Piece]]
    """Reduced gradients of every step."""
    weights: list[dict[str, Tensor]]
    """After every step, frozen ones too."""


def held_grads(ddp: DistributedDataParallel) -> dict[str, Piece]:
    """The reduced gradients that this rank may read."""
    pieces = {}
    for bucket in ddp.buckets:
        first, last = ddp.owned_range(bucket.layout)
        for slot in bucket.layout.slots:
            base = slot.start - bucket.layout.start
            start, end = max(base, first), min(slot.end - bucket.layout.start, last)
            values = bucket.grad_data[start:end] if start < end else bucket.grad_data[:0]
            pieces[slot.spec.name] = Piece(max(start - base, 0), values.clone())
    return pieces


def batch(step: int, microbatch: int, features: int) -> Tensor:
    """[ROWS, features], another one on every rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(10_000 * step + 100 * microbatch + rank)
    return torch.randn(ROWS, features, generator=generator)


def backward(ddp: DistributedDataParallel, step: int, microbatches: int) -> list[float]:
    """All microbatches of one iteration, up to ``finish_grad_sync``; their losses."""
    losses = []
    for index in range(microbatches):
        with nullcontext() if index == microbatches - 1 else ddp.no_sync():
            loss = (ddp(batch(step, index, ddp.module.features)) - 1).square().mean() / microbatches
            loss.backward()
            ddp.module.backward_dw()
        losses.append(loss.item())
    ddp.finish_grad_sync()
    return losses


def run_steps(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, microbatches: int, steps: int) -> Trained:
    trained = Trained([], [], [])
    for step in range(steps):
        trained.losses.extend(backward(ddp, step, microbatches))
        trained.grads.append(held_grads(ddp))
        optimizer.step()
        trained.weights.append({name: weight.detach().clone() for name, weight in ddp.module.named_parameters()})
        ddp.zero_grad_buffer()
    return trained


def train(
    model: str,
    *,
    fused: bool,
    delayed: bool,
    microbatches: int,
    num_variants: int = 1,
    steps: int = STEPS,
    fused_step: bool = True,
    **config: Any,
) -> Trained:
    """Train one of the models on the ranks of the default group.

    num_variants  of the experts
    fused_step    AdamW as torch's fused kernel, which on the CPU rounds the last elements of a tensor differently: so
                  its bits do not depend on the cut into shards, which ends at whole vectors, but on whole parameters do
    config        of ``DistributedDataParallel``
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    module: Any
    if model == "wide":
        module, experts = Wide(fused=fused, delayed=delayed), None
    else:
        module = Everything(fused=fused, delayed=delayed, variant=rank % num_variants)
        experts = expert_group(num_variants)
    options = {"bucket_size": BUCKET_SIZE} if "num_buckets" not in config else {}
    ddp = DistributedDataParallel(
        module, DistributedDataParallelConfig(**{**options, **config}), expert_process_group=experts
    )
    optimizer = DistributedOptimizer(ddp, lr=3e-2, weight_decay=0.1, fused=fused_step)
    return run_steps(ddp, optimizer, microbatches, steps)


def assert_bitwise(sharded: Trained, whole: Trained) -> None:
    """Losses, weights, and gradients of what ``sharded`` holds: equal to the bit, and not because nothing happened."""
    assert sharded.losses == whole.losses
    assert len(set(whole.losses)) == len(whole.losses), "a loss came twice: nothing was trained"
    for step, (ours, theirs) in enumerate(zip(sharded.grads, whole.grads, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, piece in ours.items():
            first = piece.start - theirs[name].start
            reference = theirs[name].values[first : first + len(piece.values)]
            assert torch.equal(piece.values, reference), f"gradient of {name} in step {step}"
    for step, (ours_now, theirs_now) in enumerate(zip(sharded.weights, whole.weights, strict=True)):
        assert ours_now.keys() == theirs_now.keys()
        for name, weight in ours_now.items():
            assert torch.equal(weight, theirs_now[name]), f"{name} after step {step}"
