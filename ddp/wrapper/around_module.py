"""A module around a module: what it has not itself is that module's."""

from typing import Any

from torch import nn

__all__ = ["AroundModule"]


class AroundModule(nn.Module):
    """Reads and sets through to ``self.module`` what only that has: ``model.config``, ``model.generate()``.

    The wrapper's own names come first; where both have one, the module's is ``model.module.name``. Python's own names
    (``__len__``, ``__array__``) are not the module's: the wrapper is no container where its module is one.
    """

    module: nn.Module

    def __getattr__(self, name: str) -> Any:
        """Asked for what is no attribute of this object or its class, and for properties that raised AttributeError."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")  # none yet while it is made or unpickled
            if module is None or (name.startswith("__") and name.endswith("__")):
                raise
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # raises once more what a property of the wrapper's has raised
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute where it is read: the module's own in the module, a new one here."""
        if self.__dict__.get("_made") and not self._has(name) and hasattr(self.module, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def _has(self, name: str) -> bool:
        own = self.__dict__
        return name in own or hasattr(type(self), name) or any(name in own[f"_{each}"] for each in _REGISTERED)

    def _end_making(self) -> None:
        """From here on attributes are set through; before, all are the wrapper's."""
        self.__dict__["_made"] = True


_REGISTERED = ("parameters", "buffers", "modules")
