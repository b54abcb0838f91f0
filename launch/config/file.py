"""Reads a configuration: a TOML file, and flags that take the place of its values.

File and flags become one document before it is checked, so a flag mends a wrong value in the file. An unknown key is
refused with its full path and the most similar valid key. A value of the wrong type is refused with the expected type.
There are no silent conversions: ``"3"`` is not a number, and ``"false"`` is not a boolean.
"""

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union

import torch
import tyro

from ...ddp.checkpoint.files.whole_file import open_small_file
from .ddp import FULLY_SHARDED, what_parallel_decides
from .error import ConfigError, require
from .run import Config

__all__ = ["config_to_dict", "flat", "load_config", "print_keys", "structure", "structure_of_run"]

_MOST_BYTES = 2**20


def load_config(path: str | Path, flags: Sequence[str] = ()) -> Config:
    """Read a TOML file, with ``flags`` such as ``["--train.steps", "10"]`` in place of its values.

    Raises ``ConfigError`` for a missing file, invalid TOML, unknown keys and impossible values.
    """
    path = Path(path)
    document = _read(path)
    try:
        for key, texts in _split(flags):
            _put(document, key, texts)
        return structure(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        found = ", ".join(f"'{each}'" for each in sorted(path.glob("*.toml"))) or "it has none"
        raise ConfigError(f"'{path}' is a folder, and cannot be read: name a configuration file in it: {found}")
    try:
        with open_small_file(path, _MOST_BYTES) as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"configuration file '{path}' does not exist (working directory: {Path.cwd()})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file '{path}' is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"configuration file '{path}' is not valid TOML: it nests too deep to be read") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"configuration file '{path}' cannot be read: {error}") from None


# ---- A document becomes a configuration. ----


def structure(document: Mapping[str, Any]) -> Config:
    """A nested mapping -> ``Config``. Raises ``ConfigError``."""
    table = document.get("ddp", {})
    if isinstance(table, Mapping):
        given = {key: value for key, value in table.items() if value is not None}
        parallel, optimizer = document.get("parallel", "zero1"), document.get("optimizer")
        moments = optimizer.get("moment_dtype") if isinstance(optimizer, Mapping) else None
        document = {**document, "ddp": what_parallel_decides(parallel, given, moments) | given}
        units = document.get("fsdp", {})
        if moments == "uint8" and parallel in FULLY_SHARDED and isinstance(units, Mapping):
            document["fsdp"] = {"shard_atoms": "block", **units}
    return typing.cast(Config, _table(Config, document, ""))


def structure_of_run(document: Mapping[str, Any]) -> Config:
    """``structure`` of what the records of a run hold. They may be a stranger's, and cannot let code run."""
    config = structure(document)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, trust_remote_code=False))


def _table(cls: type, document: Mapping[str, Any], prefix: str) -> Any:
    """A dataclass from its table. ``prefix`` ends with a dot, if there is one."""
    hints = typing.get_type_hints(cls)
    for key in document:
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0.5)
            remedy = f"did you mean '{prefix}{near[0]}'?" if near else f"valid keys: {', '.join(sorted(hints))}"
            elsewhere = [path for path in flat(config_to_dict(Config())) if path.rpartition(".")[2] == key]
            raise ConfigError(f"unknown key '{prefix}{key}': {f'it is {elsewhere[0]!r}' if elsewhere else remedy}")
    values = {key: _value(hints[key], value, f"{prefix}{key}") for key, value in document.items()}
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:  # a class of the library, whose errors begin with the field's name
        decided = " (parallel decides on that)" if "use_distributed_optimizer" in str(error) else ""
        raise ConfigError(f"{prefix}{error}{decided}") from None


