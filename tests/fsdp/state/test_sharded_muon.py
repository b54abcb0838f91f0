"""Groups with a class each over sharded parameters: Muon's matrices, cut anywhere, get the bits of whole ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_ranks
from loops import assert_same, weights
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from maingrad import make_optimizer
from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    Muon,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.fsdp import fully_shard
from maingrad.fsdp.state import sharded_muon
from maingrad.fsdp.state.sharded_muon import ShardedMuon
from maingrad.launch import simulate

STEPS = 10
GROUPS: list[dict[str, Any]] = [
    {
        "params": "0.weight",
        "optimizer": Muon,
        "lr": 0.03,
        "split": [16, 32, 16],
        "weight_decay": 0.5,
        "nesterov": False,
    },
    {
        "params": ["1.linear.weight", "2.experts"],
        "optimizer": Muon,
        "lr": 0.05,
        "momentum": 0.8,
        "ns_steps": 4,
        "adjust_lr_fn": "match_rms_adamw",
    },
    {"params": "*.bias", "weight_decay": 0.0},
]


class Experts(nn.Module):
    """Three matrices in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 16, 128) / 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.einsum("bi,eoi->bo", inputs, self.experts).tanh()


class Block(nn.Module):
    """A norm and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 128)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(self.norm(inputs.tanh())).tanh()


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), Block(), Experts())


def backward(model: nn.Module, step: int, rank: int) -> None:
    inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * step + rank))
    model(inputs).square().mean().backward()


def train(model: nn.Module, optimizer: Any, steps: range, *, alike: bool = False) -> None:
    rank = 0 if alike or not torch.distributed.is_initialized() else torch.distributed.get_rank()
    for step in steps:
        backward(model, step, rank)
        optimizer.step()
        optimizer.zero_grad()


def whole(model: Any) -> dict[str, Tensor]:
    """Copies of the weights."""
    with torch.no_grad(), model.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def shard(placements: Any = "zero3", atoms: Any = "element") -> tuple[Any, Any]:
    model = make_net()
    mesh = None
    if placements.startswith("hsdp"):
        mesh = init_device_mesh("cpu", (2, torch.distributed.get_world_size() // 2), mesh_dim_names=("outer", "inner"))
    for block in model:
        fully_shard(block, placements=placements, mesh=mesh, shard_atoms=atoms)
    fully_shard(model, placements=placements, mesh=mesh)
    return model, make_optimizer(model, lr=0.02, param_groups=GROUPS)


def sharded(placements: Any, atoms: Any) -> dict[str, Tensor]:
    model, optimizer = shard(placements, atoms)
    train(model, optimizer, range(STEPS))
    return whole(model)


def replicated() -> dict[str, Tensor]:
    ddp = DistributedDataParallel(make_net(), DistributedDataParallelConfig())
    train(ddp, DistributedOptimizer(ddp, lr=0.02, param_groups=GROUPS), range(STEPS))
    return weights(ddp)


@pytest.mark.in_turn
@pytest.mark.parametrize("ranks", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("placements", "atoms"), [("zero3", "element"), ("zero1", "element"), ("zero3", "whole"), ("zero3", "row")]
)
def test_weights_have_the_bits_of_whole_matrices(ranks: int, placements: str, atoms: str) -> None:
    expected = simulate(replicated, ranks)[0]
    for ours in simulate(sharded, ranks, placements, atoms):
        assert_same(ours, expected)


def test_shards_cut_matrices_and_all_ranks_orthogonalise() -> None:
    """What the test above relies on: with "element" most matrices lie on several ranks, with "whole" none does."""

    def on_each_rank(atoms: str) -> tuple[int, int, int]:
        model, optimizer = shard(atoms=atoms)
        train(model, optimizer, range(1))
        muon = optimizer._inners[-1]
        assert isinstance(muon, ShardedMuon)
        parts = [part for bucket in muon._buckets for part in bucket.parts]
        cut = sum(part.on_rank(rank).numel not in (0, part.elements.numel) for part in parts for rank in [0])
        travelling = sum(bucket.group is not None for bucket in muon._buckets)
        return cut, sum(len(bucket.mine) for bucket in muon._buckets), travelling

    by_rank = simulate(on_each_rank, 2, "element")
    assert by_rank[0][0] >= 3, "of three parts, a matrix and three experts"
    assert [count for _, count, _ in by_rank] in ([3, 4], [4, 3]) and by_rank[0][2] >= 2
    assert all((cut, travelling) == (0, 0) for cut, _, travelling in simulate(on_each_rank, 2, "whole"))


@pytest.mark.in_turn
def test_instances_orthogonalise_by_themselves() -> None:
    """Two instances of two ranks; sums over four ranks have another order."""
    expected = simulate(replicated, 4)[0]
    for ours in simulate(sharded, 4, "hsdp", "element"):
        for name, weight in ours.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-4)


def test_state_sharded_across_instances_is_refused() -> None:
    def on_each_rank() -> None:
        with pytest.raises(ValueError, match=r"0\.weight.*optimizer state is sharded across instances: take other"):
            shard("hsdp_zero1")

    simulate(on_each_rank, 4)


@pytest.mark.in_turn
@pytest.mark.parametrize("target", ["fully_shard", "zero1"])
def test_checkpoints_go_on_with_other_ranks_and_wrappers(tmp_path: Path, target: str) -> None:
    """The same gradients on all ranks: a mean of equal ones is exact for powers of two."""

    def save() -> dict[str, Tensor]:
        model, optimizer = shard()
        train(model, optimizer, range(3), alike=True)
        save_checkpoint(tmp_path / "saved", model, optimizer)
        train(model, optimizer, range(3, 6), alike=True)
        return whole(model)

    def resume() -> dict[str, Tensor]:
        model: Any
        if target == "fully_shard":
            model, optimizer = shard(atoms="row")
        else:
            config = DistributedDataParallelConfig(
                use_distributed_optimizer=True, keep_matrices_whole=("0.weight", "1.linear.weight", "2.experts")
            )
            model = DistributedDataParallel(make_net(), config)
            optimizer = DistributedOptimizer(model, lr=0.02, param_groups=GROUPS)
        load_checkpoint(tmp_path / "saved", model, optimizer)
        train(model, optimizer, range(3, 6), alike=True)
        return whole(model) if target == "fully_shard" else weights(model)

    expected = simulate(save, 2)[0]
    for ours in simulate(resume, 4):
        assert_same(ours, expected)


def test_state_dicts_and_schedules_reach_each_class() -> None:
    def on_each_rank(restored: bool) -> dict[str, Tensor]:
        model, optimizer = shard()
        scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 12)
        for step in range(STEPS):
            if restored and step == 4:
                state = optimizer.state_dict()
                other, its = shard()
                its.load_state_dict(state)
                other.load_state_dict(model.state_dict())
                model, optimizer = other, its
                scheduler.optimizer = optimizer
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
        return whole(model)

    for ours, expected in zip(simulate(on_each_rank, 2, True), simulate(on_each_rank, 2, False), strict=True):
        assert_same(ours, expected)


def test_groups_that_a_program_assigns_reach_each_class() -> None:
    def on_each_rank() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model, optimizer = shard()
        optimizer.param_groups = [{**group, "lr": 0.0} for group in optimizer.param_groups]
        before = whole(model)
        train(model, optimizer, range(1))
        return before, whole(model)

    for before, after in simulate(on_each_rank, 2):
        assert_same(after, before)


def test_a_step_calls_its_closure() -> None:
    """With gradients enabled, and before the update."""
    model, optimizer = shard()
    before = whole(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 64)).square().mean()
        loss.backward()
        return loss.detach()

    expected = model(torch.ones(2, 64)).square().mean().detach()
    assert torch.equal(optimizer.step(closure), expected)
    assert not any(torch.equal(before[name], value) for name, value in whole(model).items())
    muon = ShardedMuon([model[0].weight], lr=0.1)
    assert muon.step(closure) < expected


def test_hooks_of_all_optimizers_run_once_a_step() -> None:
    """Not for each class that the optimizer has inside."""
    model, optimizer = shard()
    backward(model, 0, 0)
    seen: list[optim.Optimizer] = []
    handles = [
        register(lambda stepping, *_: seen.append(stepping) or None)
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert len(seen) == 2 and all(each is optimizer for each in seen)


def test_a_matrix_without_elements_stays() -> None:
    class Odd(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.nothing, self.stack = nn.Parameter(torch.empty(8, 0)), nn.Parameter(torch.empty(3, 8, 0))

    def on_each_rank() -> None:
        torch.manual_seed(0)
        model: Any = fully_shard(Odd())
        optimizer = ShardedMuon([model.weight, model.nothing, model.stack], lr=0.1)
        model(torch.ones(2, 8)).square().sum().backward()
        before = whole(model)
        optimizer.step()
        assert not torch.equal(whole(model)["weight"], before["weight"])

    simulate(on_each_rank, 2)


def test_a_split_that_changes_between_steps_counts() -> None:
    def weights_of(*, is_sharded: bool) -> Tensor:
        model: Any = make_net()
        if is_sharded:
            fully_shard(model)
        optimizer = (ShardedMuon if is_sharded else Muon)([model[0].weight], lr=0.1)
        for step, split in enumerate(([64], [16, 48], [32, 32])):
            optimizer.param_groups[0]["split"] = split
            backward(model, step, 0)
            optimizer.step()
            optimizer.zero_grad()
        return model[0].weight.detach()

    assert torch.equal(weights_of(is_sharded=True), weights_of(is_sharded=False))


def test_a_matrix_without_a_gradient_stays() -> None:
    """And is updated again when it has one."""

    def weights_of(*, is_sharded: bool) -> list[Tensor]:
        model: Any = make_net()
        if is_sharded:
            fully_shard(model)
        params = [model[0].weight, model[1].linear.weight]
        optimizer = (ShardedMuon if is_sharded else Muon)(params, lr=0.1)
        for step, without in enumerate((None, 0, 1, None)):
            backward(model, step, 0)
            if without is not None:
                params[without].grad = None
                before = params[without].detach().clone()
            optimizer.step()
            assert without is None or torch.equal(params[without].detach(), before)
            optimizer.zero_grad()
        return [param.detach() for param in params]

    assert all(map(torch.equal, weights_of(is_sharded=True), weights_of(is_sharded=False)))


def test_a_matrix_that_moves_to_another_group_has_that_ones_options() -> None:
    model: Any = fully_shard(make_net())
    first, second = model[0].weight, model[1].linear.weight
    optimizer = ShardedMuon([{"params": [first], "lr": 0.1}, {"params": [second], "lr": 0.0}], lr=0.1)
    for moved in (False, True):
        if moved:
            optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
        before = first.detach().clone(), second.detach().clone()
        train(model, optimizer, range(1))
        assert torch.equal(first.detach(), before[0]) is moved
        assert torch.equal(second.detach(), before[1])


@pytest.mark.parametrize(
    ("shapes", "num_alone", "expected"),
    [
        pytest.param([[(48, 16), (16, 16)]], 0, [1, 1], id="the second of a bucket is whole on the first rank"),
        pytest.param([[(16, 16)], [(16, 16)], [(64, 64)]], 0, [1, 2], id="the costliest first"),
        pytest.param([[(64, 64)], [(16, 16)], [(16, 16)]], 0, [1, 2], id="in any order"),
        pytest.param([[(8, 8)], [(16, 16)], [(16, 16)]], 1, [2, 2], id="beside an expert of each rank"),
    ],
)
def test_cut_matrices_go_to_the_rank_with_the_least_work(
    shapes: list[list[tuple[int, int]]], num_alone: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work on matrices that a rank has whole counts. Each inner list is a unit; the first are each rank's alone."""
    done = [0] * 2
    orthogonalize = sharded_muon.orthogonalize

    def counted(whole: Tensor, *args: Any) -> Tensor:
        done[torch.distributed.get_rank()] += len(whole)
        return orthogonalize(whole, *args)

    monkeypatch.setattr(sharded_muon, "orthogonalize", counted)

    class Matrices(nn.Module):
        def __init__(self, shapes: list[tuple[int, int]]) -> None:
            super().__init__()
            self.all = nn.ParameterList([torch.randn(shape) for shape in shapes])

        def forward(self, x: Tensor) -> Tensor:
            return x + sum(each.square().sum() for each in self.all)

    def on_each_rank() -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*map(Matrices, shapes))
        for index, module in enumerate((*model, model)):
            fully_shard(module, mesh=WORLD_OF_ONE if index < num_alone else None)
        optimizer = ShardedMuon(list(model.parameters()), lr=0.1)
        model(torch.ones(1, requires_grad=True)).sum().backward()
        optimizer.step()

    simulate(on_each_rank, 2)
    assert done == expected


