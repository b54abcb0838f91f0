"""What a checkpoint reads of a model and its optimizer on one rank: the interface between wrappers and files.

A wrapper has a method ``checkpoint_source()``, which returns a ``CheckpointSource``. The source of
``DistributedDataParallel``, and of modules without a wrapper, is in ``wrapper_source.py``. A save or a load takes one
``Holding`` from the source: names, shapes and dtypes of the whole model, and views of this rank's memory.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives.failure_report import FailureReporter, run_and_gather
from ..collectives.rank_grid import RankGrid
from ..plan.model_slice import ModelSlice, model_slice_of
from ..plan.owned_params import buffers_of_experts, is_marked_expert

__all__ = [
    "CheckpointRanks",
    "CheckpointSource",
    "HeldSlice",
    "Holding",
    "model_tensors",
    "slices_set_in",
]

T = TypeVar("T")
U = TypeVar("U")


class CheckpointRanks(NamedTuple):
    """The ranks that save and load together; without a grid, this process alone."""

    grid: RankGrid = RankGrid(None, None, None)
    failures: FailureReporter | None = None
    """Names the rank that is gone, in errors."""
    instances_alike: bool = True
    """Whether each instance holds all of the model and the optimizer: then the first one writes."""
    experts: RankGrid | None = None
    """The ranks that hold the same experts as this one; None: all ranks do."""
    tensor: dist.ProcessGroup | None = None
    """The tensor-parallel ranks, each of which is in another ``grid``. An instance has all of them."""
    pipeline: dist.ProcessGroup | None = None
    """The ranks with a pipeline's other stages, each of which has other parameters. An instance has all of them."""

    def with_tensor(self, group: dist.ProcessGroup | None) -> "CheckpointRanks":
        """With these tensor-parallel ranks, which are among those that errors name."""
        if group is None:
            return self
        failures, own = self.failures or FailureReporter(), RankGrid(group, None, None)
        if own not in (known := [*failures.grids]):
            failures.grids = [*known, own]
        return self._replace(tensor=group, failures=failures)

    def with_pipeline(self, group: dist.ProcessGroup | None) -> "CheckpointRanks":
        """With the ranks of a pipeline's stages, which errors name too."""
        return self.with_tensor(group)._replace(tensor=self.tensor, pipeline=group)

    @property
    def axes(self) -> Sequence[dist.ProcessGroup]:
        """The groups of more than one rank: those of an instance, then that across instances."""
        groups = (self.grid.inner, self.tensor, self.pipeline, self.grid.outer)
        return [group for group in groups if group is not None and group.size() > 1]

    @property
    def is_first(self) -> bool:
        """Whether this rank changes folders."""
        return self.place == 0

    @property
    def place(self) -> int:
        """Index of this rank in the order in which ``run_and_gather`` returns what the ranks tell."""
        place = 0
        for group in reversed(self.axes):
            place = place * group.size() + group.rank()
        return place

    @property
    def num_writers(self) -> int:
        """The first so many ranks write; the others hold the same values."""
        ranks = math.prod(group.size() for group in self.axes)
        return ranks // self.grid.outer_size if self.instances_alike else ranks

    def run_on_all_ranks(self, action: Callable[[], T], what: str) -> T:
        """Run ``action`` on every rank. Where it raises on one rank, all raise; see ``failure_report.py``."""
        return self.run_and_gather(action, lambda _: None, what)[0]

    def run_and_gather(self, action: Callable[[], T], telling: Callable[[T], U], what: str) -> tuple[T, list[U]]:
        """``run_on_all_ranks``, and return what every rank tells of its result; see ``failure_report.py``."""
        return run_and_gather(action, telling, self.axes, self.failures, what)


def slices_set_in(module: nn.Module) -> Mapping[str, ModelSlice]:
    """By first name: what parameters and buffers are of those that tensor-parallel ranks hold together."""
    tensors: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    found = ((name, model_slice_of(tensor)) for name, tensor in tensors)
    return {name: each for name, each in found if each is not None}


