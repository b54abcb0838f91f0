"""``maingrad plan`` gives the wrapper's own numbers without a process group and without memory."""

from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from tiny_run import tiny_config

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.ddp.buckets.released import ReleasedBucket
from maingrad.ddp.collectives.rank_grid import make_grid
from maingrad.ddp.collectives.reduction import PLACEMENTS, Placements, placements_of
from maingrad.ddp.plan.layout import BucketLayout, ParamSpec, plan_gradients
from maingrad.ddp.torch_grads.muon import update_flops
from maingrad.launch import simulate
from maingrad.launch.config.run import Config, ConfigError
from maingrad.launch.model.gpt import GPT, build_model
from maingrad.launch.parallelizing.experts import same_place
from maingrad.launch.parallelizing.muon import with_whole_matrices
from maingrad.launch.plan.plan import plan_run
from maingrad.launch.plan.rank_bytes import PlacedBucket, rank_bytes
from maingrad.launch.plan.tables import format_bytes, plan_tables
from maingrad.launch.training.loading import load_model
from maingrad.launch.training.runtime import current_runtime
from maingrad.launch.training.wrapping import Wrapped


def printed(config_folder: Path, ranks: int, **sections: Any) -> str:
    console = Console(width=120, record=True, file=StringIO())
    plan = plan_run(tiny_config(config_folder, train={"global_batch_size": 2 * ranks}, **sections), ranks)
    for table in plan_tables(plan):
        console.print(table)
    return console.export_text()


class Allocated(NamedTuple):
    """What one rank holds after a step, counted from its tensors."""

    layouts: list[BucketLayout]
    parameters: int
    gradients: int
    masters: int
    moments: int
    gathered: list[str]
    """Buckets in the order of their gathers."""
    sent: list[tuple[str, str, int]]
    """(bucket, collective, bytes) of each reduction."""


