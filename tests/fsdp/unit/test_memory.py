"""How much memory a fully sharded model has at rest, to the byte, and how much more within an iteration."""

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from reachable import nbytes_of, reachable_tensors
from sharded_training import mesh_of, shard
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from maingrad.ddp.buckets.bucket import Phase
from maingrad.fsdp import MixedPrecisionPolicy, fully_shard
from maingrad.fsdp.module import root_of
from maingrad.launch import simulate
from maingrad.te_integration import Linear, WgradQueue, delayed_wgrad

WIDTH = 64  # parameters begin at whole 64 elements, buckets end at whole 128: nothing is padded here
NUM_BLOCKS = 6


class Block(nn.Module):
    """A feed-forward layer around a residual, and sometimes an unused parameter."""

    def __init__(self, *, unused: bool, delayed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
        self.down = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=True, delay_wgrad_compute=delayed)
        if unused:
            self.unused = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


Run = Callable[["Transformer", Tensor], Tensor]


class Transformer(nn.Module):
    """An embedding, blocks, and a head."""

    def __init__(self, run: Run, *, unused: bool = False, delayed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run = run
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(unused=unused, delayed=delayed) for _ in range(NUM_BLOCKS)])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.run(self, self.embed(tokens)))

    def backward_dw(self) -> None:
        for block in reversed(self.blocks):
            block.down.backward_dw()
            block.up.backward_dw()


