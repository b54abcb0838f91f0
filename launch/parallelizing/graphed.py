"""``graphed``: a training step of any model that ``parallelize`` has wrapped, as a CUDA graph where that is right."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import nn
from torch.optim import Optimizer

from ... import fsdp
from ...ddp import DistributedDataParallel, GraphedTrainingStep
from ...ddp.graphs.auto_step import AutoStep
from ...fsdp import FSDPModule
from ...fsdp.module import root_of

__all__ = ["graphed"]

P = ParamSpec("P")
T = TypeVar("T")


def graphed(
    train_step: Callable[P, T],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    max_graphs: int = 8,
    record_on_cpu: bool = False,
) -> AutoStep[P, T]:
    """A training step that is captured as a CUDA graph where that is right, and stays as it is where not::

        def train_step(batch):                           # the body of the loop
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        train_step = maingrad.graphed(train_step, model, optimizer)
        for batch in data:
            loss = train_step(batch)
            scheduler.step()

    train_step     one whole iteration: microbatches under ``no_sync``, clipping, ``optimizer.step()``, and at its end
                   ``optimizer.zero_grad()``. It takes and returns tensors, alone or in lists, tuples and dicts
    model          what ``parallelize`` returned, or a ``DistributedDataParallel``, or a module of ``fully_shard``
    optimizer      what ``make_optimizer`` returned, or the optimizer of the model otherwise
    max_graphs     how many kinds of calls (shapes, modes, options) have a graph; others run eagerly
    record_on_cpu  on a CPU: record operations in place of a graph, for tests; else a CPU runs ``train_step`` itself

    Calls run eagerly at first. After two calls of a kind in which nothing changed that a replay would not change (no
    random numbers of the host were drawn, no attribute of a module and nothing that the function's code names was
    written), the next one is captured, and later ones are replays. Whatever Python reads is compared before each
    replay. If something differs, the call runs eagerly, and its kind may be captured anew. A function that cannot be
    captured stays eager: the attribute ``why_eager`` and one line of the logger ``maingrad.ddp.graphs.auto_step`` say
    why. A capture that fails (the host reads a value) has run nothing, and the call runs eagerly.

    Results of calls are new tensors without a graph. ``reset()`` frees the graphs: call it before
    ``torch.distributed.destroy_process_group``, where NCCL would wait for them. Collective, as each call is: ranks
    decide together.

    Raises ``TypeError`` for a model that is neither wrapped nor sharded.
    """
    kind: Any
    if isinstance(model, DistributedDataParallel):
        kind, grid, device = GraphedTrainingStep, model.grids["dense"], model.device
    elif isinstance(model, FSDPModule):
        root = root_of(model)
        kind, grid, device = fsdp.GraphedTrainingStep, root.units[0].grid, root.device
    else:
        raise TypeError(
            f"graphed takes the model that parallelize() returned, not {type(model).__name__}: wrap or shard it first"
        )
    if device.type != "cuda" and not record_on_cpu:
        return AutoStep(train_step, None, model, grid, device)
    try:
        graphs = kind(train_step, model, optimizer, max_graphs=max_graphs)
    except (TypeError, ValueError) as error:
        step = AutoStep(train_step, None, model, grid, device)
        step.stop(str(error))
        return step
    return AutoStep(train_step, graphs, model, grid, device)
