"""What ``maingrad plan`` prints: placements, buckets, the collectives of a step, bytes on a rank."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from rich.table import Table

from ...ddp.plan.layout import BucketLayout
from .plan import RunPlan, UnitsPlan

__all__ = ["Column", "format_bytes", "plan_tables", "table_of"]


def plan_tables(plan: RunPlan | UnitsPlan) -> Iterator[Table]:
    """The tables in printing order: experts (if there are any), placements, buckets, collectives, bytes.

    A plan for ``ddp``, ``zero1`` or ``hybrid`` lists buckets in launch order. A plan of a fully sharded run lists units
    instead, in the order in which a forward enters them.
    """
    if plan.model.num_experts:
        yield _experts_table(plan)
    yield _placements_table(plan)
    if isinstance(plan, UnitsPlan):
        yield _units_table(plan)
        yield _unit_collectives_table(plan)
    else:
        yield _bucket_table(plan)
        yield _collectives_table(plan)
    yield _bytes_table(plan)


def format_bytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


# ---- Tables by columns. ----


class Column(NamedTuple):
    """A column of a table."""

    heading: str
    cells: Sequence[str]
    total: str = ""
    """Below a line; "": none."""
    is_text: bool = False


def _texts(heading: str, cells: Sequence[str], total: str = "") -> Column:
    return Column(heading, cells, total, is_text=True)


def _counts(heading: str, counts: Sequence[int], total: bool = True) -> Column:
    return Column(heading, [f"{count:,}" for count in counts], f"{sum(counts):,}" if total else "")


def _bytes(heading: str, counts: Sequence[float], total: bool = True) -> Column:
    return Column(heading, [format_bytes(count) for count in counts], format_bytes(sum(counts)) if total else "")


def table_of(title: str, *columns: Column) -> Table:
    """A table of columns of equal length."""
    table = Table(title=title, title_justify="left", min_width=min(len(title), 100))
    for column in columns:
        if column.is_text:
            table.add_column(column.heading, overflow="fold")
        else:
            table.add_column(column.heading, justify="right", no_wrap=True)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    if any(column.total for column in columns):
        table.add_section()
        table.add_row(*(column.total for column in columns))
    return table


def _layout_columns(layouts: Sequence[BucketLayout], num_parameters: int) -> list[Column]:
    """Names of the parameters, elements and padding of buckets."""
    names = []
    for layout in layouts:
        first, last = layout.slots[0].spec.name, layout.slots[-1].spec.name
        held = first if len(layout.slots) == 1 else f"{first} .. {last} ({len(layout.slots)})"
        names.append(held + ", delayed" * layout.delayed)
    elements = _counts("elements", [layout.numel for layout in layouts])
    padding = [layout.padding for layout in layouts]
    share = f"{sum(padding):,} ({sum(padding) / sum(layout.numel for layout in layouts):.1%})"
    return [
        _texts("parameters", names, f"{num_parameters:,} parameters"),
        elements,
        _counts("padding", padding)._replace(total=share),
    ]


# ---- The tables. ----


def _experts_table(plan: RunPlan | UnitsPlan) -> Table:
    model, count = plan.model, plan.parameters
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
        _texts("parameters", names, "total"),
        _counts("all", every),
        _counts("active in a token", active),
    )


def _placements_table(plan: RunPlan | UnitsPlan) -> Table:
    inner, outer = plan.placements
    several = plan.outer_size > 1
    over = f"over the {plan.inner_size} ranks of an instance" if several else f"over {plan.ranks} ranks"
    columns = [_texts("at rest", inner._fields), _texts(over, [kind.value for kind in inner])]
    if several:
        columns.append(_texts(f"over {plan.outer_size} instances", [kind.value for kind in outer]))
    return table_of(f'parallel = "{plan.parallel}" on {plan.ranks} ranks', *columns)


def _bucket_table(plan: RunPlan) -> Table:
    buckets = plan.gradients.buckets
    dtypes = [bucket.slots[0].spec.grad_dtype for bucket in buckets]
    nbytes = [bucket.numel * dtype.itemsize for bucket, dtype in zip(buckets, dtypes, strict=True)]
    reduction = f"{_collective(plan)} over {plan.inner_size} ranks"
    if plan.outer_size > 1:
        reduction += f", all-reduce over {plan.outer_size} instances"
    return table_of(
        f"{len(buckets)} buckets in launch order, {reduction}",
        Column("#", [str(bucket.index) for bucket in buckets]),
        *_layout_columns(buckets, plan.parameters.total),
        Column("gradients", [f"{format_bytes(n)} {_name(dtype)}" for n, dtype in zip(nbytes, dtypes, strict=True)]),
        _bytes("per rank", [n / b.shard_degree for n, b in zip(nbytes, buckets, strict=True)], total=False),
    )


def _collectives_table(plan: RunPlan) -> Table:
    """Reductions run from the top line to the bottom line, all-gathers from the bottom line to the top line."""
    buckets = plan.gradients.buckets
    traffic = [plan.traffic(bucket) for bucket in buckets]
    title = "bytes that each rank sends in a step"
    columns = [
        Column("#", [str(bucket.index) for bucket in buckets]),
        _bytes(_collective(plan), [each.reduce_inside for each in traffic]),
    ]
    if plan.outer_size > 1:
        columns.append(_bytes(f"all-reduce over {plan.outer_size} instances", [each.reduce_across for each in traffic]))
    if plan.gather_order:
        under = "under the next forward" if plan.wrapper.overlap_param_gather else "in the optimizer's step"
        title += f"; parameters are gathered, {under}"
        columns.append(Column("gathered as", [f"{plan.gather_order.index(bucket) + 1}." for bucket in buckets]))
        columns.append(_bytes("all-gather", [each.gather for each in traffic]))
    if any(each.scratch for each in traffic):
        columns.append(_bytes("scratch in flight", [each.scratch for each in traffic], total=False))
    return table_of(title, *columns)


def _units_table(plan: UnitsPlan) -> Table:
    """One line per bucket. A unit has separate buckets for delayed parameters and for each parameter dtype."""
    buckets = plan.buckets
    names = [name for unit in plan.units for name in [unit.title, *[""] * (len(unit.buckets) - 1)]]
    return table_of(
        f"{len(plan.units)} units in the order of a forward, {len(buckets)} buckets",
        _texts("unit", names),
        *_layout_columns([bucket.layout for bucket in buckets], plan.parameters.total),
        _bytes("gathered", [bucket.param_nbytes for bucket in buckets], total=False),
        _bytes("gradients", [bucket.grad_nbytes for bucket in buckets], total=False),
        _bytes("shard", [bucket.shard_nbytes for bucket in buckets]),
    )


def _unit_collectives_table(plan: UnitsPlan) -> Table:
    units, across, scatters = plan.units, plan.outer_size > 1, plan.placements.outer.scatters
    traffic = [[plan.traffic(bucket.layout, trainable=bucket.trainable) for bucket in unit.buckets] for unit in units]
    gathers = [unit.gathers_in_forward + unit.gathers_in_backward for unit in units]
    gathered = [n * sum(each.gather for each in found) for n, found in zip(gathers, traffic, strict=True)]
    reductions = [", ".join(str(count) for count in dict.fromkeys(unit.reductions)) for unit in units]
    reduced = [
        sum(count * each.reduce_inside for count, each in zip(unit.reductions, found, strict=True))
        for unit, found in zip(units, traffic, strict=True)
    ]
    ranks, instances = f"over {plan.inner_size} ranks", f"over {plan.outer_size} instances"
    columns = [
        _texts("unit", [unit.title for unit in units]),
        Column("gathers in\nforward", [str(unit.gathers_in_forward) for unit in units]),
        Column("gathers in\nbackward", [str(unit.gathers_in_backward) for unit in units]),
        _bytes(f"all-gather\n{ranks}", gathered),
        Column("reductions", reductions),
        _bytes(f"{'all-to-all' if plan.wire_dtype else 'reduce-scatter'}\n{ranks}", reduced),
    ]
    if across:
        kind = "reduce-scatter" if scatters else "all-reduce"
        sent = [sum(each.reduce_across for each in found) for found in traffic]
        columns.append(_bytes(f"{kind}\n{instances}", sent))
    if across and scatters:
        sent = [sum(each.gather_across for each in found) for found in traffic]
        columns.insert(4, _bytes(f"all-gather\n{instances}", sent))
    by_bucket = "; collectives are counted for each bucket" if len(plan.buckets) > len(units) else ""
    return table_of(
        f"bytes that each rank sends in a step of {plan.num_microbatches} microbatch(es){by_bucket}", *columns
    )


def _bytes_table(plan: RunPlan | UnitsPlan) -> Table:
    layouts = [b.layout for b in plan.buckets] if isinstance(plan, UnitsPlan) else plan.gradients.buckets
    param_dtypes = _names(layout.slots[0].spec.param_dtype for layout in layouts)
    grad_dtypes = _names(layout.slots[0].spec.grad_dtype for layout in layouts)
    title = f"bytes on each of {plan.ranks} ranks"
    if isinstance(plan, UnitsPlan) and plan.fsdp.offload_to_cpu:
        title += "; masters, moments and a copy of gradient shards are in host memory"
    columns = [
        _texts("what", ["parameters", "gradients", "optimizer: masters", "optimizer: moments"], "total"),
        _texts("dtype", [param_dtypes, grad_dtypes, "float32", "float32"]),
    ]
    for parallel, held in plan.alternatives.items():
        is_this = parallel == plan.parallel
        name = (
            f"{parallel},\n{plan.outer_size if is_this else 2} instances"
            if parallel in ("hybrid", "hsdp")
            else parallel
        )
        columns.append(_bytes(f"{name}\n(this run)" if is_this else name, held))
    table = table_of(title, *columns)
    if isinstance(plan, UnitsPlan):
        peaks = (
            f"gathered, at most: {format_bytes(plan.peak_params)}; unreduced, at most: {format_bytes(plan.peak_grads)}"
        )
        table.caption, table.caption_justify = peaks, "left"
    return table


def _collective(plan: RunPlan) -> str:
    """Name of the collective that reduces gradients over the ranks of an instance."""
    if not plan.placements.inner.scatters:
        return "all-reduce"
    return "reduce-scatter" if plan.wire_dtype is None else f"all-to-all in {_name(plan.wire_dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(dict.fromkeys(map(_name, dtypes)))
