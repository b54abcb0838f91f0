"""What a step, a save and accelerate's part are made of: stand-ins around one function of the Trainer."""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from hugging_face_runs import as_launched, build, language_model
from torch import Tensor, nn

from maingrad.launch.training.hugging_face import step_graph, trainer
from maingrad.launch.training.hugging_face.step_graph import StepGraph, _run, _without_whole_mask


@pytest.fixture(autouse=True)
def launched() -> Iterator[None]:
    with as_launched():
        yield


def fake(**fields: Any) -> Any:
    return types.SimpleNamespace(**fields)


# ---- accelerate. ----


def test_accelerate_lists_what_it_has_prepared_once(tmp_path: Path) -> None:
    made = build("zero1", tmp_path, {}, language_model())
    wrapped, accelerator = made.wrapped_model(), made.accelerator
    accelerator._models.clear()
    for _ in range(2):
        assert accelerator.prepare_model(wrapped) is wrapped
        assert [each is wrapped for each in accelerator._models] == [True]
    prepared = accelerator.prepare_optimizer(made.create_optimizer())
    accelerator._optimizers.clear()
    assert accelerator.prepare_optimizer(prepared) is prepared
    assert [each is prepared for each in accelerator._optimizers] == [True]


def test_accelerate_wraps_no_model_and_moves_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, given = build("zero1", tmp_path, {}, language_model()), list[Any]()
    for name in ("prepare_model", "prepare_optimizer"):
        monkeypatch.setattr(accelerate.Accelerator, name, lambda self, each, **how: given.append(how) or each)
    for asked in (None, True):
        made.accelerator.prepare_model(nn.Linear(1, 1), device_placement=asked)
        made.accelerator.prepare_optimizer(torch.optim.SGD(nn.Linear(1, 1).parameters()), device_placement=asked)
    assert given[::2] == [{"device_placement": asked, "evaluation_mode": True} for asked in (None, True)]
    assert given[1::2] == [{"device_placement": False}] * 2


# ---- A step as one function. ----


@pytest.mark.parametrize(
    ("count", "mode", "active"),
    [(2, True, True), (2, "auto", True), (1, True, False), (3, "auto", False), (2, False, False)],
)
def test_only_whole_steps_wait_and_nothing_is_left_of_the_one_before(count: int, mode: Any, active: bool) -> None:
    graph: Any = StepGraph(fake(args=fake(gradient_accumulation_steps=2)), mode)
    graph._may_replay = lambda: True
    graph.norm = torch.ones(())
    graph._waiting.append("of an epoch that ended in the middle of a step")
    graph.begin(count)
    assert graph.is_active is active and graph.norm is None and graph._waiting == []
    graph._may_replay = lambda: False
    graph.begin(count)
    assert not graph.is_active


@pytest.mark.parametrize(
    ("device", "mode", "built"), [("cpu", "auto", False), ("cpu", True, True), ("cuda", "auto", True)]
)
def test_a_step_is_built_once_for_each_wrapped_model(
    device: str, mode: Any, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, stopped, freed = list[Any](), list[str](), list[int]()

    def graphed(step: Any, model: Any, optimizer: Any, *, record_on_cpu: bool) -> Any:
        number = len(made)
        made.append((model, optimizer, record_on_cpu))
        step = fake(reset=lambda: freed.append(number), why_eager=None)
        step.stop = lambda why: stopped.append(why) or setattr(step, "why_eager", why)
        return step

    monkeypatch.setattr(step_graph, "graphed", graphed)
    monkeypatch.setattr(step_graph, "_why_not", lambda trainer: reason)
    reason: str | None = None
    of = fake(args=fake(device=torch.device(device)), model_wrapped="first", _inner_optimizer=lambda: "optimizer")
    graph: Any = StepGraph(of, mode)
    assert [graph._may_replay() for _ in range(2)] == [built] * 2
    assert made == [("first", "optimizer", device == "cpu")] * built
    of.model_wrapped, reason = "second", "a callback reads gradients"
    assert not graph._may_replay() and not graph._may_replay()
    assert (len(made), stopped, freed) == ((2, [reason], [0]) if built else (0, [], []))


@pytest.mark.parametrize(("limit", "given"), [(0.5, 0.5), (0.0, float("inf")), (None, float("inf"))])
def test_a_step_runs_all_its_microbatches_and_then_clips_steps_and_zeroes(limit: float | None, given: float) -> None:
    ran: list[Any] = []

    @contextmanager
    def no_sync() -> Iterator[None]:
        ran.append("no_sync")
        yield

    def run(model: Any, inputs: float, num_items: Any) -> Tensor:
        ran.append((inputs, num_items))
        return torch.tensor(inputs)

    def clipped(model: Any, most: float) -> Tensor:
        ran.append(("clip", most))
        return torch.tensor(9.0)

    optimizer = fake(step=lambda: ran.append("step"), zero_grad=lambda: ran.append("zero"))
    of = fake(
        model_wrapped=fake(no_sync=no_sync),
        run_microbatch=run,
        clipped_norm=clipped,
        args=fake(max_grad_norm=limit),
        _inner_optimizer=lambda: optimizer,
    )
    loss, norm = _run(of, [1.0, 2.0, 4.0], None)
    assert (float(loss), float(norm)) == (7.0, 9.0)
    batches = ["no_sync", (1.0, None), "no_sync", (2.0, None), (4.0, None)]
    assert ran == [*batches, ("clip", given), "step", "zero"]


def test_a_causal_model_under_another_name_needs_no_whole_mask() -> None:
    """``fully_shard`` gives a model a class of its own."""
    model, ones = language_model(), torch.ones(2, 3, dtype=torch.long)
    model.__class__ = type("Sharded", (type(model),), {})
    assert "attention_mask" not in _without_whole_mask({"input_ids": ones, "attention_mask": ones}, model)


# ---- Norms and numbers of operations. ----


def test_a_norm_is_that_of_the_graph_or_of_the_loop_or_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, limits = build("ddp", tmp_path, {"max_grad_norm": 0.25}, language_model()), list[float]()
    monkeypatch.setattr(made, "clipped_norm", lambda model, limit: limits.append(limit) or "computed")
    assert made._get_grad_norm(None, "the loop's") == "the loop's" and limits == []
    assert made._get_grad_norm(None) == "computed" and limits == [float("inf")]
    assert made._clip_grad_norm(None) == "computed" and limits == [float("inf"), 0.25]
    made._graph.norm = "the graph's"
    assert made._get_grad_norm(None) == made._clip_grad_norm(None) == "the graph's" and len(limits) == 2


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
def test_a_norm_waits_for_the_reductions(form: str, tmp_path: Path) -> None:
    """A subclass's own step may not have waited; and a second look changes nothing."""
    tokens = torch.arange(16).view(2, 8)
    plain = language_model()
    plain(input_ids=tokens, labels=tokens).loss.backward()
    expected = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()])
    made = build(form, tmp_path, {}, language_model())
    wrapped = made.wrapped_model()
    wrapped(input_ids=tokens, labels=tokens).loss.backward()
    for _ in range(2):
        assert float(made.clipped_norm(wrapped, float("inf"))) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("form", ["ddp", "zero1"])
