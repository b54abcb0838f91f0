"""A model that a program changes at some moment of its training, wrapped, beside the same program in plain PyTorch.

``outcome`` runs both. Either all weights are plain PyTorch's after each step, or the wrapped run ends with an error
that names the changed parameter, before a wrong step.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import Linear

__all__ = ["CHANGES", "MOMENTS", "Changing", "Outcome", "ddp_run", "outcome", "sharded_run", "unfreeze"]

WIDTH = 6


class Changing(nn.Module):
    """Layers of which one is frozen, and which compute in the dtype of their weights."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=fused)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = Linear(WIDTH, WIDTH, fuse_wgrad_accumulation=fused)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x.to(next(layer.parameters()).dtype)).tanh()
        return x * getattr(self.middle, "extra", 1.0)

    def loss_of(self, x: Tensor) -> Tensor:
        """A method that a program calls in place of ``forward``."""
        return (self.forward(x) - 1).square().mean()


def unfreeze(model: Changing) -> None:
    model.frozen.requires_grad_(True)


def freeze(model: Changing) -> None:
    model.first.requires_grad_(False)


def freeze_all(model: Changing) -> None:
    for layer in (model.first, model.middle, model.head):
        layer.requires_grad_(False)


def freeze_and_back(model: Changing) -> None:
    model.middle.requires_grad_(False)
    model.middle.requires_grad_(True)


def replace(model: Changing) -> None:
    model.middle.weight = nn.Parameter(model.middle.weight.detach().clone())


def replace_a_module(model: Changing) -> None:
    model.middle = nn.Linear(WIDTH, WIDTH)


def add(model: Changing) -> None:
    model.middle.extra = nn.Parameter(torch.full((WIDTH,), 0.5))


def tie(model: Changing) -> None:
    model.middle.weight = model.head.weight


def tie_the_frozen(model: Changing) -> None:
    model.frozen.weight = model.head.weight


def cast(model: Changing) -> None:
    model.head.double()


CHANGES: dict[Callable[[Changing], None], tuple[str, ...]] = {
    unfreeze: ("frozen.",),
    freeze: ("first.",),
    freeze_all: ("first.", "middle.", "head."),
    freeze_and_back: (),
    replace: ("middle.weight",),
    replace_a_module: ("middle.",),
    add: ("middle.extra", "'extra' of unit 'middle'"),
    tie: ("middle.weight", "head.weight"),
    tie_the_frozen: ("frozen.weight", "head.weight"),
    cast: ("head.", "the module"),
}
"""What a program changes, and the names of which a refusal says one; none: it must be right."""

MOMENTS = ("bare", "no_grad", "eval", "between microbatches", "before backward", "after backward")
"""After a forward that has no backward, in which gradients are on or off; or within an iteration."""


class Run(NamedTuple):
    """A model as a program trains it."""

    module: nn.Module
    """Holds the parameters that the program changes."""
    loss_of: Callable[[Tensor], Tensor]
    no_sync: Callable[[], Any]
    step: Callable[[], None]
    """The end of an iteration."""
    weights: Callable[[], dict[str, Tensor]]


class Outcome(NamedTuple):
    """What one rank has seen."""

    weights: list[dict[str, Tensor]]
    """After each complete step."""
    error: str | None


def run_program(
    run: Run,
    batches: list[list[Tensor]],
    change: Callable[[Any], None],
    moment: str,
    last: Callable[[Run, Tensor], None] | None,
) -> Outcome:
    """Three iterations of two microbatches. The change comes in the second, whose last backward may be ``last``."""
    seen: list[dict[str, Tensor]] = []
    try:
        for step, (one, two) in enumerate(batches):
            now = moment if step == 1 else None
            if now == "bare":
                run.loss_of(one)
            elif now in ("no_grad", "eval"):
                run.module.train(now != "eval")
                with torch.no_grad() if now == "no_grad" else nullcontext():
                    run.loss_of(one)
                run.module.train()
            if now in ("bare", "no_grad", "eval"):
                change(run.module)
            with run.no_sync():
                (run.loss_of(one) / 2).backward()
            if now == "between microbatches":
                change(run.module)
            loss = run.loss_of(two) / 2
            if now == "before backward":
                change(run.module)
            if last is not None and step == 1:
                last(run, loss)
            else:
                loss.backward()
            if now == "after backward":
                change(run.module)
            run.step()
            seen.append(run.weights())
    except RuntimeError as error:
        return Outcome(seen, str(error))
    return Outcome(seen, None)


