"""Exchanges between the ranks that compute one sample, forward and backward, against one rank with everything."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.launch import make_optimizer, parallelize, simulate
from maingrad.launch.parallelizing import exchanges
from maingrad.launch.parallelizing.exchanges import ContextRanks, ring_attention, ulysses
from maingrad.te_integration import Linear

HEADS, WIDTH, LENGTH, ROWS = 8, 4, 16, 8


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def operands(kv_heads: int, heads: int = HEADS) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, each, LENGTH, WIDTH, generator=draw, dtype=torch.float64) for each in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "heads"),
    [(ranks, kv_heads, HEADS) for ranks in (1, 2, 4, 8) for kv_heads in (8, 4, 2, 1)] + [(4, 6, 12), (2, 3, 6)],
)
def test_ulysses_is_attention_over_whole_sequences(ranks: int, kv_heads: int, heads: int):
    whole = [x.requires_grad_() for x in operands(kv_heads, heads)]
    expected = causal(*whole)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected * weight).sum().backward()

    def job() -> None:
        def own(x: Tensor) -> Tensor:
            return x.detach().chunk(ranks, dim=2)[dist.get_rank()]

        parts = [own(x).clone().requires_grad_() for x in whole]
        y = ulysses(causal, *parts, dist.group.WORLD)
        torch.testing.assert_close(y, own(expected), rtol=1e-12, atol=1e-12)
        (y * own(weight)).sum().backward()
        for part, x in zip(parts, whole, strict=True):
            torch.testing.assert_close(part.grad, own(x.grad), rtol=1e-12, atol=1e-12)

    simulate(job, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_ring_is_causal_attention_over_whole_sequences(ranks: int, kv_heads: int):
    whole = [torch.cat([x, x.flip(2) / 2], 2)[:, :, :24].requires_grad_() for x in operands(kv_heads)]
    expected = causal(*whole)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (expected * weight).sum().backward()

    def job() -> None:
        context = ContextRanks(dist.group.WORLD, ring=True)
        parts = [context.own(x.detach(), 2).requires_grad_() for x in whole]
        y = ring_attention(*parts, dist.group.WORLD)
        torch.testing.assert_close(y, context.own(expected, 2), rtol=1e-6, atol=1e-6)  # torch merges in fp32
        (y * context.own(weight, 2)).sum().backward()
        for part, x in zip(parts, whole, strict=True):
            torch.testing.assert_close(part.grad, context.own(x.grad, 2), rtol=1e-6, atol=1e-6)

    simulate(job, ranks)


def test_a_rings_gradients_lie_in_memory_as_kernels_want_them(monkeypatch: pytest.MonkeyPatch):
    """However they come: those of a sum are all one element."""
    seen, backward = list[bool](), exchanges._ring_backward

    def spied() -> Any:
        def run(*args: Any, grad_out: Tensor, **options: Any) -> Any:
            seen.append(grad_out.is_contiguous())
            return backward()(*args, grad_out=grad_out, **options)

        return run

    monkeypatch.setattr(exchanges, "_ring_backward", spied)

    def job() -> None:
        parts = [x[:, :, :8].float().requires_grad_() for x in operands(HEADS)]
        y = ring_attention(*parts, dist.group.WORLD)
        y.sum().backward()
        ring_attention(*parts, dist.group.WORLD).transpose(1, 2).flatten(2).square().sum().backward()

    simulate(job, 2)
    assert seen == [True] * 4


def test_heads_that_do_not_divide():
    def job() -> None:
        x = torch.zeros(1, 3, 4, 2)
        with pytest.raises(ValueError, match="3 heads do not divide among 2 context-parallel ranks"):
            ulysses(causal, x, x, x, dist.group.WORLD)

    simulate(job, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_ring_of_gpus_multiplies_no_wide_dtype(dtype: torch.dtype):
    """A stand-in for a tensor on a GPU."""
    x: Any = SimpleNamespace(is_cuda=True, dtype=dtype)
    with pytest.raises(TypeError, match=f"multiplies bfloat16 or float16 on a GPU, got {dtype}"):
        ring_attention(x, x, x, x)


# ---- A user's model, whose attention asks ``ulysses``, under the wrappers. ----


class Model(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.qkv, self.out = (Linear(HEADS * WIDTH, n * HEADS * WIDTH, bias=False) for n in (3, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (HEADS, WIDTH)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(ulysses(causal, q, k, v, self.group).transpose(1, 2).flatten(2))


def model(group: dist.ProcessGroup | None = None) -> Model:
    torch.manual_seed(5)
    return Model(group)


def samples() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets, and which places count: not equally many on all ranks."""
    draw = torch.Generator().manual_seed(6)
    x, y = (torch.randn(ROWS, LENGTH, HEADS * WIDTH, generator=draw) for _ in range(2))
    return x, y, torch.rand(ROWS, LENGTH, generator=draw) > 0.3


def losses(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (module(x) - y).square().mean(-1)


def plain_step(counted: bool) -> list[Tensor]:
    module = model()
    x, y, counts = samples()
    each = losses(module, x, y)
    (each[counts].mean() if counted else each.mean()).backward()
    torch.optim.SGD(module.parameters(), lr=0.5).step()
    return [param.detach() for param in module.parameters()]


@pytest.mark.in_turn
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (2, 2), (1, 4), (2, 4)])
@pytest.mark.parametrize("parallel", ["ddp", "zero1", "zero3"])
def test_a_model_with_context_parallel_attention_takes_the_plain_step(
    parallel: str, dp: int, cp: int, microbatches: int
):
    expected = plain_step(counted=False)

    def job() -> None:
        mesh = init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
        module = model(mesh["cp"].get_group())
        wrapped = parallelize(module, parallel, mesh=mesh["dp", "cp"]._flatten())
        optimizer = make_optimizer(wrapped, torch.optim.SGD, lr=0.5)
        x, y, _ = (
            part.chunk(dp)[mesh.get_local_rank("dp")].chunk(cp, dim=1)[mesh.get_local_rank("cp")] for part in samples()
        )
        for number, (inputs, targets) in enumerate(zip(x.chunk(microbatches), y.chunk(microbatches), strict=True)):
            last = number == microbatches - 1
            with torch.enable_grad() if last else wrapped.no_sync():
                (losses(wrapped, inputs, targets).mean() / microbatches).backward()
        optimizer.step()
        assert_params(module, wrapped, expected)

    simulate(job, dp * cp)


def assert_params(module: nn.Module, wrapped: nn.Module, expected: list[Tensor]) -> None:
    state = wrapped.state_dict()
    found = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in state.values()]
    assert len(found) == len(expected)
    for value, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(value, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("zero1", [False, True])
def test_a_loss_of_unequally_many_tokens_is_averaged_over_all_of_them(zero1: bool):
    expected = plain_step(counted=True)

    def job() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        module = model(mesh["cp"].get_group())
        config = DistributedDataParallelConfig(calculate_per_token_loss=True, use_distributed_optimizer=zero1)
        wrapped = DistributedDataParallel(module, config, process_group=mesh["dp", "cp"]._flatten())
        optimizer = make_optimizer(wrapped, torch.optim.SGD, lr=0.5)
        x, y, counts = (
            part.chunk(2)[mesh.get_local_rank("dp")].chunk(2, dim=1)[mesh.get_local_rank("cp")] for part in samples()
        )
        losses(wrapped, x, y)[counts].sum().backward()
        wrapped.finish_grad_sync(num_tokens=counts.sum())
        optimizer.step()
        assert_params(module, wrapped, expected)

    simulate(job, 4)
