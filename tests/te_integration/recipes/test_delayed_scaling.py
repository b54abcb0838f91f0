"""``DelayedScaling``: scales follow the amaxes of earlier iterations, alike on all ranks."""

import copy
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GraphedTrainingStep,
)
from maingrad.ddp.collectives.step_check import NUM_COLUMNS
from maingrad.fsdp import fully_shard
from maingrad.kernels.quantized import operands
from maingrad.launch import simulate
from maingrad.te_integration import (
    DelayedScaling,
    Format,
    GroupedLinear,
    LayerNormMLP,
    Linear,
    WgradQueue,
    autocast,
    convert_linears,
    delayed_wgrad,
    make_graphed_callables,
    unconvert,
)

BF16 = torch.bfloat16
RECIPE = DelayedScaling(amax_history_len=4)
FP32_MAX = torch.finfo(torch.float32).max
State = dict[str, Tensor]


def towers(fused: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        LayerNormMLP(32, 48, fuse_wgrad_accumulation=fused, dtype=BF16),
        Linear(32, 32, fuse_wgrad_accumulation=fused, dtype=BF16),
    )


def batch(seed: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed)).mul(1 + seed % 5).to(BF16)


def scaling(module: nn.Module) -> State:
    return {name: value.clone() for name, value in module.state_dict().items() if "fp8_" in name}


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys() != set()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def iterate(model: Any, seeds: list[int], recipe: DelayedScaling = RECIPE, group: Any = None) -> None:
    """One iteration, without a step."""
    for number, seed in enumerate(seeds):
        with autocast(recipe=recipe, amax_reduction_group=group):
            y = model(batch(seed))
        with nullcontext() if number == len(seeds) - 1 else model.no_sync():
            y.float().square().sum().backward()
    model.finish_grad_sync()
    model.zero_grad()


# ---- Formulas. ----

AMAXES = [
    (1.0, 2.0),
    (3.0, 0.5),
    (0.0, 0.0),
    (0.25, 1e-4),
    (math.inf, 4.0),
    (0.5, math.nan),
    (0.125, 8.0),
    (0.25, 2.0),
    (1e-38, 1e-37),
    (1e-38, 1e-37),
    (1e-38, 1e-37),
]
"""Of input and gradient, by iteration."""


def median(history: Tensor) -> Tensor:
    return history.median(0).values


ALGORITHMS: dict[str, tuple[Any, Callable[[list[float]], float]]] = {
    "max": ("max", max),
    "most recent": ("most_recent", lambda rows: rows[0]),
    "median": (median, lambda rows: sorted(rows)[(len(rows) - 1) // 2]),
}


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().double().item()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3])
@pytest.mark.sampled(6)
def test_scales_are_those_of_the_formulas(algorithm: str, margin: int, length: int, fp8_format: Format) -> None:
    given, oracle = ALGORITHMS[algorithm]
    recipe = DelayedScaling(margin=margin, amax_history_len=length, amax_compute_algo=given, fp8_format=fp8_format)
    layer = Linear(8, 8, bias=False, fuse_wgrad_accumulation=True, dtype=BF16)
    model = DistributedDataParallel(layer)
    weight = layer.weight.abs().max().item()
    limits = fp8_format.forward.max, fp8_format.forward.max, fp8_format.backward.max
    scales, past = [1.0] * 3, [[0.0] * length for _ in range(3)]
    for of_input, of_grad in AMAXES:
        x, dy = torch.zeros(4, 8, dtype=BF16), torch.zeros(4, 8, dtype=BF16)
        x[1, 2], dy[2, 3] = -of_input, of_grad
        with autocast(recipe=recipe):
            y = model(x)
        y.backward(dy)
        model.finish_grad_sync()
        model.zero_grad_buffer()
        for place, amax in enumerate((x[1, 2].abs().item(), weight, dy[2, 3].item())):
            past[place] = [0.0 if math.isnan(amax) else amax, *past[place][: length - 1]]  # others are 0
            found = oracle(past[place])
            if 0 < found < math.inf:
                scales[place] = min(fp32(fp32(limits[place] / found) / 2**margin), FP32_MAX)
        assert layer.fp8_scale.tolist() == scales
        history: Any = layer.fp8_amax_history
        assert history[0].tolist() == [-1.0] * 3
        for place in range(3):
            newest_first = history[1:, place].flip(0).tolist()
            assert newest_first == past[place][: length - 1]


