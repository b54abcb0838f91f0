"""What ranks that compute one sample together send, as planned, against the collectives of a step."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny_run import tiny_config
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention

from maingrad.launch import simulate
from maingrad.launch.config.run import Config
from maingrad.launch.parallelizing import exchanges
from maingrad.launch.plan.exchanged import exchanges_of
from maingrad.launch.plan.plan import plan_run
from maingrad.launch.plan.tables import format_bytes, plan_tables
from maingrad.launch.training.loading import load_model
from maingrad.launch.training.runtime import current_runtime
from maingrad.launch.training.wrapping import Wrapped
from maingrad.te_integration.dense import products
from maingrad.te_integration.head import over_ranks

SUMS, PARTS = "sums and gathers of tensor-parallel ranks", "parts of sequences for heads"
RING = "keys and values of a ring"


class Counting:
    """``torch.distributed`` or its operators, which note the bytes that a rank sends to those of its samples."""

    def __init__(self, module: Any, sent: dict[str, list[int]]) -> None:
        self.module, self.sent = module, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def all_to_all_single(self, received: Tensor, parts: Tensor, group: dist.ProcessGroup) -> None:
        self.sent.setdefault(PARTS, []).append(parts.nbytes * (group.size() - 1) // group.size())
        assert parts.is_contiguous() and received.is_contiguous(), "as NCCL wants them"
        self.module.all_to_all_single(received, parts, group=group)

    def all_gather_single(self, x: Tensor, gather_dim: int, group: dist.ProcessGroup) -> Tensor:
        self.sent.setdefault(RING, []).append(x.nbytes * (group.size() - 1))
        gather = getattr(self.module, "all_gather_single", self.module.all_gather_tensor)
        return gather(x, gather_dim=gather_dim, group=group)

    all_gather_tensor = all_gather_single  # its name before torch 2.14

    def permute_tensor(self, x: Tensor, targets: list[int], group: dist.ProcessGroup) -> Tensor:
        self.sent.setdefault(RING, []).append(x.nbytes)
        return self.module.permute_tensor(x, targets, group)

    def all_reduce(self, x: Tensor, how: str, group: str) -> Tensor:
        self.sent.setdefault(SUMS, []).append(x.nbytes)  # of two ranks
        return self.module.all_reduce(x, how, group)

    def all_reduce_(self, x: Tensor, how: str, group: str) -> Tensor:
        self.sent.setdefault(SUMS, []).append(x.nbytes)
        return self.module.all_reduce_(x, how, group)

    def all_gather_into_tensor(self, x: Tensor, size: int, group: str) -> Tensor:
        self.sent.setdefault(SUMS, []).append(x.nbytes)
        return self.module.all_gather_into_tensor(x, size, group)

    def reduce_scatter_tensor(self, x: Tensor, how: str, size: int, group: str) -> Tensor:
        self.sent.setdefault(SUMS, []).append(x.nbytes // size)
        return self.module.reduce_scatter_tensor(x, how, size, group)


def step(config: Config) -> None:
    """Forwards and backwards of one step."""
    runtime = current_runtime("cpu", config.mesh)
    module = load_model(config, runtime)
    model = Wrapped(module, config, runtime).model if config.model.fuse_wgrad_accumulation else module
    rows = config.train.sequences_per_microbatch(runtime.data_ranks)
    for _ in range(config.train.num_microbatches):
        tokens = torch.zeros(rows, config.train.sequence_length // config.mesh.cp, dtype=torch.int64)
        with nullcontext() if model is module else model.no_sync():
            model(tokens, tokens).backward()


@pytest.mark.parametrize(
    "model",
    [
        {"num_kv_heads": 2, "fuse_wgrad_accumulation": False},
        {"num_kv_heads": 4, "fuse_wgrad_accumulation": False, "fused_loss": True},
        {"num_kv_heads": 4},
    ],
)
@pytest.mark.parametrize(
    "mesh",
    [
        {},
        {"cp": 2},
        {"cp": 4},
        {"tp": 2},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "cp": 2},
        {"cp": 4, "cp_attention": "ring"},
    ],
)
def test_what_ranks_of_a_sample_send_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], model: dict[str, Any]
):
    config, sent = tiny_config(tmp_path, mesh=mesh, model=model), {}
    monkeypatch.setattr(exchanges, "dist", Counting(dist, sent))
    operators = Counting(products.collectives, sent)
    for module in (products, over_ranks):
        monkeypatch.setattr(module, "collectives", operators)
    monkeypatch.setattr(_attention, "ft_c", Counting(_attention.ft_c, sent))
    simulate(step, 4, config)
    planned = {each.what: (4 * each.calls, 4 * each.nbytes) for each in exchanges_of(config, 4)}
    assert {what: (len(nbytes), sum(nbytes)) for what, nbytes in sent.items()} == planned


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}, {"cp": 2, "cp_attention": "ring"}, {"ep": 2}])
def test_bytes_are_those_of_the_models_dtype(tmp_path: Path, mesh: dict[str, int]):
    """But for what is fp32 in any case: numbers of the loss, gradients in a ring, probabilities of experts."""
    experts = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 8} if "ep" in mesh else {}

    def planned(dtype: str) -> Any:
        model = {"num_kv_heads": 4, "param_dtype": dtype, **experts}
        (found,) = exchanges_of(tiny_config(tmp_path, mesh=mesh, model=model), 4)
        return found

    single, half = planned("float32"), planned("bfloat16")
    assert (single.calls, single.ranks) == (half.calls, half.ranks)
    rows, layers, microbatches = (24 // 4 if mesh.get("ep") else 24 // 2) // 2 * 24, 2, 2
    in_fp32 = {
        "tp": microbatches * rows * 2 * 3 * 4 // 2,
        "cp": microbatches * layers * 2 * rows // 2 * 32 * 2 * 4 if "cp_attention" in mesh else 0,
        "ep": microbatches * layers * 2 * 2 * rows * 4 // 2,
    }[next(iter(mesh))]
    assert single.nbytes - in_fp32 == 2 * (half.nbytes - in_fp32)


def test_the_table_says_what_is_planned(tmp_path: Path):
    plan = plan_run(tiny_config(tmp_path, mesh={"tp": 2, "cp": 2}), 4)
    (table,) = [table for table in plan_tables(plan) if table.columns[1].header == "ranks"]
    assert len(plan.exchanges) == 2 and all(each.calls > 1 for each in plan.exchanges)
    rows = [(each.what, str(each.ranks), f"{each.calls:,}", format_bytes(each.nbytes)) for each in plan.exchanges]
    assert [*zip(*(column.cells for column in table.columns), strict=True)] == rows
    totals = f"{sum(each.calls for each in plan.exchanges):,}", format_bytes(sum(e.nbytes for e in plan.exchanges))
    assert tuple(column.footer for column in table.columns) == ("", "", *totals)


def test_products_gather_again_in_eager_code_that_writes_weight_gradients_alone(tmp_path: Path):
    """With sequence parallelism, in each of two products of each of two blocks, and in the head."""

    def calls(train: dict[str, Any], **model: Any) -> int:
        mesh = {"tp": 2, "sequence_parallel": True}
        dtype = {"param_dtype": "bfloat16"}
        (found,) = exchanges_of(tiny_config(tmp_path, mesh=mesh, model=dtype | model, train=train), 2)
        return found.calls

    autograd = calls({}, fuse_wgrad_accumulation=False)
    assert calls({}) - autograd == 2 * (4 + 1)
    assert calls({}, fuse_wgrad_accumulation=False, delay_wgrad_layers=1) - autograd == 2 * (4 + 1)
    fused_loss = calls({}, fused_loss=True, fuse_wgrad_accumulation=False)
    assert fused_loss - autograd == 2 * 2, "numbers of the loss are exchanged in backward again"
    assert calls({}, fused_loss=True) - fused_loss == 2 * 4
    for tokens, chunks in ((2048, 1), (4096, 2), (4608, 3)):
        large = {"sequence_length": 32, "global_batch_size": 2 * tokens // 32}
        beside = calls(large, fuse_wgrad_accumulation=False)
        assert calls(large, fused_loss=True, fuse_wgrad_accumulation=False) - beside == 2 * (4 * chunks - 2)
    assert calls({"compile": True}) - autograd == calls({"recipe": "float8_current"}) - autograd == 2


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


@pytest.mark.parametrize("halves", [False, True])
def test_stages_are_planned_by_the_one_with_the_most_blocks(tmp_path: Path, halves: bool):
    """Two of three blocks. What travels between stages is a part of each sequence where ranks have parts."""
    sizes, train = {"num_layers": 3, "num_kv_heads": 4, "fuse_wgrad_accumulation": False}, {"global_batch_size": 16}
    mesh = {"pp": 2, "tp": 2, "sequence_parallel": halves}
    found = {each.what: each for each in exchanges_of(tiny_config(tmp_path, mesh=mesh, model=sizes, train=train), 4)}
    tokens = 8 * 24
    sums, stages = found[SUMS], found["activations to the next stage, gradients back"]
    of_blocks = (4 * 2 + 2) * (2 if halves else 1)
    assert (sums.ranks, sums.calls) == (2, 2 * (of_blocks + 2))
    assert sums.nbytes == 2 * (tokens * (2 * (4 * 2 + 2) * 32 * 4 + 2 * 3 * 4)) // 2
    assert (stages.ranks, stages.calls, stages.nbytes) == (2, 4, 4 * tokens * 32 * 4 // (2 if halves else 1))
    mesh = {"pp": 2, "cp": 2}
    found = {each.what: each for each in exchanges_of(tiny_config(tmp_path, mesh=mesh, model=sizes, train=train), 4)}
    assert found[PARTS].calls == 8 * 2 * 2, "of two blocks and two microbatches"
    assert found[PARTS].nbytes == 2 * 2 * (2 * (4 + 4) * 2 * tokens // 2 * 8 * 4) // 2
