"""What each way asks of the library, and what one iteration in it leaves on a rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.fsdp import MixedPrecisionPolicy
from maingrad.launch import simulate, verify
from maingrad.launch.verification import ways
from maingrad.launch.verification.plain import Part
from maingrad.launch.verification.program import Program
from maingrad.launch.verification.ways import WAYS, Setting, run_way

PLAIN = ("ddp", "ddp_recompute", "zero1", "fsdp", "ddp_tp")
"""Ways in which autograd computes weight gradients."""
OPTIONS: dict[str, Any] = {
    "ddp": {"overlap_grad_reduce": False},
    "ddp_find_unused": {"find_unused_parameters": True},
    "zero1_delayed": {"overlap_param_gather": False},
    "fsdp_once": {"reduce_every_microbatch": False},
}
PARALLEL = {"ddp": "ddp", "zero1": "zero1", "hybrid": "zero1", "fsdp": "zero3", "hsdp": "hsdp"}


class Stopped(Exception):
    """Nothing is wrapped."""


class Blocks(nn.Module):
    """Two blocks of a list, each of one matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs).tanh()
        return inputs.square().mean()


def as_it_is(model: nn.Module) -> None:
    """No experiment."""


def asked(name: str, setting: Setting) -> tuple[Any, ...]:
    """What ``parallelize`` is given, on this rank."""
    with pytest.raises(Stopped) as stopped:
        run_way(Program(Blocks(), None, None, 0), WAYS[name], [Part(0, 0, torch.ones(1, 6))], setting, as_it_is)
    return stopped.value.args


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*given: Any, **options: Any) -> None:
        raise Stopped(*given, options)

    monkeypatch.setattr(ways, "parallelize", stop)


@pytest.mark.usefixtures("spied")
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.sampled(len(WAYS))
def test_what_each_way_asks_of_the_library(name: str) -> None:
    """Units are recomputed where there are some; the ranks that hold the same experts are asked for on each rank."""
    way = WAYS[name]
    cuts: dict[int, list[int]] = {}

    def cut(model: nn.Module, mesh: Any) -> None:
        cuts[dist.get_rank()] = mesh.mesh.tolist()

    def on_a_rank(units: bool) -> dict[str, Any]:
        found = Setting(
            lambda model: model.blocks if units else (),
            experts=lambda: ("experts of", dist.get_rank()),  # type: ignore[arg-type, return-value]
            tensor_parallel=cut,
            context_parallel=cut,
            most_ep=2,
        )
        module, parallel, options = asked(name, found)
        assert parallel == PARALLEL[name.partition("_")[0]] and isinstance(module, Blocks)
        assert options.pop("units") == ([*module.blocks] if units else [])
        assert options.pop("fuse") is (name not in PLAIN)
        assert options.pop("recompute") is (units and "recompute" in name)
        if "mesh" in options:
            options["mesh"] = options["mesh"].mesh.tolist()
        return dict(options)

    first = simulate(on_a_rank, 4, True)
    assert [each.keys() for each in simulate(on_a_rank, 4, False)] == [each.keys() for each in first]
    for rank, options in enumerate(first):
        policy, experts = options.pop("mixed_precision", None), options.pop("expert_process_group", None)
        if way.shards_parameters:
            assert (policy, experts) == (MixedPrecisionPolicy(), None)
        else:
            assert (policy, experts, options.pop("num_buckets")) == (None, ("experts of", rank), 4)
        assert options.pop("ep", 1) == (2 if "_ep_" in name else 1)
        assert options.pop("keep_matrices_whole", {}) in ({}, [], ())
        if name in ("ddp_tp", "zero1_tp_converted"):
            assert options.pop("mesh") == [rank % 2, rank % 2 + 2], "the ranks with other rows"
        elif name in ("hybrid_converted", "hsdp_converted"):
            assert options.pop("mesh") == [[0, 1], [2, 3]]
        assert options == OPTIONS.get(name, {})
    assert way.delayed is name.endswith("_delayed")
    assert cuts == ({rank: [rank // 2 * 2, rank // 2 * 2 + 1] for rank in range(4)} if way.cut else {})


def test_instances_are_as_few_as_the_ranks_allow() -> None:
    for ranks, shape in ((1, (1, 1)), (2, (2, 1)), (5, (5, 1)), (6, (2, 3)), (9, (3, 3))):
        assert simulate(lambda: tuple(ways._instances().mesh.shape), ranks)[0] == shape


@pytest.mark.parametrize("name", ["ddp", "zero1_converted", "fsdp", "hsdp_converted"])
@pytest.mark.sampled(2)
def test_what_an_iteration_leaves_on_a_rank(name: str) -> None:
    """On three ranks, of two microbatches each: all gradients and weights together, of the mean; the norm of them."""
    torch.manual_seed(0)
    model, batches = Blocks(), torch.randn(6, 4, 6)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    setting = Setting(lambda model: model.blocks, adamw={"lr": 0.1, "weight_decay": 0.0, "eps": 1e-12})

    def on_a_rank() -> Any:
        own = [Part(dist.get_rank(), index, batches[2 * dist.get_rank() + index]) for index in range(2)]
        return run_way(Program(model, None, None, 0), WAYS[name], own, setting, as_it_is)

    results = simulate(on_a_rank, 3)
    sum(model(batch) / 6 for batch in batches).backward()  # type: ignore[union-attr]
    norm = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm()
    for result in results:
        assert result.norm == pytest.approx(float(norm), rel=1e-5)
        assert (result.fused_writes > 0) is ("converted" in name)
    for key, param in model.named_parameters():
        assert param.grad is not None
        found, updated = torch.full((param.numel(),), torch.nan), torch.full((param.numel(),), torch.nan)
        for result in results:
            for pieces, whole in ((result.grads, found), (result.weights, updated)):
                for piece in pieces:
                    if piece.name == key:
                        whole[piece.start : piece.start + len(piece.values)] = piece.values
        torch.testing.assert_close(found.view_as(param), param.grad, rtol=1e-5, atol=1e-7)
        step = start[key] - updated.view_as(param)  # Adam's first step
        torch.testing.assert_close(step, 0.1 * param.grad.sign(), rtol=1e-3, atol=1e-5)
    assert all(torch.equal(value, start[key]) for key, value in model.state_dict().items()), "of a copy"


def test_ranks_that_hold_nothing_of_a_small_model() -> None:
    """Three elements over five ranks."""
    model = nn.Sequential(nn.Linear(2, 1))
    names = ("zero1", "fsdp", "hsdp_converted")
    batch, options = torch.randn(10, 2), {"ranks": 5, "num_microbatches": 1, "ways": names}
    found = verify(model, batch, lambda output, _: output.square().mean(), **options)  # type: ignore[arg-type]
    assert found.ok and [result.way for result in found.results] == [*names], str(found)
