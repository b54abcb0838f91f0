"""``GroupedLinear`` on a GPU: nothing waits for the device, and a captured graph serves other splits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from host_syncs import cuda_waits_are_errors
from loops import wrap
from torch import Tensor

from maingrad.te_integration import GroupedLinear, WgradQueue, delayed_wgrad

pytestmark = pytest.mark.gpu

E, K, N, ROWS = 4, 128, 192, 256
FORMS: dict[str, dict[str, Any]] = {
    "discrete": {},
    "packed": {"single_grouped_weight": True, "single_grouped_bias": True},
    "no bias": {"bias": False},
    "scaled": {"scale_bias": True},
    "packed, scaled": {"single_grouped_weight": True, "single_grouped_bias": True, "scale_bias": True},
}
SPLITS = [[64, 64, 64, 64], [0, 100, 0, 156], [256, 0, 0, 0], [17, 3, 90, 40], [0, 0, 0, 0]]
ROUNDING = 2.0**-7  # of bf16 results; what is accumulated in fp32 is far nearer


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any call that makes the host wait for the device raises."""
    torch.cuda.synchronize()
    with cuda_waits_are_errors():
        yield


def make(**options: Any) -> GroupedLinear:
    torch.manual_seed(0)
    return GroupedLinear(E, K, N, device="cuda", params_dtype=torch.bfloat16, **options)


