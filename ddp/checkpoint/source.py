"""What a checkpoint reads of a model and its optimizer on one rank: the interface between wrappers and files.

A wrapper has a method ``checkpoint_source()``, which returns a ``CheckpointSource``. The source of
``DistributedDataParallel``, and of modules without a wrapper, is in ``wrapper_source.py``. A save or a load takes one
``Holding`` from the source: names, shapes and dtypes of the whole model, and views of this rank's memory.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .ranks import CheckpointRanks

__all__ = ["CheckpointSource", "HeldParam", "HeldSlice", "Holding"]


class HeldParam(NamedTuple):
    """A whole parameter of the model, whichever ranks hold its elements."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dtype: torch.dtype
    """Dtype that the model computes with, and of the file's ``model`` entry."""
    kept: torch.dtype
    """Dtype that ranks keep between steps: wider than ``dtype`` where they keep only masters. Both can be loaded."""


class HeldSlice(Protocol):
    """Consecutive elements of a flattened parameter that this rank holds, with their optimizer state."""

    @property
    def start(self) -> int:
        """First element."""

    @property
    def param(self) -> Tensor:
        """[elements here], which a save rounds to the dtype that the model computes with. The master, where the rank
        keeps nothing else."""

    @property
    def master(self) -> Tensor:
        """[elements here] in the dtype that the optimizer updates: a load writes into it."""

    @property
    def group(self) -> int | None:
        """Index of the optimizer's parameter group; None: the optimizer does not update the parameter."""

    @property
    def updated(self) -> Tensor | None:
        """The optimizer's tensor that holds these elements, perhaps with others: the key of their state. None: the
        optimizer keeps no state of them on this rank."""

    @property
    def offset(self) -> int:
        """Place of the first element in ``updated``."""

    def state(self) -> dict[str, Tensor]:
        """Elementwise state: views, [elements here] each. Empty before the first step."""

    def scalars(self) -> dict[str, Any]:
        """The rest of the state, such as the number of steps."""


class Holding(NamedTuple):
    """A model and perhaps its optimizer, as one rank holds them for one save or load."""

    params: Mapping[str, HeldParam]
    """Every parameter, trainable or frozen, by first name; equal on all ranks, except for experts."""
    buffers: Mapping[str, Tensor]
    """The persistent buffers, which are whole on every rank."""
    tied: Mapping[str, str]
    """Further names of parameters -> their first name."""
    whole: Mapping[str, Tensor]
    """Parameters without a slice: the model's own tensors, whole on this rank."""
    slices: Mapping[str, HeldSlice]
    """A slice of each other parameter, empty where this rank holds no element."""
    optimizer: Optimizer | None
    """A load writes hyperparameters into ``param_groups``, and into ``state`` that of each ``HeldSlice.updated``."""
    experts: Collection[str]
    """Names of parameters and buffers of which other ranks hold others under the same names."""


class CheckpointSource(Protocol):
    """A model that can be saved and loaded by parameter, by all its ranks together."""

    @property
    def ranks(self) -> CheckpointRanks:
        """The ranks that save and load together."""

    @property
    def module(self) -> nn.Module:
        """The module whose names the entries have."""

    def hold(self, optimizer: object, *, saving: bool) -> Holding:
        """What this rank holds. All ranks call it.

        saving  bring every value up to date

        Raises ``TypeError`` for an optimizer whose state a checkpoint cannot hold, and ``ValueError`` for another
        model's optimizer.
        """

    def loaded(self, optimizer: object) -> None:
        """After a load: update what follows from values and state. Collective over the model's ranks."""
