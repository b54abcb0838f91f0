"""``parallelize(..., ep=)``: ranks with a part of the experts train the model that ranks with all experts train."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from expert_models import published, tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, load_checkpoint, muon_groups, save_checkpoint
from maingrad.ddp.plan.owned_params import find_owned_params
from maingrad.launch import make_optimizer, parallelize, simulate
from maingrad.launch.parallelizing.experts import keep_own, numbers_of_experts, share_experts
from maingrad.te_integration import GroupedMLP, convert_linears, unconvert

RANKS, STEPS = 4, 3
CAPACITY = {"transport": "capacity", "capacity": 40}


class Trained(NamedTuple):
    """What a rank has after a run."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    """Whole ones."""
    fused_writes: int


def tokens_of(index: int) -> Tensor:
    return torch.randint(96, (2, 9), generator=torch.Generator().manual_seed(index))


def mesh_of(parallel: str) -> DeviceMesh | None:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")) if parallel == "hsdp" else None


def train(model: Any, *, padded: bool = False, place: int | None = None) -> Trained:
    """Clipped steps of two microbatches. ``place``: the rank's tokens; None: its own."""
    place = dist.get_rank() if place is None else place
    optimizer = make_optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-3, max_grad_norm=0.5)
    losses, norms = [], []
    for step in range(STEPS):
        for microbatch in range(2):
            tokens = tokens_of(100 * step + 10 * microbatch + place)
            arguments = {"input_ids": tokens, "labels": tokens, "output_router_logits": True}
            if padded:  # another number on each rank
                mask = (torch.arange(9) < 9 - place).long().expand(2, 9)
                arguments |= {"attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
            with nullcontext() if microbatch else model.no_sync():
                loss = model(**arguments).loss / 2
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
        optimizer.zero_grad()
    return Trained(losses, norms, whole_weights(model), fused_writes(model))


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    found = model.state_dict().items()
    wholes = ((name, each.full_tensor() if isinstance(each, DTensor) else each.clone()) for name, each in found)
    return {name.removeprefix("module."): each.detach() for name, each in wholes}


def fused_writes(model: Any) -> int:
    buckets = model.buckets if hasattr(model, "buckets") else [each for unit in model.units for each in unit.buckets]
    return sum(record.num_fused_writes for bucket in buckets for record in bucket.records if "experts" in record.name)


def run(name: str, parallel: str, ep: int | None, *, padded: bool = False) -> Trained:
    return train(parallelize(tiny(name), parallel, ep=ep, mesh=mesh_of(parallel)), padded=padded)


@cache
def without_ep(name: str, parallel: str = "ddp", *, padded: bool = False) -> list[Trained]:
    return simulate(lambda: run(name, parallel, None, padded=padded), RANKS)


def assert_same(found: list[Trained], expected: list[Trained], *, unfused: bool = False) -> None:
    for got, want in zip(found, expected, strict=True):
        assert got.losses == pytest.approx(want.losses, rel=1e-5)
        assert got.norms == pytest.approx(want.norms, rel=1e-5)
        assert got.norms == found[0].norms
        assert got.weights.keys() == want.weights.keys()
        for name, weight in want.weights.items():
            assert (got.weights[name] - weight).norm() <= 2e-5 * weight.norm() + 1e-7, name
        assert unfused or got.fused_writes == want.fused_writes > 0


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe"])
@pytest.mark.in_turn
def test_families_train_alike(name: str, ep: int) -> None:
    assert_same(simulate(lambda: run(name, "zero1", ep), RANKS), without_ep(name))


@pytest.mark.parametrize(("parallel", "ep"), [("ddp", 2), ("zero3", 2), ("zero3", 4), ("zero2", 2), ("hsdp", 2)])
@pytest.mark.in_turn
def test_wrappers_train_alike(parallel: str, ep: int) -> None:
    assert_same(simulate(lambda: run("qwen3_moe", parallel, ep), RANKS), without_ep("qwen3_moe"))


@pytest.mark.parametrize("names", [("same", "ep"), ("ep", "same")])
@pytest.mark.parametrize("as_group", [False, True])
def test_the_ranks_of_experts_may_be_a_mesh_or_a_group(as_group: bool, names: tuple[str, str]) -> None:
    """Neighbours, or ranks that are apart. One dispatcher, made by ``dispatch``, serves all layers."""

    def run_over(parallel: str) -> Trained:
        ep = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)["ep"]
        model = parallelize(tiny("mixtral"), parallel, ep=ep.get_group() if as_group else ep, dispatch=CAPACITY)
        dispatchers = [module.dispatcher for module in model.modules() if hasattr(module, "dispatcher")]
        assert len(dispatchers) == 2 and dispatchers[0] is dispatchers[1]
        trained = train(model)
        assert dispatchers[0].transport.num_dropped == 0  # it was asked to move rows, and had room
        return trained

    assert_same(simulate(run_over, RANKS, "zero1"), without_ep("mixtral"))


