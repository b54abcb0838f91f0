"""What only a GPU shows: streams, missing waits, host synchronisation; NCCL compared with simulated ranks."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from host_syncs import cuda_waits_are_errors
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.launch import simulate
from maingrad.te_integration import Linear

Outcome = tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]
STEPS = 5
MICROBATCHES = 3
CONFIGS = {
    "all-reduce": {"overlap_grad_reduce": True},
    "reduce-scatter": {"overlap_grad_reduce": True, "use_distributed_optimizer": True},
    "reduce-scatter, no overlap": {"use_distributed_optimizer": True},
    "averaged by NCCL": {
        "overlap_grad_reduce": True,
        "use_distributed_optimizer": True,
        "average_in_collective": True,
    },
}


def build(dtype: torch.dtype = torch.float32, fused: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, 48),
        Linear(48, 96, dtype=torch.float32, fuse_wgrad_accumulation=fused),
        nn.GELU(),
        nn.LayerNorm(96),
        Linear(96, 50, bias=False, fuse_wgrad_accumulation=fused),
    ).to(dtype)


def batch(step: int, microbatch: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    return torch.randint(0, 50, (6, 9), generator=generator)


def train(config: dict[str, object], device: str, group: dist.ProcessGroup | None = None) -> Outcome:
    """Losses of each step, this rank's gradients of the first step, and the final weights, on the CPU."""
    rank = 0 if group is None else group.rank()
    ddp = DistributedDataParallel(
        build().to(device), DistributedDataParallelConfig(bucket_size=1500, **config), process_group=group
    )
    # A large eps keeps AdamW from turning rounding noise in tiny gradients into steps of full length.
    optimizer = DistributedOptimizer(ddp, lr=1e-2, eps=1e-3, max_grad_norm=0.5)
    losses, gradients = [], {}
    for step in range(STEPS):
        total = 0.0
        for index in range(MICROBATCHES):
            tokens = batch(step, index, rank).to(device)
            with nullcontext() if index == MICROBATCHES - 1 else ddp.no_sync():
                loss = nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), tokens.flatten()) / MICROBATCHES
                loss.backward()
            total += loss.item()
        ddp.finish_grad_sync()
        if step == 0:
            for bucket in ddp.buckets:
                gradients[bucket.name] = bucket.grad_data[slice(*ddp.owned_range(bucket.layout))].cpu().clone()
        optimizer.step()
        ddp.zero_grad_buffer()
        losses.append(total)
    return losses, gradients, {name: p.detach().cpu().clone() for name, p in ddp.module.named_parameters()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["all-reduce", "reduce-scatter"])
def test_one_gpu_trains_like_the_cpu(name: str) -> None:
    on_cpu, on_gpu = train(CONFIGS[name], "cpu"), train(CONFIGS[name], "cuda")
    compare(on_gpu, on_cpu)


@pytest.mark.gpu
def test_bf16_fused_and_hook_accumulation_agree_within_bf16_rounding() -> None:
    grads = {}
    for fused in (True, False):
        model = build(torch.bfloat16, fused).cuda()
        ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True))
        with ddp.no_sync():
            for index in range(8):
                tokens = batch(0, index, 0).cuda()
                nn.functional.cross_entropy(ddp(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        ddp.finish_grad_sync()
        grads[fused] = {name: p.main_grad.double() for name, p in model.named_parameters()}
    for name, value in grads[True].items():
        error = (value - grads[False][name]).norm() / grads[False][name].norm()
        assert error <= torch.finfo(torch.bfloat16).eps, name


@pytest.mark.gpu
def test_a_training_step_never_synchronises_the_host() -> None:
    ddp = DistributedDataParallel(build().cuda(), DistributedDataParallelConfig(overlap_grad_reduce=True))
    optimizer = DistributedOptimizer(ddp, lr=1e-2, max_grad_norm=1.0)
    tokens = batch(0, 0, 0).cuda()

    def step() -> None:
        with ddp.no_sync():
            nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), tokens.flatten()).backward()
        nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), tokens.flatten()).backward()
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.zero_grad_buffer()

    step()
    with cuda_waits_are_errors():
        step()


class SideStreamGrad(torch.autograd.Function):
    """Identity with a slow backward, on the stream of its forward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, dy: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(100_000_000)  # about 50 ms
        return dy.clone()


class TwoStreams(nn.Module):
    """One branch runs its forward, and so its backward, on a stream of its own."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.side = torch.cuda.Stream()
        self.here = Linear(64, 64, fuse_wgrad_accumulation=fused)
        self.there = Linear(64, 64, fuse_wgrad_accumulation=fused)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            y = SideStreamGrad.apply(self.there(x))
        torch.cuda.current_stream().wait_stream(self.side)
        return self.here(x) + y


