"""``[mesh] pp``: the stages of a pipeline train what one rank trains."""

import itertools
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ending_ranks import assert_silent, run_to_the_end, the_report
from gloo import run_ranks
from tiny_run import tiny_config

from maingrad.launch import simulate
from maingrad.launch.config.run import Config
from maingrad.launch.model.gpt import Block
from maingrad.launch.plan.exchanged import exchanges_of
from maingrad.launch.simulation.group import SimulatedProcessGroup
from maingrad.launch.training import pipelined
from maingrad.launch.training.metrics import MetricsWriter, read_metrics
from maingrad.launch.training.pipelined import PipelinedTrainer
from maingrad.launch.training.runtime import current_runtime
from maingrad.launch.training.signals import StopRequest
from maingrad.launch.training.train import train
from maingrad.launch.training.watching.progress import Display

LAYERS = {"num_layers": 3, "num_kv_heads": 4}
"""The first of two stages has two blocks."""
THIRDS = {"num_microbatches": 3, "eval_sequences": 7}
"""The last microbatch of a validation has fewer rows."""
ZERO_BUBBLE = {"pp": 2, "pp_schedule": "InterleavedZeroBubble"}
DATA: dict[str, dict[str, Any]] = {
    how: {} if how == "join" else {"documents": how, "end_of_document": 10, "order": "epochs"}
    for how in ("join", "mask", "pad")
}


def config_of(folder: Path, parallel: str, **sections: Any) -> Config:
    merged = {"model": LAYERS, "train": THIRDS}
    return tiny_config(folder, parallel=parallel, **sections | {k: merged[k] | sections.get(k, {}) for k in merged})


def records(config: Config, kind: str) -> list[dict[str, Any]]:
    return [r for r in read_metrics(Path(config.train.out_dir) / "metrics.jsonl") if r["kind"] == kind]


def run(folder: Path, parallel: str, ranks: int, **sections: Any) -> list[float]:
    """Losses of the steps and of validations, then norms."""
    config = config_of(folder, parallel, **sections)
    config.check_ranks(ranks)
    simulate(train, ranks, config)
    losses = [record["loss"] for kind in ("step", "validation") for record in records(config, kind)]
    return [*losses, *(record["grad_norm"] for record in records(config, "step"))]


@pytest.fixture(scope="module", params=[*DATA])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    """How documents are read, and the numbers of a rank alone."""
    return request.param, run(tmp_path_factory.mktemp("plain"), "ddp", 1, data=DATA[request.param])


FORMS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ddp, pp 3": ("ddp", 3, {"pp": 3}),
    "ddp, GPipe": ("ddp", 2, {"pp": 2, "pp_schedule": "GPipe"}),
    "zero1, zero bubble": ("zero1", 2, ZERO_BUBBLE),
    "zero1, dp 2": ("zero1", 4, {"pp": 2}),
    "hybrid": ("hybrid", 4, {"pp": 2}),
    "fsdp, dp 2": ("fsdp", 4, {"pp": 2}),
    "fsdp, zero bubble": ("fsdp", 2, ZERO_BUBBLE),
    "hsdp": ("hsdp", 4, {"pp": 2}),
    "zero1, tp 2": ("zero1", 4, {"pp": 2, "tp": 2}),
    "ddp, parts of sequences": ("ddp", 4, {"tp": 2, "sequence_parallel": True} | ZERO_BUBBLE),
    "fsdp, tp 2": ("fsdp", 4, {"pp": 2, "tp": 2}),
    "zero1, cp 2": ("zero1", 4, {"pp": 2, "cp": 2}),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("form", FORMS)
def test_stages_train_the_same_model(tmp_path: Path, plain: tuple[str, list[float]], form: str):
    """Clipped steps. Losses and norms are equal on all ranks: rank 0, which has the first stage, writes them."""
    (documents, expected), (parallel, ranks, mesh) = plain, FORMS[form]
    checks = {} if "sd" in parallel else {"ddp": {"check_replicas_every": 1, "check_for_nan_in_grad": True}}
    numbers = run(tmp_path, parallel, ranks, mesh=mesh, data=DATA[documents], **checks)
    assert numbers == pytest.approx(expected, rel=2e-6)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"pp": 2}, {"train": {"compile": True, "compile_backend": "eager"}}),
        (ZERO_BUBBLE, {"train": {"recompute": "operators"}, "model": {"fused_loss": True}}),
        ({"pp": 2}, {"train": {"recompute": "blocks"}, "model": {"fused_loss": True}}),
        # Quantised rows that do not count would have a part in scales.
        (ZERO_BUBBLE, {"train": {"recipe": "float8_current", "eval_sequences": 8}}),
        ({"pp": 2}, {"train": {"recipe": "float8_delayed"}}),
    ],
)
def test_stages_with_other_settings(tmp_path: Path, mesh: dict[str, Any], changes: dict[str, Any]):
    torch._dynamo.reset()  # simulated ranks share what was compiled, up to a limit
    if "recipe" in changes["train"]:
        changes = changes | {"model": {"param_dtype": "bfloat16"}}
    (tmp_path / "plain").mkdir()
    expected = run(tmp_path / "plain", "zero1", 1, **changes)
    assert run(tmp_path, "zero1", 2, mesh=mesh, **changes) == pytest.approx(expected, rel=2e-6)


