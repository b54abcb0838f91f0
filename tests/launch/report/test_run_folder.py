"""A run's folder as reports read it: figures, curves and notes, from a few written records. Nothing is trained."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import tiny_document

from maingrad.launch.plan.model_flops import flops_per_token
from maingrad.launch.report import page, run_folder
from maingrad.launch.report.curves import draw_curves, draw_loss
from maingrad.launch.report.derived import derive
from maingrad.launch.report.drawing import svg
from maingrad.launch.report.run_folder import RunFolder, read_runs
from maingrad.launch.report.side_by_side import environment

Record = dict[str, Any]


def run_of(folder: Path, *records: Record, settings: Record | None = None, **beside: Any) -> RunFolder:
    """A run with these records; ``settings`` change its configuration, and ``beside`` stands beside it."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if settings is not None:
        document = {"config": tiny_document(folder, **settings), **beside}
        (folder / "resolved_config.json").write_text(json.dumps(document))
    return RunFolder(folder, "run")


def step(number: int, **fields: Any) -> Record:
    return {"kind": "step", "step": number, **fields}


OBSERVED = {"kind": "observed", "step": 0, "world_size": 2, "device": "cuda:0", "versions": {"gpu": "Unheard X1"}}
SPAN = {"start": 0.0, "end": 1.0}
WAIT = {"bucket": "b (w)", "collective": "all_reduce", "start": 1.0, "end": 1.0004}
TIMELINE: Record = {
    "kind": "timeline",
    "step": 2,
    "forwards": [],
    "backwards": [{**SPAN, "synced": True}],
    "buckets": [
        {
            "bucket": "b (w)",
            "collective": "all_reduce",
            "nbytes": 8,
            "ready": 0.9,
            "launched": 0.9998,
            "finished": 1.0004,
        }
    ],
    "gathers": [],
    "waits": [WAIT],
    "phases": [],
}


# ---- Figures. ----


def test_figures_are_those_of_the_records(tmp_path: Path) -> None:
    steps = [step(1, tokens_per_second=10.0, loss=3.0, seconds_per_step=1.0), step(2, tokens_per_second=None, loss=2.0)]
    steps += [step(3, tokens_per_second=40.0, elapsed=7.0, max_expert_load=1.5), step(4, tokens_per_second=20.0)]
    validation = {"kind": "validation", "step": 5, "loss": 2.5}
    end = {"kind": "final", "step": 5, "seconds": 9.0, "nats_below_bigram": 0.5, "peak_memory_bytes": 77}
    found = run_of(tmp_path, OBSERVED | {"num_parameters": 12}, *steps, validation, TIMELINE, end, settings={}).numbers
    expected = {
        "validation_loss": 2.5,
        "nats_below_bigram": 0.5,
        "tokens_per_second": 20.0,
        "mfu": None,
        "peak_memory_bytes": 77,
        "planned_bytes": None,
        "loss": 2.0,
        "steps": 5,
        "tokens": 5 * 24 * 24,
        "seconds": 9.0,
        "seconds_per_step": 1.0,
        "num_parameters": 12,
        "max_expert_load": 1.5,
    }
    assert expected.items() <= found.items()
    assert found["exposed_ms"] == pytest.approx(0.4)
    assert found["hidden_share"] == pytest.approx(1 / 3), "0.2 ms of 0.6"


def test_figures_without_their_records(tmp_path: Path) -> None:
    found = run_of(tmp_path, step(1, elapsed=7.0), step(2, loss=None)).numbers
    assert found["loss"] == "no number" and found["seconds"] == 7.0 and found["steps"] == 2
    assert {key for key, value in found.items() if value is not None} == {"loss", "seconds", "steps"}
    assert run_of(tmp_path, {"kind": "interrupted"}).last_step == 0
    after_a_gap = run_of(tmp_path, step(1, loss=None, tokens_per_second=0.0), step(2, loss=2.5, tokens_per_second=3.0))
    assert (after_a_gap.numbers["loss"], after_a_gap.numbers["tokens_per_second"]) == (2.5, 1.5)


