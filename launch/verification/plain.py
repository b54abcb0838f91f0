"""Plain PyTorch: gradients of a whole batch in one process, and of its parts on ranks without a wrapper."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..simulation.simulate import SimulatedRankError, simulate
from .batches import own_copy, to_double
from .draws import DrawnMeans, random_state
from .program import Program, set_seed

__all__ = [
    "Grads",
    "Part",
    "Parts",
    "Plain",
    "Prepare",
    "as_it_is",
    "mean_of",
    "on_ranks",
    "run_exact",
    "run_one",
    "run_parts",
    "run_whole",
]

Grads = Mapping[str, Tensor]
"""Gradient of each trainable parameter by name, in the parameter's shape."""
Prepare = Callable[[nn.Module], object]
"""Changes a copy of the model before it runs."""
T = TypeVar("T")


class Plain(NamedTuple):
    """What one forward and backward has computed, and what it has done to the model."""

    loss: float
    grads: Grads
    """Zeros where autograd gave none."""
    without: tuple[str, ...] = ()
    """Trainable parameters to which autograd gave no gradient."""
    replaced: tuple[str, ...] = ()
    """Parameters that are other objects after forward, that were not there before, or that had no shape yet."""
    buffers: Mapping[str, Tensor] = {}
    """After forward."""
    is_random: bool = False
    """Forward has moved a default generator."""
    eps: float = 0.0
    """The precision of the half dtype in which autograd has saved a tensor, as under autocast; 0 without."""


class Part(NamedTuple):
    """One rank's microbatch."""

    rank: int
    microbatch: int
    batch: Any

    @property
    def draw(self) -> int:
        """Seed of what is random in this part. Ranks and microbatches draw different numbers, as in training."""
        return 1 + 1000 * self.rank + self.microbatch

    def __str__(self) -> str:
        return f"rank {self.rank}'s microbatch {self.microbatch}"


Parts = Sequence[Part]
"""By rank, then by microbatch."""


def as_it_is(model: nn.Module) -> None:
    """Changes nothing."""


def on_ranks(fn: Callable[[], T], ranks: int) -> list[T]:
    """Call ``fn`` on simulated ranks; raises what a rank raises."""
    try:
        return simulate(fn, ranks)
    except SimulatedRankError as error:
        raised = error.__cause__ or error
    raise raised  # outside of the handler: the error keeps its own cause and context


def run_one(program: Program, model: nn.Module, batch: Any, draw: int = 0, *, shares: int = 1) -> Plain:
    """One forward and backward of ``model``, whose gradients are cleared before. ``batch`` may be changed by it.

    draw    seed of what is random
    shares  the loss is divided by this number, as for accumulation, and gradients are multiplied by it again: what
            hooks see is what they see in training
    """
    model.zero_grad(set_to_none=True)
    before = {name: param for name, param in model.named_parameters() if not nn.parameter.is_lazy(param)}
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    set_seed(program.seed + (0 if program.means else draw))
    state = random_state()
    with DrawnMeans() if program.means else nullcontext():  # type: ignore[no-untyped-call]
        loss = program.loss_of(model, batch)
        is_random = random_state() != state
        if any(param.grad is not None for param in model.parameters()):
            raise ValueError("the program has called backward itself: let it return the loss before")
        if loss.requires_grad:
            (loss / shares).backward()
    after = dict(model.named_parameters())
    found = {name: after[name].grad for name in trained if name in after}
    grads = {
        name: torch.zeros_like(after[name]) if grad is None else grad.to_dense().detach() * shares
        for name, grad in found.items()
    }
    model.zero_grad(set_to_none=True)
    return Plain(
        loss=float(loss.detach()),
        grads=grads,
        without=tuple(name for name in trained if found.get(name) is None),
        replaced=tuple(name for name in {**before, **after} if after.get(name) is not before.get(name)),
        buffers={name: buffer.detach().clone() for name, buffer in model.named_buffers()},
        is_random=is_random,
    )


def run_whole(program: Program, batch: Any, prepare: Prepare = as_it_is) -> Plain:
    """The whole batch in one process, which is a simulated rank: a program may ask for its rank."""
    eps = [0.0]

    def see(saved: Tensor) -> Tensor:
        if saved.dtype in (torch.bfloat16, torch.float16):
            eps.append(torch.finfo(saved.dtype).eps)
        return saved

    def run() -> Plain:
        model = program.make()
        prepare(model)
        with torch.autograd.graph.saved_tensors_hooks(see, lambda saved: saved):
            return run_one(program, model, own_copy(batch))._replace(eps=max(eps))

    return on_ranks(run, 1)[0]


def run_exact(program: Program, batch: Any) -> Grads | None:
    """Gradients of the whole batch in fp64; None if the program does not run in fp64."""
    try:
        return run_whole(program, to_double(batch), nn.Module.double).grads
    except Exception:  # whatever the program says about a dtype that it was not written for
        return None


def run_parts(
    program: Program, parts: Parts, prepare: Prepare = as_it_is, *, in_one_process: bool = False
) -> list[Plain]:
    """What each part gives. Each rank has one copy of the model, for its microbatches in turn."""
    ranks = 1 + parts[-1].rank
    processes = 1 if in_one_process else ranks

    def run_rank(rank: int) -> Iterator[Plain]:
        model = program.make()
        prepare(model)
        mine = [part for part in parts if part.rank == rank]
        for part in mine:
            yield run_one(program, model, own_copy(part.batch), part.draw, shares=len(mine))

    def run() -> list[Plain]:
        return [plain for rank in range(dist.get_rank(), ranks, processes) for plain in run_rank(rank)]

    return [plain for plains in on_ranks(run, processes) for plain in plains]


def mean_of(plains: Sequence[Plain]) -> Grads:
    """The mean over all parts: what data parallelism computes. Half precision is summed in fp32."""

    def mean(name: str, first: Tensor) -> Tensor:
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        for plain in plains[1:]:  # forward may have made or frozen a parameter: later parts have others
            total = total + plain.grads.get(name, 0)
        return total / len(plains)

    return {name: mean(name, grad) for name, grad in plains[0].grads.items()}
