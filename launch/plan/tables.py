"""What ``maingrad plan`` prints: placements, buckets, the collectives of a step, bytes on a rank."""

from collections.abc import Iterable, Iterator

import torch
from rich.table import Table

from ...ddp.plan.layout import BucketLayout
from ..config.run import ModelConfig
from .parameter_count import ParameterCount
from .plan import RunPlan, UnitsPlan
from .unit_bytes import PlacedBucket
from .units import PlacedUnit

__all__ = ["format_bytes", "plan_tables"]


def plan_tables(plan: RunPlan | UnitsPlan) -> Iterator[Table]:
    """The tables in printing order: experts (if there are any), placements, buckets, collectives, bytes.

    A plan for ``ddp``, ``zero1`` or ``hybrid`` lists buckets in launch order. A plan of a fully sharded run lists units
    instead, in the order in which a forward enters them.
    """
    if plan.model.num_experts:
        yield _experts_table(plan.model, plan.parameters)
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


def _experts_table(model: ModelConfig, count: ParameterCount) -> Table:
    blocks = sum(model.has_experts(index) for index in range(model.num_layers))
    table = _table(
        f"{model.num_experts} experts in {blocks} of {model.num_layers} blocks, {model.top_k} for each token"
    )
    table.add_column("parameters")
    _add_numbers(table, "all", "active in a token")
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


def _placements_table(plan: RunPlan | UnitsPlan) -> Table:
    several = plan.outer_size > 1
    table = _table(f'parallel = "{plan.parallel}" on {plan.ranks} ranks')
    table.add_column("at rest")
    table.add_column(f"over the {plan.inner_size} ranks of an instance" if several else f"over {plan.ranks} ranks")
    if several:
        table.add_column(f"over {plan.outer_size} instances")
    inner, outer = plan.placements
    for kind in inner._fields:
        cells = [getattr(inner, kind).value, getattr(outer, kind).value]
        table.add_row(kind, *cells[: 1 + several])
    return table


def _bucket_table(plan: RunPlan) -> Table:
    table = _table(f"{len(plan.gradients.buckets)} buckets in launch order, {_reduction(plan)}")
    table.add_column("#", justify="right")
    table.add_column("parameters", overflow="fold")
    _add_numbers(table, "elements", "padding", "gradients", "per rank")
    for bucket in plan.gradients.buckets:
        table.add_row(*_bucket_row(bucket))
    table.add_section()
    numel, padding = plan.gradients.numel, plan.gradients.padding
    table.add_row("", f"{plan.num_parameters:,} parameters", f"{numel:,}", f"{padding:,} ({padding / numel:.1%})")
    return table


def _bucket_row(bucket: BucketLayout) -> tuple[str, ...]:
    first, last = bucket.slots[0].spec.name, bucket.slots[-1].spec.name
    dtype = bucket.slots[0].spec.grad_dtype
    nbytes = bucket.numel * dtype.itemsize
    return (
        str(bucket.index),
        first if len(bucket.slots) == 1 else f"{first} .. {last} ({len(bucket.slots)})",
        f"{bucket.numel:,}",
        f"{bucket.padding:,}",
        f"{format_bytes(nbytes)} {_name(dtype)}",
        format_bytes(nbytes / bucket.shard_degree),
    )


