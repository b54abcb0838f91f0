"""Our own rows of ``bench data-parallel``, and the floors that ratios are taken over.

A row's ``build`` makes a training step and all that the step needs. ``close`` frees what the process still keeps.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ....ddp import WORLD_OF_ONE, DistributedDataParallel, GraphedTrainingStep
from ....ddp.contract.main_grad import absorb_grad, attach
from ....ddp.contract.record import GradRecord
from ....ddp.graphs.capture import CapturedGraph, GraphPool
from ....ddp.torch_internals.distributed import zero_cta_options
from ...parallelizing.make_optimizer import make_optimizer
from ...parallelizing.parallelize import parallelize
from ..steps import accumulate, random_tokens, stepping
from .model import GPT, AddmmLinear, Setting, fused_linear, make_model, plain_linear

__all__ = [
    "FLOOR",
    "LEARNING_RATE",
    "OURS",
    "PEER_FLOOR",
    "Case",
    "Row",
    "Step",
    "refuse_copy_engines",
    "refuse_graphs",
    "refuse_instances",
    "reset_compiler",
    "row_of",
]

FLOOR = "floor"
PEER_FLOOR = "peer_floor"
LEARNING_RATE = 1e-4

Step = Callable[[], Tensor]
"""One training step; returns the last microbatch's loss, detached."""


class _OnDevice(Protocol):
    @property
    def device(self) -> torch.device: ...


class Case(NamedTuple):
    """The setting, ranks and device that a row is built for."""

    setting: Setting
    rank: int
    num_ranks: int
    device: torch.device
    ours: Mapping[str, Any] = {}
    """Fields of ``DistributedDataParallelConfig`` for all our rows; sharded units use ``bucket_size`` alone."""

    def tokens(self) -> Tensor:
        """This rank's tokens [M, 1, T + 1]."""
        return random_tokens(self.setting, self.rank, self.device)


class Row(NamedTuple):
    """One contender."""

    label: str
    build: Callable[[Case], Step]
    with_groups: bool = True
    """Whether the row's ranks communicate; otherwise each rank is a world of one."""
    close: Callable[[], None] = lambda: None
    """Frees what the row left in the process. Called before the row's process groups end."""
    trains: bool = True
    """Whether the row trains the model, so that its loss falls as the other rows'."""
    refuse: Callable[[Case], str | None] = lambda _: None
    """Why the row cannot be measured in this case; None if it can."""


# ---- Floors: the same work without a collective. ----


