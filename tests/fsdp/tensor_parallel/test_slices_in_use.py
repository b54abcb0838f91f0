"""What programs do with a sharded model that is cut over tensor-parallel ranks; and what is refused."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sliced_models import Plain, batch_of, cut, data_rank, mesh_of, plain_iteration, ranks_of, shard, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import WORLD_OF_ONE, Muon
from maingrad.ddp.plan.cut import Box
from maingrad.ddp.plan.model_slice import ModelSlice, model_slice_of, set_model_slice, slice_of_blocks, slice_of_copy
from maingrad.fsdp import MixedPrecisionPolicy, ShardedAdamW, fully_shard
from maingrad.fsdp.state.sharded_muon import ShardedMuon
from maingrad.launch import simulate
from maingrad.te_integration import convert_linears


def cut_and_sharded(row: str = "zero3", *, sequence_parallel: bool = True, **options: Any) -> tuple[Any, Any, Any]:
    mesh, group, _ = ranks_of(row)
    model = cut(Plain().double(), group, sequence_parallel=sequence_parallel)
    return shard(model, row, mesh, group, **options), mesh, group


def assert_grads(model: Any, plain: nn.Module, tolerance: float = 1e-9) -> None:
    wholes = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        found, expected = param.grad.full_tensor(), wholes[name].grad
        assert float((found - expected).norm() / expected.norm()) < tolerance, name


def copies_of(model: Any) -> dict[str, Tensor]:
    with model.unsharded():
        return {
            name: param.detach().clone()
            for name, param in model.named_parameters()
            if model_slice_of(param).dim is None  # type: ignore[union-attr]
        }


def assert_alike(found: Sequence[dict[str, Tensor]]) -> None:
    first, *others = found
    assert first
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), name


def converted(model: Plain) -> Plain:
    assert convert_linears(model).converted
    return model


def recomputed(model: Plain) -> Plain:
    for block in model.blocks:
        block.forward = lambda x, whole=block.forward: checkpoint(whole, x, use_reentrant=False)  # type: ignore[method-assign]
    return model


CHANGES: dict[str, Callable[[Plain], Plain]] = {"convert_linears": converted, "recompute": recomputed}


@pytest.mark.in_turn
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reshard", [True, False])
def test_blocks_may_be_fused_or_recomputed(change: str, reshard: bool) -> None:
    def on_each_rank() -> None:
        mesh, group, data_ranks = ranks_of("zero3")
        plain = Plain().double()
        local = CHANGES[change](cut(Plain().double(), group, sequence_parallel=True))
        model = shard(local, "zero3", mesh, group, reshard_after_forward=reshard)
        for step in range(2):
            train(model, (step * data_ranks + data_rank(mesh)) * 2, 2)
            plain_iteration(plain, step, data_ranks, 2)
            assert_grads(model, plain)
            model.zero_grad()
            plain.zero_grad()

    simulate(on_each_rank, 4)


@pytest.mark.in_turn
@pytest.mark.parametrize("row", ["zero3", "zero1", "hsdp"])
def test_gradients_that_stay_in_grad_are_not_summed_again(row: str) -> None:
    """Without ``zero_grad()``: what the first iteration has summed over tensor-parallel ranks counts once."""

    def on_each_rank() -> None:
        mesh, _, data_ranks = ranks_of(row)
        plain = Plain().double()
        model, mesh, _ = cut_and_sharded(row)
        for step in range(3):
            train(model, (step * data_ranks + data_rank(mesh)) * 2, 2)
            plain_iteration(plain, step, data_ranks, 2)
            assert_grads(model, plain)

    simulate(on_each_rank, 8 if row == "hsdp" else 4)


@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (1, 3), (2, 2)])
def test_each_rank_gives_a_part_of_equal_gradients(dp: int, tp: int) -> None:
    """Here they differ, so that a test sees whose count: each of one rank, and the mean where a mark asks for it."""

    def layer() -> nn.Linear:
        torch.manual_seed(4)
        return nn.Linear(7, 5).double()

    def loss_of(module: nn.Module, place: int) -> Tensor:
        x = torch.randn(3, 7, generator=torch.Generator().manual_seed(place), dtype=torch.float64)
        return module(x).square().sum()

    def on_each_rank() -> dict[str, Tensor]:
        mesh, model = mesh_of(dp, tp), layer()
        model.bias.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
        shard_of = fully_shard(model, mesh["dp"], tensor_parallel_group=mesh["tp"])
        loss_of(shard_of, dist.get_rank()).backward()
        return {name: param.grad.full_tensor() for name, param in shard_of.named_parameters()}

    of_columns = []
    for column in range(tp):
        plain = layer()
        (sum(loss_of(plain, row * tp + column) for row in range(dp)) / dp).backward()
        of_columns.append({name: param.grad for name, param in plain.named_parameters()})
    found = simulate(on_each_rank, dp * tp)
    assert_alike(found)
    torch.testing.assert_close(found[0]["bias"], torch.stack([each["bias"] for each in of_columns]).mean(0))
    theirs = torch.stack([(found[0]["weight"] - each["weight"]).abs() < 1e-9 for each in of_columns])
    assert theirs.any(0).all(), "each element is of one rank"
    assert theirs.flatten(1).any(1).all(), "each rank gives some"


@pytest.mark.in_turn
def test_three_tensor_parallel_ranks_keep_copies_equal() -> None:
    """A third is no binary fraction: every rank computes the same average all the same."""

    def on_each_rank() -> dict[str, Tensor]:
        mesh = mesh_of(2, 3)
        group = mesh["tp"].get_group()
        plain = Plain(hidden=6).double()
        model = cut(Plain(hidden=6).double(), group)
        model = shard(model, "zero3", mesh["dp"], mesh["tp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            train(model, (step * 2 + data_rank(mesh["dp"])) * 2, 2)
            plain_iteration(plain, step, 2, 2)
            assert_grads(model, plain)
            for each in (optimizer, expected):
                each.step()
                each.zero_grad()
        return copies_of(model)

    assert_alike(simulate(on_each_rank, 6))


def test_uneven_slices_train() -> None:
    """5 and 3 hidden units: copies lie alike on all tensor-parallel ranks, whose slices do not."""

    def on_each_rank() -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
        mesh, group, data_ranks = ranks_of("zero3")
        plain, local = Plain(hidden=8).double(), Plain(hidden=8).double()
        first, size = (0, 5) if group.rank() == 0 else (5, 3)
        for block in local.blocks:
            block.group = group
            for owner, name, dim, count in (
                (block.gate_up, "weight", 0, 2),
                (block.gate_up, "bias", 0, 2),
                (block.down, "weight", 1, 1),
            ):
                whole = getattr(owner, name).detach()
                offsets, sizes = [0] * whole.dim(), list(whole.shape)
                boxes = []
                for number in range(count):
                    offsets[dim], sizes[dim] = 8 * number + first, size
                    boxes.append(Box(tuple(offsets), tuple(sizes)))
                found = ModelSlice(tuple(whole.shape), tuple(boxes), dim, group, "slice")
                setattr(owner, name, nn.Parameter(torch.cat(found.views_of(whole), dim)))
                set_model_slice(getattr(owner, name), found)
        model = shard(local, "zero3", mesh, None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        expected = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for step in range(3):
            train(model, step * data_ranks + data_rank(mesh), 1)
            plain_iteration(plain, step, data_ranks, 1)
            assert_grads(model, plain)
            norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, plain)]
            torch.testing.assert_close(*norms)
            for each in (optimizer, expected):
                each.step()
                each.zero_grad()
        shards = [param.shard for param in model.parameters()]
        return copies_of(model), [(each.place, each.bucket_numel) for each in shards if each.copies > 1]

    weights, places = zip(*simulate(on_each_rank, 4), strict=True)
    assert_alike(weights)
    assert all(each == places[0] for each in places)


@pytest.mark.in_turn
@pytest.mark.parametrize("options", [{}, {"state": "full"}, {"moment_dtype": torch.uint8}])
def test_copies_stay_equal_under_mixed_precision_and_compact_state(options: dict[str, Any]) -> None:
    """Moments are rounded at random: by the parameter's name and element, which copies share."""

    def on_each_rank() -> dict[str, Tensor]:
        mesh, group, data_ranks = ranks_of("zero3")
        model: Any = cut(Plain(), group, sequence_parallel=True)
        if options.get("state") != "full":
            model = model.bfloat16()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        atoms = "block" if "moment_dtype" in options else "element"
        shard(model, "zero3", mesh, group, mixed_precision=policy, shard_atoms=atoms)
        optimizer = ShardedAdamW(model.parameters(), lr=0.01, **options)
        for step in range(5):
            train(model, (step * data_ranks + data_rank(mesh)) * 2, 2)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return copies_of(model)

    assert_alike(simulate(on_each_rank, 4))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_scaler_skips_on_all_ranks_where_one_slice_overflows(bad: float) -> None:
    def on_each_rank() -> tuple[float, bool]:
        model, mesh, _ = cut_and_sharded()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = [param.detach().clone() for param in model.parameters()]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(*batch_of(data_rank(mesh)))).backward()
        if dist.get_rank() == 1:
            model.blocks[0].down.weight.grad.to_local().view(-1)[0] = bad
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(param.detach(), old) for param, old in zip(model.parameters(), before, strict=True)]
        return scaler.get_scale(), all(same)

    assert simulate(on_each_rank, 4) == [(2.0, True)] * 4


