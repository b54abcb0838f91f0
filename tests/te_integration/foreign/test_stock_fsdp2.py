"""Our modules under PyTorch's own ``fully_shard`` compute what plain PyTorch computes.

The tests use two gloo processes. Every model's gradients are compared with those of a plain twin, sharded alike.
"""

import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from modules import ALL_FACTORIES, FEATURES, make
from stock_fsdp2 import PLAIN, Setting, Twin, Unit, accumulate, counted_writes, shard, worst_difference
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from maingrad.launch import simulate
from maingrad.te_integration import Linear, convert_linears

RANKS = 2
PRODUCTS = {kind: 2 if "MLP" in kind else 1 for kind in ALL_FACTORIES}


def train_beside_twin(kind: str, setting: Setting) -> tuple[float, list[bool]]:
    """Train two steps; returns the largest differences of gradients and of norms, and what fused products wrote."""
    modules = [make(kind, fuse=setting.fuse, seed=seed) for seed in (1, 2)]
    first = nn.Linear(FEATURES, FEATURES)
    twin = nn.Sequential(copy.deepcopy(first), *(Unit(Twin(each), setting.recompute) for each in modules))
    model = nn.Sequential(first, *(Unit(each, setting.recompute) for each in modules))
    both = [shard(each, setting) for each in (model, twin)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in both]
    worst, writes = 0.0, []
    for step in range(2):
        with counted_writes() as written:
            accumulate(model, setting, step)
        writes += written
        accumulate(twin, setting, step)
        worst = max(worst, worst_difference(model, twin))
        ours, theirs = (nn.utils.clip_grad_norm_(each.parameters(), 0.1).full_tensor() for each in both)
        worst = max(worst, abs(ours / theirs - 1).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return worst, writes


SETTINGS = [
    Setting(fuse, keep, bf16, recompute, reduce_each=reduce_each)
    for recompute, fuse, reduce_each, bf16, keep in itertools.product(
        ("none", "not reentrant", "reentrant"), (True, False), (False, True), (False, True), (False, True)
    )
]


@pytest.mark.parametrize("kind", ALL_FACTORIES)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting)))
@pytest.mark.sampled(1)
def test_gradients_are_those_of_plain_pytorch(kind: str, setting: Setting):
    for worst, writes in run_ranks(train_beside_twin, RANKS, kind, setting):
        assert worst < (0.03 if setting.bf16 else 1e-6)
        later = 0 if setting.reduce_each or not setting.fuse else 2 * (setting.microbatches - 1)
        assert writes == [False] * later * 2 * PRODUCTS[kind], "from the second microbatch on, each product adds"


# ---- Models that are less regular; the twin is the same model, unfused. ----


class Tied(nn.Module):
    """One weight, used by two fused modules and by ``nn.Linear``."""

    def __init__(self, fuse: bool) -> None:
        super().__init__()
        fused = [make("Linear", fuse=fuse) for _ in range(2)]
        self.layers = nn.ModuleList([*fused, nn.Linear(FEATURES, FEATURES)])
        for layer in self.layers:
            layer.weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Twice(nn.Module):
    """A unit that runs twice in each forward."""

    def __init__(self, fuse: bool) -> None:
        super().__init__()
        self.unit = Unit(make("LayerNormMLP", fuse=fuse))

    def forward(self, x: Tensor) -> Tensor:
        return self.unit(x + self.unit(x))


class TiedExpert(nn.Module):
    """One expert of three is a layer of its own as well, which the first of three microbatches uses alone.

    In the second microbatch that expert has an accumulator, the other experts have none, and one product computes all.
    """

    def __init__(self, fuse: bool) -> None:
        super().__init__()
        self.experts = make("GroupedLinear", fuse=fuse)
        self.alone = nn.Linear(FEATURES, FEATURES)
        self.alone.weight = self.experts.weight0
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return self.alone(x) if self.num_forwards % 3 == 1 else self.experts(x)


def tied_expert(fuse: bool) -> nn.Module:
    """See above."""
    return Unit(TiedExpert(fuse))


def frozen(fuse: bool) -> nn.Module:
    """One of two weights is frozen, its bias is not."""
    module = make("LayerNormMLP", fuse=fuse)
    module.fc1_weight.requires_grad_(False)
    return Unit(module)


def sliced(fuse: bool) -> nn.Module:
    """A weight of three parameters."""
    module = make("Linear", fuse=fuse, parameters_split={"query": 3, "key": 3, "value": 2})
    return Unit(module)