def _build_floor(case: Case, *, compiled: bool = False, graphed: bool = False) -> Step:
    """Our wrapper and modules in a world of one.

    AdamW updates a rank's shard of each bucket; then the shard is rounded to bf16.
    """
    model = make_model(case.setting, fused_linear, torch.bfloat16, case.device)
    if compiled:
        model.compile_parts()
    ddp = DistributedDataParallel(model, process_group=WORLD_OF_ONE)
    shards = [bucket.grad_data[: bucket.grad_data.numel() // case.num_ranks] for bucket in ddp.buckets]
    masters = [nn.Parameter(torch.zeros_like(shard)) for shard in shards]
    rounded = [torch.empty_like(shard, dtype=torch.bfloat16) for shard in shards]  # in place of the parameters
    for master, shard in zip(masters, shards, strict=True):
        master.grad = shard
    adamw = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=True, capturable=graphed)
    tokens = case.tokens()

    def step() -> Tensor:
        ddp.zero_grad_buffer()
        loss = accumulate(ddp, tokens, not_last=ddp.no_sync)
        ddp.finish_grad_sync()
        adamw.step()
        for master, place in zip(masters, rounded, strict=True):
            place.copy_(master.detach())
        return loss

    return _replayed(step, case.device) if graphed else step


def _replayed(step: Step, device: torch.device) -> Step:
    """The step as one graph: captured in its third call, and nothing but kernels afterwards."""
    pool = GraphPool(device)
    graph = CapturedGraph(pool)
    losses: list[Tensor] = []  # of the eager calls, then of the capture

    def run() -> Tensor:
        with pool.on_stream():
            if len(losses) < 2:
                losses.append(step())
                return losses[-1]
            if not graph.is_captured:
                with graph.capture():
                    losses.append(step())
            graph.replay()
        return losses[-1]

    return run


def _build_peer_floor(case: Case) -> Step:
    """No wrapper: ``addmm`` into one accumulator for each parameter; AdamW on one tensor of a rank's share."""
    model = make_model(case.setting, AddmmLinear.make, torch.bfloat16, case.device)
    totals = []
    for name, parameter in model.named_parameters():
        totals.append(torch.zeros(parameter.shape, device=case.device))
        record = GradRecord(name, totals[-1], first_write_overwrites=False, shared=False)
        attach(parameter, record)
        parameter.register_post_accumulate_grad_hook(lambda weight, record=record: absorb_grad(weight, record))
    share = sum(total.numel() for total in totals) // case.num_ranks
    master = nn.Parameter(torch.zeros(share, device=case.device))
    master.grad = torch.zeros(share, device=case.device)
    adamw = torch.optim.AdamW([master], lr=LEARNING_RATE, fused=True)
    tokens = case.tokens()

    def step() -> Tensor:
        for total in totals:
            total.zero_()
        loss = accumulate(model, tokens)
        adamw.step()
        return loss

    return step


# ---- Ours. ----


def _build_ours(
    case: Case,
    *,
    parallel: str = "zero1",
    fused: bool = True,
    compiled: bool = False,
    graphed: bool = False,
    **options: Any,
) -> Step:
    """options  fields of ``DistributedDataParallelConfig`` beside those of ``parallelize``"""
    model: GPT = make_model(case.setting, fused_linear if fused else plain_linear, torch.bfloat16, case.device)
    if compiled:
        model.compile_parts()
    ddp: Any = parallelize(model, parallel, fuse=False, **options, **case.ours)  # the model has its fused layers
    optimizer = make_optimizer(ddp, lr=LEARNING_RATE)
    train_step = stepping(partial(accumulate, ddp, not_last=ddp.no_sync), optimizer)
    return partial(GraphedTrainingStep(train_step, ddp, optimizer) if graphed else train_step, case.tokens())


def refuse_copy_engines(case: _OnDevice) -> str | None:
    """Why gathers cannot run on copy engines; None if they can."""
    if case.device.type == "cuda" and zero_cta_options() is not None:
        return None
    return "gathers on copy engines need CUDA devices, and a torch that knows NCCL's zero-CTA policy"


def refuse_instances(case: Case) -> str | None:
    """Why the ranks cannot form two instances; None if they can."""
    if case.num_ranks >= 4 and case.num_ranks % 2 == 0:
        return None
    return "two instances of two or more ranks each need 4 ranks, or a larger even number"


def refuse_graphs(case: _OnDevice) -> str | None:
    return None if case.device.type == "cuda" else "CUDA graphs need CUDA devices"


def reset_compiler() -> None:
    """Drop compiled graphs, which hold the model that they were compiled for."""
    torch._dynamo.reset()


def row_of(
    label: str,
    build: Callable[..., Step],
    *,
    refuse: Callable[[Case], str | None] = lambda _: None,
    **options: Any,
) -> Row:
    """A row whose ``build`` takes ``options``. ``compiled`` and ``graphed`` leave graphs, which ``close`` drops."""
    row = Row(label, partial(build, **options), refuse=refuse)
    return row._replace(close=reset_compiler) if options.get("compiled") or options.get("graphed") else row


OURS: Mapping[str, Row] = {
    FLOOR: Row("our floor: no collectives", _build_floor, with_groups=False, trains=False),
    PEER_FLOOR: Row("peers' floor: no collectives", _build_peer_floor, with_groups=False, trains=False),
    "zero1": Row("maingrad ZeRO-1", _build_ours),
    **{
        f"floor{name}_graphed": Row(
            f"our floor{label}, one CUDA graph",
            partial(_build_floor, compiled=bool(name), graphed=True),
            with_groups=False,
            trains=False,
            close=reset_compiler,
            refuse=refuse_graphs,
        )
        for name, label in (("", ""), ("_compiled", " under torch.compile"))
    },
    "zero1_copy_engines": row_of(
        "maingrad ZeRO-1, gathers on copy engines",
        _build_ours,
        copy_engine_param_gather=True,
        refuse=refuse_copy_engines,
    ),
    "zero1_bf16_wire": row_of("maingrad ZeRO-1, bf16 wire", _build_ours, grad_reduce_wire_dtype=torch.bfloat16),
    "zero1_no_overlap": row_of(
        "maingrad ZeRO-1, no overlap", _build_ours, overlap_grad_reduce=False, overlap_param_gather=False
    ),
    "zero1_unfused": row_of("maingrad ZeRO-1, nn.Linear", _build_ours, fused=False),
    "zero1_compiled": row_of("maingrad ZeRO-1, blocks under torch.compile", _build_ours, compiled=True),
    **{
        f"zero1{name}_graphed{suffix}": row_of(
            f"maingrad ZeRO-1{label}, one CUDA graph{way}",
            _build_ours,
            compiled=bool(name),
            graphed=True,
            copy_engine_param_gather=bool(suffix),
            refuse=refuse_copy_engines if suffix else refuse_graphs,
        )
        for suffix, way in (("", ""), ("_copy_engines", ", gathers on copy engines"))
        for name, label in (("", ""), ("_compiled", ", blocks under torch.compile"))
    },
    "hybrid": row_of(
        "maingrad hybrid, two instances",
        _build_ours,
        num_distributed_optimizer_instances=2,
        refuse=refuse_instances,
    ),
    "ddp": row_of("maingrad DDP", _build_ours, parallel="ddp"),
}
"""Rows by name, in measuring order. Ratios are over the first row."""
