"""``maingrad.fsdp.ShardedAdamW``: bf16 shards that are masters together with 16 bits of remainder. And state that lies
on the host."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_training import nbytes_of_sums
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
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
from maingrad.fsdp.state import sharded_adam
from maingrad.kernels.optimizer.adamw import AdamUpdate
from maingrad.kernels.optimizer.reference import AdamOptions, UpdateRow, split_master
from maingrad.launch import simulate

HYPER: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
BF16, FP32 = torch.bfloat16, torch.float32
EXACT: dict[str, Any] = {"moment_dtype": FP32}


def make_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 33), nn.Tanh(), nn.Linear(33, 5))


def shard(net: nn.Sequential, placements: str = "zero3", dtype: torch.dtype = BF16, **options: Any) -> FSDPModule:
    """Shards in ``dtype``, which compute in bf16. Gradients of two microbatches or more are summed in fp32."""
    net.to(dtype)
    mesh = None
    if placements.startswith("hsdp"):
        mesh = init_device_mesh("cpu", (2, torch.distributed.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    options = {"mixed_precision": MixedPrecisionPolicy(param_dtype=BF16), "bucket_size": 1000, **options}
    for module in (net[0], net[2], net):
        fully_shard(module, mesh, placements, **options)
    assert isinstance(net, FSDPModule)
    return net


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def backward(model: nn.Module, step: int, rank: int = 0, size: int = 12) -> Tensor:
    x = torch.randn(size, 24, generator=torch.Generator().manual_seed(100 * step + rank))
    loss: Tensor = model(x.to(BF16)).float().square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def masters_of(model: nn.Module, optimizer: ShardedAdamW) -> dict[str, Tensor]:
    found = optimizer.masters()
    return {name: found[param] for name, param in model.named_parameters()}


# ---- Bits. ----


class Masters:
    """AdamW on fp32 masters of one rank's shards."""

    def __init__(self, model: nn.Module) -> None:
        self.masters = {name: param.detach().float().view(-1) for name, param in model.named_parameters()}
        self.steps = {name: torch.zeros(()) for name in self.masters}
        self.moments = {name: [torch.zeros_like(master) for _ in range(2)] for name, master in self.masters.items()}

    def step(self, group: Mapping[str, Any], grads: Mapping[str, Tensor]) -> None:
        rows = [
            UpdateRow(grads[name], *self.moments[name], self.steps[name], master, None, None, None, None)
            for name, master in self.masters.items()
        ]
        AdamUpdate(rows)([AdamOptions(group["lr"], *group["betas"], group["eps"], group["weight_decay"])])


