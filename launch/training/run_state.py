"""A run on disk: writes the checkpoints of ``train.save_every``, and resumes a run as ``train.resume`` says.

A checkpoint of ``maingrad.ddp`` holds model and optimizer. It also holds the other state of a run: step, training time,
learning rate schedule and configuration. Data and dropout need no state: seed and step determine them.
"""

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ...ddp.checkpoint.background import PendingSave
from ...ddp.checkpoint.checkpoint import load_checkpoint, prepare_background_saves, save_checkpoint
from ...ddp.checkpoint.files.folder import (
    find,
    is_being_deleted,
    is_complete,
    is_left_to_delete,
    move_to_place,
    remove,
)
from ...ddp.checkpoint.files.opened import open_checkpoint
from ..config.file import config_to_dict, flat
from ..config.run import Config, ConfigError
from ..data.replacing import replacing
from ..data.tokens import Digest
from .pace import Pace
from .runtime import versions
from .wrapping import Wrapped

__all__ = ["RunSaver", "check_resume", "resume_run", "where_to_resume", "write_resolved"]

_FOLDER = "checkpoints"
_FIXED = ("model.", "data.", "optimizer.", "train.global_batch_size", "train.sequence_length", "train.seed")
"""Tables and keys that a resumed run must have as before: they are the model and the data."""
_MAY_DIFFER = frozenset(
    {
        "model.fuse_wgrad_accumulation",
        "model.fused_loss",
        "model.delay_wgrad_layers",
        "model.save_hugging_face",
        "model.trust_remote_code",
    }
)


