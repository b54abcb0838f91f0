"""`maingrad report RUN ...`: the numbers of the page are those of the runs' files."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from report_pages import ReadPage, leave_pictures_empty
from tiny_run import tiny_config

from maingrad.launch.cli import main
from maingrad.launch.plan.plan import plan_run
from maingrad.launch.report.overlap import overlap_lines
from maingrad.launch.report.page import write_page
from maingrad.launch.report.run_folder import read_runs
from maingrad.launch.report.side_by_side import differing, side_by_side
from maingrad.launch.simulation.simulate import simulate
from maingrad.launch.training.metrics import read_metrics
from maingrad.launch.training.train import train

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps on two simulated ranks."""
    folder = tmp_path_factory.mktemp("runs")
    simulate(train, 2, tiny_config(folder))
    return folder / "run"


@pytest.fixture
def pictures() -> None:
    """Asked for by tests that look at the pictures. Others leave them empty: they take most of a page's time."""


@pytest.fixture(autouse=True)
def empty_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pictures" not in request.fixturenames:
        leave_pictures_empty(monkeypatch)


def copy_of(run: Path, target: Path, *, edit: Any = None, settings: Any = None) -> Path:
    """A copy of a run; ``edit`` gets its records, and ``settings`` its resolved configuration."""
    target.mkdir(parents=True)
    for name in ("metrics.jsonl", "resolved_config.json"):
        shutil.copy(run / name, target)
    if edit is not None:
        records = read_metrics(run / "metrics.jsonl")
        records = edit(records) or records
        (target / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if settings is not None:
        document = json.loads((run / "resolved_config.json").read_text())
        settings(document)
        (target / "resolved_config.json").write_text(json.dumps(document))
    return target


def page_of(folder: Path, *runs: Path, **options: Any) -> ReadPage:
    return ReadPage(write_page(read_runs(runs), folder / "page.html", **options))


def of_kind(run: Path, kind: str) -> Records:
    return [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == kind]


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


@pytest.mark.in_turn
def test_the_numbers_are_those_of_the_files(two_ranks: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path, two_ranks)
    steps, validations, (final,) = (of_kind(two_ranks, kind) for kind in ("step", "validation", "final"))
    (timeline,) = of_kind(two_ranks, "timeline")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert page.column("validation loss", "run")[4] == f"{validations[0]['loss']:.5g}"
    named = {"loss": "training loss", "tokens_per_second": "Throughput", "grad_norm": "Gradient norm"}
    for field, title in {**named, "lr": "Learning rate"}.items():
        assert page.column(title, "run") == {record["step"]: f"{record[field]:.5g}" for record in steps}, field
    assert page.charts == ["loss", "tokens_per_second", "grad_norm", "lr"]
    assert page.value("validation_loss", "run") == validations[-1]["loss"] == final["validation_loss"]
    assert page.value("tokens_per_second", "run") == median([record["tokens_per_second"] for record in steps])
    assert page.value("tokens", "run") == 6 * 24 * 24
    assert page.states["run"] == "finished after step 6"
    assert "is no number" not in page.text, "nothing is damaged"
    waited = sum(wait["end"] - wait["start"] for wait in timeline["waits"] if wait["collective"] != "all_gather")
    assert page.value("exposed_ms", "run") == pytest.approx(1e3 * waited)
    names = [span["bucket"] for kind in ("buckets", "gathers") for span in timeline[kind]]
    assert [row["data-bucket"] for row in page.buckets] == names
    assert len(names) > 6, "several buckets"


def test_planned_bytes_are_those_of_the_plan(two_ranks: Path, tmp_path: Path) -> None:
    planned = plan_run(tiny_config(tmp_path), 2).rank_bytes
    page = page_of(tmp_path, two_ranks)
    assert page.value("planned_bytes", "run") == planned.total
    for what, nbytes in planned._asdict().items():
        assert page.value(f"planned_{what}", "run") == nbytes


@pytest.mark.in_turn
def test_the_page_needs_no_other_file_and_no_network(two_ranks: Path, tmp_path: Path, pictures: None) -> None:
    page = page_of(tmp_path, two_ranks)
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\([^#]|<script", page.source)
    assert not [tag for tag, found in page.tags if tag in ("link", "img", "iframe") or "src" in found]
    assert all(found["href"].startswith("#") for _, found in page.tags if "href" in found)


@pytest.mark.in_turn
def test_no_attribute_is_escaped_twice(two_ranks: Path, tmp_path: Path, pictures: None) -> None:
    page = page_of(tmp_path, two_ranks)
    assert not [found for _, found in page.tags if any('"' in name or "&" in name for name in found)]


def test_a_cpu_has_no_mfu_and_the_page_says_why(two_ranks: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path, two_ranks, peak_tflops=100.0)
    assert ("mfu", "run") not in page.figures
    assert "mfu" not in page.charts
    assert "MFU is left out: the run was on a CPU" in page.text
    assert "Peak memory is left out: it is measured on GPUs only" in page.text


def on_gpu(name: str) -> dict[str, Any]:
    """Edits that make a run one on a GPU."""

    def edit(records: Records) -> None:
        for record in records:
            if record["kind"] == "observed":
                record["device"] = "cuda:0"
            if record["kind"] == "final":
                record["peak_memory_bytes"] = 3 * 2**30

    return {"edit": edit, "settings": lambda document: document["versions"].update(gpu=name)}


# Weights that multiply a token, in each of two blocks: queries, keys and values, output, gate and up, down; the head.
_WEIGHTS = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 2 * 64 * 32 + 32 * 64) + 256 * 32
_FLOPS = 6 * _WEIGHTS + 12 * 2 * 24 * 32


@pytest.mark.parametrize(
    "gpu, peak, option",
    [("NVIDIA H100 80GB HBM3", 989.0, None), ("NVIDIA H100 80GB HBM3", 500.0, 500.0), ("Unheard X1", 42.0, 42.0)],
)
@pytest.mark.sampled(1)
def test_mfu_of_a_model_counted_by_hand(
    two_ranks: Path, tmp_path: Path, gpu: str, peak: float, option: float | None
) -> None:
    page = page_of(tmp_path, copy_of(two_ranks, tmp_path / "gpu", **on_gpu(gpu)), peak_tflops=option)
    assert page.value("flops_per_token", "gpu") == _FLOPS
    expected = [r["tokens_per_second"] * _FLOPS / (2 * peak * 1e12) for r in of_kind(two_ranks, "step")]
    assert page.value("mfu", "gpu") == pytest.approx(median(expected), rel=1e-12)
    shown = page.column("Model FLOPs utilisation", "gpu")
    assert list(shown.values()) == [f"{value:.5g}" for value in expected]
    assert page.value("peak_memory_bytes", "gpu") == 3 * 2**30
    assert "left out" not in page.text


def test_a_model_that_cannot_be_counted_costs_its_numbers_alone(two_ranks: Path, tmp_path: Path) -> None:
    """A folder of Hugging Face may have changed since, and transformers raises anything for what it says."""
    pytest.importorskip("transformers")
    (tmp_path / "source").mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": -32}
    (tmp_path / "source/config.json").write_text(json.dumps(config))

    def replace(document: dict[str, Any]) -> None:
        document["config"]["model"] = {"hugging_face": str(tmp_path / "source"), "pretrained": False}

    page = page_of(tmp_path, copy_of(two_ranks, tmp_path / "run", settings=replace))
    assert "Model FLOPs and MFU are left out: " in page.text
    assert "The planned bytes are left out: " in page.text
    assert page.value("loss", "run") == of_kind(two_ranks, "step")[-1]["loss"]


def test_an_unknown_gpu_is_named(two_ranks: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path, copy_of(two_ranks, tmp_path / "gpu", **on_gpu("Unheard X1")))
    assert ("mfu", "gpu") not in page.figures
    assert "no peak of 'Unheard X1' is known; give it in TFLOP/s with --peak-tflops" in page.text


def test_mfu_counts_the_ranks_that_took_each_step(two_ranks: Path, tmp_path: Path) -> None:
    """Two ranks until step 4, and eight after it."""

    def resume(records: Records) -> Records:
        gpu: Any = on_gpu("NVIDIA A100-SXM4-80GB")["edit"]
        gpu(records)
        (observed,) = (record for record in records if record["kind"] == "observed")
        return [*records, {**observed, "step": 4, "world_size": 8}]

    gpu = on_gpu("NVIDIA A100-SXM4-80GB")["settings"]
    page = page_of(tmp_path, copy_of(two_ranks, tmp_path / "gpu", edit=resume, settings=gpu))
    shown = page.column("Model FLOPs utilisation", "gpu")
    for record in of_kind(two_ranks, "step"):
        ranks = 2 if record["step"] <= 4 else 8
        assert shown[record["step"]] == f"{record['tokens_per_second'] * _FLOPS / (ranks * 312e12):.5g}"
    assert page.states["gpu"] == "finished after step 6; resumed after step 4"


@pytest.mark.in_turn
def test_runs_side_by_side(two_ranks: Path, tmp_path: Path) -> None:
    def faster(records: Records) -> None:
        for record in records:
            if record["kind"] == "step":
                record["tokens_per_second"] *= 2

    def other_settings(document: dict[str, Any]) -> None:
        document["config"]["optimizer"]["lr"] = 0.5
        document["versions"]["torch"] = "0.0.1"

    other = copy_of(two_ranks, tmp_path / "faster", edit=faster, settings=other_settings)
    page = page_of(tmp_path, two_ranks, other)
    assert page.tables["different-settings"] == {"optimizer.lr": ["0.003", "0.5"]}
    assert page.other["different-settings", "optimizer.lr"] == [False, True]
    assert page.other["settings", "optimizer.lr"] == [False, True]
    assert page.other["settings", "optimizer.weight_decay"] == [False, False]
    assert page.other["versions", "torch"] == [False, True]
    assert page.other["versions", "python"] == [False, False]
    rate = page.value("tokens_per_second", "run")
    assert page.value("tokens_per_second", "faster") == pytest.approx(2 * rate)
    assert "+100.0%" in page.text
    assert page.text.count("≠") == 3, "the rate of learning twice, and torch: not by colour alone"
    assert set(page.values) == {"run", "faster"}


@pytest.mark.in_turn
def test_equal_settings_and_equal_names(two_ranks: Path, tmp_path: Path) -> None:
    """Runs of one name are told apart by their parents; their folders are no difference."""
    runs = [copy_of(two_ranks, tmp_path / name / "run") for name in ("a", "b")]
    page = page_of(tmp_path, *runs)
    assert "All settings of these runs are equal." in page.text
    assert page.value("loss", "a/run") == page.value("loss", "b/run") == of_kind(two_ranks, "step")[-1]["loss"]


@pytest.mark.in_turn
def test_a_name_is_text_and_never_markup(two_ranks: Path, tmp_path: Path, pictures: None) -> None:
    run = copy_of(two_ranks, tmp_path / "<b>&\"'")
    page = page_of(tmp_path, run)
    assert page.states["<b>&\"'"] == "finished after step 6"
    assert page.column("Learning rate", "<b>&\"'")
    assert "b" not in [tag for tag, _ in page.tags]


@pytest.mark.in_turn
def test_a_run_that_was_resumed_says_where(tmp_path: Path) -> None:
    for steps, resume in ((4, None), (6, "auto")):
        train(tiny_config(tmp_path, train={"steps": steps, "save_every": 2, "resume": resume}))
    page = page_of(tmp_path, tmp_path / "run")
    assert page.states["run"] == "finished after step 6; resumed after step 4"
    assert list(page.column("training loss", "run")) == [1, 2, 3, 4, 5, 6]
    assert "One rank: nothing is sent." in page.text
    assert ("exposed_ms", "run") not in page.figures


@pytest.mark.in_turn
@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
@pytest.mark.sampled(1)
def test_experts_and_sharded_parameters(tmp_path: Path, parallel: str) -> None:
    experts = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 32}
    config = tiny_config(tmp_path, parallel=parallel, model=experts)
    simulate(train, 2, config)
    page, steps = page_of(tmp_path, tmp_path / "run"), of_kind(tmp_path / "run", "step")
    titles = {"max_expert_load": "Fullest expert", "load_balancing_loss": "Load-balancing loss"}
    for name, title in {**titles, "router_z_loss": "Router z-loss"}.items():
        assert page.column(title, "run") == {record["step"]: f"{record[name]:.5g}" for record in steps}
    # A token meets the router and two of four experts of 3 * 32 * 32 weights, in place of the dense feed-forward.
    assert page.value("flops_per_token", "run") == _FLOPS + 6 * 2 * (2 * 3 * 32 * 32 + 4 * 32 - 3 * 64 * 32)
    if parallel == "fsdp":
        assert page.value("planned_bytes", "run") == plan_run(config, 2).rank_bytes.total
        assert "of gathered parameters" in page.text


@pytest.mark.in_turn
def test_a_killed_and_an_interrupted_run(two_ranks: Path, tmp_path: Path) -> None:
    def kill(records: Records) -> Records:
        return [record for record in records if record["kind"] != "final" and record.get("step", 0) <= 3]

    def interrupt(records: Records) -> Records:
        return [*kill(records), {"kind": "interrupted", "step": 3, "seconds": 1.0, "signal": "SIGTERM"}]

    killed = copy_of(two_ranks, tmp_path / "killed", edit=kill)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # the last line that it wrote
    page = page_of(tmp_path, killed, copy_of(two_ranks, tmp_path / "interrupted", edit=interrupt))
    assert page.states == {
        "killed": "no end recorded after step 3: the run goes on, or was killed",
        "interrupted": "interrupted after step 3 by SIGTERM",
    }
    assert "No validation was recorded." in page.text
    assert ("validation_loss", "killed") not in page.figures
    assert page.value("steps", "killed") == 3


def test_a_run_that_ended_in_its_first_step(two_ranks: Path, tmp_path: Path) -> None:
    def nothing_but_the_end(records: Records) -> Records:
        return [{"kind": "interrupted", "step": 0, "seconds": 0.1, "signal": "SIGINT"}]

    page = page_of(tmp_path, copy_of(two_ranks, tmp_path / "early", edit=nothing_but_the_end))
    assert page.charts == []
    assert "the device is not known, since no step was completed" in page.text
    assert page.value("planned_bytes", "early") > 0


@pytest.mark.in_turn
def test_a_loss_that_is_no_number_is_a_gap(two_ranks: Path, tmp_path: Path, pictures: None) -> None:
    def diverge(records: Records) -> None:
        for record in records:
            if record["kind"] == "step" and record["step"] in (3, 6):
                record["loss"] = None

    page = page_of(tmp_path, copy_of(two_ranks, tmp_path / "nan", edit=diverge))
    losses = page.column("training loss", "nan")
    assert [step for step, loss in losses.items() if loss == "no number"] == [3, 6]
    assert page.figures["loss", "nan"] == "no number", "and not the last finite one"
    curves = [found["d"] for tag, found in page.tags if tag == "path" and "#0072b2" in found.get("style", "")]
    assert any(curve.count("M") == 2 for curve in curves), "from 1 to 2, and from 4 to 5"


def test_the_environment_says_what_was_run(two_ranks: Path, tmp_path: Path) -> None:
    def recorded(document: dict[str, Any]) -> None:
        document.update(git_commit="0123abc-dirty", command="python -m maingrad train tiny.toml")

    run = copy_of(two_ranks, tmp_path / "one", settings=recorded)
    versions = page_of(tmp_path, run).tables["versions"]
    assert versions["git_commit"] == ["0123abc-dirty"]
    assert versions["command"] == ["python -m maingrad train tiny.toml"]
    assert versions["model"] == ["GPT of 2 blocks, width 32"]
    assert versions["torch"] != ["none"] and versions["ranks"] == ["2"]


@pytest.mark.in_turn
def test_the_command(two_ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], pictures: None) -> None:
    run = copy_of(two_ranks, tmp_path / "one")
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out.split("\n")
    assert [line for line in out if line.startswith(str(run))] == [
        str(run / name) for name in ("report.html", "loss.png", "overlap.png", "overlap.json")
    ]
    assert ReadPage(run / "report.html").states == {"one": "finished after step 6"}
    lines = overlap_lines(read_runs([run])[0].timeline or {})
    assert lines and set(lines) <= set(out), "how much of what was sent was hidden"
    assert main(["report", str(run), "--peak-tflops", "-1"]) == 2
    assert "--peak-tflops -1.0: must be positive" in capsys.readouterr().err


def test_what_differs_between_any_two_runs_does_not_tell_them_apart() -> None:
    one = {"command": "a", "folder": "x", "executable": "p", "train.out_dir": "m", "train.seed": "0", "torch": "2"}
    other = one | {key: "other" for key in one if key != "torch"} | {"data.order": "epochs"}
    assert differing(side_by_side([one, other])) == {"train.seed": ["0", "other"], "data.order": ["none", "epochs"]}