@pytest.mark.in_turn
@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_has_its_own_parameters(tmp_path: Path, tied: bool):
    """Under the names of the whole model, with its weights; a tied embedding is on the first and the last stage."""
    model = LAYERS | {"tie_embeddings": tied}
    (tmp_path / "plain").mkdir()
    (whole,) = simulate(train, 1, config_of(tmp_path / "plain", "ddp", model=model))
    config = config_of(tmp_path, "ddp", model=model, mesh={"pp": 3})
    stages = [dict(each.model.named_parameters()) for each in simulate(train, 3, config)]
    for index, stage in enumerate(stages):
        blocks = {int(name.split(".")[1]) for name in stage if name.startswith("blocks.")}
        assert blocks == {index}
        assert ("embedding.weight" in stage) is (index == 0 or (tied and index == 2))
        assert ("norm.weight" in stage) is (index == 2)
        assert ("head.weight" in stage) is (index == 2 and not tied)
    merged = {name: param for stage in stages for name, param in stage.items()}
    assert list(merged) == [name for name, _ in whole.model.named_parameters()]
    for name, param in whole.model.named_parameters():
        torch.testing.assert_close(merged[name], param, rtol=0, atol=2e-6)
    if tied:
        assert torch.equal(stages[0]["embedding.weight"], stages[2]["embedding.weight"])
    assert records(config, "observed")[0]["num_parameters"] == sum(p.numel() for p in whole.model.parameters())


@pytest.mark.in_turn
@pytest.mark.parametrize(("parallel", "ranks", "mesh"), [("ddp", 3, {"pp": 3}), ("zero1", 4, {"pp": 2, "tp": 2})])
def test_a_tied_embedding_trains_as_on_one_rank(tmp_path: Path, parallel: str, ranks: int, mesh: dict[str, int]):
    model = {"tie_embeddings": True}
    (tmp_path / "plain").mkdir()
    expected = run(tmp_path / "plain", "ddp", 1, model=model)
    assert run(tmp_path, parallel, ranks, mesh=mesh, model=model) == pytest.approx(expected, rel=2e-6)


@pytest.mark.in_turn
def test_a_run_goes_on_with_other_stages(tmp_path: Path):
    """Bit for bit: 1 stage -> 3 -> 2 fully sharded -> 1. Digest and checkpoint are those of one model."""
    bits = {"optimizer": {"max_grad_norm": None, "decay_vectors": False}}
    last = tmp_path / "alone"
    rest: dict[str, Any] = {"save_every": 2, "steps": 6}
    forms = [
        ("alone", "ddp", 1, {}),
        ("three stages", "zero1", 3, {"pp": 3}),
        ("sharded stages", "fsdp", 2, ZERO_BUBBLE),
        ("back", "zero1", 1, {}),
    ]
    for number, (name, parallel, ranks, mesh) in enumerate(forms):
        begin = {"resume": str(last / f"checkpoints/step-{2 * number:08d}")} if number else {}
        last = tmp_path / name
        made = config_of(tmp_path, parallel, mesh=mesh, train=rest | begin | {"out_dir": str(last)}, **bits)
        made.check_ranks(ranks)
        simulate(train, ranks, made)
    configs = [config_of(tmp_path, "ddp", train={"out_dir": str(tmp_path / name)}) for name, *_ in forms]
    digests = [records(each, "final")[0]["weights_sha256"] for each in configs]
    assert len(set(digests)) == 1
    steps = [{r["step"]: r["loss"] for r in records(each, "step")} for each in configs]
    for earlier, later in pairwise(steps):
        assert later == pytest.approx({step: earlier[step] for step in later}, rel=1e-6)


