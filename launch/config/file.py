"""Reads a configuration: a TOML file, with values overridden from the command line.

An unknown key is refused with its full path and the most similar valid key. A value of the wrong type is refused with
the expected type. There are no silent conversions: ``"3"`` is not a number, and ``"false"`` is not a boolean.
"""

import dataclasses
import difflib
import functools
import math
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cattrs
import tyro
from cattrs.errors import AttributeValidationNote, IterableValidationNote

from ...ddp.checkpoint.files.small_file import open_small_file
from .error import require
from .optimizer import OptionValue
from .run import Config, ConfigError

__all__ = ["config_to_dict", "flat", "load_config", "override", "structure", "structure_of_run"]

_MOST_BYTES = 2**20

_PARALLEL = (
    'parallel = "ddp", "zero1", "hybrid", "fsdp" or "hsdp" stands at the top of the file, before the first table'
)
_ELSEWHERE = {
    "ddp.use_distributed_optimizer": _PARALLEL,
    "ddp.parallel": _PARALLEL,
    "fsdp.parallel": _PARALLEL,
    "train.parallel": _PARALLEL,
    "optimizer.parallel": _PARALLEL,
    "train.keep_last": "it is checkpoint.keep_last, in the table [checkpoint]",
    "train.keep_every": "it is checkpoint.keep_every, in the table [checkpoint]",
    "checkpoint.save_every": "it is train.save_every, in the table [train]",
    "checkpoint.resume": "it is train.resume, in the table [train]",
    "ddp.calculate_per_token_loss": "maingrad train averages over sequences of one length; set it in your own loop",
}
"""Keys that a user may try, and the remedy."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file; then apply ``overrides``, command-line arguments such as ``["--train.steps", "10"]``.

    Raises ``ConfigError`` for a missing file, invalid TOML, unknown keys and impossible values. Wrong command-line
    arguments end the process with status 2.
    """
    path = Path(path)
    try:
        with open_small_file(path, _MOST_BYTES) as file:
            document = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"configuration file '{path}' does not exist (working directory: {Path.cwd()})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file '{path}' is not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"configuration file '{path}' is not valid TOML: it nests too deep to be read") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"configuration file '{path}' cannot be read: {error}") from None
    try:
        return override(structure(document), overrides)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def structure(document: Mapping[str, Any]) -> Config:
    """A nested mapping -> ``Config``. Raises ``ConfigError``."""
    _check(Config, document, "")
    try:
        return _structure_converter().structure(document, Config)
    except cattrs.BaseValidationError as group:
        raise _first_cause(group) from None


def structure_of_run(document: Mapping[str, Any]) -> Config:
    """``structure`` of what the records of a run hold. They may be a stranger's, and cannot let code run."""
    config = structure(document)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, trust_remote_code=False))


def override(config: Config, arguments: Sequence[str]) -> Config:
    """Apply command-line arguments (``--parallel ddp``, ``--section.key value``) on top of ``config``."""
    if not arguments:
        return config
    given = tyro.cli(Config, default=config, args=list(arguments), prog="maingrad COMMAND CONFIG.toml")
    return structure(config_to_dict(given))  # which refuses what tyro takes for a value: inf as a number


def config_to_dict(config: Config) -> dict[str, Any]:
    """Nested plain values, ready for JSON; ``structure`` reads it back."""
    return typing.cast(dict[str, Any], _UNSTRUCTURE.unstructure(config))