def two_streams_gradients(fused: bool, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    model = TwoStreams(fused).cuda()
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True), process_group=group)
    x = torch.linspace(-1, 1, 640, device="cuda").view(10, 64)
    for _ in range(3):
        ddp.zero_grad_buffer()
        ddp(x).square().sum().backward()
        ddp.finish_grad_sync()
    return [p.main_grad.cpu() for p in model.parameters()]


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
def test_gradients_from_several_streams_are_waited_for(fused: bool) -> None:
    check_two_streams(two_streams_gradients(fused))


def check_two_streams(gradients: list[torch.Tensor]) -> None:
    model = TwoStreams(False).cpu()
    x = torch.linspace(-1, 1, 640).view(10, 64)
    (model.here(x) + model.there(x)).square().sum().backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("input_needs_grad", [True, False])
def test_the_hook_runs_on_the_functions_stream_after_it(input_needs_grad: bool) -> None:
    """The hook runs where ``.grad`` is None, on the stream of the fused backward, with and without a gradient of x."""
    seen = []
    layer = Linear(8, 8, device="cuda", fuse_wgrad_accumulation=True)
    ddp = DistributedDataParallel(layer)
    layer.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append((p.grad, torch.cuda.current_stream().cuda_stream))
    )
    x = torch.randn(4, 8, device="cuda", requires_grad=input_needs_grad)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = ddp(x)
    torch.cuda.current_stream().wait_stream(side)
    y.sum().backward()
    assert seen == [(None, side.cuda_stream)]
    torch.testing.assert_close(layer.weight.main_grad, x.detach().sum(0).expand(8, 8))


@pytest.mark.gpu
def test_the_timeline_speaks_of_device_time() -> None:
    ddp = DistributedDataParallel(
        build().cuda(), DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1500)
    )
    tokens = batch(0, 0, 0).cuda()
    with ddp.record_timeline() as timeline:
        nn.functional.cross_entropy(ddp(tokens).flatten(0, 1), tokens.flatten()).backward()
        ddp.finish_grad_sync()
    (backward,) = timeline.backwards
    assert 0 <= backward.start < backward.end
    assert backward.synced
    assert len(timeline.buckets) == len(ddp.buckets)
    for span in timeline.buckets:
        assert span.ready <= span.launched <= span.finished


@pytest.mark.gpu
def test_max_connections_of_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ValueError, match="CUDA_DEVICE_MAX_CONNECTIONS"):
        DistributedDataParallel(build().cuda(), DistributedDataParallelConfig(overlap_grad_reduce=True))


# ---- Two GPUs. ----


def nccl_rank() -> tuple[dict[str, Outcome], dict[bool, list[torch.Tensor]]]:
    """On each of two gloo processes, with an NCCL group: every configuration, and the gradients of two streams."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    results = {name: train(config, f"cuda:{rank}", group) for name, config in CONFIGS.items()}
    streams = {fused: two_streams_gradients(fused, group) for fused in (True, False)}
    dist.destroy_process_group(group)
    return results, streams


@pytest.fixture(scope="module")
def nccl_results() -> list[tuple[dict[str, Outcome], dict[bool, list[torch.Tensor]]]]:
    return run_ranks(nccl_rank, 2, timeout=100.0)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", list(CONFIGS))
def test_two_gpus_train_like_two_simulated_ranks(nccl_results: list[object], name: str) -> None:
    config = {key: value for key, value in CONFIGS[name].items() if key != "average_in_collective"}
    simulated = simulate(lambda: train(config, "cpu", dist.group.WORLD), 2)
    for rank, (results, _) in enumerate(nccl_results):
        compare(results[name], simulated[rank])


@pytest.mark.gpu(2)
def test_two_gpus_wait_for_every_stream(nccl_results: list[object]) -> None:
    for _, streams in nccl_results:
        for gradients in streams.values():
            check_two_streams(gradients)


def compare(run: Outcome, reference: Outcome) -> None:
    """fp32 on two kinds of device: gradients of one step to 1e-5, losses and weights after five steps to 1e-4."""
    losses, gradients, weights = run
    reference_losses, reference_gradients, reference_weights = reference
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference_losses), rtol=1e-4, atol=0)
    for name, value in reference_gradients.items():
        if value.norm() > 0:
            assert (gradients[name] - value).norm() / value.norm() <= 1e-5, name
    for name, value in reference_weights.items():
        assert (weights[name] - value).norm() / value.norm() <= 1e-4, name