def test_weight_gradients_wait_where_the_schedule_has_slots_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make = PipelinedTrainer.__init__

    def spied(self: PipelinedTrainer, config: Config, *others: Any) -> None:
        make(self, config, *others)
        assert self.graphed is None, "the host runs the schedule"
        schedule: Any = self._schedule
        stage = schedule._stages[0] if hasattr(schedule, "_stages") else schedule._stage
        stage.queue.log = []
        logs.append((config.mesh.pp_schedule, stage.queue.log))

    logs: list[tuple[str, list[Any]]] = []
    monkeypatch.setattr(PipelinedTrainer, "__init__", spied)
    for name, mesh in (("1F1B", {"pp": 2}), ("ZB", ZERO_BUBBLE)):
        (tmp_path / name).mkdir()
        simulate(
            train, 2, config_of(tmp_path / name, "ddp", mesh=mesh, train={"steps": 1}, optimizer={"warmup_steps": 0})
        )
    ran = {name: sorted(len(log) for schedule, log in logs if schedule == name) for name, _ in logs}
    # Four matrices in a block and three microbatches; the first stage has two blocks and the second one the head.
    assert ran == {"1F1B": [0, 0], "InterleavedZeroBubble": [(4 + 1) * 3, 4 * 2 * 3]}


def trained_alone(config: Config) -> tuple[tuple[float, ...], float | None]:
    result = train(config)
    return result.losses, result.validation_loss


@pytest.mark.in_turn
def test_stages_are_processes(tmp_path: Path):
    """gloo moves what simulated ranks move."""
    config = config_of(tmp_path, "zero1", mesh=ZERO_BUBBLE, model={"tie_embeddings": True}, train={"save_every": 6})
    found = run_ranks(trained_alone, 2, config)
    (tmp_path / "simulated").mkdir()
    again = config_of(tmp_path / "simulated", "zero1", mesh=ZERO_BUBBLE, model={"tie_embeddings": True})
    assert found == simulate(trained_alone, 2, again)
    assert found[0] == found[1]


def trained_by_a_stage_that_fails(config: Config) -> None:
    forward, calls = Block.forward, itertools.count()

    def fails(self: Block, *args: Any) -> Any:
        if dist.get_rank() == 1 and next(calls) == 4:  # in the second step
            raise ValueError("too hot")
        return forward(self, *args)

    Block.forward = fails  # type: ignore[method-assign]
    train(config)


@pytest.mark.in_turn
def test_a_stage_that_fails_is_named_by_the_others(tmp_path: Path):
    """At once, by stages that exchange nothing with it too: their neighbours close the pipeline's connections."""
    model, settings = {"num_layers": 4}, {"num_microbatches": 4, "out_dir": str(tmp_path / "run")}
    config = config_of(tmp_path, "ddp", mesh={"pp": 4}, model=model, train=settings)
    ended = run_to_the_end(trained_by_a_stage_that_fails, 4, config)
    assert "ValueError: too hot" in ended[1].output
    assert "[Stage 1] failed to run forward" in ended[1].output
    for rank in (0, 2, 3):
        report = the_report(rank, ended[rank])
        assert report["what"] == "tensors of another stage"
        assert_silent(report, 1)


