"""Files that appear whole under their names, without a link being followed."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = ["replacing"]


@contextmanager
def replacing(path: Path, mode: str = "w", **options: Any) -> Iterator[IO[Any]]:
    """Write a file that takes the place of ``path`` at the end of the block; after an exception ``path`` is as it was.

    A folder of results may be a stranger's. Where ``path`` is a link, the link is replaced, and what it links to stays.

    mode     "w" or "wb"
    options  of ``open``; text is UTF-8
    """
    if "b" not in mode:
        options = {"encoding": "utf-8", **options}
    staging = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with staging.open(mode.replace("w", "x"), **options) as file:
            yield file
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)
