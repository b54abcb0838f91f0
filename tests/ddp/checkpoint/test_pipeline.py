"""Checkpoints of a pipeline: its stages write one model, and read their parts of any."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpointed import Experts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from maingrad.ddp.checkpoint.files.manifest import Manifest
from maingrad.ddp.checkpoint.source import CheckpointRanks
from maingrad.launch import simulate

LAYERS = 5


class Layers(nn.Module):
    """Layers [start, end) of a model; the first one is an embedding, which the last one multiplies by too.

    ``place`` and ``scale`` are of the outermost module, which all stages have.
    """

    def __init__(self, start: int = 0, end: int = LAYERS, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.start, self.end = start, end
        if start == 0:
            self.place = nn.Parameter(torch.randn(6))
        self.layers = nn.ModuleDict()
        for index in range(start, end):
            layer = nn.Linear(6, 6)
            layer.bias.requires_grad_(False)  # whole on every rank, beside sharded weights
            layer.register_buffer("seen", torch.full((), float(seed * 10 + index)))
            self.layers[str(index)] = layer
        if start == 0 or end == LAYERS:
            self.word = nn.Embedding(3, 6)
            self.word.weight.shared_embedding = end - start < LAYERS
        if end == LAYERS:
            self.register_buffer("scale", torch.full((), float(seed)))
            self.head = nn.Linear(6, 3, bias=False)
            self.head.weight = self.word.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.word(x) + self.place if self.start == 0 else x
        for layer in self.layers.values():
            x = layer(x).tanh()
        return (self.head(x) if self.end == LAYERS else x).square().mean()


def wrapped(stages: int, seed: int) -> tuple[DistributedDataParallel, DistributedOptimizer, dist.ProcessGroup]:
    """A stage of so many, its optimizer, and the ranks of the pipeline."""
    mesh = init_device_mesh("cpu", (stages, dist.get_world_size() // stages), mesh_dim_names=("pp", "dp"))
    stage, pipeline = mesh.get_local_rank("pp"), mesh.get_group("pp")
    ranks, ends = dist.get_process_group_ranks(pipeline), None
    if stages > 1 and stage in (0, stages - 1):
        ends = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True)
    model = DistributedDataParallel(
        Layers(LAYERS * stage // stages, LAYERS * (stage + 1) // stages, seed),
        DistributedDataParallelConfig(use_distributed_optimizer=True),
        process_group=mesh.get_group("dp"),
        embedding_group=ends,
    )
    return model, DistributedOptimizer(model, lr=0.1), pipeline


def step(model: DistributedDataParallel, optimizer: DistributedOptimizer) -> None:
    own = torch.arange(3) if model.module.start == 0 else torch.ones(2, 6)
    model(own).backward()
    optimizer.step()
    optimizer.zero_grad()


def save(path: Path, stages: int, with_optimizer: bool) -> None:
    model, optimizer, pipeline = wrapped(stages, seed=1)
    step(model, optimizer)
    save_checkpoint(path, model, optimizer if with_optimizer else None, extra=stages, pipeline_group=pipeline)


def load(path: Path, stages: int, again: Path, with_optimizer: bool) -> None:
    """Load, and write what was loaded."""
    model, optimizer, pipeline = wrapped(stages, seed=2)
    options: dict[str, Any] = {"optimizer": optimizer if with_optimizer else None, "pipeline_group": pipeline}
    extra = load_checkpoint(path, model, **options)
    save_checkpoint(again, model, extra=extra, **options)


def read(path: Path) -> tuple[dict[str, Tensor], Manifest]:
    """The saved weights and buffers, in a whole model without a wrapper; and the manifest."""
    model = Layers(seed=3)
    load_checkpoint(path, model)
    return model.state_dict(), Manifest.read(path)


@pytest.mark.parametrize("with_optimizer", [False, True])
@pytest.mark.parametrize(("saved", "ranks", "loaded", "more"), [(2, 4, 1, 1), (3, 3, 2, 2), (1, 2, 3, 6)])
def test_any_number_of_stages_goes_on(
    tmp_path: Path, saved: int, ranks: int, loaded: int, more: int, with_optimizer: bool
) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    simulate(save, ranks, first, saved, with_optimizer)
    simulate(load, more, first, loaded, again, with_optimizer)
    (expected, before), (found, after) = read(first), read(again)
    assert after.extra == saved
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert found["layers.4.seen"] == 14 and found["scale"] == 1  # buffers of the last stage
    shapes = [{name: (each.shape, each.state, each.group) for name, each in m.tensors.items()} for m in (before, after)]
    assert shapes[0] == shapes[1]
    assert ("exp_avg" in before.tensors["layers.3.weight"].state) is with_optimizer
    assert before.tied == after.tied == {"head.weight": "word.weight"}


def test_moments_are_those_that_were_saved(tmp_path: Path) -> None:
    """The step after a load is the step after the save."""

    def train(path: Path | None, stages: int) -> dict[str, Tensor]:
        model, optimizer, pipeline = wrapped(stages, seed=1)
        if path is None:
            step(model, optimizer)
        else:
            load_checkpoint(path, model, optimizer, pipeline_group=pipeline)
        step(model, optimizer)
        optimizer.finish_param_sync()
        return {name: param.detach().clone() for name, param in model.module.named_parameters()}

    simulate(save, 3, tmp_path / "saved", 3, True)
    for expected, found in zip(simulate(train, 3, None, 3), simulate(train, 3, tmp_path / "saved", 3), strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


class Longer(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers["5"] = nn.Linear(6, 6)


@pytest.mark.parametrize("lacks", ["the pipeline", "the checkpoint"])
def test_what_no_stage_has_is_missed(tmp_path: Path, lacks: str) -> None:
    model = Longer() if lacks == "the pipeline" else Layers(end=4)
    save_checkpoint(tmp_path / "saved", model)
    match = r"'layers\.5\..*' is missing in the model" if lacks == "the pipeline" else r"missing in the checkpoint"
    with pytest.raises(Exception, match=match):
        simulate(load, 2, tmp_path / "saved", 2, tmp_path / "again", False)


class Flat(nn.Module):
    """A stage with a parameter and a buffer that lie in no module of its own."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_parameter(name, nn.Parameter(torch.randn(3)))
        self.register_buffer(f"{name}_seen", torch.randn(()))


