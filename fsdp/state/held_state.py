"""``HeldState``: what a ``ShardedAdamW`` keeps of one parameter, compact or full."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ddp.optimizer.moment_blocks import scale_key
from ...ddp.optimizer.steps import MASTER, REMAINDER, SECOND_MOMENT
from ...ddp.torch_internals import DisableTorchFunctionSubclass
from ...kernels.optimizer.eight_bits import dequantize_moment, quantize_moment
from ...kernels.optimizer.reference import join_master, split_master

__all__ = ["MOMENTS", "STEP", "HeldState", "flat_of"]

STEP = "step"
MOMENTS = ("exp_avg", SECOND_MOMENT)


class HeldState(NamedTuple):
    """State of one parameter, at the same addresses for ever: loads copy into it, and graphs replay updates of it."""

    tensors: dict[str, Tensor]
    """By torch's keys, and ``"remainder"``. Moments in 8 bits have scales beside them, by ``scale_key``."""
    plain: Tensor
    """The parameter as a plain tensor of one dim, with the parameter's version."""
    on_device: dict[str, Tensor]
    """Those that a step reads and writes: ``tensors``, or device memory that several buckets use by turns."""

    @property
    def is_compact(self) -> bool:
        """Whether the parameter and its remainder are the master. False: the parameter is the master."""
        return REMAINDER in self.tensors

    def is_in(self, given: Mapping[str, Any]) -> bool:
        """Whether ``given`` has these tensors, and no others."""
        return len(given) == len(self.tensors) and all(given.get(key) is each for key, each in self.tensors.items())

    def take(self, given: Mapping[str, Any]) -> None:
        """Copy state in either form. What ``given`` lacks begins anew. The parameter follows a ``"master"``."""
        given = {**given, **self._coded(given)}
        for key, mine in self.tensors.items():
            value = given.get(key)
            if value is None:
                mine.zero_()
            elif value is not mine:
                _copy(key, mine, torch.as_tensor(value))
        master: Tensor | None = given.get(MASTER)
        if master is None:
            return
        values = master.reshape(-1).float()
        if self.is_compact:
            values, remainder = split_master(values)
            self.tensors[REMAINDER].view(-1).copy_(remainder)
        self.plain.copy_(values)

    def _coded(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        """Codes and scales of moments that are kept in 8 bits and that ``given`` has as numbers."""
        coded: dict[str, Tensor] = {}
        for key in MOMENTS:
            values = given.get(key)
            if self.tensors[key].dtype is torch.uint8 and values is not None and values.dtype is not torch.uint8:
                codes, scales = quantize_moment(values.reshape(-1).float(), signed=key != SECOND_MOMENT)
                coded |= {key: codes.view(values.shape), scale_key(key): scales}
        return coded

    def forget_remainder(self) -> None:
        """A program has written the parameter, which is the master now."""
        if self.is_compact:
            self.tensors[REMAINDER].zero_()

    def full(self) -> dict[str, Tensor]:
        """torch's state with fp32 moments, and the ``"master"`` of a compact parameter; copies in host memory."""
        full = {key: self._moment(key) for key in MOMENTS}
        if self.is_compact:
            full[MASTER] = self.master().view(self.tensors[REMAINDER].shape)
        return {STEP: self.tensors[STEP].clone(), **full}

    def _moment(self, key: str) -> Tensor:
        """A moment in fp32, a copy in host memory."""
        mine = self.tensors[key]
        if mine.dtype is not torch.uint8:
            return mine.to("cpu", torch.float32, copy=True)
        values = dequantize_moment(mine.view(-1), self.tensors[scale_key(key)], signed=key != SECOND_MOMENT)
        return values.cpu().view(mine.shape)

    def master(self) -> Tensor:
        """The fp32 master [elements here] of a compact parameter, a copy in host memory."""
        return join_master(self.plain.cpu(), self.tensors[REMAINDER].view(-1).cpu())


def flat_of(tensor: Tensor) -> Tensor:
    """A plain tensor of one dim: with the same memory and version where ``tensor`` is contiguous, else a copy."""
    with DisableTorchFunctionSubclass():
        return tensor.detach().reshape(-1)


def _copy(key: str, mine: Tensor, value: Tensor) -> None:
    if value.shape != mine.shape:
        raise ValueError(
            f"state '{key}' of shape {list(value.shape)} for a shard of {list(mine.shape)}: load it by "
            f"load_state_dict, which takes whole tensors and DTensors"
        )
    mine.copy_(value)