def trains_as_masters(placements: str, clip: float | None, form: dict[str, Any], num_steps: int = 12) -> int:
    model = shard(make_net(), placements)
    optimizer = ShardedAdamW(model.parameters(), **HYPER, **form)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, max(5, num_steps // 10), 0.7)
    reference = Masters(model)
    below = 0
    for step in range(num_steps):
        with model.no_sync():
            backward(model, 2 * step, rank())
        backward(model, 2 * step + 1, rank())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        grads = {name: param.grad.to_local().clone().view(-1) for name, param in model.named_parameters()}
        assert {grad.dtype for grad in grads.values()} == {FP32}
        if step == 7:  # a program writes one parameter of a unit
            with torch.no_grad():
                model[0].weight.mul_(0.5)
            reference.masters["0.weight"] = model[0].weight.detach().float().view(-1)
        optimizer.step()
        reference.step(optimizer.param_groups[0], grads)
        schedule.step()
        found = masters_of(model, optimizer)
        for name, param in model.named_parameters():
            master = reference.masters[name]
            assert torch.equal(found[name].view(torch.int32), master.view(torch.int32)), (step, name)
            assert param.dtype is BF16
            assert torch.equal(param.detach().view(-1), split_master(master)[0])
            below += int((param.detach().view(-1).float() != master).sum())
        optimizer.zero_grad()
    return below


@pytest.mark.in_turn
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("placements", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.sampled(4)
def test_masters_have_the_bits_of_fp32_masters(ranks: int, placements: str, clip: float | None) -> None:
    for below in simulate(trains_as_masters, ranks, placements, clip, EXACT):
        assert below > 100  # masters have bits that no shard shows


@pytest.mark.in_turn
@pytest.mark.parametrize("placements", ["hsdp", "hsdp_zero1"])
def test_hybrids_too(placements: str) -> None:
    assert all(below > 50 for below in simulate(trains_as_masters, 4, placements, 0.05, EXACT))


@pytest.mark.parametrize("placements", ["zero2", "zero3"])
@pytest.mark.sampled(1)
def test_state_on_the_host_has_the_same_bits(placements: str) -> None:
    form = {**EXACT, "offload_state": "host"}
    assert all(below > 100 for below in simulate(trains_as_masters, 2, placements, 0.05, form))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_steps() -> None:
    assert all(below > 10_000 for below in simulate(trains_as_masters, 2, "zero3", 0.05, EXACT, 1000))


@pytest.mark.in_turn
def test_ranks_and_placements_change_no_bit_of_bf16_moments() -> None:
    def trained(placements: str, form: dict[str, Any]) -> tuple[dict[str, Tensor], set[torch.dtype]]:
        model = shard(make_net(), placements)
        optimizer = ShardedAdamW(model.parameters(), **HYPER, **form)
        train(model, optimizer, range(6))  # every rank has the same batches
        dtypes = {value.dtype for state in optimizer.state.values() for key, value in state.items() if key != "step"}
        with model.unsharded():
            return {name: param.detach().clone() for name, param in model.named_parameters()}, dtypes

    expected, dtypes = simulate(trained, 1, "zero3", {})[0]
    assert dtypes == {BF16, torch.int16}
    for ranks, placements, form in [(2, "zero3", {}), (4, "zero2", {}), (2, "zero3", {"offload_state": "host"})]:
        for weights, _ in simulate(trained, ranks, placements, form):
            for name, weight in weights.items():
                assert torch.equal(weight, expected[name]), (ranks, placements, name)


def test_adam_and_fp32_shards() -> None:
    """fp32 shards are masters themselves, with the moments in fewer bytes. Full state on the host is torch's."""
    for form in ({"state": "full", "offload_state": "host"}, {"state": "compact", "moment_dtype": FP32}):
        for cls, ours in ((torch.optim.AdamW, ShardedAdamW), (torch.optim.Adam, ShardedAdam)):
            one, other = shard(make_net(), dtype=FP32), shard(make_net(), dtype=FP32)
            optimizers = cls(one.parameters(), **HYPER), ours(other.parameters(), **HYPER, **form)
            for model, optimizer in zip((one, other), optimizers, strict=True):
                train(model, optimizer, range(4))
            for a, b in zip(one.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(a.detach(), b.detach(), atol=1e-6, rtol=1e-5)


# ---- Skips, groups, changes by the program. ----


def test_a_step_that_is_skipped_changes_nothing() -> None:
    def run() -> None:
        model = shard(make_net())
        optimizer = ShardedAdamW(model.parameters(), **HYPER)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            before = masters_of(model, optimizer)
            x = torch.full((2, 24), float("nan") if step == 2 and rank() == 1 else 0.5)
            scaler.scale(model(x.to(BF16)).float().square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = masters_of(model, optimizer)
            assert all(torch.equal(before[name], after[name]) for name in before) == (step == 2)
        assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}

    simulate(run, 2)


def test_the_scale_is_taken_out_exactly() -> None:
    plain, scaled = shard(make_net()), shard(make_net())
    optimizers = [ShardedAdamW(model.parameters(), **HYPER, **EXACT) for model in (plain, scaled)]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    x = torch.randn(8, 24).to(BF16)
    for _ in range(3):
        plain(x).float().square().mean().backward()
        optimizers[0].step()
        scaler.scale(scaled(x).float().square().mean()).backward()
        scaler.step(optimizers[1])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    found, expected = masters_of(scaled, optimizers[1]), masters_of(plain, optimizers[0])
    assert all(torch.equal(found[name], master) for name, master in expected.items())


def test_a_group_that_comes_later_and_a_plain_parameter() -> None:
    model, scale = shard(make_net()), nn.Parameter(torch.ones(3))
    params = list(model.parameters())
    optimizer = ShardedAdamW(params[:2], **HYPER, **EXACT)
    optimizer.add_param_group({"params": [*params[2:], scale], "lr": 0.0, "weight_decay": 0.0})
    for step in range(2):
        before = [param.detach().clone() for param in params]
        scale.grad = torch.ones(3)
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        changed = [not torch.equal(param.detach(), old) for param, old in zip(params, before, strict=True)]
        assert changed == [True, True, False, False, False, False]
    optimizer.param_groups[1]["lr"] = 0.1
    scale.grad = torch.ones(3)
    optimizer.step()
    assert torch.allclose(scale.detach(), torch.full((3,), 0.9))


def test_a_plain_gradient_of_other_strides_and_a_group_that_is_refused() -> None:
    model, plain = shard(make_net()), nn.Parameter(torch.zeros(2, 3))
    optimizer = ShardedAdamW([*model.parameters(), plain], lr=0.1, weight_decay=0.0)
    for refused in (nn.Parameter(torch.zeros(2, dtype=torch.float16)), nn.Parameter(torch.zeros(3, 2).t())):
        with pytest.raises(ValueError, match=r"float16|not contiguous"):
            optimizer.add_param_group({"params": [refused]})
        assert len(optimizer.param_groups) == 1
    plain.grad = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [-1.0, 1.0]]).t()
    backward(model, 0)
    optimizer.step()
    torch.testing.assert_close(plain.detach(), torch.tensor([[-0.1, 0.1, 0.1], [-0.1, -0.1, -0.1]]))


def assigns_state_of_the_whole_parameter() -> None:
    model = shard(make_net())
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    train(model, optimizer, range(1))
    param = next(iter(model.parameters()))
    optimizer.state[param]["exp_avg"] = torch.zeros(param.shard.shape)
    with pytest.raises(ValueError, match="load it by load_state_dict, which takes whole tensors"):
        optimizer.step()


def test_assigned_state_of_the_whole_parameter_is_refused() -> None:
    simulate(assigns_state_of_the_whole_parameter, 2)


def test_an_optimizer_that_is_built_after_the_backward() -> None:
    """``.grad`` was shown in bf16 before, and a program has changed one, and replaced another."""
    early, late = shard(make_net()), shard(make_net())
    expected = ShardedAdamW(early.parameters(), **HYPER)
    for model in (early, late):
        with model.no_sync():
            backward(model, 1)
        backward(model, 0)  # a sum of two has bits that bf16 lacks
    with torch.no_grad():
        for model in (early, late):
            model[0].weight.grad.mul_(0.0)
            model[2].bias.grad = None
            model[2].weight.grad = model[2].weight.detach().clone()
    found = ShardedAdamW(late.parameters(), **HYPER)
    for optimizer in (expected, found):
        optimizer.step()
    one, other = masters_of(early, expected), masters_of(late, found)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("every_microbatch", [True, False])
def test_an_optimizer_that_is_built_between_two_microbatches(steps_before: int, every_microbatch: bool) -> None:
    """Sums of the first are not in ``.grad`` yet, which is shown in bf16 until then."""

    def weights(*, late: bool) -> list[Tensor]:
        model = shard(make_net(), "zero2", reduce_every_microbatch=every_microbatch)
        optimizer = None if late else ShardedAdamW(model.parameters(), **HYPER)
        for step in range(steps_before):
            backward(model, step)
        with model.no_sync():
            backward(model, 1)
        optimizer = optimizer or ShardedAdamW(model.parameters(), **HYPER)
        backward(model, 2)
        optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    assert all(map(torch.equal, weights(late=True), weights(late=False)))


def test_moments_of_equal_gradients_are_rounded_by_random_bits_of_their_own() -> None:
    """Errors of rounding that were alike in all layers would add up."""
    model = fully_shard(nn.Sequential(*(nn.Linear(64, 64, bias=False, dtype=BF16) for _ in range(2))))
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    torch.manual_seed(0)
    grad = torch.randn(64, 64)
    for step in (1.0, 0.7):
        for param in model.parameters():
            param.grad = grad * step
        optimizer.step()
    one, other = (entry["exp_avg"] for entry in optimizer.state_dict()["state"].values())
    assert not torch.equal(one, other)
    torch.testing.assert_close(one, other, rtol=2**-6, atol=0)


def test_what_is_kept_for_many_sets_of_parameters_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step over other parameters than before makes a table of them: experts' gradients come and go."""
    monkeypatch.setattr(sharded_adam, "_MOST_UPDATES", 4)
    model = shard(make_net())
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    params, kept = [*model.parameters()], 0
    for left_out in range(len(params)):
        backward(model, left_out)
        params[left_out].grad = None
        optimizer.step()
        optimizer.zero_grad()
        kept = max(kept, len(optimizer._updates))
    assert kept == 4 < len(params)


def test_loaded_weights_are_masters() -> None:
    model = shard(make_net())
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    train(model, optimizer, range(2))
    given = make_net(3).to(BF16).state_dict()
    model.load_state_dict(given)
    found = masters_of(model, optimizer)
    assert all(torch.equal(found[name], value.float().view(-1)) for name, value in given.items())


def test_state_that_a_program_assigns_is_copied_in() -> None:
    model, other = shard(make_net()), shard(make_net())
    optimizer, expected = (ShardedAdamW(each.parameters(), **HYPER) for each in (model, other))
    for each, stepped in ((model, optimizer), (other, expected)):
        train(each, stepped, range(3))
    optimizer.state = {  # type: ignore[assignment]
        param: {key: value.clone() for key, value in state.items()} for param, state in optimizer.state.items()
    }
    train(model, optimizer, range(3, 5))
    train(other, expected, range(3, 5))
    one, two = masters_of(model, optimizer), masters_of(other, expected)
    assert all(torch.equal(one[name], two[name]) for name in one)
    optimizer.state.clear()
    train(model, optimizer, range(5, 6))
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


# ---- State dicts, checkpoints, other ranks. ----


def full_shards(net: nn.Sequential) -> tuple[FSDPModule, torch.optim.Optimizer]:
    model = shard(net, dtype=FP32)
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER, fused=True)
    translate_state_dicts(optimizer)
    return model, optimizer