def checkpointed(fuse: bool) -> nn.Module:
    """A module that recomputes itself."""
    return Unit(make("LayerNormMLP", fuse=fuse, checkpoint=True))


def converted(fuse: bool) -> nn.Module:
    """A plain model after ``convert_linears``."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, FEATURES))
    if fuse:
        assert len(convert_linears(model).converted) == 2
    return Unit(model)


CORNERS = {"tied": (Tied, 4), "twice": (Twice, None), "frozen": (frozen, 2), "sliced": (sliced, 6)}
CORNERS |= {"checkpointed": (checkpointed, 4), "converted": (converted, 4), "a tied expert": (tied_expert, 2)}
"""How it is built, and how many fused products of a step of three microbatches add to something: those of the last two.
Versions of torch differ in when they reduce a unit that runs twice: 6 or 8."""


def train_corner(name: str, bf16: bool, mesh_shape: tuple[int, ...] = (RANKS,)) -> tuple[float, list[bool]]:
    """Train two steps; returns the largest difference of gradients, and what fused products wrote."""
    build, _ = CORNERS[name]
    names = ("outer", "inner")[-len(mesh_shape) :]
    mesh = dist.init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    setting = Setting(bf16=bf16)
    model, twin = (shard(nn.Sequential(build(fuse)), setting, mesh) for fuse in (True, False))
    worst, writes = 0.0, []
    for step in range(2):
        with counted_writes() as written:
            accumulate(model, setting, step)
        writes += written
        accumulate(twin, setting, step)
        worst = max(worst, worst_difference(model, twin))
        for each in (model, twin):
            each.zero_grad()
    return worst, writes


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.sampled(2)
def test_gradients_of_irregular_models(name: str, bf16: bool):
    for worst, writes in run_ranks(train_corner, RANKS, name, bf16):
        assert worst < (0.03 if bf16 else 1e-6)
        expected = CORNERS[name][1]
        assert len(writes) in ((12, 16) if expected is None else (2 * expected,))
        assert not any(writes), "each of them adds"


@pytest.mark.parametrize("name", CORNERS)
@pytest.mark.sampled(1)
def test_replicas_of_shards(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of FSDP2, of units that return views
        for worst, writes in simulate(train_corner, 4, name, False, (2, 2)):
            assert worst < 1e-6
            assert writes
            assert not any(writes), "each of them adds"


def sum_of_three(fuse: bool) -> float:
    """In bf16 with an fp32 sum: gradients 0, 257 and 0, where bf16 has 256 and 258."""
    model = Linear(1, 2, bias=False, fuse_wgrad_accumulation=fuse)
    model = fully_shard(
        model,
        mesh=dist.init_device_mesh("cpu", (RANKS,)),
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    for index, rows in enumerate(([0.0, 0.0], [256.0, 1.0], [0.0, 0.0])):
        model.set_requires_gradient_sync(index == 2)
        model(torch.tensor(rows)[:, None]).sum().backward()
    return model.weight.grad.to_local().item()


def test_later_microbatches_are_summed_without_rounding():
    assert run_ranks(sum_of_three, RANKS, False) == [256.0] * RANKS
    assert run_ranks(sum_of_three, RANKS, True) == [257.0] * RANKS


def reduce_in_bf16() -> tuple[float, list[bool]]:
    """fp32 parameters whose gradients FSDP2 sums and reduces in bf16."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    model, twin = (fully_shard(nn.Sequential(converted(fuse)), mesh=mesh, mp_policy=policy) for fuse in (True, False))
    with counted_writes() as writes:
        accumulate(model, PLAIN, 0)
    accumulate(twin, PLAIN, 0)
    return worst_difference(model, twin), writes


def test_autograd_adds_where_the_sum_has_another_dtype():
    assert run_ranks(reduce_in_bf16, RANKS) == [(0.0, [])] * RANKS


def train_compiled() -> tuple[float, list[bool]]:
    """Fused layers are graph breaks."""
    model, twin = (shard(nn.Sequential(Unit(make("LayerNormMLP", fuse=fuse)))) for fuse in (True, False))
    model.compile(backend="eager")
    with counted_writes() as writes:
        accumulate(model, PLAIN, 0)
    accumulate(twin, PLAIN, 0)
    return worst_difference(model, twin), writes


@pytest.mark.slow
def test_compiled():
    for worst, writes in run_ranks(train_compiled, RANKS):
        assert worst < 1e-6
        assert writes == [False] * 4
