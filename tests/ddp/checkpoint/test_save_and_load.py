"""A checkpoint keeps the model and its optimizer bit for bit, for any ranks, buckets and placements on both sides."""

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from checkpointed import Everything, Experts, assert_same_files, build, files_content, model_state, take_steps
from gloo import run_ranks
from loops import assert_same, weights, wrap
from seeding import seed_as_in_a_new_process
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import lr_scheduler

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    Muon,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.ddp.checkpoint.files.manifest import Manifest
from maingrad.ddp.checkpoint.files.opened import OpenedCheckpoint
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate

DTYPES = [torch.float32, torch.bfloat16]
ZERO1 = {"use_distributed_optimizer": True, "bucket_size": 300}
OVERLAPPING = {**ZERO1, "overlap_param_gather": True, "overlap_grad_reduce": True}
HYBRID = {**ZERO1, "num_distributed_optimizer_instances": 2}
ALL_REDUCE = {"bucket_size": 1000}
WHOLE = {"use_distributed_optimizer": True, "keep_params_whole": True}

# Ranks and wrapper that load what four ranks of ZeRO-1 saved, and save it again.
MIDDLES = {
    "zero1-1": (1, ZERO1),
    "zero1-2": (2, {"use_distributed_optimizer": True}),
    "zero1-3": (3, ZERO1),
    "zero1-6": (6, {**ZERO1, "bucket_size": 1}),
    "overlapping-4": (4, OVERLAPPING),
    "hybrid-4": (4, HYBRID),
    "hybrid-6": (6, {**HYBRID, "num_distributed_optimizer_instances": 3}),
    "all-reduce-1": (1, ALL_REDUCE),
    "all-reduce-3": (3, ALL_REDUCE),
    "whole-3": (3, WHOLE),
}


def train_and_save(
    folder: Path, dtype: torch.dtype, config: dict[str, Any], steps: range = range(3)
) -> dict[str, Tensor]:
    ddp, optimizer = build(dtype, **config)
    take_steps(ddp, optimizer, steps, dist.get_rank())
    save_checkpoint(folder, ddp, optimizer, extra={"step": steps.stop})
    return model_state(ddp)


def load_and_save(
    source: Path, target: Path, dtype: torch.dtype, config: dict[str, Any]
) -> tuple[dict[str, Tensor], Any]:
    ddp, optimizer = build(dtype, seed=1, **config)
    extra = load_checkpoint(source, ddp, optimizer)
    save_checkpoint(target, ddp, optimizer, extra=extra)
    return model_state(ddp), extra


def load_and_train(folder: Path, dtype: torch.dtype, config: dict[str, Any], steps: range) -> dict[str, Tensor]:
    ddp, optimizer = build(dtype, seed=2, **config)
    load_checkpoint(folder, ddp, optimizer)
    take_steps(ddp, optimizer, steps, dist.get_rank())
    optimizer.finish_param_sync()
    return model_state(ddp)


def assert_same_weights(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """All weights and persistent buffers are equal."""
    assert_same(*({name: t for name, t in side.items() if name != "scratch"} for side in (actual, expected)))


class Saved(NamedTuple):
    """A checkpoint of four ranks of ZeRO-1 after three steps, and the expected state after five."""

    folder: Path
    state: dict[str, Tensor]
    two_steps_later: list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Saved]:
    root = tmp_path_factory.mktemp("four")

    @functools.cache
    def save(dtype: torch.dtype) -> Saved:
        folder = root / str(dtype)
        states = simulate(train_and_save, 4, folder, dtype, ZERO1)
        later = simulate(train_and_save, 4, root / "later", dtype, ZERO1, range(5))
        return Saved(folder, states[0], later)

    return save


