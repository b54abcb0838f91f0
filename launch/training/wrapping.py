"""A run's model under its wrapper, or sharded, with its optimizer.

=====================  ==============================================  ================================================
``parallel``           model                                           optimizer
=====================  ==============================================  ================================================
ddp, zero1, hybrid     ``DistributedDataParallel`` around the module   ``DistributedOptimizer``
fsdp, hsdp             the module itself, after ``fully_shard``        the optimizer of torch, over its parameters; a
                                                                       ``ShardedAdamW`` with compact state
=====================  ==============================================  ================================================
"""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ... import fsdp
from ...ddp import DistributedDataParallel, GraphedTrainingStep, clip_grad_norm
from ...ddp.collectives.failure_report import FailureReporter, gather
from ...ddp.collectives.rank_grid import Ranks, make_grid
from ...ddp.contract.record import GradRecord
from ...ddp.plan.model_slice import model_slice_of
from ...ddp.plan.owned_params import find_owned_params
from ...ddp.torch_grads.muon_groups import MuonGroups
from ...ddp.torch_grads.over_ranks import whole, whole_of_slices
from ...fsdp import FSDPModule, MixedPrecisionPolicy
from ...fsdp.module import root_of
from ...fsdp.tensors.parameter import ShardedParameter
from ...te_integration import GroupedMLP
from ..config.run import Config, ConfigError, FsdpConfig, ModelConfig, OptimizerConfig
from ..model.hugging_face import HuggingFaceModel, LanguageModel
from ..model.moe import MixtureOfExperts
from ..parallelizing.experts import same_place
from ..parallelizing.graphed import graphed
from ..parallelizing.make_optimizer import make_optimizer
from ..parallelizing.muon import with_whole_matrices
from ..parallelizing.parallelize import shard_units
from .runtime import Runtime

__all__ = ["HeldParameter", "Wrapped", "units_of"]

T = TypeVar("T")


class HeldParameter(NamedTuple):
    """One trainable parameter, of this rank's stage or of another one's."""

    numel: int
    """Number of elements of the whole parameter."""
    dtype: torch.dtype
    """The dtype of computation."""
    delayed: bool
    """Whether its gradient is computed behind the backward."""


