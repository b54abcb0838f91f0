"""Checks at certain points of an iteration, and of the model in each forward; errors name parameter and remedy."""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from ..config import DistributedDataParallelConfig
from ..contract.main_grad import record_of
from ..contract.record import GradRecord
from ..contract.torch_wrappers import is_sharded_by_torch
from ..torch_internals import DisableTorchFunctionSubclass, registered_params
from .bucket import Bucket, BucketParam, Phase

__all__ = [
    "ModelWatch",
    "ModuleTables",
    "check_no_stranger",
    "check_nothing_bypassed",
    "check_nothing_pending",
    "check_nothing_under_way",
    "check_same",
    "check_whole",
    "is_frozen",
]


@torch.compiler.disable
def is_frozen(bucket_params: Iterable[BucketParam]) -> bool:
    """Whether no parameter of the model requires a gradient now: backwards go through the model and train nothing."""
    with DisableTorchFunctionSubclass():
        return not any(entry.owned.param.requires_grad for entry in bucket_params)


def check_no_stranger(module: nn.Module) -> None:
    """Raise ``RuntimeError`` for a parameter of ``module`` that requires a gradient and has no accumulator."""
    for prefix, owner in module.named_modules():
        for local, param in registered_params(owner).items():
            if param is not None and param.requires_grad and record_of(param) is None:
                raise RuntimeError(
                    f"parameter '{f'{prefix}.{local}' if prefix else local}' requires a gradient, and was frozen or "
                    f"not there when the model was wrapped: it has no main_grad and would never be reduced; unfreeze "
                    f"or add it before wrapping, or unwrap() and wrap again"
                )


def check_nothing_pending(records: Iterable[GradRecord], caller: str, *, gives_up: bool = False) -> None:
    """Raise while delayed weight gradients are pending.

    gives_up  forget the gradients that nothing can compute any more, and raise for the others alone
    """
    late = [record for record in records if record.pending]
    for record in late if gives_up else ():
        record.forget_lost()
    waiting = {record.name: record.pending for record in late if record.pending}
    if waiting:
        name, pending = next(iter(waiting.items()))
        raise RuntimeError(
            f"{caller} while delayed weight gradients of {len(waiting)} parameter(s) are pending: '{name}' waits "
            f"for {len(pending)} of {pending[0].owner}; run its backward_dw() or drain its WgradQueue first. Where the "
            f"queue was let go, model.zero_grad() gives the iteration up"
        )


def check_nothing_bypassed(bucket_params: Iterable[tuple[Tensor, GradRecord]], caller: str) -> None:
    """Raise where ``.grad`` holds a gradient that no hook has seen.

    A hook empties ``.grad`` after autograd has filled it, unless a foreign ``backward_dw`` is still to use it.
    """
    for param, record in bucket_params:
        if param.grad is not None and not record.exposed and not record.pending:
            raise RuntimeError(
                f"{caller}: a gradient of parameter '{record.name}' was put into .grad by hand, where no hook sees it, "
                f"and is not reduced. {_remedy_of(record)}"
            )


def _remedy_of(record: GradRecord) -> str:
    schedules = (
        " Zero-bubble schedules of torch.distributed.pipelining do so unless their stage has a dw_builder: use "
        "maingrad.te_integration.pipeline.PipelineStage."
    )
    if record.is_of_unit:
        return f"Gradients made by hand go into .grad of model.parameters(), after the last backward.{schedules}"
    return (
        f"Where it was you (PCGrad, torch.autograd.grad), call maingrad.ddp.add_grad(param, grad) in its place, before "
        f"the last backward; reduced gradients are changed in .grad after it.{schedules}"
    )


def check_whole(config: DistributedDataParallelConfig, caller: str) -> None:
    """Raise where reduced gradients are sharded."""
    if config.use_distributed_optimizer:
        raise RuntimeError(
            f"{caller} needs whole gradients, and use_distributed_optimizer=True leaves each rank its shard: "
            "use maingrad.ddp.DistributedOptimizer, or set use_distributed_optimizer=False"
        )


def check_nothing_under_way(buckets: Iterable[Bucket], caller: str) -> None:
    """Raise ``RuntimeError`` while a reduction owns a bucket's memory, which ``caller`` would write."""
    for bucket in buckets:
        if bucket.phase is Phase.REDUCING:
            raise RuntimeError(
                f"{caller} while {bucket.name} is being reduced: call model.finish_grad_sync() after the last "
                f"backward, or abandon_iteration() on all ranks after one that has failed; run a backward whose "
                f"gradients are not wanted (an attack's, a generator's through its discriminator) under no_sync()"
            )


# ---- ``ModelWatch``. A program may change its model at any moment: behind a forward that has no backward, between two
# ---- microbatches, between forward and backward. So the checks depend on no earlier check. A model that is unchanged
# ---- is found so by comparing lists of objects, in a sixth of the time of the full checks.

