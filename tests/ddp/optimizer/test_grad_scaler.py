"""Loss scaling: all ranks skip the same steps, a scale leaves no trace, the host waits for no device."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from host_syncs import HostSync, NoHostSync
from loops import assert_same, weights, wrap
from stock_steps import batch_of, loss_of, make_net
from summed_by_hand import tree_sum
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, DistributedOptimizer, GradScaler, clip_grad_norm
from maingrad.launch import simulate

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HYPER: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# ---- The same as torch's own. ----

STEPS = 12
SCALE = 2.0**24


class History(NamedTuple):
    weights: list[dict[str, Tensor]]
    scales: list[float]


def forward(model: nn.Module, step: int, rank: int, dtype: torch.dtype) -> Tensor:
    """fp16 parameters, or fp32 ones under autocast."""
    with torch.autocast("cpu", FP16, enabled=dtype is FP32):
        return loss_of(model, batch_of(step, rank, dtype)).float()


def plain_fp16(dtype: torch.dtype, ranks: int) -> History:
    """torch's scaler and AdamW, on masters that the test keeps."""
    model = make_net(dtype)
    masters = {name: nn.Parameter(param.detach().float()) for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), **HYPER, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=3)
    history = History([], [])
    for step in range(STEPS):
        grads: list[dict[str, Tensor]] = []
        for rank in range(ranks):
            model.zero_grad()
            scaler.scale(forward(model, step, rank, dtype)).backward()
            grads.append({name: param.grad.float() * (1 / ranks) for name, param in model.named_parameters()})
        for name, master in masters.items():
            master.grad = tree_sum([grad[name] for grad in grads])
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
        history.weights.append(weights(model))
        history.scales.append(scaler.get_scale())
    return history


def ours_fp16(dtype: torch.dtype, config: dict[str, Any]) -> History:
    ddp = wrap(make_net(dtype), **config)
    optimizer = DistributedOptimizer(ddp, **HYPER)
    scaler = GradScaler("cpu", init_scale=SCALE, growth_interval=3)
    history = History([], [])
    for step in range(STEPS):
        scaler.scale(forward(ddp, step, rank_of(), dtype)).backward()
        ddp.finish_grad_sync()
        scaler.step(optimizer)
        scaler.update()
        ddp.zero_grad_buffer()
        history.weights.append(weights(ddp))
        history.scales.append(scaler.get_scale())
    return history


