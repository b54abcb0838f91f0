"""Which collectives an iteration takes, and in which order: read from what simulated ranks launched."""

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_training import mesh_of, shard
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.fsdp import fully_shard
from maingrad.fsdp.module import root_of
from maingrad.launch import simulate
from maingrad.te_integration import Linear

WIDTHS = (8, 24, 40)
"""Hidden widths, so that blocks are known by their sizes."""


class Block(nn.Module):
    """A layer there and back around a residual."""

    def __init__(self, hidden: int, *, delayed: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "fuse_wgrad_accumulation": True, "delay_wgrad_compute": delayed}
        self.up = Linear(16, hidden, **options)
        self.down = Linear(hidden, 16, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """Three blocks between a layer and a norm."""

    def __init__(self, *, delayed: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16, bias=False)
        self.blocks = nn.ModuleList([Block(width, delayed=delayed) for width in WIDTHS])
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def backward_dw(self) -> None:
        for block in reversed(self.blocks):
            block.down.backward_dw()
            block.up.backward_dw()


def iterations(
    schedule: list[Any],
    how: dict[str, Any],
    instances: int,
    microbatches: int,
    delayed: str,
    frozen: bool,
    ahead: bool,
) -> list[int]:
    """Four of them; a word before each forward, backward and step. Returns the elements of each unit's buckets.

    delayed  weight gradients are computed "inside" ``no_sync`` or "outside"; "": in backward
    frozen   the block in the middle is
    ahead    False: every unit names no other to gather while it computes
    """

    def say(word: str) -> None:
        schedule.append((dist.get_rank(), word))

    mesh = mesh_of(instances, dist.get_world_size() // instances)
    net = Net(delayed=bool(delayed))
    net.blocks[1].requires_grad_(not frozen)
    model = shard(net, [f"blocks.{i}" for i in range(3)], mesh=mesh, **how)
    for unit in () if ahead else (model, *model.blocks):
        unit.set_modules_to_forward_prefetch([])
        unit.set_modules_to_backward_prefetch([])
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    sizes = [sum(bucket.layout.numel for bucket in unit.buckets) for unit in root_of(model).units]
    for step in range(4):
        say("iteration")
        for index in range(microbatches):
            final = index == microbatches - 1
            with nullcontext() if final else model.no_sync():
                say("forward")
                loss = model(torch.full((2, 16), 1.0 + step + index)).square().mean()
                say("backward")
                loss.backward()
                if delayed == "inside":
                    say("drain")
                    model.backward_dw()
            if delayed == "outside":
                say("drain")
                model.backward_dw()
        say("step")
        optimizer.step()
        optimizer.zero_grad()
    say("iteration")
    return sizes


LAUNCHED = re.compile(r"launch (\w+) (?:SUM )?float32\[(\d+)\] of group '\w+' \(ranks (.*)\)")
COMPARED = re.compile(r"launch all_reduce MAX int64\[\d+\] of group '\w+' \(ranks (.*)\)")


def launches(
    placements: str,
    *,
    instances: int = 1,
    microbatches: int = 2,
    delayed: str = "",
    frozen: bool = False,
    ahead: bool = True,
    **options: Any,
) -> tuple[str, list[str]]:
    """Rank 0's third iteration: what it launched inside its instance, in words, and across, in order.

    ``g`` is a gather and ``r`` a reduction, with the number of the block, or ``o`` for the outermost unit. ``c`` is the
    comparison of orders and steps between ranks.
    """
    schedule: list[tuple[int, str]] = []
    how = {"placements": placements, **options}
    arguments = schedule, how, instances, microbatches, delayed, frozen, ahead
    sizes = simulate(iterations, 2 * instances, *arguments, schedule=schedule)[0]
    assert len(set(sizes)) == 4
    names = dict(zip(sizes, "o012", strict=True))
    inside: list[str] = []
    across: list[str] = []
    seen = 0
    for rank, event in schedule:
        if rank == 0 and event == "iteration":
            seen += 1
        if rank != 0 or seen != 3 or event == "iteration":
            continue
        compared = COMPARED.fullmatch(event)
        if compared is not None:
            (inside if compared[1] == "0, 1" else across).append("c")
            continue
        found = LAUNCHED.fullmatch(event)
        if found is None:
            if not event.startswith("wait"):
                inside.append(event)
            continue
        op, shard_numel, ranks = found[1], int(found[2]), found[3]
        if ranks == "0, 1":  # the instance
            inside.append(("g" if op.startswith("all_gather") else "r") + names[2 * shard_numel])
        else:
            across.append(op)
    return " ".join(inside), across


# Two microbatches. In backward the next gathers come before the reduction of the unit that was passed; what the next
# microbatch begins with stays gathered, and its third unit is on its way.
ZERO3 = """
    forward go g0 g1 g2
    backward g1 g0 r2 r1 r0 ro g1
    forward g2
    backward g1 g0 r2 r1 r0 ro c
    step
"""
# Units name no other to gather ahead: each is gathered when backward enters it.
NONE_AHEAD = """
    forward go g0 g1 g2
    backward g1 r2 g0 r1 r0 ro g1
    forward g2
    backward g1 r2 g0 r1 r0 ro c
    step
"""
# Whole from forward to backward, which reshards them.
KEPT = """
    forward go g0 g1 g2
    backward r2 r1 r0 ro g1
    forward g2
    backward r2 r1 r0 ro c
    step
"""
ZERO2 = """
    forward go g0 g1 g2
    backward r2 r1 r0 ro
    forward
    backward r2 r1 r0 ro c
    step
"""
ZERO1 = """
    forward go g0 g1 g2
    backward
    forward
    backward r2 r1 r0 ro c
    step
"""
# What no optimizer has is gathered once, where it stays whole.
FROZEN = """
    forward go g0 g2
    backward
    forward
    backward r2 r0 ro c
    step
"""


@pytest.mark.parametrize(
    ("placements", "options", "expected"),
    [
        ("zero1", {}, ZERO1),
        ("zero1", {"frozen": True}, FROZEN),
        ("zero2", {}, ZERO2),
        ("zero3", {}, ZERO3),
        ("zero3", {"ahead": False}, NONE_AHEAD),
        ("zero3", {"reshard_after_forward": False}, KEPT),
    ],
    ids=["zero1", "zero1, frozen", "zero2", "zero3", "zero3, none ahead", "zero3, kept"],
)
def test_collectives_of_an_iteration(placements: str, options: dict[str, Any], expected: str) -> None:
    inside, across = launches(placements, **options)
    assert inside.split() == expected.split()
    assert across == []


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("placements", "inside", "across"),
    [
        ("hybrid", ZERO1, ["all_reduce"] * 4 + ["c"]),
        ("hsdp", ZERO3, ["all_reduce"] * 4 + ["c"]),
        ("hsdp_zero1", ZERO3, ["all_gather"] * 4 + ["reduce_scatter"] * 4 + ["c"]),
    ],
    ids=["hybrid", "hsdp", "hsdp_zero1"],
)
@pytest.mark.parametrize("microbatches", [2, 3])
def test_one_collective_across_instances_for_each_bucket_and_step(
    placements: str, inside: str, across: Sequence[str], microbatches: int
) -> None:
    found_inside, found_across = launches(placements, instances=2, microbatches=microbatches)
    if microbatches == 2:
        assert found_inside.split() == inside.split()
    assert [op.replace("_single", "") for op in found_across] == list(across)


@pytest.mark.parametrize("delayed", ["inside", "outside"])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_delayed_gradients_are_reduced_in_the_drain(microbatches: int, delayed: str) -> None:
    """Only weights of blocks are delayed. The last drain reduces the gradients of all microbatches."""
    words = launches("zero3", microbatches=microbatches, delayed=delayed)[0].split()
    assert [word for word in words if word.startswith("r")] == ["ro"] * microbatches + ["r2", "r1", "r0"]
    assert words.count("drain") == microbatches
    last = len(words) - words[::-1].index("drain")
    assert words[last : last + 3] == ["r2", "r1", "r0"]


@pytest.mark.parametrize("delayed", ["inside", "outside"])
@pytest.mark.parametrize("placements", ["hybrid", "hsdp"])
@pytest.mark.sampled(1)
def test_which_microbatch_is_the_last_is_said_by_its_backward(placements: str, delayed: str) -> None:
    """A drain after ``no_sync``, of gradients that a backward within it has delayed, does not end the iteration."""
    inside, across = launches(placements, instances=2, microbatches=3, delayed=delayed)
    assert across == ["all_reduce"] * 4 + ["c"]
    num_prompt = 1 if placements == "hybrid" else 3
    assert [word for word in inside.split() if word.startswith("r")] == ["ro"] * num_prompt + ["r2", "r1", "r0"]


@pytest.mark.in_turn
def test_no_gather_comes_twice() -> None:
    """A unit uses its prefetched gather, and does not gather again."""
    for microbatches in (1, 2, 3):
        words = launches("zero3", microbatches=microbatches)[0].split()
        gathers = [word for word in words if word.startswith("g")]
        # Forward and backward of every unit, but the outermost's, which stays; the last block's, which backward begins
        # with; and of later microbatches the first block's, which stays as well.
        assert len(gathers) == 6 + (microbatches - 1) * 4, gathers


def test_frozen_parameters_that_stay_whole_are_gathered_once() -> None:
    """The step of an optimizer changes the others."""

    def gathers() -> list[int]:
        model: Any = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
        for module in (*model, model):
            fully_shard(module, placements="zero2")
        optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
        counts = []
        for _ in range(3):
            with model.record_timeline() as timeline:
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(len(timeline.gathers))
        return counts

    assert simulate(gathers, 2) == [[2, 1, 1]] * 2


@pytest.mark.parametrize("placements", ["zero2", "zero3"])
def test_a_unit_that_a_forward_uses_twice_is_reduced_once(placements: str) -> None:
    """Backward passes it with the use that came first."""

    def on_each_rank() -> list[list[int]]:
        block = nn.Linear(8, 8, bias=False)
        model: Any = nn.Sequential(nn.Linear(8, 8), block, nn.Tanh(), block, nn.Linear(8, 8))
        for module in (block, model):
            fully_shard(module, placements=placements)
        model(torch.ones(2, 8))
        launcher, found = root_of(model).grads.launcher, []
        launch = launcher.launch
        for again in (False, False, True):  # backward goes through the same graph once more
            launched: list[int] = []
            launcher.launch = lambda bucket, *args, to=launched: (to.append(bucket.index), launch(bucket, *args))[1]
            loss = model(torch.ones(2, 8)).square().sum()
            if again:
                with model.no_sync():
                    loss.backward(retain_graph=True)
                launched.clear()
            loss.backward()
            found.append(launched)
        return found

    assert simulate(on_each_rank, 2) == [[[0, 1]] * 3] * 2


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("reshards", [True, False])
def test_units_wait_for_backward_in_a_model_without_parameters_of_its_own_too(own: bool, reshards: bool) -> None:
    """Gathers of three blocks in forward and in backward, after a first iteration."""

    def on_each_rank() -> tuple[int, int, int]:
        torch.manual_seed(0)
        blocks = [nn.Linear(8, 8, bias=False) for _ in range(3)]
        model: Any = nn.Sequential(*blocks, *[nn.Linear(8, 8)] * own)
        for block in blocks:
            fully_shard(block, reshard_after_forward=reshards)
        fully_shard(model)
        filled: list[int] = []
        for unit in model.units:
            for bucket in unit.buckets if unit.name else ():
                fill = bucket.fill
                bucket.fill = lambda fill=fill: (filled.append(1), fill())[1]
        counts: list[int] = []
        for _ in range(2):
            loss = model(torch.randn(2, 8)).square().mean()
            counts.append(len(filled))
            loss.backward()
            counts.append(len(filled))
            for param in model.parameters():
                param.grad = None
        model(torch.randn(2, 8))  # without a backward the memory of a forward is not kept
        with torch.no_grad():
            model(torch.randn(2, 8))
        held = sum(
            bucket.whole_params.data.untyped_storage().nbytes() for unit in model.units for bucket in unit.buckets
        )
        return counts[2] - counts[1], counts[3] - counts[2], held

    assert simulate(on_each_rank, 2) == [(3, 2 if reshards else 0, 0)] * 2


def test_a_forward_that_fails_leaves_no_unit_to_a_backward() -> None:
    """The unit that came last in the forward before stays for the backward, which does not come."""

    def on_each_rank() -> list[bool]:
        def fail(*_: Any) -> None:
            raise KeyError

        model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Identity())
        for layer in model[:2]:
            fully_shard(layer)
        fully_shard(model)
        model(torch.ones(2, 8)).sum().backward()
        model[2].register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            model(torch.ones(2, 8))
        return [unit.gathered for unit in model.units if unit.buckets]

    assert simulate(on_each_rank, 2) == [[False, False]] * 2


