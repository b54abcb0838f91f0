"""``parallelize``: any model under DDP, ZeRO-1, ZeRO-2, ZeRO-3 or a hybrid, by one call.

Five steps, in the order in which they must come: 1. find the blocks  2. fuse weight gradients  3. recompute and compile
the blocks  4. choose dtypes  5. wrap, or shard block by block.
"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...ddp import DistributedDataParallel, DistributedDataParallelConfig
from ...ddp.collectives.rank_grid import Ranks
from ...fsdp import FSDPModule, MixedPrecisionPolicy, Placements, fully_shard
from ...te_integration import convert_linears
from ...te_integration.conversion.fused_loss import FusedLoss, is_language_model, mode_of, why_no_fused_loss
from .blocks import Units, add_recompute, find_units
from .dtypes import compute_in, policy_of, store_in_fp32
from .experts import ExpertRanks, share_experts

__all__ = ["parallelize", "shard_units"]

_WRAPPED, _SHARDED = ("ddp", "zero1"), ("zero2", "zero3", "hsdp")
_FIELDS = frozenset(field.name for field in dataclasses.fields(DistributedDataParallelConfig))
_WRAPPER_OPTIONS = frozenset(inspect.signature(DistributedDataParallel).parameters) - {"module", "process_group"}
_SHARD_OPTIONS = frozenset(inspect.signature(fully_shard).parameters) - {"module", "mesh", "placements"}


@overload
def parallelize(
    model: nn.Module,
    parallel: Literal["ddp", "zero1"],
    *,
    mesh: Ranks = ...,
    units: Units = ...,
    fuse: bool = ...,
    fused_loss: FusedLoss = ...,
    param_dtype: torch.dtype | None = ...,
    recompute: bool = ...,
    compile: bool | Mapping[str, Any] = ...,
    ep: ExpertRanks | None = ...,
    dispatch: Mapping[str, Any] | None = ...,
    **options: Any,
) -> DistributedDataParallel: ...
@overload
def parallelize(
    model: nn.Module,
    parallel: Literal["zero2", "zero3", "hsdp"],
    *,
    mesh: Ranks = ...,
    units: Units = ...,
    fuse: bool = ...,
    fused_loss: FusedLoss = ...,
    param_dtype: torch.dtype | None = ...,
    recompute: bool = ...,
    compile: bool | Mapping[str, Any] = ...,
    ep: ExpertRanks | None = ...,
    dispatch: Mapping[str, Any] | None = ...,
    **options: Any,
) -> FSDPModule: ...
@overload
def parallelize(
    model: nn.Module,
    parallel: str,
    *,
    mesh: Ranks = ...,
    units: Units = ...,
    fuse: bool = ...,
    fused_loss: FusedLoss = ...,
    param_dtype: torch.dtype | None = ...,
    recompute: bool = ...,
    compile: bool | Mapping[str, Any] = ...,
    ep: ExpertRanks | None = ...,
    dispatch: Mapping[str, Any] | None = ...,
    **options: Any,
) -> DistributedDataParallel | FSDPModule: ...
def parallelize(
    model: nn.Module,
    parallel: str,
    *,
    mesh: Ranks = None,
    units: Units = "auto",
    fuse: bool = True,
    fused_loss: FusedLoss = False,
    param_dtype: torch.dtype | None = None,
    recompute: bool = False,
    compile: bool | Mapping[str, Any] = False,
    ep: ExpertRanks | None = None,
    dispatch: Mapping[str, Any] | None = None,
    **options: Any,
) -> DistributedDataParallel | FSDPModule:
    """Make a model train on all ranks. Returns the model that the loop calls. Collective.

    ``model`` is changed: use the returned one from here on, and make its optimizer by ``make_optimizer``.

    parallel     what is sharded over ranks. "ddp": nothing; "zero1": the optimizer's state; "zero2": gradients too;
                 "zero3": parameters too; "hsdp": as "zero3" inside an instance, with a copy in each instance
    mesh         the ranks: a process group; a DeviceMesh of one dim, or of two dims (outer, inner), with shards inside
                 and copies across, which "hsdp" needs; ``WORLD_OF_ONE``: this process alone. None: the default group,
                 or this process alone if no launcher has started several ranks
    units        the repeated blocks, which are gathered together, recomputed and compiled: a class, a tuple of classes,
                 or the modules. "auto": the members of the model's outermost ``nn.ModuleList``s; of its
                 ``nn.Sequential``s if it has no list. The logger ``maingrad.launch.parallelizing.blocks`` says which
    fuse         weight gradients of linear layers, experts and embeddings are written into the gradient buffers by
                 their kernels (``convert_linears``)
    fused_loss   a language model of Hugging Face that is given ``labels`` computes its loss by its head, without the
                 logits in memory. True or "recompute", "in_forward": see ``convert_linears``
    param_dtype  floating-point dtype of parameters in computation, to which floating-point inputs of the model are
                 cast; master weights are fp32. None: the dtype that the parameters have. Under "ddp" and "zero1"
                 masters begin with the weights as ``param_dtype`` rounds them
    recompute    backward computes the activations of each unit again (gradient checkpointing). A model of Hugging Face
                 does so itself, for its own layers, in training mode
    compile      ``module.compile()`` of each unit; a mapping gives the arguments of ``torch.compile``
    ep           the ranks that share out the experts of a model of Hugging Face, and send each other tokens: a number
                 of neighbours among the ranks of ``mesh``, or the group, or the mesh of one dim. Experts are averaged
                 over the ranks that hold the same. None: each rank has all experts. Experts that are DTensors, cut
                 along their first dim over data-parallel ranks (``ep_plan``, torchtitan), need no ``ep``
    dispatch     how tokens travel: options of ``te_integration.TokenDispatcher``, as {"transport": "symmetric"}
    options      under "ddp" and "zero1" fields of ``DistributedDataParallelConfig`` (reductions and gathers overlap
                 computation unless they say otherwise), or a whole ``config``, and arguments of
                 ``DistributedDataParallel``; under the others arguments of ``fully_shard``. With a ``mixed_precision``
                 of your own, parameters are stored in the dtypes that they have

    Raises ``TypeError`` if ``model`` is no module or ``units`` names none, and ``ValueError`` for a model that is
    wrapped or sharded already, for a form or an option that does not exist or has no effect, and for what the wrapper
    or ``fully_shard`` refuses. Everything that the arguments alone decide is refused before the model is changed.
    """
    _check(model, parallel, mesh, param_dtype, options)
    if mode_of(fused_loss) is not None:
        _check_fused_loss(model, fuse)
    found = find_units(model, units, gathers=parallel in _SHARDED)
    if (recompute or compile) and not found:
        raise ValueError(
            f"{type(model).__name__} has no repeated blocks in an nn.ModuleList or nn.Sequential, so that there is "
            f"nothing to recompute or compile: name them, units=Block or units=[model.first, model.second]"
        )
    own_policy: MixedPrecisionPolicy | None = options.get("mixed_precision")
    policy = None if parallel in _WRAPPED else own_policy or policy_of(model, param_dtype)
    experts = _share_experts(model, mesh, ep, dispatch or {}, fuse, options)
    if fuse:
        convert_linears(model, fused_loss=fused_loss)
    if recompute:
        add_recompute(model, found)
    if compile:
        for unit in found:
            unit.compile(**(compile if isinstance(compile, Mapping) else {}))
    if policy is not None:
        return shard_units(model, found, parallel, mesh, policy, options, experts=experts)
    if param_dtype is not None:
        compute_in(model, param_dtype)
    arguments = {name: value for name, value in options.items() if name in _WRAPPER_OPTIONS}
    if experts:
        arguments["expert_process_group"] = next(iter(experts.values()))  # the same of all
    return DistributedDataParallel(model, process_group=mesh, **{**arguments, "config": _config_of(parallel, options)})


# ---- Experts, the wrapper, or units. ----


def _share_experts(
    model: nn.Module,
    mesh: Ranks,
    ep: ExpertRanks | None,
    dispatch: Mapping[str, Any],
    fuse: bool,
    options: Mapping[str, Any],
) -> dict[nn.Module, Ranks]:
    said = [name for name in ("expert_process_group", "tensor_parallel_group") if options.get(name) is not None]
    if said and (ep is not None or dispatch):
        raise ValueError(
            f"{'dispatch' if ep is None else 'ep'} does not go with {said[0]}: ep cuts experts over data-parallel "
            f"ranks, and knows the others"
        )
    return {} if said else share_experts(model, mesh, ep, dispatch, fuse=fuse)


def _config_of(parallel: str, options: Mapping[str, Any]) -> DistributedDataParallelConfig:
    if options.get("config") is not None:
        return options["config"]  # type: ignore[no-any-return]
    zero1 = parallel == "zero1"
    defaults = {"overlap_grad_reduce": True, "overlap_param_gather": zero1}
    fields = {name: value for name, value in options.items() if name in _FIELDS}
    return DistributedDataParallelConfig(**{**defaults, **fields, "use_distributed_optimizer": zero1})


def shard_units(
    model: nn.Module,
    units: Sequence[nn.Module],
    placements: str | Placements,
    mesh: Ranks,
    policy: MixedPrecisionPolicy,
    options: Mapping[str, Any],
    policies: Mapping[nn.Module, MixedPrecisionPolicy] | None = None,
    experts: Mapping[nn.Module, Ranks] = {},
) -> FSDPModule:
    """Make units of the blocks, the inner ones first, and of the whole model.

    options   arguments of ``fully_shard``. Without a ``mixed_precision`` in it, trained parameters are stored in fp32
    policies  of units with another policy than the rest
    experts   units of their own, with the ranks that hold the same
    """
    units = [*experts, *(unit for unit in units if unit not in experts)]
    only_of_units, only_of_model = {"reshard_after_forward"}, {"copy_engine_gather"}
    if "ignored_params" in options:
        options = {**options, "ignored_params": list(options["ignored_params"])}  # each unit reads them
    ignored = {id(param) for param in options.get("ignored_params", ())}
    for module in (*sorted(units, key=lambda unit: sum(1 for _ in unit.modules())), model):
        left_out = only_of_units if module is model else only_of_model
        if options.get("mixed_precision") is None:
            store_in_fp32(module, ignored)  # one unit at a time: the others' memory is that of their shards already
        given = {key: value for key, value in options.items() if key not in left_out}
        given["mixed_precision"] = (policies or {}).get(module, policy)
        fully_shard(module, experts.get(module, mesh), placements, **given)
    assert isinstance(model, FSDPModule), "fully_shard has made it one"
    return model


# ---- What is refused before the model is changed. ----


def _check(
    model: nn.Module, parallel: str, mesh: Ranks, param_dtype: torch.dtype | None, options: Mapping[str, Any]
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"parallelize takes an nn.Module, got {type(model).__name__}")
    if parallel not in (*_WRAPPED, *_SHARDED):
        raise ValueError(f"parallel is one of {', '.join((*_WRAPPED, *_SHARDED))}; got {parallel!r}")
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | FSDPModule | nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{f'module {name!r}' if name else 'the model'} is a {type(module).__name__} already: give parallelize "
                f"the plain model"
            )
    if param_dtype is not None and not param_dtype.is_floating_point:
        raise ValueError(f"param_dtype is a floating-point dtype, got {param_dtype}")
    if parallel == "hsdp" and not (isinstance(mesh, DeviceMesh) and mesh.ndim == 2):
        raise ValueError(
            '"hsdp" needs a mesh of two dims, (outer, inner): mesh=init_device_mesh("cuda", (nodes, gpus_per_node), '
            'mesh_dim_names=("outer", "inner")); over one dim use "zero3"'
        )
    if parallel == "ddp" and isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        raise ValueError(
            '"ddp" shards nothing, so that a mesh of two dims has no effect: give a mesh of one dim, or use "zero1" or '
            '"hsdp"'
        )
    _check_options(parallel, param_dtype, options)


def _check_fused_loss(model: nn.Module, fuse: bool) -> None:
    if not fuse:
        raise ValueError("fused_loss needs fuse=True: the head's weight gradient is written where it is reduced")
    models = [module for module in model.modules() if is_language_model(module)]
    reasons = [why_no_fused_loss(module) for module in models]
    if not models:
        reasons = [
            f"{type(model).__name__} has no language model of Hugging Face, whose forward takes labels; elsewhere the "
            f"head is a te_integration.LinearCrossEntropy"
        ]
    if None not in reasons:
        raise ValueError(f"fused_loss has no effect: {'; '.join(filter(None, reasons))}")


def _check_options(parallel: str, param_dtype: torch.dtype | None, options: Mapping[str, Any]) -> None:
    wrapped = parallel in _WRAPPED
    own, other = (_FIELDS | _WRAPPER_OPTIONS, _SHARD_OPTIONS) if wrapped else (_SHARD_OPTIONS, _FIELDS)
    for name in options:
        if name in ("use_distributed_optimizer", "placements"):
            raise ValueError(f'{name} follows from the second argument of parallelize, "{parallel}": leave it out')
        if name not in own:
            where = f"; it is one of {', '.join(_SHARDED if wrapped else _WRAPPED)}" if name in other else ""
            raise ValueError(f'{name} is no option under "{parallel}"{where}: it takes {", ".join(sorted(own))}')
    config = options.get("config")
    if config is not None:
        fields = sorted(_FIELDS & set(options))
        if fields:
            raise ValueError(f"config and {fields[0]} both say how gradients are reduced: set the field in config")
        if config.use_distributed_optimizer != (parallel == "zero1"):
            raise ValueError(
                f'config has use_distributed_optimizer={config.use_distributed_optimizer}, which is not "{parallel}"'
            )
    elif wrapped:
        _config_of(parallel, options)
    if param_dtype is not None and options.get("mixed_precision") is not None:
        raise ValueError("param_dtype and mixed_precision both name dtypes: set param_dtype in mixed_precision")
