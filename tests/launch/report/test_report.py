"""Records and pictures: written records can be read back, and the stated overlap is the recorded one."""

import math
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from rich.console import Console
from tiny_run import tiny_config

from maingrad.launch.report import overlap_plot, report
from maingrad.launch.report.overlap import computing, overlap_lines, overlap_share
from maingrad.launch.report.overlap_plot import draw_overlap
from maingrad.launch.training.metrics import MetricsWriter, read_metrics
from maingrad.launch.training.train import train
from maingrad.launch.training.watching.progress import Status, format_duration, format_rate, make_display


def timeline(*collectives: tuple[float, float]) -> dict[str, Any]:
    """A microbatch under no_sync from 0 to 1 s, the final one's backward from 2 to 4 s, and reductions."""
    return {
        "kind": "timeline",
        "step": 3,
        "backwards": [{"start": 0.0, "end": 1.0, "synced": False}, {"start": 2.0, "end": 4.0, "synced": True}],
        "forwards": [],
        "phases": [],
        "waits": [],
        "gathers": [],
        "buckets": [
            {
                "bucket": f"bucket {i} (a.weight .. b.weight)",
                "collective": "reduce_scatter",
                "nbytes": 4096,
                "ready": launched - 0.1,
                "launched": launched,
                "finished": finished,
            }
            for i, (launched, finished) in enumerate(collectives)
        ],
    }


def test_records_are_whole_lines_at_once(tmp_path: Path):
    path = tmp_path / "new" / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write("step", loss=1.5, nested={"x": [math.nan, 2]})
    assert read_metrics(path) == [{"kind": "step", "loss": 1.5, "nested": {"x": [None, 2]}}], "before close()"
    writer.write("step", loss=math.inf)
    writer.close()
    assert read_metrics(path)[1]["loss"] is None


def test_writer_without_a_file_is_silent():
    writer = MetricsWriter(None)
    writer.write("step", loss=1.0)
    writer.close()


def test_overlap_share_from_intervals():
    spans = timeline((2.0, 3.0), (3.5, 4.5), (4.0, 5.0))
    share = overlap_share(spans)
    assert (share.collective_seconds, share.hidden_seconds) == (3.0, 1.5)
    assert overlap_share(spans, leave_out_last=True).fraction == 0.75
    assert overlap_share(timeline()).fraction == 0.0


def gathered(*gathers: tuple[float, float], waits: tuple[tuple[float, float], ...] = ()) -> dict[str, Any]:
    """The same step with an optimizer's step from 5 to 6 s, a forward from 6.5 to 9 s, and gathers and waits."""
    spans = timeline((2.0, 3.0), (3.5, 4.5))
    spans["forwards"] = [{"start": 1.0, "end": 2.0}, {"start": 6.5, "end": 9.0}]
    spans["phases"] = [{"name": "optimizer", "start": 5.0, "end": 6.0}]
    spans["gathers"] = [
        {
            "bucket": f"bucket {1 - i} (a.weight .. b.weight)",
            "collective": "all_gather",
            "nbytes": 2048,
            "launched": launched,
            "finished": finished,
        }
        for i, (launched, finished) in enumerate(gathers)
    ]
    spans["waits"] = [
        {"bucket": "bucket 1 (a.weight .. b.weight)", "collective": "all_gather", "start": start, "end": end}
        for start, end in waits
    ]
    return spans


def test_gathers_are_hidden_where_nobody_waits_for_them():
    spans = gathered((5.5, 7.0), (5.5, 7.5), waits=((6.5, 7.0),))
    assert computing(spans) == [(0.0, 4.0), (5.0, 6.0), (7.0, 9.0)]
    share = overlap_share(spans, "gathers")
    assert (share.collective_seconds, share.hidden_seconds) == (3.5, 0.5 + 0.5 + 0.5)
    assert overlap_share(gathered((5.5, 7.5)), "gathers").hidden_seconds == 0.5 + 1.0


def test_waits_that_follow_each_other_leave_what_lies_between():
    spans = gathered((6.0, 9.0), waits=((6.0, 6.6), (7.0, 7.25), (7.25, 7.5), (8.5, 12.0)))
    assert computing(spans)[-2:] == [(6.6, 7.0), (7.5, 8.5)]
    assert overlap_share(spans, "gathers").hidden_seconds == pytest.approx(1.4)


