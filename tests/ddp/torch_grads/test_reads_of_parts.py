"""Under ZeRO-1, and where ranks have experts of their own, functions of ``.grad`` answer for the whole, or name it."""

import copy
import math
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from grad_functions import COLUMN, OF_A_MATRIX, WEIGHTS, WRITES, WRITES_TO_VIEWS, answer
from torch import Tensor, nn

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.collectives.rank_grid import RankGrid
from maingrad.ddp.torch_grads import over_ranks
from maingrad.ddp.torch_grads.over_ranks import ShardInfo, local_shape
from maingrad.ddp.torch_grads.sharded_grad import (
    ShardedGrad,
    adopt_grad,
    being_reduced,
    make_placeholder_grads,
    make_sharded_grad,
    step_began,
    step_ended,
)
from maingrad.launch import simulate

RANKS = (1, 2, 3)
WHOLE = torch.arange(300.0, dtype=torch.float64).view(60, 5)


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 3)).double()


def batch(rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def plain(ranks: int) -> Any:
    model = make_net()
    (sum(model(batch(rank)).square().mean() for rank in range(ranks)) / ranks).backward()
    return model


def zero1(**config: Any) -> Any:
    config = {"use_distributed_optimizer": True, "bucket_size": 150} | config
    model = DistributedDataParallel(make_net(), DistributedDataParallelConfig(**config))
    model(batch(dist.get_rank())).square().mean().backward()
    return model


@pytest.mark.parametrize("name", OF_A_MATRIX)
@pytest.mark.sampled(6)
def test_a_read_is_that_of_the_whole_gradient_or_names_it(name: str) -> None:
    def check(expected: Any) -> None:
        model = zero1()
        found = answer(OF_A_MATRIX[name], model.module[0].weight.grad, on_shards=name == "with a row")
        assert not isinstance(found, ShardedGrad) and isinstance(found, type(expected))
        torch.testing.assert_close(found, expected)

    for ranks in RANKS:
        simulate(check, ranks, OF_A_MATRIX[name](plain(ranks)[0].weight.grad))


def test_every_read_on_two_ranks() -> None:
    def check() -> None:
        model = zero1()
        for name, read in OF_A_MATRIX.items():
            found = answer(read, model.module[0].weight.grad, on_shards=name == "with a row")
            torch.testing.assert_close(found, expected[name])

    reference = plain(2)
    expected = {name: read(reference[0].weight.grad) for name, read in OF_A_MATRIX.items()}
    simulate(check, 2)


ATTRIBUTES = """
    shape dtype device layout ndim requires_grad grad grad_fn grad_dtype is_leaf retains_grad output_nr names itemsize
    nbytes name _base _version is_cpu is_cuda is_meta is_sparse is_quantized is_nested
"""
METHODS = """
    size stride numel nelement dim ndimension element_size storage_offset is_contiguous is_floating_point is_complex
    is_signed is_inference is_conj is_neg get_device dim_order has_names __len__ __dir__ requires_grad_ new
"""


def ask(tensor: Any) -> None:
    """Everything that needs no value. A version of torch may lack a name."""
    for name in ATTRIBUTES.split():
        if hasattr(Tensor, name):
            getattr(tensor, name)
    for name in METHODS.split():
        if hasattr(Tensor, name):
            getattr(tensor, name)()
    for function in (torch.numel, torch.is_floating_point, torch.is_conj, torch.get_device):
        assert function(tensor) == getattr(tensor, function.__name__)()
    assert torch.is_same_size(tensor, tensor) and not torch.is_same_size(tensor, tensor.new_ones(2))
    assert tensor.is_same_size(tensor) and not tensor.is_same_size(tensor.new_ones(2))
    for made in (tensor.new_empty(2), tensor.new_empty_strided((2,), (1,)), tensor.new_zeros(2), tensor.new_ones(2)):
        assert made.shape == (2,) and made.dtype is tensor.dtype and not hasattr(made, "reduced")
    assert tensor.new_full((2,), 3.0).tolist() == [3.0] * 2


def test_questions_wait_for_nothing() -> None:
    def check() -> None:
        model = zero1(overlap_param_gather=True)
        grad, weight = model.module[0].weight.grad, model.module[0].weight
        ask(grad)
        assert grad.reduced is None
        optimizer = DistributedOptimizer(model, lr=0.1)
        optimizer.step()
        ask(weight)
        weight.retain_grad()
        weight.register_hook(lambda _: None).remove()
        weight.register_post_accumulate_grad_hook(lambda _: None).remove()
        assert all(gather.under_way for gather in optimizer.param_sync.gathers)
        assert weight.norm() > 0
        assert not all(gather.under_way for gather in optimizer.param_sync.gathers)

    simulate(check, 2)


def test_sizes_are_those_of_the_parameter_and_copies_keep_them() -> None:
    def check(expected: Tensor, config: dict[str, Any]) -> None:
        model = zero1(**config)
        grad = model.module[0].weight.grad
        for each in (grad, grad * 1, grad.clone(), copy.deepcopy(grad)):
            assert each.shape == (60, 5) and each.numel() == 300
            torch.testing.assert_close(each.full_tensor(), expected)
            for own in (each.full_tensor(), copy.deepcopy(each)):  # tensors of the program's own
                own.zero_()
            assert each.norm() > 0
        assert "(60, 5)" in f"{grad}" and "(60, 5)" in repr(grad * 1)
        with pytest.raises(RuntimeError, match=r"full_tensor\(\)"):
            pickle.dumps(grad)

    for ranks, instances in (*((ranks, 1) for ranks in RANKS), (2, 2), (4, 2)):
        config = {"num_distributed_optimizer_instances": instances}
        simulate(check, ranks, plain(ranks)[0].weight.grad, config)


@pytest.mark.parametrize("name", [*WRITES, *WRITES_TO_VIEWS])
def test_writes_that_need_other_ranks_are_refused_by_name(name: str) -> None:
    def check() -> None:
        model = zero1()
        with pytest.raises(RuntimeError, match=r"is not defined over the shards.*full_tensor"):
            (WRITES | WRITES_TO_VIEWS)[name](model.module[0].weight.grad)

    simulate(check, 2)


def changed_in_place(grad: Any) -> None:
    grad.mul_(WHOLE).add_(WEIGHTS).div_(COLUMN)
    torch._foreach_add_([grad], [WHOLE])
    grad.add_(sum(torch._foreach_mul([grad, grad], [WHOLE, grad])))
    grad[WHOLE % 2 == 0] = 0.5
    grad.sub_(COLUMN / 7).clamp_(-1, 1)
    grad.copy_(grad * WEIGHTS + WHOLE.sign())
    grad.data = grad.data - WHOLE / 7
    grad.data[WHOLE < 9] = 2.0


def test_whole_tensors_beside_a_part() -> None:
    def check(expected: Tensor) -> None:
        model = zero1()
        grad = model.module[0].weight.grad
        assert grad.mul_(1) is grad
        changed_in_place(grad)
        torch.testing.assert_close(model.module[0].weight.grad.full_tensor(), expected)
        for total in (torch.zeros(60, 5).double(), torch.zeros(5).double()):
            with pytest.raises(RuntimeError, match=r"add_\(\) with a tensor of .*full_tensor"):
                total.add_(model.module[0].weight.grad)
        before, model.module[0].weight.grad = model.module[0].weight.detach().clone(), grad * 2
        DistributedOptimizer(model, lr=1.0, optimizer_class=torch.optim.SGD).step()
        torch.testing.assert_close(model.module[0].weight.detach(), before - 2 * expected)

    for ranks in RANKS:
        reference = plain(ranks)
        changed_in_place(reference[0].weight.grad)
        simulate(check, ranks, reference[0].weight.grad)


def test_a_row_is_cut_for_a_part_with_as_many_elements_from_the_middle_of_one() -> None:
    """The second of three ranks has elements 64 to 192 of a matrix with rows of 128 elements."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    x, row = torch.randn(4, 128).double(), torch.arange(128.0).double()

    def check() -> int:
        mine = copy.deepcopy(net)
        model: Any = DistributedDataParallel(mine, DistributedDataParallelConfig(use_distributed_optimizer=True))
        model(x).square().mean().backward()
        grad: Any = mine[0].weight.grad
        torch.testing.assert_close((grad * row).full_tensor(), expected)
        return grad.to_local().numel()  # type: ignore[no-any-return]

    reference: Any = copy.deepcopy(net)
    reference(x).square().mean().backward()
    expected = reference[0].weight.grad * row
    assert simulate(check, 3) == [64, 128, 64]


def test_a_whole_gradient_has_the_bits_of_its_parts() -> None:
    """A sum with the zeros of other ranks would make 0.0 of -0.0."""
    expected = torch.where(WHOLE % 2 == 0, -0.0, WHOLE)

    def check() -> None:
        model = zero1()
        grad = model.module[0].weight.grad
        grad.copy_(expected)
        assert torch.equal(grad.full_tensor().view(torch.int64), expected.view(torch.int64))

    for ranks in RANKS:
        simulate(check, ranks)


def test_what_a_program_takes_of_a_whole_gradient_is_its_own() -> None:
    def check() -> None:
        model = zero1(use_distributed_optimizer=False)
        kept = model.module[0].weight.grad
        assert kept.norm() > 0
        kept.full_tensor().zero_()
        assert kept.norm() > 0

    simulate(check, 1)


def test_a_second_optimizers_step_finds_experts_that_the_first_one_has_read() -> None:
    """The first step has made each ``.grad`` a plain tensor, which is ours, and which no norm is taken of again."""

    def check(num_optimizers: int) -> list[Tensor]:
        model = make_net()
        for param in model[2].parameters():
            param.allreduce = False  # type: ignore[attr-defined]
        wrapped: Any = DistributedDataParallel(model, expert_process_group=WORLD_OF_ONE)
        parts = [[*model.parameters()]] if num_optimizers == 1 else [[*model[0].parameters()], [*model[2].parameters()]]
        optimizers = [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in parts]
        for _ in range(2):
            wrapped(batch(dist.get_rank())).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]

    for found, expected in zip(simulate(check, 2, 2), simulate(check, 2, 1), strict=True):
        assert all(map(torch.equal, found, expected))


def test_experts_that_some_ranks_share_are_no_plain_tensors_either() -> None:
    """Two of four ranks hold an expert: torch's norm of a plain tensor in its place would be that of two ranks."""

    def check() -> None:
        model = make_net()
        for param in model[2].parameters():
            param.allreduce = False  # type: ignore[attr-defined]
        rank = dist.get_rank()
        group = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
        wrapped: Any = DistributedDataParallel(model, expert_process_group=group)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        before = model[2].weight.detach().clone()
        wrapped(batch(rank)).square().mean().backward()
        grad: Any = model[2].weight.grad
        grad.full_tensor().zero_()
        assert grad.norm() > 0, "a copy, though each rank has all of it"
        model[2].weight.grad = None
        optimizer.step()
        assert torch.equal(model[2].weight, before)
        optimizer.zero_grad()
        wrapped(batch(rank)).square().mean().backward()
        model[2].weight.grad = torch.ones_like(model[2].weight)
        with pytest.raises(RuntimeError, match=r"was replaced by a plain tensor\. Other ranks have other experts"):
            optimizer.step()

    simulate(check, 4)


def test_experts_of_this_rank_are_whole_and_norms_cover_all_ranks() -> None:
    def check(sharded: bool) -> None:
        model = make_net()
        for param in model[2].parameters():
            param.allreduce = False  # type: ignore[attr-defined]
        config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
        wrapped: Any = DistributedDataParallel(model, config, expert_process_group=WORLD_OF_ONE)
        wrapped(batch(dist.get_rank())).square().mean().backward()
        dense, expert = model[0].weight, model[2].weight
        torch.testing.assert_close(dense.grad.full_tensor(), reference[0].weight.grad)
        found: list[Any] = [None, None]
        dist.all_gather_object(found, expert.main_grad.clone())
        torch.testing.assert_close(expert.grad.full_tensor(), expert.main_grad)
        torch.testing.assert_close(expert.grad.norm(), torch.stack(found).norm())
        grads = [dense.grad, torch.ones(4).double(), expert.grad]
        torch.testing.assert_close(torch._foreach_norm(grads), [grad.norm() for grad in grads])

    reference = plain(2)
    for sharded in (False, True):
        simulate(check, 2, sharded)


def test_the_largest_of_experts_is_that_of_all_instances() -> None:
    """Two of four ranks share an expert, and the others another; instances are the second dim of their mesh."""

    def check() -> float:
        model = make_net()
        for param in model[2].parameters():
            param.allreduce = False  # type: ignore[attr-defined]
        config = DistributedDataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
        first = dist.get_rank() // 2 * 2
        pair = dist.new_group([first, first + 1], use_local_synchronization=True)
        wrapped: Any = DistributedDataParallel(model, config, expert_process_group=pair)
        wrapped(batch(first)).square().mean().backward()
        grad: Any = model[2].weight.grad
        norm = grad.norm(math.inf)
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, model[2].weight.main_grad.abs().max().item())  # type: ignore[attr-defined]
        assert len(set(found)) == 2 and norm == max(found)
        return norm.item()  # type: ignore[no-any-return]

    assert len(set(simulate(check, 4))) == 1


