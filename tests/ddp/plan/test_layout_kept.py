"""Layouts stay as they are from version to version: an optimizer's ``state_dict`` fits the layout that it was saved in.

Each case has the digests of its layouts on 1, 2, 3, 4 and 8 ranks. Where a layout changes for good reason, its digest
is written anew, and CHANGELOG.md says that state dicts of before are not read.
"""

import hashlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.contract.main_grad import mark_delayed
from maingrad.ddp.plan.layout import GradPlan, ParamSpec, plan_gradients
from maingrad.ddp.plan.model_slice import slice_of_blocks
from maingrad.ddp.plan.owned_params import find_owned_params, plan_model

DEGREES = (1, 2, 3, 4, 8)
Rows = list[tuple[str, tuple[int, ...], dict[str, Any]]]


def layers(count: int, width: int, **options: Any) -> Rows:
    """The parameters of layers of a transformer with a hidden size that is no power of two, the last one first."""
    rows: Rows = []
    for layer in reversed(range(count)):
        rows += [
            (f"{layer}.down", (width, 3 * width), options),
            (f"{layer}.up", (3 * width, width), options),
            (f"{layer}.norm", (width,), options),
            (f"{layer}.out", (width, width), options),
            (f"{layer}.qkv", (width + 2 * (width // 3), width), options),
            (f"{layer}.bias", (width + 2 * (width // 3),), options),
        ]
    return rows


def rows_apart(rows: Rows) -> Rows:
    """No border cuts a row."""
    return [(name, shape, {**more, "atom": shape[-1]}) for name, shape, more in rows]


def each_other(rows: Rows, every: int, **options: Any) -> Rows:
    """Every so many-th parameter gets options."""
    return [
        (name, shape, {**more, **options} if index % every == 0 else more)
        for index, (name, shape, more) in enumerate(rows)
    ]


SMALL, PLAIN = layers(2, 12), layers(3, 30)
WIDTHS: Rows = [(f"{rows} x {width}", (rows, width), {}) for rows in (5, 12, 40) for width in (7, 32, 50, 129)]
STACKS: Rows = [
    ("experts.down", (5, 6, 24), {"atom": 144, "matrices": True}),
    ("gate", (5, 24), {}),
    ("experts.up", (5, 24, 6), {"atom": 144, "matrices": True}),
    ("others.up", (16, 8, 8), {"atom": 64, "matrices": True}),
    ("scale", (), {}),
    ("nothing", (0, 3), {}),
]
HALF = {"param_dtype": torch.bfloat16}

CASES: dict[str, tuple[Rows, dict[str, Any]]] = {
    "one bucket": (PLAIN, {}),
    "small parameters": (SMALL, {}),
    "each parameter": (PLAIN, {"bucket_numel": 1}),
    "buckets of 4000": (PLAIN, {"bucket_numel": 4000}),
    "four buckets": (PLAIN, {"num_buckets": 4}),
    "one bucket at most": (each_other(PLAIN, 5, own_bucket=True), {"num_buckets": 1}),
    "for bandwidth": (SMALL, {"pad_for_bus_bandwidth": True}),
    "rows": (rows_apart(PLAIN), {}),
    "rows in buckets": (rows_apart(PLAIN), {"bucket_numel": 4000}),
    "rows, little padding": (rows_apart(PLAIN), {"max_atom_padding": 0.002}),
    "rows of several widths": (rows_apart(WIDTHS), {}),
    "rows of several widths, apart": (rows_apart(WIDTHS), {"max_atom_padding": 0.0}),
    "blocks of rows": ([(name, shape, {"atom": 3 * shape[-1]}) for name, shape, _ in WIDTHS], {"bucket_numel": 3000}),
    "rows, no padding": (rows_apart(SMALL), {"max_atom_padding": 0.0}),
    "rows of some": (each_other(rows_apart(SMALL), 2, atom=1), {}),
    "long atoms": (each_other(PLAIN, 3, atom=256), {"bucket_numel": 9000}),
    "whole": (PLAIN, {"keep_params_whole": True}),
    "whole, small": (SMALL, {"keep_params_whole": True, "bucket_numel": 500}),
    "whole, four buckets": (PLAIN, {"keep_params_whole": True, "num_buckets": 4}),
    "whole, for bandwidth": (SMALL, {"keep_params_whole": True, "pad_for_bus_bandwidth": True}),
    "some whole": (each_other(PLAIN, 2, whole=True), {"bucket_numel": 4000}),
    "stacks": (STACKS, {}),
    "stacks in buckets": (STACKS + SMALL, {"bucket_numel": 700}),
    "delayed": (each_other(PLAIN, 2, delayed=True), {"bucket_numel": 4000}),
    "delayed, whole": (each_other(SMALL, 3, delayed=True), {"keep_params_whole": True, "num_buckets": 3}),
    "tied": (each_other(SMALL, 6, own_bucket=True), {"num_buckets": 5}),
    "two dtypes": (each_other(PLAIN, 3, **HALF), {"bucket_numel": 4000}),
    "two accumulators": (each_other(each_other(SMALL, 3, **HALF), 6, grad_dtype=torch.bfloat16), {}),
    "uneven slices": (PLAIN, {"bucket_numel": 4000, "held": {"1.up": (88, 30), "0.qkv": (49, 30), "2.bias": (1,)}}),
}


def digest(rows: Rows, options: Mapping[str, Any], degree: int | Mapping[str, int]) -> str:
    kinds = {"param_dtype": torch.float32, "grad_dtype": torch.float32}
    specs = [ParamSpec(name=name, shape=shape, **{**kinds, **more}) for name, shape, more in rows]
    return digest_of(plan_gradients(specs, shard_degree=degree, **options))


def digest_of(plan: GradPlan) -> str:
    lines = [
        f"{buffer.grid_name} {buffer.param_dtype} {buffer.grad_dtype} {layout.index} {layout.start} {layout.end} "
        f"{layout.shard_degree} {layout.keeps_params_whole} {[(slot.spec.name, slot.start) for slot in layout.slots]}"
        for buffer in plan.buffers
        for layout in buffer.buckets
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:8]


EXPECTED: dict[str, str] = {
    "one bucket": "3fd45f4a be83545e e6c683dc 0d593cb9 6e123c6b",
    "small parameters": "3c1508e7 b96e9ea4 9b2e816f 54f3015d 55168780",
    "each parameter": "e9570f56 3ebd9dbb b8a62acc 594376ff d02fe0a5",
    "buckets of 4000": "3428acdb 80d8398e d4c9e8e6 9895b23f c7424271",
    "four buckets": "3f4804b7 42270239 ad10320f 5979bb15 1cd92243",
    "one bucket at most": "a1646ba2 717daf12 575dc2a7 23adbe6f 9642a6b2",
    "for bandwidth": "cce0fbfe b3fc9d5a f8bebdf8 6f678f5d 644b7ea5",
    "rows": "3fd45f4a bf9d41b7 8a397238 6fdd63c8 83691e94",
    "rows in buckets": "3428acdb 7bc578d8 3637f447 32defa17 a63b85c4",
    "rows, little padding": "3fd45f4a bf9d41b7 8a397238 6fdd63c8 83691e94",
    "rows of several widths": "8e3f12e6 77331ada 55a1b62a ce98a2ef 32b39556",
    "rows of several widths, apart": "8e3f12e6 77331ada 55a1b62a ce98a2ef 32b39556",
    "blocks of rows": "c6728043 b11be5e2 c0585cbf ec133da5 7c6f42e6",
    "rows, no padding": "3c1508e7 b96e9ea4 2a8def08 54f3015d 78a6b7e1",
    "rows of some": "3c1508e7 b96e9ea4 2a8def08 54f3015d 55168780",
    "long atoms": "1a24305d 0df09a55 4d659037 7ec30a39 8d7b3420",
    "whole": "8b3ab7fe 97adfce3 e6f7be35 721fe9cc 98b031ca",
    "whole, small": "98933159 bdec55c7 ba6c7a90 d13b9cef 5debf0f7",
    "whole, four buckets": "ff0055d3 ef65052a c0f65b8c 10866691 98b031ca",
    "whole, for bandwidth": "e5eac55a 2ed75e8e 93d1b22f 57cb3ee8 d729b07d",
    "some whole": "ff5ab606 1813997a a34cd7b2 ca9555c3 e5a33dc7",
    "stacks": "cdcafa5f bb913907 a0be5d15 e2267d35 e7f5c229",
    "stacks in buckets": "14645cf2 77ce1bcf 398ae28c a19ec1a7 b5699224",
    "delayed": "a59f9ee4 0a905c80 a44929de 98d5eff4 a42e4469",
    "delayed, whole": "1a1c68bf 39fea5c0 12fa72ad 24158d7e aeb02720",
    "tied": "479153e5 0a9def0c 8645ce54 844ad101 631ca527",
    "two dtypes": "60dae1fe 909786c5 1a86d4e4 a3009160 c1e1a027",
    "two accumulators": "49e161d3 2cff1f13 9f995c1e d8d15ecf 4c2e2bb8",
    "uneven slices": "718d5494 0e23a436 983d6196 b1f82b54 8b9a61ca",
}
KINDS = "68b502ad c1020223 bc300388 b76de300 2f493276 05ac50e0 37b54259 51f20d0e"
PLANS = "45848158 ff6ed4e4 06d432e9 5da87315 6f403b3c ce41b950 402d00cf 9a7695f3 d882b62c 3b871937"
KEYS = "b835 d262 d262 58ac bc2f bc2f 61aa 3273 3273"


@pytest.mark.parametrize("name", CASES)
def test_layouts_are_as_they_were(name: str) -> None:
    rows, options = CASES[name]
    assert " ".join(digest(rows, options, degree) for degree in DEGREES) == EXPECTED[name]


def test_layouts_over_ranks_of_several_kinds_are_as_they_were() -> None:
    rows = each_other(each_other(PLAIN, 3, grid_name="expert"), 7, grid_name="slice")
    found = [
        digest(
            rows, {"bucket_numel": 4000, "keep_params_whole": whole}, {"dense": dense, "expert": experts, "slice": 3}
        )
        for dense, experts, whole in itertools.product((2, 4), (1, 2), (False, True))
    ]
    assert " ".join(found) == KINDS


class Several(nn.Module):
    """Parameters of all kinds: tied, frozen, delayed, experts', in half precision, without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 12), nn.Linear(12, 40)
        self.head.weight = self.embedding.weight
        self.half, self.frozen = nn.Linear(12, 30, dtype=torch.bfloat16), nn.Linear(12, 12).requires_grad_(False)
        self.experts = nn.Linear(12, 50)
        for param in self.experts.parameters():
            param.allreduce = False
        self.late, self.shared = nn.Linear(12, 24), nn.Linear(12, 18)
        mark_delayed(self.late.weight)
        self.shared.weight.shared_embedding = True
        self.stack = nn.Parameter(torch.zeros(3, 12, 9))
        self.empty, self.scale = nn.Parameter(torch.zeros(0, 5)), nn.Parameter(torch.zeros(()))


SHARDED: dict[str, Any] = {"use_distributed_optimizer": True}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bucket_size": 300},
    {"num_buckets": 3},
    {"grad_reduce_in_fp32": False},
    {"pad_buckets_for_high_nccl_busbw": True},
    {**SHARDED, "shard_atom": 24},
    {**SHARDED, "keep_params_whole": True},
    {**SHARDED, "keep_matrices_whole": ("stack", "half.weight")},
]


def test_plans_of_models_are_as_they_were() -> None:
    owned = [entry for entry in find_owned_params(Several()) if entry.param.requires_grad]
    assert [entry.name for entry in owned if entry.delayed] == ["late.weight"]
    found = []
    for options in OPTIONS:
        config = DistributedDataParallelConfig(**options)
        found.append(digest_of(plan_model(owned, config, shard_degree={"dense": 3, "expert": 2})))
    order = sorted((entry.name for entry in owned), key=lambda name: name[::-1])
    slices = {"head.bias": slice_of_blocks((120,), 0, [120], None, 0)._replace(largest=70)}
    for more in ({"backward_order": order}, {"slices": slices}):
        config = DistributedDataParallelConfig(bucket_size=300)
        found.append(digest_of(plan_model(owned, config, shard_degree=4, **more)))
    assert " ".join(found) == PLANS


def test_keys_of_optimizer_states_are_as_they_were() -> None:
    """A state dict that another version has saved is read by its key."""
    found = []
    for options in ({}, {"bucket_size": 300}, {**SHARDED, "keep_params_whole": True}):
        for groups in ([], [{"params": "*.bias"}], [{"params": "*.bias", "optimizer": torch.optim.SGD}]):
            config = DistributedDataParallelConfig(**options)
            optimizer = DistributedOptimizer(DistributedDataParallel(Several(), config), param_groups=groups)
            found.append(optimizer.state_dict()["layout"])
    assert [each.split("/")[0] for each in found] == ["AdamW", "AdamW", "SGD, AdamW"] * 3
    assert " ".join(each[-4:] for each in found) == KEYS
    assert len({each.split("/")[1] for each in found}) == 3


# ---- Drawn parameters, by a generator of our own: its numbers stay too. ----


def numbers(seed: int) -> Callable[[int], int]:
    """Draws numbers below a bound."""
    state = [seed]

    def below(bound: int) -> int:
        state[0] = (state[0] * 1103515245 + 12345) % 2**31
        return (state[0] >> 8) % bound

    return below


def drawn(seed: int) -> tuple[Rows, dict[str, Any]]:
    """Parameters, of which many have equal shapes: with rows or blocks of rows that stay whole, or some whole ones."""
    below, rows, options = numbers(seed), list[tuple[str, tuple[int, ...], dict[str, Any]]](), dict[str, Any]()
    count, kind = 3 + below(12), below(4)
    for index in range(count):
        shape = 1 + below(40), 1 + below(90)
        if index and below(2):
            shape = rows[below(index)][1]  # type: ignore[assignment]
        more: dict[str, Any] = {}
        if kind in (1, 2):
            more["atom"] = shape[1] * (1 + below(3) if kind == 2 else 1)
        if kind == 3 and below(2):
            more["whole"] = True
        rows.append((f"p{index}", shape, more))
    if kind == 0 and below(2):
        options["keep_params_whole"] = True
    size = below(4)
    if size == 1:
        options["bucket_numel"] = 500 + below(4000)
    if size == 2:
        options["num_buckets"] = 1 + below(4)
    if kind in (1, 2) and not below(3):
        options["max_atom_padding"] = 0.01 * below(4)
    return rows, options


def drawn_whole(seed: int) -> tuple[Rows, dict[str, Any]]:
    """Whole parameters, some delayed, some in buckets of their own."""
    below, rows, options = numbers(seed), list[tuple[str, tuple[int, ...], dict[str, Any]]](), dict[str, Any]()
    for index in range(6 + below(16)):
        shape = 1 + below(40), 1 + below(90)
        if index and below(3):
            shape = rows[below(index)][1]  # type: ignore[assignment]
        rows.append((f"p{index}", shape, {"delayed": below(6) == 0, "own_bucket": below(8) == 0}))
    size = below(3)
    if size == 1:
        options["bucket_numel"] = 500 + below(8000)
    if size == 2:
        options["num_buckets"] = 1 + below(6)
    return rows, {"keep_params_whole": True, **options}


DRAWN: dict[int, str] = {
    2: "1471842d e031205c 30265e57 efc0a0a7 d95c8418",
    3: "e2067371 56274a8c 1007c284 3fba0e02 7e7095e4",
    5: "14a1143c 90aebead a0f13ed7 2bb6d207 4e742ec8",
    7: "eda660fc 6ed04163 64e50cbc cc275bbe da011928",
    11: "bfd66948 8286f7e8 08a7c587 9bcbc975 d9816726",
    13: "20b8bbbe e85aabc9 baca151b a8b87106 133a1b31",
    19: "88a93626 b4388790 39d3568d 0bdf1dbb e3be34a7",
    20: "04a18780 8db25444 87a22ef5 56a68a20 d9bca941",
    28: "57ab8073 4282c547 685f6c50 d2fbe313 528d77c7",
    29: "023d6741 f2d3d8c8 40bf356a 3581beff 8b3dfd14",
    30: "8322625e 6161fe94 76243945 d4a1eee7 daa4d28e",
    31: "02da77b2 9bd863ce 1d1017ad 5535f90b 32280e6e",
    40: "e27ea269 ab46b9a3 4401b117 4d12025e 9a1b64fb",
    45: "16012ac9 ff0c4678 da3169d6 0d1dbc5e b66cffe6",
    46: "6805df17 ab7de08b 2e061666 541c6a04 e1fdfad8",
    51: "20b722c0 6a33d92d 417956ef 4c55601b b15d46dd",
    59: "c95d8907 9befc828 5ec34320 b8d1e98c cfad8dda",
}
DRAWN_WHOLE: dict[int, str] = {
    1001: "576a9697 279c6782 6aaf40b0 c7f24334 2710c09d",
    1008: "afb058bb d36fb0bf f40b43f6 6620a376 afd7bd53",
    1009: "218ba881 9db71cf9 094c1393 1bb8e463 209786a3",
    1010: "e0a8f91c 1ae29467 4bb7568f 58da9396 684875b2",
    1012: "528e93bc 58c3149e d5cbc759 d77ccc53 31cd45b5",
    1018: "b3369522 f30332da f86bc1a6 772a8bbe 59ededc0",
    1022: "ca7a6fa6 cec0330d 5aedca3a 322fc2d7 5ab74a81",
    1031: "7a4e6c2d 3fa4ee3d c5b524fe a772f1f2 0622604c",
}


@pytest.mark.parametrize("seed", DRAWN)
def test_layouts_of_drawn_parameters_are_as_they_were(seed: int) -> None:
    rows, options = drawn(seed)
    assert " ".join(digest(rows, options, degree) for degree in DEGREES) == DRAWN[seed]


@pytest.mark.parametrize("seed", DRAWN_WHOLE)
def test_layouts_of_drawn_whole_parameters_are_as_they_were(seed: int) -> None:
    rows, options = drawn_whole(seed)
    assert " ".join(digest(rows, options, degree) for degree in DEGREES) == DRAWN_WHOLE[seed]
