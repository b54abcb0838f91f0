"""``maingrad plan``: the same numbers as the wrapper's own, without a process group and without memory."""

from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from tiny_run import tiny_config

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer
from maingrad.launch import simulate
from maingrad.launch.config import ConfigError
from maingrad.launch.model import build_model
from maingrad.launch.plan import format_bytes, plan_run, plan_tables


def printed(config_folder: Path, ranks: int) -> str:
    console = Console(width=120, record=True, file=StringIO())
    plan = plan_run(tiny_config(config_folder, train={"global_batch_size": 2 * ranks}), ranks)
    for table in plan_tables(plan):
        console.print(table)
    return console.export_text()


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_plan_is_what_training_allocates(tmp_path: Path, param_dtype: str, sharded: bool):
    config = tiny_config(tmp_path, model={"param_dtype": param_dtype}, ddp={"use_distributed_optimizer": sharded})
    plan = plan_run(config, 3)

    def allocate() -> tuple[str, int, int, int]:
        model = DistributedDataParallel(build_model(config.model, seed=0), config.ddp)
        optimizer = DistributedOptimizer(model)
        gradients = sum(bucket.grad_data.nbytes for bucket in model.buckets)
        masters = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        return model.plan.fingerprint, gradients, masters, sum(storages.values())

    fingerprint, gradients, masters, parameters = simulate(allocate, 3)[1]
    assert plan.gradients.fingerprint == fingerprint
    assert plan.rank_bytes.gradients == gradients
    assert plan.rank_bytes.parameters == parameters
    assert plan.rank_bytes.moments == 2 * masters
    # Under fp32 parameters the master is the parameter itself.
    assert plan.rank_bytes.masters == (masters if param_dtype == "bfloat16" else 0)


def test_a_thousand_ranks_without_a_process_group(tmp_path: Path):
    text = printed(tmp_path, 1024)
    assert not dist.is_initialized()
    assert "reduce-scatter over 1024 ranks" in text
    assert "bytes on each of 1024 ranks" in text
    assert "│ head.weight" in text
    for row in ("parameters", "gradients", "optimizer: masters", "optimizer: moments", "total"):
        assert row in text


def test_every_bucket_has_a_row_and_sums_are_right(tmp_path: Path):
    config = tiny_config(tmp_path)
    plan = plan_run(config, 2)
    rows = [line.split("│") for line in printed(tmp_path, 2).splitlines() if line.startswith("│")]
    buckets = [row for row in rows if row[1].strip().isdigit()]
    assert [int(row[1]) for row in buckets] == list(range(len(plan.gradients.buckets)))
    elements = [int(row[3].replace(",", "")) for row in buckets]
    padding = [int(row[4].replace(",", "")) for row in buckets]
    assert sum(elements) - sum(padding) == plan.num_parameters
    assert plan.num_parameters == sum(p.numel() for p in build_model(config.model, seed=0).parameters())


def test_tied_weights_are_counted_once(tmp_path: Path):
    untied, tied = (plan_run(tiny_config(tmp_path, model={"tie_embeddings": tie}), 2) for tie in (False, True))
    assert untied.num_parameters - tied.num_parameters == 256 * 32


def test_experts_have_a_table_of_their_own(tmp_path: Path):
    model = {"num_experts": 8, "top_k": 2, "expert_ffn_dim": 16, "shared_expert_ffn_dim": 24, "moe_layer_freq": 2}
    config = tiny_config(tmp_path, model=model | {"param_dtype": "bfloat16"})
    console = Console(width=120, record=True, file=StringIO())
    for table in plan_tables(plan_run(config, 2)):
        console.print(table)
    text = console.export_text()
    rows = {
        row[1].strip(): [cell.strip() for cell in row[2:4]] for row in map(cells, text.splitlines()) if len(row) == 5
    }
    expert = 3 * 32 * 16
    assert "8 experts in 1 of 2 blocks, 2 for each token" in text
    assert rows["experts, 16 wide"] == [f"{8 * expert:,}", f"{2 * expert:,}"]
    assert rows["shared expert, 24 wide"] == [f"{3 * 32 * 24:,}"] * 2
    assert rows["routers, float32"] == [f"{8 * 32:,}"] * 2
    assert int(rows["total"][0].replace(",", "")) == plan_run(config, 2).num_parameters
    assert "bfloat16, float32" in text, "parameters of both dtypes"


def cells(line: str) -> list[str]:
    return line.split("│")


def test_large_models_cost_nothing_to_plan(tmp_path: Path):
    size = {"dim": 8192, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8, "ffn_dim": 28672, "vocab_size": 128256}
    config = tiny_config(tmp_path, model=size | {"param_dtype": "bfloat16"}, train={"global_batch_size": 2048})
    plan = plan_run(config, 1024)
    assert 69e9 < plan.num_parameters < 72e9
    assert plan.rank_bytes.moments < 1024**3 < plan.rank_bytes.gradients
    assert not torch.cuda.is_initialized()


def test_batch_that_does_not_divide(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"num_microbatches \* ranks = 2 \* 7 = 14"):
        plan_run(tiny_config(tmp_path), 7)


@pytest.mark.parametrize(
    "count, text", [(512, "512 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB"), (5 * 2**40, "5.0 TiB")]
)
def test_format_bytes(count: int, text: str):
    assert format_bytes(count) == text