def test_slices_begin_as_those_of_the_first_data_parallel_rank() -> None:
    def on_each_rank() -> tuple[Tensor, Tensor]:
        mesh, group, _ = ranks_of("zero3")
        model: Any = cut(Plain(seed=data_rank(mesh)), group)
        shard(model, "zero3", mesh, group)
        expected: Any = cut(Plain(seed=0), group)
        with model.unsharded():
            return model.blocks[0].down.weight.detach(), expected.blocks[0].down.weight.detach()

    for found, expected in simulate(on_each_rank, 4):
        assert torch.equal(found, expected)


def test_copies_that_begin_apart_are_refused() -> None:
    """One of them may be a slice that nobody has marked, which the first rank's values would overwrite."""

    def on_each_rank() -> str:
        mesh, group, _ = ranks_of("zero3")
        model = cut(Plain(seed=group.rank()), group)
        text = refusal(lambda: fully_shard(model.blocks[0], mesh, tensor_parallel_group=group))
        fully_shard(model.blocks[1], mesh, tensor_parallel_group=group, init_sync=False)
        return text

    for text in simulate(on_each_rank, 4):
        assert "has no mark of a slice" in text
        assert "init_sync=False" in text


def test_marks_mean_nothing_where_the_group_is_one_rank() -> None:
    """As at a tensor-parallel degree of 1, beside other stages of a pipeline."""

    def on_each_rank() -> float:
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
        model: Any = Plain()
        model.head.weight.tensor_model_parallel = True
        model.norm.weight.sequence_parallel = True
        model.head.weight.allreduce = False  # nor does that of experts, of which the other ranks have none
        fully_shard(model, group, tensor_parallel_group=WORLD_OF_ONE)
        train(model, dist.get_rank() % 2, 1)
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()

    assert len(set(simulate(on_each_rank, 4))) == 1


