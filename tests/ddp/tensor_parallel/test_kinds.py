"""Which parameters tensor-parallel ranks reduce over which ranks, and what is refused by name."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cut_models import CutModel, batch, cut, loss_of, ranks_of_mesh, wrapped
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    Muon,
)
from maingrad.ddp.collectives.rank_grid import make_grids
from maingrad.ddp.optimizer.grad_norm import global_grad_norm
from maingrad.ddp.plan.cut import Box
from maingrad.ddp.plan.model_slice import ModelSlice, model_slice_of, set_model_slice
from maingrad.launch import simulate

FOUR = (1, 2, 2)
Group = dist.ProcessGroup


def wrap(model: nn.Module, ranks: Any = None, tp: Any = None, **options: Any) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(
        **{name: options.pop(name) for name in [*options] if name.startswith(("use", "keep"))}
    )
    ranks = ranks or ranks_of_mesh(FOUR)
    return DistributedDataParallel(
        model, config, process_group=ranks.dp, tensor_parallel_group=ranks.tp if tp is None else tp, **options
    )


# ---- Kinds. ----


def kinds(sp: bool) -> tuple[dict[str, str], dict[str, tuple[list[int], float]]]:
    model = wrapped("zero1", ranks_of_mesh(FOUR), sp=sp)
    found = {slot.spec.name: bucket.grid_name for bucket in model.plan.buckets for slot in bucket.slots}
    assert {name: each.grad for name, each in model.model_slices.items()} == found
    return found, {name: (model.grids[name].ranks, each.factor) for name, each in model.reductions.items()}


@pytest.mark.parametrize("sp", [False, True])
def test_every_kind_has_its_ranks_and_its_factor(sp: bool) -> None:
    for rank, (found, reductions) in enumerate(simulate(kinds, 4, sp)):
        copies = "partial" if sp else "dense"
        assert found["first.weight"] == found["head.bias"] == "dense"
        assert found["blocks.0.up.weight"] == found["blocks.0.up.bias"] == found["blocks.1.down.weight"] == "slice"
        assert found["blocks.0.norm.weight"] == found["blocks.1.bias"] == copies
        assert reductions["slice"] == ([rank % 2, rank % 2 + 2], 1 / 2)
        assert reductions["dense"] == ([0, 1, 2, 3], 1 / 2)  # each column of ranks reduces the shards that it owns
        assert reductions["mean"] == ([0, 1, 2, 3], 1 / 4)
        assert reductions["partial"] == ([0, 1, 2, 3], 1 / 2)


def averaged(mark: str) -> Tensor:
    """Tensor-parallel ranks have 1 and 2 times the gradient of one and the same loss."""
    ranks = ranks_of_mesh(FOUR)
    model = cut(CutModel(), ranks.tp.get_group())
    if mark:
        setattr(model.head.bias, mark, True)
    model.head.bias.register_hook(lambda grad: grad * (1 + ranks.tp.get_local_rank()))
    wrapper = wrap(model, ranks)
    loss_of(wrapper, 0).backward()
    return model.head.bias.grad.full_tensor()


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("mark", "times"), [("", 1.5), ("average_gradients_across_tp_domain", 1.5), ("sequence_parallel", 3.0)]
)
def test_marks_say_whether_parts_are_summed_or_averaged(mark: str, times: float) -> None:
    plain = CutModel()
    loss_of(plain, 0).backward()
    for found in simulate(averaged, 4, mark):
        torch.testing.assert_close(found, times * plain.head.bias.grad)


def wrapped_again() -> tuple[dict[str, str], dict[str, str]]:
    ranks = ranks_of_mesh(FOUR)
    model = cut(CutModel(), ranks.tp.get_group(), sp=True)
    model.head.bias.average_gradients_across_tp_domain = True
    wrapper = wrap(model, ranks)
    for param in model.parameters():  # what Megatron-core's finalize_model_grads looks for
        assert not getattr(param, "sequence_parallel", False)
        assert not getattr(param, "average_gradients_across_tp_domain", False)
    first = {name: each.grad for name, each in wrapper.model_slices.items()}
    again = DistributedDataParallel(wrapper.unwrap(), process_group=ranks.dp)
    return first, {name: each.grad for name, each in again.model_slices.items()}


def test_marks_that_are_answered_for_are_taken() -> None:
    """Their slices keep them, and the ranks too, for a wrapper that comes later."""
    for first, again in simulate(wrapped_again, 4):
        assert first == again
        assert set(first.values()) == {"slice", "dense", "mean", "partial"}


def with_own_buffers() -> float:
    ranks = ranks_of_mesh(FOUR)
    model = cut(CutModel(), ranks.tp.get_group())
    model.register_buffer("first_row", torch.tensor(float(dist.get_rank())))
    wrap(model, ranks)
    return float(model.first_row)


def test_buffers_are_copied_among_ranks_with_the_same_slices() -> None:
    assert simulate(with_own_buffers, 4) == [0.0, 1.0, 0.0, 1.0]


def by_slices_alone() -> list[list[int]]:
    ranks = ranks_of_mesh(FOUR)
    model = cut(CutModel(), ranks.tp.get_group(), marks=False)
    wrapper = DistributedDataParallel(model, process_group=ranks.dp)
    return [wrapper.grids[name].ranks for name in ("slice", "dense")]


def test_slices_that_were_dtensors_say_their_ranks() -> None:
    for rank, found in enumerate(simulate(by_slices_alone, 4)):
        assert found == [[rank % 2, rank % 2 + 2], [0, 1, 2, 3]]


def without_data_parallel_ranks() -> tuple[float, Tensor]:
    model = cut(CutModel(), dist.group.WORLD, sp=True)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapper = DistributedDataParallel(model, config, process_group=WORLD_OF_ONE, tensor_parallel_group=dist.group.WORLD)
    loss_of(wrapper, 0).backward()
    return global_grad_norm(wrapper).item(), model.blocks[0].bias.grad.full_tensor()


def test_all_ranks_may_be_tensor_parallel() -> None:
    plain = CutModel()
    loss_of(plain, 0).backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None])
    for found, bias in simulate(without_data_parallel_ranks, 2):
        assert found == pytest.approx(norm.item(), rel=1e-6)
        torch.testing.assert_close(bias, plain.blocks[0].bias.grad)


def at_a_degree_of_one(given: str) -> tuple[list[str], float]:
    """Megatron-core marks whole parameters then; ranks outside belong to other pipeline stages."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    model = CutModel()
    model.head.weight.tensor_model_parallel = True
    model.head.bias.sequence_parallel = True
    model.register_buffer("first_row", torch.zeros(1))
    tp = WORLD_OF_ONE if given == "world of one" else mesh["tp"]
    wrapper = DistributedDataParallel(model, process_group=mesh["dp"], tensor_parallel_group=tp)
    loss_of(wrapper, 0).backward()
    wrapper.finish_grad_sync()
    return list(wrapper.model_slices), global_grad_norm(wrapper).item()


