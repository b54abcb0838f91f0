"""Writes ``report.html``: a page that needs no other file and no network, of one run or of several side by side."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from .... import __version__
from ...config.run import ConfigError
from ...plan.tables import format_bytes
from ...training.watching.replacing import replacing
from .charts import Chart, Point, Series, with_mean
from .facts import Facts, facts_of
from .figures import differing, environment, figures, settings, state
from .flights import draw_buckets, draw_step
from .run_folder import read_runs

__all__ = ["write_page"]

_HERE = Path(__file__).parent
_MANY = 200  # losses, from which on those of the untrained model may lie outside of the chart


def write_page(folders: Sequence[Path], target: Path, *, peak_tflops: float | None = None) -> Path:
    """Write the page of the runs in ``folders`` to ``target``; returns ``target``.

    peak_tflops  of one device, for MFU; None: dense bf16 of a known GPU

    Raises ``ConfigError`` for a peak that is not positive, for folders without records and for damaged records.
    """
    if peak_tflops is not None and not 0 < peak_tflops < float("inf"):
        raise ConfigError(f"--peak-tflops {peak_tflops}: must be positive")
    runs = read_runs(folders)
    page = _render([facts_of(index, run, peak_tflops) for index, run in enumerate(runs)])
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:
        file.write(page)
    return target


def _render(all_facts: Sequence[Facts]) -> str:
    environment_of_templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment_of_templates.filters["bytes"] = format_bytes
    all_settings, all_environment = settings(all_facts), environment(all_facts)
    steps = [facts.run.timeline and draw_step(facts.run.timeline) for facts in all_facts]
    lanes = [_lanes(facts) for facts in all_facts]
    drawn = [*filter(None, steps), *(each for run in lanes for each in run)]
    return environment_of_templates.get_template("page.html.j2").render(
        css=(_HERE / "page.css").read_text(encoding="utf-8"),
        script=(_HERE / "page.js").read_text(encoding="utf-8"),
        runs=all_facts,
        state=state,
        title=" and ".join(facts.run.label for facts in all_facts) if len(all_facts) < 3 else f"{len(all_facts)} runs",
        figures=figures(all_facts),
        charts=[chart.draw() for chart in _charts(all_facts) if not chart.is_empty],
        steps=steps,
        lanes=lanes,
        kinds={bar.kind for each in drawn for _, _, bars in each.rows for bar in bars},
        settings=all_settings,
        different_settings=differing(all_settings),
        environment=all_environment,
        most_planned=max([1, *(facts.planned.total for facts in all_facts if facts.planned)]),
        version=__version__,
        today=time.strftime("%Y-%m-%d"),
    )


def _lanes(facts: Facts) -> list[Any]:
    if facts.run.timeline is None:
        return []
    return [lanes for kind in ("buckets", "gathers") if (lanes := draw_buckets(facts.run.timeline, kind))]


def _charts(all_facts: Sequence[Facts]) -> list[Chart]:
    def curves(name: str) -> list[Series]:
        return [one for facts in all_facts for one in with_mean(facts.index, facts.run.label, facts.points(name))]

    return [
        _loss(all_facts),
        Chart(
            key="tokens_per_second",
            title="Throughput",
            unit="tokens per second, all ranks",
            series=curves("tokens_per_second"),
            from_zero=True,
        ),
        Chart(
            key="mfu",
            title="Model FLOPs utilisation",
            unit="% of the peak",
            series=[
                one for facts in all_facts for one in with_mean(facts.index, facts.run.label, _scaled(facts.mfu, 100))
            ],
            from_zero=True,
        ),
        Chart(key="grad_norm", title="Gradient norm", unit="before clipping", series=curves("grad_norm"), log=True),
        Chart(
            key="lr",
            title="Learning rate",
            unit="",
            series=[Series(run=f.index, label=f.run.label, points=f.points("lr")) for f in all_facts],
            from_zero=True,
        ),
        Chart(
            key="max_expert_load",
            title="Fullest expert",
            unit="rows over an even share",
            series=curves("max_expert_load"),
        ),
        Chart(
            key="load_balancing_loss",
            title="Load-balancing loss",
            unit="1 at perfect balance",
            series=curves("load_balancing_loss"),
        ),
        Chart(key="router_z_loss", title="Router z-loss", unit="", series=curves("router_z_loss"), from_zero=True),
    ]


def _loss(all_facts: Sequence[Facts]) -> Chart:
    series: list[Series] = []
    levels: dict[float, Series] = {}
    for facts in all_facts:
        label, unit = facts.run.label, facts.run.unit
        series += with_mean(facts.index, f"{label}, training", facts.points("loss"))
        validations = facts.points("loss", "validations")
        series.append(Series(run=facts.index, label=f"{label}, validation", points=validations, style="marked"))
        bigram = (facts.run.end or {}).get("bigram_loss")
        if bigram is not None:
            level = Series(run=-1, label=f"{unit}-bigram counts", points=[(0, bigram)], style="level")
            levels.setdefault(bigram, level)
    losses = sorted(y for one in series for _, y in one.points if y is not None)
    top = losses[int(0.97 * len(losses))] * 1.1 if len(losses) > _MANY else None  # a short run is all beginning
    units = " or ".join(dict.fromkeys(facts.run.unit for facts in all_facts))
    return Chart(key="loss", title="Loss", unit=f"nats per {units}", series=[*series, *levels.values()], top=top)


def _scaled(points: Sequence[Point], factor: float) -> list[Point]:
    return [(x, None if y is None else y * factor) for x, y in points]
