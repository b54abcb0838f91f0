"""Parameters of which tensor-parallel ranks have copies with equal gradients: each rank takes its own.

Where a test tells the ranks' gradients apart, tensor-parallel rank t has 1 + t times the gradient of its loss.
"""

import re
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.collectives.rank_grid import make_grids
from maingrad.ddp.collectives.reduction import PLACEMENTS, CopiesReduction, GradReduction
from maingrad.ddp.torch_internals.distributed import premultiplied_sum
from maingrad.launch import simulate

WIDTH = 24
ZERO1 = {"use_distributed_optimizer": True}
BF16 = torch.bfloat16


class Place(NamedTuple):
    """A rank among (outer, inner, tensor-parallel) ranks."""

    mesh: DeviceMesh
    tp: int
    data: int
    """Which data: tensor-parallel ranks have the same."""


def place(shape: tuple[int, int, int], order: str) -> Place:
    """Ranks are numbered with tensor-parallel ranks changing fastest, slowest, or in no order."""
    outer, inner, tp = shape
    ranks = torch.arange(outer * inner * tp)
    if order == "slowest":
        numbered = ranks.view(outer, tp, inner).transpose(1, 2)
    elif order == "none":
        numbered = ranks.flip(0).view(shape).roll(1, -1)
    else:
        numbered = ranks.view(shape)
    mesh = DeviceMesh("cpu", numbered, mesh_dim_names=("outer", "inner", "tp"))
    where = mesh.get_coordinate()
    return Place(mesh, where[2], where[0] * inner + where[1])


def copies(here: Place, apart: bool, mark: str = "", **options: Any) -> DistributedDataParallel:
    """A layer that each tensor-parallel rank has whole, wrapped."""
    torch.manual_seed(1)
    layer = nn.Linear(WIDTH, WIDTH)
    for param in layer.parameters():
        if apart:
            param.register_hook(lambda grad: grad * (1 + here.tp))
        if mark:
            setattr(param, mark, True)
    ranks = here.mesh["inner"] if here.mesh.size(0) == 1 else here.mesh["outer", "inner"]
    config = DistributedDataParallelConfig(**{"bucket_size": 400, **ZERO1, **options})
    return DistributedDataParallel(layer, config, process_group=ranks, tensor_parallel_group=here.mesh["tp"])


def batch(data: int) -> Tensor:
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(70 + data))