SHARDED: dict[str, Any] = {"use_distributed_optimizer": True, "bucket_size": 300}


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize(("ranks", "config"), [(1, {}), (3, SHARDED), (2, {**SHARDED, "overlap_param_gather": True})])
@pytest.mark.sampled(2)
def test_training_is_torchs_own_scaled_training(ranks: int, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Starts with a scale that overflows: steps are skipped, the scale falls, and rises again without Inf."""
    expected = plain_fp16(dtype, ranks)
    moves = [after / before for before, after in zip([SCALE, *expected.scales], expected.scales, strict=False)]
    assert {0.5, 1.0} <= set(moves) and 2.0 in moves, f"nothing was skipped or grown: {expected.scales}"
    for ours in simulate(ours_fp16, ranks, dtype, config):
        assert ours.scales == expected.scales
        for mine, theirs in zip(ours.weights, expected.weights, strict=True):
            assert_same(mine, theirs)


# ---- Inf in one shard. ----


class Way(NamedTuple):
    """A way of taking a step."""

    options: dict[str, Any]
    config: dict[str, Any] | None = None
    dtype: torch.dtype = FP32
    clip: float | None = None
    unscale: bool = False


WAYS: dict[str, Way] = {
    "fused": Way({}),
    "fused, clipping inside": Way({"max_grad_norm": 0.05}),
    "fused, unscaled first": Way({}, unscale=True),
    "fused, unscaled and clipped first": Way({}, clip=0.05, unscale=True),
    "fused, unscaled first, clipping inside": Way({"max_grad_norm": 0.05}, unscale=True),
    "fused, gathers overlap": Way({}, {"overlap_param_gather": True}),
    "SGD": Way({"optimizer_class": torch.optim.SGD, "momentum": 0.9, "max_grad_norm": 0.05}),
    "unfused AdamW": Way({"fused": False, "max_grad_norm": 0.05}),
    "unfused RMSprop": Way({"optimizer_class": torch.optim.RMSprop}),
    "unfused RMSprop, clipped first": Way({"optimizer_class": torch.optim.RMSprop}, clip=0.05, unscale=True),
    "bf16 parameters": Way({"max_grad_norm": 0.05}, dtype=BF16),
    "bf16 gradients": Way({}, {"grad_reduce_in_fp32": False}, BF16),
    "bf16 gradients, clipping inside": Way({"max_grad_norm": 0.05}, {"grad_reduce_in_fp32": False}, BF16),
    "bf16 gradients, unscaled and clipped first": Way({}, {"grad_reduce_in_fp32": False}, BF16, 0.05, True),
    "bf16 gradients, unscaled first, clipping inside": Way(
        {"max_grad_norm": 0.05}, {"grad_reduce_in_fp32": False}, BF16, None, True
    ),
    "bf16 gradients, unfused": Way(
        {"fused": False, "max_grad_norm": 0.05}, {"grad_reduce_in_fp32": False}, BF16, None, True
    ),
}


def take_step(ddp: DistributedDataParallel, optimizer: DistributedOptimizer, scaler: Any, way: Way, step: int) -> None:
    """Take one step; ``scaler`` None: without a scaler."""
    loss = loss_of(ddp, batch_of(step, rank_of(), way.dtype))
    (loss if scaler is None else scaler.scale(loss)).backward()
    ddp.finish_grad_sync()
    if scaler is not None and way.unscale:
        scaler.unscale_(optimizer)
    if way.clip is not None:
        clip_grad_norm(ddp, way.clip)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def held(optimizer: DistributedOptimizer) -> dict[str, Tensor]:
    """Copies of everything that a step changes on this rank."""
    found = {}
    for held in optimizer.slices:
        found[f"{held.name}: master"] = held.master.clone()
        for key, value in (*held.state().items(), *held.scalars().items()):
            found[f"{held.name}: {key}"] = torch.as_tensor(value).clone()
    return found


def inf_in_one_shard(
    way: Way, config: dict[str, Any], place: str, offender: int, value: float = math.inf
) -> tuple[bool, int]:
    """Two good steps, one with Inf, a good one; returns whether this rank's shard had the Inf, and the steps."""
    ddp = wrap(make_net(way.dtype), **config, **(way.config or {}))
    optimizer = DistributedOptimizer(ddp, lr=0.02, **way.options)
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    param = dict(ddp.module.named_parameters())[place]
    poisoned = [False]

    def poison(grad: Tensor) -> Tensor:
        if poisoned[0] and rank_of() == offender:
            grad = grad.clone()
            grad.view(-1)[-1] = value
        return grad

    param.register_hook(poison)
    for step in range(2):
        take_step(ddp, optimizer, scaler, way, step)
        ddp.zero_grad_buffer()
    before, state = weights(ddp), held(optimizer)
    poisoned[0] = True
    take_step(ddp, optimizer, scaler, way, 2)
    has_inf = not all(grad.isfinite().all() for grad in ddp.reduced_grads())
    assert_same(weights(ddp), before)
    assert_same(held(optimizer), state)
    assert scaler.get_scale() == 2.0**9
    ddp.zero_grad_buffer()
    poisoned[0] = False
    take_step(ddp, optimizer, scaler, way, 3)
    assert scaler.get_scale() == 2.0**9
    assert not torch.equal(weights(ddp)["0.weight"], before["0.weight"]), "the next step goes on"
    steps = {int(held.scalars()["step"]) for held in optimizer.slices if "step" in held.scalars()}
    assert len(steps) <= 1
    return has_inf, steps.pop() if steps else 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(4)
def test_inf_in_one_shard_skips_the_step_on_all_ranks(way: str) -> None:
    """The Inf is in rank 2's gradient of the parameter that backward reaches first, so only in rank 0's shard."""
    found = simulate(inf_in_one_shard, 3, WAYS[way], {"use_distributed_optimizer": True}, "3.bias", 2)
    inside = "max_grad_norm" in WAYS[way].options or WAYS[way].clip is not None
    assert [has_inf for has_inf, _ in found] == [True, inside and found[1][0], inside and found[2][0]]
    assert [steps for _, steps in found] == [3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("way", WAYS)
def test_processes_skip_alike_too(way: str, value: float) -> None:
    """Over gloo."""
    config = {"use_distributed_optimizer": True}
    for _, steps in run_ranks(inf_in_one_shard, 2, WAYS[way], config, "3.bias", 1, value):
        assert steps == 3


def test_unscaling_of_any_fp16_gradient_is_refused() -> None:
    """Where others are fp32, too."""
    for dtypes in ((FP16, FP32), (FP32, FP16)):
        ddp = wrap(nn.ParameterList(torch.ones(3, dtype=dtype) for dtype in dtypes), grad_reduce_in_fp32=False)
        scaler = GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(ValueError, match=r"unscale_\(\) of fp16 gradients would lose the small ones"):
            scaler.unscale_(DistributedOptimizer(ddp))


def test_a_search_for_inf_says_1_however_many_ranks_have_it() -> None:
    def on_each_rank() -> list[float]:
        ddp = wrap(make_net(), use_distributed_optimizer=True)
        optimizer = DistributedOptimizer(ddp)
        found = []
        for bad in (0, 2, 3):
            loss = loss_of(ddp, batch_of(0, rank_of(), FP32)) * (math.inf if rank_of() < bad else 1.0)
            loss.backward()
            found.append(optimizer.unscale_grads(torch.tensor(1.0)).item())
            optimizer.zero_grad()
        return found

    assert simulate(on_each_rank, 3) == [[0.0, 1.0, 1.0]] * 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(2)
def test_training_goes_on_after_nan(way: str) -> None:
    """Clipping multiplies everything by a NaN coefficient, padding too, which no backward overwrites."""
    for _, steps in simulate(
        inf_in_one_shard, 3, WAYS[way], {"use_distributed_optimizer": True}, "3.bias", 2, math.nan
    ):
        assert steps == 3


@pytest.mark.parametrize("place", ["3.bias", "0.weight"])
@pytest.mark.parametrize(
    "config",
    [{}, {**SHARDED, "num_distributed_optimizer_instances": 2}, {**SHARDED, "num_distributed_optimizer_instances": 4}],
    ids=["whole", "two instances", "four instances"],
)
@pytest.mark.sampled(2)
def test_all_ranks_skip_alike_under_every_placement(config: dict[str, Any], place: str) -> None:
    for _, steps in simulate(inf_in_one_shard, 4, Way({}), config, place, 1):
        assert steps == 3


# ---- A scale leaves no trace. ----


@pytest.mark.parametrize("place", ["3.bias", "0.weight"])
def test_bf16_gradients_of_every_bucket_are_searched(place: str) -> None:
    """The first parameter that backward reaches, and the last: they are in different buckets."""
    way = WAYS["bf16 gradients, unscaled first, clipping inside"]
    for _, steps in simulate(inf_in_one_shard, 2, way, {"bucket_size": 300}, place, 1):
        assert steps == 3


def with_and_without(way: Way) -> None:
    """Scales are powers of two, which are exact: the weights are bitwise those of training without a scaler."""
    runs = []
    for scaler in (None, GradScaler("cpu", init_scale=2.0**12, growth_interval=2)):
        ddp = wrap(make_net(way.dtype), use_distributed_optimizer=True, bucket_size=300, **(way.config or {}))
        optimizer = DistributedOptimizer(ddp, lr=0.02, **way.options)
        for step in range(4):
            take_step(ddp, optimizer, scaler, way, step)
            ddp.zero_grad_buffer()
        runs.append((weights(ddp), optimizer.grad_norm))
        assert scaler is None or scaler.get_scale() == 2.0**14
    (plain, plain_norm), (scaled, scaled_norm) = runs
    assert_same(scaled, plain)
    assert (plain_norm is None) is (scaled_norm is None) is ("max_grad_norm" not in way.options)
    assert plain_norm is None or torch.equal(plain_norm, scaled_norm)
    if plain_norm is not None:
        assert plain_norm > 0.05, "clipping has nothing to do"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled(2)
def test_scaled_training_is_bitwise_unscaled_training(way: str) -> None:
    simulate(with_and_without, 2, WAYS[way])


def unscaled_grads(way: Way) -> None:
    results = []
    for scaler in (None, GradScaler("cpu", init_scale=2.0**12)):
        ddp = wrap(make_net(way.dtype), use_distributed_optimizer=True, **(way.config or {}))
        optimizer = DistributedOptimizer(ddp, **way.options)
        loss = loss_of(ddp, batch_of(0, rank_of(), way.dtype))
        (loss if scaler is None else scaler.scale(loss)).backward()
        ddp.finish_grad_sync()
        if scaler is not None:
            scaler.unscale_(optimizer)
        results.append(([grad.clone() for grad in ddp.reduced_grads()], clip_grad_norm(ddp, 1.0)))
    (plain, norm), (unscaled, unscaled_norm) = results
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(unscaled, plain, strict=True))
    assert torch.equal(norm, unscaled_norm)


@pytest.mark.parametrize("way", ["fused", "bf16 parameters", "bf16 gradients"])
def test_unscaling_leaves_unscaled_gradients_where_they_are_read(way: str) -> None:
    simulate(unscaled_grads, 2, WAYS[way])


class _UniformLists(TorchDispatchMode):
    """Takes all gradients of a call for the first one's dtype, and refuses bf16, as torch's CUDA kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_:
            (dtype,) = {grad.dtype for grad in args[0]}
            self.dtypes.append(dtype)
        return func(*args, **(kwargs or {}))


class _SeveralDtypes(nn.Module):
    """All gradients are 4, plus ``value`` in the first element of the parameter with the number ``place``."""

    def __init__(self, value: float, place: int, dtypes: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.params = nn.ParameterList([torch.ones(100, dtype=dtype) for dtype in dtypes])
        self.value, self.place = value, place

    def forward(self) -> Tensor:
        total = sum((param.float() * 4).sum() for param in self.params)
        return total + self.params[self.place][0].float() * self.value if self.value else total


@pytest.mark.parametrize(("value", "place"), [(0.0, 0), (math.inf, 0), (math.inf, 1)])
@pytest.mark.parametrize("dtypes", [(FP32, BF16, FP32), (BF16, FP32, BF16)], ids=["fp32 first", "bf16 first"])
@pytest.mark.sampled(6)
def test_gradients_of_several_dtypes_are_unscaled_apart(
    dtypes: Sequence[torch.dtype], value: float, place: int
) -> None:
    """Inf in a gradient of one dtype counts, though those of the other are finite."""
    ddp = wrap(
        _SeveralDtypes(value, place, dtypes), use_distributed_optimizer=True, grad_reduce_in_fp32=False, bucket_size=1
    )
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(ddp()).backward()
    ddp.finish_grad_sync()
    with _UniformLists() as lists:
        scaler.unscale_(optimizer)
    assert lists.dtypes == [FP32]
    assert all((param.main_grad[1:] == 4).all() for param in ddp.module.params)
    before = weights(ddp)
    scaler.step(optimizer)
    assert torch.equal(weights(ddp)["params.0"], before["params.0"]) is (value != 0)


def test_half_precision_gradients_are_unscaled_by_the_step_alone() -> None:
    """As in torch: small fp16 gradients would vanish if they were unscaled in place."""
    ddp = wrap(make_net(FP16), grad_reduce_in_fp32=False)
    optimizer = DistributedOptimizer(ddp, max_grad_norm=0.05)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    way = Way({}, dtype=FP16)
    before = weights(ddp)
    take_step(ddp, optimizer, scaler, way, 0)
    assert optimizer.grad_norm is not None and 0.05 < optimizer.grad_norm < 50, "of unscaled gradients"
    assert not torch.equal(weights(ddp)["3.bias"], before["3.bias"])
    ddp.zero_grad_buffer()
    scaler.scale(loss_of(ddp, batch_of(1, 0, FP16))).backward()
    ddp.finish_grad_sync()
    with pytest.raises(ValueError, match=r"unscale_\(\) of fp16 gradients.*grad_reduce_in_fp32=True.*step\(\)"):
        scaler.unscale_(optimizer)


# ---- What is refused. ----


@pytest.mark.in_turn
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_torchs_own_scaler_skips_the_same_steps_on_all_ranks(sharded: bool, unscale: bool) -> None:
    """It looks for Inf in the masters' gradients, of which each rank has its own: one rank's overflow is everyone's."""

    def train(make_scaler: Callable[..., Any]) -> tuple[dict[str, Tensor], float]:
        ddp = wrap(make_net(), use_distributed_optimizer=sharded)
        optimizer = DistributedOptimizer(ddp)
        scaler = make_scaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(4):
            loss = loss_of(ddp, batch_of(step, dist.get_rank(), FP32))
            scaler.scale(loss * (math.inf if step == 1 and dist.get_rank() == 1 else 1.0)).backward()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return weights(ddp), scaler.get_scale()

    for found, scale in simulate(train, 2, torch.amp.GradScaler):
        expected, wanted_scale = simulate(train, 2, GradScaler)[0]
        assert scale == wanted_scale
        assert_same(found, expected)


@pytest.mark.parametrize("config", [{}, SHARDED, {**SHARDED, "overlap_grad_reduce": True}], ids=str)
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.sampled(6)
def test_scaled_steps_finish_the_iteration(unscale: bool, config: dict[str, Any]) -> None:
    def train(finish: bool) -> dict[str, Tensor]:
        ddp = wrap(make_net(), **config)
        optimizer = DistributedOptimizer(ddp)
        scaler = GradScaler("cpu", init_scale=2.0**10)
        for step in range(3):
            scaler.scale(loss_of(ddp, batch_of(step, dist.get_rank(), FP32))).backward()
            if finish:
                ddp.finish_grad_sync()
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        optimizer.finish_param_sync()
        return weights(ddp)

    before = weights(make_net())
    for found, expected in zip(simulate(train, 2, False), simulate(train, 2, True), strict=True):
        assert_same(found, expected)
        assert all(not torch.equal(found[name], value) for name, value in before.items())


def test_a_step_that_raised_leaves_no_scale_for_the_next_one() -> None:
    """torch sets the scale on the optimizer, and multiplies it by a scale that is left there."""
    results = []
    for fails in (False, True):
        ddp = wrap(make_net(), use_distributed_optimizer=True)
        optimizer = DistributedOptimizer(ddp, lr=0.1, optimizer_class=torch.optim.SGD)
        scaler = GradScaler("cpu", init_scale=64.0)
        scaler.scale(loss_of(ddp, batch_of(0, 0, FP32))).backward()
        ddp.finish_grad_sync()
        if fails:
            weight = ddp.module[0].weight
            kept, weight.data = weight.data, weight.data.clone()
            with pytest.raises(RuntimeError, match="was given other storage"):
                scaler.step(optimizer)
            assert not {"grad_scale", "found_inf"} & vars(optimizer).keys(), "a step without a scaler would obey them"
            weight.data = kept
        scaler.step(optimizer)
        results.append(weights(ddp))
    assert_same(*results)


def test_an_interrupted_step_leaves_no_scale_either() -> None:
    ddp = wrap(make_net())
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss_of(ddp, batch_of(0, 0, FP32))).backward()

    def interrupt(_: object) -> None:
        assert {"grad_scale", "found_inf"} <= vars(optimizer).keys()
        raise KeyboardInterrupt

    with mock.patch.object(type(ddp), "start_for_step", interrupt), pytest.raises(KeyboardInterrupt):
        scaler.step(optimizer)
    assert not {"grad_scale", "found_inf"} & vars(optimizer).keys()


