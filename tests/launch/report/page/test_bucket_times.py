"""Exposed and hidden milliseconds of buckets, on timelines whose answer is known."""

from typing import Any

import pytest

from maingrad.launch.report.page.bucket_times import bucket_times
from maingrad.launch.report.page.flights import draw_buckets, draw_step


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


def test_bars_lie_where_the_spans_are() -> None:
    lanes = draw_buckets(TIMELINE, "buckets")
    assert lanes is not None
    assert lanes.exposed_ms == 4000.0
    label, bucket, bars = lanes.rows[1]
    assert (label, bucket and bucket.bucket) == ("1: c", "bucket 1 (c)")
    seconds = {bar.kind: (bar.left, bar.width) for bar in bars}
    whole = 1.02 * 14.0
    assert seconds["hidden"] == pytest.approx((1e3 * 8 / whole, 1e3 * 2 / whole))
    assert seconds["exposed"] == pytest.approx((1e3 * 10 / whole, 1e3 * 3 / whole))
    assert seconds["waited"] == pytest.approx((1e3 * 10 / whole, 1e3 * 3 / whole))
    assert seconds["ready"] == pytest.approx((1e3 * 7.5 / whole, 1e3 * 0.5 / whole))


def test_the_whole_step() -> None:
    rows = {label: bars for label, _, bars in draw_step(TIMELINE).rows}
    assert list(rows) == ["computation", "reductions", "gathers", "waits"]
    waited = [(bar.left / 1e3 * 20, bar.width / 1e3 * 20) for bar in rows["waits"]]
    assert waited == [pytest.approx(each) for each in ((10.0, 3.0), (13.0, 1.0), (16.0, 2.0))]


def test_a_step_without_gathers_has_no_rows_for_them() -> None:
    assert draw_buckets({**TIMELINE, "gathers": []}, "gathers") is None
