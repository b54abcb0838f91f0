"""Groups with an optimizer class each: every class updates its parameters as it does alone, with the same bits.

The reference holds one fp32 master for each parameter and one optimizer of each class, on gradients that the test adds
up by hand.
"""

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loops import assert_same, weights, wrap
from stock_steps import backward, loss_of
from summed_by_hand import tree_sum
from torch import Tensor, nn, optim

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    Lion,
    Muon,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.ddp.optimizer.steps import StepsByClass
from maingrad.ddp.plan.owned_params import find_owned_params, plan_model
from maingrad.launch import simulate

BF16 = torch.bfloat16
STEPS = 10
MATRICES = ["0.weight", "3.weight", "5.experts"]
SPLIT = {"params": "0.weight", "optimizer": Muon, "lr": 0.03, "split": [16, 32, 16]}
GROUPS = [SPLIT, {"params": MATRICES, "optimizer": Muon, "lr": 0.05}, {"params": "*.bias", "weight_decay": 0.0}]


class Experts(nn.Module):
    """Three matrices in one parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 8, 128).to(dtype) / 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.einsum("bi,eoi->bo", inputs, self.experts).tanh()


def make_net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Matrices, a fused one and experts among them, and vectors. Every parameter fills whole vector registers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 64, dtype=dtype),
        nn.Tanh(),
        nn.LayerNorm(64, dtype=dtype),
        nn.Linear(64, 128, dtype=dtype),
        nn.Tanh(),
        Experts(dtype),
    )


def batch_of(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def stock(dtype: torch.dtype, ranks: int, steps: int = STEPS, rest: Any = None) -> dict[str, Tensor]:
    """Weights after steps of one optimizer for each class, on whole masters."""
    model = make_net(dtype)
    masters = {name: nn.Parameter(param.detach().float()) for name, param in model.named_parameters()}
    biases = [masters[name] for name in masters if name.endswith("bias")]
    norm = [masters["2.weight"]]
    muon = Muon(
        [
            {"params": [masters["0.weight"]], "lr": 0.03, "split": [16, 32, 16]},
            {"params": [masters["3.weight"], masters["5.experts"]], "lr": 0.05},
        ]
    )
    if rest is None:
        rest = lambda groups: optim.AdamW(groups, lr=0.02, fused=True)  # noqa: E731
    other = rest([{"params": biases, "weight_decay": 0.0}, {"params": norm}])
    for step in range(steps):
        grads: list[dict[str, Tensor]] = []
        for rank in range(ranks):
            model.zero_grad()
            loss_of(model, batch_of(step, rank, dtype)).backward()
            grads.append({name: param.grad.float() * (1 / ranks) for name, param in model.named_parameters()})
        for name, master in masters.items():
            master.grad = tree_sum([grad[name] for grad in grads])
        for optimizer in (muon, other):
            optimizer.step()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(masters[name])
    return weights(model)


def build(
    dtype: torch.dtype, config: dict[str, Any], options: dict[str, Any] | None = None
) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    ddp = wrap(make_net(dtype), **config)
    return ddp, DistributedOptimizer(ddp, **{"lr": 0.02, "param_groups": GROUPS, **(options or {})})


def train(ddp: DistributedDataParallel, optimizer: DistributedOptimizer, dtype: torch.dtype, steps: range) -> None:
    for step in steps:
        backward(ddp, step, dtype)
        optimizer.step()
        optimizer.zero_grad()


def trained(
    dtype: torch.dtype, config: dict[str, Any], options: dict[str, Any] | None = None, steps: int = STEPS
) -> dict[str, Tensor]:
    ddp, optimizer = build(dtype, config, options)
    train(ddp, optimizer, dtype, range(steps))
    return weights(ddp)


ZERO1 = {"use_distributed_optimizer": True, "keep_params_whole": True}
SELECTED = {"use_distributed_optimizer": True, "keep_matrices_whole": tuple(MATRICES)}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, several buckets": {"bucket_size": 3000},
    "zero1": ZERO1,
    "zero1, overlapped": {
        **ZERO1,
        "bucket_size": 3000,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "zero1, matrices alone whole": {**SELECTED, "bucket_size": 3000},
    "hybrid": {**ZERO1, "num_distributed_optimizer_instances": 2},
}


@pytest.mark.parametrize("ranks", [1, 4, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 3, 6, 8, 16))])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_class_steps_as_alone(layout: str, dtype: torch.dtype, ranks: int) -> None:
    if layout == "hybrid":  # two instances of 2^k ranks: the order of their sums is that of all ranks
        ranks = {1: 2, 3: 4, 6: 8}.get(ranks, ranks)
    expected = stock(dtype, ranks)
    for ours in simulate(trained, ranks, dtype, LAYOUTS[layout]):
        assert_same(ours, expected)


@pytest.mark.in_turn
@pytest.mark.parametrize("cls", [optim.SGD, Lion])
def test_any_class_beside_muon(cls: Any) -> None:
    options = {"lr": 0.01, **({"fused": True} if cls is optim.SGD else {})}
    expected = stock(BF16, 3, rest=lambda groups: cls(groups, **options))
    given = {"optimizer_class": cls, "lr": 0.01}
    for ours in simulate(trained, 3, BF16, ZERO1, given):
        assert_same(ours, expected)


def test_groups_begin_with_the_defaults_of_their_class() -> None:
    """Options of the constructor are those of ``optimizer_class``."""
    optimizer = build(torch.float32, {}, {"betas": (0.8, 0.9), "weight_decay": 0.3})[1]
    assert optimizer.classes_of_groups == [Muon, Muon, optim.AdamW, optim.AdamW]
    first, second, biases, norm = optimizer.param_groups
    assert (first["lr"], first["split"], first["weight_decay"]) == (0.03, [16, 32, 16], 0.1)
    assert (second["lr"], second["split"]) == (0.05, 1) and "betas" not in second
    assert (biases["betas"], biases["weight_decay"], norm["weight_decay"]) == ((0.8, 0.9), 0.0, 0.3)
    assert biases["fused"] and "momentum" not in biases
    assert optimizer.defaults["betas"] == (0.8, 0.9)


def test_schedules_act_on_the_groups_of_all_classes() -> None:
    def on_each_rank(scheduled: bool) -> dict[str, Tensor]:
        ddp, optimizer = build(torch.float32, ZERO1)
        scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 5)
        for step in range(4):
            backward(ddp, step, torch.float32)
            optimizer.step()
            optimizer.zero_grad()
            if scheduled:
                scheduler.step()
            else:
                for group, rate in zip(optimizer.param_groups, (0.03, 0.05, 0.02, 0.02), strict=True):
                    group["lr"] = rate * (1 - (step + 1) / 5)
        return weights(ddp)

    for ours, theirs in zip(simulate(on_each_rank, 2, True), simulate(on_each_rank, 2, False), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_by_masters_whose_number_differs_between_ranks(norm_type: float) -> None:
    """As Lightning clips, over ``param_groups``."""

    def on_each_rank(clips: bool) -> tuple[int, Tensor, Tensor]:
        ddp, optimizer = build(torch.float32, SELECTED)
        backward(ddp, 0, torch.float32)
        masters = [param for group in optimizer.param_groups for param in group["params"]]
        given = masters if clips else list(ddp.parameters())
        norm = torch.nn.utils.clip_grad_norm_(given, 1e-3, norm_type)
        return len(masters), norm, torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0, norm_type)

    ours, expected = simulate(on_each_rank, 2, True), simulate(on_each_rank, 2, False)
    assert len({count for count, _, _ in ours}) == 2
    for (_, norm, clipped), (_, whole, by_params) in zip(ours, expected, strict=True):
        torch.testing.assert_close(norm, whole)
        torch.testing.assert_close(clipped, by_params)
        torch.testing.assert_close(clipped.item(), 1e-3, rtol=1e-2, atol=0)


def test_a_rank_that_updates_nothing_of_a_bucket_has_its_masters() -> None:
    """A bucket may be shorter than the shards of all ranks."""

    def on_each_rank() -> bool:
        ddp, optimizer = build(torch.float32, LAYOUTS["zero1, matrices alone whole"])
        train(ddp, optimizer, torch.float32, range(2))
        state, before = copy.deepcopy(optimizer.state_dict()), weights(ddp)
        assert len(state["masters"]) == len(ddp.buckets)
        train(ddp, optimizer, torch.float32, range(2, 3))
        optimizer.load_state_dict(state)
        assert_same(weights(ddp), before)
        nothing = {held.bucket_param.bucket.index for held in optimizer.slices if held.segment is None}
        return bool(nothing - {held.bucket_param.bucket.index for held in optimizer.slices if held.segment is not None})

    assert any(simulate(on_each_rank, 3))


@pytest.mark.parametrize("state", ["full", "compact"])
def test_a_rank_may_update_nothing_of_one_classs_parameters(state: str, tmp_path: Path) -> None:
    """It writes them, saves and loads as the other ranks do."""
    sgd = {"params": "bias", "optimizer": optim.SGD, "lr": 0.1}

    def on_each_rank() -> int:
        torch.manual_seed(0)
        ddp, loaded, restored = (wrap(nn.Linear(4, 2, dtype=BF16), use_distributed_optimizer=True) for _ in range(3))
        optimizer, its, theirs = (
            DistributedOptimizer(model, lr=0.02, state=state, param_groups=[sgd]) for model in (ddp, loaded, restored)
        )
        train(ddp, optimizer, BF16, range(1))
        with torch.no_grad():
            ddp.module.bias.fill_(3.0)
        expected = {"weight": ddp.module.weight.detach().clone(), "bias": torch.full((2,), 3.0, dtype=BF16)}
        save_checkpoint(tmp_path / "saved", ddp, optimizer)
        load_checkpoint(tmp_path / "saved", loaded, its)
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for model in (ddp, loaded, restored):
            assert_same(weights(model), expected)
        assert [held.name for held in optimizer.full_slices()] == [held.name for held in optimizer.slices]
        return sum(held.end - held.start for held in optimizer.slices if held.name == "bias")

    assert sorted(simulate(on_each_rank, 2)) == [0, 2]


def test_state_dicts_of_all_classes() -> None:
    def on_each_rank() -> dict[str, Tensor]:
        ddp, optimizer = build(BF16, ZERO1)
        train(ddp, optimizer, BF16, range(4))
        other, its = build(BF16, ZERO1, {"lr": 1.0, "param_groups": [{**group, "lr": 1.0} for group in GROUPS]})
        its.load_state_dict(optimizer.state_dict())
        train(other, its, BF16, range(4, STEPS))
        return weights(other)

    expected = stock(BF16, 3)
    for ours in simulate(on_each_rank, 3):
        assert_same(ours, expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"state": "compact", "param_groups": [{"params": "*.bias", "optimizer": optim.SGD, "lr": 0.1}]}],
    ids=["full", "compact"],
)
def test_a_state_dict_of_several_classes_from_before_the_first_step_begins_anew(options: dict[str, Any]) -> None:
    ddp, optimizer = build(BF16, {}, options)
    state = copy.deepcopy(optimizer.state_dict())
    train(ddp, optimizer, BF16, range(1))
    expected = weights(ddp)
    optimizer.load_state_dict(state)
    train(ddp, optimizer, BF16, range(1))
    assert_same(weights(ddp), expected)


def test_state_of_torchs_muon_is_taken() -> None:
    """Its groups have no ``split``."""
    theirs, ours = ({"params": "3.weight", "optimizer": cls, "ns_steps": 3} for cls in (optim.Muon, Muon))
    ddp, optimizer = build(torch.float32, {}, {"param_groups": [theirs]})
    train(ddp, optimizer, torch.float32, range(2))
    other, its = build(torch.float32, {}, {"param_groups": [ours]})
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(weights(other), weights(ddp))
    train(ddp, optimizer, torch.float32, range(2, 3))
    train(other, its, torch.float32, range(2, 3))
    for name, weight in weights(other).items():  # torch rounds to bf16
        torch.testing.assert_close(weight, weights(ddp)[name], rtol=0, atol=1e-4)


@pytest.mark.in_turn
@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2)])
def test_checkpoints_go_on_with_other_ranks_and_layouts(tmp_path: Path, before: int, after: int) -> None:
    """The same gradients on all ranks, whatever their number is: a mean of equal ones is exact for powers of two."""

    def steps(ddp: DistributedDataParallel, optimizer: DistributedOptimizer, numbers: range) -> None:
        for step in numbers:
            loss_of(ddp, batch_of(step, 0, BF16)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def save() -> None:
        ddp, optimizer = build(BF16, ZERO1)
        steps(ddp, optimizer, range(3))
        save_checkpoint(tmp_path / "saved", ddp, optimizer)
        steps(ddp, optimizer, range(3, 6))
        save_checkpoint(tmp_path / "end", ddp)

    def resume(config: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        ddp, optimizer = build(BF16, config)
        load_checkpoint(tmp_path / "saved", ddp, optimizer)
        steps(ddp, optimizer, range(3, 6))
        end = build(BF16, config)[0]
        load_checkpoint(tmp_path / "end", end)
        return weights(ddp), weights(end)

    simulate(save, before)
    for config in (ZERO1, {"bucket_size": 3000}):
        for ours, expected in simulate(resume, after, config):
            assert_same(ours, expected)


def test_several_groups_of_one_class_and_one_of_another(tmp_path: Path) -> None:
    def built() -> Any:
        classes: list[type[optim.Optimizer]] = [optim.AdamW, optim.AdamW, optim.SGD]
        names = ["0.weight", "3.weight", "*.bias"]
        groups = [{"params": name, "optimizer": cls, "lr": 0.1} for name, cls in zip(names, classes, strict=True)]
        return build(torch.float32, {}, {"param_groups": groups})

    ddp, optimizer = built()
    train(ddp, optimizer, torch.float32, range(1))
    save_checkpoint(tmp_path / "c", ddp, optimizer)
    again, its = built()
    load_checkpoint(tmp_path / "c", again, its)
    for model, each in ((ddp, optimizer), (again, its)):
        train(model, each, torch.float32, range(1, 3))
    assert_same(weights(again), weights(ddp))


def test_state_of_another_class_is_refused(tmp_path: Path) -> None:
    """The groups hold equal parameters."""
    groups = [{"params": ["0.weight", "3.weight"], "optimizer": Muon}, {"params": "*"}]
    ddp, optimizer = build(torch.float32, {}, {"param_groups": groups})
    save_checkpoint(tmp_path / "saved", ddp, optimizer)
    other = wrap(make_net())
    its = DistributedOptimizer(other, param_groups=[{"params": ["0.weight", "3.weight"]}, {"params": "*"}])
    with pytest.raises(ValueError, match="has the state of Muon, and this optimizer is AdamW"):
        load_checkpoint(tmp_path / "saved", other, its)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="another class"):
        its.load_state_dict(state)


def test_vectors_in_a_group_of_muon_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Muon updates matrices, and parameter '0\.bias' has shape \[64\]"):
        build(torch.float32, {}, {"param_groups": [{"params": "0.*", "optimizer": Muon}]})
    with pytest.raises(ValueError, match=r"Muon updates matrices, and parameter '5\.experts' has shape \[3, 8, 128\]"):
        build(torch.float32, {}, {"param_groups": [{"params": "5.experts", "optimizer": optim.Muon}]})
    with pytest.raises(TypeError, match=r"an optimizer class is a subclass of torch\.optim\.Optimizer, got 'Muon'"):
        build(torch.float32, {}, {"param_groups": [{"params": "0.*", "optimizer": "Muon"}]})
    with pytest.raises(TypeError, match=r"param_groups\[0\]: .*betas"):
        build(torch.float32, {}, {"param_groups": [{"params": "0.weight", "optimizer": Muon, "betas": (0.9, 0.9)}]})


def test_one_that_does_not_fit_muon_is_found_between_others_that_do() -> None:
    def refused(between: nn.Module, message: str, **options: Any) -> None:
        model = nn.Sequential(nn.Linear(4, 8, bias=False), between, nn.Linear(8, 8, bias=False))
        with pytest.raises(ValueError, match=message):
            DistributedOptimizer(wrap(model), param_groups=[{"params": "*", "optimizer": Muon, **options}])

    refused(nn.LayerNorm(8, bias=False), r"parameter '1\.weight' has shape \[8\]")
    refused(nn.Linear(8, 12, bias=False), r"parameter '1\.weight': ", split=[4, 4])


def test_matrices_that_shards_cut_are_refused_and_other_parameters_are_not_looked_at() -> None:
    with pytest.raises(ValueError, match=r"Muon updates whole parameters, .*keep_matrices_whole"):
        build(torch.float32, {"use_distributed_optimizer": True})
    torchs = {"param_groups": [{"params": "0.weight", "optimizer": optim.Muon}]}
    with pytest.raises(ValueError, match=r"Muon updates whole parameters, .*keep_matrices_whole"):
        build(torch.float32, {"use_distributed_optimizer": True}, torchs)
    # Of a stack whole matrices are kept, and not the whole parameter.
    lamb = type("LAMB", (optim.SGD,), {"per_parameter": True})
    with pytest.raises(ValueError, match=r"LAMB updates whole parameters, .*keep_params_whole=True"):
        build(torch.float32, SELECTED, {"param_groups": [{"params": "5.experts", "optimizer": lamb}]})


def test_compact_state_and_state_on_the_host_need_buckets_of_their_own() -> None:
    with pytest.raises(ValueError, match=r'state="compact" is not for Muon, and parameters .* lie in one bucket'):
        build(BF16, ZERO1, {"state": "compact"})
    for name in ("0.weight", "0.bias", "2.weight", "5.experts"):  # the one that differs may come at any place
        other = [{"params": name, "optimizer": optim.NAdam}]
        for key, value in (("state", "compact"), ("offload_state", "host")):
            words = rf"^{key}=\"{value}\" is not for NAdam, .*'{name}' of NAdam .*lie in one bucket"
            with pytest.raises(ValueError, match=words):
                build(BF16, {}, {"param_groups": other, key: value})
    groups = [{"params": "*", "optimizer": Muon}]

    def only_muon() -> None:
        ddp = wrap(nn.Linear(4, 4, bias=False))
        DistributedOptimizer(ddp, param_groups=groups, state="compact")

    with pytest.raises(ValueError, match=r'state="compact" is for AdamW.*, not Muon'):
        only_muon()
    # A matrix of a dtype of its own has a bucket of its own, and may have one that compact state does not know.
    model = nn.Sequential(nn.Linear(4, 4, bias=False).half(), nn.Linear(4, 4).to(BF16))
    optimizer = DistributedOptimizer(
        wrap(model), param_groups=[{"params": "0.weight", "optimizer": Muon}], state="compact"
    )
    assert [held.master.dtype for held in optimizer.slices if held.name == "0.weight"] == [torch.float32]


@pytest.mark.in_turn
def test_compact_state_of_the_other_class() -> None:
    """Matrices keep fp32 masters and momentum. The number of ranks changes no bit."""

    def on_each_rank(config: dict[str, Any]) -> dict[str, Tensor]:
        ddp, optimizer = build(BF16, config, {"state": "compact"})
        for step in range(STEPS):
            loss_of(ddp, batch_of(step, 0, BF16)).backward()
            optimizer.step()
            optimizer.zero_grad()
        for held in optimizer.slices:
            dtypes = {key: value.dtype for key, value in held.state().items()}
            if held.end > held.start and held.name in MATRICES:
                assert dtypes == {"momentum_buffer": torch.float32} and held.master.dtype is torch.float32
            elif held.end > held.start:
                assert dtypes == {"exp_avg": BF16, "exp_avg_sq": BF16, "remainder": torch.int16}
        restored, its = build(BF16, config, {"state": "compact"})
        its.load_state_dict(optimizer.state_dict())
        assert_same(weights(restored), weights(ddp))
        return weights(ddp)

    (alone,) = simulate(on_each_rank, 1, SELECTED)
    for ours in simulate(on_each_rank, 4, SELECTED):
        assert_same(ours, alone)
    (full,) = simulate(trained, 1, BF16, SELECTED, None, 3)
    exact: dict[str, Any] = {"state": "compact", "moment_dtype": torch.float32}
    (compact,) = simulate(trained, 1, BF16, SELECTED, exact, 3)
    for name, weight in compact.items():  # bf16 parameters are masters rounded half up, in place of half to even
        torch.testing.assert_close(weight, full[name], rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("state", ["full", "compact"])
def test_the_state_of_the_other_class_stays_on_the_device(state: str) -> None:
    options = {"state": state, "moment_dtype": torch.float32 if state == "compact" else None}
    (here,) = simulate(trained, 1, BF16, SELECTED, options, 2)
    (on_host,) = simulate(trained, 1, BF16, SELECTED, {**options, "offload_state": "host"}, 2)
    for name, weight in on_host.items():
        torch.testing.assert_close(weight, here[name], rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_two_classes_with_compact_state_in_one_bucket(tmp_path: Path, dtype: torch.dtype) -> None:
    """A load of one class's state leaves the other's parameters and remainders as they were loaded."""
    options = {
        "param_groups": [{"params": "*.bias", "optimizer": Lion, "lr": 0.01}],
        "state": "compact",
        "moment_dtype": torch.float32,
    }

    def masters(optimizer: DistributedOptimizer) -> dict[str, Tensor]:
        return {held.name: held.master.clone() for held in optimizer.full_slices()}

    def on_each_rank() -> None:
        ddp, optimizer = build(dtype, {"use_distributed_optimizer": True}, options)
        train(ddp, optimizer, dtype, range(3))
        save_checkpoint(tmp_path / "saved", ddp, optimizer)
        loaded, its = build(dtype, {"use_distributed_optimizer": True}, options)
        load_checkpoint(tmp_path / "saved", loaded, its)
        restored, theirs = build(dtype, {"use_distributed_optimizer": True}, options)
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for model, other in ((loaded, its), (restored, theirs)):
            assert_same(weights(model), weights(ddp))
            assert_same(masters(other), masters(optimizer))

    simulate(on_each_rank, 2)


def test_only_selected_parameters_are_kept_whole() -> None:
    """Their buckets are their own; the others' shards are even."""

    def on_each_rank() -> list[tuple[str, int]]:
        ddp, optimizer = build(BF16, {**SELECTED, "bucket_size": 3000})
        for bucket in ddp.plan.buckets:
            names = {slot.spec.name for slot in bucket.slots}
            assert names <= set(MATRICES) if bucket.keeps_matrices_whole else not names & set(MATRICES)
        return [(held.name, held.end - held.start) for held in optimizer.slices]

    by_rank = [dict(each) for each in simulate(on_each_rank, 3)]
    for name, param in make_net().named_parameters():
        counts = [each[name] for each in by_rank]
        assert sum(counts) == param.numel()
        if name in MATRICES:
            assert sorted(counts) == ([1024] * 3 if param.dim() == 3 else [0, 0, param.numel()])
    others = [sum(n for name, n in each.items() if name not in MATRICES) for each in by_rank]
    assert max(others) - min(others) <= 128 and min(others) > 0


