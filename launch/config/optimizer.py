"""``[optimizer]``: which optimizer updates the masters, and its learning rate."""

import dataclasses
import inspect
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ...ddp.optimizer.param_groups import is_of_torch, why_not_over
from .error import ConfigError, require

__all__ = ["OptimizerConfig", "OptionValue"]

OptionValue = bool | int | float | str
_OF_TORCH = "torch.optim."
_KEYS = {
    "adamw": ("betas", "eps", "weight_decay"),
    "sgd": ("momentum", "weight_decay"),
}
"""Keys of ``[optimizer]`` that each name takes. Classes of torch take ``weight_decay``, where they know it."""
_OWN_OPTIONS = ("params", "lr", "foreach", "fused", "capturable", "differentiable", "maximize")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """An elementwise optimizer on fp32 masters, with a schedule of its learning rate."""

    name: str = "adamw"
    """``adamw``, ``sgd`` (with ``momentum``), or an elementwise class of torch by its full name, such as
    ``torch.optim.NAdam``, with ``options``."""
    lr: float = 1e-3
    """Learning rate after the warmup."""
    schedule: Literal["cosine", "linear", "warmup_stable_decay", "constant"] = "cosine"
    """The learning rate after the warmup: half a cosine or a line from ``lr`` to ``min_lr_ratio * lr``; ``lr``, and at
    the end a line (``decay_fraction``); or ``lr`` throughout. With ``train.max_seconds``, time counts like steps."""
    min_lr_ratio: float = 0.1
    """The schedule ends at this fraction of ``lr``; ``constant`` does not use it."""
    decay_fraction: float = 0.2
    """Part of the run at its end in which ``warmup_stable_decay`` decays; other schedules do not use it."""
    warmup_steps: int = 20
    """Steps over which the learning rate grows linearly from ``lr / warmup_steps``."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and the second moment, of ``adamw``."""
    eps: float = 1e-8
    """Added to the square root of the second moment, of ``adamw``."""
    momentum: float = 0.9
    """Of ``sgd``; 0: none, and no state."""
    weight_decay: float = 0.1
    """Weight decay. Decoupled in ``adamw``; ``sgd`` and most classes of torch add ``weight_decay * parameter`` to the
    gradient."""
    options: dict[str, OptionValue] = field(default_factory=dict)
    """Further arguments of the optimizer's class by their names, such as ``momentum_decay = 0.004`` of
    ``torch.optim.NAdam``. ``betas`` has the parts ``beta1`` and ``beta2``."""
    decay_vectors: bool = True
    """True: decay also parameters with fewer than two dims (norms, biases, scalars). False: matrices only."""
    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm to this value. None: no clipping."""

    def __post_init__(self) -> None:
        require(self.lr > 0.0, "optimizer.lr", self.lr, "must be positive")
        require(0.0 <= self.min_lr_ratio <= 1.0, "optimizer.min_lr_ratio", self.min_lr_ratio, "must lie in [0, 1]")
        require(0.0 < self.decay_fraction <= 1.0, "optimizer.decay_fraction", self.decay_fraction, "must lie in (0, 1]")
        require(self.warmup_steps >= 0, "optimizer.warmup_steps", self.warmup_steps, "must not be negative")
        require(all(0.0 <= beta < 1.0 for beta in self.betas), "optimizer.betas", self.betas, "must lie in [0, 1)")
        require(self.eps > 0.0, "optimizer.eps", self.eps, "must be positive")
        require(0.0 <= self.momentum < 1.0, "optimizer.momentum", self.momentum, "must lie in [0, 1)")
        require(self.weight_decay >= 0.0, "optimizer.weight_decay", self.weight_decay, "must not be negative")
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0.0,
            "optimizer.max_grad_norm",
            self.max_grad_norm,
            "must be positive; --optimizer.max-grad-norm None turns clipping off",
        )
        self._check_name()
        self._check_options()

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class that ``name`` names."""
        known = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        found: type[torch.optim.Optimizer] = known.get(self.name) or getattr(
            torch.optim, self.name.removeprefix(_OF_TORCH)
        )
        return found

    @property
    def class_options(self) -> dict[str, Any]:
        """Arguments of the class, without ``lr``."""
        taken = _KEYS.get(self.name, ("weight_decay",) if "weight_decay" in self._arguments else ())
        given: dict[str, Any] = {key: getattr(self, key) for key in taken}
        options = dict(self.options)
        if "beta1" in options or "beta2" in options:
            default = self._arguments["betas"].default
            given["betas"] = (options.pop("beta1", default[0]), options.pop("beta2", default[1]))
        return given | options

    def state_per_element(self) -> int:
        """How many elements of state the class keeps for each element of a parameter, found by a step on a matrix."""
        matrix = torch.nn.Parameter(torch.zeros(2, 2))
        optimizer = self.optimizer_class([matrix], lr=self.lr, **self.class_options)  # type: ignore[call-arg]
        matrix.grad = torch.ones_like(matrix)
        optimizer.step()
        state = optimizer.state[matrix].values()
        return sum(isinstance(value, torch.Tensor) and value.shape == matrix.shape for value in state)

    @property
    def _arguments(self) -> Any:
        return inspect.signature(self.optimizer_class).parameters

    def _check_name(self) -> None:
        if self.name in _KEYS:
            return
        found = getattr(torch.optim, self.name.removeprefix(_OF_TORCH), None)
        known = self.name.startswith(_OF_TORCH) and isinstance(found, type) and is_of_torch(found)
        require(
            known and found is not torch.optim.Optimizer,
            "optimizer.name",
            self.name,
            'must be "adamw", "sgd" or an optimizer of torch by its full name, "torch.optim.NAdam"',
        )
        assert isinstance(found, type)
        known_ones = [each for each in vars(torch.optim).values() if isinstance(each, type) and is_of_torch(each)]
        elementwise = [each.__name__ for each in known_ones if _is_elementwise(each)]
        require(
            _is_elementwise(found),
            "optimizer.name",
            self.name,
            f"does not update each element by itself, and ranks have shards of parameters: use one of "
            f"{', '.join(sorted(elementwise))}, or a training loop of your own",
        )

    def _check_options(self) -> None:
        taken = _KEYS.get(self.name, ("weight_decay",))
        defaults = {entry.name: entry.default for entry in dataclasses.fields(OptimizerConfig)}
        for key in ("betas", "eps", "momentum"):
            value = getattr(self, key)
            require(
                key in taken or value == defaults[key],
                f"optimizer.{key}",
                value,
                f'is not read by name = "{self.name}"; set it in optimizer.options, if the class has it',
            )
        arguments = self._arguments
        require(
            "weight_decay" in arguments or self.weight_decay == 0.0,
            "optimizer.weight_decay",
            self.weight_decay,
            f"{self.optimizer_class.__name__} has none: set 0.0",
        )
        for key, value in self.options.items():
            named = f"optimizer.options.{key}"
            require(key not in taken, named, value, f"is the key optimizer.{key}")
            require(key not in _OWN_OPTIONS, named, value, "is decided by maingrad train; leave it out")
            is_beta = key in ("beta1", "beta2") and "betas" in arguments and "betas" not in taken
            valid = ", ".join(name for name in arguments if name not in (*_OWN_OPTIONS, *taken, "betas"))
            valid += ", beta1, beta2" if "betas" in arguments and "betas" not in taken else ""
            require(
                is_beta or (key in arguments and key != "betas"),
                named,
                value,
                f"{self.optimizer_class.__name__} has no such argument; it has {valid}",
            )
            default = 0.9 if is_beta else arguments[key].default
            is_number = isinstance(default, int | float) and not isinstance(default, bool)
            wanted = (int, float) if is_number else (type(default),)
            require(
                default is None or type(value) in wanted,
                named,
                value,
                f"must be {'a number' if is_number else type(default).__name__}, as {default} is",
            )
        try:
            self.optimizer_class([torch.nn.Parameter(torch.zeros(1, 1))], lr=self.lr, **self.class_options)  # type: ignore[call-arg]
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optimizer.options = {self.options!r}: {error}") from None


def _is_elementwise(cls: type) -> bool:
    return why_not_over(cls, whole=False, kept_whole="") is None