class Added(nn.Module):
    """Adds rows of a table, in a reentrant checkpoint: the table's unit has no input that requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: x + self.table(torch.arange(2)), x, use_reentrant=True)  # type: ignore[no-any-return]


def test_a_unit_inside_a_reentrant_recompute_is_sent_when_the_recompute_is_passed() -> None:
    schedule: list[tuple[int, str]] = []

    def on_each_rank() -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(16, 16), Added(), nn.Identity(), Added())
        for index in (1, 3):
            fully_shard(model[index].table)
        fully_shard(model)
        rank = dist.get_rank()
        model[2].register_full_backward_hook(lambda *_: schedule.append((rank, "between")))
        model(torch.ones(2, 16)).square().mean().backward()

    simulate(on_each_rank, 2, schedule=schedule)
    words = [word for rank, word in schedule if rank == 0]
    middle = words.index("between")
    sent = [index for index, word in enumerate(words) if word.startswith("launch reduce_scatter")]
    assert len(sent) == 3
    assert sent[0] < middle < sent[1], words


class Shared(nn.Module):
    """One layer, twice in one recomputed region."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layer = nn.Linear(16, 16)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        found = checkpoint(lambda y: self.layer(self.layer(y).tanh()), self.first(x), use_reentrant=self.reentrant)
        return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_unit_that_a_recompute_calls_twice_is_sent_once(reentrant: bool) -> None:
    schedule: list[tuple[int, str]] = []

    def on_each_rank() -> None:
        model: Any = Shared(reentrant)
        fully_shard(model.layer)
        fully_shard(model)
        x = torch.ones(2, 16)
        loss = model(x).square().mean()
        schedule.append((dist.get_rank(), "backward"))
        loss.backward()

    simulate(on_each_rank, 2, schedule=schedule)
    words = [word for rank, word in schedule if rank == 0]
    words = words[words.index("backward") :]
    assert sum(word.startswith("launch reduce_scatter") for word in words) == 2, words  # the layer's, the rest's