def test_gradients_of_fp16_are_not_unscaled_beside_others() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=FP16), nn.Linear(4, 4))
    optimizer = DistributedOptimizer(wrap(model, grad_reduce_in_fp32=False))
    scaler = GradScaler("cpu", init_scale=64.0)
    scaler.scale(model[1](model[0](torch.ones(1, 4, dtype=FP16)).float()).sum()).backward()
    with pytest.raises(ValueError, match=r"unscale_\(\) of fp16 gradients would lose the small ones"):
        scaler.unscale_(optimizer)


def test_a_disabled_scaler_does_nothing() -> None:
    results = []
    for scaler in (None, GradScaler("cpu", enabled=False)):
        ddp = wrap(make_net(), use_distributed_optimizer=True)
        take_step(ddp, DistributedOptimizer(ddp), scaler, Way({}, unscale=True), 0)
        results.append(weights(ddp))
    assert_same(*results)


def test_other_optimizers_are_treated_as_torch_treats_them() -> None:
    results = []
    for cls in (GradScaler, torch.amp.GradScaler):
        model = make_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scaler = cls("cpu", init_scale=64.0)
        scaler.scale(loss_of(model, batch_of(0, 0, FP32))).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        results.append(weights(model))
    assert_same(*results)


# ---- The host waits for nothing. ----