@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
def test_a_failure_closes_groups_with_other_stages_and_with_data_parallel_ranks(tmp_path: Path, parallel: str):
    """So that no rank waits for one that has failed: of its own stage, or of another."""
    config = config_of(tmp_path, parallel, mesh={"pp": 2})

    def closed() -> list[list[int]]:
        runtime, display = current_runtime("cpu", config.mesh), Display(is_main=False)
        trainer = PipelinedTrainer(config, runtime, MetricsWriter(None), StopRequest(), display)
        grids = trainer.wrapped.failures.grids
        return [dist.get_process_group_ranks(group) for grid in grids for group in grid[:3] if group is not None]

    for rank, groups in enumerate(simulate(closed, 4)):
        assert [rank % 2, rank % 2 + 2] in groups, "the other stage of these samples"
        assert [rank // 2 * 2, rank // 2 * 2 + 1] in groups, "the same stage of other samples"


def test_activations_travel_to_the_next_stage_and_gradients_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sent: dict[int, list[int]] = {}
    send = SimulatedProcessGroup.send

    def spied(self: SimulatedProcessGroup, tensors: list[torch.Tensor], target: int, tag: int = 0) -> Any:
        sent.setdefault(dist.get_rank(), []).append(tensors[0].nbytes)
        return send(self, tensors, target, tag)

    monkeypatch.setattr(SimulatedProcessGroup, "send", spied)
    config = config_of(tmp_path, "ddp", mesh={"pp": 3}, train={"steps": 3, "eval_every": 3, "eval_sequences": 1})
    simulate(train, 3, config)
    (observed,), (timeline,) = records(config, "observed"), records(config, "timeline")
    kinds = [record["kind"] for record in read_metrics(Path(config.train.out_dir) / "metrics.jsonl")]
    assert kinds[:3] == ["step", "observed", "timeline"], "recorded into the second step's first forward"
    assert (observed["microbatches_no_sync"], observed["microbatches_synced"]) == (2, 1)
    assert (len(timeline["forwards"]), len(timeline["backwards"])) == (4, 3)
    activations = 8 * 24 * 32 * 4
    moved = {rank: [each for each in nbytes if each >= activations] for rank, nbytes in sent.items()}
    # Three steps of three microbatches, and a validation of one.
    (planned,) = exchanges_of(config, 3)  # of a step, and of a stage in the middle
    assert (planned.ranks, planned.calls, planned.nbytes) == (3, 6, 6 * activations)
    assert moved == {0: [activations] * 10, 1: [activations] * 19, 2: [activations] * 9}


@pytest.mark.parametrize(("named", "active"), [(True, True), (False, True), (False, False)])
def test_an_error_that_names_its_stage_or_is_no_ranks_is_the_programs_own(named: bool, active: bool):
    """Others tell which ranks are gone."""
    failed, reported = RuntimeError("of the schedule"), RuntimeError("a report")
    failed.__cause__ = ValueError("too hot") if named else None

    def step(*tokens: torch.Tensor, **others: Any) -> None:
        raise failed

    said: list[Any] = []
    failures = SimpleNamespace(
        active=active, report=lambda error, what, seconds: said.append((error, what)) or reported
    )
    runtime = SimpleNamespace(stage=SimpleNamespace(is_first=True))
    trainer: Any = SimpleNamespace(
        runtime=runtime, recipe=None, _schedule=SimpleNamespace(step=step), wrapped=SimpleNamespace(failures=failures)
    )
    tokens = torch.zeros(1, 1, 2)
    with pytest.raises(RuntimeError) as raised:
        PipelinedTrainer._run_microbatches(trainer, tokens, tokens, torch.ones(1), None)
    told = active and not named
    assert raised.value is (reported if told else failed)
    assert said == ([(failed, "tensors of another stage")] if told else [])


class Stopped(Exception):
    """No schedule is made."""


@pytest.mark.parametrize(
    ("mesh", "length"),
    [
        ({"pp": 2}, 24),
        ({"pp": 2, "cp": 2}, 12),
        ({"pp": 2, "tp": 2}, 24),
        ({"tp": 2, "sequence_parallel": True} | ZERO_BUBBLE, 12),
    ],
)
def test_shapes_between_stages_are_those_of_a_ranks_part(
    tmp_path: Path, mesh: dict[str, Any], length: int, monkeypatch: pytest.MonkeyPatch
):
    """Of its sequences, and of the model's dtype. Weight gradients wait where the schedule has slots for them."""
    seen: dict[int, Any] = {}

    def stage(model: Any, index: int, count: int, device: torch.device, **options: Any) -> None:
        given, result = (options[f"{side}_args"] for side in ("input", "output"))
        seen[index] = (tuple(given.shape), given.dtype, tuple(result.shape), count, options["delay_wgrad"])
        assert options["group"] is not None and not options["average_microbatches"]
        raise Stopped

    monkeypatch.setattr(pipelined, "PipelineStage", stage)
    config = config_of(tmp_path, "ddp", mesh=mesh, model={"param_dtype": "bfloat16"})

    def build() -> None:
        runtime, display = current_runtime("cpu", config.mesh), Display(is_main=False)
        with pytest.raises(Stopped):
            PipelinedTrainer(config, runtime, MetricsWriter(None), StopRequest(), display)

    simulate(build, 4)
    rows = 24 // 3 // (4 // config.mesh.ranks_of_sample)
    hidden, later = (rows, length, 32), mesh.get("pp_schedule") == "InterleavedZeroBubble"
    tokens = (rows, 24 // mesh.get("cp", 1))
    assert seen == {
        0: (tokens, torch.int64, hidden, 2, later),
        1: (hidden, torch.bfloat16, (), 2, later),
    }
