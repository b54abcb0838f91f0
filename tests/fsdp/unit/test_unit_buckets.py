"""Several buckets in a unit: where they are closed, and that nothing but memory and collectives depends on it."""

import functools
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from checkpointed import Everything, batch
from published_shapes import PUBLISHED
from sharded_training import (
    DELAYS,
    UNITS,
    Job,
    assert_agrees,
    mesh_of,
    reduced_once,
    reference,
    shard,
    train_sharded,
    whole_of,
)
from torch import Tensor, nn

from maingrad.ddp import load_checkpoint, save_checkpoint
from maingrad.ddp.collectives.reduction import PLACEMENTS
from maingrad.ddp.plan.layout import default_bucket_numel
from maingrad.ddp.plan.owned_params import OwnedParam, find_owned_params
from maingrad.fsdp import MixedPrecisionPolicy, fully_shard
from maingrad.fsdp.iteration import connect
from maingrad.fsdp.module import root_of
from maingrad.fsdp.unit.plan import plan_unit
from maingrad.launch import simulate
from maingrad.te_integration import Linear

# ---- Where buckets are closed. ----


def owned(shapes: dict[str, tuple[int, ...]], **options: Any) -> list[OwnedParam]:
    """Parameters without storage, each of a module of its own."""
    made = []
    for name, shape in shapes.items():
        param = nn.Parameter(torch.empty(shape, device="meta", **options))
        made.append(OwnedParam(name, param, ((nn.Module(), name),), "dense"))
    return made


def names(params: Sequence[OwnedParam], degree: int, **options: Any) -> list[list[str]]:
    plan = plan_unit(params, MixedPrecisionPolicy(), degree, **options)
    return [[slot.spec.name for slot in layout.slots] for layout, _ in plan]


def test_buckets_are_closed_in_the_order_of_backward() -> None:
    params = owned({"norm": (16,), "up": (16, 64), "bias": (15,), "down": (64, 16), "out": (16,)})
    assert names(params, 2, bucket_size=1024) == [["out", "down", "bias"], ["up", "norm"]]
    assert names(params, 2, bucket_size=960) == [["out", "down"], ["bias", "up", "norm"]]
    assert names(params, 2, bucket_size=1) == [["out"], ["down"], ["bias"], ["up"], ["norm"]]
    assert names(params, 2, bucket_size=10**6) == names(params, 2) == [["out", "down", "bias", "up", "norm"]]


def test_a_bucket_of_the_very_size_is_closed_and_half_of_it_is_enough_for_the_next() -> None:
    assert names(owned({"b": (4,), "a": (4,)}), 1, bucket_size=4) == [["a"], ["b"]]
    assert names(owned({"b": (3,), "a": (4,)}), 1, bucket_size=5) == [["a", "b"]]
    assert names(owned({"b": (2,), "a": (4,)}), 1, bucket_size=4) == [["a"], ["b"]]
    assert names(owned({"b": (1,), "a": (4,)}), 1, bucket_size=4) == [["a", "b"]]
    assert names(owned({"c": (40,), "b": (1,), "a": (64,)}), 1, bucket_size=64) == [["a"], ["b", "c"]]
    assert names(owned({"c": (40,), "b": (1,), "a": (65,)}), 1, bucket_size=65) == [["a", "b"], ["c"]]


def test_blocks_are_cut_by_size_as_elements_are() -> None:
    """A block is as small as the alignment of buckets."""
    params = owned({f"{index}": (64, 32) for index in range(6)})
    assert names(params, 2, atoms="block", bucket_size=64) == [[f"{index}"] for index in reversed(range(6))]