def test_what_an_optimizers_own_tensors_show_has_norms_alone() -> None:
    """Ranks have tensors of their own, which are no parts of one tensor."""

    def check(instances: int) -> None:
        model = zero1(num_distributed_optimizer_instances=instances)
        optimizer = DistributedOptimizer(model, lr=0.1, optimizer_class=torch.optim.SGD)
        (master, *_) = optimizer.param_groups[0]["params"]
        grad = master.grad
        assert isinstance(grad, ShardedGrad) and grad.shape == master.shape
        grads = [each.grad for each in optimizer.param_groups[0]["params"]]
        torch.testing.assert_close(torch.nn.utils.get_total_norm(grads), expected)
        torch.testing.assert_close(torch.nn.utils.get_total_norm(grads, math.inf), largest)
        before = grad.to_local().clone()
        grad.mul_(torch.full_like(grad.to_local(), 2.0))
        torch.testing.assert_close(grad.to_local(), before * 2)
        for read in (lambda: grad.sum(), lambda: grad[0], lambda: grad.full_tensor()):
            with pytest.raises(RuntimeError, match=r"to_local\(\)"):
                read()

    expected, largest = (
        torch.nn.utils.get_total_norm([param.grad for param in plain(2).parameters()], ord) for ord in (2, math.inf)
    )
    for instances in (1, 2):
        simulate(check, 2, instances)


