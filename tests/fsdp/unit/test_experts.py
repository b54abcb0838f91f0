"""Experts on a mesh of their own: sharded over ranks that hold the same ones, averaged over all that have tokens."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import assert_same
from modules import FEATURES, make
from sharded_twin import assert_same_grads, batches_of, mean_loss, no_sync, plain_grads
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate


class Mixture(nn.Module):
    """A layer around experts. Each rank has one variant of the experts. There is no exchange of tokens."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(5, FEATURES)
        self.experts = experts
        self.last = nn.Linear(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.experts(self.first(x).tanh()))


def plain_experts(variant: int) -> nn.Module:
    torch.manual_seed(100 + variant)
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, FEATURES))


def build(variant: int, kind: str, fuse: bool) -> Mixture:
    experts = plain_experts(variant) if kind == "plain" else make(kind, fuse=fuse, seed=100 + variant)
    torch.manual_seed(0)
    return Mixture(experts)


def run(model: nn.Module, batches: Any) -> None:
    for index, batch in enumerate(batches):
        loss = mean_loss(model(batch)) / len(batches)
        if index < len(batches) - 1:
            with no_sync(model):
                loss.backward()
        else:
            loss.backward()


def expert_mesh(size: int, num_variants: int, instances: int) -> Any:
    """The mesh of ranks r, r + num_variants, ..., which hold the same experts, in ``instances`` instances."""
    shape = (instances, size // num_variants // instances, num_variants)
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner", "variant"))["outer", "inner"]


@pytest.mark.parametrize(
    ("size", "num_variants", "instances", "row"),
    [(4, 2, 1, "zero3"), (4, 4, 1, "zero3"), (4, 2, 1, "zero2"), (8, 2, 2, "hsdp"), (8, 2, 2, "hsdp_zero1")],
)
@pytest.mark.parametrize("kind", ["plain", "GroupedLinear", "packed GroupedMLP"])
@pytest.mark.sampled(1)
def test_experts_have_seen_all_ranks_tokens(kind: str, size: int, num_variants: int, instances: int, row: str) -> None:
    def on_each_rank() -> None:
        rank = dist.get_rank()
        variant = rank % num_variants
        model = build(variant, kind, fuse=True)
        twins = [build(other, kind, fuse=False) for other in range(num_variants)]
        if row.startswith("hsdp"):
            dense: Any = init_device_mesh("cpu", (instances, size // instances))
            mesh: Any = expert_mesh(size, num_variants, instances)
        else:
            dense = None
            members = [list(range(first, size, num_variants)) for first in range(num_variants)]
            mesh = [dist.new_group(ranks) for ranks in members][variant]
        fully_shard(model.experts, mesh=mesh, placements=row)
        fully_shard(model, mesh=dense, placements=row)
        for step in range(2):
            run(model, batches_of(rank, 2, step=step, dtype=torch.float32))
            sums: dict[str, Tensor] = {}
            for other in range(size):
                twin = twins[other % num_variants]
                twin.zero_grad()
                grads = plain_grads(twin, run, [batches_of(other, 2, step=step, dtype=torch.float32)])
                for name, grad in grads.items():
                    if name.startswith("experts") and other % num_variants != variant:
                        continue
                    sums[name] = sums.get(name, torch.zeros(())) + grad / size
            assert_same_grads(model, sums, 2e-6)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            optimizer.step()
            optimizer.zero_grad()

    simulate(on_each_rank, size)


# ---- Norms, clipping and the check for Inf: one answer on all ranks. ----


def sharded_mixture(rank: int, instances: int) -> Any:
    """Four ranks, two kinds of experts; the model of this rank."""
    model = build(rank % 2, "plain", fuse=False)
    if instances > 1:
        dense: Any = init_device_mesh("cpu", (instances, 4 // instances))
        mesh, row = expert_mesh(4, 2, instances), "hsdp"
    else:
        dense, row = None, "zero3"
        mesh = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    fully_shard(model.experts, mesh=mesh, placements=row)
    return fully_shard(model, mesh=dense, placements=row)


def average_grads(twins: list[Mixture], step: int) -> list[dict[str, Tensor]]:
    """Average gradients over four ranks' batches, for each variant of the experts; left in ``.grad`` of the twins."""
    sums: list[dict[str, Tensor]] = [{}, {}]
    for rank in range(4):
        grads = plain_grads(twins[rank % 2], run, [batches_of(rank, 2, step=step, dtype=torch.float32)])
        for variant in (0, 1):
            for name, grad in grads.items():
                if not name.startswith("experts") or rank % 2 == variant:
                    sums[variant][name] = sums[variant].get(name, torch.zeros(())) + grad / 4
    return sums


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.sampled(1)
def test_clipping_is_by_one_norm_over_all_experts(instances: int, norm_type: float) -> None:
    def on_each_rank() -> tuple[float, dict[str, Tensor]]:
        rank = dist.get_rank()
        model = sharded_mixture(rank, instances)
        twins = [build(variant, "plain", fuse=False) for variant in (0, 1)]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(2):
            run(model, batches_of(rank, 2, step=step, dtype=torch.float32))
            found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type)
            sums = average_grads(twins, step)
            experts = [grad for variant in sums for name, grad in variant.items() if name.startswith("experts")]
            every = [*experts, *(grad for name, grad in sums[0].items() if not name.startswith("experts"))]
            expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in every]).double(), norm_type)
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
            optimizer.step()
            optimizer.zero_grad()
            for twin, grads in zip(twins, sums, strict=True):
                with torch.no_grad():
                    for name, param in twin.named_parameters():
                        param -= 0.5 * grads[name] * (0.05 / expected).float()
        with model.unsharded():
            whole = {name: param.detach().clone() for name, param in model.named_parameters()}
        for name, param in twins[rank % 2].named_parameters():
            torch.testing.assert_close(whole[name], param.detach(), rtol=1e-4, atol=1e-6)
        return float(found), {name: value for name, value in whole.items() if not name.startswith("experts")}

    first, *others = simulate(on_each_rank, 4)
    for norm, dense in others:
        assert norm == first[0]
        assert all(torch.equal(dense[name], first[1][name]) for name in dense)


@pytest.mark.parametrize("instances", [1, 2])
def test_an_overflow_of_one_expert_is_skipped_by_all(instances: int) -> None:
    """The experts' own optimizer checks for Inf over gradients of experts alone."""

    def on_each_rank() -> tuple[bool, float]:
        rank = dist.get_rank()
        model = sharded_mixture(rank, instances)
        optimizer = torch.optim.SGD(model.experts.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        before = [param.detach().clone() for param in model.experts.parameters()]
        model.experts.register_forward_pre_hook(lambda module, args: (args[0].detach(),))
        if rank % 2 == 1:  # gradients of its experts alone, not of what comes before or after them
            infinite = partial(torch.mul, float("inf"))
            model.experts.register_forward_hook(lambda module, args, output: output.register_hook(infinite) and None)
        scaler.scale(mean_loss(model(torch.ones(3, 5)))).backward()
        scaler.step(optimizer)
        scaler.update()
        after = [param.detach() for param in model.experts.parameters()]
        return all(map(torch.equal, before, after)), scaler.get_scale()

    assert simulate(on_each_rank, 4) == [(True, 2.0)] * 4


def test_other_numbers_of_experts_have_no_norm() -> None:
    def on_each_rank() -> str:
        rank = dist.get_rank()
        torch.manual_seed(0)
        experts = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(1 + rank)])
        model = Mixture(experts)
        groups = [dist.new_group([other]) for other in (0, 1)]
        fully_shard(model.experts, mesh=groups[rank])
        fully_shard(model)
        mean_loss(model(torch.ones(3, 5))).backward()
        with pytest.raises(RuntimeError, match="different numbers of parameters") as refusal:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return str(refusal.value)

    assert all("give every rank as many experts" in message for message in simulate(on_each_rank, 2))