def test_a_gather_that_sent_nothing_is_no_row(tmp_path: Path) -> None:
    run = run_of(tmp_path, TIMELINE)
    (row,) = run.times("buckets")
    assert (row.bucket, row.nbytes) == ("b (w)", 8) and not run.times("gathers")
    assert not run_of(tmp_path, step(1)).times("buckets")


def test_the_last_start_and_the_last_timed_step_with_reductions_count(tmp_path: Path) -> None:
    empty, forward = {**TIMELINE, "step": 9, "buckets": []}, {**TIMELINE, "step": 10, "backwards": []}
    again = {**OBSERVED, "step": 4, "world_size": 3, "device": "cpu", "unit": "byte", "versions": {"torch": "9"}}
    run = run_of(
        tmp_path, OBSERVED, TIMELINE, {**TIMELINE, "step": 6}, empty, forward, again, {"kind": "interrupted", "step": 1}
    )
    assert (run.world_size, run.device, run.unit, run.versions) == (3, "cpu", "byte", {"torch": "9"})
    assert run.timeline is not None and run.timeline["step"] == 6
    assert (run.end["kind"], run.gpu) == ("interrupted", "")
    assert run_of(tmp_path, OBSERVED, {"kind": "interrupted"}, {"kind": "final"}).end["kind"] == "final"
    first = run_of(tmp_path, OBSERVED)
    assert (first.unit, first.gpu, first.end, first.timeline) == ("token", "Unheard X1", {}, None)


def test_what_the_first_step_did_not_say_the_configuration_says(tmp_path: Path) -> None:
    beside = {"versions": {"torch": "1.2"}, "world_size": 5, "git_commit": "abc", "command": None}
    run = run_of(tmp_path, step(1), settings={}, **beside)
    assert (run.versions, run.world_size, run.device, run.gpu) == ({"torch": "1.2"}, 5, None, "")
    said = environment(run)
    assert said["ranks"] == "5" and said["git_commit"] == "abc" and said["backend"] == said["command"] == "none"
    assert (said["model"], said["folder"]) == ("GPT of 2 blocks, width 32", str(tmp_path))
    both = run_of(tmp_path, OBSERVED | {"backend": "nccl"}, settings={}, **beside)
    assert both.versions == {"torch": "1.2"} and both.world_size == 2
    said = environment(both)
    assert said["backend"] == "nccl" and said["device"] == "cuda:0" and said["torch"] == "1.2"
    empty = environment(
        run_of(tmp_path, OBSERVED | {"backend": ""}, settings={}, versions={"a": 0, "b": "", "c": None})
    )
    assert [empty[name] for name in ("backend", "a", "b", "c")] == ["", "0", "", "none"], "what is empty is not missing"
    own = run_of(tmp_path, OBSERVED | {"versions": {"torch": "9"}}, settings={})
    assert own.versions == {"torch": "9"}
    folder = {"hugging_face": str(tmp_path), "pretrained": False}
    document = {"config": tiny_document(tmp_path) | {"model": folder}}
    (tmp_path / "resolved_config.json").write_text(json.dumps(document))
    assert environment(run_of(tmp_path, step(1)))["model"] == str(tmp_path)
    (tmp_path / "resolved_config.json").unlink()
    for damaged in (2**53 + 1, 0, True, "4"):
        assert run_of(tmp_path, OBSERVED | {"world_size": damaged}).world_size is None
    assert run_of(tmp_path, OBSERVED | {"versions": [1]}).versions == {}


# ---- What follows from the configuration. ----