@pytest.mark.parametrize("given", ["world of one", "a mesh"])
def test_one_tensor_parallel_rank_has_no_slices(given: str) -> None:
    plain = CutModel()
    loss_of(plain, 0).backward()
    norm = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters() if param.grad is not None])
    for slices, found in simulate(at_a_degree_of_one, 4, given):
        assert slices == []
        assert found == pytest.approx(norm.item(), rel=1e-6)


# ---- Experts beside slices. ----


class WithExperts(nn.Module):
    """A cut model, and an expert of which two ranks hold one, across data and tensor-parallel ranks."""

    def __init__(self, variant: int, group: Group) -> None:
        super().__init__()
        self.cut = cut(CutModel(), group)
        torch.manual_seed(50 + variant)
        self.expert = nn.Linear(5, 5)
        for param in self.expert.parameters():
            param.allreduce = False

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(self.cut(x).detach()) + 0 * self.cut(x).sum()


def experts_train(sharded: bool) -> tuple[int, Tensor, Tensor, float]:
    """Which expert this rank has; its own gradient; what a step moved it by; the norm."""
    ranks = ranks_of_mesh(FOUR)
    variant = (ranks.data_index + ranks.tp.get_local_rank()) % 2
    same = dist.new_group([0, 3] if variant == 0 else [1, 2], use_local_synchronization=True)
    x = batch(dist.get_rank())

    def grads_of(model: nn.Module) -> Tensor:
        model(x).square().mean().backward()
        return model.expert.weight.grad

    own = grads_of(WithExperts(variant, ranks.tp.get_group())).clone()
    model = wrap(
        WithExperts(variant, ranks.tp.get_group()), ranks, expert_process_group=same, use_distributed_optimizer=sharded
    )
    optimizer = DistributedOptimizer(model, lr=1.0, optimizer_class=torch.optim.SGD, max_grad_norm=1e9)
    before = model.module.expert.weight.detach().clone()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.finish_param_sync()
    moved = before - model.module.expert.weight.detach()
    bias = [torch.zeros(5) for _ in range(4)]
    dist.all_gather(bias, model.module.expert.bias.detach())
    assert torch.equal(bias[0], bias[3])
    return variant, own, moved, optimizer.grad_norm.item()