def step_without_sync(config: dict[str, Any], options: dict[str, Any], how: str) -> None:
    per_token = how == "tokens"
    ddp = wrap(make_net(BF16), **config, calculate_per_token_loss=per_token)
    optimizer = DistributedOptimizer(ddp, **options)
    scaler = GradScaler("cpu", init_scale=2.0**10) if how in ("scaler", "unscaled") else None
    for step in range(2):
        tokens = torch.tensor(rank_of() + 3) if per_token else None
        loss = loss_of(ddp, batch_of(step, rank_of(), BF16))
        (loss if scaler is None else scaler.scale(loss)).backward()
        with NoHostSync():
            ddp.finish_grad_sync(tokens)
            if how == "clip":
                clip_grad_norm(ddp, 0.01)
            if scaler is None:
                optimizer.step()
            else:
                if how == "unscaled":
                    scaler.unscale_(optimizer)
                    clip_grad_norm(ddp, 0.01)
                scaler.step(optimizer)
                scaler.update()
            ddp.zero_grad_buffer()


PLACED: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "all-reduced": (2, {}),
    "sharded": (2, {**SHARDED, "overlap_param_gather": True, "overlap_grad_reduce": True}),
    "hybrid": (4, {**SHARDED, "num_distributed_optimizer_instances": 2}),
}