class Notes(nn.Linear):
    """Notes which units are gathered in the middle of its forward and of its backward."""

    look: Callable[[], list[int]]

    def forward(self, x: Tensor) -> Tensor:
        self.in_forward = self.look()
        x = super().forward(x)
        if x.requires_grad:  # not in the first forward of a reentrant checkpoint
            x.register_hook(lambda _: setattr(self, "in_backward", self.look()))
        return x.tanh()


@pytest.mark.parametrize("named", [None, [], [2], [1, 2]])
def test_units_named_by_the_program_are_gathered_ahead(named: list[int] | None) -> None:
    """By default the next one: the second in the first one's forward, and the third in the fourth one's backward."""

    def on_each_rank() -> tuple[list[int], list[int]]:
        model: Any = nn.Sequential(*[Notes(8, 8) for _ in range(4)])
        for layer in model:
            fully_shard(layer)
            layer.look = lambda: [index for index, unit in enumerate(model.units[1:]) if unit.gathered]
        fully_shard(model)
        if named is not None:
            model[0].set_modules_to_forward_prefetch([model[index] for index in named])
            model[3].set_modules_to_backward_prefetch([model[index] for index in named])
        for _ in range(2):  # the first one learns the order
            model(torch.ones(2, 8)).sum().backward()
        return model[0].in_forward, model[3].in_backward

    expected = ([0, 1], [2, 3]) if named is None else ([0, *named], [*named, 3])
    assert simulate(on_each_rank, 2) == [expected] * 2