def test_units_without_slices_may_be_sharded_without_the_group() -> None:
    """Their parameters are copies, as is known where the model is whole."""

    def on_each_rank() -> None:
        mesh, group, data_ranks = ranks_of("zero3")
        plain = Plain().double()
        model = cut(Plain().double(), group, told="marks")
        fully_shard(model.embedding, mesh)
        model = shard(model, "zero3", mesh, group)
        train(model, data_rank(mesh), 1)
        plain_iteration(plain, 0, data_ranks, 1)
        norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, plain)]
        torch.testing.assert_close(*norms)
        shard_of_embedding: Any = model.embedding.weight
        assert shard_of_embedding.shard.copies == 2
        assert shard_of_embedding.shard.model_slice.grad == "dense"

    simulate(on_each_rank, 4)


def test_writes_within_unsharded_are_of_the_slice() -> None:
    def on_each_rank() -> None:
        model, _, _ = cut_and_sharded()
        norm = model.blocks[0].norm.weight
        assert not norm.sequence_parallel  # so that nobody else sums its gradient
        assert norm.shard.model_slice.grad == "partial"
        with model.unsharded(writeback=True):
            model.blocks[0].down.weight.data.fill_(3.0)
            assert tuple(model.blocks[0].down.weight.shape) == (8, 6)
        assert model.state_dict()["blocks.0.down.weight"].full_tensor().eq(3).all()

    simulate(on_each_rank, 4)


