"""Where tokens come from, and which are held back for validation."""

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..config.data import DataConfig
from .sequences import Batch, Body, Documents, SequenceSet, stack_rows
from .sources import joined, open_body
from .tokens import DataError, Digest, Tokens, digest_of, digest_of_borders

__all__ = ["Batch", "Corpus", "DataError", "load_corpus", "stdlib_files", "validation_windows"]

# Folders that are left out: some machines lack the standard library's tests, and third-party packages differ.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "idlelib", "lib2to3"}


class Corpus(NamedTuple):
    """Training and validation tokens with their documents. Tokens of files stay in the files."""

    bodies: tuple[Body, ...]
    """The training data: one body for each path where paths have weights, else one."""
    validation_bodies: tuple[Body, ...]
    description: str

    @property
    def train(self) -> Tokens:
        """All training tokens."""
        return joined(self.bodies).tokens

    @property
    def validation(self) -> Tokens:
        """All validation tokens."""
        return joined(self.validation_bodies).tokens

    def digests(self, documents: Documents) -> dict[str, Digest]:
        """A digest of the training data and one of the validation data, by name.

        Under ``documents = "join"`` no sequence depends on where documents begin, and the digests do not either.
        """
        return {
            name: digest_of(joined(bodies).tokens)._replace(
                borders=digest_of_borders(
                    [(len(body.tokens), None if documents == "join" else body.starts) for body in bodies]
                )
            )
            for name, bodies in (("training", self.bodies), ("validation", self.validation_bodies))
        }


def load_corpus(config: DataConfig, *, sequence_length: int) -> Corpus:
    """Open the data of ``config``.

    Raises ``DataError`` for a missing or empty file, for a file whose size is no multiple of the token size, and for
    data that is shorter than one sequence of ``sequence_length`` tokens and its targets.
    """
    if config.source == "stdlib":
        bodies, kept, description = _load_stdlib(config)
    else:
        opened = [open_body(config, path) for path in config.paths]
        bodies = opened if config.weights else [joined(opened)]
        description = ", ".join(config.paths)
        if config.validation_paths:
            kept = [joined([open_body(config, path) for path in config.validation_paths])]
        else:
            wholes = [len(body.tokens) for body in bodies]
            borders = [whole - round(whole * config.validation_fraction) for whole in wholes]
            kept = [body.part(*span) for body, *span in zip(bodies, borders, wholes, strict=True)]
            bodies = [body.part(0, border) for body, border in zip(bodies, borders, strict=True)]
    if config.max_tokens is not None:
        bodies = [body.part(0, config.max_tokens) for body in bodies]
    corpus = Corpus(tuple(bodies), tuple(kept), description)
    for part, tokens in (("training", corpus.train), ("validation", corpus.validation)):
        if len(tokens) < sequence_length + 1:
            raise DataError(
                f"{description}: {len(tokens)} {part} tokens are too few for one sequence of {sequence_length} tokens "
                f"and its target; lower train.sequence_length below {max(len(tokens), 1)}, or give more data"
                + (" (data.validation_fraction says how much is held back)" if part == "validation" else "")
            )
    return corpus


def stdlib_files() -> list[Path]:
    """Source files of the running Python's standard library without its tests, sorted by path inside the library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if not _NOT_STDLIB.intersection(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def validation_windows(body: Body, *, count: int, sequence_length: int, documents: Documents = "join") -> Batch:
    """The fixed validation set: ``count`` sequences at evenly spaced places, first and last included.

    Sequences do not overlap: there are fewer where ``body`` is too short for ``count`` of them. Under ``documents =
    "pad"`` they are evenly spaced among the documents.
    """
    sequences = SequenceSet(body, sequence_length, documents)
    last = len(sequences) - 1 if documents == "pad" else len(body.tokens) - sequence_length - 1
    places = np.linspace(0, last, num=min(count, len(sequences))).astype(np.int64).tolist()
    row = sequences.row if documents == "pad" else sequences.row_at
    return stack_rows([row(place) for place in places], documents)


def _load_stdlib(config: DataConfig) -> tuple[list[Body], list[Body], str]:
    root, files = Path(sysconfig.get_path("stdlib")), stdlib_files()
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in files:
        # The hash of its path puts a file on a side, so that it stays there when a Python version adds or drops files.
        digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
        held_back = int.from_bytes(digest[:8], "big") < config.validation_fraction * 2**64
        parts[held_back].append(path.read_bytes())
    if not parts[False]:
        raise DataError(
            f"no Python source under '{root}' (a zipped or stripped standard library?); "
            f'set data.source = "text" and data.paths'
        )
    train, validation = (
        [Body(Tokens([np.frombuffer(b"".join(parts[side]), dtype=np.uint8)]), None, config.end_of_document)]
        for side in (False, True)
    )
    return train, validation, f"standard library source ({len(files)} files under {root})"
