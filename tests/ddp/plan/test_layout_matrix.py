"""Ten layers of 95 x 95 at the bucket sizes of Megatron-core's own test: our buckets, computed by hand.

The parametrisation (sizes, sharded or not, bias, shared embedding) is that of ``test_bucket_sizes`` in Megatron-LM's
``tests/unit_tests/distributed/test_param_and_grad_buffer.py``. The numbers differ where the rules do: ours pads
unsharded buffers too and counts a bucket's size without the padding inside it, gives a shared embedding its own bucket
whether gradients are sharded or not, and takes 40 million elements where no size is given.

The arithmetic. A weight has 95 x 95 = 9025 elements, a bias 95. Parameters start at multiples of 64, buckets end at
multiples of 128 (for 1, 2, 4 and 8 ranks: lcm(ranks, 128) = 128) or of 384 (for 3)::

    a weight ends at 9025, the next parameter starts at 9088 = 142 x 64
    a bias ends at   95,   the next parameter starts at  128 =   2 x 64
    a layer with bias: bias at 0, weight at 128 to 9153, the next layer at 9216 = 144 x 64; it holds 9120 elements

    k weights end at 9088 (k - 1) + 9025, k layers with bias at 9216 (k - 1) + 9153; rounded up to 128 and 384:

    k      weights    to 128   to 384      layers   to 128   to 384
    1        9025       9088     9216        9153     9216     9216
    2       18113      18176    18432       18369    18432    18432
    3       27201      27264    27264       27585    27648    27648
    8       72641      72704    72960
    9       81729      81792    82176
    10      90817      90880    91008       92097    92160    92160
"""

import pytest
import torch
from torch import nn

from maingrad.ddp import DistributedDataParallelConfig
from maingrad.ddp.plan.layout import GradPlan
from maingrad.ddp.plan.owned_params import find_owned_params, plan_model

WEIGHT, LAYER = 95 * 95, 95 * 95 + 95
SIZES = (None, 9000, 9025, 9050, 18000, 18050, 20000)

# Weights only. A bucket closes at the first weight with which it holds its size: 9025, 18050 or 27075 elements.
WEIGHTS_ONLY = {
    None: [90880],
    9000: [9088] * 10,
    9025: [9088] * 10,
    9050: [18176] * 5,
    18000: [18176] * 5,
    18050: [18176] * 5,
    20000: [27264, 27264, 27264, 9088],
}
# With biases, which backward reaches before their weights: 9120, 18240 or 27360 elements when a weight closes it.
# 9050 is reached by a bias and a weight; a bias never closes one (9120 + 95 and 18240 + 95 lie below 18000 and 20000).
WITH_BIAS = {
    None: [92160],
    9000: [9216] * 10,
    9025: [9216] * 10,
    9050: [9216] * 10,
    18000: [18432] * 5,
    18050: [18432] * 5,
    20000: [27648, 27648, 27648, 9216],
}
# The last layer's weight is the shared embedding: backward reaches it first. Nine weights are left.
SHARED = {
    None: [9088, 81792],
    9000: [9088, *[9088] * 9],
    9025: [9088, *[9088] * 9],
    9050: [9088, *[18176] * 4, 9088],
    18000: [9088, *[18176] * 4, 9088],
    18050: [9088, *[18176] * 4, 9088],
    20000: [9088, *[27264] * 3],
}
# Its bias stays with the next layers: it is at 0 and they start at 128. So k layers end at 128 + 9216 (k - 1) + 9153:
# 1: 9281 -> 9344; 2: 18497 -> 18560; 3: 27713 -> 27776; 9: 83009 -> 83072. The first bucket holds 95 more.
SHARED_WITH_BIAS = {
    None: [9088, 83072],
    9000: [9088, 9344, *[9216] * 8],
    9025: [9088, 9344, *[9216] * 8],
    9050: [9088, 9344, *[9216] * 8],
    18000: [9088, 18560, *[18432] * 3, 9216],
    18050: [9088, 18560, *[18432] * 3, 9216],
    20000: [9088, 27776, *[27648] * 2],
}
EXPECTED = {
    (False, False): WEIGHTS_ONLY,
    (True, False): WITH_BIAS,
    (False, True): SHARED,
    (True, True): SHARED_WITH_BIAS,
}


