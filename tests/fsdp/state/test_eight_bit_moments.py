"""``maingrad.fsdp.ShardedAdamW(moment_dtype=torch.uint8)``: moments in blocks of 256 elements, from the parameter's
start."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import maingrad
from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from maingrad.fsdp import (
    FSDPModule,
    GraphedTrainingStep,
    MixedPrecisionPolicy,
    ShardedAdam,
    ShardedAdamW,
    fully_shard,
    translate_state_dicts,
)
from maingrad.kernels.optimizer.eight_bits import dequantize_moment, quantize_moment
from maingrad.launch import simulate

HYPER: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
EIGHT: dict[str, Any] = {**HYPER, "moment_dtype": torch.uint8}
BF16, FP32 = torch.bfloat16, torch.float32


def make_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 50)).bfloat16()


def shard(net: nn.Sequential, placements: str = "zero3", **options: Any) -> FSDPModule:
    mesh = None
    if placements.startswith("hsdp"):
        mesh = init_device_mesh("cpu", (2, torch.distributed.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    options = {
        "mixed_precision": MixedPrecisionPolicy(param_dtype=BF16),
        "bucket_size": 1500,
        "shard_atoms": "block",
        **options,
    }
    for module in (net[0], net[2], net):
        fully_shard(module, mesh, placements, **options)
    assert isinstance(net, FSDPModule)
    return net


def num_ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(12, 24, generator=torch.Generator().manual_seed(step)).bfloat16()
    model(x).float().square().mean().backward()  # every rank has the same batches


def take_exact_grads(model: FSDPModule, step: int) -> None:
    """The mean over three ranks of equal gradients is not exact: write the gradients of the whole model."""
    with model.unsharded():
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    plain = make_net()
    plain.load_state_dict(weights)
    backward(plain, step)
    for (_, whole), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert whole.grad is not None
        assert param.grad is not None
        mine = param.grad.to_local()
        mine.copy_(whole.grad.view(-1)[param.shard.start : param.shard.start + mine.numel()].view(mine.shape))


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        backward(model, step)
        if isinstance(model, FSDPModule) and num_ranks() == 3:
            take_exact_grads(model, step)
        if isinstance(model, DistributedDataParallel):
            model.set_num_tokens(1)
        optimizer.step()
        optimizer.zero_grad()


# ---- The forms, and what they hold. ----


def units(seed: int, placements: str = "zero3", **options: Any) -> tuple[FSDPModule, ShardedAdamW]:
    model = shard(make_net(seed), placements)
    return model, ShardedAdamW(model.parameters(), **{**EIGHT, **options})


def zero1(seed: int) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    config = DistributedDataParallelConfig(
        bucket_size=2000, calculate_per_token_loss=True, use_distributed_optimizer=True, shard_atom=256
    )
    model = DistributedDataParallel(make_net(seed), config)
    return model, DistributedOptimizer(model, **EIGHT, state="compact")


def full(seed: int) -> tuple[FSDPModule, torch.optim.Optimizer]:
    model = shard(make_net(seed).float())
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER, fused=True)
    translate_state_dicts(optimizer)
    return model, optimizer


FORMS: dict[str, Any] = {
    "8 bits": units,
    "8 bits on the host": lambda seed: units(seed, "zero2", offload_state="host"),
    "bf16": lambda seed: units(seed, moment_dtype=BF16),
    "zero1": zero1,
    "full": full,
}

Pieces = dict[str, dict[int, list[Tensor]]]


def pieces(model: Any, optimizer: Any) -> Pieces:
    """Master and moments in fp32 of this rank's elements, by name and by the first element."""
    if isinstance(optimizer, DistributedOptimizer):
        return {
            part.name.removeprefix("module."): {part.start: [part.master, *part.state().values()]}
            for part in optimizer.full_slices()
            if part.master.numel()
        }
    found: Pieces = {}
    state = optimizer.full_state() if isinstance(optimizer, ShardedAdamW) else optimizer.state
    for name, param in model.named_parameters():
        master = state[param].get("master", param.detach())
        tensors = master, state[param]["exp_avg"], state[param]["exp_avg_sq"]
        if param.numel():
            found[name] = {param.shard.start: [each.detach().clone().view(-1) for each in tensors]}
    return found


def joined(of_ranks: list[Pieces]) -> dict[str, list[Tensor]]:
    names: Pieces = {}
    for parts in of_ranks:
        for name, by_start in parts.items():
            names.setdefault(name, {}).update(by_start)
    return {
        name: [torch.cat(each) for each in zip(*(found[start] for start in sorted(found)), strict=True)]
        for name, found in names.items()
    }


def assert_same(one: dict[str, list[Tensor]], other: dict[str, list[Tensor]]) -> None:
    assert one.keys() == other.keys()
    for name, tensors in one.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, other[name], strict=True)), name