def mean_grads(num_data: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    layer = nn.Linear(WIDTH, WIDTH)
    for data in range(num_data):
        (layer(batch(data)).square().mean() / num_data).backward()
    return {name: param.grad for name, param in layer.named_parameters() if param.grad is not None}


# ---- Which gradients count. ----


def own_shards(
    shape: tuple[int, int, int], order: str, mark: str, options: dict[str, Any]
) -> tuple[int, list[tuple[Tensor, Tensor]]]:
    """Of each bucket: this rank's shard of the mean over data, and of what was reduced."""
    here = place(shape, order)
    model = copies(here, True, mark, **options)
    expected = mean_grads(shape[0] * shape[1])
    model(batch(here.data)).square().mean().backward()
    model.finish_grad_sync()
    found = []
    for bucket in model.buckets:
        whole = torch.zeros(bucket.layout.numel)
        for slot in bucket.layout.slots:
            start, end = slot.range.counted_from(bucket.layout.start)
            whole[start:end] = expected[slot.spec.name].view(-1)
        found.append((whole[slice(*model.owned_range(bucket.layout))], bucket.reduced))
    return here.tp, found


FORMS: dict[str, tuple[tuple[int, int, int], str, dict[str, Any]]] = {
    "packed": ((1, 2, 2), "fastest", {}),
    "adjacent": ((1, 3, 2), "slowest", {}),
    "in no order": ((1, 2, 3), "none", {}),
    "one data-parallel rank": ((1, 1, 2), "fastest", {}),
    "released": ((1, 2, 2), "fastest", {"release_grads": True}),
    "released, one data-parallel rank": ((1, 1, 2), "fastest", {"release_grads": True}),
    "half on the wire": ((1, 2, 2), "fastest", {"grad_reduce_wire_dtype": BF16}),
    "half on the wire, released": ((1, 2, 2), "slowest", {"grad_reduce_wire_dtype": BF16, "release_grads": True}),
    "hybrid": ((2, 2, 2), "fastest", {}),
    "hybrid, released": ((2, 2, 2), "none", {"release_grads": True}),
    "instances of one data-parallel rank": ((2, 1, 2), "fastest", {}),
    "instances of one data-parallel rank, released": ((2, 1, 2), "slowest", {"release_grads": True}),
    "at the end": ((1, 2, 2), "fastest", {"overlap_grad_reduce": False}),
    "whole parameters": ((1, 2, 2), "fastest", {"keep_params_whole": True}),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_rank_reduces_its_shard_over_the_ranks_with_other_data(form: str) -> None:
    shape, order, options = FORMS[form]
    tolerance = {"rtol": 0.02, "atol": 1e-3} if "grad_reduce_wire_dtype" in options else {}
    for tp, buckets in simulate(own_shards, shape[0] * shape[1] * shape[2], shape, order, "", options):
        for expected, found in buckets:
            torch.testing.assert_close(found, (1 + tp) * expected, **tolerance)


@pytest.mark.parametrize(("mark", "times"), [("average_gradients_across_tp_domain", 1.5), ("sequence_parallel", 3.0)])
def test_marks_ask_for_the_mean_or_the_sum(mark: str, times: float) -> None:
    for _, buckets in simulate(own_shards, 4, (1, 2, 2), "fastest", mark, {}):
        for expected, found in buckets:
            torch.testing.assert_close(found, times * expected)


def averaged_in_collectives(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """This rank's shard of 12 numbers, averaged over ranks with other data, and what it is after the reduction."""
    here, row = place(shape, "fastest"), PLACEMENTS["zero1"]
    ranks = here.mesh["inner"] if shape[0] == 1 else here.mesh["outer", "inner"]
    grids = make_grids(
        ranks, None, tensor_ranks=here.mesh["tp"].get_group(), has_experts=False, num_instances=1, separate_gather=False
    )
    num_data = shape[0] * shape[1]
    column = GradReduction(grids["slice"], row, factor=1 / num_data, in_collective=True, device=torch.device("cpu"))
    reduction = CopiesReduction(grids["dense"], row, column, torch.device("cpu"))
    assert reduction.num_collectives == column.num_collectives, "nothing is sent between columns"
    on_the_wire = GradReduction(grids["slice"], row, factor=1.0, wire_dtype=BF16, device=torch.device("cpu"))
    sent = CopiesReduction(grids["dense"], row, on_the_wire, torch.device("cpu"))
    assert (sent.name, reduction.name) == ("all_to_all", "reduce_scatter")
    assert sent.wire_nbytes(12, torch.float32) == 2 * 12 // shape[2]
    numbers = [torch.arange(12.0) + 100 * data for data in range(num_data)]
    grads = numbers[here.data].clone()
    reduction.start(grads).wait()
    mine = slice(*reduction.owned_range(12))
    expected = torch.stack(numbers).mean(0)[mine]
    if shape[0] == 1:
        into = torch.full_like(expected, torch.nan)
        reduction.start(numbers[here.data].clone(), into).wait()
        torch.testing.assert_close(into, expected)
    return expected, grads[mine]


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2), (2, 2, 2), (1, 1, 2)])
def test_a_collective_may_divide(shape: tuple[int, int, int]) -> None:
    """As NCCL does: inside an instance, or across where no rank of an instance has other data."""
    if not (premultiplied_sum and hasattr(premultiplied_sum(0.25), "factor")):
        pytest.skip("this version of torch hides the factor of NCCL's operation, which simulated ranks need")
    for expected, found in simulate(averaged_in_collectives, shape[0] * shape[1] * shape[2], shape):
        torch.testing.assert_close(found, expected)


# ---- What is sent. ----


