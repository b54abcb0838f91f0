"""A run of a second: a GPT of 30 thousand parameters on a kilobyte or two of text."""

from pathlib import Path
from typing import Any

from maingrad.launch.config.file import structure
from maingrad.launch.config.run import Config

__all__ = ["TEXT", "tiny_config", "tiny_document", "tiny_toml"]

TEXT = "".join(f"def f{i}(x):\n    return x * {i} + {i * i % 7}\n\n" for i in range(120))

_MODEL = {"dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 64, "context_length": 32}
_TRAIN = {
    "steps": 6,
    "global_batch_size": 24,
    "num_microbatches": 2,
    "sequence_length": 24,
    "eval_every": 4,
    "eval_sequences": 8,
    "device": "cpu",
}
_OPTIMIZER = {"lr": 3e-3, "warmup_steps": 2}
_DDP = {"overlap_grad_reduce": True, "bucket_size": 6000}


def tiny_document(folder: Path, *, parallel: str = "zero1", **sections: dict[str, Any]) -> dict[str, Any]:
    """The configuration as TOML gives it, with values replaced by ``sections``; its text file lies in ``folder``."""
    text = folder / "text.py"
    if not text.exists():
        text.write_text(TEXT)
    document = {
        "model": _MODEL,
        "data": {"source": "text", "paths": [str(text)], "validation_fraction": 0.2},
        "train": _TRAIN | {"out_dir": str(folder / "run")},
        "optimizer": _OPTIMIZER,
        "ddp": _DDP,
        "fsdp": {},
        "mesh": {},
        "checkpoint": {},
        "logging": {},
        "profile": {},
    }
    return {"parallel": parallel} | {name: values | sections.get(name, {}) for name, values in document.items()}


def tiny_config(folder: Path, *, parallel: str = "zero1", **sections: dict[str, Any]) -> Config:
    """``tiny_document``, read."""
    return structure(tiny_document(folder, parallel=parallel, **sections))


def tiny_toml(folder: Path, *, parallel: str = "zero1", **sections: dict[str, Any]) -> Path:
    """``tiny_document`` as a file."""
    document = tiny_document(folder, parallel=parallel, **sections)
    lines = [f"parallel = {_toml(document.pop('parallel'))}"]
    for section, values in document.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
    path = folder / "tiny.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