FAST = [
    *((name, torch.bfloat16) for name in MIDDLES if name not in ("overlapping-4", "hybrid-6", "all-reduce-1")),
    ("all-reduce-1", torch.float32),
]


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "middle, dtype",
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in FAST else pytest.mark.slow, id=f"{name}-{dtype}")
        for name in MIDDLES
        for dtype in DTYPES
    ],
)
@pytest.mark.sampled(1)
def test_there_and_back_changes_no_bit(
    tmp_path: Path, saved_by_four: Callable[[torch.dtype], Saved], middle: str, dtype: torch.dtype
) -> None:
    """Four ranks -> any others -> four ranks: the same files; training goes on as without the way there and back."""
    ranks, config = MIDDLES[middle]
    saved = saved_by_four(dtype)
    for state, extra in simulate(load_and_save, ranks, saved.folder, tmp_path / "second", dtype, config):
        assert_same_weights(state, saved.state)
        assert extra == {"step": 3}
    assert_same_files(saved.folder, tmp_path / "second")
    resumed = simulate(load_and_train, 4, tmp_path / "second", dtype, OVERLAPPING, range(3, 5))
    for rank in range(4):
        # The first rank's count of tokens is every rank's now, and grew alike.
        assert_same_weights(resumed[rank], saved.two_steps_later[rank])


@pytest.mark.parametrize(
    "ranks, config",
    [
        pytest.param(2, ZERO1, id="zero1"),
        pytest.param(3, ALL_REDUCE, id="ddp", marks=pytest.mark.slow),
        pytest.param(4, HYBRID, id="hybrid", marks=pytest.mark.slow),
    ],
)
def test_real_ranks_resume_bitwise(tmp_path: Path, ranks: int, config: dict[str, Any]) -> None:
    straight = run_ranks(train_and_save, ranks, tmp_path / "straight", torch.bfloat16, config, range(4))
    run_ranks(train_and_save, ranks, tmp_path / "half", torch.bfloat16, config, range(2))
    resumed = run_ranks(load_and_train, ranks, tmp_path / "half", torch.bfloat16, config, range(2, 4))
    for rank in range(ranks):
        assert_same_weights(resumed[rank], straight[rank])
    assert len(list((tmp_path / "half").glob("*.safetensors"))) == (2 if config is HYBRID else ranks)


# ---- Optimizers. ----

MATRICES = {"params": lambda name, param: param.ndim > 1, "weight_decay": 0.3}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw groups": {"param_groups": [{"params": "*.bias", "weight_decay": 0.0, "betas": (0.8, 0.9)}, MATRICES]},
    "amsgrad": {"optimizer_class": torch.optim.Adam, "amsgrad": True},
    "sgd momentum in one group": {
        "optimizer_class": torch.optim.SGD,
        "param_groups": [{**MATRICES, "momentum": 0.9}],
    },
    "nadam": {"optimizer_class": torch.optim.NAdam},
    "adagrad": {"optimizer_class": torch.optim.Adagrad},
    "asgd": {"optimizer_class": torch.optim.ASGD},
    "rprop": {"optimizer_class": torch.optim.Rprop},
    "clipped": {"max_grad_norm": 0.1},
}


def resume_scheduled(folder: Path, options: dict[str, Any], config: dict[str, Any], other: dict[str, Any]) -> None:
    rank = dist.get_rank()

    def start(seed: int, config: dict[str, Any]) -> tuple[DistributedDataParallel, DistributedOptimizer]:
        ddp = wrap(Everything(torch.bfloat16, seed=seed), **config)
        return ddp, DistributedOptimizer(ddp, lr=0.02, **options)

    def train(ddp: Any, optimizer: Any, schedule: Any, steps: range) -> dict[str, Tensor]:
        for step in steps:
            take_steps(ddp, optimizer, [step], rank)
            schedule.step()
        return weights(ddp)

    def scheduled(optimizer: DistributedOptimizer) -> lr_scheduler.LRScheduler:
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)

    model, optimizer = start(0, config)
    expected = train(model, optimizer, scheduled(optimizer), range(4))

    model, optimizer = start(0, config)
    schedule = scheduled(optimizer)
    train(model, optimizer, schedule, range(2))
    save_checkpoint(folder, model, optimizer, extra=schedule.state_dict())

    elsewhere = start(5, other)
    extra = load_checkpoint(folder, *elsewhere)
    save_checkpoint(f"{folder}-again", *elsewhere, extra=extra)

    model, optimizer = start(3, config)
    schedule = scheduled(optimizer)
    schedule.load_state_dict(load_checkpoint(f"{folder}-again", model, optimizer))
    assert_same(train(model, optimizer, schedule, range(2, 4)), expected)


