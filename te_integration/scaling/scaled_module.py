"""``ScaledModule``: buffers of delayed scaling in a module. ``delayed_scaling.py`` makes and changes them.

A module keeps, n = 3 for each of its products: of the input, the weight and the gradient of the output

    fp8_scale         [n]     what elements are multiplied by before the cast
    fp8_amax_history  [L, n]  row 0: the largest amax of this iteration so far, -1 where there is none yet;
                              the last row: the last iteration's; row 1: the oldest
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BUFFERS", "NONE_YET", "OPERANDS", "ScaledModule"]

BUFFERS = ("fp8_scale", "fp8_amax_history")
OPERANDS = {"input": 0, "weight": 1, "grad": 2}
"""Places in a row."""
NONE_YET = -1.0
"""Stands where no amax was recorded: less than any amax."""


class ScaledModule:
    """Mixin of modules whose products may have delayed scaling. Buffers are made by the first forward that records."""

    num_products = 1
    """0: delayed scaling is refused."""
    _scaling_use: Any = None
    """The host's state, ``ScalingUse``, from the first forward that records."""
    training: bool
    weight_names: tuple[str, ...]
    _buffers: dict[str, Tensor | None]
    _parameters: dict[str, nn.Parameter | None]

    def describe(self) -> str:
        """The module's name in errors."""
        raise NotImplementedError

    def weights_present(self) -> Iterator[nn.Parameter]:
        """The weights that are registered as parameters."""
        return (weight for name in self.weight_names if (weight := self._parameters.get(name)) is not None)

    def make_room(self, length: int, device: torch.device) -> None:
        """Make the buffers, move them, or resize the history to ``length`` rows, where needed."""
        scales, history = (self._buffers.get(name) for name in BUFFERS)
        if scales is None or history is None:
            scales = self.first_scales(device)
            history = torch.full_like(scales, NONE_YET)[None]
        elif scales.device == device and history.shape[0] == length:
            return
        kept = history[max(1, history.shape[0] - length + 1) :]
        missing = history.new_zeros(length - 1 - kept.shape[0], history.shape[1])
        values = scales.to(device), torch.cat([history[:1], missing, kept]).to(device)
        assert isinstance(self, nn.Module)
        for name, value in zip(BUFFERS, values, strict=True):
            self.register_buffer(name, value)

    def first_scales(self, device: torch.device) -> Tensor:
        """[n] ones."""
        return torch.ones(len(OPERANDS) * self.num_products, dtype=torch.float32, device=device)

    def drop_scaling(self) -> None:
        """Forget scales and amaxes."""
        vars(self).pop("_scaling_use", None)
        for name in BUFFERS:
            self._buffers.pop(name, None)

    def on_demand_buffers(self) -> tuple[str, ...]:
        """Names of buffers that checkpoints may hold or lack."""
        return BUFFERS if self.num_products else ()

    def fits_stored(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return True if these are shapes of ``on_demand_buffers``."""
        scales, history = (shapes.get(name, ()) for name in BUFFERS)
        width = (len(OPERANDS) * self.num_products,)
        return len(history) == 2 and history[0] > 0 and scales == history[1:] == width

    @torch.no_grad()
    def adopt_stored(self, stored: Mapping[str, Tensor]) -> None:
        """Take ``on_demand_buffers`` from a checkpoint. None there: scales begin anew, in place."""
        if stored:
            self._expect_stored(stored[BUFFERS[1]].shape[0])
        scales, history = (self._buffers.get(name) for name in BUFFERS)
        if scales is None or history is None:
            return
        if stored:
            scales.copy_(stored[BUFFERS[0]])
            history.copy_(stored[BUFFERS[1]])
        else:
            scales.fill_(1.0)
            history.zero_()[0] = NONE_YET

    def _expect_stored(self, length: int) -> None:
        """Make buffers for a state that is loaded, where the module is."""
        scales = self._buffers.get(BUFFERS[0])
        self.make_room(length, (next(self.weights_present()) if scales is None else scales).device)
        if self._scaling_use is not None:
            self._scaling_use.record_loaded()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = [self._buffers.get(name) for name in BUFFERS]
        module = super()._apply(fn, recurse)  # type: ignore[misc]  # nn.Module's
        for name, value in zip(BUFFERS, before, strict=True):
            moved = self._buffers.get(name)
            if value is not None and moved is not None and moved.dtype is not value.dtype:  # half(), bfloat16()
                self._buffers[name] = value.to(moved.device)
        return module

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        shapes = {n: tuple(state_dict[prefix + n].shape) for n in self.on_demand_buffers() if prefix + n in state_dict}
        if self.fits_stored(shapes) and any(True for _ in self.weights_present()):
            self._expect_stored(shapes[BUFFERS[1]][0])
        elif not shapes and self._buffers.get(BUFFERS[0]) is not None:
            # A state of before the recipe, or of weights alone: nothing is missing, and scales stay.
            state_dict |= {prefix + name: self._buffers[name] for name in BUFFERS}
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]  # nn.Module's
