"""Whatever goes into a unit's forward and comes out of it: its gradients are a plain model's."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from sharded_twin import (
    WIDTH,
    Block,
    assert_same_grads,
    batches_of,
    both,
    no_sync,
    one_backward,
    options_of,
    plain_grads,
    rank_and_size,
    ranks_of,
    shard_blocks,
    train_beside,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maingrad.fsdp import MixedPrecisionPolicy, fully_shard
from maingrad.launch import simulate


def some_kinds(test: Callable[..., None]) -> Callable[..., None]:
    """A matrix of which ``make test`` takes a part."""
    kinds = pytest.mark.parametrize("kind", ["zero3", "hsdp_zero1", "zero1"])
    return pytest.mark.sampled(3)(kinds(test))


@dataclass
class Output:
    logits: Tensor
    note: str
    state: Any = None


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


def wrapped_in(kind: str, x: Tensor, y: Tensor) -> Any:
    return {
        "dict": {"x": x, "more": [y, None, "text"]},
        "dataclass": Output(x, "text", {"y": y}),
        "tuple": (x, None, (y, 3)),
        "namedtuple": Pair(x, y),
    }[kind]


def tensors_in(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Output):
        return [outputs.logits, outputs.state["y"]]
    return [leaf for leaf in torch.utils._pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


class Speaks(nn.Module):
    """A block whose inputs and outputs have one of several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Any, *, count: int, mask: Any = None) -> Any:
        x, y = tensors_in(inputs)
        for _ in range(count):
            x, y = self.linear(x).tanh() + y, self.other(y).tanh()
        return wrapped_in(self.form, x, y)


class Conversation(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Speaks(form) for _ in range(3)])

    def forward(self, *, batch: Tensor) -> Any:
        x = self.stem(batch)
        state = wrapped_in(self.form, x, x * 0.5)
        for block in self.blocks:
            state = block(inputs=state, count=2, mask=[None, "all"])
        return state


def talk(model: nn.Module, batches: Any) -> None:
    for index, batch in enumerate(batches):
        last = index == len(batches) - 1
        with contextlib.nullcontext() if last else no_sync(model):
            sum(tensor.square().mean() for tensor in tensors_in(model(batch=batch))).backward()


@some_kinds
@pytest.mark.parametrize("form", ["dict", "dataclass", "tuple", "namedtuple"])
@pytest.mark.sampled(1)
def test_inputs_and_outputs_in_any_form(kind: str, form: str) -> None:
    def shard(model: nn.Module, **options: Any) -> None:
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)

    train_beside(kind, lambda: Conversation(form), shard, talk)


class Quiet(nn.Module):
    """A unit that returns None, or no tensor with a gradient."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns = returns
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return {"none": None, "detached": y.detach(), "indices": y.argmax(-1), "same": x}[self.returns]


@some_kinds
@pytest.mark.parametrize("returns", ["none", "detached", "indices", "same"])
@pytest.mark.sampled(2)
def test_units_that_leave_no_graph(kind: str, returns: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(5, WIDTH)
            self.quiet = Quiet(returns)
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            self.quiet(x)
            return self.block(x)

    def shard(model: nn.Module, **options: Any) -> None:
        fully_shard(model.quiet, **options)
        shard_blocks(model, **options)

    train_beside(kind, Model, shard)


class Passes(Block):
    """A block that can return its input, alone or beside its output."""

    passes = False
    pairs = False

    def forward(self, x: Tensor) -> Any:
        if self.pairs:
            return x, x if self.passes else super().forward(x)
        return x if self.passes else super().forward(x)


class Passing(nn.Module):
    """Four such blocks."""

    def __init__(self, *, pairs: bool, reentrant: bool | None) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Passes() for _ in range(4)])
        self.reentrant = reentrant
        for block in self.blocks:
            block.pairs = pairs

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            found = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = sum(found) if isinstance(found, tuple) else found
        return x


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["", "recomputed", "recomputed, reentrant"])
@pytest.mark.parametrize("pairs", [False, True], ids=["", "pairs"])
@pytest.mark.parametrize("kind", ["zero3", "zero2"])
@pytest.mark.sampled(1)
def test_units_that_hand_their_input_on_are_reduced_in_their_turn(
    kind: str, pairs: bool, reentrant: bool | None
) -> None:
    """Each rank has other such units, and all ranks must launch in one order."""

    def on_each_rank() -> None:
        rank, size = rank_and_size()
        make = functools.partial(Passing, pairs=pairs, reentrant=reentrant)
        model, twin = both(make, lambda model: shard_blocks(model, **options_of(kind)))

        def run_as(other: int, each: Any, batches: Sequence[Tensor]) -> None:
            for index, block in enumerate(each.blocks):
                block.passes = (index + other) % 3 == 0
            one_backward(each, batches)

        for step in range(2):
            run_as(rank, model, batches_of(rank, 1, step=step))
            others = iter(range(size))
            everyones = [batches_of(other, 1, step=step) for other in range(size)]
            wanted = plain_grads(twin, lambda each, batches, of=others: run_as(next(of), each, batches), everyones)
            assert_same_grads(model, wanted)
            model.zero_grad()

    simulate(on_each_rank, ranks_of(kind))


class Equilibrium(nn.Module):
    """``z = f(z, x)``. A hook on z solves for its gradient by backwards through one application (Bai et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.of_state, self.of_input = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def apply_once(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.25 * self.of_state(z) + self.of_input(x))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(20):
                z = self.apply_once(z, x)
        z = self.apply_once(z, x)
        start = z.detach().requires_grad_()
        again = self.apply_once(start, x)

        def solve(grad: Tensor) -> Tensor:
            found = grad
            for _ in range(20):
                found = grad + torch.autograd.grad(again, start, found, retain_graph=True)[0]
            return found

        z.register_hook(lambda grad: 2 * grad)
        z.register_hook(solve)
        return z


@pytest.mark.parametrize("inside", [False, True], ids=["one unit", "units inside"])
@pytest.mark.parametrize("placements", ["zero2", "zero3"])
@pytest.mark.sampled(4)
def test_a_modules_hooks_on_its_output_may_run_backwards_inside_of_it(placements: str, inside: bool) -> None:
    def grads(*, sharded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Equilibrium(), nn.Linear(WIDTH, 1)).double()
        if sharded:
            for unit in [model[1].of_state, model[1].of_input] if inside else [model[1]]:
                fully_shard(unit, placements=placements)
            fully_shard(model, placements=placements)
        for _ in range(2):
            model(torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH)).sum().backward()
        return [
            grad.full_tensor() if sharded else grad for param in model.parameters() if (grad := param.grad) is not None
        ]

    expected = grads(sharded=False)
    for found in simulate(lambda: grads(sharded=True), 2):
        torch.testing.assert_close(found, expected)