FAST_OPTIMIZERS = ("adamw groups", "sgd momentum in one group", "nadam")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=() if name in FAST_OPTIMIZERS else pytest.mark.slow)
        for name, options in OPTIMIZERS.items()
    ],
)
@pytest.mark.sampled(1)
def test_every_optimizer_resumes_with_its_groups_and_schedule(tmp_path: Path, options: dict[str, Any]) -> None:
    """The checkpoint passes through a wrapper with other buckets."""
    simulate(resume_scheduled, 2, tmp_path / "c", options, ZERO1, WHOLE)


def hyperparameters_and_memory(folder: Path) -> None:
    ddp, optimizer = build(**ZERO1)
    take_steps(ddp, optimizer, range(1), dist.get_rank())
    optimizer.param_groups[0]["lr"] = 0.125
    save_checkpoint(folder, ddp, optimizer)
    optimizer.param_groups[0].update(lr=0.5, betas=(0.1, 0.2))
    before = {part.name: {k: v.data_ptr() for k, v in part.state().items()} for part in optimizer.slices}
    load_checkpoint(folder, ddp, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert optimizer.param_groups[0]["fused"] is True
    optimizer.param_groups[0]["betas"] = [0.1, 0.2]
    load_checkpoint(folder, ddp, optimizer)
    assert optimizer.param_groups[0]["betas"] == [0.9, 0.999]  # as its own program writes them
    # State that is there is written in place: a load needs no second copy of the moments.
    assert before == {part.name: {k: v.data_ptr() for k, v in part.state().items()} for part in optimizer.slices}


def test_hyperparameters_come_back_and_moments_stay_where_they_are(tmp_path: Path) -> None:
    simulate(hyperparameters_and_memory, 2, tmp_path / "c")


def test_groups_are_known_by_their_parameters(tmp_path: Path) -> None:
    """Hyperparameters follow the parameters to groups in another order, and past an empty default group."""
    biases, others = {"params": "*.bias"}, {"params": lambda name, param: not name.endswith(".bias")}

    def save() -> None:
        groups = [{**biases, "lr": 0.25}, {**others, "lr": 0.5}]
        ddp, optimizer = build(torch.bfloat16, optimizer={"param_groups": groups}, **ZERO1)
        take_steps(ddp, optimizer, range(1), dist.get_rank())
        save_checkpoint(tmp_path / "c", ddp, optimizer)

    def load() -> list[float]:
        ddp, optimizer = build(torch.bfloat16, seed=1, optimizer={"param_groups": [others]}, **ZERO1)
        load_checkpoint(tmp_path / "c", ddp, optimizer)
        save_checkpoint(tmp_path / "again", ddp, optimizer)
        return [group["lr"] for group in optimizer.param_groups]

    simulate(save, 2)
    assert simulate(load, 3) == [[0.5, 0.25]] * 3
    (tensors, _), (others_again, _) = files_content(tmp_path / "c"), files_content(tmp_path / "again")
    assert_same(tensors["master"], others_again["master"])


def test_a_group_without_parameters_keeps_its_hyperparameters(tmp_path: Path) -> None:
    """A scheduler goes on from the learning rates of all groups."""
    groups = [{"params": "*.bias"}, {"params": lambda name, param: not name.endswith(".bias")}]
    model, optimizer = build(optimizer={"param_groups": groups})
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.5**index
    save_checkpoint(tmp_path / "c", model, optimizer)
    model, optimizer = build(optimizer={"param_groups": groups})
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5, 0.25]
    assert not optimizer.param_groups[2]["params"]


def test_a_group_without_parameters_takes_nothing_of_another_class(tmp_path: Path) -> None:
    def make(cls: type, lr: float) -> Any:
        groups = [{"params": "*", "optimizer": torch.optim.SGD, "lr": lr}]
        return build(optimizer={"param_groups": groups, "optimizer_class": cls, "lr": lr})

    save_checkpoint(tmp_path / "c", *make(torch.optim.AdamW, 0.25))
    model, optimizer = make(torch.optim.Adam, 0.5)
    load_checkpoint(tmp_path / "c", model, optimizer)
    lrs = {bool(group["params"]): group["lr"] for group in optimizer.param_groups}
    assert lrs == {True: 0.25, False: 0.5}


