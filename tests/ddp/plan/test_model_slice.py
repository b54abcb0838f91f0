"""What a rank's parameter is of the whole: by Megatron-core's marks, and as other code says it."""

import pytest
import torch
from torch import nn

from maingrad.ddp import DistributedDataParallelConfig
from maingrad.ddp.plan.cut import Box
from maingrad.ddp.plan.model_slice import ModelSlice, model_slice_of, set_model_slice, slice_of_blocks, slice_of_marks
from maingrad.ddp.plan.owned_params import find_owned_params, find_tensor_ranks, plan_model, slices_of
from maingrad.launch import simulate


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