def test_what_is_no_stack_of_matrices_is_kept_whole_altogether() -> None:
    """The kernels of a convolution too, and a vector, and a scalar; a stack without elements has a place."""
    shapes = {
        "vector": (512,),
        "scalar": (),
        "matrix": (16, 32),
        "stack": (4, 8, 16),
        "kernels": (4, 8, 4, 4),
        "no": (2, 0, 4),
    }
    model = nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()})
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, keep_matrices_whole=("*",))
    plan = plan_model(find_owned_params(model), config, shard_degree=2)
    by_name = {slot.spec.name: (bucket, slot) for bucket in plan.buckets for slot in bucket.slots}
    for name in shapes:
        bucket, slot = by_name[name]
        assert (slot.spec.whole, slot.spec.matrices) == (len(shapes[name]) != 3, len(shapes[name]) == 3), name
        assert bucket.keeps_matrices_whole
    bucket, slot = by_name["stack"]
    assert slot.start == bucket.start and bucket.numel == 512, "two of four matrices on each rank"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("0.weigth",), "keep_matrices_whole: no trainable parameter is called '0.weigth'"),
        ("0.weight", "keep_matrices_whole is a tuple of names and patterns"),
        ((0,), "keep_matrices_whole is a tuple of names and patterns"),
    ],
    ids=str,
)
def test_selections_that_select_nothing_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrap(make_net(), use_distributed_optimizer=True, keep_matrices_whole=given)
    with pytest.raises(ValueError, match="keep_matrices_whole has no effect without use_distributed_optimizer"):
        wrap(make_net(), keep_matrices_whole=("0.weight",))
    with pytest.raises(ValueError, match="keep_matrices_whole has no effect with keep_params_whole"):
        wrap(make_net(), **ZERO1, keep_matrices_whole=("0.weight",))