@pytest.mark.parametrize("experts_first", [True, False])
def test_experts_that_each_rank_has_alone_are_orthogonalised_there(experts_first: bool) -> None:
    """Beside matrices that all ranks share: their groups have other sizes."""

    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))

    def on_each_rank() -> list[Tensor]:
        model = make()
        fully_shard(model[not experts_first], mesh=WORLD_OF_ONE)
        fully_shard(model)
        optimizer = ShardedMuon(list(model.parameters()), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(whole(model).values())

    plain = make()
    optimizer = Muon(list(plain.parameters()), lr=0.1)
    for _ in range(2):
        plain(torch.ones(2, 16)).square().mean().backward()
        plain[not experts_first].weight.grad /= 3  # a rank's part of the mean
        optimizer.step()
        optimizer.zero_grad()
    for found in simulate(on_each_rank, 3):
        for mine, theirs in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-3, atol=1e-4)


def test_a_scaler_skips_the_step_of_all_classes() -> None:
    """None of them, with its groups, knows of a scaler: it unscales gradients itself."""
    model, optimizer = shard()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for bad in (False, True):
        before = whole(model)
        loss = model(torch.ones(2, 64)).square().mean() * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        largest = max(float(param.grad.to_local().abs().max()) for param in model.parameters())
        assert bad or largest < 1.0, "unscaled"
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all(torch.equal(value, before[name]) for name, value in whole(model).items()) == bad


