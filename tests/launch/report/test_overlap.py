"""Overlap on timelines whose answer is known: milliseconds of buckets, words, the Chrome trace and the picture."""

from pathlib import Path
from typing import Any

import matplotlib.image
import matplotlib.text
import pytest

from maingrad.launch.report.drawing import save
from maingrad.launch.report.overlap import bucket_times, chrome_trace, computing, hidden_share, overlap_lines
from maingrad.launch.report.step_picture import draw_step


def span(bucket: str, launched: float, finished: float, collective: str = "reduce_scatter") -> dict[str, Any]:
    found = {"bucket": bucket, "collective": collective, "nbytes": 1024, "launched": launched, "finished": finished}
    return found if collective == "all_gather" else {**found, "ready": launched - 0.5}


def wait(bucket: str, start: float, end: float, collective: str = "reduce_scatter") -> dict[str, Any]:
    return {"bucket": bucket, "collective": collective, "start": start, "end": end}


# A backward from 0 to 10 s. Bucket 0 is reduced under it. Bucket 1 is in flight from 8 to 13 s, and waited for from 10
# to 13 s; then bucket 2, launched at 10 s, for one second more. The optimizer runs from 14 to 15 s, the gather of
# bucket 2 from 15 to 18 s; the next forward begins at 15 s, waits from 16 to 18 s, and ends at 20 s.
TIMELINE: dict[str, Any] = {
    "kind": "timeline",
    "step": 10,
    "forwards": [{"start": 15.0, "end": 20.0}],
    "backwards": [{"start": 0.0, "end": 10.0, "synced": True}],
    "phases": [{"name": "optimizer", "start": 14.0, "end": 15.0}],
    "buckets": [span("bucket 0 (a .. b)", 2.0, 6.0), span("bucket 1 (c)", 8.0, 13.0), span("bucket 2 (d)", 10.0, 14.0)],
    "gathers": [span("bucket 2 (d)", 15.0, 18.0, "all_gather")],
    "waits": [
        wait("bucket 0 (a .. b)", 10.0, 10.0),
        wait("bucket 1 (c)", 10.0, 13.0),
        wait("bucket 2 (d)", 13.0, 14.0),
        wait("bucket 2 (d)", 16.0, 18.0, "all_gather"),
    ],
}


def test_a_stretch_within_another_ends_nothing() -> None:
    timeline = {"forwards": [], "phases": [], "waits": []}
    backwards = [{"start": 0.0, "end": 10.0}, {"start": 2.0, "end": 3.0}]  # one backward in another: a recompute's
    assert computing(timeline | {"backwards": backwards}) == [(0.0, 10.0)]


def test_each_wait_counts_for_its_bucket() -> None:
    times = bucket_times(TIMELINE, "buckets")
    assert [each.exposed_ms for each in times] == [0.0, 3000.0, 1000.0]
    assert [each.in_flight_ms for each in times] == [4000.0, 5000.0, 4000.0]
    assert [each.hidden_ms for each in times] == [4000.0, 2000.0, 0.0]
    assert sum(each.exposed_ms for each in times) == 4000.0, "the step stood still from 10 to 14 s"


def test_waits_of_gathers_are_the_gathers() -> None:
    (gather,) = bucket_times(TIMELINE, "gathers")
    assert (gather.in_flight_ms, gather.hidden_ms, gather.exposed_ms) == (3000.0, 1000.0, 2000.0)


def test_several_reductions_of_a_bucket_are_one_row() -> None:
    """Sharded gradients are reduced in every microbatch."""
    timeline = {
        **TIMELINE,
        "buckets": [span("x", 1.0, 2.0), span("y", 2.0, 3.0), span("x", 8.0, 11.0)],
        "waits": [wait("x", 10.0, 11.0), wait("x", 12.0, 12.5)],
    }
    first, second = bucket_times(timeline, "buckets")
    assert (first.bucket, first.nbytes, first.in_flight_ms, first.exposed_ms) == ("x", 2048, 4000.0, 1500.0)
    assert first.hidden_ms == 3000.0, "1 to 2, and 8 to 10"
    assert (second.bucket, second.exposed_ms) == ("y", 0.0)