def of_two_stages(do: Any, path: Path, names: list[str], seed: int, **given: bool) -> dict[str, Tensor]:
    """Save or load one of two stages, without ``pipeline_group`` if not ``given``; and what it has then."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    stage = Flat(names[dist.get_rank()], seed + dist.get_rank())
    model = DistributedDataParallel(stage, DistributedDataParallelConfig(), process_group=mesh.get_group("dp"))
    do(path, model, pipeline_group=mesh.get_group("pp") if given.get("whole", True) else None)
    return {name: value.clone() for name, value in stage.state_dict().items()}


def test_stages_have_parameters_in_no_module(tmp_path: Path) -> None:
    saved = simulate(of_two_stages, 2, save_checkpoint, tmp_path / "saved", ["first", "last"], 1)
    loaded = simulate(of_two_stages, 2, load_checkpoint, tmp_path / "saved", ["first", "last"], 5)
    for before, after in zip(saved, loaded, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def of_two_instances(do: Any, path: Path, seed: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("outer", "pp", "dp"))
    stage = Flat(["first", "last"][mesh.get_local_rank("pp")], seed)
    model = DistributedDataParallel(stage, process_group=mesh["outer", "dp"])
    do(path, model, pipeline_group=mesh.get_group("pp"))
    return {name: value.clone() for name, value in stage.state_dict().items()}


def test_one_instance_writes_all_stages(tmp_path: Path) -> None:
    saved = simulate(of_two_instances, 4, save_checkpoint, tmp_path / "saved", 1)
    assert {*Manifest.read(tmp_path / "saved").nbytes} == {0, 1}
    for before, after in zip(saved, simulate(of_two_instances, 4, load_checkpoint, tmp_path / "saved", 5), strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_ranks_of_other_stages_are_among_those_that_an_error_names() -> None:
    def known() -> list[list[int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=mesh.get_group("tp"))
        alone, wrapped = CheckpointRanks(), CheckpointRanks(model.grids["dense"], model.failures)
        found = []
        for ranks in (alone, wrapped):
            for _ in range(2):  # the second save has the same groups
                ranks = ranks.with_tensor(mesh.get_group("tp")).with_pipeline(mesh.get_group("pp"))
            assert (ranks.tensor, ranks.pipeline) == (mesh.get_group("tp"), mesh.get_group("pp"))
            assert ranks.with_tensor(None) is ranks
            found.append(
                [[mesh.get_group("tp"), mesh.get_group("pp")].index(grid.inner) for grid in ranks.failures.grids]
            )
        assert wrapped.failures is model.failures
        return found

    for alone, wrapped in simulate(known, 4):
        assert sorted(alone) == [0, 1] and {*wrapped} == {0, 1} and wrapped.count(1) == 1


def test_stages_with_the_same_names_are_refused(tmp_path: Path) -> None:
    """A checkpoint would have the weights of one of them."""
    save_checkpoint(tmp_path / "saved", Flat("w", 0))
    for do in (save_checkpoint, load_checkpoint):
        with pytest.raises(Exception, match=r"several stages have a parameter 'w', .* without pipeline_group"):
            simulate(of_two_stages, 2, do, tmp_path / "saved", ["w", "w"], 1)

    def with_one_in_common() -> None:
        rank = dist.get_rank()
        stage = nn.ParameterDict({name: torch.ones(2) for name in (f"a{rank}", "w", f"z{rank}")})
        save_checkpoint(tmp_path / "saved", stage, pipeline_group=dist.group.WORLD)

    with pytest.raises(Exception, match=r"several stages have a parameter 'w'"):
        simulate(with_one_in_common, 2)


@pytest.mark.parametrize("names", [["first", "last"], ["w", "w"]])
def test_a_forgotten_pipeline_is_noticed(tmp_path: Path, names: list[str]) -> None:
    """Each stage would replace the other's checkpoint."""
    with pytest.raises(Exception, match=r"rank . saves to .* and one would replace the other: .* pipeline_group"):
        simulate(lambda: of_two_stages(save_checkpoint, tmp_path / "saved", names, 1, whole=False), 2)