def test_several_microbatches_within_rounding() -> None:
    def on_each_rank(is_sharded: bool) -> dict[str, Tensor]:
        if is_sharded:
            model, optimizer = shard()
        else:
            model = DistributedDataParallel(make_net(), DistributedDataParallelConfig())
            optimizer = DistributedOptimizer(model, lr=0.02, param_groups=GROUPS)
        rank = torch.distributed.get_rank()
        for step in range(3):
            with model.no_sync():
                backward(model, 2 * step, rank)
            backward(model, 2 * step + 1, rank)
            optimizer.step()
            optimizer.zero_grad()
        return whole(model) if is_sharded else weights(model)

    for ours, expected in zip(simulate(on_each_rank, 2, True), simulate(on_each_rank, 2, False), strict=True):
        for name, weight in ours.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.in_turn
def test_groups_have_no_class_among_their_options() -> None:
    def on_each_rank() -> None:
        _, optimizer = shard()
        assert not any("optimizer" in group for group in optimizer.param_groups)
        assert optimizer.classes_of_groups == [Muon, Muon, optim.AdamW, optim.AdamW]
        assert [group["lr"] for group in optimizer.param_groups] == [0.03, 0.05, 0.02, 0.02]
        with pytest.raises(RuntimeError, match=r"ShardedOptimizer .* takes no further group"):
            optimizer.add_param_group({"params": []})
        with pytest.raises(TypeError, match="ShardedOptimizer is tied to its model"):
            optimizer.__getstate__()

    simulate(on_each_rank, 2)


