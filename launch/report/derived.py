"""What follows from the configuration of a run: FLOPs, peak and plan. The model is built for it, on meta."""

from collections.abc import Callable
from typing import Any

from ..config.run import Config, ConfigError
from ..plan.model_flops import flops_per_token, peak_tflops
from ..plan.plan import RunPlan, plan_run
from .run_folder import RunFolder

__all__ = ["derive"]

_MOST_RANKS = 65_536  # a plan of more is not made


def derive(run: RunFolder, peak: float | None) -> None:
    """Find FLOPs, peak and plan of ``run``, and note why a number is missing.

    peak  TFLOP/s of a device, instead of the table's
    """
    run.flops = _try(run, "Model FLOPs and MFU are", flops_per_token)
    run.peak = _try(run, "MFU is", lambda config: _peak(run, peak))
    run.plan = _try(run, "The planned bytes are", lambda config: _plan(run, config))
    if run.end.get("peak_memory_bytes") is None:
        why = "measured on GPUs only" if run.device == "cpu" else "recorded at the end of a run"
        run.notes.append(f"Peak memory is left out: it is {why}.")
    if run.timeline is None:
        run.notes.append("No reduction of a step was timed: the run ended before its timed step was over.")


def _try(run: RunFolder, what: str, function: Callable[[Config], Any]) -> Any:
    """What ``function`` makes of the configuration; None, and a note, where there is nothing."""
    try:
        if run.config is None:
            raise ConfigError("this needs the configuration")
        return function(run.config)
    except Exception as error:  # impossible values may raise anything
        run.notes.append(f"{what} left out: {error}.")
        return None


def _peak(run: RunFolder, given: float | None) -> float:
    on_gpu = run.device not in (None, "cpu")
    peak = (given or peak_tflops(run.gpu)) if on_gpu else None
    if peak is None:
        why = {
            None: "the device is not known, since no step was completed",
            "cpu": "the run was on a CPU, and only GPUs have a stated peak that MFU is measured against",
        }
        unknown = f"no peak of {run.gpu or 'this GPU'!r} is known; give it in TFLOP/s with --peak-tflops"
        raise ConfigError(why.get(run.device, unknown))
    return peak


def _plan(run: RunFolder, config: Config) -> RunPlan:
    if not run.world_size or run.world_size > _MOST_RANKS:
        raise ConfigError(f"the number of ranks is {run.world_size or 'not known'}")
    return plan_run(config, run.world_size)
