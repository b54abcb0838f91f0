"""The error for a configuration that cannot be run."""

__all__ = ["ConfigError", "require"]


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the key and the remedy."""


def require(condition: bool, key: str, value: object, remedy: str) -> None:
    """Raise ``ConfigError`` with the key, its value and the remedy, unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{key} = {value!r}: {remedy}")