class Viewed(Block):
    """A unit whose output is a view of what it has computed, which the program then writes to."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1).view_as(x)


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Viewed() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            before, x = x, block(x.view_as(x))
            x += before
        return x


@pytest.mark.in_turn
@some_kinds
def test_an_output_that_is_a_view_may_be_changed_in_place(kind: str) -> None:
    train_beside(kind, AddsInPlace)


class Watches(Block):
    """A unit that hands its input on in another shape."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = super().forward(x).detach()
        return x.flatten()


class WatchedBeside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.watch, self.block = Watches(), Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.watch(x.view_as(x))
        return self.block(x)


def test_a_unit_that_hands_on_its_input_is_no_part_of_a_backward_around_it() -> None:
    """Output and input are views of one tensor, which a backward reaches beside the unit: nothing is reduced."""

    def reduced() -> list[str]:
        model = WatchedBeside()
        for unit in (model.watch, model.block, model):
            fully_shard(unit)
        with model.record_timeline() as timeline:
            model(torch.ones(2, 5)).sum().backward()
        return [span.bucket for span in timeline.buckets]

    for names in simulate(reduced, 2):
        assert names and not any("watch" in name for name in names)


class Positions(nn.Module):
    """A unit whose forward returns its parameters themselves, alone or among others."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.alone = alone
        self.table = nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self) -> Any:
        return self.table if self.alone else {"table": self.table, "scale": self.scale * 2, "width": WIDTH}


class Placed(nn.Module):
    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.positions = Positions(alone=alone)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        found = self.positions()
        table, scale = (found, 1) if self.positions.alone else (found["table"], found["scale"])
        return self.block(self.stem(x) * scale + table)


@some_kinds
@pytest.mark.parametrize("alone", [True, False])
def test_a_forward_may_return_a_parameter_itself(kind: str, alone: bool) -> None:
    def shard(model: nn.Module, **options: Any) -> None:
        fully_shard(model.positions, **options)
        shard_blocks(model, **options)

    def run(model: nn.Module, batches: Sequence[Tensor]) -> None:
        with torch.no_grad():
            assert model(batches[0]).isfinite().all()
        one_backward(model, batches)

    train_beside(kind, functools.partial(Placed, alone=alone), shard, run)


class Named(nn.Module):
    """Blocks whose input comes by position, by name, or inside a dict."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Reads() for _ in range(5)])
        self.watch: Callable[[Tensor], None] = lambda grad: None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x.register_hook(self.watch)
            args = (x,) if self.how == "position" else ()
            x = block(*args, **{"position": {}, "name": {"x": x}, "dict": {"state": {"x": x}}}[self.how])
        return x


class Reads(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor | None = None, state: Any = None) -> Tensor:
        return super().forward(state["x"] if x is None else x).tanh()


def test_backward_frees_a_unit_whichever_way_its_input_came() -> None:
    def held(how: str) -> list[int]:
        """Units that are gathered when backward comes to the input of each block."""
        model = Named(how)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        found: list[int] = []
        model.watch = lambda grad: found.append(sum(unit.gathered for unit in model.units))
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
        return found

    def on_rank() -> list[list[int]]:
        return [held(how) for how in ("position", "name", "dict")]

    for by_position, by_name, inside in simulate(on_rank, 2):
        assert by_name == inside == by_position
        assert max(by_position) <= 4  # the outermost one, the one that is passed, and two ahead


def test_inputs_are_cast_inside_of_containers_too() -> None:
    """Those that are floating-point."""

    class Looks(nn.Linear):
        seen: Any = None

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            self.seen = args, kwargs
            return super().forward(args[0][0])

    x, ids = torch.ones(2, 4), torch.arange(2)
    model: Any = fully_shard(Looks(4, 4), mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model((x, [ids, x]), {"mask": x}, 3, state=(x, None))
    (pair, named, number), options = model.seen
    cast = [pair[0], pair[1][1], named["mask"], options["state"][0]]
    assert {each.dtype for each in cast} == {torch.bfloat16} and pair[1][0].dtype is torch.int64
    assert number == 3 and options["state"][1] is None


class Penalised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.weight.square().sum()
        return super().forward(x)


def test_a_loss_may_lie_beside_the_outputs_of_the_outermost_unit() -> None:
    """The unit stays gathered until backward, which comes to its parameters and never to its outputs."""

    def on_each_rank() -> None:
        torch.manual_seed(0)
        model: Any = Penalised(4, 4)
        expected = 2 * model.weight.detach().clone()
        fully_shard(model)
        model(torch.ones(2, 4))
        model.penalty.backward()
        assert torch.equal(model.weight.grad.full_tensor(), expected)
        assert not model.bias.grad.full_tensor().any()

    simulate(on_each_rank, 2)