def test_a_group_without_parameters_takes_nothing_of_a_group_that_has_some(tmp_path: Path) -> None:
    """Though their places in the two optimizers are the same."""

    def make(*rates: float, first: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model: Any = fully_shard(nn.Linear(4, 4))
        groups = [
            {"params": [*model.parameters()] if index == first else [], "lr": lr} for index, lr in enumerate(rates)
        ]
        return model, torch.optim.SGD(groups)

    save_checkpoint(tmp_path / "c", *make(0.25, 0.5, 0.75, 0.875, first=0))
    model, optimizer = make(1.0, 2.0, 3.0, 4.0, first=3)
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5, 0.75, 0.25]


def test_options_that_are_words_come_back(tmp_path: Path) -> None:
    def make(word: str | None) -> tuple[DistributedDataParallel, DistributedOptimizer]:
        model = DistributedDataParallel(nn.Linear(4, 4, bias=False))
        return model, DistributedOptimizer(model, optimizer_class=Muon, adjust_lr_fn=word)

    save_checkpoint(tmp_path / "c", *make("match_rms_adamw"))
    for word in ("original", None):
        model, optimizer = make(word)
        load_checkpoint(tmp_path / "c", model, optimizer)
        assert optimizer.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"


def test_groups_that_ranks_choose_differently_are_refused_on_all(tmp_path: Path) -> None:
    def save() -> str:
        biases = {"params": "*.bias" if dist.get_rank() else "up.bias", "weight_decay": 0.0}
        ddp, optimizer = build(optimizer={"param_groups": [biases]}, **ZERO1)
        take_steps(ddp, optimizer, range(1), dist.get_rank())
        with pytest.raises(
            ValueError, match=r"ranks disagree on 'norm.bias': its groups are 1 on one, and 0 on another"
        ) as refused:
            save_checkpoint(tmp_path / "c", ddp, optimizer)
        return str(refused.value).removesuffix(" (on rank 0)")

    first, second = simulate(save, 2)
    assert first == second
    assert not list(tmp_path.iterdir())


def test_a_buffer_that_is_expanded_cannot_be_loaded_and_nothing_is(tmp_path: Path) -> None:
    def make(seed: int) -> nn.Module:
        model = Everything(seed=seed)
        model.register_buffer("mask", torch.full((1,), float(seed)).expand(4))
        model.register_buffer("one", torch.tensor(float(seed)).expand(1))  # an element of its own
        return model

    save_checkpoint(tmp_path / "c", make(1))
    model = make(2)
    with pytest.raises(ValueError, match=r"'mask' is expanded.*make it a tensor of its own with clone\(\)"):
        load_checkpoint(tmp_path / "c", model)
    assert_same(weights(model), weights(make(2)))
    model.mask = model.mask.clone()
    load_checkpoint(tmp_path / "c", model)
    assert model.mask.tolist() == [1.0] * 4 and model.one.tolist() == [1.0]


@pytest.mark.parametrize(
    "there, here",
    [
        (0.25, torch.tensor(0.5)),
        (torch.tensor(0.25), 0.5),
        (0.25, torch.tensor([0.5])),
        (torch.tensor([0.25]), 0.5),
        (torch.tensor([0.25]), torch.tensor(0.5)),
    ],
    ids=["to", "from", "to a row", "from a row", "from a row to a scalar"],
)
def test_a_learning_rate_in_a_tensor_stays_where_it_is(tmp_path: Path, there: Any, here: Any) -> None:
    model, optimizer = build(optimizer={"lr": there})
    save_checkpoint(tmp_path / "c", model, optimizer)
    model, optimizer = build(optimizer={"lr": here})
    load_checkpoint(tmp_path / "c", model, optimizer)
    loaded = optimizer.param_groups[0]["lr"]
    assert type(loaded) is type(here)
    assert loaded == 0.25
    assert not isinstance(here, Tensor) or loaded is here