@pytest.mark.parametrize("seed", range(20))
def test_a_bucket_is_closed_where_it_has_enough_and_as_much_follows(seed: int) -> None:
    """Except if less than half a bucket is left, or the next parameter is too small to open a bucket."""
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 3, 64, rng.randint(1, 300), rng.randint(1, 5000)]) for _ in range(rng.randint(1, 40))]
    size = rng.choice([1, 50, 700, 4000])
    params = owned({f"{index}": (numel,) for index, numel in enumerate(sizes)})
    found = names(params, rng.choice([1, 2, 3, 8]), bucket_size=size)
    assert [name for run in found for name in run] == [f"{index}" for index in reversed(range(len(sizes)))]
    left = sum(sizes)
    for run in found:
        held = 0
        for place, name in enumerate(run):
            closes = held >= size and 2 * left >= size and 64 * sizes[int(name)] >= size
            assert not closes, f"{name} opens a bucket"
            if place == 0 and run is not found[0]:
                assert 2 * left >= size and 64 * sizes[int(name)] >= size, f"{name} opens none"
            held, left = held + sizes[int(name)], left - sizes[int(name)]
        assert len(found) == 1 or held >= (size if run is not found[-1] else size / 2)


def test_buckets_keep_links_busy_where_nothing_is_said() -> None:
    """The default is 40 million elements, or one million for each rank if that is more."""
    params = owned({f"{index}": (5_000_000,) for index in range(24)})
    assert [len(run) for run in names(params, 8)] == [8, 8, 8]
    assert [len(run) for run in names(params, 60)] == [12, 12]
    assert [len(run) for run in names(params, 64)] == [13, 11]
    assert [len(run) for run in names(params, 256)] == [24]


@pytest.mark.parametrize("atoms", ["row", "whole", 4, {"1": "row"}], ids=str)
def test_coarser_atoms_keep_one_bucket(atoms: Any) -> None:
    params = owned({f"{index}": (64, 32) for index in range(6)})
    assert len(names(params, 2, bucket_size=64)) == 6
    assert len(names(params, 2, atoms=atoms, bucket_size=64)) == 1


def test_the_first_pattern_that_matches_a_name_counts() -> None:
    params = owned({"0.weight": (8, 6), "0.bias": (8,), "1.weight": (8, 6), "1.scale": (8, 6)})
    atoms: Any = {"*.weight": "row", "0.*": "whole"}
    ((layout, _),) = plan_unit(params, MixedPrecisionPolicy(), 2, atoms)
    assert {slot.spec.name: slot.spec.atom for slot in layout.slots} == {
        "0.weight": 6, "0.bias": 8, "1.weight": 6, "1.scale": 1,
    }  # fmt: skip


def test_atoms_that_would_pad_a_bucket_by_more_than_a_twentieth_are_apart() -> None:
    params = owned({"wide": (15, 1000), "narrow": (1000, 3)})
    assert names(params, 8) == [["narrow", "wide"]]
    assert names(params, 8, atoms="row") == [["narrow"], ["wide"]]
    for layout, _ in plan_unit(params, MixedPrecisionPolicy(), 8, "row"):
        assert (layout.start, layout.end, layout.slots[0].start) == (0, layout.numel, 0), "in memory of its own"