def test_operands_are_multiplied_by_the_scales() -> None:
    """By hand, with scales that no power of two hides."""
    layer = Linear(16, 16, bias=False, fuse_wgrad_accumulation=True, dtype=BF16)
    model = DistributedDataParallel(layer)

    def cast(value: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        limit = torch.finfo(dtype).max
        return (value.float() * scale).clamp(-limit, limit).to(dtype).float() * (1.0 / scale)

    for seed in range(3):
        draws = torch.Generator().manual_seed(seed)
        x, dy = (torch.randn(8, 16, generator=draws).mul(3.0**seed).to(BF16) for _ in range(2))
        x.requires_grad_()
        known = getattr(layer, "fp8_scale", torch.ones(3)).clone()
        with autocast(recipe=RECIPE):
            y = model(x)
        y.backward(dy)
        low = [
            cast(value, scale, dtype)
            for value, scale, dtype in zip(
                (x.detach(), layer.weight.detach(), dy),
                known,
                (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2),
                strict=True,
            )
        ]
        assert torch.equal(y, (low[0] @ low[1].t()).to(BF16))
        assert x.grad is not None
        assert torch.equal(x.grad, (low[2] @ low[1]).to(BF16))
        model.finish_grad_sync()
        torch.testing.assert_close(layer.weight.main_grad, low[2].t() @ low[0])
        model.zero_grad_buffer()
    assert torch.all(known.frexp().mantissa != 0.5)


# ---- When amaxes are recorded. ----


def test_a_history_begins_without_an_amax() -> None:
    model = DistributedDataParallel(towers())
    with autocast(recipe=RECIPE):
        model(batch(1))
    histories = [value for name, value in scaling(model.module).items() if "history" in name]
    assert len(histories) == 2
    for history in histories:
        assert set(history[0].tolist()) == {-1.0}
        assert not history[1:].any()


def test_microbatches_share_scales_and_leave_the_largest_amax() -> None:
    model = DistributedDataParallel(towers())
    iterate(model, [1])
    before = scaling(model.module)
    for number, seed in enumerate((2, 9, 5)):
        with autocast(recipe=RECIPE):
            y = model(batch(seed))
        with nullcontext() if number == 2 else model.no_sync():
            y.float().square().sum().backward()
        found = scaling(model.module)
        assert all(torch.equal(found[name], value) for name, value in before.items() if name.endswith("scale"))
    model.finish_grad_sync()
    model.zero_grad_buffer()
    alone = []
    for seed in (2, 9, 5):
        other = DistributedDataParallel(towers())
        iterate(other, [1])
        iterate(other, [seed])
        alone.append(scaling(other.module))
    found = scaling(model.module)
    for name in found:
        if "history" in name:
            assert torch.equal(found[name][-1], torch.stack([each[name][-1] for each in alone]).amax(0)), name


def test_a_forward_ahead_of_the_iterations_end_counts_where_its_backward_is() -> None:
    model = DistributedDataParallel(towers())
    iterate(model, [1])
    with autocast(recipe=RECIPE):
        y, ahead = (model(batch(seed)) for seed in (2, 9))
    y.float().square().sum().backward()
    model.finish_grad_sync()
    model.zero_grad()
    of_the_first = scaling(model.module)
    ahead.float().square().sum().backward()
    model.finish_grad_sync()
    found = scaling(model.module)
    for name, before in of_the_first.items():
        if "history" in name:
            assert not torch.equal(found[name], before), name


@pytest.mark.parametrize("how", ["no_grad", "eval", "inference"])
def test_evaluation_leaves_the_state_alone(how: str) -> None:
    model = DistributedDataParallel(towers())

    def evaluate(module: nn.Module) -> Tensor:
        module.train(how != "eval")
        blocks: dict[str, Any] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        with blocks.get(how, nullcontext)(), autocast(recipe=RECIPE):
            y = module(batch(4) * 100)
        module.train()
        return y.detach()

    evaluate(model)
    assert not scaling(model.module), "a module that was never trained has no state"
    for seed in range(3):
        iterate(model, [seed])
        before = scaling(model.module)
        evaluate(model)
        assert_equal(scaling(model.module), before)
    other = DistributedDataParallel(towers())
    for seed in range(3):
        iterate(other, [seed])
    assert_equal(scaling(model.module), scaling(other.module))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_recompute_records_nothing_and_has_the_scales_of_its_forward(nested: bool, wrapped: bool) -> None:
    def train(recomputed: bool) -> tuple[list[Tensor], State]:
        module = towers(fused=False)
        model: Any = DistributedDataParallel(module) if wrapped else module
        results = []

        def run(x: Tensor) -> Tensor:
            with autocast(recipe=RECIPE):
                if recomputed and nested:
                    x = checkpoint(module[0], x, use_reentrant=False)
                    return module[1](x)
                return model(x)

        for seed in range(3):
            x = batch(seed).requires_grad_()
            y = checkpoint(run, x, use_reentrant=False) if recomputed else run(x)
            y.float().square().sum().backward()
            results += [y.detach(), x.grad]
            if wrapped:
                model.finish_grad_sync()
                model.zero_grad_buffer()
        return results, scaling(module)

    found, expected = train(True), train(False)
    for mine, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(mine, other)
    assert_equal(found[1], expected[1])


def test_delayed_weight_gradients() -> None:
    def train(handling: str) -> tuple[list[Tensor], State]:
        model, queue = DistributedDataParallel(towers()), WgradQueue()
        found = []
        for seed in range(3):
            with autocast(recipe=RECIPE), delayed_wgrad(queue) if handling == "queue" else nullcontext():
                y = model(batch(seed))
            y.float().square().sum().backward()
            queue.drain()
            model.finish_grad_sync()
            found += [param.main_grad.clone() for param in model.module.parameters()]
            model.zero_grad_buffer()
        return found, scaling(model.module)

    queued, fused = train("queue"), train("fused")
    for mine, other in zip(queued[0], fused[0], strict=True):
        assert torch.equal(mine, other)
    assert_equal(queued[1], fused[1])


@pytest.mark.in_turn
def test_kernels_record_what_the_reference_does() -> None:
    """Triton's interpreter quantises; one layer, since its elements are not the reference's bits."""
    pytest.importorskip("triton", reason="the quantiser is Triton's")
    found = []
    for by_kernels in (True, False):
        torch.manual_seed(0)
        layer = Linear(48, 32, fuse_wgrad_accumulation=True, dtype=BF16)
        model = DistributedDataParallel(layer)

        def run(x: Tensor, model: Any = model) -> Tensor:
            with autocast(recipe=RECIPE):
                y: Tensor = model(x)
            return y

        states = []
        with mock.patch.object(operands, "has_kernels", return_value=True) if by_kernels else nullcontext():
            for step in range(3):
                draws = torch.Generator().manual_seed(step)
                x = torch.randn(2, 20, 48, generator=draws).mul(1.0 + step).to(BF16).requires_grad_()
                dy = torch.randn(2, 20, 32, generator=draws).to(BF16)
                with torch.no_grad():
                    run(x[0] * 100)
                with model.no_sync():
                    checkpoint(run, x[0], use_reentrant=False).backward(dy[0])
                run(x[1]).backward(dy[1])
                states.append(scaling(layer))
                model.finish_grad_sync()
                model.zero_grad_buffer()
                states.append(scaling(layer))
        found.append(states)
    for mine, other in zip(*found, strict=True):
        assert_equal(mine, other)


def test_an_algorithm_that_writes_to_its_history_changes_its_copy() -> None:
    def largest(history: Tensor) -> Tensor:
        found = history.amax(0)
        history.zero_()
        return found

    states = []
    for algorithm in (largest, "max"):
        model = DistributedDataParallel(towers())
        for seed in (4, 1, 2, 5, 0):
            iterate(model, [seed], DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm))
        states.append(scaling(model.module))
    assert_equal(*states)


