"""The digest of a trace that is small enough to compute by hand."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from trace_digest import Activity, digest, digest_trace, load_trace, record_trace


def kernel(name: str, stream: int, start: float, duration: float, correlation: int) -> dict:
    arguments = {"stream": stream, "correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration, "args": arguments}


def launch(at: float, correlation: int) -> dict:
    arguments = {"correlation": correlation}
    return {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": at, "dur": 1.0, "args": arguments}


# Microseconds. Computing: [0, 1000], [2000, 3500], [5000, 6000]. NCCL: [500, 2500], [4000, 4500], [5500, 7000].
EVENTS = [
    kernel("gemm_a", 7, 0.0, 1000.0, 1),
    kernel("ncclDevKernel_ReduceScatter", 20, 500.0, 2000.0, 2),
    kernel("gemm_b", 7, 2000.0, 1000.0, 3),
    kernel("add", 8, 2500.0, 1000.0, 4),
    kernel("ncclDevKernel_AllGather", 20, 4000.0, 500.0, 5),
    kernel("gemm_a", 7, 5000.0, 1000.0, 6),
    kernel("ncclDevKernel_AllGather", 20, 5500.0, 1500.0, 7),
    launch(-10.0, 1),
    launch(900.0, 3),  # before the gap began, so the kernel waited
    launch(4700.0, 6),  # 1200 into the gap, so the host was late
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9000.0},
    {"ph": "i", "cat": "kernel", "name": "an instant", "ts": 1.0},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    return path


def row(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(label)]
    return line.removeprefix(label).split()


def test_totals(trace: Path) -> None:
    text = digest_trace(trace, 2)
    assert text.startswith("2 steps, 7.00 ms from the first")
    assert row(text, "computing") == ["3.50", "1.75", "50.0%"]
    assert row(text, "NCCL  ") == ["4.00", "2.00", "57.1%"]
    # [500, 1000] and [2000, 2500] of the first, none of the second, [5500, 6000] of the third.
    assert row(text, "NCCL under computing") == ["1.50", "0.75", "21.4%"]
    assert row(text, "exposed communication") == ["2.50", "1.25", "35.7%"]
    assert row(text, "idle") == ["1.00", "0.50", "14.3%"]  # [3500, 4000] and [4500, 5000]


def test_gaps_are_sorted_and_say_what_ended_them(trace: Path) -> None:
    text = digest_trace(trace, 2)
    lines = text[text.index("3 gaps, 3.50 ms together") :].splitlines()
    # at, length, under NCCL
    assert lines[2].split()[:3] == ["3.50", "1.500", "0.500"]
    assert "(host late by 1.200) gemm_a  after add" in lines[2]
    assert lines[3].split()[:3] == ["1.00", "1.000", "1.000"]
    assert "(waited) gemm_b  after gemm_a" in lines[3]
    assert lines[4].split()[:3] == ["6.00", "1.000", "1.000"]
    assert "(end)" in lines[4]


def test_streams_and_kernels(trace: Path) -> None:
    lines = digest_trace(trace, 2).splitlines()
    streams = [line.split() for line in lines[lines.index("Streams") + 2 :][:3]]
    assert streams == [["7", "1.50", "0.00", "3"], ["8", "0.50", "0.00", "1"], ["20", "2.00", "2.00", "3"]]
    kernels = [line.split() for line in lines[lines.index("Kernels") + 2 :]]
    assert kernels[:2] == [
        ["1.00", "1.0", "1000.0", "gemm_a"],
        ["1.00", "0.5", "2000.0", "ncclDevKernel_ReduceScatter"],
    ]
    assert len(kernels) == 5


def test_kernels_that_are_not_listed_are_summed(trace: Path) -> None:
    assert digest(load_trace(trace), 2, num_kernels=2).splitlines()[-1].split() == ["2.00", "in", "3", "others"]


def test_communication_before_any_computing_is_a_gap(trace: Path) -> None:
    activities = [each for each in load_trace(trace) if each.start >= 4000.0]
    assert "(host late by 0.700)" in digest(activities, 1)
    assert "2 gaps, 2.00 ms together" in digest(activities, 1)


def test_a_trace_without_a_gpu_says_so(tmp_path: Path) -> None:
    steps = []
    path = tmp_path / "trace.json.gz"
    record_trace(lambda: steps.append(1), 2, path)
    assert len(steps) == 3  # one that is not recorded
    assert digest_trace(path, 2) == "No activity of a GPU in this trace.\n"


@pytest.mark.gpu
def test_a_real_trace_has_the_kernels_of_its_steps(tmp_path: Path) -> None:
    a = torch.randn(512, 512, device="cuda")
    path = tmp_path / "trace.json.gz"
    record_trace(lambda: torch.add(a, a), 2, path)  # one kernel, whatever a library chooses
    activities = load_trace(path)
    assert len(activities) == 2
    assert all(each.launched is not None and each.launched <= each.start for each in activities)
    assert row(digest_trace(path, 2), "exposed communication")[0] == "0.00"


def test_exchanges_of_rows_are_exposed_where_nothing_else_computes() -> None:
    def at(name: str, start: float, end: float) -> Activity:
        return Activity(name, 7, start, end, None)

    activities = [
        at("_copy_kernel", 0.0, 1000.0),
        at("_scaled_glu_kernel", 1000.0, 2000.0),
        at("_meet_kernel", 5000.0, 6000.0),
        at("gemm", 5500.0, 6000.0),
        at("_scaled_glu_backward_kernel", 6000.0, 7000.0),
        at("_copy_kernel", 8000.0, 9000.0),
        at("gemm", 8000.0, 9000.0),
    ]
    lines = [line.split() for line in digest(activities, 2).splitlines()]
    assert ["in", "forward", "0.50", "0.50", "100.0%"] in lines
    assert ["in", "backward", "1.00", "0.25", "25.0%"] in lines
    assert "Exchanges" not in digest(activities[1:2], 1)