def compact_shards(net: nn.Sequential) -> tuple[FSDPModule, torch.optim.Optimizer]:
    model = shard(net)
    return model, ShardedAdamW(model.parameters(), **HYPER, **EXACT)


def compact_on_host(net: nn.Sequential) -> tuple[FSDPModule, torch.optim.Optimizer]:
    model = shard(net, "zero2")
    return model, ShardedAdamW(model.parameters(), **HYPER, **EXACT, offload_state="host")


def compact_zero1(net: nn.Sequential) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=1000)
    model = DistributedDataParallel(net.to(BF16), config)
    return model, DistributedOptimizer(model, **HYPER, state="compact", **EXACT)


FORMS: dict[str, Any] = {
    "full": full_shards,
    "compact": compact_shards,
    "compact on the host": compact_on_host,
    "zero1": compact_zero1,
}


def pieces(model: Any, optimizer: Any) -> dict[str, tuple[int, list[Tensor]]]:
    """By name: where this rank's elements begin; master and moments. None of parameters without elements here."""
    if isinstance(optimizer, DistributedOptimizer):
        by_name = {part.name.removeprefix("module."): part for part in optimizer.full_slices()}
        return {
            name: (part.start, [part.master, *part.state().values()])
            for name, part in by_name.items()
            if part.master.numel()
        }
    found = {}
    state = optimizer.full_state() if isinstance(optimizer, ShardedAdamW) else optimizer.state
    for name, param in model.named_parameters():
        master = state[param].get("master", param.detach())
        tensors = master, state[param]["exp_avg"], state[param]["exp_avg_sq"]
        if param.numel():
            found[name] = param.shard.start, [each.detach().clone().view(-1) for each in tensors]
    return found