@pytest.mark.parametrize("sharded", [False, True])
def test_experts_are_on_any_of_everyones_ranks(sharded: bool) -> None:
    found = simulate(experts_train, 4, sharded)
    for variant, _, moved, _ in found:
        expected = sum(own for other, own, _, _ in found if other == variant)
        torch.testing.assert_close(moved, expected / 2)
    assert len({norm for *_, norm in found}) == 1


# ---- Refused. ----


def refusal(action: Callable[[], Any]) -> str:
    with pytest.raises(ValueError, match=r"[a-z]") as raised:
        action()
    return str(raised.value)


def forgets_process_group() -> str:
    ranks = ranks_of_mesh(FOUR)
    model = cut(CutModel(), ranks.tp.get_group())
    return refusal(lambda: DistributedDataParallel(model, tensor_parallel_group=ranks.tp))


def of_another_group() -> str:
    ranks = ranks_of_mesh(FOUR)
    model = cut(CutModel(), ranks.tp.get_group(), marks=False)
    return refusal(lambda: wrap(model, ranks, tp=ranks.dp))


def of_two_dims() -> str:
    mesh = init_device_mesh("cpu", FOUR, mesh_dim_names=("a", "b", "c"))
    return refusal(lambda: wrap(CutModel(), ranks_of_mesh(FOUR), tp=mesh["b", "c"]))


def forgets_a_mark() -> str:
    ranks = ranks_of_mesh(FOUR)
    model = cut(CutModel(), ranks.tp.get_group())
    model.blocks[0].up.weight.tensor_model_parallel = False
    text = refusal(lambda: wrap(model, ranks))
    wrap(model, ranks, init_sync=False)
    return text


def marks_an_uneven_cut() -> str:
    ranks = ranks_of_mesh(FOUR)
    return refusal(lambda: wrap(cut(CutModel(7), ranks.tp.get_group()), ranks))


def of_crossed_ranks() -> str:
    """Ranks 0 and 3 average gradients of slices that have one shape, and other elements."""
    ranks = ranks_of_mesh(FOUR)
    crossed = [dist.new_group(members) for members in ([0, 3], [1, 2])]
    dp = crossed[dist.get_rank() in (1, 2)]
    model = cut(CutModel(), ranks.tp.get_group())
    return refusal(lambda: DistributedDataParallel(model, process_group=dp, tensor_parallel_group=ranks.tp))


def forgets_embedding_group() -> str:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    model = cut(CutModel(), mesh["tp"].get_group())
    model.head.weight.shared_embedding = True
    return refusal(lambda: DistributedDataParallel(model, process_group=mesh["dp"], tensor_parallel_group=mesh["tp"]))


def marks_partial_on_one_rank() -> str:
    ranks = ranks_of_mesh(FOUR)
    model = cut(CutModel(), ranks.tp.get_group())
    model.head.bias.sequence_parallel = ranks.tp.get_local_rank() == 1
    return refusal(lambda: wrap(model, ranks))


def muon_over_slices() -> str:
    ranks = ranks_of_mesh(FOUR)
    model = wrap(nn.Sequential(cut(CutModel(), ranks.tp.get_group()).blocks[0].down), ranks)
    assert model_slice_of(next(model.parameters())) is None
    return refusal(lambda: DistributedOptimizer(model, lr=1.0, optimizer_class=torch.optim.Muon))