def _collectives_table(plan: RunPlan) -> Table:
    """Reductions run from the top line to the bottom line, all-gathers from the bottom line to the top line."""
    placed = {bucket.index: number for number, bucket in enumerate(plan.gather_order, 1)}
    inside, across, gathers = _collective(plan), plan.outer_size > 1, bool(placed)
    scratch = any(plan.traffic(bucket).scratch for bucket in plan.gradients.buckets)
    overlapped = ", under the next forward" if plan.wrapper.overlap_param_gather else ", in the optimizer's step"
    table = _table(
        "bytes that each rank sends in a step" + (f"; parameters are gathered{overlapped}" if gathers else "")
    )
    table.add_column("#", justify="right")
    _add_numbers(table, inside)
    if across:
        _add_numbers(table, f"all-reduce over {plan.outer_size} instances")
    if gathers:
        _add_numbers(table, "gathered as", "all-gather")
    if scratch:
        _add_numbers(table, "scratch in flight")
    sums = [0, 0, 0]
    for bucket in plan.gradients.buckets:
        traffic = plan.traffic(bucket)
        row = [str(bucket.index), format_bytes(traffic.reduce_inside)]
        row += [format_bytes(traffic.reduce_across)] * across
        row += [f"{placed.get(bucket.index, 0)}.", format_bytes(traffic.gather)] if gathers else []
        row += [format_bytes(traffic.scratch)] * scratch
        table.add_row(*row)
        sums = [total + part for total, part in zip(sums, traffic, strict=False)]
    table.add_section()
    cells = ["", format_bytes(sums[0]), *[format_bytes(sums[1])] * across]
    table.add_row(*cells, *(["", format_bytes(sums[2])] if gathers else []))
    return table


def _units_table(plan: UnitsPlan) -> Table:
    """One line per bucket. A unit has separate buckets for delayed parameters and for each parameter dtype."""
    table = _table(f"{len(plan.units)} units in the order of a forward, {len(plan.buckets)} buckets")
    table.add_column("unit")
    table.add_column("parameters", overflow="fold")
    _add_numbers(table, "elements", "padding", "gathered", "gradients", "shard")
    for unit in plan.units:
        for index, bucket in enumerate(unit.buckets):
            table.add_row(_unit_name(unit) if index == 0 else "", *_unit_row(bucket))
    table.add_section()
    numel, padding = (sum(getattr(bucket.layout, what) for bucket in plan.buckets) for what in ("numel", "padding"))
    share = f"{padding:,} ({padding / numel:.2%})"
    shards = format_bytes(sum(bucket.shard_nbytes for bucket in plan.buckets))
    table.add_row("", f"{plan.parameters.total:,} parameters", f"{numel:,}", share, "", "", shards)
    return table


def _unit_name(unit: PlacedUnit) -> str:
    return unit.name or "(the model)"


def _unit_row(bucket: PlacedBucket) -> tuple[str, ...]:
    layout = bucket.layout
    first, last = layout.slots[0].spec.name, layout.slots[-1].spec.name
    return (
        (first if len(layout.slots) == 1 else f"{first} .. {last} ({len(layout.slots)})")
        + (", delayed" if layout.delayed else ""),
        f"{layout.numel:,}",
        f"{layout.padding:,}",
        format_bytes(bucket.param_nbytes),
        format_bytes(bucket.grad_nbytes),
        format_bytes(bucket.shard_nbytes),
    )


def _unit_collectives_table(plan: UnitsPlan) -> Table:
    across = plan.outer_size > 1
    scatters = plan.placements.outer.scatters
    by_bucket = "; collectives are counted for each bucket" if len(plan.buckets) > len(plan.units) else ""
    table = _table(f"bytes that each rank sends in a step of {plan.num_microbatches} microbatch(es){by_bucket}")
    table.add_column("unit")
    ranks, instances = f"over {plan.inner_size} ranks", f"over {plan.outer_size} instances"
    _add_numbers(table, "gathers in\nforward", "gathers in\nbackward", f"all-gather\n{ranks}")
    if across and scatters:
        _add_numbers(table, f"all-gather\n{instances}")
    _add_numbers(table, "reductions", f"{'all-to-all' if plan.fsdp.reduce_dtype else 'reduce-scatter'}\n{ranks}")
    if across:
        _add_numbers(table, f"{'reduce-scatter' if scatters else 'all-reduce'}\n{instances}")
    sums = [0, 0, 0, 0]
    for unit in plan.units:
        each = [plan.traffic(bucket) for bucket in unit.buckets]
        num_gathers = unit.gathers_in_forward + unit.gathers_in_backward
        sent = [
            num_gathers * sum(traffic.gather for traffic in each),
            sum(traffic.gather_across for traffic in each),
            sum(count * traffic.reduce_inside for count, traffic in zip(unit.reductions, each, strict=True)),
            sum(traffic.reduce_across for traffic in each),
        ]
        counts = [str(unit.gathers_in_forward), str(unit.gathers_in_backward)]
        reductions = ", ".join(str(count) for count in dict.fromkeys(unit.reductions))
        table.add_row(*_traffic_row(_unit_name(unit), counts, reductions, sent, across, scatters))
        sums = [total + part for total, part in zip(sums, sent, strict=True)]
    table.add_section()
    table.add_row(*_traffic_row("", ["", ""], "", sums, across, scatters))
    return table