def test_norms_take_one_collective_and_whole_gradients_one_each() -> None:
    schedule: list[tuple[int, str]] = []

    def launched(read: Callable[[], object]) -> int:
        schedule.append((dist.get_rank(), "here"))
        read()
        events = [event for rank, event in schedule if rank == dist.get_rank()]
        last = len(events) - 1 - events[::-1].index("here")
        return sum(event.startswith("launch") for event in events[last:])

    def check() -> None:
        model = zero1()
        params = list(model.parameters())
        params[0].grad.norm()  # the first read reduces
        assert launched(lambda: torch.nn.utils.clip_grad_norm_(params, 1.0)) == 1
        assert launched(lambda: [param.grad.full_tensor() for param in params]) == len(params)
        assert launched(lambda: params[0].grad.mul_(params[0]).clamp_(-1, 1)) == 0

    simulate(check, 2, schedule=schedule)


def moved() -> None:
    """``nn.Module.cpu()`` sets ``grad.data`` of each gradient to a copy of it, as trainers do when they end."""
    model = zero1()
    before = [param.grad.full_tensor() for param in model.parameters()]
    model.module.cpu()
    for old, param in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, param.grad.full_tensor()) and old.any()


def moved_before_it_is_read() -> None:
    model, same = zero1(), zero1()
    model.module.cpu()
    for other, param in zip(same.parameters(), model.parameters(), strict=True):
        assert torch.equal(other.grad.full_tensor(), param.grad.full_tensor())


