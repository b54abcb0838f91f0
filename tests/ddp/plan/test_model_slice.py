"""What a rank's parameter is of the whole: by Megatron-core's marks, and as other code says it."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from maingrad.ddp import DistributedDataParallelConfig
from maingrad.ddp.contract.main_grad import mark_delayed
from maingrad.ddp.plan.cut import Box, Range
from maingrad.ddp.plan.model_slice import ModelSlice, model_slice_of, set_model_slice, slice_of_blocks, slice_of_marks
from maingrad.ddp.plan.owned_params import (
    check_marks,
    find_owned_params,
    find_tensor_ranks,
    plan_model,
    slices_of,
    take_marks,
)
from maingrad.ddp.torch_grads.over_ranks import whole_of_slices
from maingrad.launch import simulate
from maingrad.te_integration import Linear


def _marked(shape, **marks):
    param = nn.Parameter(torch.zeros(shape))
    for name, value in marks.items():
        setattr(param, name, value)
    return param


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.sampled(4)
def test_the_boxes_of_all_ranks_are_the_whole_in_the_order_of_local_elements(dim, stride):
    whole = torch.arange(8 * 12).view(8, 12)

    def local_and_slice():
        group, size = torch.distributed.group.WORLD, 2
        blocks = whole.chunk(stride, dim)
        local = torch.cat([block.chunk(size, dim)[group.rank()] for block in blocks], dim)
        marks = {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride}
        return local, slice_of_marks(_marked(local.shape, **marks), group)

    seen = torch.zeros_like(whole)
    for local, found in simulate(local_and_slice, 2):
        assert found.shape == (8, 12)
        assert found.grad == "slice"
        assert found.local_shape == tuple(local.shape)
        by_box = [Box((0, 0), (8, 12)).view_of(box, whole) for box in found.boxes]
        assert torch.equal(torch.cat(by_box, found.dim), local)
        for box in found.boxes:
            Box((0, 0), (8, 12)).view_of(box, seen).add_(1)
    assert (seen == 1).all()


def test_a_slice_without_a_dim_is_cut_along_the_first():
    """-1 and a stride of 0 are what Megatron-core has on parameters before it says more."""
    marks = {"tensor_model_parallel": True, "partition_dim": -1, "partition_stride": 0}
    assert slice_of_marks(_marked((6, 2), **marks), None).dim == 0


def test_copies_with_parts_of_a_gradient():
    found = slice_of_marks(_marked((6,), sequence_parallel=True), None)
    assert found == ModelSlice((6,), (Box((0,), (6,)),), None, None, "partial")
    for unmarked in (_marked((6,)), _marked((6,), sequence_parallel=False, tensor_model_parallel=False)):
        assert slice_of_marks(unmarked, None).grad == "dense"


@pytest.mark.parametrize("marks", [{}, {"sequence_parallel": True}])
def test_megatron_averages_where_a_mark_says_so(marks):
    marked = _marked((6,), average_gradients_across_tp_domain=True, **marks)
    assert slice_of_marks(marked, None).grad == "mean"


def test_an_uneven_cut_is_as_large_as_its_largest_slice():
    def largest():
        group = torch.distributed.group.WORLD
        start, rows = (0, 4) if group.rank() == 0 else (4, 3)
        return ModelSlice((7, 2), (Box((start, 0), (rows, 2)),), 0, group, "slice").largest_shape

    assert simulate(largest, 2) == [(4, 2), (4, 2)]


def test_ranks_with_smaller_slices_have_the_same_buckets():
    """Eight elements fill a bucket, and the second rank has six."""

    def planned():
        group = torch.distributed.group.WORLD
        start, rows = (0, 4) if group.rank() == 0 else (4, 3)
        held = ModelSlice((7, 2), (Box((start, 0), (rows, 2)),), 0, group, "slice")
        model = nn.ParameterDict({"bias": torch.zeros(2), "weight": torch.zeros(rows, 2)})
        config = DistributedDataParallelConfig(bucket_size=8)
        plan = plan_model(find_owned_params(model), config, shard_degree=1, slices={"weight": held})
        return [[(slot.spec.name, slot.spec.shape) for slot in bucket.slots] for bucket in plan.buckets]

    assert simulate(planned, 2) == [[[("weight", (rows, 2))], [("bias", (2,))]] for rows in (4, 3)]


@pytest.mark.parametrize(
    ("blocks", "local", "is_uneven"),
    [
        ([8], [2, 2, 2, 2], False),
        ([7], [2, 2, 2, 1], True),
        ([8, 8], [4, 4, 4, 4], False),
        ([6, 6], [4, 4, 4, 0], True),  # 2, 2, 2 and none of each
        ([8, 4], [3, 3, 3, 3], False),  # queries, and keys of fewer heads
        ([1, 2, 1], [3, 1, 0, 0], True),  # the second rank has as much as a mean rank
    ],
)
def test_each_block_of_a_packed_weight_is_cut(blocks, local, is_uneven):
    def cut():
        group = torch.distributed.group.WORLD
        found = slice_of_blocks((sum(blocks),), 0, blocks, group, group.rank())
        return found.local_shape[0], found.largest_shape[0], found.is_uneven

    assert simulate(cut, 4) == [(rows, max(local), is_uneven) for rows in local]
    alone = slice_of_blocks((sum(blocks),), 0, blocks, None, 0)
    assert (alone.largest_shape, alone.is_uneven) == ((sum(blocks),), False)


@pytest.mark.parametrize(
    ("mine", "largest", "uneven"), [(2, None, False), (2, 2, False), (1, None, True), (3, None, True), (2, 3, True)]
)
def test_a_slice_is_uneven_by_its_own_shape_or_by_the_largest(mine: int, largest: int | None, uneven: bool) -> None:
    pair: Any = SimpleNamespace(size=lambda: 2)
    held = ModelSlice((4, 5), (Box((0, 0), (mine, 5)),), 0, pair, "slice", largest)
    assert held.is_uneven is uneven
    assert not held._replace(dim=None).is_uneven and not held._replace(group=None).is_uneven


def test_boxes_meet_where_both_have_elements() -> None:
    box = Box((1, 0), (2, 3))
    assert box.intersect(Box((2, 1), (4, 1))) == Box((2, 1), (1, 1))
    assert box.intersect(Box((3, 0), (2, 3))) is None
    assert box.intersect(Box((1, 3), (2, 1))) is None
    assert Box((), ()).intersect(Box((), ())) == Box((), ())
    assert Range(2, 6).intersect(Range(4, 9)) == Range(4, 6)
    assert Range(2, 6).intersect(Range(8, 9)) == Range(6, 6)
    assert Range(2, 6).intersect(Range(0, 1)) == Range(2, 2)


def test_a_mark_that_a_wrapper_answers_for_is_taken_and_stays_known():
    model = nn.ParameterDict(
        {name: _marked((2,), **{mark: True}) for name, mark in (("a", "sequence_parallel"), ("b", "sequence_parallel"))}
    )
    model["c"] = _marked((2,), average_gradients_across_tp_domain=True)
    held = {name: slice_of_marks(model[name], None) for name in ("a", "c")}
    take_marks(model, held)
    assert (model["a"].sequence_parallel, model["b"].sequence_parallel) == (False, True)
    assert model["c"].average_gradients_across_tp_domain is False
    assert [model_slice_of(model[name]) for name in "abc"] == [held["a"], None, held["c"]]


def test_matrices_that_stay_whole_are_two_dims_of_a_stack_of_them_each():
    model = nn.ParameterDict(
        {"matrix": torch.zeros(4, 2), "stack": torch.zeros(3, 4, 2), "kernel": torch.zeros(2, 2, 2, 2)}
    )
    model["none"] = torch.zeros(2, 0, 3)
    model["vector"] = torch.zeros(8)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, keep_matrices_whole=["matrix", "stack", "ker*", "none"]
    )
    plan = plan_model(find_owned_params(model), config, shard_degree=2)
    specs = {slot.spec.name: slot.spec for bucket in plan.buckets for slot in bucket.slots}
    assert {name for name, spec in specs.items() if spec.whole} == {"matrix", "kernel"}
    assert {name: spec.atom for name, spec in specs.items() if spec.matrices} == {"stack": 8, "none": 1}


def test_a_weight_is_the_modules_alone_if_all_owners_write_its_gradient():
    for other, alone in ((Linear(2, 2, bias=False), True), (nn.Linear(2, 2, bias=False), False)):
        model = nn.Sequential(Linear(2, 2, fuse_wgrad_accumulation=True), other)
        if alone:
            model[1] = Linear(2, 2, bias=False, fuse_wgrad_accumulation=True)
        model[1].weight = model[0].weight
        assert {owned.name: owned.ours_alone for owned in find_owned_params(model)} == {
            "0.weight": alone,
            "0.bias": False,
        }


def test_a_mark_delays_a_parameter_whichever_module_owns_it():
    layer = nn.Linear(2, 2)
    mark_delayed(layer.weight)
    assert {owned.name: owned.delayed for owned in find_owned_params(layer)} == {"weight": True, "bias": False}


def test_a_tied_parameter_has_the_name_of_its_first_owner() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2, bias=False)))
    model[1][0].weight = model[0].weight
    (owned,) = find_owned_params(model)
    assert owned.name == "0.weight"
    assert owned.owners == ((model[0], "weight"), (model[1][0], "weight"))


def test_what_is_said_of_a_parameter_fits_it():
    found = slice_of_marks(_marked((4, 6), tensor_model_parallel=True, partition_dim=1), None)
    param = nn.Parameter(torch.zeros(4, 6))
    assert model_slice_of(param) is None
    set_model_slice(param, found)
    assert model_slice_of(param) is found
    with pytest.raises(ValueError, match="is no slice of shape"):
        set_model_slice(nn.Parameter(torch.zeros(4, 5)), found)
    with pytest.raises(ValueError, match="partition_stride = 4 does not divide the 6 rows"):
        slice_of_marks(_marked((4, 6), tensor_model_parallel=True, partition_dim=1, partition_stride=4), None)


@pytest.mark.parametrize(
    ("mark", "leaves_ranks_out", "larger_world", "told", "sums", "refused"),
    [
        ("sequence_parallel", True, True, False, False, True),
        ("sequence_parallel", False, True, False, False, True),  # Megatron-core's other ranks are among these
        ("sequence_parallel", False, False, False, False, False),
        ("sequence_parallel", True, True, True, False, False),
        ("average_gradients_across_tp_domain", True, True, False, False, True),
        ("average_gradients_across_tp_domain", False, True, False, False, False),
        ("average_gradients_across_tp_domain", True, True, True, False, False),
        ("shared_embedding", True, True, True, False, True),
        ("shared_embedding", True, True, False, True, False),
        ("shared_embedding", False, True, False, False, False),
        ("tensor_model_parallel", True, True, False, False, False),
    ],
)
def test_marks_of_gradients_that_nobody_completes_are_refused(
    mark, leaves_ranks_out, larger_world, told, sums, refused
):
    grid: Any = SimpleNamespace(leaves_ranks_out=leaves_ranks_out, in_larger_world=larger_world)
    named = [("plain", _marked((2,))), ("marked", _marked((2,), **{mark: True}))]
    with pytest.raises(ValueError, match=f"parameter 'marked' has {mark} = True") if refused else nullcontext():
        check_marks(named, grid, None, grid if told else None, sums_embeddings=sums)


@pytest.mark.parametrize(
    ("leaves_ranks_out", "told", "checks", "refused"),
    [(True, False, True, True), (True, True, True, False), (False, False, True, False), (True, False, False, False)],
)
def test_one_rank_alone_would_raise_for_nan_in_its_slices(leaves_ranks_out, told, checks, refused):
    grid: Any = SimpleNamespace(leaves_ranks_out=leaves_ranks_out, in_larger_world=True)
    named = [("cut", _marked((2,), tensor_model_parallel=True))]
    config = DistributedDataParallelConfig(check_for_nan_in_grad=checks)
    with pytest.raises(ValueError, match="check_for_nan_in_grad would raise on some") if refused else nullcontext():
        check_marks(iter(named), grid, config, grid if told else None)
    check_marks(named, grid, None, None)
    named[0][1].allreduce = False
    check_marks(named, grid, config, None)  # an expert, which is whole


def test_experts_and_slices_over_one_rank_say_nothing_of_tensor_parallel_ranks():
    def told():
        everyone, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
        alone = torch.distributed.new_group([rank], use_local_synchronization=True)
        model = nn.ModuleDict({name: nn.Linear(3, 4, bias=False) for name in ("expert", "whole", "cut")})
        model["expert"].weight.allreduce = False
        for name, group in (("expert", everyone), ("whole", alone)):
            set_model_slice(model[name].weight, slice_of_blocks((4 * group.size(), 3), 0, [4 * group.size()], group, 0))
        first = find_tensor_ranks(model, None)
        set_model_slice(model["cut"].weight, slice_of_blocks((8, 3), 0, [8], everyone, rank))
        ranks = find_tensor_ranks(model, None)
        return first, ranks.ranks, sorted(slices_of(model, ranks))

    assert simulate(told, 2) == [(None, [0, 1], ["cut.weight", "whole.weight"])] * 2


def test_layers_with_slices_say_themselves_over_which_ranks_they_are_cut():
    def layer(members, *, cut):
        made = nn.Linear(4, 4, bias=False)
        made.tensor_parallel_members = members
        made.weight.tensor_model_parallel = cut
        return made

    def on_each_rank():
        world = torch.distributed.group.WORLD
        everyone, pair = [0, 1, 2, 3], [0, 1]
        around = nn.Sequential(layer(everyone, cut=True), layer(pair, cut=False))
        around.tensor_parallel_members = pair  # of a module without parameters of its own
        assert find_tensor_ranks(around, world).ranks == everyone
        with pytest.raises(ValueError, match=r"layer '1' is cut over ranks \[0, 1\], and .* has ranks \[0, 1, 2, 3\]"):
            find_tensor_ranks(nn.Sequential(layer(everyone, cut=True), layer(pair, cut=True)), world)

    simulate(on_each_rank, 4)


def test_a_whole_is_joined_from_slices_of_several_boxes_of_other_sizes() -> None:
    """As of query, key and value in one weight: a rank has 2 + 1 + 1 rows of 8."""
    whole = torch.arange(16.0).view(8, 2)

    def check() -> None:
        rank = dist.get_rank()
        boxes = [Box((first + rank * rows, 0), (rows, 2)) for first, rows in ((0, 2), (4, 1), (6, 1))]
        found = ModelSlice((8, 2), tuple(boxes), 0, dist.group.WORLD, "slice")
        local = found.part_of(whole).clone()
        assert local.shape == (4, 2)
        assert torch.equal(whole_of_slices(local, found), whole)

    simulate(check, 2)
