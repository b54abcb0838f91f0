"""One interface to model and optimizer for the training loop, under every kind of ``parallel``.

=====================  ==============================================  ================================================
``parallel``           model                                           optimizer
=====================  ==============================================  ================================================
ddp, zero1, hybrid     ``DistributedDataParallel`` around the module   ``DistributedOptimizer``
fsdp, hsdp             the module itself, after ``fully_shard``        the optimizer of torch, over its parameters
=====================  ==============================================  ================================================
"""

import abc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ... import fsdp
from ...ddp import DistributedDataParallel, DistributedOptimizer, GraphedTrainingStep
from ...ddp.collectives.failure_report import FailureReporter
from ...ddp.collectives.timeline import Timeline
from ...ddp.contract.record import GradRecord
from ...fsdp import FSDPModule, fully_shard
from ...fsdp.module import root_of, unit_of
from ...fsdp.unit_checks import own_modules
from ..config.error import require
from ..config.run import Config, OptimizerConfig
from ..model.hugging_face import HuggingFaceModel, LanguageModel, check_documents
from ..parallelizing.make_optimizer import make_optimizer
from .runtime import return_freed_memory
from .units import units_of

__all__ = ["HeldParameter", "Wrapped", "wrap"]


class HeldParameter(NamedTuple):
    """One parameter in the dtype of computation."""

    name: str
    numel: int
    """Of the whole."""
    dtype: torch.dtype
    delayed: bool


class Wrapped(abc.ABC):
    """What the training loop needs of a model and its optimizer.

    model      called with tokens and targets
    optimizer  for learning rate schedules and checkpoints
    """

    model: DistributedDataParallel | FSDPModule
    optimizer: torch.optim.Optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of every microbatch but the last."""
        return self.model.no_sync()

    def record_timeline(self) -> AbstractContextManager[Timeline]:
        """Record a timeline of computation and communication."""
        return self.model.record_timeline()

    @abc.abstractmethod
    def step(self) -> None:
        """Clip gradients and update parameters."""

    @abc.abstractmethod
    def graphed(self, iteration: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """``iteration``, which runs one whole iteration of two tensors, as one CUDA graph."""

    @property
    @abc.abstractmethod
    def grad_norm(self) -> Tensor | None:
        """Global norm of the last step's gradients before clipping; None without clipping."""

    @property
    @abc.abstractmethod
    def failures(self) -> FailureReporter:
        """Describes failed collectives."""

    @property
    @abc.abstractmethod
    def num_buckets(self) -> int:
        """Number of buckets that are reduced."""

    @property
    @abc.abstractmethod
    def records(self) -> Sequence[GradRecord]:
        """The gradient record of every trainable parameter."""

    @abc.abstractmethod
    def parameters(self) -> list[HeldParameter]:
        """Every trainable parameter."""

    @abc.abstractmethod
    def whole_weights(self, *, wanted: bool) -> dict[str, Tensor]:
        """Copies of all parameters and buffers on the CPU, by the names of the state dict; empty unless ``wanted``.

        Collective.
        """

    @abc.abstractmethod
    def digest(self, *, wanted: bool) -> str | None:
        """SHA-256 of all weights, to compare runs bit for bit; None unless ``wanted``.

        Collective.
        """


def wrap(module: LanguageModel, config: Config, device: torch.device) -> Wrapped:
    """Wrap or shard the model and create its optimizer, as ``config.parallel`` says. Collective over all ranks.

    module  on ``device``, in ``config.model.param_dtype``; one with deferred ``values`` gets them unit by unit
    """
    if config.fully_sharded:
        return _FullySharded(module, config, device)
    return _InWrapper(module, config)


