"""TensorBoard and Weights & Biases beside ``metrics.jsonl``: they get the numbers of steps and validations.

Their packages are imported only where ``[logging]`` switches them on.
"""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...config.file import config_to_dict, flat
from ...config.run import Config

__all__ = ["Tracker", "check_packages", "trackers_of"]

_ID_FILE = "wandb_id"


class Tracker(NamedTuple):
    """Takes the numbers of steps and validations."""

    log: Callable[[dict[str, float], int], None]
    close: Callable[[], None]
    """At the end of the run."""

    def add(self, kind: str, fields: Mapping[str, Any]) -> None:
        """One record of ``metrics.jsonl``: ``step``'s ``loss`` is "train/loss", ``validation``'s "validation/loss"."""
        prefix = {"step": "train", "validation": "validation", "final": "final"}.get(kind)
        numbers = {
            f"{prefix}/{name}": value
            for name, value in fields.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        if prefix is not None and numbers:
            self.log(numbers, fields["step"])


def check_packages(config: Config) -> None:
    """Raise ``ConfigError`` for a package that ``[logging]`` needs and that is not installed: on all ranks, though only
    rank 0 will import it."""
    for package, key in (("tensorboard", "tensorboard"), ("wandb", "wandb_project")):
        missing = getattr(config.logging, key) and importlib.util.find_spec(package) is None
        remedy = f"needs the package {package}: pip install maingrad[{package}], or leave it out"
        config.logging.require(not missing, key, remedy)


def trackers_of(config: Config, resumed_at: int | None) -> list[Tracker]:
    """The trackers that ``[logging]`` switches on. Call it on rank 0.

    resumed_at  the step after which the run goes on; None: a new run
    """
    found: list[Tracker] = []
    if config.logging.tensorboard:
        found.append(_tensorboard(config, resumed_at))
    if config.logging.wandb_project is not None:
        found.append(_wandb(config, resumed_at))
    return found


def _tensorboard(config: Config, resumed_at: int | None) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    # Events after the checkpoint are hidden: the resumed run writes them anew.
    purge = None if resumed_at is None else resumed_at + 1
    writer = SummaryWriter(str(Path(config.train.out_dir) / "tensorboard"), purge_step=purge)

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def _wandb(config: Config, resumed_at: int | None) -> Tracker:
    """A run at Weights & Biases, or in files for it."""
    import wandb

    settings, out_dir = config.logging, Path(config.train.out_dir)
    kept = out_dir / _ID_FILE
    known = kept.read_text(encoding="utf-8").strip() if resumed_at is not None and kept.exists() else None
    run = wandb.init(
        project=settings.wandb_project,
        name=settings.wandb_name or out_dir.name,
        dir=str(out_dir),
        mode=settings.wandb_mode,
        config=flat(config_to_dict(config)),
        id=known,
        resume="allow" if known else None,
    )
    kept.write_text(f"{run.id}\n", encoding="utf-8")
    return Tracker(lambda numbers, step: run.log({**numbers, "step": step}, step=step), run.finish)
