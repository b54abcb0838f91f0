"""Our modules under PyTorch's own ``fully_shard``: what plain PyTorch computes, or an error that says what to do.

Two gloo processes. Of every model there is a twin in plain PyTorch, sharded alike, with which gradients are compared.
"""

import copy
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from modules import ALL_FACTORIES, FEATURES, make, plain_forward
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, wgrad_target
from maingrad.launch import simulate
from maingrad.te_integration import Linear, WgradQueue, convert_linears, delayed_wgrad

RANKS = 2
PRODUCTS = {kind: 2 if "MLP" in kind else 1 for kind in ALL_FACTORIES}


class Setting(NamedTuple):
    """How a model is sharded and trained."""

    fuse: bool = True
    keep: bool = False
    """Parameters stay gathered from forward to backward, and between the backwards of one step."""
    bf16: bool = False
    """Computed in bf16, gradients summed and reduced in fp32."""
    recompute: str = "none"
    microbatches: int = 3
    reduce_each: bool = False
    """Every microbatch is reduced; otherwise the last, which also has what the others accumulated."""


PLAIN = Setting()


class Twin(nn.Module):
    """What ``module`` should compute, written out in plain PyTorch, over a copy of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)

    def forward(self, x: Tensor) -> Tensor:
        return plain_forward(self.module, dict(self.module.named_parameters()), x)


class Unit(nn.Module):
    """What is sharded together; its module recomputed as the setting says."""

    def __init__(self, module: nn.Module, recompute: str = "none") -> None:
        super().__init__()
        self.module, self.recompute = module, recompute

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute == "none":
            return self.module(x).clone()  # FSDP2 warns of views
        return checkpoint(self.module, x, use_reentrant=self.recompute == "reentrant").clone()


def shard(model: nn.Module, setting: Setting = PLAIN, mesh: Any = None) -> nn.Module:
    """Each ``Unit`` in it, then the model."""
    mesh = mesh or dist.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if setting.bf16 else MixedPrecisionPolicy()
    options = {"mesh": mesh, "reshard_after_forward": not setting.keep, "mp_policy": policy}
    for module in list(model.modules()):
        if isinstance(module, Unit):
            fully_shard(module, **options)
    return fully_shard(model, **options)


def batch(index: int) -> Tensor:
    """[2, 6, FEATURES], of this rank."""
    seed = 100 * index + dist.get_rank()
    return torch.randn(2, 6, FEATURES, generator=torch.Generator().manual_seed(seed))


def accumulate(model: Any, setting: Setting, step: int) -> None:
    """The backwards of one step."""
    for index in range(setting.microbatches):
        last = index == setting.microbatches - 1
        model.set_requires_gradient_sync(last or setting.reduce_each)
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last or not setting.keep)
        (model(batch(10 * step + index)).float().square().mean() / setting.microbatches).backward()


def worst_difference(model: nn.Module, twin: nn.Module) -> float:
    """Largest norm of the difference of two gradients over the norm, over all parameters."""
    worst = 0.0
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.shape == theirs.shape, name
        assert (ours.grad is None) is (theirs.grad is None) is (not ours.requires_grad), name
        if ours.grad is not None:
            expected = theirs.grad.full_tensor()
            difference = (ours.grad.full_tensor() - expected).norm() / expected.norm().clamp(min=1e-6)
            worst = max(worst, difference.item())
    return worst


@contextmanager
def counted_writes() -> Iterator[list[bool]]:
    """One entry for each product that adds to an accumulator: of one weight, or of all experts."""
    dense, grouped, writes = wgrad_target.wgrad_accumulate, wgrad_target.grouped_wgrad_accumulate, []

    def count_dense(*args: Any, overwrite: bool = False) -> None:
        writes.append(overwrite)
        dense(*args, overwrite=overwrite)

    def count_grouped(*args: Any, overwrite: Any = False) -> None:
        if overwrite is not True:  # which is how gradients of their own are made for autograd
            writes.append(False if overwrite is False else any(overwrite))
        grouped(*args, overwrite=overwrite)

    wgrad_target.wgrad_accumulate, wgrad_target.grouped_wgrad_accumulate = count_dense, count_grouped
    try:
        yield writes
    finally:
        wgrad_target.wgrad_accumulate, wgrad_target.grouped_wgrad_accumulate = dense, grouped


def train_beside_twin(kind: str, setting: Setting) -> tuple[float, list[bool]]:
    """Two steps; the worst difference of gradients and of their norms, and what was written by fused products."""
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


@pytest.mark.sampled(29)
@pytest.mark.parametrize("kind", ALL_FACTORIES)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: "-".join(map(str, setting)))
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


CORNERS = {"tied": (Tied, 4), "twice": (Twice, 6), "frozen": (frozen, 2), "sliced": (sliced, 6)}
CORNERS |= {"checkpointed": (checkpointed, 4), "converted": (converted, 4)}
"""How it is built, and how many fused products of a step of three microbatches add to something: those of the last two,
but for a unit that runs twice and is reduced in between."""


def train_corner(name: str, bf16: bool, mesh_shape: tuple[int, ...] = (RANKS,)) -> tuple[float, list[bool]]:
    """Two steps; the worst difference of gradients, and what was written by fused products."""
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
def test_gradients_of_irregular_models(name: str, bf16: bool):
    for worst, writes in run_ranks(train_corner, RANKS, name, bf16):
        assert worst < (0.03 if bf16 else 1e-6)
        assert writes == [False] * 2 * CORNERS[name][1]


@pytest.mark.parametrize("name", CORNERS)
def test_replicas_of_shards(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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


# ---- What is refused. ----


def raised_by(attempt: Callable[[], Any]) -> str:
    """The error's type and text."""
    try:
        attempt()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def delay(kind: str, fuse: bool, own_queue: bool) -> tuple[str, float]:
    """The error of a forward that delays; the difference of gradients after one that does not."""
    module = make(kind, fuse=fuse, delay=own_queue, name="the layer")
    model, twin = (shard(nn.Sequential(Unit(each))) for each in (module, Twin(module)))
    queue = WgradQueue()
    with delayed_wgrad(queue):
        error = raised_by(lambda: model(batch(0)))
    assert len(queue) == 0
    assert not module.need_backward_dw()
    if own_queue:
        return error, 0.0
    for each in (model, twin):
        each(batch(0)).square().mean().backward()
    return error, worst_difference(model, twin)