def whole(of_ranks: list[dict[str, tuple[int, list[Tensor]]]]) -> dict[str, list[Tensor]]:
    joined = {}
    for name in {name for found in of_ranks for name in found}:
        by_start = dict(found[name] for found in of_ranks if name in found)
        joined[name] = [torch.cat(parts) for parts in zip(*(by_start[at] for at in sorted(by_start)), strict=True)]
    return joined


@pytest.mark.parametrize("saved", FORMS)
@pytest.mark.parametrize("loaded", FORMS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1)])
@pytest.mark.sampled(6)
def test_each_form_reads_the_checkpoints_of_the_others_on_other_ranks(
    tmp_path: Path, saved: str, loaded: str, before: int, after: int
) -> None:
    def saves() -> Any:
        model, optimizer = FORMS[saved](make_net())
        train(model, optimizer, range(3))
        save_checkpoint(tmp_path / "saved", model, optimizer)
        return pieces(model, optimizer)

    def loads() -> Any:
        model, optimizer = FORMS[loaded](make_net(1))
        load_checkpoint(tmp_path / "saved", model, optimizer)
        found = pieces(model, optimizer)
        train(model, optimizer, range(3, 4))
        return found

    expected, found = whole(simulate(saves, before)), whole(simulate(loads, after))
    for name, tensors in expected.items():
        for one, other in zip(tensors, found[name], strict=True):
            assert torch.equal(one, other), name


