"""Fully sharded models as sources of checkpoints: ranges of parameters. Shards are the optimizer's masters themselves.

    parameters at rest   computed in    entries of the file
    fp32                 bf16, fp16     master (fp32) and model (rounded), as DDP writes half-precision models
    any                  the same       model
    bf16 + remainder     bf16           master (fp32) and model: ``ShardedAdamW`` has masters as copies in host memory

So a file can be loaded by any number of ranks, with any placements, and by ``DistributedDataParallel`` with
``DistributedOptimizer``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...ddp.checkpoint.source import CheckpointRanks, HeldSlice, Holding, model_tensors, slices_set_in
from ...ddp.collectives.failure_report import FailureReporter, gather
from ...ddp.optimizer.steps import MASTER
from ...ddp.plan.model_slice import ModelSlice
from ..tensors.parameter import ShardedPair, ShardedParameter
from .optimizer_state import counters_of, elementwise_of, translate_state_dicts
from .sharded_adam import ShardedAdam, ShardedAdamW

__all__ = ["ShardedSource"]

_HALF = (torch.bfloat16, torch.float16)


class ShardedSource:
    """A fully sharded module with all units in it; a ``CheckpointSource``.

    module  the module to save or load; names of entries are those in this module
    pairs   the parameters of its units, sharded and whole

    The constructor is collective over the module's ranks at its first call for a module.
    """

    def __init__(self, module: nn.Module, pairs: Iterable[ShardedPair]) -> None:
        self.module = module
        self._whole = {pair.sharded: pair.whole for pair in pairs}
        said = ((name, getattr(param, "shard", None)) for name, param in module.named_parameters())
        told = {name: getattr(shard, "model_slice", None) for name, shard in said}
        self.slices: Mapping[str, ModelSlice] = {
            **slices_set_in(module),
            **{name: each for name, each in told.items() if each is not None},
        }
        self.ranks = _ranks_of(module, list(self._whole), self.slices)
        self._masters: Mapping[Tensor, Tensor] = {}
        """Masters of compact state, while a load reads into them."""

    def hold(self, optimizer: object, *, saving: bool) -> Holding:
        """See ``CheckpointSource``. Sharded parameters, and parameters in the optimizer, have a slice each."""
        tensors = model_tensors(self.module, partial(_is_experts, self.ranks), self.slices)
        gathered = {id(param) for param in self._whole.values()}
        for name, param in tensors.parameters.items():
            if id(param) in gathered:
                raise ValueError(f"parameter '{name}' is whole now: save and load outside forwards and unsharded()")
        checked = _checked(optimizer, tensors.parameters)
        if checked is not None:
            translate_state_dicts(checked)  # state that was loaded in DTensors becomes shards
        state: Mapping[Any, Any] = {} if checked is None else checked.state
        masters: Mapping[Tensor, Tensor] = {}
        if isinstance(checked, ShardedAdamW | ShardedAdam):
            state = full = checked.full_state()
            masters = checked.masters(full)
            # Frozen parameters without state get none by a load of their masters.
            masters = {param: each for param, each in masters.items() if param.requires_grad or param in full}
        self._masters = {} if saving else masters
        groups = {
            param: index
            for index, group in enumerate(() if checked is None else checked.param_groups)
            for param in group["params"]
            if param.requires_grad or state.get(param)  # a frozen parameter without state counts as in no group
        }
        counters: frozenset[str] = frozenset() if checked is None else counters_of(checked)
        slices = {
            name: self._slice(param, groups.get(param), state.get(param, {}), counters, masters)
            for name, param in tensors.parameters.items()
            if isinstance(param, ShardedParameter) or param in groups
        }
        return Holding(tensors, slices, checked)

    def loaded(self, optimizer: object) -> None:
        """Mark the shards as changed on every rank, so that whole parameters at rest are gathered again."""
        torch.autograd.graph.increment_version(list(self._whole))
        if isinstance(optimizer, ShardedAdamW | ShardedAdam):
            known = optimizer.state
            optimizer.load({param: {**known.get(param, {}), MASTER: each} for param, each in self._masters.items()})
            self._masters = {}

    def _slice(
        self,
        param: nn.Parameter,
        group: int | None,
        state: Mapping[str, Any],
        counters: frozenset[str],
        masters: Mapping[Tensor, Tensor],
    ) -> HeldSlice:
        """This rank's elements of a parameter: the master too, because whole parameters are freed.

        group  index of the optimizer's parameter group; None: in no group
        """
        start, shape, dtype = 0, tuple(param.shape), param.dtype
        if isinstance(param, ShardedParameter):
            start, shape = param.shard.elements.start, param.shard.shape
            computing = self._whole[param].dtype
            if dtype is torch.float32 and computing in _HALF:
                dtype = computing  # a save rounds
        elements = param.detach().view(-1)
        numel: int = math.prod(shape)
        updated = param if group is not None and numel else None
        state = {} if updated is None else state
        elementwise = elementwise_of(param.shape, state, counters)
        return HeldSlice(
            start=start,
            shape=shape,
            dtype=dtype,
            param=elements,
            master=masters.get(param, elements),
            group=group,
            updated=updated,
            offset=0,
            state={key: value.view(-1) for key, value in elementwise.items()},
            scalars={key: value for key, value in state.items() if key not in elementwise},
        )


def _checked(optimizer: object, params: Mapping[str, nn.Parameter]) -> Optimizer | None:
    if optimizer is None:
        return None
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"a torch.optim.Optimizer over the sharded parameters, got {type(optimizer).__name__}")
    known = set(params.values())
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in known:
                raise ValueError(
                    f"this optimizer belongs to another model: a parameter of shape {list(param.shape)} in its group "
                    f"{index} is not in this one; build it over model.parameters() after fully_shard"
                )
    return optimizer


# ---- Ranks. ----


_RANKS = "_maingrad_checkpoint_ranks"


def _is_experts(ranks: CheckpointRanks, param: nn.Parameter) -> bool:
    if ranks.experts is None or not isinstance(param, ShardedParameter):
        return False
    return param.shard.grid[:2] == ranks.experts[:2]


def _ranks_of(
    module: nn.Module, params: Sequence[ShardedParameter], slices: Mapping[str, ModelSlice]
) -> CheckpointRanks:
    """The ranks of a module's checkpoints. Found once and stored on the module: ranks compare their meshes."""
    if _RANKS not in module.__dict__:
        ranks = _find_ranks(params)
        experts = {name for name, param in module.named_parameters() if _is_experts(ranks, param)}
        told = [each.group for name, each in slices.items() if each.grad != "expert" and name not in experts]
        tensor = next((group for group in told if group is not None), None)  # None: an expert of one mesh with the rest
        module.__dict__[_RANKS] = ranks.with_tensor(tensor)
    return module.__dict__[_RANKS]  # type: ignore[no-any-return]


def _find_ranks(params: Sequence[ShardedParameter]) -> CheckpointRanks:
    grids = list({param.shard.grid[:2]: param.shard.grid for param in params}.values())
    if not grids:
        return CheckpointRanks()
    failures = FailureReporter()
    failures.grids = grids
    dense = max(grids, key=lambda grid: grid.size)
    members = [sorted(gather(None, grid.axes, failures, "the ranks of a mesh for checkpoints")) for grid in grids]
    of_dense = max(members, key=len)
    fewer = [(ranks, grid) for ranks, grid in zip(members, grids, strict=True) if ranks != of_dense]
    if len(fewer) > 1:
        sets = ", ".join(str(ranks) for ranks in (of_dense, *(ranks for ranks, _ in fewer)))
        raise ValueError(f"parameters of one model are shared by ranks {sets}: a checkpoint knows two such sets")
    # Where an instance does not have all elements, the ranks of all instances write together.
    repeats = len(grids) == 1 and all(param.shard.num_replicas == dense.outer_size for param in params)
    experts = fewer[0][1] if fewer else None
    return CheckpointRanks(dense, failures, instances_alike=repeats, experts=experts)