def plainly(model: Transformer, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def recomputed(size: int, reentrant: bool, model: Transformer, x: Tensor) -> Tensor:
    """The forward, recomputing ``size`` blocks at a time in backward."""
    for first in range(0, NUM_BLOCKS, size):
        x = checkpoint(nn.Sequential(*model.blocks[first : first + size]), x, use_reentrant=reentrant)
    return x


def the_second_left_out(model: Transformer, x: Tensor) -> Tensor:
    for index, block in enumerate(model.blocks):
        x = x if index == 1 else block(x)
    return x


def side_by_side(model: Transformer, x: Tensor) -> Tensor:
    """Backward reaches the input of each block before it has passed any of them: none can be reduced before the end."""
    return sum((block(x) for block in model.blocks), x)


RUNS: dict[str, Run] = {
    "plainly": plainly,
    "recomputed": functools.partial(recomputed, 1, False),
    "recomputed, reentrant": functools.partial(recomputed, 1, True),
    "two recomputed as one": functools.partial(recomputed, 2, False),
    "two recomputed as one, reentrant": functools.partial(recomputed, 2, True),
    "one left out": the_second_left_out,
}


def tokens(index: int) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randint(WIDTH, (5,), generator=torch.Generator().manual_seed(10 * index + rank))


def iterate(model: Any, microbatches: int, queue: WgradQueue | None = None) -> None:
    for index in range(microbatches):
        with nullcontext() if index == microbatches - 1 else model.no_sync():
            with nullcontext() if queue is None else delayed_wgrad(queue):
                loss = model(tokens(index)).square().mean() / microbatches
            loss.backward()
            model.backward_dw()
            if queue is not None:
                queue.drain()


BLOCKS = tuple(f"blocks.{index}" for index in range(NUM_BLOCKS))


ONE_MATRIX = WIDTH * WIDTH
"""As the size of buckets: a block has two, the outermost unit one for the head and one for the embedding."""


class Peaks(NamedTuple):
    """The most that blocks had at once in an iteration, the outermost unit's left out, in blocks; what they have
    after it, in bytes."""

    params: float
    grads: float
    params_left: int
    grads_left: int


def peaks(
    run: Run,
    microbatches: int,
    *,
    placements: str = "zero3",
    instances: int = 1,
    reshard: bool | None = None,
    unused: bool = False,
    delayed: bool = False,
    queued: bool = False,
    size: int | None = None,
) -> list[Peaks]:
    """Peaks of three iterations. In the first the order of units is not known yet."""
    model = Transformer(run, unused=unused, delayed=delayed)
    mesh = mesh_of(instances, dist.get_world_size() // instances)
    options = {"placements": placements, "mesh": mesh, "reshard_after_forward": reshard, "bucket_size": size}
    model = shard(model, BLOCKS, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    root = root_of(model)
    outermost, block = root.units[:2]
    params, grads = (
        [sum(getattr(bucket, kind).nbytes for bucket in unit.buckets) for unit in (outermost, block)]
        for kind in ("whole_params", "whole_grads")
    )
    found = []
    for _ in range(3):
        for meter in (root.gathers.meter, root.grads.meter):
            meter.peak_nbytes = meter.held_nbytes
        iterate(model, microbatches, WgradQueue() if queued else None)
        most = [(meter.peak_nbytes - whole[0]) / whole[1] for meter, whole in zip(
            (root.gathers.meter, root.grads.meter), (params, grads), strict=True
        )]  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
        found.append(Peaks(*most, root.gathers.meter.held_nbytes, root.grads.meter.held_nbytes))
    return found


@pytest.mark.parametrize("unused", [False, True], ids=["", "unused"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(("placements", "instances"), [("zero3", 1), ("hsdp", 2), ("hsdp_zero1", 2)])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.sampled(1)
def test_at_most_three_units_of_parameters_and_two_of_gradients(
    run: str, placements: str, instances: int, microbatches: int, unused: bool
) -> None:
    """Whether a unit can be reduced does not depend on which of its parameters are used."""
    options = {"placements": placements, "instances": instances, "unused": unused}
    for rank in simulate(peaks, 2 * instances, RUNS[run], microbatches, **options):
        for step in rank:
            # Beside the outermost unit's; recomputed, a unit runs again while the one after it is in backward.
            assert step.params <= (2 if run == "plainly" else 3)
            assert step.grads <= 2
            assert (step.params_left, step.grads_left) == (0, 0)


class Whole(NamedTuple):
    """Whole parameters in one rank's memory, in blocks, the outermost unit's left out."""

    most: float
    left: list[float]
    """After each microbatch of the iteration; 0 where the outermost unit has none either."""


def whole_parameters(run: Run, microbatches: int) -> tuple[Whole, Whole]:
    """Whole parameters of the third iteration, and of an evaluation after it."""
    model = shard(Transformer(run), BLOCKS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter, units = root_of(model).gathers.meter, root_of(model).units
    outermost, block = (sum(bucket.whole_params.nbytes for bucket in unit.buckets) for unit in units[:2])

    def in_blocks(nbytes: int) -> float:
        return (nbytes - outermost) / block if nbytes else 0

    def microbatch(index: int) -> float:
        with nullcontext() if index == microbatches - 1 else model.no_sync():
            model(tokens(index)).square().mean().backward()
        return in_blocks(meter.held_nbytes)

    for _ in range(3):
        meter.peak_nbytes = meter.held_nbytes
        left = [microbatch(index) for index in range(microbatches)]
        trained = Whole(in_blocks(meter.peak_nbytes), left)
        optimizer.step()
        optimizer.zero_grad()
    meter.peak_nbytes = meter.held_nbytes
    with torch.no_grad():
        model(tokens(0))
    return trained, Whole(in_blocks(meter.peak_nbytes), [in_blocks(meter.held_nbytes)])


@pytest.mark.parametrize("run", ["plainly", "recomputed"])
@pytest.mark.sampled(1)
def test_two_blocks_are_whole_at_once_and_between_microbatches(run: str) -> None:
    """The block that computes and the block being gathered; between microbatches the first two of forward."""
    for trained, evaluated in simulate(whole_parameters, 2, RUNS[run], 3):
        assert trained == Whole(2, [2, 2, 0])
        assert evaluated == Whole(2, [0])


def test_parameters_that_stay_until_backward_are_held_once() -> None:
    for step in simulate(peaks, 2, plainly, 2, reshard=False)[0]:
        assert step == Peaks(NUM_BLOCKS, 2, 0, 0)


def whole_at_rest(placements: str) -> list[int]:
    """Bytes of the whole parameters after each of three steps."""
    model = fully_shard(nn.Linear(WIDTH, WIDTH, bias=False), placements=placements)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = []
    for index in range(3):
        model(torch.full((2, WIDTH), float(index))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        held.append(root_of(model).gathers.meter.held_nbytes)
    return held


@pytest.mark.parametrize(("placements", "held"), [("zero1", 4 * WIDTH * WIDTH), ("zero3", 0)])
def test_parameters_that_are_gathered_again_are_counted_once(placements: str, held: int) -> None:
    assert simulate(whole_at_rest, 2, placements) == [[held] * 3] * 2


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.sampled(1)
def test_delayed_gradients_take_memory_when_they_are_computed(microbatches: int) -> None:
    """Modules said when they were wrapped what they delay: those gradients are a bucket of their own, and stay from the
    first drain of an iteration to its last, which reduces them."""
    for step in simulate(peaks, 2, plainly, microbatches, delayed=True)[0]:
        assert step.params <= 2
        assert step.grads <= (2 if microbatches == 1 else NUM_BLOCKS)
        assert (step.params_left, step.grads_left) == (0, 0)


@pytest.mark.parametrize(("how", "options"), [("queue", {"queued": True}), ("side by side", {})])
@pytest.mark.parametrize(("placements", "size"), [("zero2", None), ("zero3", None), ("zero3", ONE_MATRIX)])
@pytest.mark.sampled(2)
def test_the_pool_grows_where_no_unit_can_be_reduced(
    how: str, options: dict[str, Any], placements: str, size: int | None
) -> None:
    """Biases are written in backward, in buckets of weights that are computed after it; or all units end together.
    Nobody waits for memory that only he himself could return."""
    run = side_by_side if how == "side by side" else plainly
    for step in simulate(peaks, 2, run, 2, placements=placements, size=size, **options)[0]:
        assert step.grads == NUM_BLOCKS
        assert step.grads_left == 0


# ---- Several buckets. ----


class Watched(NamedTuple):
    """The whole gradients in an iteration of units with several buckets. All sizes in bytes."""

    limit: int
    """A block's own, and its largest bucket or half of it."""
    block: int
    largest: int
    """Most of blocks' at once."""
    events: list[tuple[str, str]]
    """Buckets that take memory, are written again, are launched, and are waited for before backward ends."""
    before: list[tuple[int, list[str]]]
    """When the last backward enters each block: what blocks have, and the outermost unit's buckets that have memory."""
    left: int


def watch(placements: str, size: int, microbatches: int, run: Run = plainly, **how: Any) -> Watched:
    """Watch the second of two iterations."""
    instances = 2 if placements.startswith("h") else 1
    found: list[tuple[int, list[str]]] = []
    events: list[tuple[str, str]] = []

    def noted(model: Transformer, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = run_one(block, x)
            x.register_hook(
                lambda _: found.append((in_blocks(), [b.name for b in outermost if b.whole_grads.resident]))
            )
        return x

    def run_one(block: nn.Module, x: Tensor) -> Tensor:
        return block(x) if run is plainly else checkpoint(block, x, use_reentrant=False)

    def in_blocks() -> int:
        return sum(bucket.whole_grads.nbytes for bucket in inner if bucket.whole_grads.resident)

    mesh = mesh_of(instances, dist.get_world_size() // instances)
    model = shard(Transformer(noted), BLOCKS, placements=placements, mesh=mesh, bucket_size=size, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    root = root_of(model)
    outermost, inner = root.units[0].buckets, [bucket for unit in root.units[1:] for bucket in unit.buckets]
    sizes = [bucket.whole_grads.nbytes for bucket in root.units[1].buckets]
    iterate(model, microbatches)
    optimizer.step()
    optimizer.zero_grad()
    launcher, make_room = root.grads.launcher, root.grads.make_room
    launch, wait_for, most = launcher.launch, launcher.wait_for, 0

    def taking(bucket: Any) -> None:
        nonlocal most
        events.append(("again" if bucket.whole_grads.resident else "take", bucket.grad_bucket.name))
        make_room(bucket)
        most = max(most, in_blocks())

    def launching(bucket: Any, start: Any) -> None:
        events.append(("launch", bucket.name))
        launch(bucket, start)

    def waiting(bucket: Any) -> None:
        assert bucket.phase is Phase.REDUCING, "nobody waits for what is being written"
        if root._backward is not None:
            events.append(("wait", bucket.name))
        wait_for(bucket)

    root.grads.make_room, launcher.launch, launcher.wait_for = taking, launching, waiting
    found.clear()
    iterate(model, microbatches)
    limit = sum(sizes) + max(*sizes, sum(sizes) // 2)
    return Watched(limit, sum(sizes), most, events, found[-NUM_BLOCKS:], root.grads.meter.held_nbytes)


@pytest.mark.parametrize("run", [plainly, recomputed], ids=["", "recomputed"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("size", [1, ONE_MATRIX, ONE_MATRIX + WIDTH])
@pytest.mark.parametrize("placements", ["zero2", "zero3", "hsdp", "hsdp_zero1"])
@pytest.mark.sampled(1)
def test_several_buckets_take_one_and_a_half_units(placements: str, size: int, microbatches: int, run: Run) -> None:
    """To the byte: a unit, and its largest bucket or half the unit for gradients that are being reduced."""
    for found in simulate(watch, 4 if placements.startswith("h") else 2, placements, size, microbatches, run):
        assert found.block < found.largest <= found.limit <= 1.52 * found.block
        assert found.largest == found.limit or size == 1
        assert found.left == 0
        assert_the_oldest_are_waited_for(found.events)


def assert_the_oldest_are_waited_for(events: list[tuple[str, str]]) -> None:
    """Waits are for the oldest reduction, or for the bucket that is written again in the next microbatch."""
    under_way: list[str] = []
    num_oldest = 0
    for before, (event, name) in itertools.pairwise(events):
        if event == "launch":
            assert name not in under_way
            under_way.append(name)
        elif event == "wait":
            assert name == under_way[0] or before == ("again", name)
            num_oldest += name == under_way[0]
            under_way.remove(name)
    assert num_oldest >= NUM_BLOCKS - 2


def test_a_large_outermost_unit_leaves_the_others_their_bound() -> None:
    """Two units of gradients, beside its own."""

    def on_each_rank() -> float:
        model: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)], nn.Linear(8, 400))
        for layer in model[:6]:
            fully_shard(layer)
        root = root_of(fully_shard(model))
        own, one = (sum(bucket.whole_grads.nbytes for bucket in unit.buckets) for unit in root.units[:2])
        for _ in range(2):
            root.grads.meter.peak_nbytes = root.grads.meter.held_nbytes
            model(torch.ones(2, 8)).sum().backward()
            model.zero_grad()
        return (root.grads.meter.peak_nbytes - own) / one

    assert simulate(on_each_rank, 2) == [2.0] * 2


@pytest.mark.parametrize("placements", ["zero3", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_an_embedding_has_no_gradient_before_backward_comes_to_it(placements: str) -> None:
    for found in simulate(watch, 2, placements, ONE_MATRIX, 1):
        assert [names for _, names in found.before] == [["head.weight"]] * NUM_BLOCKS
        assert ("take", f"bucket {2 * NUM_BLOCKS + 1} (embed.weight)") in found.events


@pytest.mark.parametrize("placements", ["zero3", "hsdp"])
@pytest.mark.sampled(1)
def test_gradients_that_were_kept_go_one_unit_after_the_other(placements: str) -> None:
    """All gradients until the last backward; then those of blocks not passed, and those being reduced."""
    for found in simulate(watch, 2, placements, ONE_MATRIX, 3, reduce_every_microbatch=False):
        assert found.largest == NUM_BLOCKS * found.block
        for entered, (nbytes, _) in enumerate(found.before):
            passed = max(0, entered - 1)  # backward enters a block before it has left the one after it
            kept = (NUM_BLOCKS - passed) * found.block
            assert kept <= nbytes <= kept + min(found.limit, passed * found.block)
        assert found.left == 0
        assert [event for event, _ in found.events].count("launch") == 2 * NUM_BLOCKS + 2


# ---- At rest. ----


def nbytes_kept(model: nn.Module) -> int:
    """Of all that the model refers to; the whole numbers are those of the mesh."""
    return nbytes_of([tensor for tensor in reachable_tensors(model) if tensor.is_floating_point()])


def at_rest(placements: str, instances: int, low: bool) -> tuple[int, int, int]:
    """Bytes of everything that the model refers to: when it was wrapped, after an iteration, and after its step."""
    mesh = mesh_of(instances, dist.get_world_size() // instances) if dist.is_initialized() else None
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None)
    model = shard(Transformer(plainly), BLOCKS, placements=placements, mesh=mesh, mixed_precision=policy)
    root_of(model)
    found = [nbytes_kept(model)]
    for _ in range(2):
        model.zero_grad(set_to_none=False)
        iterate(model, 2)
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(0.1 * param.grad.detach())
    found.append(nbytes_kept(model))
    model.zero_grad()
    found.append(nbytes_kept(model))
    return found[0], found[1], found[2]


RESTS = [
    *itertools.product(("zero1", "zero2", "zero3"), (1,), (1, 2, 4)),
    *itertools.product(("hybrid", "hsdp", "hsdp_zero1"), (2,), (1, 2)),
]


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16 over fp32 masters"])
@pytest.mark.parametrize(("placements", "instances", "inner"), RESTS)
@pytest.mark.sampled(1)
def test_bytes_at_rest(placements: str, instances: int, inner: int, low: bool) -> None:
    """P parameters of b bytes as they are computed with, fp32 shards and gradients, over i ranks of an instance, d in
    all that hold different shards::

        always           4 P/d                shards
        zero1, 2         b P                  whole parameters
        hsdp_zero1       b P/i                the instance's shards, which its ranks gather
        from the first backward on
        always           4 P/d                their gradients
        zero1            4 P                  whole gradients
        with instances   4 P/i                gradients summed over microbatches inside an instance
    """
    num_params = sum(param.numel() for param in Transformer(plainly).parameters())
    shards = inner * (instances if placements == "hsdp_zero1" else 1)
    whole_params = num_params * (2 if low else 4)
    wrapped = 4 * num_params // shards
    if placements == "hsdp_zero1":
        wrapped += whole_params // inner
    trained = wrapped + 4 * num_params // shards
    if placements in ("zero1", "zero2", "hybrid"):
        trained += whole_params
    if placements in ("zero1", "hybrid"):
        trained += 4 * num_params
    if instances > 1:
        trained += 4 * num_params // inner
    for found in simulate(at_rest, instances * inner, placements, instances, low):
        assert found == (wrapped, trained, trained)


class Casts(TorchDispatchMode):
    """The memory of all results in bf16, so far as it is alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype is torch.bfloat16 and result.shape == (WIDTH, WIDTH):
            self._made.append(StorageWeakRef(result.untyped_storage()))
        return result

    def counts(self) -> tuple[int, int]:
        """How many there were, and how many are alive."""
        return len(self._made), sum(not each.expired() for each in self._made)


def test_casts_of_autocast_do_not_outlive_their_unit() -> None:
    """A program may have a whole evaluation in one block, which keeps casts of what requires a gradient."""

    def evaluate() -> None:
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Casts() as casts:
            model(torch.ones(2, WIDTH))
            made, alive = casts.counts()
        assert made >= 3
        assert alive == 0

    simulate(evaluate, 1)


def test_reshard_after_forward_may_be_set_of_all_units_or_of_one() -> None:
    """Parameters that stay gathered until backward are gathered once in an iteration."""

    def gathers(unit: int | None, **options: Any) -> int:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        if options:
            (model if unit is None else model[unit]).set_reshard_after_forward(False, **options)
        for _ in range(2):  # the first one learns the order
            with model.record_timeline() as timeline:
                model(torch.ones(2, 4)).sum().backward()
        return len(timeline.gathers)

    def on_rank() -> list[int]:
        return [gathers(None), gathers(None, recurse=True), gathers(None, recurse=False), gathers(0, recurse=True)]

    assert simulate(on_rank, 2) == [[7, 4, 7, 6]] * 2  # the last unit of a forward stays in any case


# ---- Whole gradients of iterations that are given up. ----


def test_whole_gradients_are_freed_by_the_forward_after_a_backward_that_failed() -> None:
    def stop(grad: Tensor) -> None:
        raise KeyError("in the middle")

    def on_each_rank() -> None:
        model = shard(Transformer(plainly), BLOCKS)
        meter = root_of(model).grads.meter
        handle = model.blocks[1].register_forward_hook(lambda _, __, output: output.register_hook(stop) and None)
        with pytest.raises(KeyError):
            model(tokens(0)).square().mean().backward()
        handle.remove()
        assert meter.held_nbytes > 0
        with torch.no_grad():
            model(tokens(0))
        assert meter.held_nbytes == 0

    simulate(on_each_rank, 2)
