"""How much of a layer's exchanges is exposed in forward: alone, beside a shared expert, and in two halves of a batch.

    torchrun --nproc-per-node 2 docs/benchmarks/dispatch_layers.py

A layer is Qwen3-30B-A3B's: T tokens of width D in bf16, each to 8 of 128 experts of width F, spread over the ranks,
without gradients, as one CUDA graph. "Stay" is the same layer in one piece, a shared expert after the rest, over
a transport that moves nothing: rows have their place already. "Exchanges" are dispatch and combine alone, one after the
other, less what they take where rows stay. So

    exposed = (layer - the layer whose rows stay) / exchanges

one piece           the layer as it is
shared expert       a feed-forward of all tokens, F wide, runs while rows travel to the experts
two halves          of the tokens: the experts compute one while the other travels
"""

import statistics
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from dispatch import captured, repeated, replay
from harness import StepOptions, log, run_script, synchronize, take_turns, time_steps, versions
from ranks import Ranks
from tables import Measurement, shown, table, write_table
from torch import nn

from maingrad.te_integration import GroupedMLP, TokenDispatcher
from maingrad.te_integration.experts.dispatch.symmetric import SymmetricExchange


@dataclass(frozen=True, kw_only=True)
class LayersBench(StepOptions):
    """Sizes of the measurement."""

    num_tokens: int = 8192
    """T, tokens of a rank."""
    dim: int = 2048
    """D, the width of a token."""
    ffn_dim: int = 768
    """F, the width of an expert."""
    num_experts: int = 128
    """Experts of all ranks."""
    top_k: int = 8
    """Experts for each token."""
    capacity_factor: float = 1.25
    """Room for received rows, in rows that a rank sends."""
    timeout: float = 300.0
    """Seconds after which a rank gives up on a collective or on another rank."""


class Stay:
    """A transport that moves nothing: its rows are there already."""

    def __init__(self, bench, rows, device):
        self.ranks, self.rows = dist.get_world_size(), rows
        received = int(bench.capacity_factor * rows)
        self.received = {
            2: torch.randn(received, bench.dim, dtype=torch.bfloat16, device=device),
            1: torch.rand(received, device=device),
        }
        self.returned = torch.randn(rows, bench.dim, dtype=torch.bfloat16, device=device)

    def send(self, tensors, counts, sent=None, meanwhile=None):
        """As many rows as there are, to this rank's experts."""
        if meanwhile is not None:
            meanwhile()
        return [self.received[each.dim()] for each in tensors], counts.view(self.ranks, -1).sum(0), None

    def send_back(self, tensors, sent, meanwhile=None):
        """As many rows as were sent."""
        if meanwhile is not None:
            meanwhile()
        return [self.returned]


class Layer:
    """Experts of this rank, a shared one, and tokens."""

    def __init__(self, bench, device):
        torch.manual_seed(dist.get_rank())
        options = {"bias": False, "dtype": torch.bfloat16, "device": device}
        num_local = bench.num_experts // dist.get_world_size()
        self.experts = GroupedMLP(num_local, bench.dim, bench.ffn_dim, **options)
        self.shared = nn.Sequential(
            nn.Linear(bench.dim, bench.ffn_dim, **options), nn.SiLU(), nn.Linear(bench.ffn_dim, bench.dim, **options)
        )
        self.x = torch.randn(bench.num_tokens, bench.dim, dtype=torch.bfloat16, device=device)
        self.probs, self.ids = torch.rand(bench.num_tokens, bench.num_experts, device=device).topk(bench.top_k)
        self.tokens = self.x, self.ids, self.probs

    def in_one_piece(self, dispatcher):
        """The layer as it is."""
        *rows, sent = dispatcher.dispatch(*self.tokens)
        return dispatcher.combine(self.experts(*rows), sent)

    def beside_a_shared_expert(self, dispatcher):
        """A feed-forward of all tokens under the way to the experts."""
        *rows, sent = dispatcher.dispatch(*self.tokens, meanwhile=lambda: self.shared(self.x))
        return dispatcher.combine(self.experts(*rows), sent) + sent.meanwhile

    def after_a_shared_expert(self, dispatcher):
        """The same, one after the other."""
        return self.in_one_piece(dispatcher) + self.shared(self.x)

    def in_two_halves(self, dispatcher):
        """The experts compute a half while the other travels."""
        first, second = zip(*(each.chunk(2) for each in self.tokens), strict=True)
        out: list = []
        *rows, one = dispatcher.dispatch(*first)
        *others, two = dispatcher.dispatch(*second, meanwhile=lambda: out.append(self.experts(*rows)))
        y = dispatcher.combine(out[0], one, meanwhile=lambda: out.append(self.experts(*others)))
        return y, dispatcher.combine(out[1], two)

    def exchanges(self, dispatcher):
        """Dispatch and combine alone."""
        rows, _, _, sent = dispatcher.dispatch(*self.tokens)
        return dispatcher.combine(rows, sent)