def _traffic_row(
    name: str, gathers: list[str], reductions: str, sent: list[int], across: bool, scatters: bool
) -> list[str]:
    gather, gather_across, inside, reduce_across = map(format_bytes, sent)
    row = [name, *gathers, gather, *[gather_across] * (across and scatters), reductions, inside]
    return [*row, *[reduce_across] * across]


def _bytes_table(plan: RunPlan | UnitsPlan) -> Table:
    layouts = [b.layout for b in plan.buckets] if isinstance(plan, UnitsPlan) else plan.gradients.buckets
    param_dtypes = _names(layout.slots[0].spec.param_dtype for layout in layouts)
    grad_dtypes = _names(layout.slots[0].spec.grad_dtype for layout in layouts)
    title = f"bytes on each of {plan.ranks} ranks"
    if isinstance(plan, UnitsPlan) and plan.fsdp.offload_to_cpu:
        title += "; masters, moments and a copy of gradient shards are in host memory"
    table = _table(title)
    table.add_column("what")
    table.add_column("dtype")
    names = {
        parallel: f"{parallel},\n{plan.outer_size if plan.parallel == parallel else 2} instances"
        for parallel in ("hybrid", "hsdp")
    }
    for parallel in plan.alternatives:
        title = names.get(parallel, parallel)
        _add_numbers(table, f"{title}\n(this run)" if parallel == plan.parallel else title)
    columns = list(plan.alternatives.values())
    for index, (what, dtype) in enumerate(
        (
            ("parameters", param_dtypes),
            ("gradients", grad_dtypes),
            ("optimizer: masters", "float32"),
            ("optimizer: moments", "float32"),
        )
    ):
        table.add_row(what, dtype, *(format_bytes(column[index]) for column in columns))
    table.add_section()
    table.add_row("total", "", *(format_bytes(column.total) for column in columns))
    if isinstance(plan, UnitsPlan):
        table.add_section()
        for what, dtype, peak in (
            ("gathered, at most", param_dtypes, plan.peak_params),
            ("unreduced, at most", grad_dtypes, plan.peak_grads),
        ):
            cells = [format_bytes(peak) if parallel == plan.parallel else "" for parallel in plan.alternatives]
            table.add_row(what, dtype, *cells)
    return table


def _collective(plan: RunPlan) -> str:
    """Name of the collective that reduces gradients over the ranks of an instance."""
    if not plan.placements.inner.scatters:
        return "all-reduce"
    wire = plan.wrapper.grad_reduce_wire_dtype
    return "reduce-scatter" if wire is None else f"all-to-all in {_name(wire)}"


def _reduction(plan: RunPlan) -> str:
    if plan.outer_size == 1:
        return f"{_collective(plan)} over {plan.ranks} ranks"
    return f"{_collective(plan)} over {plan.inner_size} ranks, all-reduce over {plan.outer_size} instances"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", min_width=min(len(title), 100))


def _add_numbers(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(dict.fromkeys(map(_name, dtypes)))