@pytest.mark.in_turn
def test_compiled_layers_train_alike() -> None:
    def compiled(parallel: str, **options: Any) -> Trained:
        how = {"backend": "eager", **options}
        return train(parallelize(tiny("mixtral"), parallel, ep=2, compile=how, recompute=parallel == "zero3"))

    for parallel in ("zero1", "zero3"):
        torch._dynamo.reset()
        assert_same(simulate(compiled, RANKS, parallel), without_ep("mixtral"), unfused=True)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"torch.compiler.disable|Unsupported"):
        simulate(compiled, RANKS, "zero1", fullgraph=True)


@pytest.mark.parametrize("parallel", ["zero1", "zero3"])
@pytest.mark.in_turn
def test_muon_takes_experts_as_whole_matrices(parallel: str) -> None:
    def muon(ep: int | None) -> dict[str, Tensor]:
        whole = tiny("qwen3_moe")
        found = muon_groups(whole, lr=0.02, split={"*gate_up*": 1})
        assert any("experts" in name for name in found.matrices)
        options = {"keep_matrices_whole": found.matrices} if parallel == "zero1" else {}
        model = parallelize(whole, parallel, ep=ep, **options)
        optimizer = make_optimizer(model, lr=1e-2, eps=1e-3, param_groups=found.groups)
        for step in range(2):
            tokens = tokens_of(10 * step + dist.get_rank())
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return whole_weights(model)

    expected = simulate(muon, 2, None)[0]
    for found in simulate(muon, 2, 2):
        for name, weight in expected.items():
            assert (found[name] - weight).norm() <= 2e-5 * weight.norm() + 1e-7, name


@pytest.mark.in_turn
def test_padding_counts_nowhere() -> None:
    """Ranks have other numbers of tokens that count, in the loss and in the routers' loss."""
    found = simulate(lambda: run("mixtral", "zero1", 2, padded=True), RANKS)
    assert_same(found, without_ep("mixtral", padded=True))


# ---- Experts that something else has cut. ----


def by_ep_plan(model: Any) -> Any:
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2, 1), mesh_dim_names=("same", "ep", "tp"))
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], model._expand_parallel_plan(model.ep_plan))
    return model


def run_ep_plan(parallel: str) -> Trained:
    return train(parallelize(by_ep_plan(tiny("qwen3_moe")), parallel))


@pytest.mark.parametrize("parallel", ["zero1", "zero3"])
@pytest.mark.in_turn
def test_the_ep_plan_of_transformers(parallel: str) -> None:
    assert_same(simulate(lambda: run_ep_plan(parallel), RANKS), without_ep("qwen3_moe"))


@pytest.mark.in_turn
def test_the_ep_plan_over_ranks_that_share_a_batch() -> None:
    """Tensor-parallel ranks have the same tokens: transformers' own dispatch stays, which divides them."""

    def run_shared() -> Trained:
        from transformers.distributed.expert_parallel import apply_expert_parallelism

        mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), tiny("qwen3_moe")
        apply_expert_parallelism(model, mesh["tp"], mesh["tp"], model._expand_parallel_plan(model.ep_plan))
        return train(parallelize(model, "zero1", mesh=mesh["dp"]), place=mesh.get_local_rank("dp"))

    expected = simulate(lambda: run("qwen3_moe", "ddp", None), 2)
    assert_same(simulate(run_shared, RANKS), [each for each in expected for _ in range(2)], unfused=True)