def test_frozen_experts_do_not_count_for_norms() -> None:
    """Ranks may hold different numbers of them: the norm is that of the trained ones."""

    def on_each_rank() -> float:
        rank = dist.get_rank()
        torch.manual_seed(0)
        experts = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(1 + rank)])
        for frozen in experts[1:]:
            frozen.requires_grad_(False)
        model = Mixture(experts)
        groups = [dist.new_group([other]) for other in (0, 1)]
        fully_shard(model.experts, mesh=groups[rank])
        fully_shard(model)
        mean_loss(model(torch.ones(3, 5))).backward()
        return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))

    first, second = simulate(on_each_rank, 2)
    assert first == second > 0


def marked_experts(differs: str) -> nn.Sequential:
    """A norm of experts behind a layer; of the norm, the tensor named ``differs`` has other values on each rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for param in model[1].parameters():
        param.allreduce = False
    with torch.no_grad():
        getattr(model[1], differs).add_(dist.get_rank())
    return model


@pytest.mark.parametrize("differs", ["weight", "bias", "running_mean"])
def test_experts_that_differ_are_refused_where_no_mesh_says_whose_they_are(differs: str) -> None:
    """Else all ranks would get the first one's. A mesh says that they are to; without ``init_sync`` buffers stay."""

    def on_each_rank() -> None:
        match = rf"'\S*{differs}' is an expert's .*differs between ranks.* call fully_shard on the experts first"
        with pytest.raises(ValueError, match=match):
            fully_shard(marked_experts(differs))
        alike: Any = fully_shard(marked_experts(differs), dist.group.WORLD)
        with alike.unsharded():
            assert_same(alike[1].state_dict(), nn.BatchNorm1d(4).state_dict())
        if differs == "running_mean":
            apart = fully_shard(marked_experts(differs), init_sync=False)
            assert apart[1].running_mean.tolist() == [dist.get_rank()] * 4

    simulate(on_each_rank, 2)


def test_a_mesh_beyond_the_outermost_units_is_refused() -> None:
    def on_each_rank() -> None:
        torch.manual_seed(0)
        model = Mixture(plain_experts(0))
        fully_shard(model.experts)
        groups = [dist.new_group([other]) for other in (0, 1)]
        fully_shard(model, mesh=groups[dist.get_rank()])
        with pytest.raises(ValueError, match="not among the outermost unit's"):
            model(torch.ones(3, 5))

    simulate(on_each_rank, 2)


