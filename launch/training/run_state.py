"""A run on disk: writes the checkpoints of ``train.save_every``, and resumes a run as ``train.resume`` says.

A checkpoint of ``maingrad.ddp`` holds model and optimizer. It also holds the other state of a run: step, training time,
learning rate schedule and configuration. Data and dropout need no state: seed and step determine them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ...ddp.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from ...ddp.checkpoint.files.folder import find
from ..config.file import config_to_dict, flat
from ..config.run import Config, ConfigError
from ..data.tokens import Digest
from .pace import Pace
from .wrapping import Wrapped

__all__ = ["resume_run", "save_run", "where_to_resume"]

_FOLDER = "checkpoints"
_MAY_DIFFER = frozenset(
    {
        "model.fuse_wgrad_accumulation",
        "model.delay_wgrad_layers",
        "train.steps",
        "train.max_seconds",
        "train.num_microbatches",
        "train.eval_every",
        "train.eval_sequences",
        "train.log_every",
        "train.save_every",
        "train.resume",
        "train.resume_with_other_data",
        "train.compile",
        "train.compile_backend",
        "train.recipe",
        "train.emulate_recipe",
        "train.cuda_graph",
        "train.device",
        "train.out_dir",
    }
)
"""Keys that a resumed run may change, besides ``parallel``, ``[ddp]`` and ``[fsdp]``: they change neither the model nor
the data."""


def _checkpoint_path(out_dir: Path, step: int) -> Path:
    """Folder of the checkpoint after ``step`` steps."""
    return out_dir / _FOLDER / f"step-{step:08d}"


def where_to_resume(config: Config) -> Path | None:
    """The checkpoint that ``train.resume`` names; None: start a new run.

    Raises ``ConfigError`` for a missing folder, and for a new run in a folder with checkpoints of an earlier run.
    """
    wanted = config.train.resume
    # A checkpoint that a killed save has not yet moved to its place counts too.
    places = {path.with_suffix("") for path in (Path(config.train.out_dir) / _FOLDER).glob("step-*")}
    found = sorted(path for path in places if find(path).is_dir())
    if wanted is None:
        if found and config.train.save_every is not None:
            raise ConfigError(
                f"train.out_dir = {config.train.out_dir!r}: '{found[-1]}' of an earlier run is there, and would be "
                f"mixed up with this one's; go on from it with train.resume = 'auto', or remove it, or write elsewhere"
            )
        return None
    if wanted == "auto":
        return found[-1] if found else None
    if not find(Path(wanted)).is_dir():
        raise ConfigError(f"train.resume = {wanted!r}: there is no such folder; name a checkpoint, or set 'auto'")
    return Path(wanted)


def save_run(
    config: Config,
    pace: Pace,
    wrapped: Wrapped,
    schedule: LRScheduler,
    data: Mapping[str, Digest],
    *,
    validated: bool,
) -> Path:
    """Write a checkpoint of the run between two steps. Collective over the ranks of the model.

    data       digests of the data
    validated  whether the validation after this step is done; an interrupted run may lack it
    """
    path = _checkpoint_path(Path(config.train.out_dir), pace.step)
    extra = {
        "step": pace.step,
        "seconds": pace.seconds,
        "validated": validated,
        "schedule": schedule.state_dict(),
        "config": config_to_dict(config),
        "data": {part: digest._asdict() for part, digest in data.items()},
    }
    save_checkpoint(path, wrapped.model, wrapped.optimizer, extra=extra)
    return path


def resume_run(
    path: Path, config: Config, pace: Pace, wrapped: Wrapped, schedule: LRScheduler, data: Mapping[str, Digest]
) -> bool:
    """Resume from a checkpoint; returns whether its validation is done. Collective over the ranks.

    data  digests of the data that the run will read

    Raises ``ConfigError`` if the folder is no checkpoint of ``maingrad train``, or if a fixed key or the data differ.
    """
    try:
        extra = load_checkpoint(path, wrapped.model, wrapped.optimizer)
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"train.resume = '{path}': {error}") from None
    if not isinstance(extra, dict) or not {"step", "seconds", "schedule", "config"} <= set(extra):
        raise ConfigError(
            f"train.resume = '{path}': a checkpoint of a model, but not one of maingrad train: it has no step"
        )
    _check_same_run(path, extra["config"], config)
    if not config.train.resume_with_other_data:
        _check_same_data(path, extra.get("data", {}), data)
    pace.step, pace.seconds = extra["step"], extra["seconds"]
    schedule.load_state_dict(extra["schedule"])
    # Older checkpoints lack this entry; their runs were validated unless interrupted.
    return bool(extra.get("validated", True))


def _check_same_run(path: Path, saved: dict[str, Any], config: Config) -> None:
    before, now = flat(saved), flat(config_to_dict(config))
    sections = ("ddp.", "fsdp.", *(("data.",) if config.train.resume_with_other_data else ()))
    for key, value in now.items():
        if key in _MAY_DIFFER or key == "parallel" or key.startswith(sections):
            continue
        # A tuple comes back from JSON as a list.
        was = before.get(key)
        if (tuple(was) if isinstance(was, list) else was) != (tuple(value) if isinstance(value, list) else value):
            raise ConfigError(f"{key} = {value!r}: the run in '{path}' had {was!r}, and cannot go on with another")


def _check_same_data(path: Path, saved: Mapping[str, Any], data: Mapping[str, Digest]) -> None:
    """``saved``: nothing, where a checkpoint is of before it was noted."""
    for part, now in data.items():
        if part in saved and Digest(**saved[part]) != now:
            was = Digest(**saved[part])
            what = f"had {was.tokens} tokens, and now {now.tokens}" if now.tokens != was.tokens else "had other tokens"
            raise ConfigError(
                f"train.resume = '{path}': when it was written the {part} data {what}: another run would go on. Give "
                f"it the data of before, or set train.resume_with_other_data = true"
            )