class ModelTensors(NamedTuple):
    """The tensors of a module, each once, under its first name. Names are equal on all ranks, except for experts."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    """The persistent buffers: those in ``state_dict``."""
    tied: dict[str, str]
    """Further names of parameters -> their first name."""
    experts: set[str]
    """All names of the parameters of experts, and of their modules' buffers: other ranks hold others under these."""
    slices: dict[str, ModelSlice]
    """By name: what tensors are of the whole ones, where other ranks hold the rest."""

    @property
    def unplaced_experts(self) -> set[str]:
        """The experts of which nobody has said where among all experts they are."""
        return {name for name in self.experts if self.tied.get(name, name) not in self.slices}

    def shape_of(self, name: str, local: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor, of which this rank has a tensor of shape ``local``."""
        return self.slices[name].shape if name in self.slices else tuple(local)


def model_tensors(
    module: nn.Module,
    is_expert: Callable[[nn.Parameter], bool] = is_marked_expert,
    slices: Mapping[str, ModelSlice] | None = None,
) -> ModelTensors:
    """Parameters and persistent buffers of a module that is not wrapped.

    slices  by name, what tensors are of those that the tensor-parallel ranks hold together
    """
    first: dict[nn.Parameter, str] = {}
    tied, experts = dict[str, str](), set[str]()
    for name, param in module.named_parameters(remove_duplicate=False):
        if first.setdefault(param, name) != name:
            tied[name] = first[param]
        if is_expert(param):
            experts.add(name)
    buffers: dict[int, tuple[str, Tensor]] = {}
    of_experts = buffers_of_experts(module, is_expert)
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix, recurse=False, remove_duplicate=False):
            # A buffer may have several names, and its first name may be a non-persistent one.
            if name.rpartition(".")[-1] not in owner._non_persistent_buffers_set:
                buffers.setdefault(id(buffer), (name, buffer))
            if id(buffer) in of_experts:
                experts.add(name)
    cut = {name: each for name, each in (slices or {}).items() if each.dim is not None}
    return ModelTensors({name: param for param, name in first.items()}, dict(buffers.values()), tied, experts, cut)


class HeldSlice(NamedTuple):
    """Consecutive elements of a flattened parameter that this rank holds, with their optimizer state."""

    start: int
    """First element."""
    shape: tuple[int, ...]
    """Shape of the parameter that is flattened: of this rank's slice, where tensor-parallel ranks have others."""
    dtype: torch.dtype
    """Dtype that the model computes with, and to which a save rounds. A load also takes the dtype of ``param``,
    which is wider where the rank keeps only masters."""
    param: Tensor
    """[elements here]; the master, where the rank keeps nothing else."""
    master: Tensor
    """[elements here] in the dtype that the optimizer updates: a load writes into it."""
    group: int | None
    """Index of the optimizer's parameter group; None: the optimizer does not update the parameter."""
    updated: Tensor | None
    """The optimizer's tensor that holds these elements, perhaps with others: the key of their state. None: there is no
    state of them on this rank."""
    offset: int
    """Place of the first element in ``updated``."""
    state: Mapping[str, Tensor]
    """For a save: elementwise state, views, [elements here] each. Empty before the first step."""
    scalars: Mapping[str, Any]
    """For a save: the rest of the state, such as the number of steps, and tensors of other shapes."""


class Holding(NamedTuple):
    """A model and perhaps its optimizer, as one rank holds them for one save or load."""

    tensors: ModelTensors
    slices: Mapping[str, HeldSlice]
    """By first name: a slice of each sharded parameter and of each in the optimizer, empty where this rank holds no
    element."""
    optimizer: Optimizer | None
    """A load writes hyperparameters into ``param_groups``, and into ``state`` that of each ``HeldSlice.updated``."""
    reads_whole: bool = False
    """A load reads whole parameters, which are their own masters, in place of ``HeldSlice.master``."""

    def has_whole(self, name: str) -> bool:
        """Whether the optimizer updates all of a parameter here, as one tensor: its state may have any shape."""
        held = self.slices[name]
        numel = 0 if held.updated is None else held.updated.numel()
        return name not in self.tensors.slices and numel == held.param.numel() == math.prod(held.shape)

    @property
    def whole(self) -> dict[str, nn.Parameter]:
        """The parameters that are saved or loaded whole on this rank: those without a slice, or all."""
        return {
            name: param
            for name, param in self.tensors.parameters.items()
            if self.reads_whole or name not in self.slices
        }


class CheckpointSource(Protocol):
    """A model that can be saved and loaded by parameter, by all its ranks together."""

    ranks: CheckpointRanks
    """The ranks that save and load together."""
    module: nn.Module
    """The module whose names the entries have."""
    slices: Mapping[str, ModelSlice]
    """What parameters are of those that tensor-parallel ranks hold together, as far as anybody has said it."""

    def hold(self, optimizer: object, *, saving: bool) -> Holding:
        """What this rank holds. All ranks call it.

        saving  bring every value up to date

        Raises ``TypeError`` for an optimizer whose state a checkpoint cannot hold, and ``ValueError`` for another
        model's optimizer.
        """

    def loaded(self, optimizer: object) -> None:
        """After a load: update what follows from values and state. Collective over the model's ranks."""