def test_a_mesh_of_some_ranks_beyond_the_outermost_units_is_refused_on_all() -> None:
    def on_each_rank() -> None:
        rank = dist.get_rank()
        torch.manual_seed(0)
        model = Mixture(plain_experts(0))
        experts = [dist.new_group(ranks) for ranks in ([0], [1, 2])]
        everyone = [dist.new_group(ranks) for ranks in ([0, 1], [2])]
        fully_shard(model.experts, mesh=experts[rank > 0])
        fully_shard(model, mesh=everyone[rank > 1])
        with pytest.raises(ValueError, match=rf"ranks \[{1 if rank == 2 else 2}\], which are not among the outermost"):
            model(torch.ones(3, 5))

    simulate(on_each_rank, 3)


def experts_of_an_instance(seed: int) -> Any:
    """A dense layer over two instances of four ranks, each of which has an expert of its own, in two copies."""
    everyone = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    own = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("experts", "outer", "inner"))["outer", "inner"]
    torch.manual_seed(seed + dist.get_rank() // 4)
    expert = nn.Linear(5, 3)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), expert)
    fully_shard(model[1], mesh=own)
    return fully_shard(model, mesh=everyone)


def test_a_checkpoint_has_the_experts_of_all_instances(tmp_path: Path) -> None:
    def save_and_load() -> bool:
        saved, loaded = experts_of_an_instance(0), experts_of_an_instance(10)
        save_checkpoint(tmp_path / "c", saved)
        load_checkpoint(tmp_path / "c", loaded)
        pairs = zip(saved.parameters(), loaded.parameters(), strict=True)
        return all(torch.equal(one.detach(), other.detach()) for one, other in pairs)

    assert simulate(save_and_load, 8) == [True] * 8


def begins_with_experts(seed: int, *, ignores: bool = False) -> Any:
    """Two kinds of experts on four ranks, before a dense layer; the outermost unit has no parameters of its own."""
    everyone = init_device_mesh("cpu", (4,))
    own = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "kind"))["shard"]
    torch.manual_seed(seed + dist.get_rank() % 2)
    expert = nn.Linear(4, 5)
    torch.manual_seed(seed)
    model = nn.Sequential(expert, nn.Linear(5, 3))
    fully_shard(model[0], mesh=own)
    for module in (model[1], model):
        fully_shard(module, mesh=everyone, ignored_params=[model[1].bias] if ignores else [])
    return model


@pytest.mark.parametrize("ignores", [False, True])
def test_a_model_may_begin_with_its_experts(tmp_path: Path, ignores: bool) -> None:
    """In a checkpoint, and in a state dict, whose DTensors are over the ranks that hold the same ones.

    ignores  the dense layer's bias is not sharded
    """

    def save_and_load() -> bool:
        saved, loaded = (begins_with_experts(seed, ignores=ignores) for seed in (0, 10))
        save_checkpoint(tmp_path / "c", saved)
        load_checkpoint(tmp_path / "c", loaded)
        entry = saved.state_dict()["0.weight"]
        assert entry.device_mesh.size() == 2
        with saved.unsharded():
            assert torch.equal(entry.full_tensor(), saved[0].weight)
        pairs = zip(saved.parameters(), loaded.parameters(), strict=True)
        return all(torch.equal(one.detach(), other.detach()) for one, other in pairs)

    assert simulate(save_and_load, 4) == [True] * 4


@pytest.mark.parametrize("missing", ["0.weight", "1.weight"])
def test_ranks_without_a_lost_state_of_experts_raise_with_the_others(missing: str) -> None:
    """Rank 1 alone has lost a moment. Ranks 0 and 2 have other experts, and waited in the dense layer's exchange."""

    def save_and_load() -> str:
        model = begins_with_experts(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        if dist.get_rank() == 1:
            names = [name for name, _ in model.named_parameters()]
            state["state"][names.index(missing)].pop("momentum_buffer")
        with pytest.raises(ValueError, match="state dicts differ between ranks") as raised:
            optimizer.load_state_dict(state)
        return str(raised.value)

    messages = simulate(save_and_load, 4)
    assert all(f"'momentum_buffer' of '{missing}'" in message for message in messages)


def test_ranks_without_a_lost_state_of_experts_raise_behind_a_dense_layer_too() -> None:
    """The model begins with the dense layer, which all ranks share. Only rank 1 has lost a moment."""

    def load() -> str:
        model = sharded_mixture(dist.get_rank(), 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        mean_loss(model(torch.ones(3, 5))).backward()
        optimizer.step()
        state = optimizer.state_dict()
        if dist.get_rank() == 1:
            names = [name for name, _ in model.named_parameters()]
            state["state"][names.index("experts.0.weight")].pop("momentum_buffer")
        with pytest.raises(ValueError, match="state dicts differ between ranks") as raised:
            optimizer.load_state_dict(state)
        return str(raised.value)

    for message in simulate(load, 4):
        assert "'momentum_buffer' of 'experts.0.weight'" in message