def rows(features: int, seed: int) -> Tensor:
    return torch.randn(ROWS, features, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


def near(actual: Tensor, expected: Tensor, rounding: float) -> None:
    assert (actual.double() - expected).norm() <= rounding * expected.norm()


def weight_of(module: GroupedLinear, expert: int) -> Tensor:
    return module.weight[expert] if module.single_grouped_weight else getattr(module, f"weight{expert}")


def main_grad_of(module: GroupedLinear, expert: int) -> Tensor:
    if module.single_grouped_weight:
        return module.weight.main_grad[expert]
    return getattr(module, f"weight{expert}").main_grad


def wgrads(x: Tensor, dy: Tensor, splits: list[int]) -> list[Tensor]:
    filled = sum(splits)
    parts = zip(x[:filled].detach().double().split(splits), dy[:filled].double().split(splits), strict=True)
    return [other.t() @ one for one, other in parts]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("how", ["now", "module", "queue"])
@pytest.mark.parametrize("listed", [False, True])
def test_no_host_sync_in_forward_and_backward(form: str, fuse: bool, how: str, listed: bool) -> None:
    module = make(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=how == "module", **FORMS[form])
    ddp = wrap(module)
    splits, queue = SPLITS[1], WgradQueue()
    given = splits if listed else torch.tensor(splits, device="cuda")
    x, dy = rows(K, 1).requires_grad_(), rows(N, 2)
    scales = (torch.rand(ROWS, device="cuda").requires_grad_(),) if module.scale_bias else ()

    def step() -> None:
        if how == "queue":
            with delayed_wgrad(queue):
                output = module(x, given, *scales)
        else:
            output = module(x, given, *scales)
        output.backward(dy)
        module.backward_dw()
        queue.drain()

    step()  # compiles, and allocates what is pinned
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    x.grad = None
    with no_waiting():
        step()
    ddp.finish_grad_sync()
    for expert, expected in enumerate(wgrads(x, dy, splits)):
        rounding = 2.0**-16 if fuse else ROUNDING
        near(main_grad_of(module, expert), expected, rounding)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_captured_graph_replays_with_other_splits(form: str, overwrite: bool) -> None:
    """Memory is what a foreign provider without hooks gives: a replay runs no Python."""
    module = make(fuse_wgrad_accumulation=True, **FORMS[form])
    weights = [getattr(module, name) for name in module.weight_names]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.overwrite_main_grad = overwrite
    x, dy = rows(K, 1).requires_grad_(), rows(N, 2)
    splits = torch.tensor(SPLITS[0], device="cuda")
    scales = (torch.rand(ROWS, device="cuda").requires_grad_(),) if module.scale_bias else ()
    wanted = [x, *scales, *(p for name, p in module.named_parameters() if "bias" in name)]

    def step() -> Tensor:
        output = module(x, splits, *scales)
        output.backward(dy)
        return output

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
            for tensor in wanted:
                tensor.grad = None
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    for weight in weights:
        weight.main_grad.zero_()
    total = [torch.zeros(N, K, device="cuda", dtype=torch.float64) for _ in range(E)]
    for seed, counts in enumerate(SPLITS):
        with torch.no_grad():
            x.copy_(rows(K, 2 * seed + 3))
            dy.copy_(rows(N, 2 * seed + 4))
            x[sum(counts) :] = dy[sum(counts) :] = torch.nan
        splits.copy_(torch.tensor(counts))
        if overwrite:
            for weight in weights:
                weight.main_grad.data.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        start = 0
        for expert, count in enumerate(counts):
            here = slice(start, start + count)
            start += count
            weight = weight_of(module, expert).detach().double()
            expected = x[here].detach().double() @ weight.t()
            bias = None
            if "no bias" not in form:
                bias = module.bias[expert] if module.single_grouped_bias else getattr(module, f"bias{expert}")
                expected = expected + bias.detach().double() * (scales[0][here, None].double() if scales else 1)
            near(output[here], expected, ROUNDING)
            near(x.grad[here], dy[here].double() @ weight, ROUNDING)
            gradient = dy[here].double().t() @ x[here].detach().double()
            total[expert] = gradient if overwrite else total[expert] + gradient
            near(main_grad_of(module, expert), total[expert], 2.0**-16)
        assert not output[start:].any() and not x.grad[start:].any(), "pad rows are zeros"


def test_splits_of_the_host_are_refused_during_a_capture() -> None:
    module = make(name="experts.fc1")
    x = rows(K, 1)
    module(x, SPLITS[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(0)
        with pytest.raises(RuntimeError, match=r"experts.fc1: m_splits on the host during a CUDA graph capture"):
            module(x, SPLITS[0])


@pytest.mark.parametrize("packed", [False, True])
def test_a_group_drained_on_another_stream(packed: bool) -> None:
    """Its tensors live until that stream is done with them, and it waits for the one that made them."""
    module = make(fuse_wgrad_accumulation=True, single_grouped_weight=packed, bias=False)
    ddp = wrap(module)
    queue, drain = WgradQueue(), torch.cuda.Stream()
    splits = torch.tensor(SPLITS[3], device="cuda")
    total = [torch.zeros(N, K, device="cuda", dtype=torch.float64) for _ in range(E)]
    for seed in range(6):
        x, dy = rows(K, seed), rows(N, seed + 10)
        for expert, gradient in enumerate(wgrads(x, dy, SPLITS[3])):
            total[expert] += gradient
        with ddp.no_sync(), delayed_wgrad(queue):
            output = ddp(x, splits)
        torch.cuda._sleep(1_000_000)
        with ddp.no_sync():
            output.backward(dy)
        del x, dy, output
        with torch.cuda.stream(drain):
            queue.drain()
    torch.cuda.current_stream().wait_stream(drain)
    ddp.finish_grad_sync()
    for expert, expected in enumerate(total):
        near(main_grad_of(module, expert), expected, 2.0**-16)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_lie_apart_are_written_where_they_are(packed: bool) -> None:
    module = make(fuse_wgrad_accumulation=True, single_grouped_weight=packed, bias=False)
    around = torch.full((N, E, K + 16), 7.0, device="cuda")
    views = around[:, :, 8 : K + 8].transpose(0, 1)
    for expert in range(E):
        if packed:
            module.weight.main_grad = views
        else:
            getattr(module, f"weight{expert}").main_grad = views[expert]
    views.zero_()
    x, dy = rows(K, 1), rows(N, 2)
    module(x, torch.tensor(SPLITS[3], device="cuda")).backward(dy)
    for expert, expected in enumerate(wgrads(x, dy, SPLITS[3])):
        near(around[:, expert, 8 : K + 8], expected, 2.0**-16)
    assert (around[:, :, :8] == 7).all() and (around[:, :, K + 8 :] == 7).all()