class Wrapped:
    """A model, wrapped or sharded as ``config.parallel`` says, and its optimizer. Making one is collective.

    module  on the runtime's device, in ``config.model.param_dtype``. A model of Hugging Face that is to be sharded has
            values on the first rank, and may be on meta elsewhere
    """

    def __init__(self, module: LanguageModel, config: Config, runtime: Runtime) -> None:
        self._slices = {name: model_slice_of(param) for name, param in module.named_parameters()}
        self._dtypes = {name: param.dtype for name, param in module.named_parameters()}
        """The dtypes of computation, by name."""
        self.pipeline = runtime.pipeline_group
        """The ranks with the other stages, if there are any."""
        own = {
            each.name: HeldParameter(
                math.prod((self._slices[each.name] or each.param).shape), each.param.dtype, each.delayed
            )
            for each in find_owned_params(module)
            if each.param.requires_grad
        }
        self.parameters = [*self._of_all_stages(own).values()]
        self._module = module
        self.model: DistributedDataParallel | FSDPModule
        """Called with tokens and targets."""
        self.optimizer: Any
        """Its ``grad_norm`` is that of the last step before clipping, or None."""
        limit = config.optimizer.max_grad_norm
        self._clip: Callable[[], Tensor] | None = None
        muon = config.optimizer.muon_of(module)
        if config.fully_sharded:
            self.model = _sharded(module, config, runtime)
            self.optimizer = _optimizer_of(self.model, config.optimizer, muon)
            if limit is not None:  # no hook of the optimizer: a captured step has none
                self._clip = partial(_clip_shards, self.model, limit, self.pipeline)
            holder: Any = root_of(self.model)
        else:
            options: dict[str, Any] = {"process_group": runtime.loss_group}
            if config.model.tie_embeddings:
                options["embedding_group"] = runtime.embedding_group
            if runtime.expert_mesh is not None:
                options["expert_process_group"] = same_place(runtime.expert_mesh, make_grid(None))
            self.model = holder = DistributedDataParallel(module, with_whole_matrices(config.ddp, muon), **options)
            if self.pipeline is not None and limit is not None:  # by the norm of all stages
                self._clip, limit = partial(clip_grad_norm, holder, limit, pipeline_group=self.pipeline), None
            self.optimizer = _optimizer_of(self.model, config.optimizer, muon, max_grad_norm=limit)
        self.failures: FailureReporter = holder.failures
        """Describes failed collectives."""
        self._buckets = [bucket for bucket in holder.buckets if bucket.records]

    @property
    def num_buckets(self) -> int:
        """Number of buckets that are reduced."""
        return len(self._buckets)

    @property
    def records(self) -> list[GradRecord]:
        """The gradient record of every trainable parameter."""
        return [record for bucket in self._buckets for record in bucket.records]

    def step(self) -> None:
        """Clip gradients and update parameters."""
        if self._clip is not None:
            self.optimizer.grad_norm = self._clip()
        self.optimizer.step()

    def graphed(
        self, iteration: Callable[..., Tensor], how: Literal["auto", True, False]
    ) -> Callable[..., Tensor] | None:
        """``iteration``, which runs one whole iteration, as one CUDA graph; None where it is none."""
        if how is False:
            return None
        sharded = not isinstance(self.model, DistributedDataParallel)

        def train_step(*args: Tensor) -> tuple[Tensor, Tensor | None]:
            return iteration(*args), self.optimizer.grad_norm if sharded else None

        step: Any
        if how == "auto":
            step = graphed(train_step, self.model, self.optimizer)
        else:
            kind: Any = fsdp.GraphedTrainingStep if sharded else GraphedTrainingStep
            step = kind(train_step, self.model, self.optimizer)

        def run(*args: Tensor) -> Tensor:
            loss: Tensor
            loss, norm = step(*args)
            if sharded:
                self.optimizer.grad_norm = norm
            return loss

        return run

    def whole_weights(self, *, wanted: bool) -> dict[str, Tensor]:
        """Copies of all parameters and buffers on the CPU, by name; empty unless ``wanted``. Collective."""
        found = itertools.chain(self._whole_params(), self._module.named_buffers())
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found if wanted}

    def digest(self, *, wanted: bool) -> str | None:
        """SHA-256 of all parameters, to compare runs bit for bit; None unless ``wanted``. Collective."""
        here = wanted or self.pipeline is not None  # the rank that wants it has one stage
        found = {name: _digest(name, param) for name, param in self._whole_params() if here}
        digests = self._of_all_stages({name: found[name] for name in self._dtypes if here})
        return hashlib.sha256("".join(digests.values()).encode()).hexdigest() if wanted else None

    def _of_all_stages(self, own: Mapping[str, T]) -> dict[str, T]:
        """What all stages have, by name, in the order of the whole model. Collective over the pipeline's ranks."""
        stages = gather(own, [] if self.pipeline is None else [self.pipeline], None, "what the stages have")
        return {name: each for stage in stages.values() for name, each in stage.items()}

    def _whole_params(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name; one after the other is whole. Collective: take all of them on every rank."""
        for name, param in self._module.named_parameters():
            if isinstance(param, ShardedParameter):  # in the dtype of masters
                yield name, whole(param.detach(), param.shard).to(self._dtypes[name])
            else:
                yield name, whole_of_slices(param, self._slices[name])


def units_of(
    model: LanguageModel, settings: ModelConfig, fsdp: FsdpConfig
) -> Iterator[tuple[nn.Module, MixedPrecisionPolicy]]:
    """The module and the policy of each ``fully_shard`` call, inner units first, the model last.

    Parameters are stored in fp32 and used in ``model.param_dtype``. Inputs are not cast: activations have the dtype of
    the parameters, and rotary tables stay in fp32. A router with another dtype than its block is a unit of its own,
    and so are experts of which other ranks hold the rest.
    """
    keeps_router = settings.router_dtype != settings.param_dtype
    policy = MixedPrecisionPolicy(
        param_dtype=settings.dtype("param_dtype"),
        grad_dtype=fsdp.dtype("grad_dtype"),
        reduce_dtype=fsdp.dtype("reduce_dtype"),
        cast_forward_inputs=False,
    )
    of_router = dataclasses.replace(policy, param_dtype=settings.dtype("router_dtype"))
    for block in model.blocks:
        if settings.num_experts and isinstance(block.ffn, MixtureOfExperts):
            if keeps_router:
                yield block.ffn.router, of_router
            if block.ffn.has_part:
                yield block.ffn.experts, policy
        yield block, policy
    yield model, policy


def _sharded(module: LanguageModel, config: Config, runtime: Runtime) -> FSDPModule:
    settings, device = config.fsdp, runtime.device
    mesh: Ranks = runtime.loss_group
    outer = config.num_instances
    if outer > 1:
        shape = (runtime.mesh.pp, outer, runtime.loss_ranks // outer, runtime.mesh.tp)
        made = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "outer", "inner", "tp"))
        mesh = made["outer", "inner"]
    policies = dict(units_of(module, config.model, settings))
    options = {name: getattr(settings, name) for name in _OPTIONS} | {"device": device}
    if config.optimizer.state == "compact":  # shards have the dtype of the module, which is that of computation
        options["mixed_precision"] = policies[module]
    if isinstance(module, HuggingFaceModel):
        options["init_fn"] = lambda module: None  # the first rank has values, which are copied to the others
    else:
        options["init_sync"] = False  # all ranks have drawn the same
    units = [unit for unit in policies if unit is not module]
    try:
        experts: dict[nn.Module, Ranks] = {}
        if runtime.expert_mesh is not None:
            same = same_place(runtime.expert_mesh, make_grid(mesh))
            experts = {unit: same for unit in units if isinstance(unit, GroupedMLP)}
        return shard_units(module, units, settings.row, mesh, policies[module], options, policies, experts)
    except ValueError as error:  # an option that has no effect on this device
        raise ConfigError(f"[fsdp]: {error}") from None


_OPTIONS = (
    "reshard_after_forward",
    "reduce_every_microbatch",
    "bucket_size",
    "shard_atoms",
    "offload_to_cpu",
    "copy_engine_gather",
)
"""Keys of ``[fsdp]`` that are arguments of ``fully_shard``."""


def _clip_shards(model: nn.Module, limit: float, pipeline: dist.ProcessGroup | None) -> Tensor:
    """Clip by the norm of a sharded model, or of all stages of one; returns the norm."""
    norm = nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    if pipeline is not None:
        square = norm.double().square()
        dist.all_reduce(square, group=pipeline)
        norm = square.sqrt().to(norm.dtype)
    nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm


def _optimizer_of(model: nn.Module, settings: OptimizerConfig, muon: MuonGroups, **options: Any) -> Any:
    """The optimizer of a wrapped or sharded model. Without ``decay_vectors`` vectors are a group of their own."""
    options |= settings.class_options
    if settings.state == "compact":
        options |= {"state": "compact", "moment_dtype": getattr(torch, settings.moment_dtype)}
    own_group = not settings.decay_vectors and "weight_decay" in options
    # Norms, biases and scalars. Packed experts have three dims.
    vectors = {"params": lambda name, parameter: parameter.ndim < 2, "weight_decay": 0.0}
    groups = [*muon.groups, *([vectors] if own_group else [])]
    return make_optimizer(model, settings.optimizer_class, lr=settings.lr, param_groups=groups, **options)


def _digest(name: str, parameter: Tensor) -> str:
    digest = hashlib.sha256(name.encode())
    # A copy: memory that numpy has seen cannot be taken from a gathered unit any more.
    values = parameter.detach().to("cpu", copy=True).contiguous()
    digest.update(values.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