class GatheredExperts(nn.Module):
    """Experts in torchtitan's form: DTensors ``Shard(0)``, a forward of local tensors, dispatch around it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(1)))
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        w = self.w.to_local() if isinstance(self.w, DTensor) else self.w
        if self.group is None:
            return torch.einsum("tc,eoc->to", x.tanh(), w)
        rows = AllToAll.apply(x, self.group)
        return AllToAll.apply(torch.einsum("ntc,eoc->nto", rows.tanh(), w), self.group).sum(0)


class AllToAll(torch.autograd.Function):
    """Each rank's x [T, C] to all ranks -> [n, T, C]; or each rank's part [n, T, C] back to its owner."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.spreads = group, x.dim() == 2
        parts = x.expand(group.size(), *x.shape).contiguous() if ctx.spreads else x.contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(grads[0])
        dist.all_to_all_single(received, grads[0].contiguous(), group=ctx.group)
        return received.sum(0) if ctx.spreads else received, None


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(8, 8), GatheredExperts()
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(8))

    def forward(self, input_ids: Tensor, labels: Tensor, output_router_logits: bool) -> Any:
        x = torch.nn.functional.one_hot(input_ids % 8, 8).float().flatten(0, 1)
        return type("Output", (), {"loss": self.experts(self.first(x)).square().mean()})


def run_own(parallel: str, *, cut: bool) -> Trained:
    model = OwnModel()
    if cut:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same", "ep"))
        model.experts.w = nn.Parameter(distribute_tensor(model.experts.w.data, mesh["ep"], [Shard(0)]))
        model.experts.group = mesh["ep"].get_group()
    return train(parallelize(model, parallel, units=[model.first]))


@pytest.mark.parametrize("parallel", ["zero1", "zero3"])
def test_experts_that_are_dtensors(parallel: str) -> None:
    expected = simulate(lambda: run_own("ddp", cut=False), RANKS)
    assert_same(simulate(lambda: run_own(parallel, cut=True), RANKS), expected, unfused=True)


def test_cut_matrices_over_data_parallel_ranks_are_no_experts() -> None:
    """``mesh=`` was forgotten: the wrapper refuses, as it would without experts."""

    def refused() -> None:
        mesh, model = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), OwnModel()
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel()})
        with pytest.raises(ValueError, match=r"tensor.parallel"):
            parallelize(model, "zero1")

    simulate(refused, 2)


def test_experts_of_a_model_that_is_cut_otherwise_are_refused() -> None:
    """A norm would count the experts once for each tensor-parallel rank. A copy of a wrapped model is cut too."""

    def refused() -> None:
        mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), tiny("mixtral")
        parallelize_module(model.model.layers[0].self_attn, mesh["tp"], {"q_proj": ColwiseParallel()})
        with pytest.raises(ValueError, match="cut over tensor-parallel ranks"):
            parallelize(model, "zero1", mesh=mesh["dp"], ep=2)
        wrapped: Any = parallelize(model, "ddp", mesh=mesh["dp"], fuse=False)
        with pytest.raises(ValueError, match="cut over tensor-parallel ranks"):
            parallelize(copy.deepcopy(wrapped.module), "zero1", mesh=mesh["dp"], ep=2)

    simulate(refused, 4)


def test_stacks_that_are_cut_in_other_ways_are_no_experts() -> None:
    """Along another dim; over ranks with the same batches, or one rank; or over another group than the others."""

    def cut(model: nn.Module, mesh: DeviceMesh, dim: int) -> nn.Module:
        model.experts.w = nn.Parameter(distribute_tensor(model.experts.w.data, mesh, [Shard(dim)]))
        return model

    def refused() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("same", "ep"))
        with pytest.raises(ValueError, match=r"tensor.parallel"):
            parallelize(cut(OwnModel(), mesh["ep"], 1), "zero1")
        one = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "one"))["one"]
        for over, ranks in ((mesh["ep"], mesh["same"]), (one, None)):
            assert share_experts(cut(OwnModel(), over, 0), ranks, None, {}, fuse=True) == {}
        both = nn.ModuleList(cut(OwnModel(), mesh[name], 0) for name in ("same", "ep"))
        with pytest.raises(ValueError, match="experts are cut over several groups of data-parallel ranks"):
            parallelize(both, "zero1")

    simulate(refused, 4)


# ---- Experts that were shared out before. ----