def allocate(config: Config) -> Allocated:
    settings, is_compact = config.optimizer, config.optimizer.state == "compact"
    runtime = current_runtime("cpu", config.mesh)
    module = load_model(config, runtime)
    assert isinstance(module, GPT)
    muon = settings.muon_of(module)
    options: dict[str, Any] = {"process_group": runtime.loss_group}
    if runtime.expert_mesh is not None:
        options["expert_process_group"] = same_place(runtime.expert_mesh, make_grid(None))
    model = DistributedDataParallel(module, with_whole_matrices(config.ddp, muon), **options)
    dtype = getattr(torch, settings.moment_dtype) if is_compact else None
    optimizer = DistributedOptimizer(
        model,
        optimizer_class=settings.optimizer_class,
        param_groups=muon.groups,
        state=settings.state,
        moment_dtype=dtype,
    )
    tokens = torch.randint(256, (2, 16 // config.mesh.cp), generator=torch.Generator().manual_seed(dist.get_rank()))
    with model.record_timeline() as timeline:
        model(tokens, tokens).backward()
        model.finish_grad_sync()
        optimizer.step()
        optimizer.finish_param_sync()
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    masters = [m for m in optimizer.state_dict()["masters"] if m.untyped_storage().data_ptr() not in storages]
    state = [(key, value) for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    moments = [value for key, value in state if key != "remainder"]
    if config.optimizer.state == "compact":  # the state dict has copies
        masters = [value for key, value in state if key == "remainder"]
    return Allocated(
        list(model.plan.buckets),
        sum(storages.values()),
        sum(
            (bucket.reduced if isinstance(bucket, ReleasedBucket) else bucket.grad_data).nbytes
            for bucket in model.buckets
        )
        + sum(
            bucket.grad_data.untyped_storage().nbytes()
            for bucket in model.buckets
            if isinstance(bucket, ReleasedBucket)
        ),
        sum(master.nbytes for master in masters),
        sum(moment.nbytes for moment in moments),
        [span.bucket for span in timeline.gathers],
        [(span.bucket, span.collective, span.nbytes) for span in timeline.buckets],
    )


CASES = [
    pytest.param("ddp", {}, 3, id="ddp"),
    pytest.param("zero1", {}, 3, id="zero1"),
    pytest.param("hybrid", {}, 4, id="hybrid"),
    pytest.param(
        "hybrid", {"num_distributed_optimizer_instances": 3}, 6, id="hybrid, 3 instances", marks=pytest.mark.slow
    ),
    pytest.param("zero1", {"grad_reduce_wire_dtype": "bfloat16"}, 2, id="bf16 wire"),
    pytest.param("zero1", {"keep_params_whole": True}, 2, id="whole parameters"),
    pytest.param("zero1", {"release_grads": True}, 2, id="released"),
    pytest.param("zero1", {"num_buckets": 2, "bucket_size": None, "grad_reduce_in_fp32": False}, 2, id="two buckets"),
]


@pytest.mark.in_turn
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parallel, ddp, ranks", CASES)
@pytest.mark.sampled(3)
def test_plan_is_what_training_allocates(
    tmp_path: Path, param_dtype: str, parallel: str, ddp: dict[str, Any], ranks: int
):
    config = tiny_config(tmp_path, parallel=parallel, model={"param_dtype": param_dtype}, ddp=ddp)
    plan = plan_run(config, ranks)
    held = simulate(allocate, ranks, config)
    assert held[0].layouts == [bucket.layout for bucket in plan.buckets]
    assert {rank.parameters for rank in held} == {plan.rank_bytes.parameters}
    assert {rank.gradients for rank in held} == {plan.rank_bytes.gradients}
    # Under fp32 parameters the master is the parameter itself.
    assert {rank.masters for rank in held} == {plan.rank_bytes.masters}
    assert (plan.rank_bytes.masters > 0) is (param_dtype == "bfloat16")
    assert max(rank.moments for rank in held) == plan.rank_bytes.moments
    # The collectives in their order.
    numbers = [bucket.layout.index for bucket in plan.buckets]
    assert [int(name.split()[1]) for name in held[0].gathered] == ([] if parallel == "ddp" else numbers[::-1])
    collective = {"ddp": "all_reduce"}.get(
        parallel, "all_to_all" if "grad_reduce_wire_dtype" in ddp else "reduce_scatter"
    )
    assert [name for _, name, _ in held[0].sent] == [collective] * len(plan.buckets)
    for bucket, (_, _, nbytes) in zip(plan.buckets, held[0].sent, strict=True):
        inside = bucket.traffic.reduce_inside
        assert inside == (2 if parallel == "ddp" else 1) * nbytes * (plan.inner_size - 1) // plan.inner_size


@pytest.mark.in_turn
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("parallel", "mesh", "ranks"),
    [
        ("ddp", {"tp": 2}, 2),
        ("zero1", {"tp": 2}, 2),
        ("zero1", {"tp": 2}, 4),
        ("zero1", {"tp": 2, "sequence_parallel": True}, 4),
        ("hybrid", {"tp": 2, "cp": 2}, 8),
    ],
)
def test_plan_of_tensor_parallel_ranks_is_what_training_allocates(
    tmp_path: Path, param_dtype: str, parallel: str, mesh: dict[str, int], ranks: int
):
    words = {"vocab_size": 257}  # of which the first rank has one more
    config = tiny_config(tmp_path, parallel=parallel, mesh=mesh, model={"param_dtype": param_dtype} | words)
    plan = plan_run(config, ranks)
    assert plan.parameters == plan_run(tiny_config(tmp_path, model=words), 1).parameters, "those of the whole model"
    held = simulate(allocate, ranks, config)
    assert held[0].layouts == [bucket.layout for bucket in plan.buckets]
    copies = "partial" if "sequence_parallel" in mesh else "dense"
    assert {bucket.layout.grid_name for bucket in plan.buckets} == {"slice", copies}
    assert max((rank.parameters, rank.gradients) for rank in held) == plan.rank_bytes[:2]
    assert max(rank.masters for rank in held) == plan.rank_bytes.masters
    assert max(rank.moments for rank in held) == plan.rank_bytes.moments
    for bucket, (_, collective, nbytes) in zip(plan.buckets, held[0].sent, strict=True):
        kind, over = bucket.layout.grid_name, plan.inner_size
        if kind == "partial" or (kind == "dense" and parallel == "ddp"):
            over *= 2
        if parallel == "ddp":
            assert bucket.traffic.reduce_inside == 2 * nbytes * (over - 1) // over
            continue
        assert nbytes == bucket.grad_nbytes // (2 if kind == "dense" else 1), "copies: of its own index alone"
        assert bucket.traffic.reduce_inside == nbytes * (over - 1) // over
        assert (collective == "none") is (over == 1) is (bucket.traffic.reduce_inside == 0)
        assert bucket.traffic.scratch == (nbytes if kind == "dense" and over > 1 else 0)


@pytest.mark.parametrize(("parallel", "ep", "ranks"), [("ddp", 2, 2), ("zero1", 2, 4), ("hybrid", 2, 4)])
def test_plan_of_experts_over_ranks_is_what_training_allocates(tmp_path: Path, parallel: str, ep: int, ranks: int):
    model = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 16, "param_dtype": "bfloat16"}
    config = tiny_config(tmp_path, parallel=parallel, mesh={"ep": ep}, model=model)
    plan = plan_run(config, ranks)
    assert plan.parameters == plan_run(tiny_config(tmp_path, model=model), 1).parameters, "those of the whole model"
    held = simulate(allocate, ranks, config)
    assert held[0].layouts == [bucket.layout for bucket in plan.buckets]
    assert {bucket.layout.grid_name for bucket in plan.buckets} == {"expert", "dense"}
    assert {(rank.parameters, rank.gradients) for rank in held} == {plan.rank_bytes[:2]}
    assert max(rank.masters for rank in held) == plan.rank_bytes.masters
    assert max(rank.moments for rank in held) == plan.rank_bytes.moments
    for bucket, (_, _, nbytes) in zip(plan.buckets, held[0].sent, strict=True):
        over = plan.inner_size // (ep if bucket.layout.grid_name == "expert" else 1)
        assert bucket.traffic.reduce_inside == (2 if parallel == "ddp" else 1) * nbytes * (over - 1) // over


def test_plan_of_released_gradients(tmp_path: Path) -> None:
    """One rank has nothing to reduce, and keeps them."""
    ddp = {"overlap_grad_reduce": True, "bucket_size": 4000, "release_grads": True}
    for ranks in (1, 2):
        plan = plan_run(tiny_config(tmp_path, parallel="zero1", ddp=ddp), ranks)
        assert plan.rank_bytes.gradients == sum(bucket.grad_nbytes for bucket in plan.buckets) // ranks


def test_matrices_of_muon_have_fp32_masters_beside_compact_state(tmp_path: Path) -> None:
    optimizer = {"name": "muon", "state": "compact", "moment_dtype": "uint8"}
    batch = {"global_batch_size": 8}
    plan = plan_run(tiny_config(tmp_path, model={"param_dtype": "bfloat16"}, optimizer=optimizer, train=batch), 4)
    assert {bucket.layout.keeps_matrices_whole for bucket in plan.buckets} == {True, False}
    for bucket in plan.buckets:
        assert bucket.compact is (None if bucket.layout.keeps_matrices_whole else torch.uint8)
        assert (bucket.master_nbytes == bucket.shard_nbytes) is bucket.layout.keeps_matrices_whole
    whole = [bucket for bucket in plan.buckets if bucket.layout.keeps_matrices_whole]
    numel = sum(slot.spec.numel for bucket in whole for slot in bucket.layout.slots)
    assert sum(sum(bucket.held_numels) for bucket in whole) == numel < sum(bucket.layout.numel for bucket in whole)


@pytest.mark.in_turn
@pytest.mark.parametrize("state", ["full", "compact"])
@pytest.mark.parametrize("parallel, ranks", [("ddp", 2), ("zero1", 3), ("hybrid", 4)])
@pytest.mark.sampled(2)
def test_muon_sends_what_adamw_sends_but_for_padding(tmp_path: Path, parallel: str, ranks: int, state: str):
    """The plan is what training allocates, and the collectives of a step are counted."""
    if parallel == "ddp":
        state = "full"  # one bucket has parameters of both classes
    model = {"param_dtype": "bfloat16"}
    config, adamw = (
        tiny_config(tmp_path, parallel=parallel, model=model, optimizer={"name": name, "state": state})
        for name in ("muon", "adamw")
    )
    plan, held, beside = plan_run(config, ranks), simulate(allocate, ranks, config), simulate(allocate, ranks, adamw)
    assert held[0].layouts == [bucket.layout for bucket in plan.buckets]
    assert {rank.parameters for rank in held} == {plan.rank_bytes.parameters}
    if state == "full":
        assert {rank.masters for rank in held} == {plan.rank_bytes.masters}
        more = max(rank.moments for rank in held) - plan.rank_bytes.moments
        # Where both classes share a bucket, AdamW has moments of padding up to the next matrix, which no plan counts.
        assert more == 0 or (parallel == "ddp" and 0 < more <= 8 * sum(layout.padding for layout in held[0].layouts))

    def counted(rank: Allocated) -> tuple[set[str], bool, int]:
        """Collectives; whether each bucket has one reduction and gather; bytes of gradients, without padding."""
        padding = sum(layout.padding for layout in rank.layouts)
        once = len(rank.sent) == len(rank.layouts) and len(rank.gathered) in (0, len(rank.layouts))
        return {name for _, name, _ in rank.sent}, once, sum(nbytes for *_, nbytes in rank.sent) - 4 * padding

    assert counted(held[0]) == counted(beside[0])


@pytest.mark.in_turn
def test_work_of_muon_by_rank(tmp_path: Path):
    config = tiny_config(tmp_path, parallel="zero1", optimizer={"name": "muon"})
    plan = plan_run(config, 2)
    shares = plan.muon
    assert shares is not None
    module = build_model(config.model, seed=0)
    muon = config.optimizer.muon_of(module)
    work = [update_flops(module.get_parameter(name).shape, group) for group in muon.groups for name in group["params"]]
    assert len(shares.flops) == 2 and sum(shares.flops) == pytest.approx(sum(work)), "each matrix is counted once"
    assert shares.largest_over_mean == max(shares.flops) / (sum(shares.flops) / 2)
    numel = sum(module.get_parameter(name).numel() for name in muon.matrices)
    beside = [bucket.layout for bucket in plan.buckets if bucket.layout.keeps_matrices_whole]
    assert shares.padding_share == sum(layout.padding for layout in beside) / numel
    together = tiny_config(tmp_path, optimizer={"name": "muon"}, ddp={"keep_params_whole": True})
    mixed = plan_run(together, 2)
    padding = [
        each.layout.padding
        for each in mixed.buckets
        if {slot.spec.name for slot in each.layout.slots} & {*muon.matrices}
    ]
    assert mixed.muon is not None and mixed.muon.padding_share == sum(padding) / numel > 0, "beside vectors too"
    table = " ".join(printed(tmp_path, 2, optimizer={"name": "muon"}).split())
    assert "Muon: the largest rank's iterations take" in table and "padding beside matrices:" in table
    assert "Muon" not in printed(tmp_path, 2)
    assert "not counted: 6 to 8" in " ".join(printed(tmp_path, 2, parallel="fsdp", optimizer={"name": "muon"}).split())


@pytest.mark.in_turn
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parallel, ddp, ranks", [case for case in CASES if not case.marks])
@pytest.mark.parametrize("moments, name", [("bfloat16", "adamw"), ("uint8", "adamw"), ("uint8", "lion")])
@pytest.mark.sampled(6)
def test_plan_of_compact_state(
    tmp_path: Path, moments: str, name: str, param_dtype: str, parallel: str, ddp: dict[str, Any], ranks: int
):
    model, optimizer = {"param_dtype": param_dtype}, {"name": name, "state": "compact", "moment_dtype": moments}
    config = tiny_config(tmp_path, parallel=parallel, model=model, ddp=ddp, optimizer=optimizer)
    held, planned = simulate(allocate, ranks, config), plan_run(config, ranks).rank_bytes
    assert planned[2:] == max(((rank.masters, rank.moments) for rank in held), key=sum)
    assert (planned.masters > 0) is (param_dtype == "bfloat16")


def test_more_is_sharded_from_kind_to_kind(tmp_path: Path):
    ddp, hybrid, zero1 = (
        plan_run(tiny_config(tmp_path, parallel=name), 4).rank_bytes for name in ("ddp", "hybrid", "zero1")
    )
    assert ddp.moments > hybrid.moments > zero1.moments


def test_bytes_on_the_wire():
    """Worked out by hand: 1,024 elements of bf16 under fp32 gradients, two instances of four ranks."""
    spec = ParamSpec(name="w", shape=(1024,), param_dtype=torch.bfloat16, grad_dtype=torch.float32)
    (bucket,) = plan_gradients([spec], shard_degree=4).buckets
    sharded, whole = (
        placements_of(DistributedDataParallelConfig(use_distributed_optimizer=each)) for each in (True, False)
    )

    def sent(placements: Placements, **sizes: Any) -> tuple[int, ...]:
        return PlacedBucket(layout=bucket, placements=placements, states={"w": 2}, **sizes).traffic

    hybrid = sent(sharded, inner_size=4, outer_size=2)
    # Scattered: 3/4 of 4,096 bytes. All-reduced between two: a shard of 1,024. Gathered: 3/4 of 2,048.
    assert hybrid == (3072, 1024, 1536, 0, 0)
    wire = sent(sharded, inner_size=4, outer_size=2, wire_dtype=torch.bfloat16)
    assert wire == (1536, 1024, 1536, 0, 2 * 2048)
    assert sent(whole, inner_size=8) == (2 * 4096 * 7 // 8, 0, 0, 0, 0)
    assert sent(sharded, inner_size=1) == (0, 0, 0, 0, 0)
    across = sent(PLACEMENTS["hsdp_zero1"], inner_size=4, outer_size=2)
    # Scattered between two: half of a shard of 1,024. Gathered between two: half of a shard of 512.
    assert across == (3072, 512, 1536, 256, 0)
    # Copies on two sets of four ranks: each set reduces a half, packed, of which a rank sends 3/4.
    assert sent(sharded, inner_size=8, columns=2) == (1536, 0, 2048 * 7 // 8, 0, 2048)
    in_bf16 = sent(sharded, inner_size=8, columns=2, wire_dtype=torch.bfloat16)
    assert in_bf16 == (768, 0, 2048 * 7 // 8, 0, 2048 + 2 * 1024)
    assert sent(sharded, inner_size=2, columns=2, wire_dtype=torch.bfloat16) == (0, 0, 1024, 0, 0)
    frozen = sent(sharded, inner_size=4, outer_size=2, trainable=False)
    assert frozen == (0, 0, 1536, 0, 0)


def test_expert_buffers_have_a_degree_of_their_own():
    specs = [
        ParamSpec(name=name, shape=(1024,), param_dtype=torch.bfloat16, grad_dtype=torch.float32, grid_name=grid_name)
        for name, grid_name in (("dense", "dense"), ("expert", "expert"))
    ]
    layouts = plan_gradients(specs, shard_degree={"dense": 8, "expert": 2}).buckets
    held = rank_bytes(
        PlacedBucket(
            layout=layout,
            placements=PLACEMENTS["zero1"],
            inner_size=layout.shard_degree,
            states={"dense": 2, "expert": 2},
        )
        for layout in layouts
    )
    assert held == (2 * 2048, 2 * 4096, 4 * (128 + 512), 8 * (128 + 512))


def tables(config_folder: Path, ranks: int, **sections: Any) -> tuple[str, set[str]]:
    """All that is printed, and the headings of columns."""
    plan = plan_run(tiny_config(config_folder, train={"global_batch_size": 2 * ranks}, **sections), ranks)
    headings = {str(column.header) for table in plan_tables(plan) for column in table.columns}
    return printed(config_folder, ranks, **sections), headings


def test_tables_of_every_form(tmp_path: Path):
    form = {"grad_reduce_wire_dtype": "bfloat16", "num_distributed_optimizer_instances": 2}
    hybrid, headings = tables(tmp_path, 8, parallel="hybrid", ddp=form)
    assert 'parallel = "hybrid" on 8 ranks' in hybrid
    assert "over the 4 ranks of an instance" in hybrid
    assert {"all-to-all in bfloat16\nover 4 ranks", "all-reduce\nover 2 instances", "scratch in flight"} <= headings
    assert "parameters are gathered bottom up, under the next forward" in hybrid
    assert "2 instances" in hybrid
    whole, headings = tables(tmp_path, 8, parallel="ddp")
    assert "all-reduce\nover 8 ranks" in headings
    assert "gather" not in whole
    assert "sharded" not in whole
    late, headings = tables(tmp_path, 8, ddp={"overlap_param_gather": False})
    assert {"reduce-scatter\nover 8 ranks", "all-gather\nover 8 ranks"} <= headings
    assert "parameters are gathered bottom up, in the optimizer's step" in late


def test_a_bucket_is_named_by_its_first_and_its_last_parameter(tmp_path: Path):
    model = {"num_layers": 1, "delay_wgrad_layers": 1}
    plan = plan_run(tiny_config(tmp_path, model=model, ddp={"bucket_size": 1}), 2)
    _, table, *_ = plan_tables(plan)
    names = [bucket.layout.slots[0].spec.name for bucket in plan.buckets]
    later = [", delayed" * bucket.layout.delayed for bucket in plan.buckets]
    assert {*later} == {"", ", delayed"}
    assert [*table.columns[1].cells] == [name + when for name, when in zip(names, later, strict=True)]
    plan = plan_run(tiny_config(tmp_path, model={"num_layers": 1}, ddp={"bucket_size": None}), 2)
    _, table, *_ = plan_tables(plan)
    (slots,) = [bucket.layout.slots for bucket in plan.buckets]
    assert [*table.columns[1].cells] == [f"{slots[0].spec.name} .. {slots[-1].spec.name} ({len(slots)})"]
    plan = plan_run(tiny_config(tmp_path, model={"num_layers": 1}, ddp={"bucket_size": 33}), 2)
    _, table, *_ = plan_tables(plan)
    sizes = [len(bucket.layout.slots) for bucket in plan.buckets]
    assert {1, 2} <= {*sizes}, "a norm of 32 elements does not fill a bucket"
    for name, size, bucket in zip(table.columns[1].cells, sizes, plan.buckets, strict=True):
        first, last = (bucket.layout.slots[place].spec.name for place in (0, -1))
        assert name == (first if size == 1 else f"{first} .. {last} ({size})")


@pytest.mark.parametrize(
    ("parallel", "mesh", "said"),
    [
        ("zero1", {"tp": 2}, "of parameters that are not cut, over 2 times as many ranks"),
        ("fsdp", {"tp": 2}, "not counted: the mean over tensor-parallel ranks of shards that are not cut"),
        ("zero1", {"cp": 2}, ""),
        ("fsdp", {"cp": 2}, ""),
    ],
)
def test_what_is_sent_beside_parts_of_weights_is_said(tmp_path: Path, parallel: str, mesh: dict[str, int], said: str):
    """And nothing of the kind where ranks have parts of sequences alone."""
    _, _, collectives, *_ = plan_tables(plan_run(tiny_config(tmp_path, parallel=parallel, mesh=mesh), 4))
    title = str(collectives.title)
    assert title.endswith(f"; {said}") if said else "not cut" not in title


def test_headings_say_what_ranks_and_rows_are(tmp_path: Path):
    for parallel, rows, over in (
        ("zero1", "#", ["over 8 ranks"]),
        ("hybrid", "#", ["over the 4 ranks of an instance", "over 2 instances"]),
        ("fsdp", "unit", ["over 8 ranks"]),
    ):
        plan = plan_run(tiny_config(tmp_path, parallel=parallel, train={"global_batch_size": 16}), 8)
        placements, buckets, collectives, _ = plan_tables(plan)
        assert [str(column.header) for column in placements.columns] == ["at rest", *over]
        assert [str(table.columns[0].header) for table in (buckets, collectives)] == [rows, rows]
    console = Console(width=96, record=True, file=StringIO())
    console.print(buckets)
    assert "…" not in console.export_text(), "a narrow terminal cuts no name off"


def test_moments_of_muon_are_one_for_each_element_of_a_matrix(tmp_path: Path):
    config = tiny_config(tmp_path, parallel="fsdp", optimizer={"name": "muon"})
    model = build_model(config.model, seed=0)
    matrices = sum(model.get_parameter(name).numel() for name in config.optimizer.muon_of(model).matrices)
    rest = sum(parameter.numel() for parameter in model.parameters()) - matrices
    assert rest > 0 and plan_run(config, 1).rank_bytes.moments == 4 * matrices + 8 * rest


def test_a_thousand_ranks_without_a_process_group(tmp_path: Path):
    text = printed(tmp_path, 1024)
    assert not dist.is_initialized()
    assert "reduce-scatter" in text
    assert "bytes on each of 1024 ranks" in text
    assert "│ head.weight" in text
    for row in ("parameters", "gradients", "optimizer: masters", "optimizer: moments", "total"):
        assert row in text


def test_every_bucket_has_a_row_and_sums_are_right(tmp_path: Path):
    config = tiny_config(tmp_path)
    plan = plan_run(config, 2)
    rows = [line.split("│") for line in printed(tmp_path, 2).splitlines() if line.startswith("│")]
    buckets = [row for row in rows if row[1].strip().isdigit() and len(row) == 9]
    assert [int(row[1]) for row in buckets] == list(range(len(plan.buckets)))
    elements = [int(row[3].replace(",", "")) for row in buckets]
    padding = [int(row[4].replace(",", "")) for row in buckets]
    assert sum(elements) - sum(padding) == plan.parameters.total
    assert plan.parameters.total == sum(p.numel() for p in build_model(config.model, seed=0).parameters())


@pytest.mark.parametrize("parallel", ["zero1", "fsdp"])
def test_buckets_of_delayed_weights_are_named_so(tmp_path: Path, parallel: str):
    plan = plan_run(tiny_config(tmp_path, parallel=parallel, model={"delay_wgrad_layers": 1}), 2)
    _, buckets, *_ = plan_tables(plan)
    delayed = [str(name).endswith(", delayed") for name in buckets.columns[1].cells]
    assert delayed == [bucket.layout.delayed for bucket in plan.buckets]
    assert {*delayed} == {True, False}


def test_tables_say_shares_dtypes_and_ranks(tmp_path: Path):
    optimizer = {"state": "compact", "moment_dtype": "uint8"}
    sizes = {"param_dtype": "bfloat16", "vocab_size": 261}  # not without padding
    plan = plan_run(tiny_config(tmp_path, model=sizes, optimizer=optimizer), 3)
    _, buckets, _, held = plan_tables(plan)
    padding, numel = (sum(getattr(b.layout, what) for b in plan.buckets) for what in ("padding", "numel"))
    assert buckets.columns[3].footer == f"{padding:,} ({padding / numel:.1%})" and padding > 0
    assert buckets.columns[1].footer == f"{plan.parameters.total:,} parameters"
    assert list(held.columns[1].cells) == ["bfloat16", "float32", "remainders", "uint8"]
    assert list(held.columns[2].cells) == [format_bytes(nbytes) for nbytes in plan.rank_bytes]
    *_, held = plan_tables(plan_run(tiny_config(tmp_path), 3))
    assert list(held.columns[1].cells) == ["float32"] * 4
    model = {"num_experts": 4, "top_k": 2, "expert_ffn_dim": 16}
    experts, _, _, collectives, *_ = plan_tables(plan_run(tiny_config(tmp_path, model=model, mesh={"ep": 2}), 4))
    assert list(experts.columns[0].cells) == ["experts, 16 wide", "routers, float32", "everything else"]
    assert str(collectives.title).endswith("; of experts, over 2 rank(s)")


def test_tied_weights_are_counted_once(tmp_path: Path):
    untied, tied = (plan_run(tiny_config(tmp_path, model={"tie_embeddings": tie}), 2) for tie in (False, True))
    assert untied.parameters.total - tied.parameters.total == 256 * 32


def test_experts_have_a_table_of_their_own(tmp_path: Path):
    model = {"num_experts": 8, "top_k": 2, "expert_ffn_dim": 16, "shared_expert_ffn_dim": 24, "moe_layer_freq": 2}
    config = tiny_config(tmp_path, model=model | {"param_dtype": "bfloat16"})
    console = Console(width=120, record=True, file=StringIO())
    for table in plan_tables(plan_run(config, 2)):
        console.print(table)
    text = console.export_text()
    lines = text[: text.index("parallel =")].splitlines()
    rows = {row[1].strip(): [cell.strip() for cell in row[2:4]] for row in map(cells, lines) if len(row) == 5}
    expert = 3 * 32 * 16
    assert "8 experts in 1 of 2 blocks, 2 for each token" in text
    assert rows["experts, 16 wide"] == [f"{8 * expert:,}", f"{2 * expert:,}"]
    assert rows["shared expert, 24 wide"] == [f"{3 * 32 * 24:,}"] * 2
    assert rows["routers, float32"] == [f"{8 * 32:,}"] * 2
    assert int(rows["total"][0].replace(",", "")) == plan_run(config, 2).parameters.total
    assert "bfloat16, float32" in text, "parameters of both dtypes"


def cells(line: str) -> list[str]:
    return line.split("│")


@pytest.mark.in_turn
def test_large_models_cost_nothing_to_plan(tmp_path: Path):
    size = {"dim": 8192, "num_layers": 80, "num_heads": 64, "num_kv_heads": 8, "ffn_dim": 28672, "vocab_size": 128256}
    config = tiny_config(tmp_path, model=size | {"param_dtype": "bfloat16"}, train={"global_batch_size": 2048})
    plan = plan_run(config, 1024)
    assert 69e9 < plan.parameters.total < 72e9
    assert plan.rank_bytes.moments < 1024**3 < plan.rank_bytes.gradients
    assert not torch.cuda.is_initialized()


def test_batch_that_does_not_divide(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"num_microbatches \* ranks = 2 \* 7 = 14"):
        plan_run(tiny_config(tmp_path), 7)


@pytest.mark.parametrize(
    "count, text",
    [
        (512, "512 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**30, "1.0 GiB"),
        (3 * 2**30, "3.0 GiB"),
        (5 * 2**40, "5.0 TiB"),
    ],
)
def test_format_bytes(count: int, text: str):
    assert format_bytes(count) == text


def layouts_of_a_stage(config: Config) -> list[BucketLayout]:
    runtime = current_runtime("cpu", config.mesh)
    return [bucket.layout for bucket in Wrapped(load_model(config, runtime), config, runtime).model.buckets]


@pytest.mark.parametrize(("num_layers", "fullest", "tied"), [(3, 0, True), (4, 1, False)])
def test_the_plan_of_a_pipeline_is_that_of_its_fullest_stage(tmp_path: Path, num_layers: int, fullest: int, tied: bool):
    """Where blocks divide, the last stage has a norm more than the first one."""
    model = {"num_layers": num_layers, "tie_embeddings": tied}
    config = tiny_config(tmp_path, parallel="zero1", model=model, mesh={"pp": 2, "tp": 2})
    held = simulate(layouts_of_a_stage, 4, config)
    plan = plan_run(config, 4)
    sizes = [sum(layout.numel for layout in layouts) for layouts in held]
    assert sizes.index(max(sizes)) // 2 == plan.stage.index == fullest
    assert [bucket.layout for bucket in plan.buckets] == held[2 * fullest]
    assert plan.inner_size == 1, "four ranks are two stages of two ranks with parts of matrices"
    whole = build_model(config.model, seed=0, device=torch.device("meta"))
    assert plan.parameters.total == sum(parameter.numel() for parameter in whole.parameters())
    *_, table = plan_tables(plan)
    assert table.title == f"bytes on each of 2 ranks of stage {fullest + 1} of 2, the fullest"