def test_mfu_is_a_part_of_the_peak_of_the_ranks_that_took_the_step(tmp_path: Path) -> None:
    steps = [step(1, tokens_per_second=8.0), step(2, tokens_per_second=None), step(3, tokens_per_second=9.0)]
    resumed = {**OBSERVED, "step": 2, "world_size": 4}
    run = run_of(tmp_path, OBSERVED, *steps, resumed, settings={})
    assert run.points("mfu") == []
    derive(run, 2.0)
    assert run.config is not None and run.flops == flops_per_token(run.config) and run.peak == 2.0
    scale = run.flops / 2e12
    (one, first), (two, gap), (three, second) = run.points("mfu")
    assert (one, two, three, gap) == (1, 2, 3, None)
    assert (first, second) == pytest.approx((8 * scale / 2, 9 * scale / 4))
    late = run_of(tmp_path, resumed, *steps[::2], settings={})
    derive(late, 2.0)
    assert [value for _, value in late.points("mfu")] == pytest.approx([8 * scale / 4, 9 * scale / 4])
    for lacks in ("flops", "peak"):
        setattr(late, lacks, None)
        assert late.points("mfu") == [], "neither is guessed"
        derive(late, 2.0)
    for number in (None, "damaged"):  # the first start has lost the number of its step: it is the run's first one
        lost = run_of(tmp_path, OBSERVED | {"step": number}, *steps, resumed, settings={})
        derive(lost, 2.0)
        assert [value for _, value in lost.points("mfu") if value] == pytest.approx([8 * scale / 2, 9 * scale / 4])
    unknown = run_of(tmp_path, OBSERVED | {"world_size": "two"}, *steps, resumed, settings={})
    derive(unknown, 2.0)
    assert unknown.points("mfu") == [(3, pytest.approx(9 * scale / 4))], "of the start whose ranks are known"
    del steps[1]["tokens_per_second"]
    assert [step for step, _ in run_of(tmp_path, OBSERVED, *steps).points("tokens_per_second")] == [1, 3]


@pytest.mark.parametrize(
    ("gpu", "given", "peak"),
    [("NVIDIA H100 80GB HBM3", None, 989.0), ("NVIDIA H100 80GB HBM3", 5.0, 5.0), ("Unheard X1", None, None)],
)
def test_a_peak_that_is_given_comes_before_the_tables(tmp_path: Path, gpu: str, given: Any, peak: Any) -> None:
    run = run_of(tmp_path, OBSERVED, settings={}, versions={"gpu": gpu})
    derive(run, given)
    assert run.peak == peak
    assert any("no peak of 'Unheard X1' is known" in note for note in run.notes) is (peak is None)


@pytest.mark.parametrize(("device", "why"), [("cpu", "was on a CPU"), (None, "no step was completed")])
def test_without_a_gpu_there_is_no_peak(tmp_path: Path, device: str | None, why: str) -> None:
    run = run_of(tmp_path, OBSERVED | {"device": device} if device else step(1), settings={})
    derive(run, 7.0)
    assert run.peak is None and any(note.startswith("MFU is left out") and why in note for note in run.notes)
    memory = [note for note in run.notes if note.startswith("Peak memory")]
    assert len(memory) == 1 and ("on GPUs only" in memory[0]) is (device == "cpu")


