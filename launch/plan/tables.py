"""What ``maingrad plan`` prints: placements, buckets, the collectives of a step, bytes on a rank."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from rich.table import Column, Table

from .plan import RunPlan

__all__ = ["format_bytes", "numbers", "plan_tables", "table_of", "texts"]


def plan_tables(plan: RunPlan) -> Iterator[Table]:
    """The tables in printing order: experts (if there are any), placements, buckets, collectives, bytes.

    Buckets of ``ddp``, ``zero1`` and ``hybrid`` are listed in launch order; those of a fully sharded run by units, in
    the order in which a forward enters them.
    """
    if plan.config.model.num_experts:
        yield _experts_table(plan)
    yield _placements_table(plan)
    yield _buckets_table(plan)
    yield _collectives_table(plan)
    if plan.exchanges:
        yield _exchanges_table(plan)
    yield _bytes_table(plan)


def format_bytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


# ---- Tables by columns. ----


Cells = tuple[Column, Sequence[str]]
"""A column of a table, and its cells. What all of them are together is the column's footer."""


def texts(heading: str, cells: Sequence[str], total: str = "") -> Cells:
    """A column of words."""
    return Column(heading, total, overflow="fold"), cells


def numbers(heading: str, cells: Sequence[str], total: str = "") -> Cells:
    """A column of numbers."""
    return Column(heading, total, justify="right", no_wrap=True), cells


def _counts(heading: str, counts: Sequence[int]) -> Cells:
    return numbers(heading, [f"{count:,}" for count in counts], f"{sum(counts):,}")


def _bytes(heading: str, counts: Sequence[int]) -> Cells:
    return numbers(heading, [format_bytes(count) for count in counts], format_bytes(sum(counts)))


def table_of(title: str, *columns: Cells) -> Table:
    """A table of columns of equal length."""
    table = Table(*(column for column, _ in columns), title=title, title_justify="left", min_width=min(len(title), 100))
    table.show_footer = any(column.footer for column, _ in columns)
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*row)
    return table


# ---- The tables. ----


