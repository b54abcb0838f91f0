"""``maingrad.fsdp.ShardedAdamW`` on a GPU: bytes at rest, bits of fp32 masters, graphed steps, state on the host."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp import WORLD_OF_ONE
from maingrad.fsdp import FSDPModule, GraphedTrainingStep, ShardedAdamW, fully_shard

pytestmark = pytest.mark.gpu

HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
FORMS: dict[str, dict[str, Any]] = {
    "bf16 moments": {},
    "fp32 moments": {"moment_dtype": torch.float32},
    "8-bit moments": {"moment_dtype": torch.uint8},
    "on the host": {"offload_state": "host"},
    "8-bit moments on the host": {"moment_dtype": torch.uint8, "offload_state": "host"},
}
BF16 = torch.bfloat16
WIDTH, LAYERS = 1024, 6
CYCLES = 200_000_000
"""A tenth of a second, in which the host runs ahead."""


def make_model(**options: Any) -> FSDPModule:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to("cuda", BF16)
    for layer in net:
        fully_shard(layer, WORLD_OF_ONE, **options)
    return fully_shard(net, WORLD_OF_ONE, **options)  # type: ignore[return-value]


def batch(step: int) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator("cuda").manual_seed(step), device="cuda", dtype=BF16)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(batch(step)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def masters_of(model: nn.Module, optimizer: ShardedAdamW) -> dict[str, Tensor]:
    found = optimizer.masters()
    return {name: found[param] for name, param in model.named_parameters()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, master in one.items():
        assert torch.equal(master, other[name]), name


@pytest.mark.parametrize(("form", "nbytes"), [("bf16 moments", 8.0), ("8-bit moments", 6 + 8 / 256)])
def test_bytes_at_rest(form: str, nbytes: float) -> None:
    first = make_model()
    train(first, ShardedAdamW(first.parameters(), **HYPER), range(1))  # workspaces of cuBLAS
    del first
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = make_model()
    optimizer = ShardedAdamW(model.parameters(), **HYPER, **FORMS[form])
    train(model, optimizer, range(2))
    numel = sum(param.numel() for param in model.parameters())
    with torch.no_grad():
        model(batch(2))  # frees the last step's gradients
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    root = 2**21  # tables, counters, the last unit's whole parameters are below it
    whole = sum(
        bucket.whole_params.nbytes for unit in model.units for bucket in unit.buckets if bucket.whole_params.resident
    )
    assert nbytes * numel <= held - whole <= nbytes * numel + root
    model(batch(3)).float().square().mean().backward()
    assert all(param.grad is not None and param.grad.dtype is torch.float32 for param in model.parameters())


def test_masters_have_the_bits_of_torchs_fused_kernel() -> None:
    model = make_model()
    optimizer = ShardedAdamW(model.parameters(), **HYPER, **FORMS["fp32 moments"])
    plain = {name: nn.Parameter(param.detach().float().clone()) for name, param in model.named_parameters()}
    stock = torch.optim.AdamW(plain.values(), **HYPER, fused=True)
    for step in range(10):
        model(batch(step)).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for name, param in model.named_parameters():
            assert param.grad is not None
            plain[name].grad = param.grad.to_local().clone()  # type: ignore[attr-defined]
        optimizer.step()
        stock.step()
        optimizer.zero_grad()
    expected = {name: param.detach().cpu().view(-1) for name, param in plain.items()}
    assert_same(masters_of(model, optimizer), expected)


@pytest.mark.parametrize("form", FORMS)
def test_graphed_steps_have_the_same_bits(form: str) -> None:
    """Between calls a program writes a parameter, and loads state."""
    found = []
    for is_graphed in (False, True):
        model = make_model()
        optimizer = ShardedAdamW(model.parameters(), **HYPER, **FORMS[form])

        def train_step(x: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(x).float().square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step: Any = GraphedTrainingStep(train_step, model, optimizer) if is_graphed else train_step
        for number in range(10):
            step(batch(number))
            if number == 4:
                kept = copy.deepcopy(optimizer.state_dict())
            if number == 6:
                with torch.no_grad():
                    model[1].weight.mul_(0.5)  # type: ignore[index, union-attr, operator]
            if number == 7:
                optimizer.load_state_dict(kept)
            if number == 8:  # an eager step beside the graph
                train_step(batch(100))
        found.append(masters_of(model, optimizer))
    assert_same(*found)


@pytest.mark.parametrize(("form", "nbytes"), [("bf16 moments", 6.0), ("8-bit moments", 4 + 8 / 256)])
def test_the_same_bits_on_the_host_and_two_buckets_on_the_device(form: str, nbytes: float) -> None:
    models = [make_model(), make_model()]
    optimizers = [
        ShardedAdamW(model.parameters(), **HYPER, **FORMS[form], offload_state=place)
        for model, place in zip(models, (None, "host"), strict=True)
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(4))
    assert_same(*(masters_of(*each) for each in zip(models, optimizers, strict=True)))
    on_device = [value for state in optimizers[1].state.values() for value in state.values() if value.is_cuda]
    assert {value.numel() for value in on_device} == {1}  # counters of steps
    host = optimizers[1]._host
    assert host is not None
    placed = sum(memory.nbytes for turn in host._memory for memory in turn.values())
    assert placed <= 2 * nbytes * (WIDTH * WIDTH + 2 * WIDTH)


def test_a_load_behind_a_step_stays() -> None:
    model = make_model()
    optimizer = ShardedAdamW(model.parameters(), **HYPER, **FORMS["on the host"])
    train(model, optimizer, range(2))
    given, expected = copy.deepcopy(optimizer.state_dict()), masters_of(model, optimizer)
    torch.cuda._sleep(CYCLES)
    train(model, optimizer, range(2, 3))
    optimizer.load_state_dict(given)
    torch.cuda.synchronize()
    assert_same(masters_of(model, optimizer), expected)


def test_the_host_does_not_wait() -> None:
    model = make_model()
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    train(model, optimizer, range(3))
    x = batch(3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
