"""Opens the files of each ``data.source``: tokens, and where documents begin."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..config.data import DataConfig
from ..config.error import ConfigError
from .indexed import read_indexed
from .sequences import Body
from .tokens import DataError, FileTokens, Tokens

__all__ = ["joined", "open_body"]


def open_body(config: DataConfig, path: str) -> Body:
    """The tokens of one of ``config.paths``. Raises ``DataError`` and ``ConfigError``."""
    end = config.end_of_document
    if config.source == "hugging_face":
        return _open_dataset(path, config.column, end)
    if config.source == "megatron":
        tokens, starts = read_indexed(path)
    elif config.source == "text":
        tokens, starts = FileTokens(Path(path), np.dtype(np.uint8)), np.zeros(1, np.int64)  # a file is a document
    else:
        tokens, starts = FileTokens(Path(path), np.dtype(config.token_dtype).newbyteorder("<")), None
        # Of wider integers every second token would be 0, and training would go on.
        first = tokens[: 1 << 14]
        if len(first) >= 64 and first[::2].any() and not first[1::2].any():
            raise DataError(
                f"every second {tokens.dtype.name} at the beginning of data file '{path}' is 0: it seems to hold wider "
                f"integers; correct data.token_dtype"
            )
    return Body(Tokens([tokens]), starts, end)


def joined(bodies: Sequence[Body]) -> Body:
    """One body of all tokens, in order. Each body begins with a document, if any knows its documents."""
    if len(bodies) == 1:
        return bodies[0]
    firsts = np.cumsum([0, *(len(body.tokens) for body in bodies[:-1])])
    zero = np.zeros(1, np.int64)
    starts = [
        first + (zero if body.starts is None else body.starts) for first, body in zip(firsts, bodies, strict=True)
    ]
    return Body(Tokens([body.tokens for body in bodies]), np.concatenate(starts), bodies[0].end)


def _open_dataset(path: str, column: str, end: int | None) -> Body:
    """Rows stay in their memory-mapped file until they are read."""
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
    chunks = found.data.column(column).chunks
    lengths = np.concatenate([chunk.value_lengths().to_numpy(zero_copy_only=False) for chunk in chunks], dtype=np.int64)
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
    starts = np.cumsum(lengths) - lengths
    return Body(Tokens(values), np.unique(starts[lengths > 0]), end)