@pytest.mark.parametrize("program", [moved, moved_before_it_is_read])
def test_a_model_with_sharded_gradients_may_be_moved_to_where_it_is(program: Callable[[], None]) -> None:
    simulate(program, 2)


# ---- Shards by themselves. ----

ALONE = RankGrid(None, None, None)


def info_of(shape: tuple[int, ...], start: int, end: int, **more: Any) -> ShardInfo:
    return ShardInfo("weight", shape, start, end, ALONE, 1, "", ALONE, **more)


SHAPES = [
    ((), 0, 1, ()),
    ((), 0, 0, (0,)),
    ((6,), 2, 5, (3,)),
    ((4, 3), 3, 9, (2, 3)),
    ((4, 3), 2, 9, (7, 1)),
    ((4, 3), 1, 7, (6, 1)),  # as many elements as two rows
    ((4, 3), 3, 8, (5, 1)),
    ((4, 3), 5, 5, (0, 3)),
    ((4, 3, 2), 6, 12, (1, 3, 2)),
    ((4, 3, 2), 6, 10, (4, 1, 1)),
]


def test_the_same_part_is_one_of_the_same_elements() -> None:
    mine = info_of((4, 3), 3, 6)
    assert mine.is_same_shard(mine._replace(name="other", unit="block", num_replicas=2))
    assert not any(map(mine.is_same_shard, (info_of((4, 3), 3, 9), info_of((4, 3), 0, 6), info_of((3, 4), 3, 6))))


