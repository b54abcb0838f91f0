"""Damage to a file that is drawn from a seed: cut, flipped, swapped, repeated, overwritten, retyped, nested, huge.

``damage(path, seed)`` changes the file in place. What it does follows from the file's content and the seed alone.
``exchange_entries(folder, seed)`` does so to a checkpoint: each of its files is whole afterwards, and one is wrong.
"""

import json
import os
import random
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

__all__ = ["damage", "entries_of", "exchange_entries"]


def damage(path: Path, seed: int) -> str:
    """Damage the file; returns what was done, in words."""
    draw = random.Random(seed)
    if draw.random() < 0.03:
        os.truncate(path, draw.choice((10**8, 10**11)))  # zeros behind it, which take no space
        return "lengthened"
    kind = draw.choice(_KINDS)
    path.write_bytes(kind(path.read_bytes(), draw))
    return kind.__name__.strip("_")


def exchange_entries(folder: Path, seed: int) -> str:
    """Bytes of two tensors of a data file in each other's place; returns the file, and the entries."""
    pairs = []
    for path in sorted(folder.glob("rank-*")):
        content = path.read_bytes()
        for (one, here), (other, there) in combinations(entries_of(path).items(), 2):
            first, second = (content[start : start + length] for start, length in (here, there))
            if len(first) == len(second) and first != second:
                pairs.append((path, here[0], there[0], first, second, f"{path.name} {one} {other}"))
    path, here_at, there_at, first, second, said = random.Random(seed).choice(pairs)
    with path.open("r+b") as file:
        for start, content in ((here_at, second), (there_at, first)):
            file.seek(start)
            file.write(content)
    return said


def entries_of(path: Path) -> dict[str, tuple[int, int]]:
    """Entry of a safetensors file -> position of its bytes, and their number."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"]
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (8 + length + start, end - start) for name, (start, end) in places.items()}


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def _flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 8))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _swapped(content: bytes, draw: random.Random) -> bytes:
    """Two runs in each other's place."""
    length = draw.choice((1, 4, 8, draw.randrange(1, 65), draw.randrange(1, 2000)))
    first, second = sorted(draw.randrange(max(1, len(content) - length)) for _ in range(2))
    second = max(second, min(first + length, len(content)))
    return (
        content[:first]
        + content[second : second + length]
        + content[first + length : second]
        + content[first : first + length]
        + content[second + length :]
    )


def _repeated(content: bytes, draw: random.Random) -> bytes:
    at, length = draw.randrange(len(content)), draw.randrange(1, 2000)
    return content[:at] + content[at : at + length] * draw.choice((2, 3, 500)) + content[at + length :]


def _overwritten(content: bytes, draw: random.Random) -> bytes:
    at, length = draw.randrange(len(content)), draw.choice((8, draw.randrange(1, 100), 4096))
    return content[:at] + draw.choice((draw.randbytes(length), bytes(length))) + content[at + length :]


def _retyped(content: bytes, draw: random.Random) -> bytes:
    """One value of JSON becomes one of another kind; in other files, one byte becomes an opcode of pickles."""
    if not content.startswith(b"{"):
        at = draw.randrange(len(content))
        return content[:at] + bytes([draw.choice(b"()]}N\x85\x86\x87hjqr\x94RbuseatXKMJ.")]) + content[at + 1 :]
    return _with_value(content, draw, draw.choice((None, True, -1, 1.5, float("nan"), "34", "", [], {}, [[]], [{}], 7)))


def _nested(content: bytes, draw: random.Random) -> bytes:
    """Lists in lists, tuples of twice the one before."""
    if content.startswith(b"{"):
        return _with_value(content, draw, "NEST").replace(b'"NEST"', b"[" * 50_000 + b"]" * 50_000)
    at = draw.randrange(len(content))
    twice = b")\x94" + b"".join(b"h" + bytes([index]) + b"h" + bytes([index]) + b"\x86\x94" for index in range(90))
    return content[:at] + draw.choice((twice, b"]" * 50_000, b"(" * 50_000, b"[" * 50_000)) + content[at:]


def _huge(content: bytes, draw: random.Random) -> bytes:
    """A number or a length that is far too large."""
    if content.startswith(b"{"):
        return _with_value(content, draw, draw.choice((2**40, 2**70, 10**300, 1e300, float("inf"), [2**31] * 8)))
    at = draw.randrange(len(content))
    number = draw.choice(
        (b"\xff" * 4, b"\xff" * 8, b"\xff\xff\xff\x7f", b"J\x00\x00\x00\x40", b"\x8a\xff" + b"\x7f" * 255)
    )
    return content[:at] + number + content[at + len(number) :]


def _with_value(content: bytes, draw: random.Random, value: Any) -> bytes:
    """JSON with one of its values replaced."""
    root = json.loads(content)
    holder = root
    while True:
        key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if not (isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.85):
            break
        holder = holder[key]
    holder[key] = value
    return json.dumps(root).encode()


_KINDS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _cut,
    _flipped,
    _flipped,
    _swapped,
    _repeated,
    _overwritten,
    _retyped,
    _nested,
    _huge,
)