def test_overlap_in_words():
    lines = overlap_lines(gathered((5.5, 7.0), (5.5, 7.5), waits=((6.5, 7.0),)))
    assert lines == [
        "step 3: 2 reductions of gradients, 0.0 MiB, 2000.0 ms in flight, 75% of it under computation, "
        "which waited 0.0 ms for them",
        "step 3: 2 gathers of parameters, 0.0 MiB, 3500.0 ms in flight, 43% of it under computation, "
        "which waited 500.0 ms for them",
    ]
    alone = timeline((3.9, 3.9))
    alone["buckets"][0]["collective"] = "none"
    assert overlap_lines(alone) == overlap_lines(None) == []


def test_overlap_picture_of_gathers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures = drawn(monkeypatch)
    path = draw_overlap(gathered((5.5, 7.0), (5.5, 7.5), waits=((6.5, 7.0),)), tmp_path / "overlap.png")
    said = texts(figures[0]).splitlines()
    assert (
        "75% of the reductions' time lies under computation, 100% of all buckets' but the last; of the gathers' 43%"
        in said
    )
    assert {"next forward", "step", "forward waits", "2000.0 ms", "1500.0 ms"} <= set(said)
    assert "reduce-scatter or all-gather, exposed" in said
    whole, reductions, gathers = figures[0].axes
    assert [label.get_text() for label in whole.get_yticklabels()] == ["computation", "collectives"]
    assert reductions.get_ylim() == gathers.get_ylim(), "a bucket has one row"
    assert gathers.get_xlim()[0] <= -1000.0, "from the first launch on, a second before the forward"
    assert matplotlib.image.imread(path).shape[1] > 1200


def sharded() -> dict[str, Any]:
    """The same step with sharded parameters, gathered for the final backward and for the next forward."""
    spans = gathered()
    for number, (launched, finished) in enumerate([(2.0, 2.5), (6.5, 7.0), (6.75, 8.0)]):
        unit = f"units.{min(number, 1)}.a .. units.{min(number, 1)}.b"
        gather = {"collective": "all_gather", "nbytes": 2048, "launched": launched, "finished": finished}
        spans["gathers"].append({"bucket": unit, **gather})
    for number, bucket in enumerate(spans["buckets"]):
        bucket["bucket"] = f"bucket {number} (units.{number}.a .. units.{number}.b)"
    spans["waits"] = [{"bucket": "units.0.a .. units.0.b", "collective": "all_gather", "start": 2.0, "end": 2.25}]
    return spans


def test_overlap_picture_of_sharded_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures = drawn(monkeypatch)
    draw_overlap(sharded(), tmp_path / "overlap.png")
    said = texts(figures[0]).splitlines()
    assert {"next forward", "computation waits", "500.0 ms", "1250.0 ms", "backward of the final microbatch"} <= set(
        said
    )
    whole, backward, forward = figures[0].axes
    assert [label.get_text() for label in whole.get_yticklabels()] == ["computation", "reductions", "gathers"]
    labels = [label.get_text() for label in backward.get_yticklabels()]
    assert labels == [f"bucket {number}, 0.0 MiB\nunits.{number}.a .. units.{number}.b" for number in (0, 1)]
    # A reduction, and the gather of the same unit below it.
    assert {round(bar.get_y() + bar.get_height() / 2, 2) for bar in backward.patches[2:]} == {-0.2, 0.2, 0.8}
    assert {round(bar.get_y() + bar.get_height() / 2, 2) for bar in forward.patches[1:]} == {1.0}


def test_a_frozen_unit_has_a_row_for_its_gathers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures = drawn(monkeypatch)
    spans = sharded()
    spans["gathers"][1]["bucket"] = "frozen.weight"
    draw_overlap(spans, tmp_path / "overlap.png")
    assert figures[0].axes[1].get_yticklabels()[-1].get_text() == "gathered, 0.0 MiB\nfrozen"