@pytest.mark.parametrize(("shape", "start", "end", "expected"), SHAPES)
def test_a_shard_has_rows_where_it_can(shape: tuple[int, ...], start: int, end: int, expected: Any) -> None:
    assert local_shape(info_of(shape, start, end)) == expected
    whole = math.prod(shape)
    assert local_shape(info_of(shape, start, end, flat=True)) == (shape if end - start == whole else (end - start,))


def test_a_parameter_takes_gradients_of_its_own_elements_alone() -> None:
    mine = info_of((4, 3), 0, 6)
    same, other = (make_sharded_grad(torch.ones(6), info_of((4, 3), start, start + 6)) for start in (0, 6))
    assert adopt_grad(same, mine) is same
    plain = torch.ones(2, 3)
    adopted = adopt_grad(plain, mine)
    assert adopted.shard is mine and adopted.data_ptr() == plain.data_ptr()
    with pytest.raises(RuntimeError, match=r"elements 0 to 6 .* a shard of other elements: elements 6 to 12"):
        adopt_grad(other, mine)
    with pytest.raises(RuntimeError, match=r"a shard of other elements: elements 0 to 6 of .* \(6, 2\)"):
        adopt_grad(make_sharded_grad(torch.ones(6), info_of((6, 2), 0, 6)), mine)
    with pytest.raises(RuntimeError, match=r"of shape \(2, 3\), and was given \(3, 2\)"):
        adopt_grad(torch.ones(3, 2), mine)


def test_a_program_may_put_what_is_no_gradient_of_ours_into_grad() -> None:
    """A parameter, and a tensor with a graph, stay what they are."""
    mine = info_of((4, 3), 0, 6)
    param, with_graph = nn.Parameter(torch.ones(2, 3), requires_grad=False), torch.ones(2, 3, requires_grad=True) * 1
    assert adopt_grad(param, mine) is param
    assert adopt_grad(with_graph, mine) is with_graph
    assert adopt_grad(None, mine) is None


def shard(dtype: torch.dtype = torch.float32, **more: Any) -> ShardedGrad:
    """Elements 2 to 9 of a matrix: no whole rows."""
    return make_sharded_grad(torch.arange(1.0, 8.0).to(dtype), info_of((4, 3), 2, 9, **more))