class _InWrapper(Wrapped):
    model: DistributedDataParallel
    optimizer: DistributedOptimizer

    def __init__(self, module: LanguageModel, config: Config) -> None:
        self._module = module
        self.model = DistributedDataParallel(module, config.wrapper_config)
        self.optimizer = _optimizer_of(self.model, config.optimizer, max_grad_norm=config.optimizer.max_grad_norm)

    def step(self) -> None:
        self.optimizer.step()

    def graphed(self, iteration: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        return GraphedTrainingStep(iteration, self.model, self.optimizer)

    @property
    def grad_norm(self) -> Tensor | None:
        return self.optimizer.grad_norm

    @property
    def failures(self) -> FailureReporter:
        return self.model.failures

    @property
    def num_buckets(self) -> int:
        return len(self.model.buckets)

    @property
    def records(self) -> Sequence[GradRecord]:
        return self.model.records

    def parameters(self) -> list[HeldParameter]:
        return [
            HeldParameter(w.record.name, w.owned.param.numel(), w.owned.param.dtype, w.owned.delayed)
            for w in self.model.wired
        ]

    def whole_weights(self, *, wanted: bool) -> dict[str, Tensor]:
        if not wanted:
            return {}
        return {name: value.detach().to("cpu", copy=True) for name, value in self._module.state_dict().items()}

    def digest(self, *, wanted: bool) -> str | None:
        if not wanted:
            return None
        return _joined({name: _digest(name, parameter) for name, parameter in self._module.named_parameters()})


class _FullySharded(Wrapped):
    model: FSDPModule

    def __init__(self, module: LanguageModel, config: Config, device: torch.device) -> None:
        self._names = [name for name, _ in module.named_parameters()]
        require(
            not config.fsdp.offload_to_cpu or device.type == "cuda",
            "fsdp.offload_to_cpu",
            True,
            f"has no effect on {device}, where shards are in the host's memory anyway",
        )
        require(
            not config.fsdp.copy_engine_gather or (device.type == "cuda" and dist.is_initialized()),
            "fsdp.copy_engine_gather",
            True,
            f"has no effect on {device} without other ranks on GPUs",
        )
        mesh = _mesh(config, device)
        values = module.values if isinstance(module, HuggingFaceModel) else None
        for unit, policy in units_of(module, config.model, config.fsdp):
            if values is not None:
                values.fill(own_modules(unit))
            # Masters start from what the model computes with, as those of DistributedOptimizer do. One unit at a time:
            # the others' memory is that of their shards already.
            unit.float()
            fully_shard(
                unit,
                mesh=mesh,
                placements=config.fsdp.row,
                mixed_precision=policy,
                reshard_after_forward=None if unit is module else config.fsdp.reshard_after_forward,
                reduce_every_microbatch=config.fsdp.reduce_every_microbatch,
                bucket_size=config.fsdp.bucket_size,
                shard_atoms=config.fsdp.shard_atoms,
                offload_to_cpu=config.fsdp.offload_to_cpu,
                copy_engine_gather=unit is module and config.fsdp.copy_engine_gather,
                device=device,
                init_sync=False,  # all ranks have drawn the same
            )
            if values is not None and device.type == "cpu":
                return_freed_memory()
        assert isinstance(module, FSDPModule), "fully_shard has made it one"
        if isinstance(module, HuggingFaceModel):
            module.values = None
            if config.data.documents == "mask":
                check_documents(module, device)
        self.model = module
        self._root = root_of(module)
        # Clipping is no hook of the optimizer: a captured step has none.
        self.optimizer = _optimizer_of(module, config.optimizer)
        self._max_grad_norm = config.optimizer.max_grad_norm
        self._grad_norm: Tensor | None = None

    def step(self) -> None:
        if self._max_grad_norm is not None:
            self._grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.optimizer.step()

    def graphed(self, iteration: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def train_step(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
            loss = iteration(inputs, targets)
            return loss, self._grad_norm

        step = fsdp.GraphedTrainingStep(train_step, self.model, self.optimizer)

        def run(inputs: Tensor, targets: Tensor) -> Tensor:
            loss, self._grad_norm = step(inputs, targets)
            return loss

        return run

    @property
    def grad_norm(self) -> Tensor | None:
        return self._grad_norm

    @property
    def failures(self) -> FailureReporter:
        return self._root.failures

    @property
    def num_buckets(self) -> int:
        return sum(bucket.trainable for bucket in self._root.buckets)

    @property
    def records(self) -> Sequence[GradRecord]:
        return [record for bucket in self._root.buckets for record in bucket.records]

    def parameters(self) -> list[HeldParameter]:
        return [
            HeldParameter(pair.sharded.shard.name, pair.whole.numel(), pair.whole.dtype, pair.owned.delayed)
            for unit in self._root.units
            for pair in unit.pairs
            if pair.whole.requires_grad
        ]

    def whole_weights(self, *, wanted: bool) -> dict[str, Tensor]:
        whole = {name: param.detach().to("cpu", copy=True) for name, param in self._whole_params() if wanted}
        return whole | {name: value.cpu() for name, value in self.model.named_buffers() if wanted}

    def digest(self, *, wanted: bool) -> str | None:
        found = {name: _digest(name, param) for name, param in self._whole_params() if wanted}
        return _joined({name: found[name] for name in self._names}) if wanted else None

    def _whole_params(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name; one unit after the other is whole. Collective: take all of them on every rank."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                with torch.no_grad():
                    module.unshard()
                for pair in unit_of(module).pairs:
                    yield pair.sharded.shard.name, pair.whole
                with torch.no_grad():
                    module.reshard()


def _mesh(config: Config, device: torch.device) -> DeviceMesh | None:
    """Of two dims where there are several instances; None: all ranks there are."""
    if config.num_instances == 1:
        return None
    shape = (config.num_instances, dist.get_world_size() // config.num_instances)
    return init_device_mesh(device.type, shape, mesh_dim_names=("outer", "inner"))


def _optimizer_of(model: nn.Module, settings: OptimizerConfig, **options: Any) -> Any:
    """The optimizer of a wrapped or sharded model. Without ``decay_vectors`` vectors are a group of their own."""
    options |= settings.class_options
    own_group = not settings.decay_vectors and "weight_decay" in options
    groups = [{"params": _is_vector, "weight_decay": 0.0}] if own_group else []
    return make_optimizer(model, settings.optimizer_class, lr=settings.lr, param_groups=groups, **options)


def _is_vector(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a norm, a bias or a scalar. Packed experts have three dims."""
    return parameter.ndim < 2


def _digest(name: str, parameter: Tensor) -> str:
    digest = hashlib.sha256(name.encode())
    # A copy: memory that numpy has seen cannot be taken from a gathered unit any more.
    values = parameter.detach().to("cpu", copy=True).contiguous()
    digest.update(values.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _joined(digests: dict[str, str]) -> str:
    return hashlib.sha256("".join(digests.values()).encode()).hexdigest()