@pytest.mark.parametrize("own_queue", [True, False])
@pytest.mark.parametrize("kind", ALL_FACTORIES)
def test_delayed_weight_gradients_are_refused_in_forward(kind: str, own_queue: bool):
    for fuse in (True, False):
        for error, difference in run_ranks(delay, RANKS, kind, fuse, own_queue):
            assert error.startswith("RuntimeError: the layer")
            assert "torch.distributed.fsdp.fully_shard" in error
            assert "without delay_wgrad_compute=True" in error
            assert difference < 1e-6


def delay_tied_to_plain() -> str:
    """FSDP2 knows the weight by the module that comes first; ours is the second."""
    plain, ours = nn.Linear(FEATURES, FEATURES), make("Linear", fuse=False, delay=True)
    ours.weight = plain.weight
    model = shard(nn.Sequential(plain, ours))
    return raised_by(lambda: model(batch(0)))


def wrap_sharded() -> str:
    model = shard(nn.Sequential(make("Linear")))
    return raised_by(lambda: DistributedDataParallel(model, DistributedDataParallelConfig()))


def shard_wrapped() -> str:
    model = nn.Sequential(make("Linear"))
    wrapped = DistributedDataParallel(model, DistributedDataParallelConfig())
    shard(model)
    return raised_by(lambda: wrapped(batch(0)))


def use_outside_its_unit() -> str:
    """The weight is this rank's shard there."""
    model = shard(nn.Sequential(make("Linear")))
    return raised_by(lambda: model[0](batch(0)))


@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        (delay_tied_to_plain, "RuntimeError: Linear.*delayed weight gradient under torch.distributed.fsdp.fully_shard"),
        (wrap_sharded, "ValueError: parameter '0.weight' is a DTensor"),
        (shard_wrapped, "RuntimeError: parameter '0.*was replaced after wrapping"),
        (use_outside_its_unit, "RuntimeError: .* mixed torch.Tensor and DTensor"),
    ],
)
def test_what_cannot_be_is_an_error(attempt: Callable[[], str], text: str):
    for error in run_ranks(attempt, RANKS):
        assert re.match(text, error), error


def convert_late() -> tuple[tuple[str, ...], dict[str, str], float]:
    """Converted when it is sharded already."""
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(FEATURES, 32), nn.GELU(), nn.Linear(32, FEATURES))
    model, twin = (shard(each) for each in (copy.deepcopy(plain), plain))
    outcome = convert_linears(model)
    for each in (model, twin):
        each(batch(0)).square().mean().backward()
    return outcome.converted, outcome.skipped, worst_difference(model, twin)


def test_converting_comes_before_sharding():
    for done, skipped, difference in run_ranks(convert_late, RANKS):
        assert done == ()
        assert list(skipped) == ["0", "2"]
        assert all("DTensor" in reason for reason in skipped.values())
        assert difference == 0