@pytest.mark.parametrize(("copied", "parallel"), [(True, "zero1"), (False, "zero3")])
@pytest.mark.in_turn
def test_copies_and_unwrapped_models_are_shared_out_already(copied: bool, parallel: str) -> None:
    """A copied parameter has no mark: its module knows that it is of experts, and of which."""

    def again() -> Trained:
        model: Any = parallelize(tiny("qwen3_moe"), "ddp", ep=2)
        return train(parallelize(copy.deepcopy(model) if copied else model.unwrap(), parallel))

    assert_same(simulate(again, RANKS), without_ep("qwen3_moe"))


def test_a_wrapper_knows_the_experts_of_a_copy() -> None:
    """They are no slices of tensor-parallel ranks, and one rank's are not given to the others."""

    def wrap() -> None:
        model: Any = copy.deepcopy(parallelize(tiny("qwen3_moe"), "ddp", ep=2))
        with pytest.raises(ValueError, match=r"is an expert's .* nobody said which ranks hold the same experts"):
            DistributedDataParallel(model)
        DistributedDataParallel(model, expert_process_group=WORLD_OF_ONE)

    simulate(wrap, 2)


def test_a_part_of_the_experts_runs_without_the_others_nowhere() -> None:
    def refused() -> None:
        model: Any = parallelize(tiny("qwen3_moe"), "ddp", ep=2)
        with pytest.raises(ValueError, match="sends no tokens"):
            unconvert(copy.deepcopy(model))
        model.module.config._experts_implementation = "mine"
        with pytest.raises(RuntimeError, match="'mine' knows no other ranks"):
            model(input_ids=tokens_of(0), labels=tokens_of(0))

    simulate(refused, 2)


@pytest.mark.in_turn
def test_tied_experts_stay_tied() -> None:
    """One parameter of two layers: two parts of it would train apart."""

    def run_tied(ep: int | None) -> Trained:
        model: Any = tiny("mixtral")
        first, second = (layer.mlp.experts for layer in model.model.layers)
        second.down_proj = first.down_proj
        trained = train(parallelize(model, "zero1", ep=ep))
        assert second.down_proj is first.down_proj
        return trained

    assert_same(simulate(run_tied, 2, 2), simulate(run_tied, 2, None))


def test_layers_may_have_other_numbers_of_experts() -> None:
    def loss(ep: int | None) -> float:
        model: Any = tiny("mixtral")
        model.model.layers[1].mlp = tiny("mixtral", num_local_experts=8).model.layers[1].mlp
        wrapped = parallelize(model, "ddp", ep=ep)
        with torch.no_grad():
            return float(wrapped(input_ids=tokens_of(0), labels=tokens_of(0)).loss)

    assert simulate(loss, 2, 2) == pytest.approx([loss(None)] * 2, rel=1e-5)


def test_frozen_experts_stay_frozen_and_the_others_memory_is_freed() -> None:
    def share() -> None:
        model: Any = tiny("mixtral")
        experts = model.model.layers[0].mlp.experts
        experts.down_proj.requires_grad_(False)
        count = len(experts.down_proj)
        share_experts(model, None, 2, {}, fuse=True)
        assert not experts.down_proj.requires_grad and experts.gate_up_proj.requires_grad
        assert experts.down_proj.untyped_storage().nbytes() == experts.down_proj.nbytes
        assert len(experts.down_proj) == count // 2 == experts.num_experts

    simulate(share, 2)


def test_experts_that_are_named_as_units_are_units_once() -> None:
    def share() -> list[str]:
        model: Any = tiny("mixtral")
        layers = list(model.model.layers)
        experts = [layer.mlp.experts for layer in layers]
        parallelize(model, "zero3", ep=2, units=[*experts, *layers])
        return [unit.name for unit in model.units]

    layers = ["model.layers.0", "model.layers.1"]
    for found in simulate(share, 2):
        assert sorted(found) == sorted(["", *layers, *(f"{layer}.mlp.experts" for layer in layers)])


def test_experts_that_can_be_shared_out_are_counted() -> None:
    """And none of a model of which some cannot be."""
    assert numbers_of_experts(tiny("qwen3_moe")) == numbers_of_experts(converted(tiny("qwen3_moe"))) == [8, 8]
    assert numbers_of_experts(own_implementation(tiny("qwen3_moe"))) == []
    assert numbers_of_experts(with_forward(tiny("qwen3_moe"))) == numbers_of_experts(nn.Linear(2, 2)) == []


