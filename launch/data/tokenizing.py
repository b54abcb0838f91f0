"""``maingrad tokenize``: text files into token files of Megatron's format."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from .indexed import IndexedWriter
from .sources import load_tokenizer, token_dtype_for
from .tokens import DataError

__all__ = ["Tokenized", "tokenize_files"]


class Tokenized(NamedTuple):
    """What has been written."""

    documents: int
    tokens: int


def tokenize_files(prefix: Path, files: Sequence[Path], tokenizer: Path | None, end: int | None, key: str) -> Tokenized:
    """Write ``PREFIX.bin`` and ``PREFIX.idx``; documents without a token are left out.

    tokenizer  a ``tokenizer.json``; None: UTF-8 bytes
    end        id after each document; None: none
    key        of the text in a line of a ``.jsonl`` file

    Raises ``ConfigError`` and ``DataError``; then there are no files.
    """
    encoder = None if tokenizer is None else load_tokenizer(str(tokenizer))
    size = 256 if encoder is None else encoder.get_vocab_size(with_added_tokens=True)
    documents = tokens = 0
    with IndexedWriter(prefix, token_dtype_for(max(size, 0 if end is None else end + 1))) as writer:
        for text in _documents(files, key):
            found: Sequence[int] = (
                list(text.encode()) if encoder is None else encoder.encode(text, add_special_tokens=False).ids
            )
            if not found:
                continue
            ids = [*found, *([] if end is None else [end])]
            writer.add(ids)
            documents, tokens = documents + 1, tokens + len(ids)
        if not documents:
            raise DataError(f"no text in {', '.join(map(str, files))}")
    return Tokenized(documents, tokens)


def _documents(files: Sequence[Path], key: str) -> Iterator[str]:
    for path in files:
        try:
            if path.suffix != ".jsonl":
                yield path.read_bytes().decode("utf-8")  # read_text would change the ends of lines
                continue
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _text_of(line, key, path, number)
        except OSError as error:
            raise DataError(f"data file '{path}' cannot be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise DataError(f"data file '{path}' is not UTF-8 ({error}); convert it") from None


def _text_of(line: str, key: str, path: Path, number: int) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise DataError(f"data file '{path}' line {number} is not JSON ({error})") from None
    text = found.get(key) if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise DataError(f"data file '{path}' line {number} has no string under '{key}'; name its key with --key")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"data file '{path}' line {number} has text that is no Unicode ({error}); mend it") from None
    return text