def _value(hint: Any, value: Any, key: str) -> Any:
    """``value`` as ``hint`` has it; raises ``ConfigError`` for another type and for a value that no key can have."""
    origin, members = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in members:
            return None
        members = tuple(member for member in members if member is not type(None))
        fitting = [member for member in members if type(value) is member]
        return _value((fitting or members)[0], value, key)
    if origin is Literal:
        known = any(value == member and type(value) is type(member) for member in members)  # 1 is not True
        require(known, key, value, f"must be one of {', '.join(map(repr, members))}")
        return value
    if origin is tuple:
        require(isinstance(value, list | tuple), key, value, f"must be a list, [{value!r}]")
        each = [members[0]] * len(value) if members[-1] is Ellipsis else members
        require(len(value) == len(each), key, value, f"must have {len(each)} values")
        return tuple(_value(part, found, f"{key}.{n}") for n, (part, found) in enumerate(zip(each, value, strict=True)))
    if origin is dict:
        require(isinstance(value, Mapping), key, value, "must be a table, { key = value }")
        return {name: _value(members[1], found, f"{key}.{name}") for name, found in value.items()}
    if dataclasses.is_dataclass(hint):
        require(isinstance(value, Mapping), key, value, f"must be a table, [{key}]")
        return _table(typing.cast(type, hint), value, f"{key}.")
    if hint is torch.dtype:
        found = getattr(torch, str(value), None)
        require(isinstance(found, torch.dtype), key, value, 'must be a dtype of torch, such as "bfloat16"')
        return found
    return _scalar(hint, value, key)


def _scalar(wanted: type, value: Any, key: str) -> Any:
    is_number = wanted is float and type(value) is int
    if type(value) is not wanted and not is_number:
        raise ConfigError(f"{key}: must be {wanted.__name__}, not {type(value).__name__}")
    if wanted is float:
        require(math.isfinite(value), key, value, "must be finite")
    elif wanted is int:
        require(abs(value) < 2**63, key, value, "must have at most 63 bits")
    elif wanted is str:
        require("\0" not in value, key, value, "must not hold the character NUL")
    return wanted(value)


def config_to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, ready for JSON; ``structure`` reads it back."""
    return dataclasses.asdict(config, dict_factory=_plain)


def _plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table, with dtypes as words."""
    return {key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value for key, value in pairs}


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"model": {"dim": 3}}`` -> ``{"model.dim": 3}``."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


# ---- Flags become a part of the document. ----


def print_keys(config: Config) -> None:
    """Print every flag with its meaning, and its value in ``config`` as the default. Ends the process."""
    tyro.cli(Config, default=config, args=["--help"], prog="maingrad COMMAND CONFIG.toml")


def _split(flags: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Keys and their texts: ``--optimizer.betas 0.8 0.9`` -> ("optimizer.betas", ["0.8", "0.9"])."""
    found: list[tuple[str, list[str]]] = []
    for word in flags:
        if word.startswith("--"):
            name, equals, text = word.removeprefix("--").partition("=")
            found.append((name.replace("-", "_"), [text] if equals else []))
        elif found:
            found[-1][1].append(word)
        else:
            raise ConfigError(f"'{word}' is no flag; flags are --TABLE.KEY VALUE")
    return found


def _put(document: dict[str, Any], key: str, texts: Sequence[str]) -> None:
    """Put the value of a flag into the document, as the type of its key reads it."""
    *tables, name = key.split(".")
    hint: Any = Config
    for table in tables:
        hint = _hint_in(hint, table)
        document = document.setdefault(table, {})
        require(isinstance(document, dict), table, document, f"must be a table, [{table}]")
    if not texts:  # --train.compile, --train.no-compile
        document[name.removeprefix("no_")] = not name.startswith("no_")
        return
    hint = _hint_in(hint, name)
    if typing.get_origin(hint) is tuple:
        document[name] = [_from_text(typing.get_args(hint)[0], text) for text in texts]
    else:
        require(len(texts) == 1, key, texts, "must be one value")
        document[name] = _from_text(hint, texts[0])


def _hint_in(hint: Any, key: str) -> Any:
    """The type of a key in a table; ``Any`` where none is known."""
    return typing.get_type_hints(hint).get(key, Any) if dataclasses.is_dataclass(hint) else Any


def _from_text(hint: Any, text: str) -> Any:
    """``"10"`` -> 10; the text itself, where words are wanted or nothing else can be read."""
    members = typing.get_args(hint) or (hint,)
    if text == "None" and type(None) in members:
        return None
    if str in members:
        return text
    try:
        return tomllib.loads(f"value = {text.lower() if text in ('True', 'False') else text}")["value"]
    except ValueError:  # no value of TOML, or a number of thousands of digits
        return text