def test_the_trace_has_each_span_at_its_time() -> None:
    """In microseconds, as Perfetto reads them; overlapping collectives lie on lanes of their own."""
    events = chrome_trace(TIMELINE)["traceEvents"]
    lanes = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert list(lanes) == ["computation", "waits", "a .. b", "c", "d"]
    spans = [(each["tid"], each["cat"], each["ts"], each["dur"]) for each in events if each["ph"] == "X"]
    assert (lanes["c"], "buckets", 8e6, 5e6) in spans
    assert (lanes["d"], "gathers", 15e6, 3e6) in spans
    assert (lanes["waits"], "waited", 16e6, 2e6) in spans
    assert (lanes["computation"], "synced", 0.0, 10e6) in spans
    names = {(each["cat"], each["name"]) for each in events if each["ph"] == "X"}
    assert names == {
        *(("forward", "forward"), ("synced", "backward"), ("optimizer", "optimizer")),
        *(("waited", "reduce_scatter"), ("waited", "all_gather"), ("ready", "reduce_scatter")),
        *(("buckets", "reduce_scatter"), ("gathers", "all_gather")),
    }
    assert [each["args"] for each in events if each.get("cat") == "gathers"] == TIMELINE["gathers"]


def test_clocks_that_disagree_make_no_negative_times() -> None:
    """A bucket is ready by the host's clock, and launched by the device's."""
    early = {**TIMELINE, "buckets": [{**TIMELINE["buckets"][0], "ready": 2.5}]}
    (ready,) = [each for each in chrome_trace(early)["traceEvents"] if each.get("cat") == "ready"]
    assert (ready["ts"], ready["dur"]) == (2.5e6, 0.0)


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


def test_hidden_share_from_intervals() -> None:
    times = bucket_times(timeline((2.0, 3.0), (3.5, 4.5), (4.0, 5.0)), "buckets")
    assert sum(each.in_flight_ms for each in times) == 3000.0
    assert sum(each.hidden_ms for each in times) == 1500.0
    assert (hidden_share(times), hidden_share(times[:-1])) == (0.5, 0.75)
    assert hidden_share([]) == 0.0


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


def test_gathers_are_hidden_where_nobody_waits_for_them() -> None:
    spans = gathered((5.5, 7.0), (5.5, 7.5), waits=((6.5, 7.0),))
    assert computing(spans) == [(0.0, 4.0), (5.0, 6.0), (7.0, 9.0)]
    assert sum(each.hidden_ms for each in bucket_times(spans, "gathers")) == 1500.0
    assert sum(each.hidden_ms for each in bucket_times(gathered((5.5, 7.5)), "gathers")) == 1500.0


def test_waits_that_follow_each_other_leave_what_lies_between() -> None:
    spans = gathered((6.0, 9.0), waits=((6.0, 6.6), (7.0, 7.25), (7.25, 7.5), (8.5, 12.0)))
    assert computing(spans)[-2:] == [(6.6, 7.0), (7.5, 8.5)]
    assert sum(each.hidden_ms for each in bucket_times(spans, "gathers")) == pytest.approx(1400.0)


def test_overlap_in_words() -> None:
    lines = overlap_lines(gathered((5.5, 7.0), (5.5, 7.5), waits=((6.5, 7.0),)))
    assert lines == [
        "step 3: 2 reductions of gradients, 0.0 MiB, 2000.0 ms in flight, 75% of it under computation, "
        "which waited 0.0 ms for them",
        "step 3: 2 gathers of parameters, 0.0 MiB, 3500.0 ms in flight, 43% of it under computation, "
        "which waited 500.0 ms for them",
    ]
    alone = timeline((3.9, 3.9))
    alone["buckets"][0]["collective"] = "none"
    assert overlap_lines(alone) == []


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


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_the_picture_has_one_axis_of_time(tmp_path: Path) -> None:
    spans = gathered((5.5, 7.0), (5.5, 7.5), waits=((6.5, 7.0),))
    figure = draw_step(spans)
    (axes,) = figure.axes
    title = "\n".join(overlap_lines(spans))
    said = texts(figure)
    assert {title, "computation waits", "optimizer", "collective, exposed", "ms since step 3 began, rank 0"} <= set(
        said
    )
    assert [label.get_text() for label in axes.get_yticklabels()] == ["computation", "waits", "a .. b"]
    left, right = axes.get_xlim()
    assert left <= 0.0 and right >= 9000.0
    image = matplotlib.image.imread(save(figure, tmp_path / "overlap.png"))
    assert image.shape[1] > 1200
    assert len({tuple(pixel) for row in image[::10, ::10] for pixel in row}) > 10, "an empty picture"
    assert "<svg" in save(figure, tmp_path / "overlap.svg").read_text(), "as its name says"