def test_models_of_their_own_are_saved_where_they_do_not_meet(tmp_path: Path) -> None:
    """Each rank trains one, and all call their checkpoints alike. A module in no wrapper any rank may save."""
    path = tmp_path / "step-1"

    def save() -> None:
        model, rank = DistributedDataParallel(Flat("w", dist.get_rank()), process_group=WORLD_OF_ONE), dist.get_rank()
        save_checkpoint(tmp_path / str(rank) / "step-1", model, extra=rank)
        for each in range(2):
            dist.barrier()
            if rank == each:
                save_checkpoint(path, model.module, extra=rank)

    simulate(save, 2)
    assert [load_checkpoint(tmp_path / name / "step-1", Flat("w", 5)) for name in ("0", "1", ".")] == [0, 1, 1]


def save_copies(path: Path) -> None:
    save_checkpoint(path, nn.Linear(2, 2).requires_grad_(False), pipeline_group=dist.group.WORLD)


def test_what_is_frozen_may_be_a_copy(tmp_path: Path) -> None:
    """As a table that all stages have."""
    simulate(save_copies, 2, tmp_path / "saved")
    assert (tmp_path / "saved").exists()


class Ends(nn.Module):
    """A stage with a shared embedding, and on the last one the head that it is too; ``order`` of their registration.

    Before and behind them is a frozen weight, which has other names too.
    """

    def __init__(self, order: str, seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(seed)
        made = {"word": nn.Embedding(3, 4), "head": nn.Linear(4, 3, bias=False)}
        made["head"].weight = made["word"].weight
        made["word"].weight.shared_embedding = True
        made |= {name: nn.Linear(2, 2, bias=False) for name in ("frozen", "again", "later")}
        for name in ("frozen", "again", "later"):
            made[name].weight = made["frozen"].weight.requires_grad_(False)
        for name in ("frozen", "again", *order.split(), "later"):
            self.add_module(name, made[name])

    def forward(self, x: Tensor) -> Tensor:
        return self.word(x).square().sum()


def of_ends(do: Any, path: Path, orders: list[str], seed: int) -> Tensor:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    stage = Ends(orders[dist.get_rank()], seed)
    model = DistributedDataParallel(stage, process_group=mesh.get_group("dp"), embedding_group=dist.group.WORLD)
    optimizer = DistributedOptimizer(model)
    model(torch.arange(3)).backward()
    if do is save_checkpoint:
        optimizer.step()
    do(path, model, optimizer, pipeline_group=mesh.get_group("pp"))
    return stage.word.weight.detach().clone()


@pytest.mark.parametrize("last", ["word head", "head word"])
def test_the_last_stage_may_register_its_head_first(tmp_path: Path, last: str) -> None:
    """Its shared embedding has another first name than on the first stage."""
    saved = simulate(of_ends, 2, save_checkpoint, tmp_path / "c", ["word", last], 1)
    assert torch.equal(*saved)
    for loaded in simulate(of_ends, 2, load_checkpoint, tmp_path / "c", ["word", last], 2):
        assert torch.equal(loaded, saved[0])
    orders = ["word head", "head word"] if last == "head word" else [last]
    for whole in map(Ends, orders):
        load_checkpoint(tmp_path / "c", whole)
        assert torch.equal(whole.word.weight, saved[0])


def test_two_parameters_are_not_loaded_into_one(tmp_path: Path) -> None:
    """Those of an untied model, of which one would be lost."""
    apart = Ends("word head")
    apart.head.weight = nn.Parameter(torch.ones(3, 4))
    save_checkpoint(tmp_path / "c", apart)
    with pytest.raises(ValueError, match=r"'head\.weight' is missing in the model and a parameter of float32 \[3, 4\]"):
        load_checkpoint(tmp_path / "c", Ends("word head"))


def of_a_stage_with_experts(do: Any, path: Path, seed: int) -> dict[str, Tensor]:
    """The second of two stages has experts, of which each rank has its own; the first stage has none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    module = Experts(seed, rank, marked=True) if stage else Flat("first", seed)
    options: dict[str, Any] = {"expert_process_group": WORLD_OF_ONE} if stage else {}
    model = DistributedDataParallel(module, process_group=mesh.get_group("dp"), **options)
    do(path, model, pipeline_group=mesh.get_group("pp"))
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_one_stage_alone_has_experts(tmp_path: Path) -> None:
    saved = simulate(of_a_stage_with_experts, 4, save_checkpoint, tmp_path / "saved", 1)
    assert not torch.equal(saved[2]["expert.weight"], saved[3]["expert.weight"])
    assert Manifest.read(tmp_path / "saved").num_expert_sets == 2
    loaded = simulate(of_a_stage_with_experts, 4, load_checkpoint, tmp_path / "saved", 5)
    for before, after in zip(saved, loaded, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