_UNSTRUCTURE = cattrs.Converter()
"""Made once: it writes code for each table of a configuration when it first meets one, and each save asks."""


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"model": {"dim": 3}}`` -> ``{"model.dim": 3}``."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def _check(cls: type, document: Mapping[str, Any], prefix: str) -> None:
    """Refuse unknown keys, values that cattrs would accept for a table, a list or a choice, and impossible values."""
    hints = typing.get_type_hints(cls)
    valid = {f.name for f in dataclasses.fields(cls)}
    for key, value in document.items():
        if key not in valid:
            near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
            remedy = f"did you mean '{prefix}{near[0]}'?" if near else f"valid keys: {', '.join(sorted(valid))}"
            raise ConfigError(f"unknown key '{prefix}{key}': {_ELSEWHERE.get(prefix + key, remedy)}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{key} = {value!r}: must be a table, [{prefix}{key}]")
            _check(typing.cast(type, hints[key]), value, f"{prefix}{key}.")
        elif typing.get_origin(hints[key]) is dict and not isinstance(value, Mapping):
            raise ConfigError(f"{prefix}{key} = {value!r}: must be a table, {{ key = value }}")
        elif typing.get_origin(hints[key]) is tuple and not isinstance(value, list | tuple):
            raise ConfigError(f"{prefix}{key} = {value!r}: must be a list, [{value!r}]")
        elif (choices := _choices(hints[key])) and value not in choices:
            named = ", ".join(repr(choice) for choice in choices if choice is not None)
            raise ConfigError(f"{prefix}{key} = {value!r}: must be one of {named}")
        else:
            _check_possible(value, f"{prefix}{key}")


def _check_possible(value: Any, key: str) -> None:
    """Refuse numbers and names that no key can have."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            _check_possible(each, f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for each in value:
            _check_possible(each, key)
    elif isinstance(value, float):
        require(math.isfinite(value), key, value, "must be finite")
    elif isinstance(value, int):
        require(abs(value) < 2**63, key, value, "must have at most 63 bits")
    elif isinstance(value, str):
        require("\0" not in value, key, value, "must not hold the character NUL")


def _choices(hint: Any) -> tuple[Any, ...]:
    """The values of a ``Literal``, or of an optional ``Literal``; () for other types."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    members = typing.get_args(hint)
    if len(members) == 2 and members[1] is type(None) and typing.get_origin(members[0]) is typing.Literal:
        return (*typing.get_args(members[0]), None)
    return ()


@functools.cache
def _structure_converter() -> cattrs.Converter:
    """A converter that refuses what cattrs would convert: ``int("3")``, ``bool("false")``.

    Made once: it writes code for each table of a configuration when it first meets one.
    """
    converter = cattrs.Converter(detailed_validation=True)
    for cls, accepted in ((bool, (bool,)), (int, (int,)), (float, (int, float)), (str, (str,))):
        converter.register_structure_hook(cls, _strict(cls, accepted))
    # Optional scalars: TOML has no null, but the resolved configuration has.
    converter.register_structure_hook(typing.cast(type, bool | None), _optional(_strict(bool, (bool,))))
    converter.register_structure_hook(typing.cast(type, str | None), _optional(_strict(str, (str,))))
    converter.register_structure_hook(typing.cast(type, int | None), _optional(_strict(int, (int,))))
    converter.register_structure_hook(typing.cast(type, float | None), _optional(_strict(float, (int, float))))
    converter.register_structure_hook(typing.cast(type, OptionValue), _option)
    return converter


def _option(value: object, _: type) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise TypeError(f"must be a boolean, a number or a string, not {type(value).__name__}")
    return value


def _strict(cls: type, accepted: tuple[type, ...]) -> Callable[[object, type], Any]:
    def structure_strictly(value: object, _: type) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and cls is not bool):
            raise TypeError(f"must be {cls.__name__}, not {type(value).__name__}")
        return cls(value)

    return structure_strictly


def _optional(structure_value: Callable[[object, type], Any]) -> Callable[[object, type], Any]:
    return lambda value, cls: None if value is None else structure_value(value, cls)


def _first_cause(group: cattrs.BaseValidationError) -> ConfigError:
    """The first error in cattrs' tree, with the full path of its key."""
    path: list[str] = []
    error: BaseException = group
    while isinstance(error, cattrs.BaseValidationError):
        error = error.exceptions[0]
        for note in getattr(error, "__notes__", ()):
            if isinstance(note, AttributeValidationNote):
                path.append(note.name)
            elif isinstance(note, IterableValidationNote):
                path.append(str(note.index))
    if isinstance(error, ConfigError):
        return error  # it names its key itself
    return ConfigError(f"{'.'.join(path)}: {error}")