@pytest.mark.in_turn
@pytest.mark.parametrize("moments", [FP32, BF16])
def test_training_goes_on_on_other_ranks_with_the_same_bits(tmp_path: Path, moments: torch.dtype) -> None:
    def make(seed: int) -> tuple[FSDPModule, ShardedAdamW]:
        model = shard(make_net(seed))
        return model, ShardedAdamW(model.parameters(), **HYPER, moment_dtype=moments)

    def saves() -> Any:
        model, optimizer = make(0)
        train(model, optimizer, range(3))
        save_checkpoint(tmp_path / "saved", model, optimizer)
        train(model, optimizer, range(3, 6))
        return pieces(model, optimizer)

    def loads() -> Any:
        model, optimizer = make(1)
        train(model, optimizer, range(2))
        load_checkpoint(tmp_path / "saved", model, optimizer)
        train(model, optimizer, range(3, 6))
        return pieces(model, optimizer)

    expected, found = whole(simulate(saves, 2)), whole(simulate(loads, 4))
    for name, tensors in expected.items():
        assert all(torch.equal(*each) for each in zip(tensors, found[name], strict=True)), name


@pytest.mark.parametrize("saved", ["full", "compact", "compact on the host"])
@pytest.mark.parametrize("loaded", ["full", "compact", "compact on the host"])
@pytest.mark.parametrize("way", ["methods", "functions of torch"])
@pytest.mark.sampled(4)
def test_each_form_reads_the_state_dicts_of_the_others(saved: str, loaded: str, way: str) -> None:
    def run() -> None:
        (model, optimizer), (other, to) = FORMS[saved](make_net()), FORMS[loaded](make_net(1))
        train(model, optimizer, range(3))
        other.load_state_dict(model.state_dict())
        if way == "methods":
            given = optimizer.state_dict()
            before = copy.deepcopy({key: {} for key in given["state"]})
            to.load_state_dict(given)
            assert before.keys() == given["state"].keys()
        else:
            set_optimizer_state_dict(other, to, get_optimizer_state_dict(model, optimizer))
        expected, found = pieces(model, optimizer), pieces(other, to)
        for name, tensors in expected.items():
            first = 1 if saved == "full" and loaded != "full" else 0  # fp32 weights are rounded by bf16 shards
            pairs = zip(tensors[1][first:], found[name][1][first:], strict=True)
            assert all(torch.equal(one, two) for one, two in pairs), name
        assert not any("master" in state for state in to.state.values())

    simulate(run, 2)


