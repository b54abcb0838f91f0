"""What a run would allocate, from shapes alone: buckets, padding, bytes per rank. No process group, no storage."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from rich.table import Table

from ..ddp.layout import BucketLayout, BufferLayout, GradPlan
from ..ddp.wiring import find_owned_params, plan_model
from .config import Config, ModelConfig
from .model import GPT

__all__ = ["ParameterCount", "RankBytes", "RunPlan", "count_parameters", "plan_run", "plan_tables"]


class ParameterCount(NamedTuple):
    """Elements of a model's parameters, a shared one counted once."""

    total: int
    experts: int
    """Of all experts of all blocks."""
    routers: int
    shared_experts: int
    active: int
    """Those that work on one token: of the experts, the ones that it is sent to."""


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
    parameters: ParameterCount
    sharded: bool
    """Gradients are reduce-scattered and optimizer state is sharded; otherwise all-reduced and whole on each rank."""
    model: ModelConfig

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, without padding."""
        return self.parameters.total

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
    model = GPT(config.model, torch.device("meta"))
    plan = plan_model(find_owned_params(model), config.wrapper_config, shard_degree=ranks)
    return RunPlan(plan, ranks, _count(model), config.parallel != "ddp", config.model)


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Of the model of ``config``, from shapes alone."""
    return _count(GPT(config, torch.device("meta")))


def _count(model: GPT) -> ParameterCount:
    def below(path: str) -> int:
        return sum(parameter.numel() for name, parameter in model.named_parameters() if path in name)

    config = model.config
    experts = below(".ffn.experts.")
    idle = experts - experts * config.top_k // config.num_experts if config.num_experts else 0
    total = below("")
    return ParameterCount(total, experts, below(".ffn.router."), below(".ffn.shared."), total - idle)


def plan_tables(plan: RunPlan) -> Iterator[Table]:
    """The experts, if there are any; the buckets in launch order; bytes per rank."""
    if plan.model.num_experts:
        yield _experts_table(plan.model, plan.parameters)
    yield _bucket_table(plan)
    yield _bytes_table(plan)


def format_bytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _experts_table(model: ModelConfig, count: ParameterCount) -> Table:
    blocks = sum(model.has_experts(index) for index in range(model.num_layers))
    table = Table(
        title=f"{model.num_experts} experts in {blocks} of {model.num_layers} blocks, {model.top_k} for each token",
        title_justify="left",
    )
    table.add_column("parameters")
    table.add_column("all", justify="right", no_wrap=True)
    table.add_column("active in a token", justify="right", no_wrap=True)
    chosen = count.experts * model.top_k // model.num_experts
    table.add_row(f"experts, {model.expert_ffn_dim} wide", f"{count.experts:,}", f"{chosen:,}")
    if model.shared_expert_ffn_dim:
        shared = f"{count.shared_experts:,}"
        table.add_row(f"shared expert, {model.shared_expert_ffn_dim} wide", shared, shared)
    table.add_row(f"routers, {model.router_dtype}", f"{count.routers:,}", f"{count.routers:,}")
    rest = f"{count.total - count.experts - count.shared_experts - count.routers:,}"
    table.add_row("everything else", rest, rest)
    table.add_section()
    table.add_row("total", f"{count.total:,}", f"{count.active:,}")
    return table


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
    one = plan._replace(ranks=1, sharded=False).rank_bytes
    mine = plan.rank_bytes
    param_dtypes = _names(buffer.param_dtype for buffer in plan.gradients.buffers)
    grad_dtypes = _names(buffer.grad_dtype for buffer in plan.gradients.buffers)
    table = Table(title=f"bytes on each of {plan.ranks} ranks", title_justify="left")
    table.add_column("what")
    table.add_column("dtype")
    table.add_column("per rank", justify="right", no_wrap=True)
    table.add_column("unsharded", justify="right", no_wrap=True)
    rows = (
        ("parameters", param_dtypes, mine.parameters, one.parameters),
        ("gradients", grad_dtypes, mine.gradients, one.gradients),
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


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(dict.fromkeys(map(_name, dtypes)))
