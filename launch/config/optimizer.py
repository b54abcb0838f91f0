"""``[optimizer]``: which optimizer updates the masters, and its learning rate."""

import inspect
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch

from ...ddp.optimizer.param_groups import IN_ONE_PASS, is_elementwise, is_of_torch
from ...ddp.torch_grads.lion import Lion
from ...ddp.torch_grads.muon import Muon
from ...ddp.torch_grads.muon_groups import MuonGroups, muon_groups
from .error import ConfigError, require
from .table import Natural, NotNegative, Positive, Range, Share, Table, require_defaults

__all__ = ["OptimizerConfig"]

_OF_TORCH = "torch.optim."
_CLASSES = {"adamw": torch.optim.AdamW, "muon": torch.optim.AdamW, "sgd": torch.optim.SGD, "lion": Lion}
"""Classes by name; ``muon`` has this class for what is no matrix."""
_OWN_KEYS = {
    "adamw": ("betas", "eps", "weight_decay"),
    "muon": ("betas", "eps", "weight_decay"),
    "sgd": ("momentum", "weight_decay"),
    "lion": ("betas", "weight_decay"),
}
"""Keys of ``[optimizer]`` that each name takes. Classes of torch take ``weight_decay``, where they know it."""
_BETAS = ("beta1", "beta2")
"""The parts of ``betas`` in ``options``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(Table):
    """The optimizer of the masters, elementwise or Muon beside AdamW, and the schedule of its learning rate."""

    name: str = "adamw"
    """``adamw``; ``muon`` for the matrices of layers and ``adamw`` for the rest; ``sgd`` (with ``momentum``), ``lion``,
    or an elementwise class of torch by its full name, such as ``torch.optim.NAdam``, with ``options``."""
    lr: Positive = 1e-3
    """Learning rate after the warmup."""
    muon_lr: Positive = 0.02
    """Learning rate of the matrices of ``muon`` after the warmup."""
    muon_split: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Pattern of names -> rows of each part of a fused matrix, such as ``{"*qkv*" = [512, 128, 128]}``. Not needed for
    the models of maingrad."""
    schedule: Literal["cosine", "linear", "warmup_stable_decay", "constant"] = "cosine"
    """The learning rate after the warmup: half a cosine or a line from ``lr`` to ``min_lr_ratio * lr``; ``lr``, and at
    the end a line (``decay_fraction``); or ``lr`` throughout. With ``train.max_seconds``, time counts like steps."""
    min_lr_ratio: Annotated[float, Range(lambda value: 0.0 <= value <= 1.0, "must lie in [0, 1]")] = 0.1
    """The schedule ends at this fraction of ``lr``; ``constant`` does not use it."""
    decay_fraction: Annotated[float, Range(lambda value: 0.0 < value <= 1.0, "must lie in (0, 1]")] = 0.2
    """Part of the run at its end in which ``warmup_stable_decay`` decays; other schedules do not use it."""
    warmup_steps: Natural = 20
    """Steps over which the learning rate grows linearly from ``lr / warmup_steps``."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of the first and the second moment, of ``adamw``; of the step's blend and of the moment, of
    ``lion``."""
    eps: Positive = 1e-8
    """Added to the square root of the second moment, of ``adamw``."""
    momentum: Share = 0.9
    """The momentum of ``sgd``; 0: none, and no state."""
    weight_decay: NotNegative = 0.1
    """Weight decay. Decoupled in ``adamw`` and ``lion``; ``sgd`` and most classes of torch add
    ``weight_decay * parameter`` to the gradient."""
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Further arguments of the optimizer's class by their names, such as ``momentum_decay = 0.004`` of
    ``torch.optim.NAdam``, or ``momentum`` of ``muon``. ``betas`` has the parts ``beta1`` and ``beta2``."""
    state: Literal["full", "compact"] = "full"
    """``full``: fp32 masters and moments. ``compact``: masters are bf16 parameters with remainders of 16 bits, and
    moments have ``moment_dtype``. Shards of ``fsdp`` and ``hsdp``, of ``adamw`` and Adam alone, are then bf16."""
    moment_dtype: Literal["bfloat16", "float32", "uint8"] = "bfloat16"
    """Moments of ``state = "compact"``. ``uint8``: codes of 8 bits, with a scale for 256 elements; sets
    ``ddp.shard_atom`` to 256, and ``fsdp.shard_atoms`` to ``block``."""
    decay_vectors: bool = True
    """True: decay also parameters with fewer than two dims (norms, biases, scalars). False: matrices only."""
    max_grad_norm: Positive | None = 1.0
    """Clip the global gradient norm to this value. None (``--optimizer.max-grad-norm None``): no clipping."""

    def check(self) -> None:
        found = _class_named(self.name)
        is_class = isinstance(found, type) and is_of_torch(found) and found is not torch.optim.Optimizer
        is_named = self.name in _CLASSES or is_class
        remedy = 'must be "adamw", "muon", "sgd", "lion" or an optimizer of torch by its full name, "torch.optim.NAdam"'
        self.require(is_named, "name", remedy)
        others = [each for each in vars(torch.optim).values() if isinstance(each, type) and is_elementwise(each)]
        remedy = (
            f"does not update each element by itself, and ranks have shards of parameters: use one of "
            f"{', '.join(sorted(each.__name__ for each in others))}, or a training loop of your own"
        )
        self.require(is_elementwise(self.optimizer_class), "name", remedy)
        others_keys = {"betas", "eps", "momentum"} - set(_OWN_KEYS.get(self.name, ()))
        remedy = f'is not read by name = "{self.name}"; set it in optimizer.options, if the class has it'
        require_defaults(self, "optimizer", others_keys, remedy)
        if not self.has_muon:
            require_defaults(self, "optimizer", ("muon_lr",), 'is read by name = "muon" alone')
            self.require(not self.muon_split, "muon_split", 'is read by name = "muon" alone')
        self._check_options()
        fits = self.state == "full" or self.optimizer_class in IN_ONE_PASS
        remedy = 'is for name = "adamw", "muon", "sgd", "lion" and "torch.optim.Adam" alone: set "full"'
        self.require(fits, "state", remedy)
        fits = self.state == "compact" or self.moment_dtype == "bfloat16"
        self.require(fits, "moment_dtype", 'is for state = "compact" alone: full moments are float32')
        lacks = [key for key in ("amsgrad", "maximize", "differentiable") if self.options.get(key)]
        remedy = f'"compact" does not go with optimizer.options {", ".join(lacks)}: set "full", or leave them out'
        self.require(self.state == "full" or not lacks, "state", remedy)

    @property
    def has_muon(self) -> bool:
        """Whether matrices have ``Muon``, and ``optimizer_class`` is that of the rest."""
        return self.name == "muon"

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class that ``name`` names."""
        found: type[torch.optim.Optimizer] = _class_named(self.name)
        return found

    @property
    def compact_moments(self) -> torch.dtype | None:
        """The dtype of compact moments; None: full state."""
        dtype: torch.dtype = getattr(torch, self.moment_dtype)
        return dtype if self.state == "compact" else None

    @property
    def fits_shards(self) -> bool:
        """Whether models under ``fully_shard`` have this form of state, or full state."""
        of_adam = self.optimizer_class in (torch.optim.Adam, torch.optim.AdamW)
        return self.state == "full" or (of_adam and not self.has_muon)

    @property
    def class_options(self) -> dict[str, Any]:
        """Arguments of ``optimizer_class``, without ``lr``."""
        arguments = inspect.signature(self.optimizer_class).parameters
        taken = _OWN_KEYS.get(self.name, ("weight_decay",) if "weight_decay" in arguments else ())
        given: dict[str, Any] = {key: getattr(self, key) for key in taken}
        options = {} if self.has_muon else dict(self.options)
        if "betas" in arguments and not options.keys().isdisjoint(_BETAS):
            given["betas"] = tuple(map(options.pop, _BETAS, arguments["betas"].default))
        return given | options

    @property
    def muon_options(self) -> dict[str, Any]:
        """Arguments of ``Muon``."""
        return {"lr": self.muon_lr, "weight_decay": self.weight_decay, **self.options}

    def muon_of(self, module: torch.nn.Module) -> MuonGroups:
        """The matrices of ``module`` for Muon; no groups where another optimizer is named.

        module  not wrapped yet; may be on meta

        Raises ``ConfigError`` for a fused matrix whose parts are not known, for a pattern that matches no matrix, and
        for a model without a matrix.
        """
        if not self.has_muon:
            return MuonGroups([], {})
        try:
            found = muon_groups(module, split=self.muon_split, **self.muon_options)
        except ValueError as error:
            raise ConfigError(f"optimizer.muon_split: {error}") from None
        require(bool(found.groups), "optimizer.name", self.name, found.why_nothing)
        return found

    def state_per_element(self) -> int:
        """How many elements of state the class keeps for each element of a parameter, found by a step on a matrix."""
        matrix = torch.nn.Parameter(torch.zeros(2, 2))
        optimizer = self.optimizer_class([matrix], lr=self.lr, **self.class_options)  # type: ignore[call-arg]
        matrix.grad = torch.ones_like(matrix)
        optimizer.step()
        state = optimizer.state[matrix].values()
        return sum(isinstance(value, torch.Tensor) and value.shape == matrix.shape for value in state)

    def _check_options(self) -> None:
        """The class says itself which further arguments and values it takes: it is made once."""
        name, arguments = self.optimizer_class.__name__, inspect.signature(self.optimizer_class).parameters
        self.require("weight_decay" in arguments or not self.weight_decay, "weight_decay", f"{name} has none: set 0.0")
        for key in _OWN_KEYS.get(self.name, ()):
            require(key not in self.options, f"optimizer.options.{key}", self.options.get(key), f"set optimizer.{key}")
        if not self.options:
            # The keys' ranges are those of the classes. Torch imports its compiler to make an optimizer.
            return
        try:
            matrix = torch.nn.Parameter(torch.zeros(1, 1))
            self.optimizer_class([matrix], lr=self.lr, **self.class_options)  # type: ignore[call-arg]
            if self.has_muon:
                Muon([matrix], **self.muon_options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"optimizer.options = {self.options!r}: {error}") from None


def _class_named(name: str) -> Any:
    """What ``optimizer.name`` names; None: nothing."""
    if name in _CLASSES:
        return _CLASSES[name]
    return getattr(torch.optim, name.removeprefix(_OF_TORCH), None) if name.startswith(_OF_TORCH) else None
