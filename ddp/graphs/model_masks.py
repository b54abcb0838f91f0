"""``ModelMasks``: models of Hugging Face decide in a capture as they do in eager calls whether a mask is needed.

Each forward of transformers asks on the host whether its sequences are packed, by their position numbers, and whether
they are padded, by a mask. In a capture the host cannot ask, so transformers makes a mask for attention, which takes a
slower kernel with other rounding. Positions and masks that the model makes itself, because the program gives none, do
not depend on the batch. So the answer of eager calls holds.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..collectives.streams import is_capturing

__all__ = ["ModelMasks"]

_PACKED = "packed"
_ASKED = ("find_packed_sequence_indices", "_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
"""Functions of transformers' ``masking_utils``. The first is given positions; the others a mask of padding or None."""
_GIVEN = ("position_ids", "attention_mask", "encoder_attention_mask", "decoder_attention_mask")


class ModelMasks:
    """The models of Hugging Face in ``root``, and what their eager forwards have found. Without any: does nothing."""

    def __init__(self, root: nn.Module) -> None:
        transformers = sys.modules.get("transformers")
        self._module = sys.modules.get("transformers.masking_utils")
        self._models: list[nn.Module] = []
        if transformers is not None and all(hasattr(self._module, name) for name in _ASKED):
            kind = transformers.PreTrainedModel
            # torch.compile would trace the hooks.
            self._models = [
                module for module in root.modules() if isinstance(module, kind) and module._compiled_call_impl is None
            ]
        self._own: list[bool] = []
        """Whether each model whose forward runs now, from the outside in, makes positions and masks itself."""
        self._answers: dict[Hashable, set[Any]] = {}
        """What eager calls were told about what a model has made itself, by function and sizes."""
        self._skips = False
        """Whether eager calls made no mask for a batch, by what the program has given."""

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

    def ask(self, name: str, original: Callable[..., Any], tensor: Tensor | None, *sizes: Any) -> Any:
        """transformers' function of this name, unless this is a capture and the answer is known."""
        if not (tensor is None or (self._own and self._own[-1])):
            return self._ask_of_batch(name, original, tensor, *sizes)
        answers = self._answers.setdefault((name, tensor is None, *sizes), set())
        if is_capturing() and len(answers) == 1 and (known := next(iter(answers))) is not _PACKED:
            return known
        answer = original(tensor, *sizes)
        if not is_capturing():
            answers.add(_PACKED if isinstance(answer, Tensor) else answer)
        return answer

    def _ask_of_batch(self, name: str, original: Callable[..., Any], tensor: Tensor, *sizes: Any) -> Any:
        """The same of what the program gives, which may differ from batch to batch: a graph makes the mask."""
        if not is_capturing():
            answer = original(tensor, *sizes)
            self._skips |= answer is None or answer is True
            return answer
        if self._skips:
            raise RuntimeError(
                "transformers reads the attention_mask or position_ids of each batch on the host, and has found some "
                "that need no mask, for which a graph would have a slower kernel: leave them out of whole sequences"
            )
        return original(tensor, *sizes) if name == _ASKED[0] else False


def _noting(own: list[bool], names: list[str]) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        own.append(all(given.get(name) is None for name in _GIVEN))

    return note


_lock = threading.Lock()
_active = threading.local()
_originals: list[dict[str, Any]] = []
"""transformers' own functions, once for each thread that has replaced them: simulated ranks are threads."""


@contextmanager
def _replaced(module: Any, masks: ModelMasks) -> Iterator[None]:
    """While a thread is in here, its calls of transformers' functions ask ``masks``."""
    with _lock:
        originals = _originals[0] if _originals else {name: getattr(module, name) for name in _ASKED}
        if not _originals:
            for name, original in originals.items():
                setattr(module, name, partial(_ask_active, name, original))
        _originals.append(originals)
    _active.masks = masks
    try:
        yield
    finally:
        _active.masks = None
        with _lock:
            _originals.pop()
            for name, original in () if _originals else originals.items():
                setattr(module, name, original)


def _ask_active(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    masks: ModelMasks | None = getattr(_active, "masks", None)
    return original(*args, **kwargs) if masks is None or kwargs else masks.ask(name, original, *args)