@pytest.mark.parametrize("how", ["second", "keyword", "in a keyword's list", "in a dict"])
def test_backward_passes_a_unit_by_any_of_its_inputs(how: str) -> None:
    """The first one, a mask, requires no gradient."""

    class Masked(Notes):
        def forward(self, mask: Tensor, x: Any = None, *, xs: Any = None) -> Tensor:
            return super().forward((xs[0] if xs else x["x"] if isinstance(x, dict) else x) * mask)

    class Stack(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(8)
            for layer in self:
                if how == "second":
                    x = layer(mask, x)
                elif how == "in a dict":
                    x = layer(mask, {"x": x})
                else:
                    x = layer(mask, x=x) if how == "keyword" else layer(mask, xs=[x])
            return x

    def on_each_rank() -> list[list[int]]:
        model: Any = Stack(*[Masked(8, 8) for _ in range(3)])
        for layer in model:
            fully_shard(layer)
            layer.look = lambda: [index for index, unit in enumerate(model.units[1:]) if unit.gathered]
        fully_shard(model)
        model(torch.ones(2, 8)).sum().backward()
        return [layer.in_backward for layer in model]

    assert simulate(on_each_rank, 2) == [[[0], [0, 1], [1, 2]]] * 2


@pytest.mark.parametrize("trains", [False, True])
def test_nothing_is_gathered_ahead_of_a_unit_that_comes_in_another_place(trains: bool) -> None:
    """The first unit foretells the second, as in the forward before. Then the fourth comes, and foretells nothing. It
    was the last before, and is freed, as it is not now."""

    class InOrder(nn.Sequential):
        order = (0, 1, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            for index in self.order:
                x = self[index](x)
            return x

    def on_each_rank() -> list[list[int]]:
        model: Any = InOrder(*[Notes(8, 8) for _ in range(4)])
        for layer in model:
            fully_shard(layer)
            layer.look = lambda: [index for index, unit in enumerate(model.units[1:]) if unit.gathered]
        fully_shard(model)
        for model.order in ((0, 1, 2, 3), (0, 1, 2, 3), (0, 3, 1, 2)):
            with torch.set_grad_enabled(trains):
                loss = model(torch.ones(2, 8)).sum()
            if trains:
                loss.backward()
        return [model[index].in_forward for index in model.order]

    assert simulate(on_each_rank, 2) == [[[0, 1], [1, 3], [1], [2]]] * 2


def test_units_inside_units_are_gathered_ahead() -> None:
    """Backward is in the units around, and these are gathered: the next one is inside them."""

    def on_each_rank() -> tuple[list[int], list[int]]:
        layers: list[Any] = [Notes(8, 8) for _ in range(3)]
        inside: Any = nn.Sequential(*layers, nn.Linear(8, 8))
        model: Any = nn.Sequential(inside, nn.Linear(8, 8))
        for module in (*layers, inside, model):
            fully_shard(module)
        for layer in layers:
            layer.look = lambda: [index for index, unit in enumerate(model.units[2:]) if unit.gathered]
        for _ in range(2):  # the first one learns the order
            model(torch.ones(2, 8)).sum().backward()
        return layers[0].in_forward, layers[2].in_backward

    assert simulate(on_each_rank, 2) == [([0, 1], [1, 2])] * 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_recompute_gathers_no_units_that_backward_has_passed(named: bool, reentrant: bool) -> None:
    """Units that a program names for the forward are those that come next there, and have gone by in backward."""

    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = checkpoint(lambda y, layer=layer: layer(y * 1.0), x, use_reentrant=reentrant)
            return x

    def on_each_rank() -> tuple[list[list[int]], list[list[int]]]:
        model: Any = Checkpointed(*[Notes(8, 8) for _ in range(4)], nn.Linear(8, 8))
        for layer in model[:4]:
            fully_shard(layer)
            layer.look = lambda: [index for index, unit in enumerate(model.units[1:]) if unit.gathered]
        fully_shard(model)
        for index in range(3) if named else ():
            model[index].set_modules_to_forward_prefetch([model[index + 1]])
        for _ in range(2):  # the first one learns the order
            model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        return [layer.in_forward for layer in model[:4]], [layer.in_backward for layer in model[:4]]  # of the recompute

    ahead = [[0], [1], [2], [3]] if reentrant else [[0], [0, 1], [1, 2], [2, 3]]
    assert simulate(on_each_rank, 2) == [(ahead, ahead)] * 2
