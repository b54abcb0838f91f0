"""The common style of all pictures; pictures as files, or as SVG within a page."""

import io
import re
import warnings
from pathlib import Path
from typing import IO, Any

import matplotlib

matplotlib.use("Agg")  # no display is needed, and none is opened
from matplotlib.figure import Figure

from ..data.replacing import replacing

__all__ = ["INK", "QUIET", "save", "styled", "svg"]

INK = "#22303c"
QUIET = "#8a97a3"

styled = matplotlib.rc_context(
    {
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        "font.size": 9,
        "figure.titleweight": "bold",
        "figure.constrained_layout.use": True,
        "figure.dpi": 150,
        "svg.fonttype": "none",
        "text.parse_math": False,
        "path.simplify_threshold": 0.5,  # of a pixel: of a million points few are left, peaks and gaps among them
    }
)
"""A decorator of functions that draw: the common style, and no dollar signs of names as mathematics."""


def save(figure: Figure, path: Path) -> Path:
    """Write ``figure`` to ``path``, and return ``path``."""
    with replacing(path, "wb") as file:
        _render(figure, file, path.suffix.removeprefix("."))
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
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


@styled
def _render(figure: Figure, file: IO[Any], form: str, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name in a script that the font lacks is shown by the browser
        figure.savefig(file, format=form, **options)