def test_what_is_no_matrix_or_no_shard_is_refused() -> None:
    def on_each_rank() -> None:
        model: Any = fully_shard(make_net())
        with pytest.raises(ValueError, match=r"Muon updates matrices"):
            make_optimizer(model, param_groups=[{"params": "*", "optimizer": Muon}])
        with pytest.raises(ValueError, match=r"ShardedMuon updates parameters of fully_shard"):
            ShardedMuon([model[0].weight, nn.Parameter(torch.zeros(4, 4))])
        optimizer = ShardedMuon([model[0].weight], lr=0.1)
        for refused in (nn.Parameter(torch.zeros(4, 4)), model[0].bias, model[0].weight):
            with pytest.raises(ValueError, match=r"ShardedMuon updates param|Muon updates matrices|more than one"):
                optimizer.add_param_group({"params": [refused]})
            assert len(optimizer.param_groups) == 1, "a refusal leaves nothing"
        half = fully_shard(nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16)))
        with pytest.raises(ValueError, match=r"'0.weight' is torch.bfloat16: ShardedMuon updates fp32 shards"):
            ShardedMuon([model[0].weight, half[0].weight])
        with pytest.raises(ValueError, match=r"compact.* are for Adam and AdamW over a sharded model, .* has Muon"):
            make_optimizer(model, param_groups=GROUPS, state="compact")

    simulate(on_each_rank, 2)


def test_each_class_is_checked_by_itself() -> None:
    class Declared(optim.SGD):
        per_parameter = True

    class Unknown(optim.SGD):
        pass

    class Another(Muon):
        pass

    def on_each_rank(cls: Any, message: str) -> None:
        groups = [{"params": "1.linear.weight", "optimizer": cls}]
        with pytest.raises(RuntimeError, match=message):
            make_optimizer(fully_shard(make_net()), param_groups=groups)
        optimizer = make_optimizer(fully_shard(make_net(), shard_atoms="whole"), param_groups=[GROUPS[0]])
        assert optimizer.classes_of_groups == [Muon, optim.AdamW]

    cut = "updates whole parameters, and shards cut them apart"
    for cls, message in ((optim.Muon, cut), (Declared, cut), (Another, cut), (Unknown, "not known to be elementwise")):
        simulate(on_each_rank, 3, cls, message)


@pytest.mark.in_turn
def test_two_processes_have_the_bits_of_simulated_ranks() -> None:
    for ours, expected in zip(
        run_ranks(sharded, 2, "zero3", "element"), simulate(sharded, 2, "zero3", "element"), strict=True
    ):
        assert_same(ours, expected)