def test_a_learning_rate_of_numpy_is_a_number(tmp_path: Path) -> None:
    """A schedule that is computed with NumPy leaves one in the optimizer."""
    model, optimizer = build(optimizer={"lr": 0.25})
    save_checkpoint(tmp_path / "c", model, optimizer)
    model, optimizer = build(optimizer={"lr": 0.5})
    lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(step)))
    assert isinstance(optimizer.param_groups[0]["lr"], np.float64)
    load_checkpoint(tmp_path / "c", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.25


class WithNothing(nn.Linear):
    """Two parameters have no element: models without an optional part keep its names so."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.nothing, self.neither = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(2, 0))


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_parameter_without_elements_steps_on_with_the_others(tmp_path: Path, ranks: int) -> None:
    """torch's fused SGD takes the first step of all tensors or of none, those without elements too."""

    def trained(steps: int, loads: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model: Any = fully_shard(WithNothing())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        if loads:
            load_checkpoint(tmp_path / "c", model, optimizer)
        for _ in range(steps):
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not loads:
            save_checkpoint(tmp_path / "c", model, optimizer)
        with model.unsharded():
            return weights(model)

    def run(steps: int, loads: bool) -> dict[str, Tensor]:
        return simulate(trained, ranks, steps, loads)[0] if ranks else trained(steps, loads)

    run(1, False)
    resumed = run(1, True)
    assert_same(resumed, run(2, False))


def test_before_the_first_step_there_are_no_moments_to_keep(tmp_path: Path) -> None:
    def save_and_load() -> dict[str, Tensor]:
        ddp, optimizer = build(**ZERO1)
        save_checkpoint(tmp_path / "c", ddp, optimizer)
        ddp, optimizer = build(seed=1, **ZERO1)
        load_checkpoint(tmp_path / "c", ddp, optimizer)
        take_steps(ddp, optimizer, range(2), dist.get_rank())
        return weights(ddp)

    def straight() -> dict[str, Tensor]:
        ddp, optimizer = build(**ZERO1)
        take_steps(ddp, optimizer, range(2), dist.get_rank())
        return weights(ddp)

    assert_same(simulate(save_and_load, 2)[0], simulate(straight, 2)[0])
    assert set(files_content(tmp_path / "c")[0]) == {"model"}


# ---- What is in the files. ----


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    simulate(train_and_save, 3, tmp_path / "c", torch.bfloat16, ZERO1)
    tensors, manifest = files_content(tmp_path / "c")
    reference = Everything(torch.bfloat16)
    names = [name for name, _ in reference.named_parameters()]
    trainable = [name for name, param in reference.named_parameters() if param.requires_grad]
    half = [name for name in trainable if not name.startswith("norm.")]
    assert set(tensors["model"]) == {*names, "seen"}
    assert set(tensors["master"]) == set(half), "masters of fp32 parameters are the parameters: stored once"
    assert set(tensors["optimizer"]["state"]) == {name for name in trainable if name != "nothing"}
    for name in half:
        assert tensors["master"][name].dtype is torch.float32
        assert torch.equal(tensors["master"][name].bfloat16(), tensors["model"][name]), name
    for name, moments in tensors["optimizer"]["state"].items():
        assert set(moments) == {"exp_avg", "exp_avg_sq"}
        assert all(moment.shape == reference.get_parameter(name).shape for moment in moments.values())
        assert manifest["tensors"][name]["scalars"]["step"]["tensor"] == 3.0
    assert manifest["tied"] == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("ranks, config", [(4, ZERO1), (3, ALL_REDUCE), (4, HYBRID)], ids=["zero1", "ddp", "hybrid"])
@pytest.mark.sampled(1)
def test_every_element_is_written_once_and_work_is_shared(tmp_path: Path, ranks: int, config: dict[str, Any]) -> None:
    simulate(train_and_save, ranks, tmp_path / "c", torch.bfloat16, config)
    manifest = Manifest.read(tmp_path / "c")  # this checks that boxes tile each tensor
    written = manifest.nbytes
    writers = 2 if config is HYBRID else ranks
    assert set(written) == set(range(writers))
    total = sum(
        math.prod(entry.shape) * dtype.itemsize
        for entry in manifest.tensors.values()
        for dtype in entry.dtypes.values()
    )
    assert sum(written.values()) == total
    assert max(written.values()) < 1.6 * total / writers


def load_counting(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    ddp, optimizer = build(torch.bfloat16, **config)
    load_checkpoint(folder, ddp, optimizer)
    mine = sum(part.master.nbytes + sum(each.nbytes for each in part.state().values()) for part in optimizer.slices)
    return dist.get_rank(), mine + ddp.module.fixed.nbytes + ddp.module.seen.nbytes


def test_a_rank_reads_its_own_slices_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the number of ranks that saved, exactly its slices; each stored chunk at most once."""
    simulate(train_and_save, 4, tmp_path / "c", torch.bfloat16, ZERO1)
    nbytes: dict[int, int] = {}
    original = OpenedCheckpoint.read

    def counting(opened: OpenedCheckpoint) -> None:
        original(opened)
        wanted = sum(
            both.numel * data.itemsize
            for entry in opened.entries
            for box, data in entry.wanted
            if (both := entry.box.intersect(box)) is not None
        )
        nbytes[dist.get_rank()] = wanted
        stored = [(entry.file.path, entry.name) for entry in opened.entries]
        assert len(set(stored)) == len(stored)

    monkeypatch.setattr(OpenedCheckpoint, "read", counting)
    assert dict(simulate(load_counting, 4, tmp_path / "c", ZERO1)) == nbytes


def test_views_of_every_kind_are_saved_as_their_values(tmp_path: Path) -> None:
    """Transposed, strided, expanded, conjugated and negated views: saved, and loaded into views and copies."""
    numbers = torch.arange(24.0).view(4, 6)
    complexes = torch.complex(numbers, numbers + 1)
    views = {
        "transposed": numbers.t(),
        "permuted": numbers.view(2, 3, 4).permute(2, 0, 1),
        "steps": numbers[:, ::2],
        "steps_of_one": torch.arange(10.0)[::3],
        "expanded": numbers[:, :1].expand(4, 5),
        "conjugated": complexes.conj(),
        "negated": complexes.conj().imag,
        "last": numbers.to(memory_format=torch.contiguous_format)[2:],
    }
    model, plain = nn.Module(), nn.Module()
    for name, view in views.items():
        model.register_buffer(name, view)
        plain.register_buffer(name, torch.zeros(view.shape, dtype=view.dtype))
    save_checkpoint(tmp_path / "c", model)
    load_checkpoint(tmp_path / "c", plain)
    assert_same(dict(plain.named_buffers()), views)
    for name in ("transposed", "permuted", "steps", "steps_of_one"):
        target = torch.zeros_like(views[name]) if "steps" not in name else torch.zeros(4, 12)[:, ::4]
        setattr(plain, name, target if name != "steps_of_one" else torch.zeros(8)[::2])
    load_checkpoint(tmp_path / "c", plain)
    assert not plain.transposed.is_contiguous() and not plain.steps_of_one.is_contiguous()
    assert_same(dict(plain.named_buffers()), views)


def save_different_buffers(folder: Path) -> None:
    model = Everything()
    for name in ("more", "again"):
        model.register_buffer(name, torch.zeros(2))
    ddp = wrap(model, **ZERO1)
    for buffer in (model.more, model.again, model.seen):
        buffer.fill_(10 + dist.get_rank())
    save_checkpoint(folder, ddp, DistributedOptimizer(ddp))


def test_buffers_are_the_first_ranks(tmp_path: Path) -> None:
    """All of them: those of one layer belong together."""
    simulate(save_different_buffers, 3, tmp_path / "c")
    model = Everything()
    for name in ("more", "again"):
        model.register_buffer(name, torch.zeros(2))
    scratch = model.scratch.clone()
    load_checkpoint(tmp_path / "c", model)
    assert model.seen == 10
    assert model.more.tolist() == model.again.tolist() == [10, 10]
    assert torch.equal(model.scratch, scratch)


def test_a_changed_parameter_reaches_its_master_before_it_is_saved(tmp_path: Path) -> None:
    def save() -> None:
        ddp, optimizer = build(torch.bfloat16, **ZERO1)
        take_steps(ddp, optimizer, range(1), dist.get_rank())
        with torch.no_grad():
            ddp.module.up.weight.fill_(0.75)
        save_checkpoint(tmp_path / "c", ddp, optimizer)

    simulate(save, 2)
    tensors, _ = files_content(tmp_path / "c")
    assert torch.equal(tensors["master"]["up.weight"], torch.full((17, 15), 0.75))


# ---- Without an optimizer. ----


def load_weights_only(folder: Path, when: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """An optimizer that was made before or after the load uses the loaded weights."""
    if when == "before":
        ddp, optimizer = build(torch.bfloat16, seed=1, **ZERO1)
        load_checkpoint(folder, ddp)
    else:
        ddp = wrap(Everything(torch.bfloat16, seed=1), **ZERO1)
        load_checkpoint(folder, ddp)
        optimizer = DistributedOptimizer(ddp, lr=0.02, weight_decay=0.1)
    loaded = model_state(ddp)
    ddp.finish_grad_sync()
    optimizer.param_groups[0].update(lr=0.0)
    optimizer.step()
    return loaded, model_state(ddp)


@pytest.mark.parametrize("with_optimizer", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.sampled(2)
def test_weights_alone_load_into_a_wrapped_model(tmp_path: Path, when: str, with_optimizer: bool) -> None:
    def save() -> dict[str, Tensor]:
        ddp, optimizer = build(torch.bfloat16, **ZERO1)
        take_steps(ddp, optimizer, range(2), dist.get_rank())
        save_checkpoint(tmp_path / "c", ddp, optimizer if with_optimizer else None)
        return model_state(ddp)

    saved = simulate(save, 3)[0]
    for loaded, stepped in simulate(load_weights_only, 2, tmp_path / "c", when):
        assert_same_weights(loaded, saved)
        assert_same_weights(stepped, saved)


def test_a_module_alone_is_saved_and_loaded_without_ranks(tmp_path: Path) -> None:
    model, other = Everything(torch.bfloat16), Everything(torch.bfloat16, seed=1)
    save_checkpoint(tmp_path / "c", model, extra=[1, {"two": None}])
    assert load_checkpoint(tmp_path / "c", other) == [1, {"two": None}]
    assert_same(weights(other), weights(model))
    assert not other.fixed.is_contiguous()
    assert other.head.weight is other.embed.weight


def test_a_load_between_forward_and_backward_is_an_error_of_torchs(tmp_path: Path) -> None:
    """As every other write: the backward would compute with weights that the forward has not seen."""
    model = nn.Linear(2, 2)
    save_checkpoint(tmp_path / "c", model)
    loss = model(torch.ones(1, 2, requires_grad=True)).sum()
    load_checkpoint(tmp_path / "c", model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- Experts. ----


def with_experts(folder: Path, load: bool, sets: int = 2) -> dict[str, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(range(first, size, sets)) for first in range(sets)]
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=1)
    model = Experts(5 if load else 0, rank % sets, marked=True)
    model.expert.register_buffer("seen", torch.tensor(-1.0 if load else float(rank % sets)))
    model.expert.again = model.expert.weight  # type: ignore[assignment]
    ddp = DistributedDataParallel(model, config, expert_process_group=groups[rank % sets])
    optimizer = DistributedOptimizer(ddp, lr=0.1)
    if load:
        load_checkpoint(folder, ddp, optimizer)
        assert all(part.state() for part in optimizer.slices if part.start < part.end)
        return {**weights(ddp), **dict(model.named_buffers())}
    ddp(torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    save_checkpoint(folder, ddp, optimizer)
    return {**weights(ddp), **dict(model.named_buffers())}


def with_experts_apart(folder: Path) -> None:
    """Instances (0 1) and (2 3) of the dense layer, each with experts of its own."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    ddp = DistributedDataParallel(
        Experts(0, rank // 2, marked=True), config, process_group=mesh, expert_process_group=groups[rank // 2]
    )
    save_checkpoint(folder, ddp, DistributedOptimizer(ddp))


def test_experts_that_no_writer_holds_are_missed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="experts of set 1 are on no rank of the first instance"):
        simulate(with_experts_apart, 4, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_each_set_of_experts_comes_back_to_its_own_ranks(tmp_path: Path) -> None:
    saved = simulate(with_experts, 4, tmp_path / "c", False)
    assert not torch.equal(saved[0]["expert.weight"], saved[1]["expert.weight"])
    assert [float(each["expert.seen"]) for each in saved] == [0, 1, 0, 1]
    for rank, loaded in enumerate(simulate(with_experts, 6, tmp_path / "c", True)):
        assert_same(loaded, saved[rank % 2])
    with pytest.raises(Exception, match=r"2 different set\(s\) of experts, and these ranks have 1"):
        load_checkpoint(tmp_path / "c", Experts(1, 0, marked=True))


def test_each_of_three_sets_of_experts_comes_back(tmp_path: Path) -> None:
    saved = simulate(with_experts, 3, tmp_path / "c", False, 3)
    stored = {name for name in Manifest.read(tmp_path / "c").tensors if name.startswith("expert.weight")}
    assert stored == {f"expert.weight@expert_set_{index}_of_3" for index in range(3)}
    for rank, loaded in enumerate(simulate(with_experts, 3, tmp_path / "c", True, 3)):
        assert_same(loaded, saved[rank])
    with pytest.raises(RuntimeError, match=r"3 different set\(s\) of experts, and these ranks have 2"):
        simulate(with_experts, 4, tmp_path / "c", True, 2)


@pytest.mark.parametrize("instances", [1, 2])
def test_experts_that_all_ranks_share_are_stored_as_other_weights(tmp_path: Path, instances: int) -> None:
    def save() -> dict[str, Tensor]:
        mesh = init_device_mesh("cpu", (instances, 2), mesh_dim_names=("outer", "inner"))
        ranks: Any = mesh if instances > 1 else dist.group.WORLD
        ddp = DistributedDataParallel(Experts(0, 0, marked=True), expert_process_group=ranks)
        save_checkpoint(tmp_path / "c", ddp)
        return weights(ddp)

    saved, *_ = simulate(save, 2 * instances)
    other = Experts(1, 0)
    load_checkpoint(tmp_path / "c", other)
    assert_same(weights(other), saved)


# ---- The documentation. ----

PAGES = [Path(__file__).parents[3] / "docs" / page for page in ("checkpoints.md", "reference/checkpoints.md")]
DOCS = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)]


def run_docs(folder: Path) -> None:
    for block in DOCS[:4]:
        names: dict[str, Any] = {}
        seed_as_in_a_new_process()
        exec(block.replace('"runs/', f'"{folder}/'), names)
        assert names.get("extra", {"step": 100})["step"] == 100


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_documentation_runs(tmp_path: Path) -> None:
    """Run the first blocks on two ranks, and the others on the files of these."""
    assert len(DOCS) == 7
    simulate(run_docs, 2, tmp_path)
    assert (tmp_path / "step-101").exists()
    for block in DOCS[4:]:
        exec(block.replace('"runs/', f'"{tmp_path}/'), {})
    assert (tmp_path / "fp32.safetensors").exists()


class SharedBuffers(nn.Module):
    """A buffer under a non-persistent name and two persistent ones; another one under such names of modules."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("cache", torch.full((2,), value), persistent=False)
        self.register_buffer("running", self.cache)
        self.register_buffer("again", self.cache)
        self.inner, self.other = nn.Module(), nn.Module()
        self.inner.register_buffer("table", torch.full((4,), value), persistent=False)
        self.other.register_buffer("table", self.inner.table)
        self.other.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("wrapped", [True, False])
def test_a_buffer_counts_where_any_of_its_names_is_persistent(tmp_path: Path, wrapped: bool) -> None:
    def make(value: float) -> nn.Module:
        return wrap(SharedBuffers(value), **ZERO1) if wrapped else SharedBuffers(value)

    save_checkpoint(tmp_path / "c", make(7.0))
    model = make(0.0)
    load_checkpoint(tmp_path / "c", model)
    assert_same(model.state_dict(), make(7.0).state_dict())
    tensors, manifest = files_content(tmp_path / "c")
    assert {name for name, entry in manifest["tensors"].items() if entry["is_buffer"]} == {"running", "other.table"}, (
        "and is stored once"
    )
    assert set(tensors["model"]) == {"weight", "running", "other.table"}


@pytest.mark.parametrize(
    ("make", "wrapped"),
    [  # a wrapper takes no sparse buffers: no collective does
        (lambda: torch.eye(3).to_sparse(), False),
        (lambda: torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 0, torch.qint8), False),
        (lambda: torch.quantize_per_tensor(torch.ones(3, 4), 0.1, 0, torch.qint8), True),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_buffer_that_is_not_dense_is_refused_by_name(
    tmp_path: Path, make: Callable[[], Tensor], wrapped: bool
) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].register_buffer("table", make())
    with pytest.raises(
        ValueError, match=r"'0.table' is quantized or not strided, and a checkpoint has dense tensors only"
    ):
        save_checkpoint(tmp_path / "c", wrap(model, **ZERO1) if wrapped else model)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
