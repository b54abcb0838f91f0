"""Opens the files of each ``data.source``: tokens, and where documents begin."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..config.data import DataConfig
from ..config.error import ConfigError
from .indexed import IndexedWriter, read_indexed
from .joined import ArrowTokens, JoinedTokens
from .sequences import Body
from .tokens import DataError, FileTokens

__all__ = ["joined", "load_tokenizer", "open_body", "token_dtype_for"]


def open_body(config: DataConfig, path: str, cache_dir: Path | None) -> Body:
    """The tokens of one of ``config.paths``. Raises ``DataError`` and ``ConfigError``."""
    end = config.end_of_document
    if config.source == "megatron":
        tokens, starts = read_indexed(path)
        return Body(tokens, starts, end)
    if config.source == "hugging_face":
        found = _open_dataset(path, config.column)
        return Body(found, np.unique(found.starts[:-1]), end)
    if config.tokenizer is not None:
        tokens, starts = read_indexed(_tokenized(config.tokenizer, path, cache_dir, end))
        return Body(tokens, starts, end)
    if config.source == "text":
        return Body(FileTokens(Path(path), np.dtype(np.uint8)), np.zeros(1, np.int64), end)  # a file is a document
    in_file = FileTokens(Path(path), np.dtype(config.token_dtype).newbyteorder("<"))
    _check_width(in_file, path)
    return Body(in_file, None, end)


def _check_width(tokens: FileTokens, path: str) -> None:
    """Raise ``DataError`` for a file of wider integers: every second token would be 0, and training would go on."""
    first = tokens[: 1 << 14]
    if len(first) >= 64 and first[::2].any() and not first[1::2].any():
        raise DataError(
            f"every second {tokens.dtype.name} at the beginning of data file '{path}' is 0: it seems to hold wider "
            f"integers; correct data.token_dtype"
        )


def joined(bodies: Sequence[Body]) -> Body:
    """One body of all tokens, in order. Each body begins with a document, if any knows its documents."""
    if len(bodies) == 1:
        return bodies[0]
    firsts = np.cumsum([0, *(len(body.tokens) for body in bodies[:-1])])
    zero = np.zeros(1, np.int64)
    starts = [
        first + (zero if body.starts is None else body.starts) for first, body in zip(firsts, bodies, strict=True)
    ]
    return Body(JoinedTokens([body.tokens for body in bodies]), np.concatenate(starts), bodies[0].end)


def load_tokenizer(path: str) -> Any:
    """A ``tokenizers.Tokenizer``. Raises ``ConfigError``, with the remedy, if the package or the file is missing."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(f"data.tokenizer = {path!r}: the package is missing; pip install tokenizers") from None
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the package raises plain Exception
        raise ConfigError(f"data.tokenizer = {path!r}: is no readable tokenizer.json ({error})") from None


def token_dtype_for(vocab_size: int) -> str:
    """The narrowest dtype of ``IndexedWriter`` for ids below ``vocab_size``."""
    return "uint8" if vocab_size <= 2**8 else "uint16" if vocab_size <= 2**16 else "int32"


def _tokenized(tokenizer_path: str, path: str, cache_dir: Path | None, end: int | None) -> Path:
    """Prefix of the tokens of a text file; encodes the file unless an earlier run has. Ranks write equal files."""
    tokenizer = load_tokenizer(tokenizer_path)
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"data file '{path}' cannot be read ({error.strerror}); correct data.paths") from None
    if not text:
        raise DataError(f"data file '{path}' is empty; correct data.paths")
    contents = hashlib.sha256(Path(tokenizer_path).read_bytes())
    contents.update(hashlib.sha256(text).digest() + repr(end).encode())
    assert cache_dir is not None, "the caller names a folder"
    prefix = cache_dir / contents.hexdigest()[:32]
    if prefix.with_suffix(".idx").exists() and prefix.with_suffix(".bin").exists():
        return prefix
    try:
        decoded = text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"data file '{path}' is not UTF-8 ({error}); convert it") from None
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    with IndexedWriter(prefix, token_dtype_for(max(size, (end or 0) + 1))) as writer:
        ids = tokenizer.encode(decoded, add_special_tokens=False).ids
        writer.add(ids if end is None else [*ids, end])
    return prefix


def _open_dataset(path: str, column: str) -> ArrowTokens:
    try:
        from datasets import Dataset, load_from_disk
    except ImportError:
        raise ConfigError('data.source = "hugging_face": the package is missing; pip install datasets') from None
    try:
        found = load_from_disk(path)
    except (OSError, ValueError) as error:
        raise DataError(f"data folder '{path}' is no dataset of save_to_disk ({error}); correct data.paths") from None
    if not isinstance(found, Dataset):
        raise DataError(f"data folder '{path}' holds several splits: name one, such as '{path}/{next(iter(found))}'")
    if column not in found.column_names:
        raise DataError(
            f"data folder '{path}' has no column '{column}', but {', '.join(found.column_names)}; set data.column"
        )
    if not len(found):
        raise DataError(f"data folder '{path}' is empty; correct data.paths")
    return ArrowTokens(found, column)