def an_odd_stride_on_one_rank() -> str:
    ranks = ranks_of_mesh(FOUR)
    model = cut(CutModel(), ranks.tp.get_group())
    if dist.get_rank() == 3:
        model.blocks[0].up.weight.partition_stride = 4
    return refusal(lambda: wrap(model, ranks))


def a_stride_on_one_rank() -> str:
    """Ranks 1 and 3 have other slices, and ranks 0 and 2 the same: all are told."""
    ranks = ranks_of_mesh(FOUR)
    model = cut(CutModel(), ranks.tp.get_group())
    if dist.get_rank() == 3:
        model.blocks[0].up.weight.partition_stride = 2
    return refusal(lambda: wrap(model, ranks))


def a_stride_of_columns_on_one_rank() -> str:
    ranks = ranks_of_mesh(FOUR)
    model = cut(CutModel(), ranks.tp.get_group())
    if dist.get_rank() == 3:
        model.blocks[0].down.weight.partition_stride = 2
    return refusal(lambda: wrap(model, ranks))


def norms_of_heads() -> str:
    ranks = ranks_of_mesh(FOUR)
    texts = []
    for name in ("q_layernorm", "k_layernorm"):
        model, known = nn.Module(), nn.Module()
        for each in (model, known):
            setattr(each, name, nn.LayerNorm(4))
            each.config = type("Config", (), {"qk_layernorm": True})
        texts.append(refusal(lambda model=model: wrap(model, ranks)))
        for param in model.parameters():
            param.sequence_parallel = True
        wrap(model, ranks)
        for param in known.parameters():  # the program has said that ranks have equal gradients
            set_model_slice(param, ModelSlice((4,), (Box((0,), (4,)),), None, ranks.tp.get_group(), "dense"))
        wrap(known, ranks)
    assert "'k_layernorm.weight' norms the heads" in texts[1]
    return texts[0]


def layers_over_other_ranks() -> str:
    ranks = ranks_of_mesh(FOUR)
    models = [cut(CutModel(), ranks.tp.get_group()) for _ in range(2)]
    for model in models:  # a copy's, and a container's, which has no slice of its own
        model.head.tp_group = model.blocks.tp_group = ranks.dp.get_group()
        model.blocks[0].up.tp_group = ranks.dp.get_group()
    models[0].blocks[0].up.tensor_parallel_members = dist.get_process_group_ranks(ranks.tp.get_group())
    wrap(models[0], ranks)
    told = cut(CutModel(), ranks.tp.get_group(), marks=False)  # by its slices alone
    told.blocks[0].up.tp_group = ranks.dp.get_group()
    told.blocks[0].up.weight.tensor_model_parallel = True
    refusal(lambda: DistributedDataParallel(told, process_group=ranks.dp))
    return refusal(lambda: wrap(models[1], ranks))


