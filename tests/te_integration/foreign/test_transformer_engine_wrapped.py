"""Transformer Engine's modules on two GPUs under each wrapper: the gradients are those of the plain modules."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, ROWS, NUM_EXPERTS = 128, 96, 40
MICROBATCHES, ITERATIONS = 3, 3
SLEEP_CYCLES = 100_000_000  # about 50 ms
MODULES = ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"]
WRAPPERS = ["ddp", "zero1", "fully_shard", "fully_shard, fp32 shards"]
Gradients = dict[str, tuple[int, Tensor]]
"""By parameter: the first element that this rank holds of its gradient, and what it holds, flat."""


class Case(NamedTuple):
    fused: bool
    delayed: bool
    bias: bool


CASES = [Case(*each) for each in product([False, True], repeat=3)]


class Experts(nn.Module):
    """``te.GroupedLinear``; each batch fills other experts, and leaves most of them without rows."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        first = int(x.float().abs().sum()) % (NUM_EXPERTS - 12)
        splits = [0] * NUM_EXPERTS
        for index, rows in enumerate([17, 0, 31, 0, 0, 3, 8, 0, 1, 20, 16]):
            splits[first + index] = rows
        return self.experts(x, splits)


def make_model(name: str, case: Case, dtype: torch.dtype) -> nn.Sequential:
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    options: dict[str, Any] = {
        "params_dtype": dtype,
        "device": "cuda",
        "bias": case.bias,
        "fuse_wgrad_accumulation": case.fused,
        "delay_wgrad_compute": case.delayed,
    }
    if name == "GroupedLinear":
        module: nn.Module = Experts(te.GroupedLinear(NUM_EXPERTS, WIDTH, WIDTH, **options))
    else:
        module = getattr(te, name)(WIDTH, WIDTH, **options)
    ends = [nn.Linear(WIDTH, WIDTH, dtype=dtype, device="cuda") for _ in range(2)]
    return nn.Sequential(ends[0], module, ends[1])


def batch(rank: int, iteration: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * iteration + 10 * index + rank)
    return torch.randn(ROWS, WIDTH, generator=generator).to("cuda", torch.bfloat16)


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.float().sub(0.5).square().mean()


class Wrapped:
    """A model under one of the wrappers, with what a training loop does to it."""

    def __init__(self, model: nn.Sequential, wrapper: str) -> None:
        self.inner, self.wrapper = model, wrapper
        self.group = dist.new_group(backend="nccl")
        if wrapper.startswith("fully_shard"):
            mesh = DeviceMesh.from_group(self.group, "cuda")
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            for module in (model[1], model):
                fully_shard(module, mesh, mixed_precision=policy)
            self.model: Any = model
            self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            return
        sharded = wrapper == "zero1"
        config = DistributedDataParallelConfig(
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=True,
            overlap_param_gather=sharded,
            bucket_size=2 * WIDTH * WIDTH,
        )
        self.model = DistributedDataParallel(model, config, process_group=self.group)
        if sharded:
            self.optimizer = DistributedOptimizer(self.model, lr=0.1, optimizer_class=torch.optim.SGD)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def last_or_not(self, index: int) -> AbstractContextManager[None]:
        return nullcontext() if index == MICROBATCHES - 1 else self.model.no_sync()

    def gradients(self) -> Gradients:
        if self.wrapper.startswith("fully_shard"):
            return {name: (p.shard.start, p.grad.detach().view(-1)) for name, p in self.model.named_parameters()}
        found = {}
        for bucket in self.model.buckets:
            start, end = self.model.owned_range(bucket.layout)
            for slot in bucket.layout.slots:
                at = slot.start - bucket.layout.start
                first, last = max(start, at), min(end, at + slot.spec.numel)
                found[slot.spec.name] = (max(first - at, 0), bucket.grad_data[first : max(first, last)])
        return found

    def step(self) -> None:
        if self.wrapper == "ddp":
            self.model.expose_grads()
        self.optimizer.step()
        (self.optimizer.zero_grad if self.wrapper.startswith("fully_shard") else self.model.zero_grad_buffer)()

    def copy_weights_to(self, plain: nn.Module) -> None:
        if self.wrapper == "zero1":
            self.optimizer.finish_param_sync()
        with self.model.unsharded() if self.wrapper.startswith("fully_shard") else nullcontext(), torch.no_grad():
            for mine, theirs in zip(self.inner.parameters(), plain.parameters(), strict=True):
                theirs.copy_(mine)


def expected(plain: nn.Module, iteration: int) -> dict[str, Tensor]:
    """The mean over ranks of their sums over microbatches: each gradient is rounded to bf16 once."""
    total = {name: torch.zeros_like(param, dtype=torch.float64) for name, param in plain.named_parameters()}
    for rank, index in product(range(dist.get_world_size()), range(MICROBATCHES)):
        plain.zero_grad()
        loss_of(plain(batch(rank, iteration, index))).backward()
        for name, param in plain.named_parameters():
            total[name] += param.grad.double() / dist.get_world_size()
    return total


def errors(name: str, wrapper: str, case: Case) -> Iterator[tuple[str, float, float]]:
    """Parameter, the norm of the error of what this rank holds, and that of the whole gradient; all iterations."""
    rank = dist.get_rank()
    plain = make_model(name, Case(fused=False, delayed=False, bias=case.bias), torch.bfloat16)
    model = make_model(name, case, torch.float32 if "fp32" in wrapper else torch.bfloat16)
    wrapped = Wrapped(model, wrapper)
    for iteration in range(ITERATIONS):
        for index in range(MICROBATCHES):
            with wrapped.last_or_not(index):
                loss_of(wrapped.model(batch(rank, iteration, index))).backward()
                if case.delayed:
                    (model[1].experts if name == "GroupedLinear" else model[1]).backward_dw()
        wrapped.model.finish_grad_sync()
        found = {each: (first, values.clone()) for each, (first, values) in wrapped.gradients().items()}
        wrapped.copy_weights_to(plain)
        for each, exact in expected(plain, iteration).items():
            first, values = found[each]
            error = values.double() - exact.view(-1)[first : first + len(values)]
            yield f"{each}, iteration {iteration}", float(error.norm()), float(exact.norm())
        if iteration % dist.get_world_size() == rank:
            torch.cuda._sleep(SLEEP_CYCLES)
        wrapped.step()


def worst(name: str, wrapper: str) -> dict[Case, tuple[float, str]]:
    """On each of two processes: for each case the largest relative error, and where it is."""
    torch.cuda.set_device(dist.get_rank())
    found = {}
    for case in CASES:
        found[case] = max(
            (error / norm if norm else float("inf") if error else 0.0, at)
            for at, error, norm in errors(name, wrapper, case)
        )
    return found


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_their_gradients_are_those_of_plain_modules(wrapper: str, name: str) -> None:
    pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
    for rank, found in enumerate(run_ranks(worst, 2, name, wrapper, timeout=120.0)):
        for case, (error, where) in found.items():
            # The plain gradients are rounded to bf16 once, the weights' that are shown in bf16 once more.
            assert error <= torch.finfo(torch.bfloat16).eps / 2, f"rank {rank}, {case}: {where}: off by {error:.4f}"