@pytest.mark.parametrize(("ranks", "planned"), [(1, True), (65_536, True), (65_537, False), (None, False)])
def test_a_plan_is_made_for_a_number_of_ranks_that_can_be(
    tmp_path: Path, ranks: int | None, planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maingrad.launch.report.derived.plan_run", lambda config, ranks: ("plan", ranks))
    run = run_of(tmp_path, OBSERVED | {"world_size": ranks}, settings={})
    derive(run, None)
    assert run.plan == (("plan", ranks) if planned else None)
    assert any(note.startswith("The planned bytes are left out: the number of ranks") for note in run.notes) != planned


@pytest.mark.parametrize(
    ("model", "counted"),
    [({"num_layers": 1000}, True), ({"num_layers": 1001}, False)]
    + [({"num_experts": number, "top_k": 1, "expert_ffn_dim": 8}, number == 10_000) for number in (10_000, 10_001)],
)
def test_models_of_too_many_modules_are_not_counted(tmp_path: Path, model: Record, counted: bool) -> None:
    run = run_of(tmp_path, step(1), settings={"model": model})
    assert (run.config is not None) is counted
    assert run.settings["model.dim"] == "32", "keys are shown all the same"
    assert any("of so many modules" in note for note in run.notes) is not counted


def test_notes_name_what_is_missing(tmp_path: Path) -> None:
    assert run_of(tmp_path, step(1), settings={}).notes == ["No validation was recorded."]
    run = run_of(tmp_path, OBSERVED, {"kind": "validation", "step": 1}, settings={})
    assert run.notes == ["No step was recorded."]
    (tmp_path / "resolved_config.json").write_text("{")
    (note, *_) = run_of(tmp_path, step(1)).notes
    assert "is missing or damaged (" in note
    (tmp_path / "resolved_config.json").write_text(json.dumps({"config": {"turbo": 1}}))
    (note, *_) = run_of(tmp_path, step(1)).notes
    assert "is damaged, or of another version of maingrad (" in note
    for document in ([], {"versions": {}}, {"config": 3}):
        (tmp_path / "resolved_config.json").write_text(json.dumps(document))
        run = run_of(tmp_path, step(1))
        assert "is missing or damaged (it has no configuration)" in run.notes[0] and run.settings == {}


# ---- Records. ----


def test_unsound_numbers_are_null_and_noted(tmp_path: Path) -> None:
    sound = step(2**53, loss=3.5e38, lr=-3.5e38, note=None)
    unsound = step(2, loss=None, lr=True, tokens_per_second=3.6e38, grad_norm="big")
    many = OBSERVED | {"num_parameters": "many", "backend": "text"}
    run = run_of(tmp_path, sound, unsound, many, {"kind": "step", "loss": 1.0})
    assert run.records["step"] == [
        sound,
        {"kind": "step", "step": 2, "loss": None, "lr": None, "tokens_per_second": None, "grad_norm": None},
    ], "a step without its number is none"
    assert run.records["observed"] == [many | {"num_parameters": None}]
    path = tmp_path / "metrics.jsonl"
    assert {note for note in run.notes if "is no number" in note} == {
        f"'{path}', line 2: grad_norm of a step record is no number ('big')",
        f"'{path}', line 2: loss of a step record is no number (null, for NaN or infinity)",
        f"'{path}', line 2: lr of a step record is no number (True)",
        f"'{path}', line 2: tokens_per_second of a step record is no number (3.6e+38)",
        f"'{path}', line 3: num_parameters of a observed record is no number ('many')",
    }


def test_unsound_spans_are_taken_out(tmp_path: Path) -> None:
    """One note for each kind of damage, with the line of the record and the first such value."""
    bucket = TIMELINE["buckets"][0]
    damaged = [{**bucket, "launched": None}, {**bucket, "bucket": 3}, 7, {**bucket, "nbytes": 2**54}]
    timeline = {**TIMELINE, "buckets": [*damaged, bucket], "waits": 5}
    del timeline["gathers"]
    run = run_of(tmp_path, step(1), timeline)
    assert run.timeline is not None and run.timeline["buckets"] == [bucket]
    assert run.timeline["waits"] == run.timeline["gathers"] == []
    assert not [note for note in run_of(tmp_path, TIMELINE | {"phases": None}).notes if "phases" in note]
    assert run_of(tmp_path, step(1), TIMELINE | {"step": "two"}).timeline is None, "of no step that is known"
    notes = [note for note in run.notes if "timeline" in note]
    assert all(note.startswith(f"'{tmp_path / 'metrics.jsonl'}', line 2: ") for note in notes)
    assert [note.split(": ", 1)[1] for note in notes] == [
        "launched of one of the timeline's buckets is damaged (null, for NaN or infinity)",
        "bucket of one of the timeline's buckets is damaged (3)",
        "nbytes of one of the timeline's buckets is damaged (18014398509481984)",
        "bucket of one of the timeline's waits is damaged ([5])",
    ]


def test_names_of_runs_are_the_shortest_that_differ(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a/x/run", "b/x/run", "b/y")]
    for folder in folders:
        folder.mkdir(parents=True)
        run_of(folder, step(1))
    assert [run.label for run in read_runs(folders)] == ["a/x/run", "b/x/run", f"{tmp_path.name}/b/y"]
    assert [run.label for run in read_runs(folders[1:])] == ["run", "y"]
    assert run_folder.plain("a\ud800\n b\t") == "a? b"


# ---- Tables and curves. ----


def test_the_table_of_values_has_some_200_rows_and_the_last_step(tmp_path: Path) -> None:
    for count, rows in ((3, [1, 2, 3]), (199, list(range(1, 200))), (1000, list(range(4, 1001, 6)))):
        run = run_of(tmp_path, *(step(number, loss=1.0) for number in range(1, count + 1)))
        steps, columns = page._values(run)
        assert steps == rows
        assert list(columns) == ["training loss"] and len(columns["training loss"]) == count


def test_one_number_is_a_point_and_axes_begin_at_zero() -> None:
    figure = draw_curves([[(5, 2.0)], [(1, 3.0), (2, None), (3, 2.0)], [(1, 3.0), (2, 2.0)]], "unit")
    assert figure is not None
    (axes,) = figure.axes
    assert [line.get_marker() for line in axes.get_lines()] == [".", ".", "None"]
    assert axes.get_ylim()[0] == 0.0 and axes.get_yscale() == "linear"
    scales = {(0.1, 4.0): "log", (0.01, 0.9): "linear", (1.0, 29.0): "linear", (-1.0, 90.0): "linear"}
    for values, scale in scales.items():
        figure = draw_curves([list(enumerate(values))], "unit")
        assert figure is not None and figure.axes[0].get_yscale() == scale
        assert bool(figure.axes[0].get_ylim()[0] == 0.0) is (scale == "linear" and values[0] >= 0)


def test_more_runs_than_colours_are_dashed() -> None:
    figure = draw_curves([[(1, 1.0), (2, 2.0)]] * 7, "unit")
    assert figure is not None
    lines = figure.axes[0].get_lines()
    assert [line.get_linestyle() for line in lines] == ["-"] * 6 + ["--"]
    assert lines[6].get_color() == lines[0].get_color() and len({line.get_color() for line in lines}) == 6


def test_a_last_validation_without_a_number_and_units_of_two_kinds(tmp_path: Path) -> None:
    runs = []
    for unit in ("byte", "token"):
        (tmp_path / unit).mkdir()
        validations = [{"kind": "validation", "step": 1, "loss": 2.0}, {"kind": "validation", "step": 2, "loss": None}]
        runs.append(run_of(tmp_path / unit, OBSERVED | {"unit": unit}, step(1, loss=3.0), *validations))
    figure = draw_loss(runs)
    assert figure is not None and not figure.axes[0].texts
    assert figure.axes[0].get_ylabel() == "nats per byte or token"


def test_a_picture_in_a_page_says_what_it_is() -> None:
    figure = draw_curves([[(1, 1.0), (2, 2.0)]], "unit")
    assert figure is not None
    text = svg(figure, "loss over steps")
    assert text.startswith('<svg role="img" aria-label="loss over steps"') and "currentColor" in text
    assert "xmlns" not in text and "<metadata>" not in text and "xlink" not in text


def test_losses_of_several_runs_are_told_apart(tmp_path: Path) -> None:
    records = [step(1, loss=3.0), step(2, loss=2.0), {"kind": "validation", "step": 2, "loss": 2.25}]
    ends = [{"kind": "final", "bigram_loss": 2.5}, {"kind": "final", "bigram_loss": 2.5}]
    runs = []
    for name, end in zip("ab", ends, strict=True):
        (tmp_path / name).mkdir()
        runs.append(RunFolder(run_of(tmp_path / name, *records, end).path, name))
    one, two = draw_loss(runs[:1], "a title"), draw_loss(runs)
    assert one is not None and two is not None

    def labels(figure: Any) -> list[str]:
        return [text.get_text() for text in figure.legends[0].get_texts()]

    assert labels(one) == ["training", "validation", "token-bigram counts: 2.5"]
    assert labels(two) == [
        *(f"{name}, {kind}" for name in "ab" for kind in ("training", "validation")),
        "token-bigram counts: 2.5",
    ], "one line for models that are equal"
    colours = [line.get_color() for line in two.axes[0].get_lines()]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert one.axes[0].get_lines()[0].get_color() != one.axes[0].get_lines()[1].get_color()
    assert one._suptitle.get_text() == "a title"
    assert [text.get_text() for text in one.axes[0].texts] == ["2.25"]