def test_one_rank_has_all_experts() -> None:
    """A program whose ``ep`` is a number runs on one process as well, which has no groups."""

    def run_alone() -> None:
        model: Any = parallelize(tiny("mixtral"), "ddp", ep=1, dispatch={"transport": "symmetric"})
        model(input_ids=tokens_of(0), labels=tokens_of(0)).loss.backward()

    run_alone()
    simulate(run_alone, 2)


def test_a_part_of_delayed_experts_is_delayed() -> None:
    experts = GroupedMLP(4, 8, 16, bias=False, single_grouped_weight=True, delay_wgrad_compute=True)
    keep_own(experts, experts.weight_names, 2)
    found = find_owned_params(experts)
    assert len(found) == 2 and all(each.delayed and len(each.param) == 2 for each in found)
    assert all(each.param.skip_backward_post_hook for each in found), "as Transformer Engine marks them"


# ---- Checkpoints and state dicts. ----


def test_state_dicts_of_torchs_optimizers_are_of_all_experts() -> None:
    """Local tensors would be saved once, one rank's, and loaded by all."""

    def moments(ep: int | None) -> dict[str, Tensor]:
        model = parallelize(tiny("mixtral"), "ddp", ep=ep)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model(input_ids=tokens_of(0), labels=tokens_of(0)).loss.backward()
        optimizer.step()
        state = optimizer.state_dict()["state"]
        named = {name: state[index]["exp_avg"] for index, (name, _) in enumerate(model.named_parameters())}
        return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in named.items()}

    expected = simulate(moments, 2, None)[0]
    for found in simulate(moments, 2, 2):
        for name, each in expected.items():
            assert found[name].shape == each.shape, name
            assert (found[name] - each).norm() <= 2e-5 * each.norm(), name


@pytest.mark.parametrize("parallel", ["zero1", "zero3"])
@pytest.mark.in_turn
def test_checkpoints_move_experts(parallel: str, tmp_path: Path) -> None:
    """ep 2 -> ep 4 -> one rank alone."""

    def build(ep: int | None) -> tuple[Any, Any]:
        model = parallelize(tiny("qwen3_moe"), parallel, ep=ep)
        return model, make_optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-3)

    def step(model: Any, optimizer: Any) -> None:
        model(input_ids=tokens_of(0), labels=tokens_of(0)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def save() -> dict[str, Tensor]:
        model, optimizer = build(2)
        step(model, optimizer)
        save_checkpoint(tmp_path / "2", model, optimizer)
        return whole_weights(model)

    def move() -> dict[str, Tensor]:
        model, optimizer = build(4)
        load_checkpoint(tmp_path / "2", model, optimizer)
        step(model, optimizer)
        save_checkpoint(tmp_path / "4", model, optimizer)
        return whole_weights(model)

    def alone() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model, optimizer = build(None)
        load_checkpoint(tmp_path / "2", model, optimizer)
        before = whole_weights(model)
        step(model, optimizer)
        return before, whole_weights(model)

    saved, moved = simulate(save, RANKS)[0], simulate(move, RANKS)[0]
    before, after = simulate(alone, 1)[0]
    for name, weight in saved.items():
        assert torch.equal(before[name], weight), name
        assert (after[name] - moved[name]).norm() <= 2e-5 * after[name].norm() + 1e-7, name


def test_state_dicts_are_whole_and_take_whole_ones() -> None:
    whole = tiny("qwen3_moe").state_dict()

    def load() -> dict[str, Tensor]:
        model = tiny("qwen3_moe")
        for param in model.parameters():
            nn.init.zeros_(param)
        wrapped = parallelize(model, "ddp", ep=2)
        model.load_state_dict(whole)
        return whole_weights(wrapped)

    for found in simulate(load, 2):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], each) for name, each in whole.items())


