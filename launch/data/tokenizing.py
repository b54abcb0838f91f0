"""Text into token files of Megatron's format: ``maingrad tokenize``."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..config.error import ConfigError
from .indexed import Written, write_indexed
from .tokens import DataError

__all__ = ["tokenize_files"]


def tokenize_files(
    prefix: Path, files: Sequence[Path], tokenizer: Path | None, end: int | None, key: str | None
) -> Written:
    """Write ``PREFIX.bin`` and ``PREFIX.idx``; documents without a token are left out.

    tokenizer  a ``tokenizer.json``; None: UTF-8 bytes
    end        id after each document; None: none
    key        of the text in a line of a ``.jsonl`` file; None: each file is one document

    Raises ``ConfigError`` and ``DataError``; then there are no files.
    """
    encoder = None if tokenizer is None else _load_tokenizer(str(tokenizer))
    size = 256 if encoder is None else encoder.get_vocab_size(with_added_tokens=True)
    size = max(size, 0 if end is None else end + 1)
    dtype = "uint8" if size <= 2**8 else "uint16" if size <= 2**16 else "int32"

    def encoded() -> Iterator[Sequence[int]]:
        found = False
        for text in _documents(files, key):
            ids = [*text.encode()] if encoder is None else encoder.encode(text, add_special_tokens=False).ids
            found = found or bool(ids)
            yield [*ids, *([] if end is None or not ids else [end])]
        if not found:
            raise DataError(f"no text in {', '.join(map(str, files))}")

    return write_indexed(prefix, encoded(), dtype=dtype)


def _load_tokenizer(path: str) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError(f"--tokenizer {path!r}: the package is missing; pip install tokenizers") from None
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the package raises plain Exception
        raise ConfigError(f"--tokenizer {path!r}: is no readable tokenizer.json ({error})") from None
    tokenizer.no_padding()  # documents are as long as they are, whatever the file says of a model's inputs
    tokenizer.no_truncation()
    return tokenizer


def _documents(files: Sequence[Path], key: str | None) -> Iterator[str]:
    for path in files:
        try:
            if key is None or path.suffix != ".jsonl":
                yield path.read_bytes().decode("utf-8")  # read_text would change the ends of lines
                continue
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _text_of(line, key, f"data file '{path}' line {number}")
        except OSError as error:
            raise DataError(f"data file '{path}' cannot be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise DataError(f"data file '{path}' is not UTF-8 ({error}); convert it") from None


def _text_of(line: str, key: str, where: str) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error})") from None
    text = found.get(key) if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{where} has no string under '{key}'; name its key with --key")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where} has text that is no Unicode ({error}); mend it") from None
    return text
