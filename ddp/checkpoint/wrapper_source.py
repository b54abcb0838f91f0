"""The ``CheckpointSource`` of modules with whole parameters: in ``DistributedDataParallel``, or in no wrapper."""

from itertools import chain
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..optimizer.distributed_optimizer import DistributedOptimizer
from ..plan.owned_params import is_marked_expert
from ..wrapper.data_parallel import DistributedDataParallel
from .model import experts_of, model_tensors
from .ranks import CheckpointRanks
from .source import CheckpointSource, HeldParam, HeldSlice, Holding

__all__ = ["WrapperSource", "source_of"]


def source_of(model: nn.Module) -> CheckpointSource:
    """The source through which a model is saved and loaded.

    Raises ``ValueError`` for a whole module that contains sharded modules or DTensors, of which one rank's part would
    be saved as all; for tensors on the meta device, which have no values; and for a model in torch's wrapper.
    """
    own = getattr(model, "checkpoint_source", None)
    if own is not None:
        return cast(CheckpointSource, own())
    if isinstance(model, TorchDDP):
        raise ValueError(
            "the model is in torch's DistributedDataParallel, which each rank would save by itself: on one rank, "
            "save_checkpoint(path, model.module); that is what load_checkpoint(path, model.module) reads on all"
        )
    for name, part in model.named_modules():
        if hasattr(part, "checkpoint_source"):
            raise ValueError(
                f"module '{name}' is sharded, and the model around it is not: call fully_shard on the model too, or "
                f"save and load the module alone"
            )
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"'{name}' is on the meta device, which keeps no values: give the model memory first "
                f"(model.to_empty(device=...))"
            )
        if hasattr(tensor, "device_mesh"):
            raise ValueError(
                f"parameter '{name}' is a DTensor (torch.distributed.fsdp.fully_shard, or tensor parallelism), of "
                f"which this rank holds a part: torch.distributed.checkpoint saves and loads it"
            )
    return WrapperSource(model)


class WrapperSource:
    """The source of a ``DistributedDataParallel`` model, or of a module that this process saves and loads alone."""

    def __init__(self, model: nn.Module) -> None:
        self._model = self.module = model
        self.ranks = CheckpointRanks()
        if isinstance(model, DistributedDataParallel):
            self.module = model.module
            grid, experts = model.grids["dense"], model.grids["expert"]
            self.ranks = CheckpointRanks(grid, model.failures, experts=None if experts is grid else experts)

    def hold(self, optimizer: object, *, saving: bool) -> Holding:
        """What this rank holds: the optimizer's slices; all elements of frozen parameters, and without an optimizer."""
        held = self._checked(optimizer)
        if saving and isinstance(self._model, DistributedDataParallel):
            self._model.steps.read()  # weights of ranks that have taken different steps are not saved
        tensors, slices, read_whole = model_tensors(self.module), dict[str, HeldSlice](), False
        if held is not None:
            held.prepare_state()
            if saving:
                held.refresh_masters()
            slices |= {part.name: part for part in held.full_slices(to_load=not saving)}
            read_whole = not saving and _are_on_cpu_without_masters(held)
        return Holding(
            params={
                name: HeldParam(tuple(param.shape), param.dtype, param.dtype)
                for name, param in tensors.parameters.items()
            },
            buffers=tensors.buffers,
            tied=tensors.tied,
            whole={name: param for name, param in tensors.parameters.items() if read_whole or name not in slices},
            slices=slices,
            optimizer=held,
            experts=experts_of(self.module, tensors, is_marked_expert),
        )

    def loaded(self, optimizer: object) -> None:
        """Make parameters follow the masters."""
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.mark_loaded(whole=_are_on_cpu_without_masters(optimizer), from_full=True)

    def _checked(self, optimizer: object) -> DistributedOptimizer | None:
        if optimizer is None:
            return None
        if not isinstance(optimizer, DistributedOptimizer):
            raise TypeError(
                f"a checkpoint holds the state of a DistributedOptimizer, got {type(optimizer).__name__}: save the "
                f"model without it, and its state_dict() beside the checkpoint"
            )
        if optimizer.model is not self._model:
            raise ValueError("this optimizer belongs to another model")
        return optimizer


def _are_on_cpu_without_masters(optimizer: DistributedOptimizer) -> bool:
    """Whether every rank should read whole parameters: they are their own masters and lie in CPU memory.

    Reading them is then cheaper than gathering shards over gloo. The answer is the same on all ranks.
    """
    params = [entry.owned.param for entry in optimizer.model.bucket_params]
    return all(param.is_cpu and param.dtype not in (torch.bfloat16, torch.float16) for param in params)
