"""Parameter groups by name, pattern, list and predicate: bitwise the stock optimizer with the same groups."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import assert_same, weights, wrap
from stock_steps import backward, make_net, select, stock_run, train
from torch import Tensor, nn
from torch.optim import lr_scheduler

from maingrad.ddp import DistributedOptimizer
from maingrad.launch import simulate

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
DEFAULTS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.95), "weight_decay": 0.1}
STEPS = 4

# What param_groups says, and the names that each group then holds, the default group last.
SELECTIONS: dict[str, tuple[list[Any], list[list[str]]]] = {
    "a name": (["3.weight"], [["3.weight"], ["0.weight", "0.bias", "2.weight", "2.bias", "3.bias"]]),
    "a pattern": (["*.bias"], [["0.bias", "2.bias", "3.bias"], ["0.weight", "2.weight", "3.weight"]]),
    "a list of both": (
        [["0.weight", "2.*"]],
        [["0.weight", "2.weight", "2.bias"], ["0.bias", "3.weight", "3.bias"]],
    ),
    "a predicate": (
        [lambda name, param: param.dim() < 2],
        [["0.bias", "2.weight", "2.bias", "3.bias"], ["0.weight", "3.weight"]],
    ),
    "several, the first match wins": (
        [("0.bias",), "*.bias", lambda name, param: name.startswith(("0", "2"))],
        [["0.bias"], ["2.bias", "3.bias"], ["0.weight", "2.weight"], ["3.weight"]],
    ),
    "all of them, so that the default group is empty": (
        ["*.bias", "*.weight"],
        [["0.bias", "2.bias", "3.bias"], ["0.weight", "2.weight", "3.weight"], []],
    ),
}
# A group's own options.
OWN: list[dict[str, Any]] = [
    {"lr": 0.005, "weight_decay": 0.0},
    {"lr": 0.03, "betas": (0.5, 0.9)},
    {"weight_decay": 0.5, "eps": 1e-4},
]


def groups_of(selectors: list[Any]) -> list[dict[str, Any]]:
    return [{"params": selector, **own} for selector, own in zip(selectors, OWN, strict=False)]


def stock_of(members: list[list[str]], **options: Any) -> Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]:
    own = [*OWN[: len(members) - 1], {}]

    def make(masters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        groups = [{"params": select(masters, names), **o} for names, o in zip(members, own, strict=True)]
        return torch.optim.AdamW(groups, **{**DEFAULTS, **options}, fused=True)

    return make


def check(name: str, dtype: torch.dtype, ranks: int, **config: Any) -> None:
    selectors, members = SELECTIONS[name]
    expected = stock_run(dtype, ranks, STEPS, stock_of(members))
    options = {**DEFAULTS, "param_groups": groups_of(selectors)}
    for history, optimizer in simulate(train, ranks, dtype, range(STEPS), config, options):
        for ours, theirs in zip(history, expected, strict=True):
            assert_same(ours, theirs)
        assert len(optimizer.param_groups) == len(members), "the same number on every rank, whatever its shard holds"
        by_group = [{held.name for held in optimizer.slices if held.group == i} for i in range(len(members))]
        assert by_group == [set(names) for names in members]


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.sampled(2)
def test_selections_are_the_stock_optimizers_groups(name: str) -> None:
    check(name, torch.bfloat16, 3, use_distributed_optimizer=True, bucket_size=300)


@pytest.mark.in_turn
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_groups_are_the_same_on_any_number_of_ranks(ranks: int) -> None:
    name = "several, the first match wins"
    check(name, torch.float32, ranks, use_distributed_optimizer=True, overlap_param_gather=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("bucket_size", [1, None])
@pytest.mark.parametrize("sharded", [False, True])
def test_groups_everywhere(name: str, dtype: torch.dtype, ranks: int, bucket_size: int | None, sharded: bool) -> None:
    check(name, dtype, ranks, use_distributed_optimizer=sharded, bucket_size=bucket_size)


def where_groups_lie() -> tuple[list[int], dict[str, int]]:
    config = {"use_distributed_optimizer": True}
    options = {**DEFAULTS, "param_groups": groups_of(["3.bias", "0.weight"])}
    history, optimizer = train(torch.float32, range(STEPS), config, options)
    expected = stock_run(torch.float32, 4, STEPS, stock_of([["3.bias"], ["0.weight"], NAMES[1:5]]))
    for ours, theirs in zip(history, expected, strict=True):
        assert_same(ours, theirs)
    numels = [sum(param.numel() for param in group["params"]) for group in optimizer.param_groups]
    return numels, {held.name: held.end - held.start for held in optimizer.slices}


def test_a_group_may_lie_wholly_in_another_ranks_shard() -> None:
    """One bucket: 3.bias 128, 3.weight 8192, 2.bias 64, 2.weight 64, 0.bias 64, 0.weight 256; 8768 elements, padded to
    8832, of which each of four ranks has 2208."""
    results = simulate(where_groups_lie, 4)
    assert [numels for numels, _ in results] == [
        [128, 0, 2080],
        [0, 0, 2208],
        [0, 0, 2208],
        [0, 256 + 64, 2208 - 256 - 64],  # the group of the last parameter takes the padding behind it
    ]
    assert [slices["3.bias"] for _, slices in results] == [128, 0, 0, 0]
    assert [slices["0.weight"] for _, slices in results] == [0, 0, 0, 256]


def segments_here(config: dict[str, Any]) -> list[list[tuple[int, int, int]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 15), nn.Linear(15, 17), nn.Linear(17, 3))
    groups = [{"params": "*.bias"}, {"params": "1.weight"}]
    optimizer = DistributedOptimizer(wrap(model, use_distributed_optimizer=True, **config), param_groups=groups)
    found: dict[int, list[tuple[int, int, int]]] = {}
    for segment in optimizer.segments:
        found.setdefault(id(segment.flat.params), []).append(
            (segment.start, segment.end, segment.flat.owned_params.numel())
        )
    return list(found.values())


@pytest.mark.in_turn
@pytest.mark.parametrize("bucket_size", [1, None])
@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.sampled(3)
def test_segments_of_groups_follow_each_other_and_leave_no_padding_out(ranks: int, bucket_size: int | None) -> None:
    """Odd sizes, so that shards begin and end in the padding between parameters: on eight ranks after 80 elements."""
    for buckets in simulate(segments_here, ranks, {"bucket_size": bucket_size}):
        for segments in buckets:
            assert segments[0][0] == 0
            assert [end for _, end, _ in segments[:-1]] == [start for start, _, _ in segments[1:]]
            assert segments[-1][1] == segments[-1][2]


def test_segments_lie_in_the_order_of_memory() -> None:
    """The vector lies before the matrix, of which a border between two rows then cuts off the last three."""

    def on_each_rank() -> list[tuple[int, int, int]]:
        model = nn.ParameterDict({"bias": torch.ones(64), "weight": torch.ones(6, 192)})
        ddp = wrap(model, use_distributed_optimizer=True, shard_atom=192)
        (layout,) = (bucket.layout for bucket in ddp.buckets)
        assert [slot.spec.name for slot in layout.slots] == ["weight", "bias"]
        optimizer = DistributedOptimizer(ddp, param_groups=[{"params": "weight"}])
        return [(each.start, each.end, each.group) for each in optimizer.segments]

    assert simulate(on_each_rank, 2) == [[(0, 64, 1), (64, 640, 0)], [(0, 640, 0)]]


# ---- Schedulers. ----

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "lambdas": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step), lambda step: float(step != 2)]
    ),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, max_lr=[0.1, 0.05, 0.02], total_steps=6, base_momentum=0.6, max_momentum=[0.95, 0.9, 0.85]
    ),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.sampled(3)
def test_schedulers_drive_each_group(name: str, sharded: bool) -> None:
    members = [["0.bias", "2.bias", "3.bias"], ["3.weight"], ["0.weight", "2.weight"]]
    schedule, ranks, steps = SCHEDULES[name], 2, 5
    rates: list[list[float]] = []

    def make_stock(masters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = stock_of(members)(masters)
        scheduler = schedule(optimizer)

        def after_step(*_: Any) -> None:
            scheduler.step()
            rates.append(scheduler.get_last_lr())

        optimizer.register_step_post_hook(after_step)
        return optimizer

    expected = stock_run(torch.bfloat16, ranks, steps, make_stock)
    assert all(len({step[group] for step in rates}) > 1 for group in range(2)), "nothing was scheduled"
    options = {**DEFAULTS, "param_groups": groups_of(["*.bias", "3.weight"])}
    config = {"use_distributed_optimizer": sharded, "overlap_param_gather": sharded}
    for history, optimizer in simulate(train, ranks, torch.bfloat16, range(steps), config, options, schedule):
        assert [group["lr"] for group in optimizer.param_groups] == rates[-1]
        for ours, theirs in zip(history, expected, strict=True):
            assert_same(ours, theirs)


def test_a_number_of_lambdas_other_than_of_groups_is_refused_as_torch_does() -> None:
    optimizer = DistributedOptimizer(wrap(make_net()), param_groups=[{"params": "*.bias"}])
    with pytest.raises(ValueError, match="Expected 2 lr_lambdas, but got 1"):
        lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0])


# ---- Saving and loading. ----


def saved_and_resumed(dtype: torch.dtype, sharded: bool) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    config = {"use_distributed_optimizer": sharded, "bucket_size": 300}
    options = {**DEFAULTS, "param_groups": groups_of(["*.bias", ["0.*", "3.weight"]])}
    expected, _ = train(dtype, range(4), config, options)
    _, first = train(dtype, range(2), config, options)
    first.param_groups[1]["lr"] = 0.01
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    ddp = wrap(make_net(dtype, seed=5), **config)
    second = DistributedOptimizer(ddp, **{**options, "lr": 9.0})
    second.load_state_dict(torch.load(file))
    assert [group["lr"] for group in second.param_groups] == [0.005, 0.01, 0.02]
    second.param_groups[1]["lr"] = 0.03
    history = []
    for step in range(2, 4):
        backward(ddp, step, dtype)
        second.step()
        history.append(weights(ddp))
        ddp.zero_grad_buffer()
    return history, expected[2:]


@pytest.mark.parametrize(("sharded", "ranks"), [(False, 1), (True, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.sampled(2)
def test_a_state_dict_has_the_groups_options_and_resumes_bitwise(dtype: torch.dtype, sharded: bool, ranks: int) -> None:
    for resumed, expected in simulate(saved_and_resumed, ranks, dtype, sharded):
        for ours, theirs in zip(resumed, expected, strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize(
    "other",
    [{"param_groups": [{"params": "2.bias"}]}, {}, {"param_groups": [{"params": "0.bias"}], "bucket_size": 1}],
    ids=["other members", "no groups", "other buckets"],
)
def test_a_state_of_other_groups_is_refused(other: dict[str, Any]) -> None:
    """With equal numbers of masters in each group, torch would load it, and its kernel write past the moments."""

    def run(bucket_size: int | None = None, **options: Any) -> DistributedOptimizer:
        return train(torch.float32, range(1), {"bucket_size": bucket_size}, options)[1]

    state = copy.deepcopy(run(param_groups=[{"params": "0.bias"}]).state_dict())
    with pytest.raises(ValueError, match=r"saved with another bucket plan.*with other parameter groups"):
        run(**other).load_state_dict(state)
    run(param_groups=[{"params": "0.bias"}]).load_state_dict(state)


def test_a_state_of_the_same_groups_in_another_order_is_refused() -> None:
    """The groups are cut alike, and the moments of one would be taken for those of the other."""

    def run(*names: str) -> DistributedOptimizer:
        return train(torch.float32, range(1), {}, {"param_groups": [{"params": name} for name in names]})[1]

    state = copy.deepcopy(run("0.bias", "2.bias").state_dict())
    with pytest.raises(ValueError, match="with other parameter groups"):
        run("2.bias", "0.bias").load_state_dict(state)
    run("0.bias", "2.bias").load_state_dict(state)


def test_a_state_of_another_class_is_refused() -> None:
    state = train(torch.float32, range(1), {}, {"optimizer_class": torch.optim.SGD, "momentum": 0.9})[1].state_dict()
    with pytest.raises(ValueError, match=r"another class: it has layout SGD/.*and this is AdamW/"):
        train(torch.float32, range(1), {}, {})[1].load_state_dict(state)


# ---- What makes no sense. ----


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([{"params": "*.gamma"}], ValueError, r"param_groups\[0\]: no trainable parameter is called '\*\.gamma'"),
        ([{"params": "*.bias"}, {"params": ["3.weight", "9.weight"]}], ValueError, r"\[1\].*called '9\.weight'"),
        ([{"params": lambda name, param: False}], ValueError, r"param_groups\[0\] selects no parameter"),
        ([{"params": []}], ValueError, r"param_groups\[0\] selects no parameter: params=\[\]"),
        (
            [{"params": "*.bias"}, {"params": "3.bias"}],
            ValueError,
            r"param_groups\[1\] selects only parameters of groups before it: params='3\.bias'",
        ),
        ([{"lr": 0.1}], ValueError, r"param_groups\[0\] has no 'params'"),
        ([{"params": make_net().parameters()}], TypeError, r"\[0\]: select parameters by name.*got Parameter"),
        ([{"params": torch.zeros(3)}], TypeError, r"\[0\]: select parameters by name.*got Tensor"),
        ([{"params": nn.Linear(2, 2)}], TypeError, r"\[0\]: select parameters by name.*got Linear"),
        ([{"params": 3}], TypeError, r"\[0\]: select parameters by name.*got int"),
        ([{"params": ["*.bias", 3, "0.weight"]}], TypeError, r"\[0\]: select parameters by name.*got int"),
        ({"params": "*.bias"}, TypeError, r"param_groups is a sequence of dicts"),
        ("*.bias", TypeError, r"param_groups is a sequence of dicts"),
        (["*.bias"], TypeError, r"param_groups is a sequence of dicts"),
        ([{"params": "*.bias"}, "params"], TypeError, r"param_groups is a sequence of dicts"),
        ([{"params": "*.bias", "weigth_decay": 0.0}], TypeError, r"param_groups\[0\]: .*'weigth_decay'"),
        ([{"params": "*.bias"}, {"params": "0.*", "lr": -1.0}], ValueError, r"param_groups\[1\]: .*learning rate: -1"),
        ([{"params": "*.bias", "betas": (0.9, 1.0)}], ValueError, r"param_groups\[0\]: Invalid beta parameter"),
        ([{"params": "*.bias", "differentiable": True}], ValueError, r"differentiable=True"),
    ],
)
def test_groups_that_make_no_sense_are_refused_by_name(groups: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        DistributedOptimizer(wrap(make_net()), param_groups=groups)


def test_loops_over_tensors_are_taken_in_place_of_the_fused_kernel() -> None:
    """torch refuses both together."""
    looped, optimizer = train(torch.float32, range(2), {}, {**DEFAULTS, "foreach": True})
    assert not optimizer.param_groups[0]["fused"]
    fused, _ = train(torch.float32, range(2), {}, DEFAULTS)
    for name in NAMES:
        torch.testing.assert_close(looped[-1][name], fused[-1][name], rtol=1e-5, atol=1e-6)


def test_functions_see_the_parameters_themselves() -> None:
    model = make_net()
    model[0].weight.keeps_its_size = True
    groups = [{"params": lambda name, param: getattr(param, "keeps_its_size", False) and param.requires_grad}]
    optimizer = DistributedOptimizer(wrap(model), param_groups=groups)
    assert [held.name for held in optimizer.slices if held.group == 0] == ["0.weight"]


def test_options_of_a_group_go_with_those_that_all_share() -> None:
    """Nesterov's momentum needs a momentum."""
    options: dict[str, Any] = {"optimizer_class": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    optimizer = DistributedOptimizer(wrap(make_net()), param_groups=[{"params": "*.bias", "nesterov": True}], **options)
    assert [(group["momentum"], group["nesterov"]) for group in optimizer.param_groups] == [(0.9, True), (0.9, False)]


def test_a_frozen_parameter_is_in_no_group() -> None:
    model = make_net()
    model[0].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no trainable parameter is called '0\.bias'"):
        DistributedOptimizer(wrap(model), param_groups=[{"params": "0.bias"}])


def test_a_learning_rate_of_zero_is_one() -> None:
    """A warm-up begins with it."""
    assert DistributedOptimizer(wrap(make_net()), lr=0.0).param_groups[0]["lr"] == 0.0


def test_further_groups_are_refused() -> None:
    optimizer = DistributedOptimizer(wrap(make_net()))
    with pytest.raises(RuntimeError, match="takes no further group: give the constructor param_groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


@pytest.mark.parametrize("options", [{"fused": False}, {"foreach": True, "fused": False}], ids=str)
@pytest.mark.parametrize("max_grad_norm", [None, 0.1])
@pytest.mark.sampled(4)
def test_a_group_without_the_fused_kernel_takes_it_from_all(options: dict[str, Any], max_grad_norm: float) -> None:
    """Clipping divides all gradients inside the fused kernel, or all before it; never some."""
    groups = [{"params": "*.bias", **options}]
    common = {**DEFAULTS, "max_grad_norm": max_grad_norm}
    mixed, optimizer = train(torch.float32, range(STEPS), {}, {**common, "param_groups": groups})
    plain, _ = train(torch.float32, range(STEPS), {}, {**common, "fused": False})
    for ours, theirs in zip(mixed, plain, strict=True):
        for name in NAMES:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
    assert (optimizer.grad_norm is None) is (max_grad_norm is None)
