"""Our modules under Megatron-core's own DistributedDataParallel: its buffers, its hooks, its optimizer flags.

Runs where ``megatron.core`` is installed and a GPU is present; elsewhere ``foreign.py`` has a stand-in.
"""

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import nn

from maingrad.te_integration import LayerNormLinear, LayerNormMLP, Linear

MICROBATCHES = 3
WIDTH = 64
CASES = {
    "plain": {},
    "overlap": {"overlap_grad_reduce": True},
    "distributed optimizer": {"use_distributed_optimizer": True},
    "overlap, distributed optimizer": {"overlap_grad_reduce": True, "use_distributed_optimizer": True},
}


def build(delay: bool) -> nn.Sequential:
    torch.manual_seed(0)
    options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": delay, "dtype": torch.bfloat16}
    return nn.Sequential(
        Linear(WIDTH, 96, **options),
        LayerNormLinear(96, WIDTH, normalization="RMSNorm", bias=False, **options),
        LayerNormMLP(WIDTH, 128, activation="swiglu", **options),
        nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16),
    )


def batch(index: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * index + rank)
    return torch.randn(32, WIDTH, generator=generator).cuda().bfloat16()


def under_megatron(
    settings: dict[str, Any], delay: bool
) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Two iterations: (what this rank may read of each reduced main_grad, our own sum in fp64) by parameter name."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1, bf16=True)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, delay_wgrad_compute=delay, bucket_size=4000, **settings
    )
    module = build(delay).cuda()
    ddp = DistributedDataParallel(config, ddp_config, module)
    world = dist.get_world_size()
    iterations = []
    for iteration in range(2):
        ddp.zero_grad_buffer()
        for index in range(MICROBATCHES):
            last = index == MICROBATCHES - 1
            with torch.enable_grad() if last else ddp.no_sync():
                ddp(batch(MICROBATCHES * iteration + index, dist.get_rank())).float().square().mean().backward()
                for layer in reversed(module):
                    if delay and hasattr(layer, "need_backward_dw"):
                        assert layer.need_backward_dw()
                        layer.backward_dw()
        ddp.finish_grad_sync()
        iterations.append((owned_gradients(ddp, module), exact_gradients(build(False).cuda(), iteration, world)))
    return iterations


def owned_gradients(ddp: Any, module: nn.Module) -> dict[str, torch.Tensor]:
    """Reduced gradients; where they were reduce-scattered, NaN outside this rank's shard."""
    sharded = ddp.ddp_config.use_distributed_optimizer and dist.get_world_size() > 1
    if sharded:
        for group in ddp.bucket_groups:
            for bucket in group.buckets:
                shard = bucket.grad_data.numel() // dist.get_world_size()
                first = dist.get_rank() * shard
                bucket.grad_data[:first] = float("nan")
                bucket.grad_data[first + shard :] = float("nan")
    return {name: p.main_grad.detach().double().cpu() for name, p in module.named_parameters()}


def exact_gradients(module: nn.Sequential, iteration: int, world: int) -> dict[str, torch.Tensor]:
    """Plain autograd's gradients, bf16 each, summed in fp64 over microbatches and averaged over the ranks."""
    for layer in module:
        layer.fuse_wgrad_accumulation = False
    total: dict[str, torch.Tensor] = {}
    for rank in range(world):
        for index in range(MICROBATCHES):
            module.zero_grad()
            module(batch(MICROBATCHES * iteration + index, rank)).float().square().mean().backward()
            for name, p in module.named_parameters():
                total[name] = total.get(name, 0.0) + p.grad.double().cpu() / world
    return total


def check(iterations: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]) -> None:
    for gradients, exact in iterations:
        assert gradients.keys() == exact.keys()
        for name, expected in exact.items():
            mine = ~gradients[name].isnan()
            if mine.any():
                error = (gradients[name][mine] - expected[mine]).norm() / expected.norm()
                # The reference rounds each of its gradients to bf16 once.
                assert error <= torch.finfo(torch.bfloat16).eps, name


def megatron_rank(settings: dict[str, Any], delay: bool) -> list[Any]:
    """Runs on each process. Megatron needs an NCCL default group; the next job needs gloo again."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    ports: list[Any] = [free_port(), free_port()]
    dist.broadcast_object_list(ports)
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=world)
    try:
        return under_megatron(settings, delay)
    finally:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[1]}", rank=rank, world_size=world)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.gpu
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delayed"])
@pytest.mark.parametrize("name", CASES)
def test_one_gpu(name: str, delay: bool) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    for iterations in run_ranks(megatron_rank, 1, CASES[name], delay, timeout=90.0):
        check(iterations)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("delay", [False, True], ids=["now", "delayed"])
@pytest.mark.parametrize("name", CASES)
def test_two_gpus(name: str, delay: bool) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    for iterations in run_ranks(megatron_rank, 2, CASES[name], delay, timeout=90.0):
        check(iterations)
