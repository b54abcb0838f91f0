"""``ModelMasks``: models of Hugging Face decide in a capture as they do in eager calls whether a mask is needed.

Each forward of transformers asks on the host whether its sequences are packed, by their position numbers. In a capture
the host cannot ask, so transformers makes a mask, and attention takes a slower kernel with other rounding. Numbers that
the model makes itself, because the program gives none, do not depend on the batch. So the answer of eager calls holds.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ..collectives.streams import is_capturing

__all__ = ["ModelMasks"]

_ASKED = "find_packed_sequence_indices"
_GIVEN = ("position_ids", "attention_mask")


class ModelMasks:
    """The models of Hugging Face in ``root``, and what their eager forwards have found. Without any: does nothing."""

    def __init__(self, root: nn.Module) -> None:
        transformers = sys.modules.get("transformers")
        self._module = sys.modules.get("transformers.masking_utils")
        self._models: list[nn.Module] = []
        if transformers is not None and hasattr(self._module, _ASKED):
            kind = transformers.PreTrainedModel
            # torch.compile would trace the hooks.
            self._models = [
                module for module in root.modules() if isinstance(module, kind) and module._compiled_call_impl is None
            ]
        self._own: list[bool] = []
        """Whether each model whose forward runs now, from the outside in, makes positions itself."""
        self._num_whole = self._num_packed = 0

    @contextmanager
    def answered(self) -> Iterator[None]:
        """Around an eager call, to note the answers, and around a capture, to give them."""
        if not self._models:
            yield
            return
        with ExitStack() as stack:
            for model in self._models:
                names = list(inspect.signature(model.forward).parameters)
                hook = _noting(self._own, names)
                stack.callback(model.register_forward_pre_hook(hook, with_kwargs=True).remove)
                stack.callback(model.register_forward_hook(self._left, always_call=True).remove)
            stack.enter_context(_replaced(self._module, self))
            stack.callback(self._own.clear)
            yield

    def _left(self, *_: Any) -> None:
        self._own.pop()

    def ask(self, original: Callable[[Tensor], Tensor | None], position_ids: Tensor) -> Tensor | None:
        """transformers' function, unless this is a capture and the answer is known."""
        own = bool(self._own) and self._own[-1]
        if own and is_capturing() and self._num_whole and not self._num_packed:
            return None
        answer = original(position_ids)
        if own and not is_capturing():
            self._num_whole += answer is None
            self._num_packed += answer is not None
        return answer


def _noting(own: list[bool], names: list[str]) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        own.append(all(given.get(name) is None for name in _GIVEN))

    return note


_lock = threading.Lock()
_active = threading.local()
_replacements: list[Any] = []
"""transformers' own function, once for each thread that has replaced it: simulated ranks are threads."""


@contextmanager
def _replaced(module: Any, masks: ModelMasks) -> Iterator[None]:
    """While a thread is in here, its calls of transformers' function ask ``masks``."""
    with _lock:
        original = _replacements[0] if _replacements else getattr(module, _ASKED)

        def find(position_ids: Tensor) -> Tensor | None:
            mine: ModelMasks | None = getattr(_active, "masks", None)
            return original(position_ids) if mine is None else mine.ask(original, position_ids)

        _replacements.append(original)
        if len(_replacements) == 1:
            setattr(module, _ASKED, find)
    _active.masks = masks
    try:
        yield
    finally:
        _active.masks = None
        with _lock:
            _replacements.pop()
            if not _replacements:
                setattr(module, _ASKED, original)