def test_torchs_class_takes_masters_in_its_first_step() -> None:
    """Without ``translate_state_dicts``; and shards that a program has written since keep their values."""

    def run() -> None:
        (model, optimizer), other = compact_shards(make_net()), shard(make_net(1), dtype=FP32)
        train(model, optimizer, range(3))
        to = torch.optim.AdamW(other.parameters(), **{**HYPER, "lr": 0.0}, fused=True)
        other.load_state_dict(model.state_dict())
        to.load_state_dict(optimizer.state_dict())
        to.param_groups[0]["lr"] = 0.0
        with torch.no_grad():
            other[2].weight.fill_(2.0)
        train(other, to, range(3, 4))
        expected = pieces(model, optimizer)
        for name, param in other.named_parameters():
            if param.numel():
                master = expected[name][1][0]
                assert torch.equal(
                    param.detach().view(-1), torch.full_like(master, 2.0) if name == "2.weight" else master
                )
        assert not any("master" in state for state in to.state.values())

    simulate(run, 2)


def test_torchs_functions_load_the_model_behind_its_optimizer() -> None:
    """``set_state_dict`` does: the model's values are those that the masters have given it, and change nothing."""

    def run() -> None:
        (model, optimizer), (other, to) = compact_shards(make_net()), compact_shards(make_net(1))
        train(model, optimizer, range(3))
        weights, state = get_state_dict(model, optimizer)
        set_state_dict(other, to, model_state_dict=weights, optim_state_dict=state)
        other.load_state_dict(weights)  # a second time
        train(model, optimizer, range(3, 5))
        train(other, to, range(3, 5))
        assert isinstance(optimizer, ShardedAdamW)
        assert isinstance(to, ShardedAdamW)
        expected, found = masters_of(model, optimizer), masters_of(other, to)
        assert all(torch.equal(found[name], master) for name, master in expected.items())
        # Values of another model are new masters, also behind a load that has changed nothing.
        other.load_state_dict(other.state_dict())
        other.load_state_dict(weights)
        found = masters_of(other, to)
        assert all(torch.equal(found[name], p.detach().float().view(-1)) for name, p in other.named_parameters())

    simulate(run, 2)


def test_a_step_before_the_first_forward_changes_no_random_bits() -> None:
    """``set_optimizer_state_dict`` takes one, with gradients of zeros, where units know no names yet."""
    model, other = shard(make_net(), dtype=FP32), shard(make_net(1), dtype=FP32)
    optimizer, to = (ShardedAdamW(each.parameters(), **HYPER) for each in (model, other))
    train(model, optimizer, range(2))
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, to, get_optimizer_state_dict(model, optimizer))
    train(model, optimizer, range(2, 4))
    train(other, to, range(2, 4))
    for param, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[param]["exp_avg"], to.state[same]["exp_avg"])


