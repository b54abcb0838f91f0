"""The ``CheckpointSource`` of modules with whole parameters: in ``DistributedDataParallel``, or in no wrapper."""

from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..optimizer.distributed_optimizer import DistributedOptimizer
from ..plan.model_slice import ModelSlice
from ..plan.owned_params import find_tensor_ranks
from ..wrapper.data_parallel import DistributedDataParallel
from .source import CheckpointRanks, CheckpointSource, HeldSlice, Holding, model_tensors, slices_set_in

__all__ = ["source_of"]


def source_of(model: nn.Module) -> CheckpointSource:
    """The source through which a model is saved and loaded.

    Raises ``ValueError`` for a whole module that contains sharded modules or DTensors, of which one rank's part would
    be saved as all; for tensors on the meta device, which have no values; and for a model in torch's wrapper.
    """
    if hasattr(model, "checkpoint_source"):
        return model.checkpoint_source()  # type: ignore[no-any-return, operator]
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
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
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
    """The source of a ``DistributedDataParallel`` model, or of a module that this process saves and loads alone: if it
    is cut, together with the ranks that hold its other slices."""

    def __init__(self, model: nn.Module) -> None:
        self._model = self.module = model
        if isinstance(model, DistributedDataParallel):
            self.module, tensor = model.module, model.tensor_ranks
            grid, experts = model.grids["slice"], model.grids["expert"]
            ranks = CheckpointRanks(grid, model.failures, experts=None if experts is model.grids["dense"] else experts)
        else:
            ranks, tensor = CheckpointRanks(), find_tensor_ranks(model, None)
        self.slices: Mapping[str, ModelSlice] = {**slices_set_in(self.module), **getattr(model, "model_slices", {})}
        self.ranks = ranks if tensor is None else ranks.with_tensor(tensor.inner)

    def hold(self, optimizer: object, *, saving: bool) -> Holding:
        """What this rank holds: the optimizer's slices; all elements of frozen parameters, and without an optimizer."""
        if saving and isinstance(self._model, DistributedDataParallel):
            self._model.steps.read()  # weights of ranks that have taken different steps are not saved
        if optimizer is None:
            return Holding(model_tensors(self.module, slices=self.slices), {}, None)
        if not isinstance(optimizer, DistributedOptimizer):
            raise TypeError(
                f"a checkpoint holds the state of a DistributedOptimizer, got {type(optimizer).__name__}: save the "
                f"model without it, and its state_dict() beside the checkpoint"
            )
        if optimizer.model is not self._model:
            raise ValueError("this optimizer belongs to another model")
        optimizer.prepare_state()
        if saving:
            optimizer.refresh_masters()
        slices, parts = {}, optimizer.full_slices(to_load=not saving)
        # To read parameters on the CPU takes less time than to gather shards over gloo. Alike on all ranks. Copies of
        # compact state's masters are to be read themselves.
        self._reads_whole = not saving and all(
            part is own and part.param.is_cpu and part.master.dtype is part.param.dtype
            for part, own in zip(parts, optimizer.slices, strict=True)
        )
        for part in parts:
            slices[part.name] = HeldSlice(
                start=part.start,
                shape=part.shape,
                dtype=part.param.dtype,
                param=part.param,
                master=part.master,
                group=part.group,
                updated=part.updated,
                offset=part.offset,
                state=part.state() if saving else {},
                scalars=part.scalars() if saving else {},
            )
        return Holding(model_tensors(self.module, slices=self.slices), slices, optimizer, self._reads_whole)

    def loaded(self, optimizer: object) -> None:
        """Make parameters follow the masters."""
        if isinstance(optimizer, DistributedOptimizer):
            optimizer.mark_loaded(whole=self._reads_whole, from_full=True)