@pytest.mark.in_turn
def test_gradients_of_sharded_stacks_are_of_all_experts() -> None:
    def gradient(ep: int | None) -> Tensor:
        model: Any = parallelize(tiny("mixtral"), "zero3", ep=ep)
        model(input_ids=tokens_of(0), labels=tokens_of(0)).loss.backward()
        whole: Tensor = model.model.layers[0].mlp.experts.gate_up_proj.grad.full_tensor()
        return whole

    expected = simulate(gradient, 2, None)[0]
    for found in simulate(gradient, 2, 2):
        assert (found - expected).norm() <= 2e-5 * expected.norm()


def test_experts_on_meta_are_drawn_whole() -> None:
    """Ranks of one seed have parts of one draw, and not one draw each."""

    def draw(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.normal_(tensor)

    def build() -> dict[str, Tensor]:
        model = published("qwen3_moe", tiny=True)
        torch.manual_seed(3)
        return whole_weights(parallelize(model, "zero3", ep=2, device="cpu", init_fn=draw))

    first = torch.empty(8, 48, 32).normal_(generator=torch.Generator().manual_seed(3))
    for found in simulate(build, 2):
        assert torch.equal(found["model.layers.0.mlp.experts.gate_up_proj"], first)


# ---- What is refused. ----


def own_implementation(model: Any) -> Any:
    model.config._experts_implementation = "mine"
    return model


def converted(model: nn.Module) -> nn.Module:
    convert_linears(model)
    return model


def with_forward(model: nn.Module) -> nn.Module:
    experts = model.model.layers[0].mlp.experts
    experts.forward = experts.forward
    return model


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: tiny("qwen3_moe"), {"ep": 3}, "ep = 3 does not divide the 4 data-parallel"),
        (lambda: tiny("qwen3_moe"), {"ep": 0}, "ep = 0 does not divide the 4 data-parallel"),
        (lambda: tiny("qwen3_moe"), {"ep": -2}, "ep = -2 does not divide the 4 data-parallel"),
        (lambda: tiny("qwen3_moe"), {"dispatch": {"transport": "symmetric"}}, "dispatch has no effect"),
        (lambda: tiny("qwen3_moe"), {"ep": 2, "fuse": False}, "experts over ranks need fuse=True"),
        (lambda: by_ep_plan(tiny("qwen3_moe")), {"fuse": False}, "experts over ranks need fuse=True"),
        (lambda: by_ep_plan(tiny("qwen3_moe")), {"ep": 2}, "cut over data-parallel ranks already; leave it out"),
        (lambda: by_ep_plan(own_implementation(tiny("qwen3_moe"))), {}, "which is not transformers' own"),
        (lambda: tiny("qwen3_moe"), {"ep": 2, "expert_process_group": WORLD_OF_ONE}, "does not go with expert_process"),
        (lambda: tiny("qwen3_moe"), {"ep": 2, "tensor_parallel_group": WORLD_OF_ONE}, "ep does not go with tensor_par"),
        (lambda: tiny("qwen3_moe"), {"dispatch": CAPACITY}, "dispatch has no effect: .* give ep="),
        (OwnModel, {"dispatch": CAPACITY}, "dispatch has no effect"),
        (OwnModel, {"dispatch": CAPACITY, "expert_process_group": WORLD_OF_ONE}, "dispatch does not go with expert"),
        (OwnModel, {"dispatch": CAPACITY, "tensor_parallel_group": WORLD_OF_ONE}, "dispatch does not go with"),
        (lambda: tiny("qwen3_moe", num_experts=6), {"ep": 4}, "4 ranks do not divide 6 experts"),
        (lambda: converted(tiny("qwen3_moe", num_experts=6)), {"ep": 4}, "4 ranks do not divide 6 experts"),
        (lambda: with_forward(converted(tiny("qwen3_moe"))), {"ep": 2}, "forward was replaced on this instance"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), {"ep": 2}, "Sequential has no experts of Hugging Face"),
        (lambda: with_forward(tiny("qwen3_moe")), {"ep": 2}, "forward was replaced on this instance"),
    ],
)
def test_what_is_refused(make: Callable[[], nn.Module], options: dict[str, Any], message: str) -> None:
    def refused() -> bool:
        model = make()
        before = copy.copy(dict(model.named_parameters()))
        with pytest.raises(ValueError, match=message):
            parallelize(model, "zero1", **options)
        return all(each is before[name] for name, each in model.named_parameters())

    assert all(simulate(refused, 4))
