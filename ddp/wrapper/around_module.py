"""A wrapper module that passes attributes which it lacks through to the wrapped module."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ..buckets.bucket_params import BucketParam
from ..contract.torch_wrappers import check_not_collected, check_not_inside

__all__ = ["AroundModule"]

_OURS = "a model in maingrad.ddp.DistributedDataParallel"


class AroundModule(nn.Module):
    """Reads and writes attributes of ``self.module`` that the wrapper lacks: ``model.config``, ``model.generate()``.

    The wrapper's own names come first; then ``model.module.name`` reads the module's. Python's own names (``__len__``,
    ``__array__``) are not passed through, so the wrapper is no container where its module is one.
    """

    module: nn.Module
    bucket_params: Sequence[BucketParam]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """``nn.Module.named_parameters``. Raises where torch's wrapper calls."""
        check_not_collected((entry.owned.param for entry in self.bucket_params), _OURS)
        return super().named_parameters(*args, **kwargs)

    def check_not_in_torch_ddp(self) -> None:
        """Raise ``RuntimeError`` inside torch's ``DistributedDataParallel``, which would reduce the same gradients."""
        check_not_inside((entry.owned.param for entry in self.bucket_params), _OURS)

    def __getattr__(self, name: str) -> Any:
        """Python calls this for missing attributes, and after a property raised ``AttributeError``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")  # None inside __init__ and while unpickling
            if module is None or (name.startswith("__") and name.endswith("__")):
                raise
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # a property of the wrapper: raise its error again
        return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute in the module if only the module has it, else here."""
        if self.__dict__.get("_made") and not self._has(name) and hasattr(self.module, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A plain, unwrapped copy of the model: what the wrapper adds stays with the original."""
        return copy.deepcopy(self.module, memo)

    def _has(self, name: str) -> bool:
        own = self.__dict__
        return name in own or hasattr(type(self), name) or any(name in own[f"_{each}"] for each in _REGISTERED)

    def _end_making(self) -> None:
        """From here on attributes may be set in the module; before, all are set here."""
        self.__dict__["_made"] = True


_REGISTERED = ("parameters", "buffers", "modules")
