"""What a run would allocate, from shapes alone: buckets, padding, bytes per rank. No process group, no storage."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from rich.table import Table

from ..ddp.layout import BucketLayout, BufferLayout, GradPlan
from ..ddp.wiring import find_owned_params, plan_model
from .config import Config
from .model import GPT

__all__ = ["RankBytes", "RunPlan", "plan_run", "plan_tables"]


class RankBytes(NamedTuple):
    """Bytes on one rank, padding included."""

    parameters: int
    gradients: int
    masters: int
    """fp32 copies of half-precision parameters; 0 where parameters are fp32 themselves."""
    moments: int
    """First and second moments of AdamW, fp32."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class RunPlan(NamedTuple):
    """The gradient plan of a configuration on so many ranks."""

    gradients: GradPlan
    ranks: int
    num_parameters: int
    sharded: bool
    """Gradients are reduce-scattered and optimizer state is sharded; otherwise all-reduced and whole on each rank."""

    @property
    def rank_bytes(self) -> RankBytes:
        """What each rank holds; the same on all of them, since shards are equal."""
        parameters = gradients = masters = moments = 0
        for buffer in self.gradients.buffers:
            owned = buffer.numel // self.ranks if self.sharded else buffer.numel
            parameters += buffer.numel * buffer.param_dtype.itemsize
            gradients += buffer.numel * buffer.grad_dtype.itemsize
            masters += 4 * owned if buffer.param_dtype.itemsize < 4 else 0
            moments += 2 * 4 * owned
        return RankBytes(parameters, gradients, masters, moments)


def plan_run(config: Config, ranks: int) -> RunPlan:
    """Build the model on the meta device and lay out its gradients for ``ranks`` data-parallel ranks.

    Raises ``ConfigError`` where the global batch does not divide between so many ranks.
    """
    config.train.sequences_per_microbatch(ranks)
    owned = find_owned_params(GPT(config.model, torch.device("meta")))
    plan = plan_model(owned, config.ddp, shard_degree=ranks)
    return RunPlan(plan, ranks, sum(entry.param.numel() for entry in owned), config.ddp.use_distributed_optimizer)


def plan_tables(plan: RunPlan) -> Iterator[Table]:
    """The buckets in launch order, then bytes per rank."""
    yield _bucket_table(plan)
    yield _bytes_table(plan)


def format_bytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _bucket_table(plan: RunPlan) -> Table:
    collective = "reduce-scatter" if plan.sharded else "all-reduce"
    table = Table(
        title=f"{len(plan.gradients.buckets)} buckets in launch order, {collective} over {plan.ranks} ranks",
        title_justify="left",
    )
    table.add_column("#", justify="right")
    table.add_column("parameters", overflow="fold")
    for heading in ("elements", "padding", "gradients", "per rank"):
        table.add_column(heading, justify="right", no_wrap=True)
    buffer_of = {bucket.index: buffer for buffer in plan.gradients.buffers for bucket in buffer.buckets}
    for bucket in plan.gradients.buckets:
        table.add_row(*_bucket_row(bucket, buffer_of[bucket.index], sharded=plan.sharded))
    table.add_section()
    numel, padding = plan.gradients.numel, plan.gradients.padding
    table.add_row("", f"{plan.num_parameters:,} parameters", f"{numel:,}", f"{padding:,} ({padding / numel:.1%})")
    return table


def _bucket_row(bucket: BucketLayout, buffer: BufferLayout, *, sharded: bool) -> tuple[str, ...]:
    first, last = bucket.slots[0].spec.name, bucket.slots[-1].spec.name
    nbytes = bucket.numel * buffer.grad_dtype.itemsize
    return (
        str(bucket.index),
        first if len(bucket.slots) == 1 else f"{first} .. {last} ({len(bucket.slots)})",
        f"{bucket.numel:,}",
        f"{bucket.padding:,}",
        f"{format_bytes(nbytes)} {_name(buffer.grad_dtype)}",
        format_bytes(nbytes / bucket.shard_degree if sharded else nbytes),
    )


def _bytes_table(plan: RunPlan) -> Table:
    one = RunPlan(plan.gradients, 1, plan.num_parameters, sharded=False).rank_bytes
    mine = plan.rank_bytes
    dtypes = plan.gradients.buffers[0]
    table = Table(title=f"bytes on each of {plan.ranks} ranks", title_justify="left")
    table.add_column("what")
    table.add_column("dtype")
    table.add_column("per rank", justify="right", no_wrap=True)
    table.add_column("unsharded", justify="right", no_wrap=True)
    rows = (
        ("parameters", _name(dtypes.param_dtype), mine.parameters, one.parameters),
        ("gradients", _name(dtypes.grad_dtype), mine.gradients, one.gradients),
        ("optimizer: masters", "float32", mine.masters, one.masters),
        ("optimizer: moments", "float32", mine.moments, one.moments),
    )
    for what, dtype, here, unsharded in rows:
        table.add_row(what, dtype, format_bytes(here), format_bytes(unsharded))
    table.add_section()
    table.add_row("total", "", format_bytes(mine.total), format_bytes(one.total))
    return table


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