def bench_layers(bench, ranks):
    """A measurement for each form; the slowest rank's times."""
    group = dist.group.WORLD
    assert group is not None, "ranks communicate"
    layer, rows = Layer(bench, ranks.device), bench.num_tokens * bench.top_k

    def over(transport):
        return TokenDispatcher(bench.num_experts, group, transport)

    def exchange(count):
        return SymmetricExchange(bench.num_experts, group, max_rows=count, capacity_factor=bench.capacity_factor)

    whole, half, stays = over(exchange(rows)), over(exchange(rows // 2)), over(Stay(bench, rows, ranks.device))
    calls = {
        "exchanges": partial(layer.exchanges, whole),
        "exchanges that stay": partial(layer.exchanges, stays),
        "one piece": partial(layer.in_one_piece, whole),
        "one piece, rows stay": partial(layer.in_one_piece, stays),
        "shared expert": partial(layer.beside_a_shared_expert, whole),
        "shared expert, rows stay": partial(layer.after_a_shared_expert, stays),
        "two halves": partial(layer.in_two_halves, half),
    }
    with torch.no_grad():
        graphs = {name: captured(lambda call=call: repeated(call, bench.num_steps))[0] for name, call in calls.items()}

    def one_round(name):
        synchronize(ranks.device)
        dist.barrier()
        return time_steps(lambda: replay(graphs[name]), 1, ranks.device)[0] / bench.num_steps

    for name in graphs:
        one_round(name)
    found = take_turns(bench.num_rounds, graphs, one_round)
    told = ranks.exchange({name: statistics.median(times) for name, times in found.items()})
    ms = {name: max(each[name] for each in told) for name in graphs}
    log(", ".join(f"{name} {value:.3f} ms" for name, value in ms.items()))
    exchanges = ms["exchanges"] - ms["exchanges that stay"]
    base = {"shared expert": "shared expert, rows stay"}
    return [
        Measurement(
            row=name,
            num_ranks=ranks.size,
            layer_ms=ms[name],
            stay_ms=ms[base.get(name, "one piece, rows stay")],
            exchanges_ms=exchanges,
            exposed=(ms[name] - ms[base.get(name, "one piece, rows stay")]) / exchanges,
        )
        for name in ("one piece", "shared expert", "two halves")
    ]


COLUMNS = [
    ("", "{row.row}"),
    ("layer, ms", shown("layer_ms", ".3f")),
    ("rows stay, ms", shown("stay_ms", ".3f")),
    ("exchanges, ms", shown("exchanges_ms", ".3f")),
    ("exposed", shown("exposed", ".0%")),
]


def write_report(rows, bench):
    """Write ``dispatch_layers.csv`` and ``dispatch_layers.md``; returns the Markdown."""
    return write_table(
        bench.out_dir,
        "dispatch_layers",
        rows,
        "Exchanges of a layer of experts in forward",
        f"{rows[0].num_ranks} x {versions()}. T {bench.num_tokens:,}, D {bench.dim:,}, F {bench.ffn_dim:,}, "
        f"{bench.num_experts} experts, {bench.top_k} for each token, capacity factor {bench.capacity_factor}; median "
        f"of {bench.num_rounds} rounds of {bench.num_steps} layers. Made by `torchrun --nproc-per-node N "
        f"docs/benchmarks/dispatch_layers.py`.",
        __doc__.split("\n\n", 2)[2].strip(),
        table(rows, COLUMNS),
    )


def run(bench):
    ranks = Ranks.from_env(bench.timeout)
    with ranks.attempt(with_groups=True):
        rows = bench_layers(bench, ranks)
    if ranks.rank == 0:
        log(write_report(rows, bench))


main = partial(run_script, LayersBench, run)

if __name__ == "__main__":
    sys.exit(main())