def test_bars_lie_where_the_spans_do() -> None:
    """In ms, on the lanes of the Chrome trace: reductions in the upper half of theirs, gathers in the lower."""
    axes = draw_step(TIMELINE).axes[0]
    bars = {
        group.get_label(): [
            tuple(round(float(number), 3) for number in (*bar.get_xy(), bar.get_width(), bar.get_height()))
            for bar in group.patches
        ]
        for group in axes.containers
    }
    assert bars == {
        "forward": [(15000.0, -0.4, 5000.0, 0.8)],
        "backward with reductions": [(0.0, -0.4, 10000.0, 0.8)],
        "optimizer": [(14000.0, -0.4, 1000.0, 0.8)],
        "computation waits": [
            (10000.0, 0.6, 0.0, 0.8),
            (10000.0, 0.6, 3000.0, 0.8),
            (13000.0, 0.6, 1000.0, 0.8),
            (16000.0, 0.6, 2000.0, 0.8),
        ],
        "ready, until launched": [
            (1500.0, 1.6, 500.0, 0.12),
            (7500.0, 2.6, 500.0, 0.12),
            (9500.0, 3.6, 500.0, 0.12),
        ],
        "collective, exposed": [
            (2000.0, 1.6, 4000.0, 0.4),
            (8000.0, 2.6, 5000.0, 0.4),
            (10000.0, 3.6, 4000.0, 0.4),
            (15000.0, 4.0, 3000.0, 0.4),
        ],
        "collective under computation": [
            (2000.0, 1.6, 4000.0, 0.4),
            (8000.0, 2.6, 2000.0, 0.4),
            (15000.0, 4.0, 1000.0, 0.4),
        ],
    }
    bottom, top = axes.get_ylim()
    assert (bottom, top) == (4.5, -0.6), "the first lane is the uppermost"


def test_shares_of_less_than_a_millisecond() -> None:
    short = timeline((3.9998, 4.0002))
    assert hidden_share(bucket_times(short, "buckets")) == pytest.approx(0.5)


def test_the_picture_of_sharded_parameters() -> None:
    """The reduction of a unit and its gathers share a lane; a frozen unit has one for its gathers."""
    spans = sharded()
    (axes,) = draw_step(spans).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["computation", "waits", *(f"units.{number}.a .. units.{number}.b" for number in (0, 1))]
    spans["gathers"][1]["bucket"] = "frozen.weight"
    (axes,) = draw_step(spans).axes
    assert axes.get_yticklabels()[-1].get_text() == "frozen"


def test_the_picture_of_delayed_weight_gradients_and_of_one_rank() -> None:
    spans = timeline((3.9, 4.4), (4.2, 4.8), (4.9, 5.1))
    spans["phases"] = [{"name": "weight gradients", "start": 4.0, "end": 5.0}]
    said = texts(draw_step(spans))
    assert overlap_lines(spans)[0] in said and "92% of it under computation" in overlap_lines(spans)[0]
    assert "delayed weight gradients" in said
    alone = timeline((3.9, 3.9))
    alone["buckets"][0]["collective"] = "none"
    assert "One rank: buckets become ready, and there is nothing to reduce" in texts(draw_step(alone))


def test_long_names_of_buckets_are_cut() -> None:
    spans = timeline((2.0, 3.0))
    spans["buckets"][0]["bucket"] = f"bucket 0 ({'x' * 500})"
    (axes,) = draw_step(spans).axes
    assert axes.get_yticklabels()[-1].get_text() == "x" * 46


def test_a_thousand_buckets_are_a_picture_of_finite_height() -> None:
    many = timeline(*((2.0 + i / 1000, 2.5 + i / 1000) for i in range(1000)))
    for number, span in enumerate(many["buckets"]):
        span["bucket"] = f"bucket {number} (w{number})"
    assert draw_step(many).get_figheight() < 25