def muon_of_torch(known: bool) -> str:
    ranks = ranks_of_mesh(FOUR)
    layer = nn.Sequential(cut(CutModel(), ranks.tp.get_group()).blocks[0].down)
    model = wrap(layer, ranks) if known else DistributedDataParallel(layer, process_group=ranks.dp)
    optimizer = torch.optim.Muon(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    return str(raised.value)


@pytest.mark.parametrize("known", [True, False])
def test_a_stock_muon_over_slices_is_refused(known: bool) -> None:
    for text in simulate(muon_of_torch, 4, known):
        assert "Muon updates whole parameters, and tensor-parallel ranks have slices of '0.weight'" in text


def muon_of_copies(stock: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices that all ranks hold, before and after a step beside AdamW for slices."""
    ranks = ranks_of_mesh(FOUR)
    names = ["first.weight", "head.weight"]
    config: dict[str, Any] = {} if stock else {"use_distributed_optimizer": True, "keep_matrices_whole": names}
    model = wrap(cut(CutModel(), ranks.tp.get_group()), ranks, **config)
    copies = [model.module.get_parameter(name) for name in names]
    groups = [{"params": names, "optimizer": Muon, "lr": 0.02}]
    optimizer: Any = Muon(copies, lr=0.02) if stock else DistributedOptimizer(model, lr=0.1, param_groups=groups)
    before = [param.detach().clone() for param in copies]
    loss_of(model, ranks.data_index).backward()
    optimizer.step()
    return before, [model.module.get_parameter(name).detach() for name in names]


@pytest.mark.parametrize("stock", [False, True])
def test_copies_may_have_muon(stock: bool) -> None:
    """As in plain PyTorch on the data of both."""
    plain = CutModel()
    (sum(loss_of(plain, data) for data in range(2)) / 2).backward()
    params = [plain.first.weight, plain.head.weight]
    Muon(params, lr=0.02).step()
    for before, after in simulate(muon_of_copies, 4, stock):
        for old, new, expected in zip(before, after, params, strict=True):
            assert not torch.equal(old, new)
            torch.testing.assert_close(new, expected.detach(), rtol=1e-5, atol=1e-6)


def experts_of_unknown_ranks() -> str:
    ranks = ranks_of_mesh(FOUR)
    return refusal(lambda: wrap(WithExperts(0, ranks.tp.get_group()), ranks))


def experts_elsewhere() -> str:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    model = WithExperts(0, mesh["tp"].get_group())
    return refusal(
        lambda: DistributedDataParallel(
            model, process_group=mesh["dp"], tensor_parallel_group=mesh["tp"], expert_process_group=mesh["pp"]
        )
    )


REFUSED = {
    forgets_process_group: ("are no two dims of one mesh", "mesh['dp'] and mesh['tp']"),
    of_another_group: ("is a slice over ranks", "cut all parameters over one group"),
    of_two_dims: ("has one dim", "flatten it"),
    forgets_a_mark: ("'blocks.0.up.weight' has no mark of a slice", "mark it, with its partition_dim"),
    marks_an_uneven_cut: ("differs between ranks", "'blocks.0.up.weight' [8, 6]"),
    of_crossed_ranks: ("'blocks.0.up.weight' at [(0, 6)] of dim 0", "'blocks.0.up.weight' at [(6, 12)] of dim 0"),
    an_odd_stride_on_one_rank: ("partition_stride = 4 does not divide the 6 rows", "on rank 3"),
    a_stride_on_one_rank: ("at [(6, 12)] of dim 0", "'blocks.0.up.weight' at [(3, 6), (9, 12)] of dim 0"),
    a_stride_of_columns_on_one_rank: ("at [(6, 12)] of dim 1", "'blocks.0.down.weight' at [(3, 6), (9, 12)] of dim 1"),
    norms_of_heads: ("'q_layernorm.weight' norms the heads", "set sequence_parallel = True on it"),
    layers_over_other_ranks: ("layer 'blocks.0.up' is cut over ranks", "pass the layers' group"),
    forgets_embedding_group: ("'head.weight' has shared_embedding = True", "those ranks as embedding_group"),
    marks_partial_on_one_rank: ("differs between ranks", "'head.bias'"),
    muon_over_slices: ("Muon updates whole parameters", "slices of '0.weight'"),
    experts_of_unknown_ranks: ("say which ranks hold the same experts", "WORLD_OF_ONE"),
}


def texts(run: Callable[[], str], ranks: int = 4) -> Iterator[str]:
    yield from simulate(run, ranks)


@pytest.mark.in_turn
@pytest.mark.parametrize("run", REFUSED, ids=lambda run: run.__name__)
def test_refusals_name_the_remedy(run: Callable[[], str]) -> None:
    for text in texts(run):
        assert all(part in text for part in REFUSED[run]), text


def test_groups_that_join_other_ranks_on_each_rank_are_refused_on_all() -> None:
    """As seen from one rank, they are two dims of a mesh: ranks 0 and 1 share data, and name other ranks for slices."""

    def on_each_rank() -> None:
        rank = dist.get_rank()
        pairs, crossed = ((0, 1), (2, 3), (4, 5)), ((0, 2), (1, 4), (3, 5))
        groups = [
            dist.new_group(next(each for each in those if rank in each), use_local_synchronization=True)
            for those in (pairs, crossed)
        ]
        with pytest.raises(ValueError, match="are no two dims of one mesh"):
            make_grids(
                groups[0], None, tensor_ranks=groups[1], has_experts=False, num_instances=1, separate_gather=False
            )

    simulate(on_each_rank, 6)


def test_experts_outside_everyone_are_refused() -> None:
    for text in texts(experts_elsewhere, 8):
        assert "which are not in process_group and tensor_parallel_group" in text
