"""Exchanges of tokens' rows between the ranks of their experts, by each transport: how long they take.

    torchrun --nproc-per-node 2 docs/benchmarks/dispatch.py

Each rank has rows [R, D] in bf16, sorted by expert. "Dispatch" brings them to the ranks of their experts, sorted by
expert and then by sender; "combine" brings as many rows back into the senders' order. Bytes are all rows of a rank,
those that stay on it too.

symmetric           ``SymmetricExchange``: kernels copy to and from other GPUs' memory; the host reads nothing
all_to_all          ``AllToAll``: NCCL, and a permutation of the received rows; the host waits for split sizes
all_to_all_vdev_2d  torch's, by NVSHMEM, which is this process's only symmetric memory then: a run of its own,
                    ``--rows all_to_all_vdev_2d``, with fewer experts, ``--num-experts 16``

Routing is uniform, or skewed: expert e of E is chosen as often as 1 / (1 + e), so the first rank gets most rows.
"""

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import RowOptions, free_memory, log, run_script, synchronize, take_turns, time_steps, versions
from ranks import Ranks
from tables import Measurement, grouped, shown, table, write_table

from maingrad.kernels.compat import private_name
from maingrad.te_integration.experts.dispatch.all_to_all import AllToAll
from maingrad.te_integration.experts.dispatch.symmetric import SymmetricExchange
from maingrad.te_integration.experts.moe_permutation import row_id_map

_symmetric_memory = private_name(
    "torch.distributed._symmetric_memory", loss="all_to_all_vdev_2d cannot be measured", fallback=None
)
MB = 10**6


@dataclass(frozen=True, kw_only=True)
class DispatchBench(RowOptions):
    """Sizes of the measurement."""

    megabytes: tuple[int, ...] = (2, 8, 32, 128)
    """MB of a rank's rows."""
    dims: tuple[int, ...] = (2048, 4096)
    """D, the width of a row."""
    num_experts: int = 128
    """Experts of all ranks."""
    top_k: int = 8
    """Experts for each token."""
    num_steps: int = 20
    """Consecutive exchanges of one round."""


class Routing(NamedTuple):
    """What a rank sends: the experts of its tokens, and these sorted."""

    ids: Any
    sorting: Any


