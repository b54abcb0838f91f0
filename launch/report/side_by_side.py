"""Texts of several runs beside each other, and those in which the runs differ."""

from collections.abc import Mapping, Sequence
from itertools import chain

from .run_folder import RunFolder

__all__ = ["differing", "environment", "side_by_side"]

_NOTHING = "none"
_NOT_COMPARED = {"train.out_dir", "executable", "folder", "command"}
"""Settings that differ between any two runs."""


def environment(run: RunFolder) -> dict[str, str]:
    """Model, ranks and device, versions, commit and command."""
    model = run.config and run.config.model
    document = {
        "model": model and (model.hugging_face or f"GPT of {model.num_layers} blocks, width {model.dim}"),
        "ranks": run.world_size,
        "backend": run.observed.get("backend"),
        "device": run.device,
        **run.versions,
        **{key: run.resolved.get(key) for key in ("git_commit", "command")},
        "folder": run.path,
    }
    return {key: _NOTHING if value is None else str(value) for key, value in document.items()}


def side_by_side(documents: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """The texts of each key, one for each document."""
    return {key: [document.get(key, _NOTHING) for document in documents] for key in dict.fromkeys(chain(*documents))}


def differing(rows: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The rows of ``side_by_side`` that tell the runs apart."""
    return {key: texts for key, texts in rows.items() if key not in _NOT_COMPARED and len(set(texts)) > 1}