def reduces(shape: tuple[int, int, int], options: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(collective, bytes on the wire, bytes of the bucket's gradients) of each bucket, as a timeline tells it."""
    here = place(shape, "fastest")
    model = copies(here, False, **options)
    with model.record_timeline() as timeline:
        model(batch(here.data)).square().mean().backward()
        model.finish_grad_sync()
    return [
        (span.collective, span.nbytes, bucket.grad_data.nbytes)
        for span, bucket in zip(timeline.buckets, model.buckets, strict=True)
    ]


Launches = list[tuple[str, str]]
SENT: dict[str, tuple[tuple[int, int, int], dict[str, Any], str, float, Launches]] = {
    "zero1": ((1, 2, 2), {}, "reduce_scatter", 1 / 2, [("reduce_scatter_single", "1, 3")]),
    "one data-parallel rank": ((1, 1, 2), {}, "none", 1 / 2, []),
    "half on the wire": (
        (1, 2, 2),
        {"grad_reduce_wire_dtype": BF16},
        "all_to_all",
        1 / 4,
        [("all_to_all_single", "1, 3")],
    ),
    "hybrid": ((2, 2, 2), {}, "reduce_scatter", 1 / 2, [("reduce_scatter_single", "1, 3"), ("all_reduce", "1, 5")]),
    "ddp": ((1, 2, 2), {"use_distributed_optimizer": False}, "all_reduce", 1, [("all_reduce", "0, 1, 2, 3")]),
}


@pytest.mark.parametrize("form", SENT)
def test_no_gradient_of_a_copy_is_sent_between_tensor_parallel_ranks(form: str) -> None:
    """The all-gather after the step makes copies equal. Plain data parallelism has none, and reduces over all ranks."""
    shape, options, collective, part, launches = SENT[form]
    schedule: list[tuple[int, str]] = []
    found = simulate(reduces, shape[0] * shape[1] * shape[2], shape, options, schedule=schedule)
    for name, on_wire, nbytes in found[1]:
        assert (name, on_wire) == (collective, nbytes * part)
    sent = (re.fullmatch(r"launch (\w+) .*float.*\(ranks (.*)\)", event) for rank, event in schedule if rank == 1)
    assert [match.groups() for match in sent if match and match[1] != "broadcast"] == launches


# ---- Copies stay equal. ----


def three_steps(shape: tuple[int, int, int], mark: str, options: dict[str, Any]) -> list[Tensor]:
    here = place(shape, "fastest")
    model = copies(here, True, mark, **options)
    optimizer = DistributedOptimizer(model, lr=0.1, max_grad_norm=0.5)
    for _ in range(3):
        model(batch(here.data)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish_param_sync()
    return [param.detach().clone() for param in model.module.parameters()]


@pytest.mark.parametrize("mark", ["", "average_gradients_across_tp_domain"])
@pytest.mark.parametrize(("shape", "options"), [((1, 2, 2), {}), ((2, 2, 2), {"overlap_param_gather": True})])
def test_copies_keep_their_bits_where_gradients_differ(
    shape: tuple[int, int, int], options: dict[str, Any], mark: str
) -> None:
    first, *others = simulate(three_steps, shape[0] * shape[1] * shape[2], shape, mark, options)
    for other in others:
        assert all(map(torch.equal, first, other))


# ---- On real groups. ----

TRAINED: dict[str, dict[str, Any]] = {
    "overlap": {"overlap_param_gather": True},
    "released": {"release_grads": True},
    "at the end": {"overlap_grad_reduce": False},
    "half on the wire": {"grad_reduce_wire_dtype": BF16},
}


def train_on_groups(backend: str, dp: int, tp: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Five steps of each form: this rank's weights, and those of plain PyTorch on all data."""
    rank, device = dist.get_rank(), torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    numbered = torch.arange(dp * tp).view(dp, tp)
    rows = [dist.new_group(row, backend=backend) for row in numbered.tolist()]
    columns = [dist.new_group(column, backend=backend) for column in numbered.T.tolist()]
    found = {}
    for name, options in TRAINED.items():
        torch.manual_seed(1)
        layer, plain = nn.Linear(WIDTH, WIDTH, device=device), nn.Linear(WIDTH, WIDTH, device=device)
        plain.load_state_dict(layer.state_dict())
        config = DistributedDataParallelConfig(**{"bucket_size": 400, **ZERO1, **options})
        groups = {"process_group": columns[rank % tp], "tensor_parallel_group": rows[rank // tp]}
        model = DistributedDataParallel(layer, config, **groups)
        optimizer = DistributedOptimizer(model, optimizer_class=torch.optim.SGD, lr=0.5)
        expected = torch.optim.SGD(plain.parameters(), lr=0.5)
        for step in range(5):
            xs = [batch(10 * step + data).to(device) for data in range(dp)]
            model(xs[rank // tp]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            (sum(plain(x).square().mean() for x in xs) / dp).backward()  # type: ignore[attr-defined]
            expected.step()
            expected.zero_grad()
        optimizer.finish_param_sync()
        wholes = (torch.cat([each.detach().view(-1).cpu() for each in of.parameters()]) for of in (layer, plain))
        found[name] = (next(wholes), next(wholes))
    return found


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("backend", "dp", "tp"),
    [
        ("gloo", 2, 2),
        pytest.param("nccl", 1, 2, marks=pytest.mark.gpu(2)),
        pytest.param("nccl", 2, 2, marks=pytest.mark.gpu(4)),
    ],
)
def test_real_groups_train_as_plain_pytorch(backend: str, dp: int, tp: int) -> None:
    first, *others = run_ranks(train_on_groups, dp * tp, backend, dp, tp)
    for name, (weights, plain) in first.items():
        bound = 1e-2 if name == "half on the wire" else 1e-5
        assert (weights - plain).norm() < bound * plain.norm(), name
        for other in others:
            assert torch.equal(other[name][0], weights), name