# ---- Bits. ----


def trained(make: Any, *args: Any, **options: Any) -> Pieces:
    model, optimizer = make(0, *args, **options)
    train(model, optimizer, range(6))
    return pieces(model, optimizer)


@pytest.mark.in_turn
def test_ranks_and_placements_change_no_bit_and_zero1_has_the_same() -> None:
    expected = joined(simulate(trained, 2, zero1))
    assert len(expected) == 6 and all(len(tensors) == 3 for tensors in expected.values())
    for ranks, placements, place in [
        (1, "zero3", None),
        (2, "zero2", "host"),
        (3, "zero3", None),
        (3, "zero2", None),
        (8, "zero3", "host"),
        (4, "hsdp", None),
        (8, "hsdp_zero1", None),
    ]:
        assert_same(expected, joined(simulate(lambda: trained(units, placements, offload_state=place), ranks)))  # noqa: B023


@pytest.mark.in_turn
def test_adam_and_fp32_shards() -> None:
    """fp32 shards are masters themselves."""

    def run() -> Pieces:
        model = shard(make_net().float())
        optimizer = ShardedAdam(model.parameters(), **EIGHT)
        train(model, optimizer, range(3))
        state = next(iter(optimizer.state.values()))
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"}
        return {
            name: {param.shard.start: [param.detach().view(-1).clone()]}
            for name, param in model.named_parameters()
            if param.numel()
        }

    assert_same(joined(simulate(run, 1)), joined(simulate(run, 4)))


# ---- Checkpoints and state dicts. ----


@pytest.mark.in_turn
@pytest.mark.parametrize(("before", "after", "place"), [(1, 3, "host"), (3, 2, None), (2, 4, None)])
@pytest.mark.sampled(2)
def test_training_goes_on_on_other_ranks_with_the_same_bits(
    tmp_path: Path, before: int, after: int, place: str | None
) -> None:
    def saves() -> Pieces:
        model, optimizer = units(0)
        train(model, optimizer, range(4))
        save_checkpoint(tmp_path / "saved", model, optimizer)
        train(model, optimizer, range(4, 7))
        return pieces(model, optimizer)

    def loads() -> Pieces:
        model, optimizer = units(1, "zero2", offload_state=place)
        train(model, optimizer, range(1))
        load_checkpoint(tmp_path / "saved", model, optimizer)
        train(model, optimizer, range(4, 7))
        return pieces(model, optimizer)

    assert_same(joined(simulate(saves, before)), joined(simulate(loads, after)))


@pytest.mark.parametrize("saved", FORMS)
@pytest.mark.parametrize("loaded", FORMS)
@pytest.mark.sampled(5)
def test_each_form_reads_what_the_others_have_saved(tmp_path: Path, saved: str, loaded: str) -> None:
    def saves() -> Pieces:
        model, optimizer = FORMS[saved](0)
        train(model, optimizer, range(3))
        save_checkpoint(tmp_path / "saved", model, optimizer)
        return pieces(model, optimizer)

    def loads() -> Pieces:
        model, optimizer = FORMS[loaded](1)
        load_checkpoint(tmp_path / "saved", model, optimizer)
        found = pieces(model, optimizer)
        train(model, optimizer, range(3, 4))
        return found

    expected, found = joined(simulate(saves, 2)), joined(simulate(loads, 3))
    for name, (master, *moments) in expected.items():
        assert torch.equal(found[name][0], master)
        for index, (moment, read) in enumerate(zip(moments, found[name][1:], strict=True)):
            assert torch.equal(read, as_kept(moment, loaded, signed=index == 0)), name


def as_kept(moment: Tensor, form: str, *, signed: bool) -> Tensor:
    if form == "bf16":
        return moment.bfloat16().float()
    return moment if form == "full" else dequantize_moment(*quantize_moment(moment, signed=signed), signed=signed)


@pytest.mark.in_turn
@pytest.mark.parametrize("saved", ["8 bits", "bf16", "full"])
@pytest.mark.parametrize("loaded", ["8 bits", "8 bits on the host", "full"])
@pytest.mark.sampled(3)
def test_each_form_reads_the_state_dicts_of_the_others(saved: str, loaded: str) -> None:
    def run() -> None:
        (model, optimizer), (other, to) = FORMS[saved](0), FORMS[loaded](1)
        train(model, optimizer, range(3))
        train(other, to, range(1))
        other.load_state_dict(model.state_dict())
        given = optimizer.state_dict()
        assert {value.dtype for state in given["state"].values() for value in state.values()} == {FP32}
        to.load_state_dict(given)
        expected, found = pieces(model, optimizer), pieces(other, to)
        for name, by_start in expected.items():
            for start, (_, *moments) in by_start.items():
                for index, (moment, read) in enumerate(zip(moments, found[name][start][1:], strict=True)):
                    assert torch.equal(read, as_kept(moment, loaded, signed=index == 0)), name

    simulate(run, 2)