def test_frozen_parameters_get_no_state_by_a_load(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[FSDPModule, ShardedAdamW]:
        net = make_net(seed)
        net[0].weight.requires_grad_(False)
        model = shard(net)
        return model, ShardedAdamW(model.parameters(), **HYPER)

    def run() -> None:
        model, optimizer = make(0)
        train(model, optimizer, range(2))
        save_checkpoint(tmp_path / "first", model, optimizer)
        for seed, path in ((1, "first"), (2, "second")):
            other, to = make(seed)
            load_checkpoint(tmp_path / path, other, to)
            assert other[0].weight not in to.state
            assert torch.equal(other[0].weight.detach(), model[0].weight.detach())
            save_checkpoint(tmp_path / "second", other, to)
        expected, found = masters_of(model, optimizer), masters_of(other, to)
        assert all(torch.equal(found[name], master) for name, master in expected.items())

    simulate(run, 2)


def test_torchs_class_takes_masters_of_plain_parameters() -> None:
    """And keeps none beside them, which ``ShardedAdamW`` would take for the parameters' values when it loads."""

    def make(cls: Any) -> tuple[FSDPModule, nn.Parameter, torch.optim.Optimizer]:
        model, scale = shard(make_net()), nn.Parameter(torch.ones(3, dtype=BF16))
        return model, scale, cls([*model.parameters(), scale], lr=0.1)

    def trained(model: nn.Module, scale: nn.Parameter, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            scale.grad = torch.ones(3, dtype=BF16)
            train(model, optimizer, range(step, step + 1))

    model, scale, optimizer = make(ShardedAdamW)
    trained(model, scale, optimizer, range(1))
    between, middle, stock = make(torch.optim.AdamW)
    translate_state_dicts(stock)
    wide = torch.optim.AdamW([*between.parameters(), nn.Parameter(scale.detach().float())], lr=0.1)
    translate_state_dicts(wide)
    for to in (stock, wide):
        with torch.no_grad():
            middle.copy_(scale)
        to.load_state_dict(optimizer.state_dict())
        assert not any("master" in state for state in to.state.values())
    assert torch.equal(wide.param_groups[0]["params"][-1].detach(), optimizer.masters()[scale])
    trained(between, middle, stock, range(1, 4))
    model, scale, optimizer = make(ShardedAdamW)
    with torch.no_grad():
        scale.copy_(middle)
    optimizer.load_state_dict(stock.state_dict())
    assert torch.equal(scale, middle)


def test_how_torch_stepped_is_not_loaded() -> None:
    """A later ``state_dict()`` would hand another way of stepping on to a stock optimizer."""
    model, other = shard(make_net()), shard(make_net())
    stock = torch.optim.AdamW(other.parameters(), foreach=True, capturable=False)
    translate_state_dicts(stock)
    train(other, stock, range(1))
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    optimizer.load_state_dict(stock.state_dict())
    for groups in (optimizer.param_groups, optimizer.state_dict()["param_groups"]):
        assert [(group["fused"], group["foreach"], group["capturable"]) for group in groups] == [(True, None, False)]


def test_a_state_dict_is_a_copy_in_full_form() -> None:
    model = shard(make_net())
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    train(model, optimizer, range(2))
    given = optimizer.state_dict()
    dtypes = {key: value.dtype for state in given["state"].values() for key, value in state.items()}
    assert dtypes == dict.fromkeys(("step", "exp_avg", "exp_avg_sq", "master"), FP32)
    before = copy.deepcopy(given)
    expected = masters_of(model, optimizer)
    train(model, optimizer, range(2, 4))
    for index, state in given["state"].items():
        assert all(torch.equal(value, before["state"][index][key]) for key, value in state.items())
    optimizer.load_state_dict(given)
    found = masters_of(model, optimizer)
    assert all(torch.equal(found[name], master) for name, master in expected.items())
    for name, param in model.named_parameters():
        assert torch.equal(param.detach().view(-1), split_master(expected[name])[0])


# ---- Graphed steps. ----


@pytest.mark.in_turn
@pytest.mark.parametrize("place", [None, "host"])
@pytest.mark.parametrize("writes", [False, True])
def test_graphed_steps_have_the_same_bits(place: str | None, writes: bool) -> None:
    """Between calls a program writes a parameter, and loads state. ``writes``: the step writes one at its end."""

    def run(graphed: bool) -> dict[str, Tensor]:
        model = shard(make_net())
        optimizer = ShardedAdamW(model.parameters(), **HYPER, offload_state=place)

        def train_step(x: Tensor) -> Tensor:
            loss = model(x).float().square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if writes:
                with torch.no_grad():
                    model[4].bias.clamp_(-0.02, 0.02)
            optimizer.zero_grad()
            return loss.detach()

        step: Any = GraphedTrainingStep(train_step, model, optimizer, num_warmup_steps=2) if graphed else train_step
        for number in range(10):
            step(torch.randn(8, 24, generator=torch.Generator().manual_seed(number)).to(BF16))
            if number == 4:
                kept = optimizer.state_dict()
            if number == 6:
                with torch.no_grad():
                    model[0].weight.mul_(0.5)
            if number == 7:
                optimizer.load_state_dict(kept)
            optimizer.param_groups[0]["lr"] *= 0.9
        return masters_of(model, optimizer)

    def both() -> None:
        eager, graphed = run(False), run(True)
        for name, master in eager.items():
            assert torch.equal(graphed[name], master), name

    simulate(both, 2)


# ---- Bytes, and what is refused. ----


def test_twelve_bytes_an_element() -> None:
    model = shard(make_net())
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    backward(model, 0)
    optimizer.step()
    shards, grads, state = 0, 0, 0
    for param in model.parameters():
        assert param.grad is not None
        shards += param.nbytes
        grads += param.grad.nbytes
        state += sum(value.nbytes for key, value in optimizer.state[param].items() if key != "step")
    numel = sum(param.numel() for param in make_net().parameters())
    assert (shards, grads, state) == (2 * numel, 4 * numel, 6 * numel)
    for unit in model.units:  # sums are shown themselves, without a copy in bf16
        for bucket in unit.buckets:
            assert nbytes_of_sums(bucket.grad_shard) == 4 * bucket.layout.numel


def test_gradients_are_freed_between_steps() -> None:
    model = shard(make_net())
    optimizer = ShardedAdamW(model.parameters(), **HYPER)
    train(model, optimizer, range(2))
    model(torch.zeros(1, 24, dtype=BF16))
    assert all(nbytes_of_sums(bucket.grad_shard) == 0 for unit in model.units for bucket in unit.buckets)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"state": "small"}, "compact"),
        ({"moment_dtype": torch.float16}, "moment_dtype"),
        ({"state": "full"}, "full state is beside fp32 shards"),
        ({"offload_state": "disk"}, "offload_state"),
        ({"amsgrad": True}, "amsgrad"),
        ({"foreach": True}, "one pass"),
        ({"capturable": True}, "one pass"),
        ({"fused": False}, "one pass"),
        ({"decoupled_weight_decay": True}, "take the class AdamW"),
    ],
)
def test_what_the_optimizer_lacks_is_refused(options: dict[str, Any], words: str) -> None:
    model = shard(make_net())
    cls = ShardedAdam if "decoupled_weight_decay" in options else ShardedAdamW
    with pytest.raises(ValueError, match=words):
        cls(model.parameters(), **options)
    backward(model, 0)
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {BF16}  # as before
    torch.optim.AdamW(model.parameters()).step()


