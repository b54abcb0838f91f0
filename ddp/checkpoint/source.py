"""What a checkpoint has to know of a model and its optimizer, as one rank holds them: files on one side, wrappers on
the other.

A wrapper offers itself through a method ``checkpoint_source()``, which returns a `CheckpointSource`. That of
``DistributedDataParallel``, and of modules that are not wrapped, is in ``checkpoint_wrapper_source.py``. One save or
load takes a `Holding` from it: names, shapes and dtypes of the whole model, and views of this rank's memory.
"""

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import CheckpointRanks

__all__ = ["CheckpointSource", "HeldOptimizer", "HeldParam", "HeldSlice", "Holding"]


class HeldParam(NamedTuple):
    """A parameter of the model, wherever its elements lie."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    dtype: torch.dtype
    """What the model computes with: the dtype of the file's ``model`` entry."""
    kept: torch.dtype
    """What ranks keep between steps: wider where they keep masters alone. Either dtype can be read."""
    is_expert: bool
    """Whether other ranks hold other experts under this name."""


class HeldSlice(Protocol):
    """Elements [start, end) of a flattened parameter that this rank holds, and what its optimizer knows of them."""

    @property
    def name(self) -> str:
        """Name of the parameter: the first, where it has several."""

    @property
    def start(self) -> int:
        """First element."""

    @property
    def end(self) -> int:
        """First element behind them: ``start`` where this rank holds none."""

    @property
    def param(self) -> Tensor:
        """[end - start] as the model computes with them: rounded from the master where there is one."""

    @property
    def master(self) -> Tensor:
        """[end - start] as they are updated: written by a load."""

    @property
    def group(self) -> int | None:
        """Parameter group of the optimizer; None: frozen, or the optimizer does not update it."""

    @property
    def updated(self) -> Tensor | None:
        """The tensor by which the optimizer keeps the state of these elements, perhaps of others too. None: it keeps
        none on this rank."""

    @property
    def offset(self) -> int:
        """Place of the first element in ``updated``."""

    def state(self) -> dict[str, Tensor]:
        """Elementwise state, [end - start] each: views. Empty before the first step."""

    def scalars(self) -> dict[str, Any]:
        """The rest of its state, such as the number of steps."""


class HeldOptimizer(NamedTuple):
    """The optimizer of a model."""

    class_name: str
    groups: Sequence[dict[str, Any]]
    """Its parameter groups themselves: a load writes hyperparameters into them."""
    state: MutableMapping[Tensor, Any]
    """What it knows of each ``HeldSlice.updated``: a load writes into it."""


class Holding(NamedTuple):
    """A model and perhaps its optimizer, as one rank holds them for one save or load."""

    params: Mapping[str, HeldParam]
    """Every parameter, trainable or frozen, under its first name; alike on all ranks but for experts."""
    buffers: Mapping[str, Tensor]
    """The persistent ones: whole on every rank."""
    tied: Mapping[str, str]
    """Further names of parameters -> their first name."""
    whole: Mapping[str, Tensor]
    """Parameters that no slice speaks of: whole on this rank, the model's own tensors."""
    slices: Sequence[HeldSlice]
    """Each of the other parameters, also those of which this rank has no element."""
    optimizer: HeldOptimizer | None
    expert_buffers: Collection[str] = ()
    """Names of the buffers that belong to experts: not all ranks have these."""


class CheckpointSource(Protocol):
    """A model that can be saved and loaded by parameter, by all its ranks together."""

    @property
    def ranks(self) -> CheckpointRanks:
        """The ranks that save and load together."""

    @property
    def expert_axes(self) -> Sequence[dist.ProcessGroup] | None:
        """Groups that join the ranks that have the same experts as this one; None: all ranks have the same."""

    def hold(self, optimizer: object, *, saving: bool) -> Holding:
        """What this rank holds, every value up to date where it is to be saved. All ranks call it.

        Raises ``TypeError`` for an optimizer whose state a checkpoint cannot hold, ``ValueError`` for another model's.
        """

    def loaded(self, optimizer: object) -> None:
        """Values and state were read: whatever follows from them follows. Collective over the model's ranks."""
