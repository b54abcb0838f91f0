"""What an optimizer's step reads on the host, and where a captured step reads it.

Learning rates lie in device memory, so that schedulers work. Moments and counters stay in the memory of the capture,
also where ``load_state_dict`` has brought others. All other options are numbers in the kernels' arguments: a step with
other values is another graph.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["StepOptions"]


class StepOptions:
    """The options and the state of ``optimizer`` under graphs."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._rates: list[Tensor] = []
        """The learning rate of each param_group; ``add_param_group`` may add groups later."""
        self._loaded: list[Any] = []
        self._state: list[tuple[Tensor, str, Tensor]] = []

    def key(self) -> tuple[Hashable, ...]:
        """What is part of the kernels' arguments."""
        groups = [
            tuple((name, _identity(group[name])) for name in sorted(group) if name not in ("initial_lr", "lr"))
            for group in self._optimizer.param_groups
        ]
        own = tuple((name, getattr(self._optimizer, name, None)) for name in ("max_grad_norm", "skip_nonfinite"))
        return (own, *groups)

    def load(self) -> None:
        """Before a replay: bring learning rates and moments to where the captured kernels read them."""
        for place, group in enumerate(self._optimizer.param_groups):
            if place == len(self._rates):
                self._rates.append(torch.zeros((), device=self._device))
                self._loaded.append(None)
            rate = group["lr"]
            if isinstance(rate, Tensor):
                self._rates[place].copy_(rate, non_blocking=True)
                self._loaded[place] = None
            elif rate != self._loaded[place]:
                self._rates[place].fill_(rate)
                self._loaded[place] = rate
        state = self._optimizer.state
        for master, name, tensor in self._state:
            now = state[master].get(name)
            if now is None:
                state[master][name] = tensor.zero_()  # loaded from before the first step, which begins with zeros
            elif now is not tensor:
                if not isinstance(now, Tensor) or now.shape != tensor.shape:
                    raise RuntimeError(
                        f"the optimizer's state '{name}' has another shape than in the capture of its step: call "
                        f"reset() of the graphed step, which captures anew"
                    )
                tensor.copy_(now)
                state[master][name] = tensor

    def forget_state(self) -> None:
        """No captured kernel reads the state any more."""
        self._state = []

    def record_state(self) -> None:
        """After an eager step: these tensors are the state that captured kernels read and write."""
        self._state = [
            (master, name, value)
            for master, values in self._optimizer.state.items()
            for name, value in values.items()
            if isinstance(value, Tensor)
        ]

    @contextmanager
    def in_device_memory(self) -> Iterator[None]:
        """A capture: groups hold learning rates as tensors, and torch is told that the step is captured.

        Raises ``RuntimeError`` where the block has changed a learning rate.
        """
        groups = list(self._optimizer.param_groups)
        rates = self._rates[: len(groups)]
        before = [dict(group) for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        versions = [rate._version for rate in rates]
        try:
            yield
            for group, rate, version in zip(groups, rates, versions, strict=True):
                if group["lr"] is not rate or rate._version != version:
                    raise RuntimeError(
                        "the captured function has changed a learning rate, which replays would not: call "
                        "scheduler.step() after the graphed step"
                    )
        finally:
            self._loaded = [None] * len(self._rates)
            for group, values in zip(groups, before, strict=True):
                group.update(values)


def _identity(value: Any) -> Hashable:
    """Equal for equal options. Tensors (and the parameters of a group) are where they are."""
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, list | tuple):
        return tuple(map(id if value and isinstance(value[0], Tensor) else _identity, value))
    if isinstance(value, dict):
        return tuple((name, _identity(item)) for name, item in value.items())
    return value if isinstance(value, Hashable) else id(value)