def test_a_rank_without_a_microbatch_has_a_norm(form: str, tmp_path: Path) -> None:
    """Other ranks reduce theirs, and it takes part with zeros."""
    made = build(form, tmp_path, {}, language_model())
    assert float(made.clipped_norm(made.wrapped_model(), 1.0)) == 0.0


def test_operations_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """Six for each token and each weight that is no embedding, though this rank has a part of them."""
    count = language_model().num_parameters(exclude_embeddings=True)
    made = build("fsdp", tmp_path, {}, language_model())
    made.wrapped_model()
    assert made.floating_point_ops({"input_ids": torch.zeros(3, 5, dtype=torch.long)}) == 6 * 15 * count
    assert made.floating_point_ops({"labels": torch.zeros(3, 5, dtype=torch.long)}) == 0, "as transformers has it"


def test_muon_updates_matrices_of_a_sharded_model_too(tmp_path: Path) -> None:
    made = build("fsdp", tmp_path, {}, language_model(), muon={"lr": 0.02})
    assert 0.02 in {group["lr"] for group in made.create_optimizer().param_groups}


# ---- Saves. ----


@pytest.mark.parametrize("saves", [True, False])
def test_the_rank_that_saves_writes_and_all_take_part(
    saves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, ran = build("ddp", tmp_path, {}, language_model()), list[Any]()
    made.args = fake(should_save=saves, push_to_hub=False, output_dir=str(tmp_path / "own"))
    made.lr_scheduler = fake(state_dict=lambda: {"last_epoch": 3})
    monkeypatch.setattr(trainer, "whole_weights", lambda model, keep: ran.append(("weights", keep)) or {})
    monkeypatch.setattr(trainer, "save_checkpoint", lambda path, *parts: ran.append(("state", path.name)))
    monkeypatch.setattr(made, "_save", lambda folder, state_dict: ran.append(("files", folder)))
    made.save_model()
    made._save_optimizer_and_scheduler(str(tmp_path))
    assert ran == [("weights", saves), *([("files", str(tmp_path / "own"))] if saves else []), ("state", "maingrad")]
    assert (tmp_path / "scheduler.pt").exists() is saves


def test_a_checkpoint_brings_the_schedule_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, loaded = build("ddp", tmp_path, {}, language_model()), list[Any]()
    monkeypatch.setattr(trainer, "load_checkpoint", lambda path, *parts: loaded.append(path))
    made.lr_scheduler = fake(load_state_dict=loaded.append)
    torch.save({"last_epoch": 3}, tmp_path / "scheduler.pt")
    made._load_optimizer_and_scheduler(None)
    assert loaded == []
    made._load_optimizer_and_scheduler(str(tmp_path))
    assert loaded == [tmp_path / "maingrad", {"last_epoch": 3}]