def test_kinds_are_apart_whatever_their_size() -> None:
    half, plain = owned({"a": (64, 8), "b": (64, 8)}, dtype=torch.bfloat16), owned({"c": (64, 8), "d": (64, 8)})
    frozen = owned({"e": (64, 8), "f": (64, 8)})
    for entry in frozen:
        entry.param.requires_grad_(False)
    late = Linear(8, 64, bias=False, device="meta", fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    mixed = [*itertools.chain(*zip(half, plain, frozen, strict=True)), *find_owned_params(late)]
    assert names(mixed, 2, bucket_size=600) == [["weight"], ["f", "e"], ["d", "c"], ["b", "a"]]
    small = list(plan_unit(mixed, MixedPrecisionPolicy(), 2, bucket_size=100))
    assert [(layout.slots[0].spec.name, trainable) for layout, trainable in small] == [
        ("weight", True), ("f", False), ("e", False), ("d", True), ("c", True), ("b", True), ("a", True),
    ]  # fmt: skip
    assert [layout.slots[0].spec.delayed for layout, _ in small] == [True] + [False] * 6


def test_a_tied_parameter_has_one_place() -> None:
    model = Everything()
    found = names(find_owned_params(model), 3, bucket_size=1)
    assert sorted(itertools.chain(*found)) == sorted(name for name, _ in model.named_parameters())
    assert all(len(run) == 1 or "nothing" in run for run in found)  # what has no elements opens no bucket


@pytest.mark.parametrize("degree", [8, 64, 256, 1024])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_padded_by_less_than_a_thousandth(name: str, degree: int) -> None:
    """With default options, and with experts in the layer's unit or in a unit of their own."""
    for unit in PUBLISHED[name]():
        for shapes in ({**unit.dense, **unit.experts}, unit.experts):
            numel = sum(torch.Size(shape).numel() for shape in shapes.values())
            layouts = [layout for layout, _ in plan_unit(owned(dict(shapes)), MixedPrecisionPolicy(), degree)]
            assert all(layout.numel % degree == 0 for layout in layouts)
            assert sum(layout.padding for layout in layouts) <= 0.001 * numel
            assert len(layouts) <= 1 + numel // default_bucket_numel(degree)


@pytest.mark.parametrize("size", [0, -1])
def test_a_bucket_has_elements(size: int) -> None:
    with pytest.raises(ValueError, match=f"bucket_size must be at least 1 element, got {size}"):
        fully_shard(nn.Linear(3, 3), bucket_size=size)


@pytest.mark.parametrize("placements", ["zero3", "hsdp"])
def test_ranks_that_cut_differently_all_raise(placements: str) -> None:
    def wrap() -> str:
        mesh = mesh_of(1 + (placements == "hsdp"), dist.get_world_size() // (1 + (placements == "hsdp")))
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        with pytest.raises(ValueError, match="differs between ranks") as caught:
            fully_shard(module, placements=placements, mesh=mesh, bucket_size=1 + 71 * (dist.get_rank() % 2))
        return str(caught.value)

    for said in simulate(wrap, 4):
        assert "bucket_size=" in said and "fully_shard" in said


# ---- Parity. ----

AXES = (tuple(p for p in PLACEMENTS if p != "ddp"), (1, 3), (True, False), DELAYS, (1, 60, 250), (1, 2, 4))
MATRIX = list(itertools.product(*AXES))


@functools.lru_cache(maxsize=8)
def data_parallel(job: Job, once: frozenset[str]) -> Any:
    return simulate(reference, job.ranks, job, once)


@pytest.mark.parametrize(("placements", "microbatches", "fused", "delay", "size", "ranks"), MATRIX)
@pytest.mark.sampled(1)
def test_any_buckets_agree_with_data_parallelism_to_the_bit(
    placements: str, microbatches: int, fused: bool, delay: str, size: int, ranks: int
) -> None:
    instances = 2 if placements.startswith("h") else 1
    inner = max(1, ranks // instances)
    job = Job("everything", UNITS, placements, instances, inner, fused, delay, microbatches, bucket_size=size, steps=3)
    sharded = simulate(train_sharded, job.ranks, job, seed=ranks)
    neutral = job._replace(units=(), placements="", delay="none", bucket_size=None)
    whole = data_parallel(neutral, reduced_once(job))
    assert_agrees(sharded, whole, replicas=1 if placements == "hsdp_zero1" else instances)


@pytest.mark.in_turn
@pytest.mark.parametrize("placements", ["zero2", "hsdp_zero1"])
@pytest.mark.parametrize("holding", [(), (*UNITS, "")], ids=["", "reduced once"])
@pytest.mark.sampled(1)
def test_a_unit_of_one_bucket_computes_the_same(placements: str, holding: tuple[str, ...]) -> None:
    instances = 2 if placements.startswith("h") else 1
    job = Job(placements=placements, units=UNITS, instances=instances, inner=2, microbatches=3, steps=3, delay="queue")
    one, few, each = (
        simulate(train_sharded, job.ranks, job._replace(bucket_size=size, holding=holding)) for size in (10**9, 60, 1)
    )
    for other in (few, each):
        for step, name in itertools.product(range(job.steps), one[0].weights[0]):
            shape = dict(job.build().named_parameters())[name].shape
            both = [whole_of([rank.weights[step][name] for rank in ranks], shape, 1 if placements != "hsdp" else 2)
                    for ranks in (one, other)]  # fmt: skip
            assert torch.equal(*both), name
        assert [rank.losses for rank in other] == [rank.losses for rank in one]


# ---- Checkpoints and state dicts. ----


def everything(size: int | None, seed: int = 0) -> Any:
    model = Everything(seed=seed)
    for module in (model.up, model.down, model):
        fully_shard(module, bucket_size=size)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, foreach=False)


def take_steps(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        tokens = batch(step, dist.get_rank())
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_weights(model: Any) -> dict[str, Tensor]:
    with model.unsharded():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize(("saved", "loaded"), [(1, None), (None, 100), (100, 1)])
@pytest.mark.sampled(1)
def test_checkpoints_do_not_know_of_buckets(tmp_path: Path, saved: int | None, loaded: int | None) -> None:
    """Saved on 3 ranks and loaded on 2, with moments: otherwise the next steps would differ."""

    def save() -> None:
        model, optimizer = everything(saved)
        take_steps(model, optimizer, range(2))
        save_checkpoint(tmp_path / "found", model, optimizer)

    def go_on(size: int | None) -> dict[str, Tensor]:
        model, optimizer = everything(size, seed=1)
        load_checkpoint(tmp_path / "found", model, optimizer)
        take_steps(model, optimizer, range(2, 4))
        return whole_weights(model)

    simulate(save, 3)
    expected, found = (simulate(go_on, 2, size)[0] for size in (saved, loaded))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_state_dicts_do_not_know_of_buckets() -> None:
    def run() -> None:
        model, optimizer = everything(1)
        take_steps(model, optimizer, range(2))
        other, _ = everything(100, seed=1)
        other.load_state_dict(model.state_dict())
        expected, found = whole_weights(model), whole_weights(other)
        assert all(torch.equal(expected[name], found[name]) for name in expected)

    simulate(run, 3)


# ---- What is recorded. ----


def two_blocks(**options: Any) -> Any:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(16, 4))
    return shard(model, ["0", "1"], **options)


BUCKETS = [
    ("2.bias .. 2.weight", 68),
    ("1.1.bias .. 1.1.weight", 528),
    ("1.0.weight", 512),
    ("0.1.bias .. 0.1.weight", 528),
    ("0.0.weight", 512),
]
"""With a size of 500: names, and elements but for padding, about as backward fills them."""


def test_a_timeline_has_every_bucket() -> None:
    def run() -> tuple[list[Any], list[Any], int]:
        model = two_blocks(bucket_size=500)
        root = root_of(model)
        sizes = {bucket.name: bucket.layout.numel for bucket in root.buckets}
        assert sizes.keys() == dict(BUCKETS).keys()
        assert all(numel <= sizes[name] < numel + 256 for name, numel in BUCKETS)
        for _ in range(2):
            with model.record_timeline() as timeline:
                model(torch.ones(2, 16)).square().mean().backward()
        inside = [re.fullmatch(r"bucket \d+ \((.*)\)", span.bucket)[1] for span in timeline.buckets]  # type: ignore[index]
        assert [span.nbytes for span in timeline.buckets] == [4 * sizes[name] for name in inside]
        assert [span.nbytes for span in timeline.gathers] == [4 * sizes[span.bucket] for span in timeline.gathers]
        assert all(span.ready <= span.launched <= span.finished for span in timeline.buckets)
        return inside, [span.bucket for span in timeline.gathers], len(timeline.waits)

    outermost, last_down, last_up, first_down, first_up = [name for name, _ in BUCKETS]
    for reduced, gathered, waits in simulate(run, 2):
        # Nothing tells when backward has passed a unit whose inputs are the model's: it has at its end.
        assert reduced == [last_down, last_up, outermost, first_down, first_up]
        # Each unit's buckets one after the other; the last one of the forward stays for the backward.
        assert gathered == [outermost, first_down, first_up, last_down, last_up, first_down, first_up]
        assert waits >= len(reduced) + len(gathered)


@pytest.mark.parametrize(("grad_dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_gradients_of_fp32_shards_that_compute_in_bf16_have_the_policys_dtype(
    grad_dtype: torch.dtype, itemsize: int
) -> None:
    def run() -> list[int]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, grad_dtype=grad_dtype)
        model = fully_shard(nn.Linear(64, 32, bias=False), mixed_precision=policy)
        with model.record_timeline() as timeline:
            model(torch.ones(2, 64)).sum().backward()
        return [span.nbytes for span in timeline.buckets]

    assert simulate(run, 2) == [[64 * 32 * itemsize]] * 2


def test_the_profiler_shows_every_bucket() -> None:
    model = two_blocks(bucket_size=500)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(2, 16)).square().mean().backward()
    labels = [event.name for event in profile.events() if event.name.startswith("maingrad::launch")]
    numbers = {name: index for index, (name, _) in enumerate([*BUCKETS[1:], BUCKETS[0]])}
    for name in numbers:
        assert sum(label.endswith(f"({name})") for label in labels) == 1, (name, labels)
    assert len(labels) == len(BUCKETS)


# ---- Memory that copy engines reach. ----


class Reserving:
    """Replaces a ``MappedPool`` and records the bytes that are allocated within ``allocating()``."""

    made: ClassVar[list["Reserving"]] = []

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.nbytes = group, device, []
        self.made.append(self)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        empty = torch.empty

        def noted(*shape: int, **options: Any) -> Tensor:
            self.nbytes.append(shape[0])
            return empty(0, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", noted)
            yield

    def share(self) -> None:
        assert len(self.nbytes) == 1


@pytest.mark.parametrize("size", [None, 1, 2**19])
@pytest.mark.sampled(1)
def test_copy_engines_have_room_for_all_buckets_of_the_units_at_once(
    size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outermost unit and the three largest others, each bucket rounded up to 2 MiB as by torch's allocator."""
    monkeypatch.setattr(connect, "MappedPool", Reserving)
    monkeypatch.setattr(connect, "OnStream", lambda stream: nullcontext())
    monkeypatch.setattr(Reserving, "made", [])
    mib = 2**20

    def run() -> None:
        widths = [256, 512, 1024, 768, 300]
        blocks = [nn.Sequential(nn.Linear(512, width), nn.Linear(width, 512)) for width in widths]
        model = shard(nn.Sequential(*blocks, nn.Linear(512, 16)), [str(i) for i in range(5)], bucket_size=size)
        connect.map_memory(root_of(model).units, object(), 3)  # type: ignore[arg-type]
        (pool,) = {bucket.whole_params.pool for unit in root_of(model).units for bucket in unit.buckets}
        outermost, *units = [
            sum(-(-bucket.whole_params.nbytes // (2 * mib)) * 2 * mib for bucket in unit.buckets)
            for unit in root_of(model).units
        ]
        assert pool.nbytes == [outermost + sum(sorted(units)[-3:])]
        assert pool.group is root_of(model).units[0].buckets[0].reduction.grid.gather

    simulate(run, 2)
    assert len(Reserving.made) == 2


def test_copy_engines_have_room_for_what_stays_at_rest_and_for_nothing_of_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connect, "MappedPool", Reserving)
    monkeypatch.setattr(connect, "OnStream", lambda stream: nullcontext())
    monkeypatch.setattr(Reserving, "made", [])

    def run() -> None:
        groups = [dist.new_group([rank]) for rank in (0, 1)]
        model: Any = nn.Sequential(*[nn.Linear(512, 512) for _ in range(7)])
        fully_shard(model[0], groups[dist.get_rank()], "zero2")
        shard(model, [str(i) for i in range(1, 6)], placements="zero2")
        connect.map_memory(root_of(model).units, object(), 3)  # type: ignore[arg-type]
        outermost, alone, *others = ({bucket.whole_params.pool for bucket in unit.buckets} for unit in model.units)
        assert alone == {None}
        assert all(pools == outermost for pools in others)
        (pool,) = outermost
        assert pool.nbytes == [6 * 2 * 2**20]

    simulate(run, 2)
    assert len(Reserving.made) == 2
