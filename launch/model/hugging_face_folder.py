"""What is read of a Hugging Face folder, which may be a stranger's: no code runs, and no link leads out of it.

``transformers`` asks at standard input whether code of the folder may run, unless it is told. Here the answer is no,
unless the user has said otherwise in this command: a checkpoint or the records of a run cannot say so.
"""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from ...ddp.checkpoint.files.whole_file import open_small_file
from ..config.error import ConfigError
from ..config.file import flat

__all__ = ["check_weight_files", "copy_tokenizer", "load_settings", "stays_inside", "transformers_package"]

_KEY = "model.hugging_face"
_TOKENIZER_FILES = (
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_LARGEST = {"vocab_size": 2**24, "hidden_size": 2**20, "intermediate_size": 2**22, "num_hidden_layers": 10_000}
"""As for the GPT: what is larger overflows sizes, or is built for hours."""
_MOST_BYTES = 2**24


def transformers_package() -> Any:
    """``transformers``; raises ``ConfigError`` if it is missing."""
    try:
        import transformers
    except ImportError:
        raise ConfigError(f"{_KEY}: the package is missing; pip install 'transformers>=5.0'") from None
    return transformers


def load_settings(folder: str, *, trust_remote_code: bool) -> Any:
    """The configuration in ``config.json``.

    Raises ``ConfigError`` if the folder's own code would have to run, and for sizes of which no model is built; and
    whatever transformers raises otherwise.
    """
    transformers = transformers_package()
    _check_sizes(folder)
    try:
        settings = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except ValueError as error:
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise
        raise ConfigError(_refusal(folder, "auto_map")) from None
    if not trust_remote_code:
        _check_no_code(folder, settings)
    return settings


def _check_sizes(folder: str) -> None:
    """Raise ``ConfigError`` for a ``config.json`` that cannot be read, or has sizes of which no model is built. Before
    transformers reads it, which lists all layers."""
    try:
        with open_small_file(Path(folder) / "config.json", _MOST_BYTES) as file:
            sizes = flat(json.load(file))
    except FileNotFoundError:
        return  # transformers says so
    except (ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(f"{_KEY} = {folder!r}: its config.json cannot be read: {error}") from None
    for key, size in sizes.items():
        most = _LARGEST.get(key.rpartition(".")[2], size)
        if isinstance(size, int) and size > most:
            raise ConfigError(f"{_KEY} = {folder!r}: its config.json has {key} = {size}: must be at most {most}")


def _check_no_code(folder: str, settings: Any) -> None:
    """Raise ``ConfigError`` for a model whose class or kernels are somebody else's code."""
    transformers = transformers_package()
    known = type(settings) in transformers.AutoModelForCausalLM._model_mapping
    if not known and "AutoModelForCausalLM" in (getattr(settings, "auto_map", None) or {}):
        raise ConfigError(_refusal(folder, "auto_map"))
    parts = [settings, *(getattr(settings, name, None) for name in settings.sub_configs)]
    for part, name in itertools.product(parts, ("attn_implementation", "experts_implementation")):
        if "/" in str(getattr(part, f"_{name}", None) or ""):  # a repository
            raise ConfigError(_refusal(folder, name))


def _refusal(folder: str, what: str) -> str:
    return (
        f"{_KEY} = {folder!r}: its config.json asks for code that is not transformers' own ({what}), and none runs "
        f"unless you say so; read it, then set model.trust_remote_code = true (export: --trust-remote-code)"
    )


def check_weight_files(folder: Path) -> None:
    """Raise ``ConfigError`` if there are no safetensors, or if their index lists a file in another folder.

    On every rank, also on those that get the first rank's values: a mistake ends all of them.
    """
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{_KEY} = '{folder}': has no safetensors; model.pretrained = false draws new weights from config.json"
        )
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.exists() else {}
    for file in set(listed.values()):
        if Path(file).name != file:
            raise ConfigError(f"'{index}' names '{file}', which is no file of its folder; correct it")


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer's files; returns the names of those that lie elsewhere, behind links, and are left out."""
    left_out: list[str] = []
    for path in sorted(source.glob("*")):
        if not (path.name.startswith("tokenizer") or path.name in _TOKENIZER_FILES) or not path.is_file():
            continue
        if stays_inside(path):
            shutil.copy2(path, target / path.name)
        else:
            left_out.append(path.name)
    return left_out


def stays_inside(path: Path) -> bool:
    """Whether a file lies in its folder, or where the cache of Hugging Face keeps the files of a snapshot."""
    folder, place = path.parent.resolve(), path.resolve()
    cached = folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--")
    return place.parent == folder or (cached and place.parent == folder.parents[1] / "blobs")
