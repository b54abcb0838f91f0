"""CUDA graphs of layers, in bf16: bit for bit as the layers do eagerly."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from graphed import KINDS, ORDERS, Case, train
from host_syncs import cuda_waits_are_errors
from torch import nn

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import (
    GroupedLinear,
    GroupedMLP,
    LayerNormMLP,
    Linear,
    ScaledSwiGLU,
    Sequential,
    graphed_chunks,
    make_graphed_callables,
)
from maingrad.te_integration.pipeline import ScheduleExecutor, parse_order

ON_A_GPU = Case(device="cuda", dtype=torch.bfloat16, width=64, rows=48)

# Each kind and order, and each pair of the other options.
CASES = [
    replace(ON_A_GPU, kind=kind, order=order, way=way, delayed=delayed, fused=fused)
    for number, (kind, order) in enumerate(
        [*zip(KINDS, list(ORDERS)[: len(KINDS)], strict=True), *((kind, "interleaved") for kind in KINDS)]
        + [("block", order) for order in ORDERS]
    )
    for way, delayed, fused in [
        [("ddp", True, True), ("zero1", False, True)],
        [("zero1", True, True), ("ddp", False, False)],
        [("zero1", True, False), ("alone", True, False)],
    ][number % 3]
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.kind}-{c.order}-{c.way}-{c.delayed}-{c.fused}")
def test_an_order_trains_as_it_does_eagerly(case):
    eager, graphed = train(case, graphed=False), train(case, graphed=True)
    assert all(torch.isfinite(tensor).all() for tensor in eager)
    assert all(map(torch.equal, eager, graphed))


def nccl_rank(case):
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl")
    on_rank = replace(case, device=f"cuda:{rank}")
    results = [[tensor.cpu() for tensor in train(on_rank, graphed, group=group)] for graphed in (False, True)]
    dist.destroy_process_group(group)
    return results


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    "case",
    [
        replace(ON_A_GPU, kind="block", order="interleaved", way="ddp"),
        replace(ON_A_GPU, kind="block", order="interleaved", way="zero1"),
        replace(ON_A_GPU, kind="LayerNormMLP", order="lag 3", way="zero1"),
        replace(ON_A_GPU, kind="several", order="three chunks", way="zero1", delayed=False),
        replace(ON_A_GPU, kind="split", order="lag 1", way="zero1", fused=False),
    ],
    ids=lambda c: f"{c.kind}-{c.order}-{c.way}",
)
def test_two_ranks_train_as_they_do_eagerly(case):
    for eager, graphed in run_ranks(nccl_rank, 2, case, timeout=100.0):
        assert all(map(torch.equal, eager, graphed))


# ---- Experts: one capture serves all splits. ----

EXPERTS, K, F, ROWS = 4, 64, 96, 128
SPLITS = [[32, 32, 32, 32], [0, 100, 0, 28], [128, 0, 0, 0], [17, 3, 40, 20], [0, 0, 0, 0], [1, 2, 3, 4]]


def grouped_linear(**options):
    return GroupedLinear(EXPERTS, K, F, **options), 0


def grouped_mlp(**options):
    return GroupedMLP(EXPERTS, K, F, **options), 1


def in_sequence(**options):
    first, second = GroupedLinear(EXPERTS, K, 2 * F, **options), GroupedLinear(EXPERTS, F, K, **options)
    return Sequential(first, ScaledSwiGLU(), second), 2


def arguments(splits, form, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, K, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
    counts = torch.tensor(splits, device="cuda")
    probs = torch.rand(ROWS, generator=generator).to("cuda").requires_grad_()
    return [(x, counts), (x, counts, probs), (x, counts, probs, counts)][form]


def experts_gradients(make, packed, delayed, fused, graphed):
    """Outputs, input gradients and accumulators of three iterations of two microbatches, with other splits in each."""
    torch.manual_seed(0)
    options = {"fuse_wgrad_accumulation": fused, "delay_wgrad_compute": delayed}
    module, form = make(single_grouped_weight=packed, dtype=torch.bfloat16, device="cuda", **options)
    ddp = DistributedDataParallel(module)
    calls = [module, module]
    if graphed:
        order = [1, 1, -1, -1, -1.5, -1.5] if delayed else [1, 1, -1, -1]
        calls = make_graphed_callables([module], [arguments(SPLITS[0], form, 9)] * 2, order=order)
    found = []
    for iteration in range(3):
        given = [arguments(SPLITS[2 * iteration + k], form, 2 * iteration + k) for k in range(2)]
        outputs = [call(*each) for call, each in zip(calls, given, strict=True)]
        found += [output.detach().clone() for output in outputs]
        for k, (output, (x, counts, *_)) in enumerate(zip(outputs, given, strict=True)):
            assert not output[int(counts.sum()) :].any()
            with ddp.no_sync():
                (output.float() * (k + 1)).square().mean().backward()
            assert not x.grad[int(counts.sum()) :].any()
            found.append(x.grad.clone())
        if delayed:
            for call in calls:
                call.backward_dw()
        ddp.finish_grad_sync()
        found += [param.main_grad.clone() for param in module.parameters()]
        ddp.zero_grad_buffer()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("delayed", [True, False], ids=["delayed", "now"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "discrete"])
@pytest.mark.parametrize("make", [grouped_linear, grouped_mlp, in_sequence])
def test_experts_are_captured_once_for_all_splits(make, packed, delayed, fused):
    eager, graphed = (experts_gradients(make, packed, delayed, fused, each) for each in (False, True))
    for number, (one, other) in enumerate(zip(eager, graphed, strict=True)):
        assert torch.isfinite(one).all()
        assert torch.equal(one, other), number


# ---- What only a GPU shows. ----


def mlp(**options):
    torch.manual_seed(0)
    options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True, **options}
    return LayerNormMLP(64, 256, device="cuda", dtype=torch.bfloat16, **options)


def x_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(32, 64, generator=generator).to("cuda", torch.bfloat16).requires_grad_()


@pytest.mark.gpu
def test_no_replay_waits_for_the_device():
    layer = mlp()
    ddp = DistributedDataParallel(layer)
    (graphed,) = make_graphed_callables([layer], [(x_of(),)])
    x = x_of()
    for _ in range(2):
        graphed(x).sum().backward()
        graphed.backward_dw()
        ddp.finish_grad_sync()
        ddp.zero_grad_buffer()
    torch.cuda.synchronize()
    with cuda_waits_are_errors():
        graphed(x).sum().backward()
        graphed.backward_dw()
        ddp.finish_grad_sync()


@pytest.mark.gpu
def test_weight_gradients_on_another_stream():
    """Replays go behind each other, on whatever streams they are."""
    outcomes = []
    for side in (None, torch.cuda.Stream()):
        layer = mlp()
        ddp = DistributedDataParallel(layer)
        calls = make_graphed_callables([layer], [(x_of(),)] * 2, order=[1, -1, 1, -1.5, -1, -1.5])
        for iteration in range(3):
            with ddp.no_sync():
                first = calls[0](x_of(2 * iteration)).float().square().mean()
                torch.cuda._sleep(2_000_000)
                first.backward()
                second = calls[1](x_of(2 * iteration + 1)).float().square().mean()
                for loss, call in ((None, calls[0]), (second, calls[1])):
                    if loss is not None:
                        loss.backward()
                    with torch.cuda.stream(side):
                        torch.cuda._sleep(2_000_000)
                        call.backward_dw()
            ddp.finish_grad_sync()
            outcomes.append([param.main_grad.clone() for param in layer.parameters()])
            ddp.zero_grad_buffer()
    half = len(outcomes) // 2
    for one, other in zip(outcomes[:half], outcomes[half:], strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.gpu
def test_dropout_draws_anew_and_backward_takes_the_mask_of_its_forward():
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(256, 256, bias=False, device="cuda"))
    with torch.no_grad():
        module[1].weight.copy_(torch.eye(256))
    x = torch.ones(4, 256, device="cuda", requires_grad=True)
    calls = make_graphed_callables([module], [(x,)] * 2, order=[1, 1, -1, -1])
    masks = []
    for _ in range(2):
        inputs = [torch.ones(4, 256, device="cuda", requires_grad=True) for _ in calls]
        outputs = [call(each) for call, each in zip(calls, inputs, strict=True)]
        for each, output in zip(inputs, outputs, strict=True):
            masks.append(output.detach().clone())
            output.sum().backward()
            assert torch.equal(each.grad, masks[-1])
    assert all(not torch.equal(masks[i], masks[j]) for i in range(4) for j in range(i))


class ReadsOnce(nn.Module):
    def __init__(self, eager):
        super().__init__()
        self.linear = Linear(64, 64, device="cuda", fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
        self.left = eager

    def forward(self, x):
        self.left -= 1
        y = self.linear(x)
        return y if self.left >= 0 else y * y.sum().item()


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_the_model_as_it_was():
    layer = ReadsOnce(eager=4)
    ddp = DistributedDataParallel(layer)
    x = torch.randn(8, 64, device="cuda", requires_grad=True)
    with ddp.no_sync():
        layer.linear(x).sum().backward()
        layer.linear.backward_dw()
    before = layer.linear.weight.main_grad.clone()
    with pytest.raises(RuntimeError, match="captur") as raised:
        make_graphed_callables([layer], [(x,)])
    assert any("nothing was captured" in note for note in raised.value.__notes__)
    layer.linear(x).sum().backward()
    layer.linear.backward_dw()
    ddp.finish_grad_sync()
    assert torch.equal(layer.linear.weight.main_grad, 2 * before)
    layer.left = 100
    (graphed,) = make_graphed_callables([layer], [(x,)])  # the device captures again
    assert torch.equal(graphed(x), layer(x))


@pytest.mark.gpu
def test_memory_does_not_grow_with_microbatches_that_come_one_after_the_other():
    def memory(microbatches):
        torch._C._cuda_clearCublasWorkspaces()  # else: 32 MiB, unless an earlier test used the stream
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        layers = [Linear(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        samples = [(torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True),)] * 2
        order = [1, -1] * microbatches
        callables = make_graphed_callables(layers, samples * microbatches, order=order, num_layers_per_chunk=[2])
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        used = torch.cuda.memory_reserved() - before
        for each in callables:
            each.reset()
        return used

    memory(1)
    assert memory(6) <= memory(2) + 2**24


@pytest.mark.gpu
def test_an_executor_trains_experts_and_dense_layers_together():
    """Chunk 1 is dense, chunk 2 has experts whose splits the host never sees."""
    outcomes = []
    order = [1, 2, 1, 2, -2, -1, -2, -1, -2.5, -1.5, -2.5, -1.5]
    schedule = parse_order(order, num_layers_per_chunk=[1, 1])

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": True}
            self.mlp = GroupedMLP(EXPERTS, 64, 96, device="cuda", dtype=torch.bfloat16, **options)

        def forward(self, x):
            counts = (x.detach().float().sum().abs() * 100).long() % 6 + torch.arange(EXPERTS, device=x.device)
            return self.mlp(x, counts)

    for graphed in (False, True):
        torch.manual_seed(0)
        chunks = nn.ModuleList([mlp(), Experts()])
        ddp = DistributedDataParallel(chunks)
        parts = list(chunks)
        if graphed:
            samples = [(x_of().detach(),)] * 2 + [(x_of(),)] * 2
            parts = graphed_chunks(
                make_graphed_callables(parts, samples, order=order, num_layers_per_chunk=[1, 1]), schedule
            )
        executor = ScheduleExecutor(schedule, parts)
        for step in range(3):
            inputs = [x_of(10 * step + k).detach() for k in range(2)]
            losses = executor.run(inputs, lambda y, microbatch: y.float().square().mean())
            ddp.finish_grad_sync()
            outcomes.append([*losses, *(param.main_grad.clone() for param in chunks.parameters())])
            ddp.zero_grad_buffer()
    half = len(outcomes) // 2
    for eager, replayed in zip(outcomes[:half], outcomes[half:], strict=True):
        assert all(map(torch.equal, eager, replayed))