def texts(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(matplotlib.text.Text))


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that the test saves."""
    figures: list[Any] = []
    save = report.save
    for module in (report, overlap_plot):
        monkeypatch.setattr(module, "save", lambda figure, path: (figures.append(figure), save(figure, path))[1])
    return figures


def test_overlap_picture_says_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures = drawn(monkeypatch)
    path = draw_overlap(timeline((2.0, 3.0), (3.5, 4.5), (4.0, 5.0)), tmp_path / "overlap.png")
    said = texts(figures[0])
    assert "50% of collective time lies under computation, 75% of all buckets' but the last" in said
    assert "bucket 1, 0.0 MiB\na .. b" in said
    assert "1000.0 ms" in said
    assert "reduce-scatter, exposed" in said
    image = matplotlib.image.imread(path)
    assert image.shape[1] > 1200
    assert len({tuple(pixel) for row in image[::10, ::10] for pixel in row}) > 10, "an empty picture"


def test_overlap_picture_of_delayed_weight_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures = drawn(monkeypatch)
    spans = timeline((3.9, 4.4), (4.2, 4.8), (4.9, 5.1))
    spans["phases"] = [{"name": "weight gradients", "start": 4.0, "end": 5.0}]
    draw_overlap(spans, tmp_path / "overlap.png")
    said = texts(figures[0])
    assert "92% of collective time lies under computation, 100% of all buckets' but the last" in said
    assert "backward: input gradients" in said
    assert "weight gradients" in said.splitlines()


def test_overlap_picture_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    figures = drawn(monkeypatch)
    spans = timeline((3.9, 3.9))
    spans["buckets"][0]["collective"] = "none"
    draw_overlap(spans, tmp_path / "overlap.png")
    assert "One rank: buckets become ready, and there is nothing to reduce" in texts(figures[0])


def test_one_bucket_and_no_microbatches_before(tmp_path: Path):
    spans = timeline((3.9, 4.2))
    spans["backwards"] = spans["backwards"][1:]
    assert draw_overlap(spans, tmp_path / "overlap.png").stat().st_size > 10_000


def test_loss_picture_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tiny_config(tmp_path)
    result = train(config)
    figures = drawn(monkeypatch)
    paths = report.draw_report(Path(config.train.out_dir))
    assert [path.name for path in paths] == ["loss.png", "overlap.png"]
    said = texts(figures[0])
    assert f"byte-bigram counts on the same data: {result.bigram_loss:.3f}" in said
    assert f"{result.validation_loss:.3f}" in said
    assert "loss, nats per byte" in said


def test_report_of_an_interrupted_run_draws_what_is_there(tmp_path: Path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write("step", step=1, loss=5.0)
    writer.write("interrupted", step=1)
    writer.close()
    assert [path.name for path in report.draw_report(tmp_path)] == ["loss.png"]


# ---- What is shown while a run trains. ----

STATUS = Status(step=50, steps=200, fraction=0.25, elapsed=60.0, loss=2.5, lr=1e-3, tokens_per_second=31234.0)


def test_plain_lines_off_a_terminal():
    out = StringIO()
    display = make_display(Console(file=out, force_terminal=False))
    display.update(STATUS)
    display.update(STATUS)  # at once: too soon for another line
    display.update(STATUS._replace(step=200, fraction=1.0))
    display.close()
    first, last = out.getvalue().splitlines()
    assert first == "step    50/200  loss 2.5000  lr 1.00e-03  31.2k tokens/s  ETA 3:00"
    assert last.startswith("step   200/200")
    assert last.endswith("ETA 0:00")


def test_a_bar_on_a_terminal():
    out = StringIO()
    display = make_display(Console(file=out, force_terminal=True, width=140))
    display.message("bigram 2.5")
    display.update(STATUS)
    display.close()
    assert "bigram 2.5" in out.getvalue()
    assert "31.2k tokens/s" in out.getvalue()
    assert "25%" in out.getvalue()


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]):
    display = make_display(is_main=False)
    display.update(STATUS)
    display.message("hello")
    display.close()
    assert capsys.readouterr() == ("", "")


def test_numbers_for_people():
    assert [format_duration(s) for s in (4.4, 75, 4000, math.inf)] == ["0:04", "1:15", "1:06:40", "-"]
    assert [format_rate(r) for r in (12, 1500, 2.5e6, 3e9)] == ["12", "1.5k", "2.5M", "3.0G"]