@pytest.mark.parametrize("told", ["rows of all ranks' experts", "all of it"])
def test_experts_that_are_told_keep_their_own_gradients(told: str) -> None:
    """Tensor-parallel ranks have other experts, of one shape: these are no copies."""

    def slice_told(shape: tuple[int, ...]) -> ModelSlice:
        if told == "all of it":
            return slice_of_copy(shape, None, "expert")
        size, world = 4 * shape[0], dist.group.WORLD
        return slice_of_blocks((size, *shape[1:]), 0, [size], world, dist.get_rank(), "expert")

    def on_each_rank() -> None:
        mesh, group, data_ranks = ranks_of("zero3")
        torch.manual_seed(0)
        dense = nn.Linear(4, 4).double()
        torch.manual_seed(1 + dist.get_rank())
        expert, x = nn.Linear(4, 4).double(), torch.randn(3, 4, dtype=torch.float64)
        own = [*expert.parameters()]
        expected = torch.autograd.grad(dense(expert(x)).square().sum() / data_ranks, own)
        for param in own:
            param.allreduce = False  # type: ignore[attr-defined]
            set_model_slice(param, slice_told(tuple(param.shape)))
        fully_shard(expert, WORLD_OF_ONE, tensor_parallel_group=None if told == "all of it" else group)
        fully_shard(dense, mesh, tensor_parallel_group=group)
        model: Any = fully_shard(nn.Sequential(expert, dense), mesh, tensor_parallel_group=group)
        model(x).square().sum().backward()
        assert model[1].weight.shard.copies == 2
        for param, grad in zip(model[0].parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad.to_local(), grad)

    simulate(on_each_rank, 4)


# ---- Refused. ----


