"""``maingrad plan`` of fully sharded runs gives the units' own numbers without a process group and memory."""

import dataclasses
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from sharded_training import nbytes_of_sums
from tiny_run import tiny_config

from maingrad.ddp.plan.layout import BucketLayout
from maingrad.fsdp.module import root_of
from maingrad.launch import simulate
from maingrad.launch.config.run import Config
from maingrad.launch.plan.plan import plan_run
from maingrad.launch.plan.rank_bytes import PlacedBucket
from maingrad.launch.plan.tables import format_bytes, plan_tables
from maingrad.launch.training.loading import load_model
from maingrad.launch.training.runtime import current_runtime
from maingrad.launch.training.wrapping import Wrapped
from maingrad.te_integration.wgrad_queue import drain_modules


class Held(NamedTuple):
    """What one rank holds after two steps, counted from its tensors, and what the second step sent."""

    layouts: list[tuple[str, list[BucketLayout]]]
    parameters: int
    gradients: int
    masters: int
    moments: int
    peak_params: int
    peak_grads: int
    gathers: Counter[str]
    reductions: Counter[str]


def train_two_steps(config: Config) -> Held:
    runtime = current_runtime("cpu", config.mesh)
    wrapped = Wrapped(load_model(config, runtime), config, runtime)
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        with wrapped.model.record_timeline() as timeline:
            for _ in range(config.train.num_microbatches - 1):
                with wrapped.model.no_sync():
                    _forward_and_backward(wrapped, tokens)
            _forward_and_backward(wrapped, tokens)
        wrapped.model.finish_grad_sync()
        wrapped.step()
        wrapped.optimizer.zero_grad()
    root = root_of(wrapped.model)
    state = [(key, value) for held in wrapped.optimizer.state.values() for key, value in held.items() if key != "step"]
    instances = [bucket._instance for bucket in root.buckets if bucket._instance is not None]
    return Held(
        [(unit.name, [bucket.layout for bucket in unit.buckets]) for unit in root.units],
        root.gathers.meter.held_nbytes + sum(instance.nbytes for instance in instances),
        root.grads.meter.held_nbytes + sum(nbytes_of_sums(bucket.grad_shard) for bucket in root.buckets),
        sum(bucket.shard.nbytes for bucket in root.buckets)
        + sum(value.nbytes for key, value in state if key == "remainder"),
        sum(value.nbytes for key, value in state if key != "remainder"),
        root.gathers.meter.peak_nbytes,
        root.grads.meter.peak_nbytes,
        Counter(span.bucket for span in timeline.gathers),
        Counter(span.bucket.partition("(")[2].rstrip(")") for span in timeline.buckets),
    )


def _forward_and_backward(wrapped: Wrapped, tokens: torch.Tensor) -> None:
    wrapped.model(tokens, tokens).backward()
    drain_modules(wrapped.model)


EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 16}
CASES = [
    ("fsdp", {}, {"num_layers": 4}, 3),
    ("fsdp", {"placements": "zero2"}, {"delay_wgrad_layers": 1}, 2),
    ("hsdp", {"placements": "hsdp_zero1"}, {"param_dtype": "float32"}, 4),
    ("fsdp", {"shard_atoms": "row"}, {}, 2),
    ("fsdp", {}, {"tp": 2}, 4),
    ("fsdp", {}, EXPERTS | {"ep": 2}, 4),
    ("hsdp", {}, EXPERTS | {"ep": 2}, 4),
    ("fsdp", {"reduce_every_microbatch": False, "bucket_size": 4000}, {"num_layers": 4}, 2),
    pytest.param("fsdp", {"placements": "zero1", "bucket_size": 4000}, {}, 2, marks=pytest.mark.slow),
    pytest.param("hsdp", {"reduce_every_microbatch": False}, {"delay_wgrad_layers": 1}, 4, marks=pytest.mark.slow),
    pytest.param("fsdp", {"reshard_after_forward": False}, {"tie_embeddings": True}, 2, marks=pytest.mark.slow),
    pytest.param("hsdp", {}, {"num_layers": 3}, 6, marks=pytest.mark.slow),
    pytest.param("fsdp", {"grad_dtype": "bfloat16"}, {"num_layers": 1}, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("parallel, fsdp, model, ranks", CASES)
@pytest.mark.sampled(1)
def test_plan_is_what_training_holds_and_sends(
    tmp_path: Path, parallel: str, fsdp: dict[str, Any], model: dict[str, Any], ranks: int
):
    mesh = {key: value for key, value in model.items() if key in ("tp", "ep")}
    model = {"param_dtype": "bfloat16"} | {key: value for key, value in model.items() if key not in mesh}
    config = tiny_config(tmp_path, parallel=parallel, fsdp=fsdp, model=model, mesh=mesh)
    plan = plan_run(config, ranks)
    held = simulate(train_two_steps, ranks, config)
    assert held[0].layouts == [(unit.name, [bucket.layout for bucket in unit.buckets]) for unit in plan.units]
    assert {rank.parameters for rank in held} == {plan.rank_bytes.parameters}
    assert {rank.gradients for rank in held} == {plan.rank_bytes.gradients}
    assert {rank.masters for rank in held} == {plan.rank_bytes.masters}
    assert max(rank.moments for rank in held) == plan.rank_bytes.moments
    assert max(rank.peak_params for rank in held) <= plan.peak_params
    assert max(rank.peak_grads for rank in held) <= plan.peak_grads
    gathers = Counter(held[0].gathers.values())
    assert gathers == Counter(u.gathers_in_forward + u.gathers_in_backward for u in plan.units for _ in u.buckets)
    assert Counter(held[0].reductions.values()) == Counter(count for unit in plan.units for count in unit.reductions)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "parallel, fsdp, model, ranks",
    [
        ("fsdp", {}, {}, 3),
        ("fsdp", {"placements": "zero2", "grad_dtype": "bfloat16"}, {}, 2),
        ("hsdp", {"placements": "hsdp_zero1"}, {}, 4),
        ("fsdp", {}, {"param_dtype": "float32"}, 2),
    ],
)
@pytest.mark.parametrize("moments", ["bfloat16", "uint8"])
@pytest.mark.sampled(4)
def test_plan_of_compact_state_is_what_training_holds(
    tmp_path: Path, parallel: str, fsdp: dict[str, Any], model: dict[str, Any], ranks: int, moments: str
):
    model, optimizer = {"param_dtype": "bfloat16"} | model, {"state": "compact", "moment_dtype": moments}
    config = tiny_config(tmp_path, parallel=parallel, fsdp=fsdp, model=model, optimizer=optimizer)
    planned, held = plan_run(config, ranks).rank_bytes, simulate(train_two_steps, ranks, config)
    assert {(rank.parameters, rank.gradients) for rank in held} == {planned[:2]}
    assert planned[2:] == max(((rank.masters, rank.moments) for rank in held), key=sum)


@pytest.mark.parametrize(
    "parallel, placements, whole, grads, shards",
    [
        ("fsdp", "zero1", 2.0, 4 + 4 / 8, 1 / 8),
        ("fsdp", "zero2", 2.0, 4 / 8, 1 / 8),
        ("fsdp", "zero3", 0.0, 4 / 8, 1 / 8),
        ("hsdp", "zero3", 0.0, 8 / 4, 1 / 4),
        ("hsdp", "hsdp_zero1", 2 / 4, 4 / 4 + 4 / 8, 1 / 8),
    ],
)
def test_the_formulas_of_the_docs(
    tmp_path: Path, parallel: str, placements: str, whole: float, grads: float, shards: float
):
    """docs/reference/full_sharding.md: bytes at rest as multiples of N on 8 ranks, in two instances if several."""
    model = {"param_dtype": "bfloat16", "dim": 128, "num_kv_heads": 4, "ffn_dim": 128, "num_layers": 3}
    config = tiny_config(
        tmp_path, parallel=parallel, model=model, fsdp={"placements": placements}, train={"global_batch_size": 32}
    )
    plan = plan_run(config, 8)
    num_elements = plan.parameters.total
    assert sum(bucket.layout.numel for bucket in plan.buckets) == num_elements, "nothing is padded here"
    held = plan.rank_bytes
    assert held == (whole * num_elements, grads * num_elements, 4 * shards * num_elements, 8 * shards * num_elements)
    total = {"zero1": 6 + 16 / 8, "zero2": 2 + 16 / 8, "zero3": 16 / 8, "hsdp_zero1": 6 / 4 + 16 / 8}
    of_state = dataclasses.replace(config.optimizer, state="compact")
    compact = plan_run(dataclasses.replace(config, optimizer=of_state), 8).rank_bytes
    assert compact == (whole * num_elements, grads * num_elements, 4 * shards * num_elements, 4 * shards * num_elements)
    assert held.total == num_elements * (20 / 4 if (parallel, placements) == ("hsdp", "zero3") else total[placements])


@pytest.mark.parametrize(
    ("parallel", "mesh", "inside", "of_experts"),
    [("fsdp", {"ep": 2}, 8, 4), ("hsdp", {"ep": 2}, 4, 2), ("fsdp", {}, 8, None), ("hsdp", {"cp": 2}, 4, None)],
)
def test_over_how_many_ranks_a_unit_is_sharded(
    tmp_path: Path, parallel: str, mesh: dict[str, int], inside: int, of_experts: int | None
):
    """Experts over those that hold the same; and gradients are sent in the dtype that is asked for."""
    fsdp, batch = {"reduce_dtype": "bfloat16"}, {"global_batch_size": 16}
    config = tiny_config(tmp_path, parallel=parallel, fsdp=fsdp, mesh=mesh, model=EXPERTS, train=batch)
    plan = plan_run(config, 8)
    experts = {unit.name for unit in plan.units if unit.name.endswith("ffn.experts")}
    assert len(experts) == (0 if of_experts is None else 4)
    for unit in plan.units:
        size = of_experts if unit.name in experts else inside
        for bucket in unit.buckets:
            assert (bucket.inner_size, bucket.outer_size) == (size, 8 // inside)
            assert bucket.layout.shard_degree == size and bucket.wire_dtype is torch.bfloat16
    cut = plan_run(tiny_config(tmp_path, parallel=parallel, mesh={"tp": 2}, train=batch), 8)
    assert {bucket.inner_size for bucket in cut.buckets} == {inside // 2} == {cut.inner_size}


@pytest.mark.in_turn
def test_units_of_four_blocks_fill_the_peaks(tmp_path: Path):
    """The planned peaks are reached, so they are no larger than needed."""
    config = tiny_config(tmp_path, parallel="fsdp", model={"num_layers": 4})
    plan, held = plan_run(config, 2), simulate(train_two_steps, 2, config)[0]
    outermost, block = plan.units[:2]
    assert held.peak_params == plan.peak_params
    assert held.peak_grads == plan.peak_grads
    assert plan.peak_params == outermost.param_nbytes + 2 * block.param_nbytes
    assert plan.peak_grads == outermost.grad_nbytes + 2 * block.grad_nbytes


def test_a_model_of_one_block_takes_no_more_than_all_of_it(tmp_path: Path):
    plan = plan_run(tiny_config(tmp_path, parallel="fsdp", model={"num_layers": 1}), 2)
    assert plan.peak_params == sum(unit.param_nbytes for unit in plan.units)
    assert plan.peak_grads == sum(unit.grad_nbytes for unit in plan.units)


@pytest.mark.parametrize(
    ("fsdp", "microbatches", "keeps_params", "keeps_grads"),
    [
        ({}, 2, False, False),
        ({"reshard_after_forward": False}, 2, True, False),
        ({"placements": "zero2"}, 2, True, False),
        ({"placements": "zero1"}, 1, True, True),
        ({"reduce_every_microbatch": False}, 2, False, True),
        ({"reduce_every_microbatch": False}, 1, False, False),
    ],
)
def test_peaks_are_the_whole_model_where_it_is_kept(
    tmp_path: Path, fsdp: dict[str, Any], microbatches: int, keeps_params: bool, keeps_grads: bool
):
    model, train = {"num_layers": 4, "param_dtype": "bfloat16"}, {"num_microbatches": microbatches}
    plan = plan_run(tiny_config(tmp_path, parallel="fsdp", fsdp=fsdp, model=model, train=train), 2)
    outermost, *blocks = plan.units
    block = blocks[0]
    assert [unit.param_nbytes for unit in blocks] == [block.param_nbytes] * 4
    assert plan.peak_params == outermost.param_nbytes + (4 if keeps_params else 2) * block.param_nbytes
    assert plan.peak_grads == outermost.grad_nbytes + (4 if keeps_grads else 2) * block.grad_nbytes


@pytest.mark.parametrize(
    ("fsdp", "forward", "backward", "reductions"),
    [
        ({}, [1, 1, 3, 3], [0, 3, 3, 0], 3),
        ({"reshard_after_forward": False}, [1, 1, 3, 3], [0, 0, 0, 0], 3),
        ({"placements": "zero2"}, [1, 1, 1, 1], [0, 0, 0, 0], 3),
        ({"placements": "zero1"}, [1, 1, 1, 1], [0, 0, 0, 0], 1),
        ({"reduce_every_microbatch": False}, [1, 1, 3, 3], [0, 3, 3, 0], 1),
    ],
)
def test_gathers_and_reductions_of_three_microbatches(
    tmp_path: Path, fsdp: dict[str, Any], forward: list[int], backward: list[int], reductions: int
):
    """The first unit stays from microbatch to microbatch, the last one from forward to backward, the outermost both."""
    model, train = {"num_layers": 3, "delay_wgrad_layers": 1}, {"num_microbatches": 3}
    plan = plan_run(tiny_config(tmp_path, parallel="fsdp", fsdp=fsdp, model=model, train=train), 2)
    assert [unit.gathers_in_forward for unit in plan.units] == forward
    assert [unit.gathers_in_backward for unit in plan.units] == backward
    for unit in plan.units:
        counts = [1 if bucket.layout.delayed else reductions for bucket in unit.buckets]
        assert list(unit.reductions) == counts
        sent = [bucket.traffic for bucket in unit.buckets]
        gathers = unit.gathers_in_forward + unit.gathers_in_backward
        assert unit.traffic.gather == gathers * sum(each.gather for each in sent) > 0
        once = zip(counts, sent, strict=True)
        assert unit.traffic.reduce_inside == sum(count * each.reduce_inside for count, each in once) > 0
    assert any(bucket.layout.delayed for unit in plan.units for bucket in unit.buckets)


HELD = {"reduce_every_microbatch": False}
EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 16, "param_dtype": "bfloat16", "num_layers": 4}


@pytest.mark.parametrize(
    "fsdp, model, num_microbatches",
    [
        ({"bucket_size": 4000}, {"num_layers": 4}, 2),
        ({"bucket_size": 1}, {"num_layers": 3, "ffn_dim": 200}, 3),
        ({"bucket_size": 2000, "placements": "zero2"}, {"num_layers": 3, "delay_wgrad_layers": 1}, 4),
        (HELD | {"bucket_size": 2000}, {"num_layers": 4, "vocab_size": 2000}, 1),
        (HELD | {"bucket_size": 2000}, {"num_layers": 4}, 2),
        ({"bucket_size": 2000}, {"num_layers": 3, "tie_embeddings": True, "vocab_size": 2000}, 2),
        ({"bucket_size": 8000}, EXPERTS | {"shared_expert_ffn_dim": 24}, 2),
        pytest.param({"bucket_size": 500}, {"num_layers": 5, "vocab_size": 2000}, 4, marks=pytest.mark.slow),
        pytest.param({"bucket_size": 1000}, {"num_layers": 3, "delay_wgrad_layers": 3}, 2, marks=pytest.mark.slow),
        pytest.param({"bucket_size": 4000}, EXPERTS | {"moe_layer_freq": 2}, 3, marks=pytest.mark.slow),
        pytest.param({}, EXPERTS | {"router_dtype": "bfloat16"}, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_the_planned_peak_of_gradients_bounds_what_a_run_s_meter_shows(
    tmp_path: Path, fsdp: dict[str, Any], model: dict[str, Any], num_microbatches: int
):
    train = {"num_microbatches": num_microbatches}
    config = tiny_config(tmp_path, parallel="fsdp", fsdp=fsdp, model={"param_dtype": "bfloat16"} | model, train=train)
    plan = plan_run(config, 1)
    held = simulate(train_two_steps, 1, config)[0]
    assert held.peak_grads <= plan.peak_grads <= 1.2 * held.peak_grads
    assert held.peak_params <= plan.peak_params
    whole = sum(unit.grad_nbytes for unit in plan.units)
    keeps = config.fsdp.reduces_once or config.model.delay_wgrad_layers == config.model.num_layers
    assert (plan.peak_grads == whole) is (keeps and num_microbatches > 1)


@pytest.mark.parametrize(
    "bucket_size, single_grouped_weight",
    [(500, True), pytest.param(2000, True, marks=pytest.mark.slow), pytest.param(500, False, marks=pytest.mark.slow)],
)
def test_weights_of_one_module_in_several_buckets_are_bounded(
    tmp_path: Path, bucket_size: int, single_grouped_weight: bool
):
    """Every second block has experts."""
    model = EXPERTS | {"moe_layer_freq": 2, "single_grouped_weight": single_grouped_weight}
    config = tiny_config(tmp_path, parallel="fsdp", fsdp={"bucket_size": bucket_size}, model=model)
    plan, held = plan_run(config, 1), simulate(train_two_steps, 1, config)[0]
    assert held.peak_params <= plan.peak_params
    assert held.peak_grads <= plan.peak_grads <= 1.1 * held.peak_grads


def test_large_models_cost_nothing_to_plan(tmp_path: Path):
    """9 billion parameters on 1,024 ranks: a tenth of the layers of 70 billion."""
    size = {"dim": 8192, "num_layers": 8, "num_heads": 64, "num_kv_heads": 8, "ffn_dim": 28672, "vocab_size": 128256}
    config = tiny_config(
        tmp_path, parallel="fsdp", model=size | {"param_dtype": "bfloat16"}, train={"global_batch_size": 2048}
    )
    plan = plan_run(config, 1024)
    assert 8.9e9 < plan.parameters.total < 9e9
    assert sum(bucket.layout.padding for bucket in plan.buckets) < 0.001 * plan.parameters.total
    assert plan.rank_bytes.total == pytest.approx(16 * plan.parameters.total / 1024, rel=1e-3)
    assert plan.peak_params == plan.units[0].param_nbytes + 2 * plan.units[1].param_nbytes


@pytest.mark.in_turn
def test_buckets_halve_what_is_reduced_beside_a_unit(tmp_path: Path):
    """An 8B model: each block has six buckets; the embedding's gradient is written after the last block's."""
    size = {"dim": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "ffn_dim": 14336, "vocab_size": 128256}
    config = tiny_config(tmp_path, parallel="fsdp", model=size | {"param_dtype": "bfloat16"})
    plan = plan_run(config, 4)
    outermost, block = plan.units[:2]
    head, embedding = (bucket.grad_nbytes for bucket in outermost.buckets)
    assert len(block.buckets) > 2
    assert head + block.grad_nbytes < plan.peak_grads <= head + embedding + 1.6 * block.grad_nbytes
    one = plan_run(tiny_config(tmp_path, parallel="fsdp", model=size, fsdp={"bucket_size": 10**9}), 4)
    assert len(one.units[1].buckets) == 1
    assert one.peak_grads == head + embedding + 2 * block.grad_nbytes


@pytest.mark.in_turn
def test_a_router_of_another_dtype_is_a_unit_of_its_own(tmp_path: Path):
    experts = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 16, "param_dtype": "bfloat16"}
    plan = plan_run(tiny_config(tmp_path, parallel="fsdp", model=experts), 2)
    names = ["blocks.0", "blocks.0.ffn.router", "blocks.1", "blocks.1.ffn.router"]
    assert [unit.name for unit in plan.units] == ["", *names]
    dtypes = {bucket.layout.slots[0].spec.param_dtype for bucket in plan.buckets}
    assert dtypes == {torch.bfloat16, torch.float32}
    held = simulate(train_two_steps, 2, tiny_config(tmp_path, parallel="fsdp", model=experts | {"num_layers": 4}))[0]
    four = plan_run(tiny_config(tmp_path, parallel="fsdp", model=experts | {"num_layers": 4}), 2)
    assert (held.gradients, held.masters) == (four.rank_bytes.gradients, four.rank_bytes.masters)
    assert held.peak_params <= four.peak_params
    assert held.peak_grads <= four.peak_grads
    same = plan_run(tiny_config(tmp_path, parallel="fsdp", model=experts | {"router_dtype": "bfloat16"}), 2)
    assert [unit.name for unit in same.units] == ["", "blocks.0", "blocks.1"]


def test_experts_are_over_the_ranks_that_hold_the_same(tmp_path: Path):
    experts = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 16}
    for parallel, dense, expert in (("fsdp", 8, 4), ("hsdp", 4, 2)):
        config = tiny_config(
            tmp_path, parallel=parallel, model=experts, mesh={"ep": 2}, train={"global_batch_size": 16}
        )
        plan = plan_run(config, 8)
        for unit in plan.units:
            over = expert if unit.name.endswith(".experts") else dense
            for bucket in unit.buckets:
                assert (bucket.inner_size, bucket.layout.shard_degree) == (over, over), unit.name
                assert bucket.traffic.gather == bucket.param_nbytes * (over - 1) // over
    dense, sharing = (
        plan_run(tiny_config(tmp_path, parallel="fsdp", model=experts, mesh={"ep": ep}), 2) for ep in (1, 2)
    )
    assert dense.parameters == sharing.parameters
    sizes = [
        sum(slot.spec.numel for unit in plan.units for b in unit.buckets for slot in b.layout.slots)
        for plan in (dense, sharing)
    ]
    assert sizes[0] - sizes[1] == dense.parameters.experts // 2


def test_layouts_follow_the_settings_of_units(tmp_path: Path):
    def buckets(**fsdp: Any) -> list[PlacedBucket]:
        return plan_run(tiny_config(tmp_path, parallel="fsdp", fsdp=fsdp), 4).buckets

    for bucket in buckets(shard_atoms="whole"):
        size = bucket.layout.numel // 4
        for slot in bucket.layout.slots:
            first, last = slot.start - bucket.layout.start, slot.end - bucket.layout.start - 1
            assert first // size == last // size, "a border cuts it"
    assert {bucket.wire_dtype for bucket in buckets()} == {None}
    assert {bucket.wire_dtype for bucket in buckets(reduce_dtype="float16")} == {torch.float16}
    assert {bucket.grad_dtype for bucket in buckets(grad_dtype="float32")} == {torch.float32}


def test_more_is_sharded_from_kind_to_kind(tmp_path: Path):
    fsdp, hsdp, zero1 = (
        plan_run(tiny_config(tmp_path, parallel=name), 4).rank_bytes for name in ("fsdp", "hsdp", "zero1")
    )
    assert fsdp.total < hsdp.total < zero1.total


def test_what_is_printed(tmp_path: Path):
    console = Console(width=120, record=True, file=StringIO())
    across = {"placements": "hsdp_zero1"}
    plan = plan_run(tiny_config(tmp_path, parallel="hsdp", fsdp=across, train={"global_batch_size": 2048}), 1024)
    for table in plan_tables(plan):
        console.print(table)
    text = console.export_text()
    assert 'parallel = "hsdp" on 1024 ranks' in text
    assert "3 units in the order of a forward, 3 buckets" in text
    assert "(the model)" in text
    assert "blocks.1" in text
    assert "reduce-scatter" in text
    assert "over 2 instances" in text
    assert "gathered, at most" in text
    placements, _, collectives, _ = plan_tables(plan)
    assert [list(column.cells) for column in placements.columns[1:]] == [
        [kind.value for kind in axis] for axis in plan.placements
    ]
    headings = {str(column.header) for column in collectives.columns}
    assert {"reduce-scatter\nover 2 instances", "all-gather\nover 2 instances"} <= headings
    assert "host" not in text and "stage" not in text
    assert "for each bucket" not in text
    held = {"bucket_size": 4000, "reduce_every_microbatch": False}
    titles = [str(table.title) for table in plan_tables(plan_run(tiny_config(tmp_path, parallel="fsdp", fsdp=held), 2))]
    assert "3 units in the order of a forward, 6 buckets" in titles
    assert "bytes that each rank sends in a step of 2 microbatch(es); collectives are counted for each bucket" in titles
    delays = {"model": {"delay_wgrad_layers": 1, "param_dtype": "bfloat16"}, "train": {"num_microbatches": 3}}
    plan = plan_run(tiny_config(tmp_path, parallel="fsdp", **delays), 2)
    *_, collectives, at_rest = plan_tables(plan)
    peaks = format_bytes(plan.peak_params), format_bytes(plan.peak_grads)
    assert at_rest.caption == "gathered, at most: {}; unreduced, at most: {}".format(*peaks) and peaks[0] != peaks[1]
    reductions = next(column for column in collectives.columns if column.header == "reductions")
    assert list(reductions.cells) == ["1, 3", "3", "1, 3"]
    offloaded = tiny_config(tmp_path, parallel="fsdp", fsdp={"offload_to_cpu": True})
    titles = [str(table.title) for table in plan_tables(plan_run(offloaded, 2))]
    assert titles[-1].endswith("masters, moments and a copy of gradient shards are in host memory")