def test_methods_that_torch_lacks_reach_each_class() -> None:
    """``eval()`` of a schedule-free optimizer."""
    reached: list[str] = []

    class First(optim.SGD):
        elementwise = True

        def eval(self) -> str:
            reached.append("first")
            return "first"

    class Second(First):
        def eval(self) -> str:
            reached.append("second")
            return "second"

        def of_one_class(self) -> int:
            return 3

    groups = [{"params": "*.bias", "optimizer": Second, "lr": 0.1}]
    optimizer = DistributedOptimizer(wrap(make_net()), 0.1, optimizer_class=First, param_groups=groups)
    assert optimizer.eval() == "first" and reached == ["first", "second"]
    assert optimizer.of_one_class() == 3
    assert optimizer.defaults["lr"] == 0.1
    with pytest.raises(AttributeError, match="'DistributedOptimizer' object has no attribute 'absent'"):
        optimizer.absent()


def test_a_state_without_an_option_of_one_class_has_its_default() -> None:
    """``torch.optim.Muon`` has no ``split``; nor has what was saved before there was one."""
    (ddp, optimizer), (_, other) = (build(torch.float32, {}) for _ in range(2))
    train(ddp, optimizer, torch.float32, range(1))
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group.pop("split", None)
    other.load_state_dict(state)
    splits = [group.get("split") for group in other.param_groups]
    assert splits == [1 if cls is Muon else None for cls in other.classes_of_groups] and 1 in splits