def test_state_that_a_program_assigns_is_copied_in() -> None:
    (model, optimizer), (other, expected) = units(0), units(0)
    for each, stepped in ((model, optimizer), (other, expected)):
        train(each, stepped, range(3))
    optimizer.state = {  # type: ignore[assignment]
        param: {key: value.clone() for key, value in state.items()} for param, state in optimizer.state.items()
    }
    train(model, optimizer, range(3, 5))
    train(other, expected, range(3, 5))
    assert_same(joined([pieces(model, optimizer)]), joined([pieces(other, expected)]))


# ---- Skips, graphed steps. ----


def test_a_step_that_is_skipped_changes_nothing() -> None:
    def run() -> None:
        model, optimizer = units(0)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        train(model, optimizer, range(1))
        for step in range(3):
            before = joined([pieces(model, optimizer)])
            x = torch.full((2, 24), float("nan") if step == 1 and torch.distributed.get_rank() == 1 else 0.5)
            scaler.scale(model(x.to(BF16)).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = joined([pieces(model, optimizer)])
            same = [torch.equal(a, b) for name in before for a, b in zip(before[name], after[name], strict=True)]
            assert all(same) if step == 1 else not any(same)
        assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}

    simulate(run, 2)


@pytest.mark.in_turn
@pytest.mark.parametrize("place", [None, "host"])
def test_graphed_steps_have_the_same_bits(place: str | None) -> None:
    """Between calls a program loads state, and takes an eager step."""

    def run(graphed: bool) -> dict[str, list[Tensor]]:
        model, optimizer = units(0, offload_state=place)

        def train_step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).float().square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step: Any = GraphedTrainingStep(train_step, model, optimizer) if graphed else train_step
        for number in range(9):
            step(torch.randn(8, 24, generator=torch.Generator().manual_seed(number)).to(BF16))
            if number == 3:
                kept = optimizer.state_dict()
            if number == 5:
                optimizer.load_state_dict(kept)
            if number == 6:
                train(model, optimizer, range(1))
        return joined([pieces(model, optimizer)])

    def both() -> None:
        assert_same(run(False), run(True))

    simulate(both, 2)


# ---- Layout, bytes, what is refused. ----


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_borders_lie_between_blocks(ranks: int) -> None:
    def starts() -> list[tuple[int, int]]:
        model: FSDPModule = fully_shard(make_net(), bucket_size=1000, shard_atoms="block")  # type: ignore[assignment]
        assert sum(len(unit.buckets) for unit in model.units) == 3  # cut by size as well
        return [(param.shard.start, param.numel()) for param in model.parameters()]

    for of_rank in simulate(starts, ranks):
        assert all(start % 256 == 0 for start, numel in of_rank if numel)


def test_bytes_of_the_state() -> None:
    model, optimizer = units(0)
    train(model, optimizer, range(1))
    state = [value for values in optimizer.state.values() for key, value in values.items() if key != "step"]
    numels = [param.numel() for param in make_net().parameters()]
    assert sum(value.nbytes for value in state) == sum(4 * numel + 8 * -(-numel // 256) for numel in numels)


def test_a_layout_that_cuts_blocks_is_refused_on_all_ranks() -> None:
    def build() -> str:
        model = shard(make_net(), shard_atoms="element")
        with pytest.raises(ValueError, match=r"cuts such a block of '.*': .*shard_atoms=\"block\"") as caught:
            ShardedAdamW(model.parameters(), **EIGHT)
        train(model, ShardedAdamW(model.parameters()), range(1))
        return str(caught.value)

    assert len(set(simulate(build, 3))) == 1

    def build_whole() -> None:
        model = shard(make_net(), shard_atoms="whole")
        train(model, ShardedAdamW(model.parameters(), **EIGHT), range(1))

    simulate(build_whole, 3)
    build_one = shard(make_net(), shard_atoms="element")  # one rank has no borders
    train(build_one, ShardedAdamW(build_one.parameters(), **EIGHT), range(1))


@pytest.mark.in_turn
def test_make_optimizer_takes_it() -> None:
    def run() -> Pieces:
        policy = MixedPrecisionPolicy()
        model = maingrad.parallelize(make_net(), "zero3", fuse=False, mixed_precision=policy, shard_atoms="block")
        optimizer = maingrad.make_optimizer(model, state="compact", **EIGHT)
        assert type(optimizer) is ShardedAdamW
        train(model, optimizer, range(6))
        return pieces(model, optimizer)

    assert_same(joined(simulate(trained, 1, units)), joined(simulate(run, 2)))
