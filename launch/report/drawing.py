"""The common style of all pictures: colours, a title to the left, no frame; as files, or as SVG within a page."""

import html
import io
import re
import warnings
from pathlib import Path
from typing import IO, Any

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
    "svg",
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
        _render(figure, file, path.suffix.removeprefix("."))
    plt.close(figure)
    return path


def svg(figure: Figure, label: str) -> str:
    """``figure`` as an element of a page, whose text colour it takes; ``label`` is what a screen reader says."""
    file = io.StringIO()
    _render(figure, file, "svg", transparent=True)
    text = file.getvalue()
    text = re.sub(
        r' xmlns(:xlink)?="[^"]*"|<metadata>.*?</metadata>| id="[a-z]+[a-z0-9]*_[0-9_]+"', "", text, flags=re.S
    )
    text = text[text.index("<svg") :].replace(INK, "currentColor").replace("xlink:href", "href")
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)


def _render(figure: Figure, file: IO[Any], form: str, **options: Any) -> None:
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.fonttype": "none", "text.parse_math": False}):
        warnings.simplefilter("ignore")  # a name in a script that the font lacks is shown by the browser
        figure.savefig(file, format=form, **options)