def refusal(action: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as raised:
        action()
    return str(raised.value)


def test_a_mesh_with_ranks_of_other_slices_is_refused() -> None:
    def on_each_rank() -> list[str]:
        _, group, _ = ranks_of("zero3")
        told = cut(Plain(), group, told="slices")
        marked = cut(Plain(), group)
        return [
            refusal(lambda: fully_shard(told)),
            refusal(lambda: fully_shard(told, dist.group.WORLD)),
            refusal(lambda: fully_shard(marked, tensor_parallel_group=group)),
        ]

    for texts in simulate(on_each_rank, 4):
        for text in texts:
            assert "are in mesh and among the tensor-parallel ranks [" in text
            assert "mesh['dp']" in text


def test_ranks_with_other_slices_compare_what_they_hold() -> None:
    """One tensor-parallel rank takes a norm's gradient for whole, where the other has a part."""

    def on_each_rank() -> str:
        mesh, group, _ = ranks_of("zero3")
        model = cut(Plain(), group, sequence_parallel=True)
        if group.rank() == 1:
            model.blocks[0].norm.weight.sequence_parallel = False  # type: ignore[union-attr]
        return refusal(lambda: fully_shard(model.blocks[0], mesh, tensor_parallel_group=group))

    for text in simulate(on_each_rank, 4):
        assert "'norm.weight'" in text
        assert "partial" in text
        assert "dense" in text


@pytest.mark.parametrize("init_sync", [True, False])
@pytest.mark.parametrize("hidden", [12, 7])
def test_data_parallel_ranks_compare_which_slices_they_hold(hidden: int, init_sync: bool) -> None:
    """The second pair of tensor-parallel ranks has cut the other way round: slices of one shape, or of other ones."""

    def on_each_rank() -> str:
        mesh, group, _ = ranks_of("zero3")
        place = group.rank() if mesh.get_local_rank() == 0 else 1 - group.rank()
        held = slice_of_blocks((hidden, 3), 0, [hidden], group, place)
        layer = nn.Linear(3, hidden, bias=False)
        layer.weight = nn.Parameter(held.part_of(layer.weight.detach()))
        set_model_slice(layer.weight, held)
        return refusal(lambda: fully_shard(layer, mesh, init_sync=init_sync))

    middle = -(-hidden // 2)
    for text in simulate(on_each_rank, 4):
        assert f"'weight' at [(0, {middle})] of dim 0" in text
        assert f"'weight' at [({middle}, {hidden})] of dim 0" in text


def test_a_refusal_on_one_tensor_parallel_rank_is_raised_on_all() -> None:
    def on_each_rank() -> str:
        mesh, group, _ = ranks_of("zero3")
        model = cut(Plain(), group)
        if group.rank() == 1:
            model.blocks[0].norm.weight.register_hook(lambda grad: grad)  # type: ignore[union-attr]
        return refusal(lambda: fully_shard(model.blocks[0], mesh, tensor_parallel_group=group), Exception)

    for text in simulate(on_each_rank, 4):
        assert "parameter 'norm.weight' has hooks" in text


def test_slices_that_no_call_tells_are_refused() -> None:
    def on_each_rank() -> list[str]:
        mesh, group, _ = ranks_of("zero3")
        model = cut(Plain(), group)
        fully_shard(model.blocks[0], mesh)
        shard_rest = fully_shard(model, mesh, tensor_parallel_group=group)
        first = refusal(lambda: shard_rest(*batch_of(0)))
        experts = nn.Linear(4, 4)
        experts.weight.allreduce = False  # type: ignore[assignment]
        second = refusal(lambda: fully_shard(experts, mesh, tensor_parallel_group=group))
        expert = nn.Sequential(nn.Linear(32, 32, bias=False))
        expert[0].weight.allreduce = False  # type: ignore[assignment]
        fully_shard(expert, mesh)
        around = fully_shard(nn.Sequential(expert, cut(Plain(), group)), mesh, tensor_parallel_group=group)
        third = refusal(lambda: around(torch.ones(2, 32)))
        assert "with parameter '0.0.weight' was sharded without them" in third
        return [first, second]

    for first, second in simulate(on_each_rank, 4):
        assert "with parameter 'blocks.0.down.weight' was sharded without them" in first
        assert "'weight' is an expert's" in second


def test_slices_over_ranks_of_different_groups_are_refused() -> None:
    """Pairs of ranks have slices of the first layer, all four of the second."""

    def on_each_rank() -> str:
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        alike = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        for layer in model:
            layer.weight.tensor_model_parallel, layer.weight.partition_dim = True, 0  # type: ignore[assignment]
        rank = dist.get_rank()
        fully_shard(model[0], alike[rank % 2], tensor_parallel_group=pairs[rank // 2])
        fully_shard(model[1], WORLD_OF_ONE, tensor_parallel_group=dist.group.WORLD)
        return refusal(lambda: fully_shard(model, WORLD_OF_ONE))

    for text in simulate(on_each_rank, 4):
        assert "'1.weight' is a slice over ranks [0, 1, 2, 3]" in text
        assert "cut all parameters over one group" in text


def test_muon_refuses_slices_by_name() -> None:
    def on_each_rank() -> list[str]:
        mesh, group, _ = ranks_of("zero3")
        model: Any = cut(Plain(), group)
        shard(model, "zero3", mesh, group, shard_atoms="whole")
        weight = model.blocks[0].down.weight
        ShardedMuon([model.head.weight])
        muon = Muon([weight])
        train(model, 0, 1)
        return [refusal(lambda: ShardedMuon([weight])), refusal(muon.step, RuntimeError)]

    for ours, torchs in simulate(on_each_rank, 4):
        assert "'blocks.0.down.weight' is a slice of tensor parallelism" in torchs
        assert "is a slice of tensor parallelism" in ours
        assert "another class" in ours
