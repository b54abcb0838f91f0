"""What ranks that compute one sample together send, as planned, against the collectives of a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_run import tiny_config
from torch import Tensor

from maingrad.launch import simulate
from maingrad.launch.config.run import Config
from maingrad.launch.parallelizing import exchanges
from maingrad.launch.plan.exchanged import exchanges_of
from maingrad.launch.training.loading import load_model
from maingrad.launch.training.runtime import current_runtime

SUMS, PARTS = "sums of tensor-parallel ranks", "parts of sequences for heads"


class Counting:
    """``torch.distributed``, which notes the bytes that two of its collectives send."""

    def __init__(self) -> None:
        self.sent: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_to_all_single(self, received: Tensor, parts: Tensor, group: dist.ProcessGroup) -> None:
        self.sent.setdefault(PARTS, []).append(parts.nbytes * (group.size() - 1) // group.size())
        dist.all_to_all_single(received, parts, group=group)

    def all_reduce(self, total: Tensor, group: dist.ProcessGroup) -> None:
        self.sent.setdefault(SUMS, []).append(2 * total.nbytes * (group.size() - 1) // group.size())
        dist.all_reduce(total, group=group)


def step(config: Config) -> None:
    """Forwards and backwards of one step."""
    runtime = current_runtime("cpu", config.mesh)
    model = load_model(config, runtime)
    rows = config.train.sequences_per_microbatch(runtime.data_ranks)
    for _ in range(config.train.num_microbatches):
        tokens = torch.zeros(rows, config.train.sequence_length // config.mesh.cp, dtype=torch.int64)
        model(tokens, tokens).backward()


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("mesh", [{}, {"cp": 2}, {"cp": 4}, {"tp": 2}, {"tp": 2, "cp": 2}])
def test_what_ranks_of_a_sample_send_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], kv_heads: int
):
    model = {"num_kv_heads": kv_heads, "fuse_wgrad_accumulation": False}
    config, counting = tiny_config(tmp_path, mesh=mesh, model=model), Counting()
    monkeypatch.setattr(exchanges, "dist", counting)
    simulate(step, 4, config)
    planned = {each.what: (4 * each.calls, 4 * each.nbytes) for each in exchanges_of(config, 4)}
    assert {what: (len(sent), sum(sent)) for what, sent in counting.sent.items()} == planned


@pytest.mark.parametrize("shared", [0, 16])
def test_what_ranks_with_other_experts_send_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: int):
    """All rows of a rank are counted, whichever expert they go to."""
    model = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 8, "moe_layer_freq": 2, "shared_expert_ffn_dim": shared}
    config, calls = tiny_config(tmp_path, mesh={"ep": 2}, model=model | {"fuse_wgrad_accumulation": False}), list[int]()

    def counted(output: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(rows.nbytes if rows.is_floating_point() else 0)
        return exchange(output, rows, *args, **kwargs)

    exchange = dist.all_to_all_single
    monkeypatch.setattr(dist, "all_to_all_single", counted)
    simulate(step, 4, config)
    (planned,) = exchanges_of(config, 4)
    assert (planned.what, planned.ranks) == ("rows to experts and back", 2)
    assert (len(calls), sum(calls) // 2) == (4 * planned.calls, 4 * planned.nbytes)