def test_an_algorithm_sees_no_negative_amax() -> None:
    """A frozen first layer has no gradient, and its column of amaxes has zeros."""
    smallest = []

    def largest(history: Tensor) -> Tensor:
        smallest.append(float(history.min()))
        return history.amax(0)

    module = towers()
    module[0].requires_grad_(False)
    model = DistributedDataParallel(module)
    for seed in (4, 1):
        iterate(model, [seed], DelayedScaling(amax_history_len=3, amax_compute_algo=largest))
    assert smallest and min(smallest) == 0.0


def test_no_kernel_records_two_uses_of_a_module() -> None:
    """A kernel over lists of tensors writes all of them at once: on GPUs, one of two equal tensors would be lost."""
    written: list[list[int]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._foreach_maximum_.List:
                written.append([each.data_ptr() for each in args[0]])
            return func(*args, **(kwargs or {}))

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Linear(32, 32, fuse_wgrad_accumulation=True, dtype=BF16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    with Watch():
        iterate(DistributedDataParallel(Twice()), [1])
    assert sum(map(len, written)) == 2, "rows of both uses are recorded"
    assert all(len(set(places)) == len(places) for places in written)


# ---- Ranks. ----


def wrapped(how: str) -> Any:
    module = towers()
    if how in ("zero3", "zero2"):
        for part in module:
            fully_shard(part, placements=how)
        return fully_shard(module, placements=how)
    options: dict[str, Any] = {
        "ddp": {},
        "no overlap": {"overlap_grad_reduce": False},
        "zero1": {"use_distributed_optimizer": True},
        "hybrid": {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
    }[how]
    return DistributedDataParallel(module, DistributedDataParallelConfig(**options))


@contextmanager
def counted_maxima() -> Iterator[list[int]]:
    """Sizes of MAX-reductions that this process issues, on all simulated ranks together."""
    sizes: list[int] = []
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        if op == dist.ReduceOp.MAX:
            sizes.append(tensor.numel())
        return all_reduce(tensor, op, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", counting):
        yield sizes


def train_on_rank(how: str) -> State:
    model = wrapped(how)
    own = dist.get_rank() if dist.is_initialized() else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for step in range(3):
        iterate(model, [step * 4 + number for number in range(own, 4, ranks)])
    return scaling(getattr(model, "module", model))


@pytest.mark.parametrize("how", ["ddp", "no overlap", "zero1", "hybrid", "zero2", "zero3"])
@pytest.mark.sampled(1)
def test_ranks_have_the_scales_of_one_process(how: str) -> None:
    ranks, axes = (4, 2) if how == "hybrid" else (2, 1)
    alone = train_on_rank("ddp")
    with counted_maxima() as sizes:
        found = simulate(train_on_rank, ranks, how)
    for state in found:
        assert_equal(state, alone)
    amaxes = [size for size in sizes if size != NUM_COLUMNS]  # such rows of integers compare the ranks' steps
    assert amaxes == [9] * (3 * ranks * axes), "once an iteration, for two products of the first layer and one"


class Branches(nn.Module):
    """Each rank runs a branch of its own, as far as there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Linear(32, 32, fuse_wgrad_accumulation=True, dtype=BF16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.parts[dist.get_rank()](x)
        return y


def train_branches() -> State:
    config = DistributedDataParallelConfig(overlap_grad_reduce=False)
    model = DistributedDataParallel(Branches(), config)
    for step in range(2):
        iterate(model, [step + 3 * dist.get_rank()])
    return scaling(model.module)


def test_ranks_that_run_other_modules_agree() -> None:
    first, second = simulate(train_branches, 2)
    assert_equal(first, second)
    assert first["parts.2.fp8_scale"].tolist() == [1.0] * 3, "no rank has run it"
    for part in (0, 1):
        assert torch.all(first[f"parts.{part}.fp8_scale"] != 1.0)


class Nested(nn.Module):
    """The second layer has a recipe of its own, and is skipped on request."""

    def __init__(self, recipe: DelayedScaling) -> None:
        super().__init__()
        options: dict[str, Any] = {"fuse_wgrad_accumulation": True, "dtype": torch.bfloat16}
        self.first, self.second = Linear(16, 16, **options), Linear(16, 16, **options)
        self.recipe = recipe

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        x = self.first(x)
        if skip:
            return x
        with autocast(recipe=self.recipe):
            return self.second(x)


def train_nested(recipe: DelayedScaling) -> State:
    torch.manual_seed(0)
    model = DistributedDataParallel(Nested(recipe))
    for step in range(3):
        x = torch.full((4, 16), 1.0 + step + 10 * dist.get_rank()).bfloat16()
        with autocast(recipe=DelayedScaling(amax_history_len=4)):
            y = model(x, dist.get_rank() == 1 and step < 2)
        y.float().square().mean().backward()
        model.finish_grad_sync()
        model.zero_grad_buffer()
    return scaling(model.module)


def test_several_forms_in_one_model() -> None:
    """Equal ones are one; others are refused, since a rank that skips a module does not know its recipe."""
    first, second = simulate(train_nested, 2, DelayedScaling(amax_history_len=4))
    assert_equal(first, second)
    for other in (DelayedScaling(amax_history_len=4, margin=3), DelayedScaling(amax_history_len=4, reduce_amax=False)):
        with pytest.raises(Exception, match="several forms of DelayedScaling"):
            simulate(train_nested, 2, other)


def train_in_groups(options: dict[str, Any], given: bool) -> State:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = wrapped("ddp")
    recipe = DelayedScaling(amax_history_len=4, **options)
    for step in range(2):
        group = pairs[dist.get_rank() // 2] if given else None
        iterate(model, [step * 4 + dist.get_rank()], recipe, group)
    return scaling(model.module)


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.sampled(1)
def test_whose_amaxes_count(group: bool) -> None:
    options = {} if group else {"reduce_amax": False}
    found = simulate(train_in_groups, 4, options, group)
    pairs = [(0, 1), (2, 3)] if group else []
    for one in range(4):
        for other in range(one):
            same = all(torch.equal(found[one][name], found[other][name]) for name in found[0])
            assert same is ((other, one) in pairs), (one, other)


def test_optimizer_step_without_finish_grad_sync() -> None:
    def train(finish: bool) -> State:
        model = wrapped("zero1")
        optimizer = DistributedOptimizer(model, lr=1e-3)
        for step in range(3):
            with autocast(recipe=RECIPE):
                y = model(batch(step * 2 + dist.get_rank()))
            y.float().square().sum().backward()
            if finish:
                model.finish_grad_sync()
            else:
                model.start_grad_sync()
            optimizer.step()
            model.zero_grad_buffer()
        return scaling(model.module)

    for mine, other in zip(simulate(train, 2, False), simulate(train, 2, True), strict=True):
        assert_equal(mine, other)


def test_a_graphed_step() -> None:
    def train(graphed: bool) -> State:
        model = wrapped("zero1")
        optimizer = DistributedOptimizer(model, lr=1e-2)

        def step(x: Tensor) -> Tensor:
            with autocast(recipe=RECIPE):
                loss = model(x).float().square().sum()
            loss.backward()
            model.finish_grad_sync()
            optimizer.step()
            model.zero_grad_buffer()
            return loss.detach()

        run: Any = GraphedTrainingStep(step, model, optimizer, num_warmup_steps=1) if graphed else step
        for seed in range(6):
            run(batch(seed * 2 + dist.get_rank()))
        assert not graphed or run.num_graphs == 1
        optimizer.finish_param_sync()
        return {name: value.clone() for name, value in model.module.state_dict().items()}

    for mine, other in zip(simulate(train, 2, True), simulate(train, 2, False), strict=True):
        assert_equal(mine, other)


# ---- Without a wrapper. ----


def test_without_a_wrapper_scales_change_before_the_next_forward() -> None:
    """A forward whose backward has not come keeps them."""
    plain, model = towers(fused=False), DistributedDataParallel(towers())
    for seeds in ([1], [2], [3]):
        iterate(model, seeds)
    for seed in (1, 2, 3):
        with autocast(recipe=RECIPE):
            loss = plain(batch(seed)).float().square().sum()
        loss.backward()  # and the graph's remains live on through the next forward
    with autocast(recipe=RECIPE):
        first = plain(batch(4))
        scales = scaling(plain)
        second = plain(batch(5))
    expected = scaling(model.module)
    for name in expected:
        assert torch.equal(
            scales[name][-1] if "history" in name else scales[name],
            expected[name][-1] if "history" in name else expected[name],
        )
    first.float().sum().backward()
    with autocast(recipe=RECIPE):
        plain(batch(6))
    assert all(torch.equal(scaling(plain)[name], scales[name]) for name in scales if "scale" in name)
    second.float().sum().backward()
    with autocast(recipe=RECIPE):
        plain(batch(6))
    assert not all(torch.equal(scaling(plain)[name], scales[name]) for name in scales if "scale" in name)


def train_before_and_in_a_wrapper() -> State:
    module = towers(fused=False)
    with autocast(recipe=RECIPE):
        loss = module(batch(dist.get_rank())).float().square().sum()
    loss.backward()
    module.zero_grad()
    model = DistributedDataParallel(module)
    for step in range(2):
        iterate(model, [4 * step + 2 * microbatch + dist.get_rank() for microbatch in range(2)])
    return scaling(module)


def test_a_module_that_has_run_without_a_wrapper_is_one_of_its_wrapper() -> None:
    """Its scales change once in an iteration, and not once in a microbatch."""
    first, second = simulate(train_before_and_in_a_wrapper, 2)
    assert_equal(first, second)
    assert torch.all(first["1.fp8_scale"] != 1.0)


def test_a_module_that_has_left_its_wrapper_goes_on_alone() -> None:
    model = DistributedDataParallel(towers(fused=False))
    iterate(model, [1])
    module = model.unwrap()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    before = scaling(module)
    for seed in (2, 3):
        with autocast(recipe=RECIPE):
            loss = (100 * module(batch(seed))).float().square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = scaling(module)
    assert not all(torch.equal(after[name], before[name]) for name in before if "scale" in name)


def train_alone_without_tokens_in(empty: int) -> State:
    """Gradients are reduced by hand. The last rank has no tokens in iteration ``empty``."""
    module = towers(fused=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    last = dist.get_rank() == dist.get_world_size() - 1
    for step in range(4):
        rows = 0 if last and step == empty else 8
        with autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD):
            module(batch(step + 10 * dist.get_rank(), rows)).float().square().sum().backward()
        for weight in module.parameters():
            assert weight.grad is not None
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value for name, value in scaling(module).items() if "scale" in name}


@pytest.mark.parametrize("empty", range(4))
def test_a_rank_without_tokens_agrees_with_the_others_on_scales(empty: int) -> None:
    first, second = simulate(train_alone_without_tokens_in, 2, empty)
    assert_equal(first, second)
    assert torch.all(first["1.fp8_scale"] != 1.0)


def test_amaxes_that_are_loaded_move_on_with_the_next_forward() -> None:
    plain = towers(fused=False)

    def forward(seed: int) -> Tensor:
        with autocast(recipe=RECIPE):
            return plain(batch(seed)).float().square().sum()  # type: ignore[no-any-return]

    forward(1).backward()
    kept = copy.deepcopy(plain.state_dict())
    forward(2)
    expected = scaling(plain)
    forward(3).backward()
    forward(4)
    assert not torch.equal(scaling(plain)["1.fp8_amax_history"], expected["1.fp8_amax_history"])
    plain.load_state_dict(kept)
    forward(2)
    assert_equal(scaling(plain), expected)


def test_amaxes_of_microbatches_before_a_load_are_gone() -> None:
    found = []
    for loads in (True, False):
        model = DistributedDataParallel(towers())
        iterate(model, [1])
        kept = copy.deepcopy(model.state_dict())
        if loads:
            with model.no_sync(), autocast(recipe=RECIPE):
                (model(batch(4) * 100).float().square().sum() * 100).backward()
            model.load_state_dict(kept)
        iterate(model, [2])
        found.append(scaling(model.module))
    assert_equal(*found)


def test_a_frozen_layer_keeps_the_history_of_its_gradients() -> None:
    layer = Linear(32, 32, dtype=BF16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)

    def forward(seed: int) -> Tensor:
        with autocast(recipe=RECIPE):
            return layer(batch(seed))  # type: ignore[no-any-return]

    for seed in range(2):
        forward(seed).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    layer.requires_grad_(False)
    forward(2)  # the last step's amaxes are in the history now
    before = scaling(layer)
    for seed in range(3, 6):
        forward(seed)
    after = scaling(layer)
    grads = slice(2, None, 3)
    assert before["fp8_amax_history"][:, grads].any()
    assert torch.equal(after["fp8_amax_history"][:, grads], before["fp8_amax_history"][:, grads])
    assert torch.equal(after["fp8_scale"][grads], before["fp8_scale"][grads])
    assert not torch.equal(after["fp8_amax_history"], before["fp8_amax_history"]), "inputs go on"


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="calibrating"), autocast(recipe=RECIPE, calibrating=True):
        pass
    for options in ({"amax_history_len": 0}, {"amax_compute_algo": "mean"}, {"amax_compute_algo": None}):
        with pytest.raises(ValueError, match=next(iter(options))):
            DelayedScaling(**options)  # type: ignore[arg-type]
    for algorithm in (lambda history: history, lambda history: history[0, :1], lambda history: history[:1]):
        with pytest.raises(ValueError, match="must return"):
            iterate(DistributedDataParallel(towers()), [1], DelayedScaling(amax_compute_algo=algorithm))
    layer = Linear(32, 32, dtype=BF16)

    def run(x: Tensor) -> Tensor:
        with autocast(recipe=RECIPE):
            return layer(x)

    y = checkpoint(run, batch(1).requires_grad_(), use_reentrant=True)
    with pytest.raises(RuntimeError, match="reentrant"):
        y.sum().backward()
    layer.weight.allreduce = False  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="experts"), autocast(recipe=RECIPE):
        layer(batch(1))
    experts = GroupedLinear(2, 32, 32, params_dtype=BF16)
    with pytest.raises(RuntimeError, match="experts"), autocast(recipe=RECIPE):
        experts(batch(1), [4, 4])
    layer = Linear(32, 32, dtype=BF16)
    with pytest.raises(RuntimeError, match="make_graphed_callables"), autocast(recipe=RECIPE):
        make_graphed_callables([layer], [(batch(1).requires_grad_(),)])
    assert not scaling(layer)


# ---- State. ----


def trained(steps: int = 3) -> DistributedDataParallel:
    model = DistributedDataParallel(towers())
    for seed in range(steps):
        iterate(model, [seed])
    return model


def test_behind_graphs_of_layers_it_goes_on() -> None:
    """Their capture refuses it: while it lasts, and where it has failed."""
    layer = Linear(32, 32, dtype=BF16)
    for broken in (False, True):
        with pytest.raises(ValueError, match="sample_args has 2 entries") if broken else nullcontext():
            make_graphed_callables([Linear(32, 32, dtype=BF16)], [(batch(0),)] * (1 + broken))
        with pytest.raises(RuntimeError, match="does not go with make_graphed_callables"), autocast(recipe=RECIPE):
            make_graphed_callables([Linear(32, 32, dtype=BF16)], [(batch(0),)])
        with autocast(recipe=RECIPE):
            layer(batch(0)).sum().backward()
    assert layer.fp8_amax_history[0].tolist()[0] == batch(0).float().abs().max()


def test_state_dicts() -> None:
    plain = towers()
    names = set(plain.state_dict())
    assert not any("fp8" in name for name in names)
    model = trained()
    state = copy.deepcopy(model.module.state_dict())
    fresh = towers()
    assert fresh.load_state_dict(state).missing_keys == []
    assert_equal(scaling(fresh), scaling(model.module))
    again = DistributedDataParallel(fresh)
    iterate(again, [7])
    iterate(model, [7])
    assert_equal(scaling(again.module), scaling(model.module))

    with pytest.raises(RuntimeError, match="fp8_scale"):  # one without the other, or of another module
        towers().load_state_dict({name: value for name, value in state.items() if "history" not in name})


@pytest.mark.parametrize("given", ["parameters", "a copy from before"])
@pytest.mark.parametrize("strict", [True, False])
def test_weights_that_are_loaded_for_an_evaluation_leave_the_state_alone(given: str, strict: bool) -> None:
    """As averages are swapped in. Their state has no buffers where they were copied before the first forward."""
    early = towers()

    def train(swap: bool) -> list[Any]:
        model, found = DistributedDataParallel(towers()), []
        for seed in range(4):
            found.append(scaling(model.module))
            iterate(model, [seed])
            if swap:
                mine = {name: param.detach().clone() for name, param in model.module.named_parameters()}
                other = early.state_dict() if given != "parameters" else {name: w * 2 for name, w in mine.items()}
                assert model.module.load_state_dict(other, strict=strict).missing_keys == []
                with torch.no_grad(), autocast(recipe=RECIPE):
                    model(batch(9))
                model.module.load_state_dict(mine, strict=strict)
        return [*found, scaling(model.module)]

    for mine, other in zip(train(True)[1:], train(False)[1:], strict=True):
        assert_equal(mine, other)


def test_copies_and_casts() -> None:
    model = trained()
    before = scaling(model.module)
    twin = copy.deepcopy(model.module)
    iterate(model, [9])
    assert_equal(scaling(twin), before)
    wrapped_twin = DistributedDataParallel(twin)
    iterate(wrapped_twin, [9])
    assert_equal(scaling(twin), scaling(model.module))
    half = copy.deepcopy(twin).half()
    assert_equal(scaling(half), scaling(twin))


def test_another_history_length_keeps_the_newest() -> None:
    model = trained(4)
    before: Any = scaling(model.module)["1.fp8_amax_history"]
    for length in (2, 3, 6):
        model = trained(4)
        iterate(model, [5], DelayedScaling(amax_history_len=length))
        found: Any = scaling(model.module)["1.fp8_amax_history"]
        assert found.shape[0] == length
        kept = min(length, 4) - 2
        assert torch.equal(found[-1 - kept : -1], before[4 - kept :])
        assert (found[1:] >= 0).all(), "what has no amax is 0 in the past"


@pytest.mark.in_turn
@pytest.mark.parametrize("gone", ["freed", "unconverted"])
def test_a_graph_outlives_its_module(gone: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)).requires_grad_(False)
    convert_linears(model)
    x = torch.ones(4, 16, dtype=torch.bfloat16, requires_grad=True)
    with autocast(recipe=DelayedScaling()):
        loss = model(x).float().sum()
    if gone == "freed":
        layer = weakref.ref(model[0])
        del model
        gc.collect()
        assert layer() is None
    else:
        unconvert(model)
    grads = []
    for _ in range(3):
        loss.backward(retain_graph=True)
        grads.append(x.grad)
        x.grad = None
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