_state_of = attrgetter("requires_grad", "dtype", "device")


class ModelWatch:
    """Compares a model with what it was when it was wrapped.

    bucket_params  the parameters that are trained, and reduced
    module         the wrapped model
    """

    def __init__(self, bucket_params: Sequence[BucketParam], module: nn.Module) -> None:
        self._bucket_params = bucket_params
        self._module = module
        self._seen: _Seen | None = None  # None: no full check has passed yet

    def check_forward(self) -> None:
        """In a forward that builds a graph. Raise ``RuntimeError`` that names a changed parameter.

        Once gradients of this iteration are written, a frozen parameter keeps its own, as in plain PyTorch. Before, it
        would be reduced as zero.
        """
        frozen = self._find_frozen()
        if frozen and not any(entry.record.written for entry in self._bucket_params):
            raise _frozen(frozen[0])

    def check_launch(self) -> None:
        """Before the first reduction that a backward launches. A program may unfreeze parameters until the last."""
        self._find_frozen()

    def check_sync(self) -> None:
        """Before all reductions are launched: a frozen parameter without a gradient would be reduced as zero."""
        for entry in self._find_frozen():
            if not entry.record.written:
                raise _frozen(entry)

    def _find_frozen(self) -> list[BucketParam]:
        """The trained parameters that are frozen now. Raises for all other changes."""
        with DisableTorchFunctionSubclass():  # no value is read, so that no read waits for a gather
            if self._seen is not None and self._seen.holds():
                return []
            for entry in self._bucket_params:
                check_same(entry)
            check_no_stranger(self._module)
            frozen = [entry for entry in self._bucket_params if not entry.owned.param.requires_grad]
            if not frozen:
                modules = list(self._module.modules())
                # TorchScript's modules make their tables anew with each read: they are checked in full each time.
                scripted = any(isinstance(module, torch.jit.ScriptModule) for module in modules)
                self._seen = None if scripted else _Seen(modules)
        return frozen


def check_same(entry: BucketParam) -> None:
    """Raise ``RuntimeError`` if the module has another parameter now, or this one was moved or cast."""
    name, param = entry.owned.name, entry.owned.param
    module, local = entry.owned.owners[0]
    found = registered_params(module).get(local)
    if found is not param and found is not None and is_sharded_by_torch(found):
        raise RuntimeError(
            f"parameter '{name}' was made a DTensor after wrapping (torch's fully_shard, or tensor parallelism), and "
            f"its gradient would never be reduced here: call parallelize_module before wrapping; use torch's "
            f"fully_shard alone, or maingrad.fsdp.fully_shard in its place"
        )
    if found is not param:
        raise RuntimeError(
            f"parameter '{name}' was replaced after wrapping (load_state_dict(assign=True), a new nn.Parameter): "
            f"its gradient would never be reduced; load with assign=False, or wrap again. For "
            f"torch.func.functional_call, call it on wrapper.module"
        )
    if param.dtype is not entry.dtype or param.device != entry.device:
        raise RuntimeError(
            f"parameter '{name}' is {param.dtype} on {param.device}, and was {entry.dtype} on {entry.device} when it "
            f"was wrapped: its main_grad did not move along; call .to() before wrapping"
        )


def _frozen(entry: BucketParam) -> RuntimeError:
    """The error for a parameter that was frozen after wrapping, and has no gradient."""
    return RuntimeError(
        f"parameter '{entry.owned.name}' was frozen (requires_grad_(False)) after wrapping: its gradient would be "
        f"reduced as zero, and momentum or decay move it on; freeze before wrapping, or unwrap() and wrap again. To go "
        f"backward through the model without training it (a generator, through its discriminator), freeze all of its "
        f"parameters and unfreeze them before the step; or run that backward under no_sync(), then zero_grad()"
    )


class ModuleTables:
    """``_parameters`` and ``_modules`` of some modules: what these register, in one list that is compared quickly."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._tables: list[Any] = []
        for module in modules:
            self._tables += (registered_params(module), module._modules)

    def entries(self) -> list[Any]:
        """All parameters and modules that are registered now. No value is read, so that no gather is waited for."""
        return [*chain.from_iterable(map(dict.values, self._tables))]

    def hold(self, entries: Sequence[Any]) -> bool:
        """Whether the modules still register these objects, in this order."""
        now = self.entries()
        return len(now) == len(entries) and all(map(is_, now, entries))


class _Seen:
    """A wrapped model as it was when a full check passed."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = ModuleTables(modules)
        self._entries = self._tables.entries()
        self._params = [entry for entry in self._entries if isinstance(entry, Tensor)]
        self._states = [*map(_state_of, self._params)]

    def holds(self) -> bool:
        """Whether nothing has changed since."""
        return self._tables.hold(self._entries) and [*map(_state_of, self._params)] == self._states