def batches_of(rank: int) -> list[list[Tensor]]:
    """One rank's two microbatches of each of three steps."""
    generator = torch.Generator().manual_seed(rank)
    return [[torch.randn(3, WIDTH, generator=generator) for _ in range(2)] for _ in range(3)]


SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().double().clone() for name, param in module.named_parameters()}


def plain_run(ranks: int) -> tuple[Run, list[list[Tensor]]]:
    """The model in plain PyTorch, and the batches of all ranks."""
    model = Changing(fused=False)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    run = Run(model, model.loss_of, nullcontext, step, lambda: weights_of(model))
    of_ranks = zip(*map(batches_of, range(ranks)), strict=True)
    everyones = [[torch.cat(parts) for parts in zip(*steps, strict=True)] for steps in of_ranks]
    return run, everyones


def ddp_run(*, by_method: bool = False, **config: Any) -> Callable[[], Run]:
    """The model in ``DistributedDataParallel``: under ZeRO-1 with its optimizer, else with a stock one."""

    def make() -> Run:
        model = Changing(fused=True)
        ddp = DistributedDataParallel(model, DistributedDataParallelConfig(bucket_size=40, **config))
        sharded = ddp.ddp_config.use_distributed_optimizer
        if sharded:
            optimizer: Any = DistributedOptimizer(ddp, optimizer_class=torch.optim.SGD, **SGD)
        else:
            optimizer = torch.optim.SGD(model.parameters(), **SGD)

        def step() -> None:
            ddp.finish_grad_sync()
            if not sharded:
                ddp.expose_grads()
            optimizer.step()
            ddp.zero_grad_buffer()

        def loss_of(x: Tensor) -> Tensor:
            return ddp.loss_of(x) if by_method else (ddp(x) - 1).square().mean()

        return Run(model, loss_of, ddp.no_sync, step, lambda: weights_of(model))

    return make


def sharded_run(placements: str, *, by_method: bool = False, **options: Any) -> Callable[[], Run]:
    """The model fully sharded, its layers as units of their own."""

    def make() -> Run:
        model: Any = Changing(fused=False)
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (2, size // 2)) if placements.startswith("hsdp") else None
        layers = list(model.children())
        for layer in layers if by_method else layers[:-1]:  # a method runs outside the outermost unit's forward
            fully_shard(layer, mesh, placements, **options)
        fully_shard(model, mesh, placements, **options)
        optimizer = torch.optim.SGD(model.parameters(), **SGD)

        def step() -> None:
            model.finish_grad_sync()
            optimizer.step()
            optimizer.zero_grad()

        def weights() -> dict[str, Tensor]:
            with model.unsharded():
                return weights_of(model)

        def loss_of(x: Tensor) -> Tensor:
            return model.loss_of(x) if by_method else (model(x) - 1).square().mean()

        return Run(model, loss_of, model.no_sync, step, weights)

    return make


def outcome(
    make: Callable[[], Run],
    change: Callable[[Any], None],
    moment: str,
    *,
    ranks: int = 2,
    last: Callable[[Run, Tensor], None] | None = None,
) -> str:
    """ "served" or "refused". Raises ``AssertionError`` for anything else."""
    plain = run_program(*plain_run(ranks), change, moment, last)

    def on_rank() -> Outcome:
        return run_program(make(), batches_of(dist.get_rank()), change, moment, last)

    found = simulate(on_rank, ranks)
    for seen in found:
        for step, (mine, wanted) in enumerate(zip(seen.weights, plain.weights, strict=False)):
            for name, weight in wanted.items():
                assert torch.allclose(mine[name], weight, rtol=1e-4, atol=1e-6), f"step {step}: {name} differs"
    error = found[0].error
    assert {seen.error is None for seen in found} == {error is None}, f"ranks disagree: {found}"
    if error == plain.error:  # a model that is frozen as a whole has no gradient in plain PyTorch either
        return "served"
    assert error is not None, f"plain PyTorch raises {plain.error}"
    names = CHANGES.get(change, ())
    assert any(name in error for name in names), error
    return "refused"