def test_what_norms_are_asked_for() -> None:
    grad, flat = shard(), torch.arange(1.0, 8.0)
    vector = make_sharded_grad(flat.clone(), info_of((9,), 2, 9))
    square = make_sharded_grad(torch.ones(4), info_of((3, 3), 2, 6))
    torch.testing.assert_close(grad.norm(dtype=torch.float64), flat.double().norm())
    torch.testing.assert_close(grad.norm(p=1), flat.norm(1))
    torch.testing.assert_close(torch.linalg.vector_norm(grad, 3, dtype=torch.float64), flat.double().norm(3))
    torch.testing.assert_close(torch.linalg.norm(vector, 3), flat.norm(3))
    torch.testing.assert_close(torch._foreach_norm([grad, vector], math.inf), [flat.max()] * 2)
    assert grad.norm(keepdim=True).shape == (1, 1)
    empty = make_sharded_grad(torch.empty(0), info_of((4, 3), 5, 5))
    torch.testing.assert_close(
        torch._foreach_norm([empty, grad, empty]), [flat.new_zeros(()), flat.norm(), flat[0] * 0]
    )
    torch.testing.assert_close(shard(copies=2).norm(), flat.norm() / math.sqrt(2))
    refused: list[Callable[[], Any]] = [
        lambda: torch._foreach_norm([grad], 0),
        lambda: grad.norm(0),
        lambda: grad.norm(-1.0),
        lambda: torch.linalg.norm(grad, 3),
        lambda: torch.linalg.norm(grad, "nuc"),
        lambda: grad.norm(dim=0),
        lambda: torch.linalg.vector_norm(grad, out=torch.zeros(())),
        lambda: grad.max(),
        lambda: torch._foreach_max([grad]),
        lambda: torch.equal(grad, grad),
        *(partial(kind, grad) for kind in (bool, float, int, torch.where)),
        lambda: square.__setitem__(torch.ones(3, dtype=torch.bool), 0.0),  # of rows
        lambda: square + make_sharded_grad(torch.ones(4), info_of((3, 3), 1, 5)),
        lambda: grad + shard(flat=True),
        lambda: torch.mul(grad, 2, out=torch.zeros(4, 3)),
        *(partial(getattr, grad, name) for name in ("T", "H", "mT", "mH")),
    ]
    for read in refused:
        with pytest.raises(RuntimeError, match=r"full_tensor\(\)"):
            read()