def write_resolved(config: Config, world_size: int) -> None:
    """Write ``resolved_config.json`` into the run's folder: all values, versions, the command, the commit."""
    out_dir = Path(config.train.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    resolved = {
        "config": config_to_dict(config),
        "versions": versions(),
        "world_size": world_size,
        "command": shlex.join(sys.orig_argv),
        "git_commit": _git_commit(),
    }
    with replacing(out_dir / "resolved_config.json") as file:
        file.write(json.dumps(resolved, indent=2) + "\n")


def _git_commit() -> str | None:
    """Commit of the working directory's repository, with ``-dirty`` after changes; None without git or repository."""
    command = ["git", "-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _checkpoints(folder: Path) -> dict[Path, int]:
    """Step of each folder that is named like a checkpoint of a run, in their order; not of ``step-best``.

    A checkpoint that a killed save has not yet moved to its place counts, under the name that it would have.
    """
    places = {path.with_suffix(""): path.name.partition(".")[0].removeprefix("step-") for path in folder.glob("step-*")}
    return {path: int(number) for path, number in sorted(places.items()) if number.isdecimal()}


def where_to_resume(config: Config) -> Path | None:
    """The checkpoint that ``train.resume`` names; None: start a new run.

    Raises ``ConfigError`` for a missing folder, and for a new run in a folder with checkpoints of an earlier run.
    """
    wanted = config.train.resume
    steps = _checkpoints(Path(config.train.out_dir) / _FOLDER)
    found = [path for path in steps if find(path).is_dir() and not is_being_deleted(find(path))]
    newest = max(found, key=steps.__getitem__, default=None)
    if wanted is None:
        if newest is not None and config.train.save_every is not None:
            raise ConfigError(
                f"train.out_dir = {config.train.out_dir!r}: '{newest}' of an earlier run is there, and would be mixed "
                f"up with this one's; go on from it with train.resume = 'auto', or remove it, or write elsewhere"
            )
        return None
    if wanted == "auto":
        return newest
    if not find(Path(wanted)).is_dir():
        raise ConfigError(f"train.resume = {wanted!r}: there is no such folder; name a checkpoint, or set 'auto'")
    return Path(wanted)


class RunSaver:
    """Writes a run's checkpoints, in the background as ``[checkpoint]`` says, and deletes those that need not stay.

    say  called with a line for the screen
    """

    def __init__(self, config: Config, wrapped: Wrapped, *, is_main: bool, say: Callable[[str], None]) -> None:
        self._config, self._wrapped, self._is_main, self._say = config, wrapped, is_main, say
        self._folder = Path(config.train.out_dir) / _FOLDER
        self._pending: PendingSave | None = None
        self._step = 0
        self._deletion: threading.Thread | None = None

    def prepare(self) -> None:
        """Once steps run as they will: take the memory of background saves, so that they are short. Collective."""
        on_gpu = any(param.is_cuda for param in self._wrapped.model.parameters())
        if self._config.checkpoint.background and on_gpu:
            wrapped = self._wrapped
            prepare_background_saves(wrapped.model, wrapped.optimizer, pipeline_group=wrapped.pipeline)

    def save(self, pace: Pace, schedule: LRScheduler, data: Mapping[str, Digest], *, validated: bool) -> None:
        """Save the run between two steps; first wait for an earlier save. Collective over the ranks of the model.

        data       digests of the data
        validated  whether the validation after this step is done; an interrupted run may lack it

        Raises the error of any rank that could not write, of this save or, in the background, of the earlier one.
        """
        self.finish()
        self._step = pace.step
        extra = {
            "step": pace.step,
            "seconds": pace.seconds,
            "validated": validated,
            "schedule": schedule.state_dict(),
            "config": config_to_dict(self._config),
            "data": {part: digest._asdict() for part, digest in data.items()},
        }
        self._pending = save_checkpoint(
            self._folder / f"step-{pace.step:08d}",
            self._wrapped.model,
            self._wrapped.optimizer,
            extra=extra,
            background=self._config.checkpoint.background,
            pipeline_group=self._wrapped.pipeline,
        )
        self.look()

    def failed(self) -> bool:
        """Whether this rank could not write in the background: ``finish`` raises the error. Waits for nobody."""
        return self._pending is not None and self._pending.failed()

    def look(self) -> None:
        """Say that the checkpoint is complete, and delete older ones, if it is. Waits for nobody."""
        ended = self._pending is not None and self._pending.done() and not self._pending.failed()
        if self._is_main and ended and self._deletion is None:
            self._say(f"step {self._step:>5}  checkpoint in '{self._folder / f'step-{self._step:08d}'}'")
            # In a thread: deleting large files takes a file system longer than a step.
            self._deletion = threading.Thread(target=self._delete, args=(self._step,), name="deletion of checkpoints")
            self._deletion.start()

    def finish(self) -> None:
        """Wait for the save under way and for deletions. Collective over the ranks of the model."""
        if self._pending is not None:
            self._pending.wait()
            self.look()
            self._pending = None
        if self._deletion is not None:
            self._deletion.join()
            self._deletion = None

    def give_up(self) -> None:
        """The run ends by an error: a save under way completes only if all ranks have written within seconds."""
        if self._pending is not None:
            self._pending.give_up(after=10.0)

    def _delete(self, newest: int) -> None:
        """Delete older checkpoints. Links, empty folders and all else that no save has written stay."""
        keep, places = self._config.checkpoint, _checkpoints(self._folder)
        for path, number in places.items():
            if number < newest:  # a save that was killed just before its rename has left it beside its place
                with suppress(OSError):  # it stays where it is, and is found there
                    move_to_place(path)
        complete = [number for path, number in places.items() if is_complete(path)]  # behind links too
        for path, number in places.items():
            if number > newest:  # those after it are of a run that was resumed earlier
                continue
            if path.is_symlink() or not (is_complete(path) or is_left_to_delete(path)):
                continue
            newer = [step for step in complete if number < step <= newest]
            stays = keep.keep_last is None or len(newer) < keep.keep_last
            stays = stays or (keep.keep_every is not None and number % keep.keep_every == 0)
            if stays and not is_left_to_delete(path):
                continue
            try:
                remove(path)
            except OSError as error:
                self._say(f"'{path}' was not deleted: {error}")


def resume_run(
    path: Path, config: Config, pace: Pace, wrapped: Wrapped, schedule: LRScheduler, data: Mapping[str, Digest]
) -> bool:
    """Resume from a checkpoint; returns whether its validation is done. Collective over the ranks.

    data  digests of the data that the run will read

    Raises ``ConfigError`` if the folder is no checkpoint of ``maingrad train``, or if a fixed key or the data differ.
    """
    parts = wrapped.model, wrapped.optimizer
    extra = _checked(path, config, data, lambda: load_checkpoint(path, *parts, pipeline_group=wrapped.pipeline))
    pace.step, pace.seconds = extra["step"], extra["seconds"]
    _check_no_link(config, pace.step)
    schedule.load_state_dict(extra["schedule"])
    # The saved learning rate follows from the length of the saved run, and train.steps may have changed.
    schedule.last_epoch -= 1
    schedule.step()
    # Older checkpoints lack this entry; their runs were validated unless interrupted.
    return bool(extra.get("validated", True))


def _check_no_link(config: Config, step: int) -> None:
    """Raise ``ConfigError`` if the run may save through a link, over a checkpoint that lies elsewhere."""
    for path, number in _checkpoints(Path(config.train.out_dir) / _FOLDER).items():
        if path.is_symlink() and number > step and config.train.save_every is not None:
            raise ConfigError(
                f"'{path}' is a link, and this run goes on after step {step} and might write over "
                f"'{path.resolve()}': remove the link, or set another train.out_dir"
            )


def check_resume(path: Path, config: Config, data: Mapping[str, Digest]) -> None:
    """Raise ``ConfigError`` where ``resume_run`` would refuse the settings or the data. Reads the manifest alone."""
    _checked(path, config, data, lambda: open_checkpoint(path, lambda: lambda manifest: {}).manifest.extra)


def _checked(path: Path, config: Config, data: Mapping[str, Digest], read: Callable[[], Any]) -> Any:
    """The state that ``read`` finds in the checkpoint, if the run may go on from it."""
    try:
        extra = read()
    except (FileNotFoundError, ValueError) as error:
        raise ConfigError(f"train.resume = '{path}': {error}") from None
    if not isinstance(extra, dict) or not {"step", "seconds", "schedule", "config"} <= set(extra):
        raise ConfigError(
            f"train.resume = '{path}': a checkpoint of a model, but not one of maingrad train: it has no step"
        )
    _check_same_run(path, extra["config"], config)
    if not config.train.resume_with_other_data:
        _check_same_data(path, extra.get("data", {}), data)
    return extra


def _check_same_run(path: Path, saved: dict[str, Any], config: Config) -> None:
    before, now = _plain(saved), _plain(config_to_dict(config))
    defaults = _plain(config_to_dict(Config()))  # of keys that are newer than the checkpoint
    for key, value in now.items():
        may_differ = key in _MAY_DIFFER or (key.startswith("data.") and config.train.resume_with_other_data)
        if may_differ or not key.startswith(_FIXED):
            continue
        was = before.get(key, defaults.get(key))
        if was != value:
            raise ConfigError(f"{key} = {value!r}: the run in '{path}' had {was!r}, and cannot go on with another")


def _plain(document: Mapping[str, Any]) -> dict[str, Any]:
    """Flat keys and values as JSON has them: a tuple comes back as a list."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in flat(document).items()}


def _check_same_data(path: Path, saved: Mapping[str, Any], data: Mapping[str, Digest]) -> None:
    """``saved``: nothing, where a checkpoint is of before it was noted."""
    for part, now in data.items():
        difference = Digest(**saved[part]).says_otherwise(now) if part in saved else None
        if difference is not None:
            raise ConfigError(
                f"train.resume = '{path}': when it was written the {part} data {difference}: another run would go on. "
                f"Give it the data of before, or set train.resume_with_other_data = true"
            )
