"""Whatever goes into a unit's forward and comes out of it: its gradients are a plain model's."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from sharded_twin import WIDTH, Block, no_sync, shard_blocks, train_beside
from torch import Tensor, nn

from maingrad.fsdp import fully_shard


def some_kinds(test: Callable[..., None]) -> Callable[..., None]:
    """A matrix of which ``make test`` takes a part."""
    kinds = pytest.mark.parametrize("kind", ["zero3", "hsdp_zero1", "zero1"])
    return pytest.mark.sampled(4)(kinds(test))


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
    """A block whose inputs and outputs come in some form."""

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
def test_inputs_and_outputs_in_any_form(kind: str, form: str) -> None:
    def shard(model: nn.Module, **options: Any) -> None:
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)

    train_beside(kind, lambda: Conversation(form), shard, talk)


class Quiet(nn.Module):
    """A unit that returns nothing, or nothing with a gradient."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.returns = returns
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return {"none": None, "detached": y.detach(), "indices": y.argmax(-1), "same": x}[self.returns]


@some_kinds
@pytest.mark.parametrize("returns", ["none", "detached", "indices", "same"])
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