def make_routing(bench, rows, *, skewed, seed, device):
    """Of R / k tokens."""
    generator = torch.Generator(device).manual_seed(1000 * seed + dist.get_rank())
    weights = torch.ones(bench.num_experts, device=device)
    if skewed:
        weights /= torch.arange(1, bench.num_experts + 1, device=device)
    ids = weights.expand(rows // bench.top_k, -1).multinomial(bench.top_k, generator=generator)
    return Routing(ids, row_id_map(ids, bench.num_experts))


class Symmetric:
    """``SymmetricExchange``."""

    transport: Any

    def __init__(self, bench):
        assert dist.group.WORLD is not None, "ranks communicate"
        self.transport = SymmetricExchange(bench.num_experts, dist.group.WORLD)
        self.captured = True

    def dispatch(self, rows, routing):
        """rows [R, D]."""
        (received,), splits, sent = self.transport.send([rows], routing.sorting.splits)
        return received, splits, sent

    def combine(self, rows, sent):
        """The reverse."""
        return self.transport.send_back([rows], sent)[0]


class NCCL(Symmetric):
    """``AllToAll``."""

    def __init__(self, bench):
        self.transport = AllToAll(bench.num_experts, dist.group.WORLD)
        self.captured = False


class Vdev2d:
    """torch's ``all_to_all_vdev_2d`` and its reverse, over buffers of its own."""

    def __init__(self, bench):
        self.captured = True
        assert dist.group.WORLD is not None, "ranks communicate"
        self.ranks, self.num_experts = dist.get_world_size(), bench.num_experts
        self.group = dist.group.WORLD.group_name
        self.buffers: dict = {}

    def _buffer(self, name, *shape, dtype):
        key = name, shape, dtype
        if key not in self.buffers:
            made = _symmetric_memory.empty(*shape, dtype=dtype, device=f"cuda:{torch.cuda.current_device()}")
            _symmetric_memory.rendezvous(made, self.group)
            self.buffers[key] = made
        return self.buffers[key]

    def dispatch(self, rows, routing):
        """See ``Symmetric``; rows are copied to symmetric memory first."""
        length, dim = rows.shape
        inputs = self._buffer("in", length, dim, dtype=rows.dtype)
        received = self._buffer("out", self.ranks * length, dim, dtype=rows.dtype)
        splits = self._buffer("splits", self.num_experts, dtype=torch.int64)
        found = self._buffer("found", 2, self.num_experts, dtype=torch.int64)
        inputs.copy_(rows)
        splits.copy_(routing.sorting.splits)
        torch.ops.symm_mem.all_to_all_vdev_2d(inputs, received, splits, found, self.group)
        return received, found[0].view(-1, self.ranks).sum(1), (found, length)

    def combine(self, rows, sent):
        """See ``Symmetric``."""
        found, length = sent
        outputs = self._buffer("back", length, rows.shape[1], dtype=rows.dtype)
        back = self._buffer("splits back", 2, self.num_experts, dtype=torch.int64)
        inputs = self._buffer("out", *rows.shape, dtype=rows.dtype)
        if rows.data_ptr() != inputs.data_ptr():
            inputs.copy_(rows)
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(inputs, outputs, found, back, self.group)
        return outputs.clone()


ROWS = {
    "symmetric": Symmetric,
    "all_to_all": NCCL,
    "all_to_all_vdev_2d": Vdev2d,
}


def captured(call):
    """A graph of ``call``, and what its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = call()
    return graph, outputs


def replays_equal(bench, way, rows, routings, device):
    """Whether a graph that was captured for one routing brings what ``AllToAll`` brings for another."""
    static = make_routing(bench, len(rows), skewed=False, seed=0, device=device)

    def both():
        received, splits, sent = way.dispatch(rows, static)
        return received, splits, way.combine(received, sent)

    graph, (received, splits, back) = captured(both)
    exact, equal = NCCL(bench), True
    for routing in routings:
        for into, value in zip((static.ids, *static.sorting), (routing.ids, *routing.sorting), strict=True):
            into.copy_(value)
        graph.replay()
        right, right_splits, _ = exact.dispatch(rows, routing)
        equal &= torch.equal(received[: len(right)], right) and torch.equal(splits, right_splits)
        equal &= torch.equal(back, rows)
    return equal


def measure(bench, name, way, rows, routing, device):
    """Microseconds of each direction: issued one by one, and in a graph of ``num_steps``, where it can be captured."""
    received, _, sent = way.dispatch(rows, routing)
    received = received.clone() if name != "all_to_all_vdev_2d" else received
    calls = {"dispatch": lambda: way.dispatch(rows, routing)[0], "combine": lambda: way.combine(received, sent)}
    steps = {}
    for direction, call in calls.items():
        steps[direction, "eager"] = bench.num_steps, partial(_one_of, call)
        if way.captured:
            graph, _ = captured(partial(repeated, call, bench.num_steps))
            steps[direction, "graph"] = 1, partial(replay, graph)
    for _, step in steps.values():
        for _ in range(bench.num_warmup_steps):
            step()

    def one_round(key):
        count, step = steps[key]
        synchronize(device)
        dist.barrier()
        return time_steps(step, count, device)[0] * 1e3 / (bench.num_steps // count)

    found = take_turns(bench.num_rounds, steps, one_round)
    return {f"{key[0]}_{key[1]}_us": statistics.median(times) for key, times in found.items()}


def _one_of(call):
    return call().view(-1)[:1]


def repeated(call, count):
    for _ in range(count):
        call()


def replay(graph):
    graph.replay()
    return torch.zeros(())


def bench_dispatch(bench, ranks):
    """A measurement for each size, width and routing, by each row; the slowest rank's times."""
    done = []
    for name in bench.chosen(ROWS):
        if (name == "all_to_all_vdev_2d") != (bench.rows == ("all_to_all_vdev_2d",)):
            continue
        if name == "all_to_all_vdev_2d":
            _symmetric_memory.set_backend("NVSHMEM")
        with ranks.attempt(with_groups=True):
            for dim in bench.dims:
                for megabytes in bench.megabytes:
                    for skewed in (False, True):
                        done.append(_measure_case(bench, ranks, name, megabytes, dim, skewed=skewed))
                        free_memory(ranks.device)
    return done


def _measure_case(bench, ranks, name, megabytes, dim, *, skewed):
    way = ROWS[name](bench)
    length = megabytes * MB // (2 * dim) // bench.top_k * bench.top_k
    generator = torch.Generator(ranks.device).manual_seed(dist.get_rank())
    rows = torch.randn(length, dim, device=ranks.device, generator=generator).to(torch.bfloat16)
    routing = make_routing(bench, length, skewed=skewed, seed=1, device=ranks.device)
    found = measure(bench, name, way, rows, routing, ranks.device)
    if name == "symmetric":
        others = [make_routing(bench, length, skewed=skewed, seed=seed, device=ranks.device) for seed in (2, 3)]
        found["replays_equal"] = float(replays_equal(bench, way, rows, others, ranks.device))
    told = ranks.exchange(found)
    worst = {key: (min if key == "replays_equal" else max)(each[key] for each in told) for key in found}
    row = Measurement(
        row=name, megabytes=megabytes, dim=dim, routing="skewed" if skewed else "uniform", num_ranks=ranks.size,
        **{f"{direction}_{how}_us": worst.get(f"{direction}_{how}_us", float("nan"))
           for direction in ("dispatch", "combine") for how in ("eager", "graph")},
        replays_equal=worst.get("replays_equal", float("nan")), nbytes=rows.nbytes,
    )  # fmt: skip
    log(", ".join(f"{key} {value}" if isinstance(value, str) else f"{key} {value:.5g}" for key, value in row.items()))
    return row


def _rate(direction):
    """GB/s in a graph, or issued one by one where there is none."""

    def cell(row):
        graph = row[f"{direction}_graph_us"]
        microseconds = row[f"{direction}_eager_us"] if graph != graph else graph
        return f"{row.nbytes / microseconds / 1e3:.0f}"

    return cell


COLUMNS = [
    ("MB", "{row.megabytes}"),
    ("routing", "{row.routing}"),
    ("", "{row.row}"),
    ("dispatch, GB/s", _rate("dispatch")),
    ("combine, GB/s", _rate("combine")),
    ("dispatch, us", shown("dispatch_graph_us", ".0f")),
    ("combine, us", shown("combine_graph_us", ".0f")),
    ("dispatch one by one, us", shown("dispatch_eager_us", ".0f")),
    ("combine one by one, us", shown("combine_eager_us", ".0f")),
    ("replays with another routing equal", shown("replays_equal", ".0f")),
]


def write_report(rows, bench):
    """Write ``dispatch.csv`` and ``dispatch.md``; returns the Markdown."""
    parts = [__doc__.split("\n\n", 2)[2].strip()]
    for dim, of_dim in grouped(rows, lambda row: row.dim).items():
        of_dim = sorted(of_dim, key=lambda row: (row.megabytes, row.routing != "uniform"))
        parts += [f"## D = {dim}", table(of_dim, COLUMNS)]
    return write_table(
        bench.out_dir,
        bench.stem or "dispatch",
        rows,
        "Exchanges of tokens' rows between experts",
        f"{rows[0].num_ranks} x {versions()}. {bench.num_experts} experts, {bench.top_k} for each token; median of "
        f"{bench.num_rounds} rounds of {bench.num_steps} consecutive exchanges, in one CUDA graph where a row can be "
        f"captured, and one by one. Made by `torchrun --nproc-per-node N docs/benchmarks/dispatch.py`.",
        *parts,
    )


def run(bench):
    ranks = Ranks.from_env(bench.timeout)
    rows = bench_dispatch(bench, ranks)
    if ranks.rank == 0:
        log(write_report(rows, bench))


main = partial(run_script, DispatchBench, run)

if __name__ == "__main__":
    sys.exit(main())