def _experts_table(plan: RunPlan) -> Table:
    model, count = plan.config.model, plan.parameters
    blocks = sum(model.has_experts(index) for index in range(model.num_layers))
    rest = count.total - count.experts - count.shared_experts - count.routers
    rows = [
        (f"experts, {model.expert_ffn_dim} wide", count.experts, count.experts * model.top_k // model.num_experts),
        (f"shared expert, {model.shared_expert_ffn_dim} wide", count.shared_experts, count.shared_experts),
        (f"routers, {model.router_dtype}", count.routers, count.routers),
        ("everything else", rest, rest),
    ]
    names, every, active = zip(*(row for row in rows if row[1]), strict=True)
    return table_of(
        f"{model.num_experts} experts in {blocks} of {model.num_layers} blocks, {model.top_k} for each token",
        texts("parameters", names, "total"),
        _counts("all", every),
        _counts("active in a token", active),
    )


def _placements_table(plan: RunPlan) -> Table:
    inner, outer = plan.placements
    instances = plan.config.num_instances
    over = f"over the {plan.inner_size} ranks of an instance" if instances > 1 else f"over {plan.inner_size} ranks"
    columns = [texts("at rest", inner._fields), texts(over, [kind.value for kind in inner])]
    if instances > 1:
        columns.append(texts(f"over {instances} instances", [kind.value for kind in outer]))
    return table_of(f'parallel = "{plan.config.parallel}" on {plan.ranks} ranks{plan.config.mesh.said}', *columns)


def _buckets_table(plan: RunPlan) -> Table:
    """One line per bucket. A unit has separate buckets for delayed parameters and for each parameter dtype."""
    buckets, layouts = plan.buckets, [bucket.layout for bucket in plan.buckets]
    title, names = f"{len(buckets)} buckets in launch order", []
    if plan.config.fully_sharded:
        title = f"{len(plan.units)} units in the order of a forward, {len(buckets)} buckets"
    for layout in layouts:
        first, last = layout.slots[0].spec.name, layout.slots[-1].spec.name
        held = first if len(layout.slots) == 1 else f"{first} .. {last} ({len(layout.slots)})"
        names.append(held + ", delayed" * layout.delayed)
    padding = [layout.padding for layout in layouts]
    share = f"{sum(padding):,} ({sum(padding) / sum(layout.numel for layout in layouts):.1%})"
    table = table_of(
        title,
        texts(_row_heading(plan), [unit.title for unit in plan.units for _ in unit.buckets]),
        texts("parameters", names, f"{plan.parameters.total:,} parameters"),
        _counts("elements", [layout.numel for layout in layouts]),
        numbers("padding", [f"{count:,}" for count in padding], share),
        _bytes("weights", [bucket.param_nbytes for bucket in buckets]),
        _bytes("gradients", [bucket.grad_nbytes for bucket in buckets]),
        _bytes("fp32 shard", [bucket.shard_nbytes for bucket in buckets]),
    )
    if plan.muon is not None:
        table.caption = (
            f"Muon: the largest rank's iterations take {plan.muon.largest_over_mean:.3f} of the mean; padding beside "
            f"matrices: {plan.muon.padding_share:.1%}"
        )
        table.caption_justify = "left"
    return table


def _collectives_table(plan: RunPlan) -> Table:
    """Bytes of each unit. Columns in which nothing is sent are left out."""
    units, config = plan.units, plan.config
    ranks, instances = f"over {plan.inner_size} ranks", f"over {config.num_instances} instances"
    wire = plan.buckets[0].wire_dtype
    inside = "all-reduce" if wire is None else f"all-to-all in {_name(wire)}"
    if wire is None and plan.placements.inner.scatters:
        inside = "reduce-scatter"
    across = "reduce-scatter" if plan.placements.outer.scatters else "all-reduce"
    columns = [texts(_row_heading(plan), [unit.title for unit in units])]
    title = "bytes that each rank sends in a step"
    if config.fully_sharded:
        title += f" of {config.train.num_microbatches} microbatch(es)"
        title += "; collectives are counted for each bucket" if len(plan.buckets) > len(units) else ""
        if config.optimizer.has_muon:
            title += "; not counted: 6 to 8 for each element of a matrix that shards cut, for Muon"
        columns += [
            numbers("gathers in\nforward", [str(unit.gathers_in_forward) for unit in units]),
            numbers("gathers in\nbackward", [str(unit.gathers_in_backward) for unit in units]),
            numbers("reductions", [", ".join(map(str, dict.fromkeys(unit.reductions))) for unit in units]),
        ]
    elif plan.placements.inner.gathers:
        under = "under the next forward" if config.ddp.overlap_param_gather else "in the optimizer's step"
        title += f"; parameters are gathered bottom up, {under}"
    if config.mesh.tp > 1 and config.fully_sharded:
        title += "; not counted: the mean over tensor-parallel ranks of shards that are not cut"
    elif config.mesh.tp > 1:
        title += f"; of parameters that are not cut, over {config.mesh.tp} times as many ranks"
    if config.mesh.ep > 1:
        title += f"; of experts, over {plan.inner_size // config.mesh.ep} rank(s)"
    traffic = [unit.traffic for unit in units]
    sent = {
        f"all-gather\n{ranks}": [each.gather for each in traffic],
        f"all-gather\n{instances}": [each.gather_across for each in traffic],
        f"{inside}\n{ranks}": [each.reduce_inside for each in traffic],
        f"{across}\n{instances}": [each.reduce_across for each in traffic],
        "scratch in flight": [each.scratch for each in traffic],
    }
    columns += [_bytes(heading, counts) for heading, counts in sent.items() if any(counts)]
    return table_of(title, *columns)


def _exchanges_table(plan: RunPlan) -> Table:
    exchanges = plan.exchanges
    return table_of(
        "bytes that each rank sends in a step to those that compute its samples or hold its experts with it, without "
        "recomputation",
        texts("what", [each.what for each in exchanges]),
        numbers("ranks", [str(each.ranks) for each in exchanges]),
        _counts("collectives", [each.calls for each in exchanges]),
        _bytes("bytes", [each.nbytes for each in exchanges]),
    )


def _bytes_table(plan: RunPlan) -> Table:
    config = plan.config
    pp = config.mesh.pp
    title = f"bytes on each of {plan.ranks // pp} ranks"
    title += f" of stage {plan.stage.index + 1} of {pp}, the fullest" * (pp > 1)
    if config.fsdp.offload_to_cpu:
        title += "; masters, moments and a copy of gradient shards are in host memory"
    param_dtypes = _names(bucket.param_dtype for bucket in plan.buckets)
    grad_dtypes = _names(bucket.grad_dtype for bucket in plan.buckets)
    settings = config.optimizer
    kept = ("remainders", settings.moment_dtype) if settings.state == "compact" else ("float32", "float32")
    table = table_of(
        title,
        texts("what", ["parameters", "gradients", "optimizer: masters", "optimizer: moments"], "total"),
        texts("dtype", [param_dtypes, grad_dtypes, *kept]),
        _bytes("bytes", plan.rank_bytes),
    )
    if config.fully_sharded:
        peaks = format_bytes(plan.peak_params), format_bytes(plan.peak_grads)
        table.caption, table.caption_justify = "gathered, at most: {}; unreduced, at most: {}".format(*peaks), "left"
    return table


def _row_heading(plan: RunPlan) -> str:
    return "unit" if plan.config.fully_sharded else "#"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(dict.fromkeys(map(_name, dtypes)))
