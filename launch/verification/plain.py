"""Plain PyTorch: gradients of a whole batch in one process, and of its parts on ranks without a wrapper."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..simulation.simulate import SimulatedRankError, simulate
from .batches import own_copy, to_double
from .program import Program

__all__ = ["Grads", "Part", "Parts", "Plain", "alone", "draw_of", "mean_of", "run_exact", "run_one", "run_parts"]

Grads = Mapping[str, Tensor]
"""Gradient of each trainable parameter by name, in the parameter's shape."""
Around = Callable[[], AbstractContextManager[Any]]
"""What surrounds forward and backward: an observer, or a mode that replaces random draws."""
T = TypeVar("T")


class Plain(NamedTuple):
    """Loss and gradients of one forward and backward."""

    loss: float
    grads: Grads
    """Zeros where autograd gave none."""
    without: tuple[str, ...]
    """Trainable parameters to which autograd gave no gradient."""


class Part(NamedTuple):
    """One rank's microbatch."""

    rank: int
    microbatch: int
    batch: Any
    draw: int
    """Decides what is random in this part."""


Parts = Sequence[Sequence[Part]]
"""By rank, then by microbatch."""


def draw_of(rank: int, microbatch: int) -> int:
    """Ranks and microbatches draw different numbers, as they do in training."""
    return 1 + 1000 * rank + microbatch


def alone(fn: Callable[[], T]) -> T:
    """Call ``fn`` on one simulated rank, so that a program may ask for its rank. Raises what ``fn`` raises."""
    return on_ranks(fn, 1)[0]


def on_ranks(fn: Callable[[], T], ranks: int) -> list[T]:
    """Call ``fn`` on simulated ranks; raises what a rank raises."""
    try:
        return simulate(fn, ranks)
    except SimulatedRankError as error:
        raise (error.__cause__ or error) from None


def run_one(
    program: Program, model: nn.Module, batch: Any, draw: int = 0, around: Around = nullcontext, *, shares: int = 1
) -> Plain:
    """One forward and backward of ``model``, whose gradients are cleared before. ``batch`` may be changed by it.

    shares  the loss is divided by this number, as for accumulation, and gradients are multiplied by it again: what
            hooks see is what they see in training
    """
    model.zero_grad(set_to_none=True)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    with around():
        loss = program.loss_of(model, batch, draw)
        if loss.requires_grad:
            (loss / shares).backward()
        elif any(param.grad is not None for param in model.parameters()):
            raise ValueError("the program has called backward itself: let it return the loss before")
    grads, without = {}, []
    params = dict(model.named_parameters())  # forward may have replaced some
    for name in trained:
        param = params.get(name)
        if param is None or param.grad is None:
            without.append(name)
        if param is not None:
            grads[name] = torch.zeros_like(param) if param.grad is None else _dense(param.grad).detach() * shares
    model.zero_grad(set_to_none=True)
    return Plain(float(loss.detach()), grads, tuple(without))


def run_exact(program: Program, batch: Any, around: Around = nullcontext) -> Grads | None:
    """Gradients of the whole batch in fp64; None if the program does not run in fp64."""

    def run() -> Grads:
        return run_one(program, program.make().double(), to_double(own_copy(batch)), around=around).grads

    try:
        return alone(run)
    except Exception:  # whatever the program says about a dtype that it was not written for
        return None


def run_parts(
    program: Program,
    parts: Parts,
    *,
    on: int | None = None,
    around: Around = nullcontext,
    same_draw: bool = False,
    prepare: Callable[[nn.Module], None] = lambda model: None,
) -> list[list[Plain]]:
    """Gradients of each part, by rank, then by microbatch. Each rank has one copy, for its microbatches in turn.

    on         number of simulated ranks: None for those of ``parts``, 1 for one process that runs all parts
    same_draw  every part draws the same numbers
    prepare    changes each copy first
    """
    ranks = len(parts) if on is None else on

    def run_rank(rank: int) -> list[Plain]:
        model = program.make()
        prepare(model)
        mine = parts[rank]
        return [
            run_one(program, model, own_copy(part.batch), 0 if same_draw else part.draw, around, shares=len(mine))
            for part in mine
        ]

    def run() -> list[list[Plain]]:
        first = dist.get_rank()
        return [run_rank(rank) for rank in range(first, len(parts), ranks)]

    results = on_ranks(run, ranks)
    return [results[rank % ranks][rank // ranks] for rank in range(len(parts))]


def mean_of(plains: Sequence[Sequence[Plain]]) -> Grads:
    """The mean over all parts: what data parallelism computes."""
    flat = [plain.grads for of_rank in plains for plain in of_rank]
    half = (torch.bfloat16, torch.float16)
    total = {name: grad.float() if grad.dtype in half else grad.clone() for name, grad in flat[0].items()}
    for grads in flat[1:]:
        for name in total:  # forward may have made or frozen a parameter: later parts have others
            total[name] = total[name] + grads.get(name, 0)
    return {name: grad / len(flat) for name, grad in total.items()}


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad
