"""The common style of all pictures: colours, a title to the left, no frame."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, and none is opened
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..training.watching.replacing import replacing

__all__ = [
    "BACKWARD",
    "DRAIN",
    "EXPOSED",
    "FORWARD",
    "HIDDEN",
    "INK",
    "OPTIMIZER",
    "QUIET",
    "READY",
    "TRAIN",
    "WAITING",
    "dress",
    "plt",
    "save",
]

INK = "#22303c"
QUIET = "#8a97a3"
BACKWARD = "#dfe6ec"
FORWARD = "#dcebdc"
DRAIN = "#efe3c8"
OPTIMIZER = "#e2dbee"
WAITING = "#f6cdb4"
HIDDEN = "#1f77a4"
EXPOSED = "#e07b39"
READY = "#2a9d5c"
TRAIN = "#9bb8cc"


def dress(axes: Axes, title: str) -> None:
    """Set the title, and remove the frame's lines above and to the right."""
    axes.set_title(title, loc="left", color=INK, fontweight="bold", pad=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save(figure: Figure, path: Path) -> Path:
    """Write ``figure`` to ``path``, close it, and return ``path``."""
    with replacing(path, "wb") as file:
        figure.savefig(file, format=path.suffix.removeprefix("."))
    plt.close(figure)
    return path