def test_parameters_that_a_program_writes_are_masters_of_their_own_class() -> None:
    ddp, optimizer = build(BF16, {})
    train(ddp, optimizer, BF16, range(1))
    with torch.no_grad():
        for param in ddp.parameters():
            param.add_(1.0)
    optimizer.refresh_masters()
    assert {held.group for held in optimizer.slices} == {0, 1, 2, 3}
    for held in optimizer.slices:
        assert torch.equal(held.master, held.bucket_param.owned.param.detach().float().flatten()), held.name


def test_all_classes_are_told_of_a_replay() -> None:
    told: list[str] = []

    def of(name: str) -> Any:
        return SimpleNamespace(flats=[], slices=[], is_running=False, prepare_replay=lambda: told.append(name))

    first, second = of("first"), of("second")
    both = StepsByClass([first, second], [], [])
    both.prepare_replay()
    assert told == ["first", "second"]
    assert not both.is_running
    second.is_running = True
    assert both.is_running


@pytest.mark.parametrize("first", [False, True])
def test_what_constructors_of_each_class_put_into_the_state_is_there(first: bool) -> None:
    """Adagrad's sums begin with a value of the program's; those of a group, as in plain PyTorch, with the default."""
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    plain = copy.deepcopy(net)
    sums: dict[str, Any] = {"lr": 0.1, "initial_accumulator_value": 0.5}
    ddp = wrap(net)
    if first:
        group: dict[str, Any] = {"params": "1.weight", "optimizer": optim.SGD, "lr": 0.1}
        ours = DistributedOptimizer(ddp, optimizer_class=optim.Adagrad, param_groups=[group], **sums)
    else:
        group = {"params": "0.weight", "optimizer": optim.Adagrad, **sums}
        ours = DistributedOptimizer(ddp, optimizer_class=optim.SGD, lr=0.1, param_groups=[group])
    adagrad = optim.Adagrad([plain[0].weight], **sums) if first else optim.Adagrad([plain[0].weight], lr=0.1)
    theirs = [adagrad, optim.SGD([plain[1].weight], lr=0.1)]
    for step in range(2):
        for model in (ddp, plain):
            model(torch.full((2, 4), 1.0 + step)).square().sum().backward()
        for each in (ours, *theirs):
            each.step()
            each.zero_grad()
    for mine, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)