@pytest.mark.parametrize("how", ["plain", "clip", "scaler", "unscaled", "tokens"])
@pytest.mark.parametrize("placed", PLACED)
def test_reduction_and_fused_step_read_nothing_back(placed: str, how: str) -> None:
    ranks, config = PLACED[placed]
    simulate(step_without_sync, ranks, config, {"max_grad_norm": 0.1}, how)


@pytest.mark.parametrize("options", [{}, {"optimizer_class": torch.optim.SGD, "momentum": 0.9}], ids=["AdamW", "SGD"])
def test_nor_without_clipping(options: dict[str, Any]) -> None:
    simulate(step_without_sync, 2, SHARDED, options, "scaler")


@pytest.mark.parametrize("bad", [(1,), (0, 1)])
def test_all_stages_of_a_pipeline_skip_a_step_and_count_it_once(bad: tuple[int, ...]) -> None:
    """And another pipeline does not."""

    def on_each_stage() -> tuple[float, float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "stage"))
        model = DistributedDataParallel(nn.Linear(2, 1), process_group=WORLD_OF_ONE)
        optimizer = DistributedOptimizer(model, lr=0.1)
        scaler = GradScaler("cpu", init_scale=4.0, pipeline_group=mesh.get_group("stage"))
        for step in range(2):
            value = math.inf if step == 0 and dist.get_rank() in bad else 1.0
            scaler.scale(model(torch.full((2, 2), value)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        (state, *_) = optimizer.state.values()
        return float(state["step"]), scaler.get_scale()

    assert simulate(on_each_stage, 4) == [(1.0, 2.0)] * 2 + [(2.0, 4.0)] * 2


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.item(),
    "bool": bool,
    "float": float,
    "tolist": lambda t: t.reshape(1).tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "nonzero": lambda t: t.reshape(1).nonzero(),
    "equal": lambda t: torch.equal(t, t),
    "a mask": lambda t: t.reshape(1)[t.reshape(1) > 0],
    "isfinite().all()": lambda t: 1 if t.isfinite().all() else 0,
}


@pytest.mark.parametrize("read", READS)
def test_the_guard_notices_reads(read: str) -> None:
    value = torch.ones(())
    with NoHostSync(), pytest.raises(HostSync):
        READS[read](value)
    READS[read](value)


def test_the_guard_notices_the_one_read_of_classes_without_a_fused_kernel() -> None:
    with pytest.raises(HostSync):
        step_without_sync({}, {"optimizer_class": torch.optim.SGD, "fused": False}, "scaler")