def plan(
    ranks: int,
    *,
    sharded: bool,
    bias: bool = False,
    shared_embedding: bool = False,
    size: int | None = None,
    **options: object,
) -> GradPlan:
    """The plan for Megatron's model, on the meta device: a plan needs no memory. ``ranks`` is 1 without sharding."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(95, 95, bias=bias) for _ in range(10))).bfloat16()
    if shared_embedding:
        model[-1].weight.shared_embedding = True
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=size, **options)
    return plan_model(find_owned_params(model), config, shard_degree=ranks)


@pytest.mark.parametrize("shared_embedding", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_bucket_sizes(size: int | None, bias: bool, shared_embedding: bool) -> None:
    """Sharded over 1, 2, 4 and 8 ranks, and not sharded: the same buckets."""
    expected = EXPECTED[bias, shared_embedding][size]
    for sharded, ranks in ((False, 1), (True, 1), (True, 2), (True, 4), (True, 8)):
        layout = plan(ranks, sharded=sharded, bias=bias, shared_embedding=shared_embedding, size=size)
        assert [bucket.numel for bucket in layout.buckets] == expected
        assert sum(bucket.numel - bucket.padding for bucket in layout.buckets) == 10 * (LAYER if bias else WEIGHT)
        for rank in range(ranks):
            shards = [bucket.shard(rank) for bucket in layout.buckets]
            assert sum(end - start for start, end in shards) == sum(expected) // ranks


@pytest.mark.parametrize(
    ("bias", "size", "expected"),
    [
        (False, None, [91008]),
        (False, 9000, [9216] * 10),
        (False, 9050, [18432] * 5),
        (False, 20000, [27264, 27264, 27264, 9216]),
        (True, None, [92160]),
        (True, 9000, [9216] * 10),
        (True, 18000, [18432] * 5),
        (True, 20000, [27648, 27648, 27648, 9216]),
    ],
)
def test_three_ranks(bias: bool, size: int | None, expected: list[int]) -> None:
    layout = plan(3, sharded=True, bias=bias, size=size)
    assert [bucket.numel for bucket in layout.buckets] == expected


def test_parameters_start_where_the_arithmetic_says() -> None:
    layout = plan(4, sharded=True, bias=True, size=18000)
    starts = [(slot.spec.name, slot.start) for slot in layout.buckets[1].slots]
    assert starts == [
        ("7.bias", 18432),
        ("7.weight", 18432 + 128),
        ("6.bias", 18432 + 9216),
        ("6.weight", 18432 + 9216 + 128),
    ]


def test_padding_between_parameters_of_a_tiny_layer() -> None:
    """A 4 x 4 weight and a bias of 4: the weight starts at 64, not at 4, and the bucket ends at 128."""
    with torch.device("meta"):
        owned = find_owned_params(nn.Linear(4, 4))
    layout = plan_model(owned, DistributedDataParallelConfig(use_distributed_optimizer=True), shard_degree=2)
    (bucket,) = layout.buckets
    assert [(slot.spec.name, slot.start, slot.end) for slot in bucket.slots] == [("bias", 0, 4), ("weight", 64, 80)]
    assert (bucket.numel, bucket.padding) == (128, 108)


def test_padding_for_bus_bandwidth() -> None:
    # 2^16 = 65536 elements end every bucket; 90817 fit in two of them.
    layout = plan(8, sharded=True, size=None, pad_buckets_for_high_nccl_busbw=True)
    assert [bucket.numel for bucket in layout.buckets] == [131072]
    layout = plan(8, sharded=True, size=9000, pad_buckets_for_high_nccl_busbw=True)
    assert [bucket.numel for bucket in layout.buckets] == [65536] * 10


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("num_buckets", "per_bucket"), [(1, [10]), (2, [5, 5]), (3, [4, 4, 2]), (4, [3, 3, 3, 1]), (10, [1] * 10)]
)
@pytest.mark.sampled(20)
def test_a_number_of_buckets(num_buckets: int, per_bucket: list[int], ranks: int) -> None:
    # k weights, rounded up to 128: see above; 4: 9088 x 3 + 9025 = 36289 -> 36352; 5: 45377 -> 45440.
    numel = {1: 9088, 2: 18176, 3: 27264, 4: 36352, 5: 45440, 10: 90880}
    layout = plan(ranks, sharded=True, num_buckets=num_buckets)
    assert [bucket.numel for bucket in layout.buckets] == [numel[k] for k in per_bucket]


# Whole parameters. A weight takes 9088 elements of its shard, a bias 128; shards are as long as the fullest, and start
# at multiples of 128 (1 rank) or 64 (2, 4, 8). A bucket closes once it also holds as many weights as there are shards.
@pytest.mark.parametrize(
    ("ranks", "size", "expected"),
    [
        (1, 9000, [9088] * 10),  # nothing to balance: each weight closes a bucket
        (2, 9000, [18176] * 5),  # two weights, one in each shard
        (2, 20000, [36352, 36352, 18176]),  # two rows of two close a bucket
        (4, 9000, [36352] * 3),  # two rows of four, and two weights
        (4, None, [109056]),  # three, three, two and two
        (8, 9000, [72704] * 2),  # a row of eight, and two weights
    ],
)
def test_whole_weights(ranks: int, size: int | None, expected: list[int]) -> None:
    layout = plan(ranks, sharded=True, size=size, keep_params_whole=True)
    assert [bucket.numel for bucket in layout.buckets] == expected


def test_whole_weights_and_biases() -> None:
    """Ten weights and ten biases on eight ranks, as evenly as whole parameters allow."""
    (bucket,) = plan(8, sharded=True, bias=True, keep_params_whole=True).buckets
    # Weights: two shards get two, six get one. The biases then go to the six: four of those get two of them, two one.
    fill = [0] * 8
    for slot in bucket.slots:
        fill[slot.start // (bucket.numel // 8)] += slot.spec.numel
    assert sorted(fill) == [9025 + 95] * 2 + [9025 + 2 * 95] * 4 + [2 * 9025] * 2
    assert bucket.numel == 8 * 18176


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gradients_of_half_precision_are_summed_as_the_option_says(dtype: torch.dtype) -> None:
    owned = find_owned_params(nn.Linear(4, 4, dtype=dtype))
    for in_fp32 in (True, False):
        config = DistributedDataParallelConfig(grad_reduce_in_fp32=in_fp32)
        (buffer,) = plan_model(owned, config, shard_degree=1).buffers
        assert buffer.param_dtype is dtype
        assert buffer.grad_dtype is (torch.float32 if in_fp32 and dtype.itemsize == 2 else dtype)
