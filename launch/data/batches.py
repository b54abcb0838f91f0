"""Where tokens come from, which are held back for validation, and which sequences each rank reads at each step.

A step's global batch depends on (seed, step) alone. Its row ``(microbatch * ranks + rank) * rows + i`` is row ``i`` of
that microbatch on that rank. So N ranks together read exactly what one process reads with the same global batch.
"""

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..config.data import DataConfig
from .sequences import Batch, Body, Documents, SequenceSet, stack_rows
from .sources import joined, open_body
from .tokens import DataError, Digest, Tokens, digest_of, digest_of_borders

__all__ = ["Batch", "Corpus", "DataError", "load_corpus", "sample_batch", "stdlib_files", "validation_windows"]

# Folders that are left out: some machines lack the standard library's tests, and third-party packages differ.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "idlelib", "lib2to3"}


class Corpus(NamedTuple):
    """Training and validation tokens: unsigned integers, one dim each. Tokens of a single file stay in the file."""

    train: Tokens
    validation: Tokens
    description: str
    bodies: tuple[Body, ...] = ()
    """The training tokens with their documents: one for each path where paths have weights, else one."""
    validation_bodies: tuple[Body, ...] = ()

    def digests(self, documents: Documents) -> dict[str, Digest]:
        """A digest of the training data and one of the validation data, by name.

        Under ``documents = "join"`` no sequence depends on where documents begin, and the digests do not either.
        """
        parts = {"training": (self.train, self.bodies), "validation": (self.validation, self.validation_bodies)}
        return {
            name: digest_of(tokens)._replace(
                borders=digest_of_borders(
                    [(len(body.tokens), None if documents == "join" else body.starts) for body in bodies]
                )
            )
            for name, (tokens, bodies) in parts.items()
        }


def load_corpus(config: DataConfig, *, sequence_length: int, cache_dir: Path | None = None) -> Corpus:
    """Open the data of ``config``.

    cache_dir  folder for the tokens of ``config.tokenizer``; None: ``config.cache_dir`` must be set

    Raises ``DataError`` for a missing or empty file, for a file whose size is no multiple of the token size, and for
    data that is shorter than one sequence of ``sequence_length`` tokens and its targets.
    """
    if config.source == "stdlib":
        train, validation, description = _load_stdlib(config.validation_fraction)
        bodies, kept = [Body(train, None, config.end_of_document)], [Body(validation, None, config.end_of_document)]
    else:
        cache = Path(config.cache_dir) if config.cache_dir is not None else cache_dir
        opened = [open_body(config, path, cache) for path in config.paths]
        bodies = opened if config.weights else [joined(opened)]
        description = ", ".join(config.paths)
        if config.validation_paths:
            kept = [joined([open_body(config, path, cache) for path in config.validation_paths])]
        else:
            kept = []
            for index, body in enumerate(bodies):
                whole = len(body.tokens)
                border = whole - round(whole * config.validation_fraction)
                kept.append(body.part(border, whole))
                bodies[index] = body.part(0, border)
    if config.max_tokens is not None:
        bodies = [body.part(0, config.max_tokens) for body in bodies]
    train, validation = joined(bodies).tokens, joined(kept).tokens
    for part, tokens in (("training", train), ("validation", validation)):
        if len(tokens) < sequence_length + 1:
            raise DataError(
                f"{description}: {len(tokens)} {part} tokens are too few for one sequence of {sequence_length} tokens "
                f"and its target; lower train.sequence_length below {max(len(tokens), 1)}, or give more data"
                + (" (data.validation_fraction says how much is held back)" if part == "validation" else "")
            )
    return Corpus(train, validation, description, tuple(bodies), tuple(kept))


def stdlib_files() -> list[Path]:
    """Source files of the running Python's standard library without its tests, sorted by path inside the library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (path for path in root.rglob("*.py") if not _NOT_STDLIB.intersection(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def sample_batch(
    tokens: Tokens,
    *,
    seed: int,
    step: int,
    microbatch: int,
    num_microbatches: int,
    rank: int,
    world_size: int,
    global_batch_size: int,
    sequence_length: int,
) -> Batch:
    """The sequences of one microbatch of one rank, at random places of ``tokens``.

    A counter-based generator keyed by (seed, step) draws the places. So there is no generator state to save, and a run
    can go on with another number of ranks. ``num_microbatches * world_size`` must divide ``global_batch_size``.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = generator.integers(0, len(tokens) - sequence_length, size=global_batch_size)
    rows = global_batch_size // (num_microbatches * world_size)
    first = (microbatch * world_size + rank) * rows
    return _windows(tokens, starts[first : first + rows], sequence_length)


def validation_windows(
    tokens: Tokens | Body, *, count: int, sequence_length: int, documents: Documents = "join"
) -> Batch:
    """The fixed validation set: ``count`` sequences at evenly spaced places, first and last included.

    Sequences do not overlap: there are fewer where ``tokens`` are too short for ``count`` of them. Under ``documents =
    "pad"`` they are evenly spaced among the documents.
    """
    body = tokens if isinstance(tokens, Body) else Body(tokens)
    sequences = SequenceSet(body, sequence_length, documents)
    if documents == "pad":
        chosen = np.linspace(0, len(sequences) - 1, num=min(count, len(sequences))).astype(np.int64)
        return stack_rows([sequences.row(index) for index in chosen.tolist()], documents)
    count = min(count, len(sequences))
    starts = np.linspace(0, len(body.tokens) - sequence_length - 1, num=count).astype(np.int64)
    return stack_rows([sequences.row_at(start) for start in starts.tolist()], documents)


def _windows(tokens: Tokens, starts: NDArray[np.int64], sequence_length: int) -> Batch:
    sequences = SequenceSet(Body(tokens), sequence_length, "join")
    return stack_rows([sequences.row_at(start) for start in starts.tolist()], "join")


def _load_stdlib(validation_fraction: float) -> tuple[Tokens, Tokens, str]:
    root = Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    files = stdlib_files()
    for path in files:
        # The hash of its path puts a file on a side, so that it stays there when a Python version adds or drops files.
        digest = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
        held_back = int.from_bytes(digest[:8], "big") < validation_fraction * 2**64
        parts[held_back].append(path.read_bytes())
    if not parts[False]:
        raise DataError(
            f"no Python source under '{root}' (a zipped or stripped standard library?); "
            f'set data.source = "text" and data.paths'
        )
    train, validation = (np.frombuffer(b"".join(parts[side]), dtype=np.uint8) for side in (False, True))
    return train, validation, f"standard library source ({len(files)} files under {root})"
