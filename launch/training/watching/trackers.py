"""TensorBoard and Weights & Biases beside ``metrics.jsonl``: they get the numbers of steps and validations.

Their packages are imported only where ``[logging]`` switches them on.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ...config.error import require
from ...config.file import config_to_dict, flat
from ...config.run import Config

__all__ = ["Tracker", "check_packages", "trackers_of"]

_KINDS = ("step", "validation", "final")
_ID_FILE = "wandb_id"


class Tracker(Protocol):
    """Takes records."""

    def add(self, kind: str, fields: Mapping[str, Any]) -> None:
        """One record of ``metrics.jsonl``; kinds other than steps and validations are ignored."""

    def close(self) -> None:
        """End of the run."""


def check_packages(config: Config) -> None:
    """Raise ``ConfigError`` for a package that ``[logging]`` needs and that is not installed: on all ranks, though only
    rank 0 will import it."""
    wanted = {
        "tensorboard": ("logging.tensorboard", config.logging.tensorboard),
        "wandb": ("logging.wandb_project", config.logging.wandb_project),
    }
    for package, (key, value) in wanted.items():
        require(
            not value or importlib.util.find_spec(package) is not None,
            key,
            value,
            f"needs the package {package}: pip install maingrad[{package}], or leave it out",
        )


def trackers_of(config: Config, resumed_at: int | None) -> list[Tracker]:
    """The trackers that ``[logging]`` switches on. Call it on rank 0.

    resumed_at  the step after which the run goes on; None: a new run
    """
    out_dir, settings = Path(config.train.out_dir), config.logging
    found: list[Tracker] = []
    if settings.tensorboard:
        found.append(_TensorBoard(out_dir / "tensorboard", resumed_at))
    if settings.wandb_project is not None:
        found.append(_WeightsAndBiases(config, out_dir, resumed_at))
    return found


class _TensorBoard:
    """Events for TensorBoard."""

    def __init__(self, folder: Path, resumed_at: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events after the checkpoint are hidden: the resumed run writes them anew.
        purge = None if resumed_at is None else resumed_at + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def add(self, kind: str, fields: Mapping[str, Any]) -> None:
        for name, value in _numbers(kind, fields).items():
            self._writer.add_scalar(name, value, fields["step"])

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run at Weights & Biases, or in files for it."""

    def __init__(self, config: Config, out_dir: Path, resumed_at: int | None) -> None:
        import wandb

        settings = config.logging
        kept = out_dir / _ID_FILE
        known = kept.read_text(encoding="utf-8").strip() if resumed_at is not None and kept.exists() else None
        self._run = wandb.init(
            project=settings.wandb_project,
            name=settings.wandb_name or out_dir.name,
            dir=str(out_dir),
            mode=settings.wandb_mode,
            config=flat(config_to_dict(config)),
            id=known,
            resume="allow" if known else None,
        )
        kept.write_text(f"{self._run.id}\n", encoding="utf-8")

    def add(self, kind: str, fields: Mapping[str, Any]) -> None:
        numbers = _numbers(kind, fields)
        if numbers:
            self._run.log({**numbers, "step": fields["step"]}, step=fields["step"])

    def close(self) -> None:
        self._run.finish()


def _numbers(kind: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """``step``'s ``loss`` is "train/loss", ``validation``'s "validation/loss"."""
    if kind not in _KINDS:
        return {}
    prefix = {"step": "train"}.get(kind, kind)
    return {
        f"{prefix}/{name}": value
        for name, value in fields.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