@pytest.mark.parametrize("bad", [0, 1])
def test_the_largest_is_nan_where_one_rank_has_nan_though_the_backends_maximum_passes_over_it(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def maximum(grid: RankGrid, value: Tensor) -> Tensor:
        rows = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(rows, value)
        return torch.fmax(*rows)

    monkeypatch.setattr(over_ranks, "max_over", maximum)

    def check() -> None:
        model = zero1()
        first, last = model.module[0].weight, [*model.parameters()][-1]
        assert torch.isfinite(nn.utils.get_total_norm([first.grad, last.grad], math.inf))
        with torch.no_grad():
            if dist.get_rank() == bad:
                first.grad.to_local().fill_(torch.nan)
        assert nn.utils.get_total_norm([first.grad], math.inf).isnan()

    simulate(check, 2)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_norms_of_models_over_other_ranks_are_each_those_of_its_own(order: tuple[int, ...]) -> None:
    """One model over all ranks, one over two of four, and a plain one, whose norms are asked for at once."""

    def check() -> None:
        pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        models: list[Any] = [nn.Linear(6, 4, bias=False) for _ in range(3)]
        wrapped = [
            DistributedDataParallel(models[0], config),
            DistributedDataParallel(models[1], config, process_group=pair),
            models[2],
        ]
        for model in wrapped:
            model(torch.full((2, 6), 1.0 + dist.get_rank())).sum().backward()
        means = (2 * 2.5, 2 * (1.5 + 2 * (dist.get_rank() // 2)), 2 * (1.0 + dist.get_rank()))
        found = torch._foreach_norm([models[index].weight.grad for index in order])
        for norm, index in zip(found, order, strict=True):
            torch.testing.assert_close(norm, torch.tensor(means[index] * math.sqrt(24)))

    simulate(check, 4)


def test_norms_of_gradients_of_several_dtypes() -> None:
    grads = [shard(dtype) for dtype in (torch.complex64, torch.bfloat16, torch.float64, torch.float32)]
    grads[0].mul_(0.6 + 0.8j)
    found = torch._foreach_norm(grads)
    assert [each.dtype for each in found] == [torch.float32, torch.bfloat16, torch.float64, torch.float32]
    for each in found:
        torch.testing.assert_close(each.float(), torch.tensor(140.0).sqrt(), rtol=2e-3, atol=0)
    grads.append(torch.ones(4))  # type: ignore[arg-type]
    assert {each.dtype for each in torch._foreach_norm(grads, 2, dtype=torch.float64)} == {torch.float64}


def test_what_is_element_wise_stays_a_shard() -> None:
    grad, target = shard(), shard()
    number = shard(torch.complex64) * (1 + 2j)
    results = [
        torch.max(grad, grad),
        grad.type_as(torch.zeros(5, dtype=torch.float64)),
        torch.mul(grad, 2, out=target),
        number.real,
        number.imag,
        torch.where(grad > 3, grad, torch.zeros(())),
        shard(flat=True) + torch.ones(7),  # these elements
    ]
    assert all(isinstance(each, ShardedGrad) and each.shard.is_same_shard(grad.shard) for each in results)
    assert results[1].dtype is torch.float64
    assert results[2] is target
    assert target.to_local().flatten().tolist() == [2.0 * each for each in range(1, 8)]
    assert results[4].to_local().flatten().tolist() == [2.0 * each for each in range(1, 8)]


OF_ELEMENTS: dict[str, Callable[[Any], Any]] = {
    "//": lambda g: (g // 3) + (100 // g),
    "%": lambda g: (g % 3) + (100 % g),
    "/": lambda g: g / 3 + 2 / g,
    "-": lambda g: 1 - (-(+g) - 1),
    "**": lambda g: g**2 + 2**g,
    "&, | and ^": lambda g: (g.int() & 3) + (g.int() | 8) + (g.int() ^ 5),
    "~, << and >>": lambda g: ~(g.int() << 2) + (g.int() >> 1),
    "//= and %=": lambda g: g.clone().__ifloordiv__(2) + g.clone().__imod__(2),
    "/=, **= and -=": lambda g: g.clone().__itruediv__(2) + g.clone().__ipow__(2) + g.clone().__isub__(2),
    "&=, |= and ^=": lambda g: g.int().__iand__(3) + g.int().__ior__(8) + g.int().__ixor__(5),
    "<<= and >>=": lambda g: g.int().__ilshift__(2) + g.int().__irshift__(1),
    "comparisons": lambda g: (g > 3).int() + (g >= 3).int() + (g != 3).int() + (g == 3).int() + torch.less(g, 3).int(),
    "by other names": lambda g: torch.subtract(g, 1) + torch.multiply(g, 2) + torch.divide(g, 2) + torch.negative(g),
    "of torch.nn": lambda g: F.selu(g) + F.relu6(g) + F.softsign(g) + F.logsigmoid(g) + F.tanhshrink(g) + F.rrelu(g),
    "arcs": lambda g: torch.arccos(g / 9) + torch.arcsin(g / 9) + torch.arctan(g) + torch.arcsinh(g) + torch.fix(g),
    "dropout": lambda g: F.dropout(g, 0.5, training=False) + torch.absolute(g) + torch.positive(g),
    "a power of one to each": lambda g: (
        sum(torch._foreach_pow([g, g], 2)) + sum(torch._foreach_add([g, g], [1.0, 2.0]))
    ),
    "dtypes": lambda g: g.long() + g.double() + g.half() + g.bfloat16() + g.to(torch.float32) + g.short() + g.char(),
}


@pytest.mark.parametrize("name", OF_ELEMENTS)
def test_functions_of_each_element(name: str) -> None:
    flat = torch.arange(1.0, 8.0)
    found = OF_ELEMENTS[name](make_sharded_grad(flat.clone(), info_of((9,), 2, 9)))
    assert isinstance(found, ShardedGrad)
    torch.testing.assert_close(found.to_local(), OF_ELEMENTS[name](flat.clone()))


def test_placeholders_are_zeros_that_nothing_changes() -> None:
    shapes = [info_of((4, 3), 3, 9), info_of((6,), 2, 5)]
    params = [SimpleNamespace(shard=each, dtype=torch.float64, device=torch.device("cpu")) for each in shapes]
    first, second = make_placeholder_grads(params)
    assert [tuple(each.shape) for each in (first, second)] == [(2, 3), (3,)]
    assert first.dtype is torch.float64
    assert first.to_local().count_nonzero() == 0
    assert first.untyped_storage().nbytes() == 8
    changes: list[Callable[[], Any]] = [
        lambda: first.add_(1),
        lambda: torch._foreach_mul_([torch.ones(3), second], 2.0),
        lambda: first.detach().add_(1),
        lambda: second.zero_(),
    ]
    for change in changes:
        with pytest.raises(RuntimeError, match=r"\.grad of parameter 'weight' was changed in the middle"):
            change()
    assert first.requires_grad_(False) is first  # changes no value
    assert (first + 1).add_(1).to_local().tolist() == [[2.0] * 3] * 2
    assert first.norm() == 0


def test_a_shard_waits_for_the_reduction_into_its_memory_and_says_that_it_was_unscaled() -> None:
    seen: list[str] = []

    class Sums:
        def wait(self) -> None:
            seen.append("wait")
            being_reduced.discard(self)

        def record_scaler(self) -> None:
            seen.append("scaler")

    flat, sums = torch.ones(6), Sums()
    grad = make_sharded_grad(flat, info_of((4, 3), 3, 9))
    grad.sums = weakref.ref(sums)
    detached = grad.detach()
    reads: list[Callable[[], Any]] = [
        lambda: detached * 2,
        lambda: grad * 2,
        lambda: grad.to_local(),
        lambda: grad.norm(),
        lambda: torch._foreach_norm([grad]),
        lambda: grad.detach().add_(1),
    ]
    for read in reads:
        being_reduced.add(sums)
        read()
        assert seen == ["wait"]
        seen.clear()
        read()
        assert seen == []
    grad.data.fill_(8)
    torch._amp_foreach_non_finite_check_and_unscale_([grad], torch.zeros(1), torch.full((1,), 0.5))
    assert seen == ["scaler"]
    assert flat.tolist() == [4] * 6
    clone = copy.deepcopy(grad)
    clone.zero_()
    assert flat.tolist() == [4] * 6
    assert clone.shard is grad.shard
    with pytest.raises(TypeError, match="a sharded gradient is not pickled"):
        pickle.dumps(grad)
    other, more = make_sharded_grad(torch.ones(6), info_of((4, 3), 3, 9)), Sums()
    other.sums = weakref.ref(more)
    torch._amp_foreach_non_finite_check_and_unscale_([grad, other], torch.zeros(1), torch.ones(1))
    assert seen == ["scaler"] * 3, "each is told"


def test_functions_are_local_within_the_outermost_step() -> None:
    grad, outer, inner = make_sharded_grad(torch.ones(6), info_of((4, 3), 3, 9)), object(), object()

    def is_local() -> bool:
        return not isinstance(grad * 2, ShardedGrad)

    assert not is_local()
    step_began(outer)
    step_began(inner)
    step_ended(inner)
    assert is_local()
    assert grad.sum() == 6
    step_ended(outer)
    assert not is_local()
    step_began(inner)
    assert is_local()
    step_ended(None)  # it has raised
    assert not is_local()
    with pytest.raises(RuntimeError, match="full_tensor"):
        grad.sum()
