"""Checkpoints hold the scales and amaxes of ``DelayedScaling``: a run goes on bit for bit on any ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import DelayedScaling, LayerNormMLP, Linear, autocast

BF16 = torch.bfloat16
RECIPE = DelayedScaling(amax_history_len=3)
State = dict[str, Tensor]


def build(how: str, seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    module = nn.Sequential(
        LayerNormMLP(16, 24, fuse_wgrad_accumulation=how != "plain", dtype=BF16),
        Linear(16, 16, fuse_wgrad_accumulation=how != "plain", dtype=BF16),
    )
    if how == "plain":
        return module, None
    if how == "zero3":
        fully_shard(module[0])
        model = fully_shard(module)
        return model, torch.optim.SGD(model.parameters(), lr=0.25)
    config = DistributedDataParallelConfig(use_distributed_optimizer=how == "zero1")
    wrapper = DistributedDataParallel(module, config)
    return wrapper, DistributedOptimizer(wrapper, lr=0.25)


def train(model: Any, optimizer: Any, steps: range, recipe: Any = RECIPE, *, divided: bool = False) -> None:
    """Four microbatches an iteration, over all ranks. The loss is a sum, or ``divided`` by a rank's microbatches."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    own = dist.get_rank() if dist.is_initialized() else 0
    for step in steps:
        for number in range(own, 4, ranks):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 4 + number)).mul(step + 1).to(BF16)
            with autocast(recipe is not None, recipe=recipe):
                y = model(x)
            loss = y.float().square().sum() / (4 // ranks if divided else 1)
            last = number + ranks >= 4
            if last or optimizer is None:
                loss.backward()
            else:
                with model.no_sync():
                    loss.backward()
        if optimizer is not None:
            model.finish_grad_sync()
            model.zero_grad()  # weights stay: their sums over other ranks would be rounded otherwise


def state_of(model: Any) -> State:
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: value.clone() for name, value in module.state_dict().items() if "fp8_" in name}


def saved(path: Path, how: str, recipe: Any = RECIPE) -> State:
    model, optimizer = build(how)
    train(model, optimizer, range(4), recipe)
    save_checkpoint(path, model)
    train(model, optimizer, range(4, 7), recipe)
    return state_of(model)


def resumed(path: Path, how: str, before: bool) -> tuple[State, State]:
    model, optimizer = build(how, seed=1)
    if before:
        train(model, optimizer, range(20, 22))
    load_checkpoint(path, model)
    loaded = state_of(model)
    train(model, optimizer, range(4, 7))
    return loaded, state_of(model)


@pytest.mark.parametrize(
    ("first", "ranks", "second", "other_ranks"),
    [("zero1", 2, "zero3", 4), ("zero3", 2, "ddp", 1), ("ddp", 1, "zero1", 2), ("plain", 1, "plain", 1)],
)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.sampled(1)
def test_goes_on_bit_for_bit(
    tmp_path: Path, first: str, ranks: int, second: str, other_ranks: int, before: bool
) -> None:
    whole = simulate(saved, ranks, tmp_path / "run", first)[0]
    assert len(whole) == 4
    for loaded, end in simulate(resumed, other_ranks, tmp_path / "run", second, before):
        assert loaded.keys() == end.keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(end[name], value), name


def divided(path: Path, resumes: bool) -> State:
    model, optimizer = build("zero1")
    if resumes:
        load_checkpoint(path, model)
    else:
        train(model, optimizer, range(4), divided=True)
        save_checkpoint(path, model)
    train(model, optimizer, range(4, 7), divided=True)
    return state_of(model)


@pytest.mark.in_turn
def test_a_loss_that_other_ranks_divide_otherwise(tmp_path: Path) -> None:
    """Two ranks divide by two microbatches, four by one: gradients, and their scales, are of another size then."""
    whole = simulate(divided, 2, tmp_path / "run", False)[0]
    same, other = (simulate(divided, ranks, tmp_path / "run", True)[0] for ranks in (2, 4))
    for name, value in whole.items():
        assert torch.equal(same[name], value), name
    for name in ("0.fp8_scale", "1.fp8_scale"):
        scales, before = other[name].view(-1, 3), whole[name].view(-1, 3)
        assert torch.equal(scales[:, :2], before[:, :2]), "inputs and weights do not know of the loss"
        torch.testing.assert_close(scales[:, 2], before[:, 2] / 2, rtol=0.1, atol=0)


@pytest.mark.parametrize("how", ["zero1", "zero3"])
@pytest.mark.sampled(1)
def test_a_checkpoint_of_before_the_recipe(tmp_path: Path, how: str) -> None:
    """Loads, and scales begin anew."""
    assert simulate(saved, 2, tmp_path / "run", how, None)[0] == {}
    (fresh, first), _ = simulate(resumed, 2, tmp_path / "run", how, False)
    (anew, second), _ = simulate(resumed, 2, tmp_path / "run", how, True)
    assert fresh == {}
    assert all(value.tolist() == [1.0] * len(value) for name, value in anew.items() if name.endswith("scale"))
    for history in (value for name, value in anew.items() if name.endswith("history")):
        assert set(history[0].tolist()) == {-1.0}
        assert not history[1:].any()
    for name, value in first.items():
        assert torch.equal(second[name], value), name


def test_a_state_of_another_module_is_refused(tmp_path: Path) -> None:
    """By name, before the model has changed."""
    wide = DistributedDataParallel(nn.Sequential(Linear(16, 16, fuse_wgrad_accumulation=True, dtype=BF16)))
    wide.module.register_buffer("fp8_scale", torch.ones(3))
    train(wide, DistributedOptimizer(wide, lr=0.1), range(1))
    save_checkpoint(tmp_path / "run", wide)
    model = nn.Sequential(Linear(16, 16, dtype=BF16))
    with pytest.raises(ValueError, match="'fp8_scale' is missing in the model and a buffer of"):
        load_checkpoint(tmp_path / "run", model)
    assert state_of(model) == {}
