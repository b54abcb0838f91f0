"""Checks at certain points of an iteration; each ``RuntimeError`` names the parameter and a remedy."""

import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..config import DistributedDataParallelConfig
from ..contract.main_grad import record_of
from ..contract.record import GradRecord
from ..gathers.waiting_modules import registered_params
from ..torch_internals import DisableTorchFunctionSubclass
from .bucket import Phase
from .bucket_params import BucketParam

__all__ = [
    "check_no_stranger",
    "check_nothing_bypassed",
    "check_nothing_pending",
    "check_scalable",
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
        lost = next((each for found in waiting.values() for each in found if each.lost), None)
        if lost is not None:
            raise RuntimeError(
                f"{caller} without a delayed weight gradient of {lost.owner}, whose WgradQueue was let go before it "
                f"was drained: keep the queue, and drain() it before this; model.zero_grad() gives the "
                f"iteration up"
            )
        raise RuntimeError(
            f"{caller} while delayed weight gradients of {len(waiting)} parameter(s) are pending: '{name}' waits "
            f"for {len(pending)} of {pending[0].owner}; run its backward_dw() or drain its WgradQueue first"
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
    schedules = ""
    if "torch.distributed.pipelining" in sys.modules:
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


def check_scalable(bucket_params: Iterable[BucketParam], caller: str) -> None:
    """Raise where scaling a bucket would race with its reduction."""
    for entry in bucket_params:
        if entry.bucket.phase is Phase.REDUCING:
            raise RuntimeError(
                f"{caller} while {entry.bucket.name} is being reduced: call it before start_grad_sync(), or after "
                f"finish_grad_sync()"
            )