def test_an_option_of_the_other_class_that_comes_later_is_refused() -> None:
    """torch's ``load_state_dict`` takes over the option that makes Adam AdamW."""
    model = shard(make_net())
    optimizer, other = ShardedAdam(model.parameters()), ShardedAdamW(shard(make_net()).parameters())
    optimizer.load_state_dict(other.state_dict())
    backward(model, 0)
    with pytest.raises(ValueError, match="take the class AdamW"):
        optimizer.step()


def test_copies_and_flattened_state_are_refused_by_name() -> None:
    model = shard(make_net())
    optimizer = ShardedAdamW(model.parameters())
    train(model, optimizer, range(1))
    with pytest.raises(TypeError, match=r"ShardedAdamW .* use state_dict\(\)"):
        copy.deepcopy(optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    given = get_optimizer_state_dict(model, optimizer, options=options)
    before = masters_of(model, optimizer)
    with pytest.raises(ValueError, match="flatten_optimizer_state_dict=True: leave that option out"):
        set_optimizer_state_dict(model, optimizer, given, options=options)
    after = masters_of(model, optimizer)
    assert all(torch.equal(master, after[name]) for name, master in before.items())


def test_fp16_is_refused_by_name() -> None:
    model = shard(make_net(), dtype=torch.float16, mixed_precision=None)
    with pytest.raises(ValueError, match=r"'weight' is torch\.float16"):
        ShardedAdamW(model.parameters())


def test_make_optimizer_takes_it() -> None:
    policy = MixedPrecisionPolicy()
    model = maingrad.parallelize(make_net().to(BF16), "zero3", mixed_precision=policy)
    optimizer = maingrad.make_optimizer(model, lr=1e-3, state="compact", max_grad_norm=1.0)
    assert type(optimizer) is ShardedAdamW
    train(model, optimizer, range(2))
    assert {state["remainder"].dtype for state in optimizer.state.values()} == {torch.int16}
    assert optimizer.grad_norm is not None
    adam = maingrad.make_optimizer(model, torch.optim.Adam, offload_state="host", state="compact")
    assert type(adam) is ShardedAdam
    assert type(maingrad.make_optimizer(model, state="full")) is torch.optim.AdamW
    with pytest.raises(ValueError, match="are for Adam and AdamW, not SGD"):
        maingrad.make_optimizer(model, torch.optim.SGD, state="compact")
