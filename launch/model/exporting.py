"""A folder that transformers loads, out of a checkpoint of ``maingrad train``."""

import os
from pathlib import Path

import torch

from ..safetensors_io import read_weights
from .hugging_face import save_hugging_face

__all__ = ["export_hugging_face"]


def export_hugging_face(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> list[str]:
    """Write what a run of ``model.hugging_face`` writes after its last step, for any checkpoint of it.

    dtype              of all floating-point parameters, rounded from the masters where there are any; None: each
                       parameter keeps the dtype that the checkpoint has
    trust_remote_code  whether code of the folder ``model.hugging_face``, which the checkpoint names, may run

    Returns the names of that folder's files that are left out, because they are links to other folders.

    Needs no process group, and memory for the weights. Raises ``ValueError`` for a checkpoint of another model and for
    a folder that holds other files, and ``FileNotFoundError`` and ``ValueError`` like ``load_checkpoint``.
    """
    weights = read_weights(checkpoint, dtype=dtype)
    settings = weights.extra.get("config", {}).get("model", {}) if isinstance(weights.extra, dict) else {}
    source = settings.get("hugging_face")
    if source is None:
        raise ValueError(
            f"'{checkpoint}' is not of a run with model.hugging_face; name a file that ends with .safetensors, for "
            f"its weights alone"
        )
    if not (Path(source) / "config.json").is_file():
        raise ValueError(f"'{source}', the model.hugging_face of '{checkpoint}', has no config.json (any more)")
    if Path(target).exists() and (not Path(target).is_dir() or any(Path(target).iterdir())):
        raise ValueError(f"'{target}' is there already; name a folder that is empty or new")
    return save_hugging_face(weights.tensors, source, target, trust_remote_code=trust_remote_code)
