"""A folder that transformers loads, out of a checkpoint of ``maingrad train``."""

import functools
import os
import sys
from pathlib import Path

import torch

from ..safetensors_io import export_safetensors, read_weights
from .hugging_face import save_hugging_face

__all__ = ["export"]


def export(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Write the weights of a checkpoint: into one file, if ``target`` ends with .safetensors (``export_safetensors``);
    else what a run of ``model.hugging_face`` writes after its last step, into a folder.

    trust_remote_code  whether code of the folder ``model.hugging_face``, which the checkpoint names, may run
    dtype              of all floating-point parameters, rounded from the masters where there are any; None: each
                       parameter keeps the dtype that the checkpoint has

    Needs no process group, and memory for the weights. Raises ``ValueError`` for a checkpoint of another model and for
    a folder that holds other files, and ``FileNotFoundError`` and ``ValueError`` like ``load_checkpoint``.
    """
    if Path(target).suffix == ".safetensors":
        export_safetensors(checkpoint, target, dtype=dtype)
        return
    weights = read_weights(checkpoint, dtype=dtype)
    source = weights.extra
    for key in ("config", "model", "hugging_face"):  # a program of somebody else's saves what it likes
        source = source.get(key) if isinstance(source, dict) else None
    if source is None:
        raise ValueError(
            f"'{checkpoint}' is not of a run with model.hugging_face; name a file that ends with .safetensors, for "
            f"its weights alone"
        )
    if not (Path(source) / "config.json").is_file():
        raise ValueError(f"'{source}', the model.hugging_face of '{checkpoint}', has no config.json (any more)")
    if Path(target).exists() and (not Path(target).is_dir() or any(Path(target).iterdir())):
        raise ValueError(f"'{target}' is there already; name a folder that is empty or new")
    say = functools.partial(print, file=sys.stderr)
    save_hugging_face(weights.tensors, source, target, say, trust_remote_code)
