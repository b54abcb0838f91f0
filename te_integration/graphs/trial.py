"""Eager runs of a layer before its capture, which warm kernels up."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...ddp.contract.capturing import BackwardCapture, FirstWrites, noting
from ...ddp.contract.main_grad import accumulator_of, forget_failed_backward, has_main_grad, record_of
from ...ddp.graphs.capture import GraphPool
from .signature import Signature, tensors_in

__all__ = ["content_kept", "differentiable", "run_trials"]


def differentiable(outputs: Any) -> list[Tensor]:
    """The tensors among a layer's outputs through which a backward goes."""
    return [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]


@contextmanager
def content_kept(module: nn.Module, *, runs: bool = True) -> Iterator[None]:
    """Give accumulators and buffers of ``module`` their present content back after a block that runs it.

    runs  False: the block captures operations that do not run, and raise versions alone
    """
    records = [record for record in map(record_of, module.parameters()) if record is not None]
    untouched = [record for record in records if record.version == record.view._version]
    kept: list[Tensor] = []
    if runs:
        kept += module.buffers()
        kept += [
            accumulator_of(param, type(module).__name__, rows_apart=True)
            for param in module.parameters()
            if param.requires_grad and has_main_grad(param)
        ]
    copies = [tensor.clone() for tensor in kept]
    try:
        yield
    finally:
        for tensor, copy in zip(kept, copies, strict=True):
            tensor.data.copy_(copy)  # captured autograd graphs that have saved it are to see no change
        for record in untouched:
            record.record_version()  # the program has written nothing by hand


def run_trials(
    module: nn.Module, place: str, signature: Signature, samples: Sequence[Tensor], pool: GraphPool, count: int
) -> None:
    """Run forward and backward, weight gradients included. Nothing of it is left behind.

    place  the layer and microbatch, for errors
    count  number of runs whose weight gradients are added to ``main_grad``, as most captured ones are; one more
           overwrites, by other kernels
    """
    trained = [param for param in module.parameters() if param.requires_grad]
    with pool.on_stream(), content_kept(module):
        for overwrites in (*[False] * count, True):
            first_writes = FirstWrites(in_order=overwrites)
            inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in samples]
            args, kwargs = signature.arguments(inputs)
            wanted = [*trained, *differentiable(inputs)]
            capture = BackwardCapture(first_writes, trained)
            with noting(capture):
                outputs = differentiable(module(*args, **kwargs))
                if outputs and wanted:
                    torch.autograd.grad(outputs, wanted, list(map(torch.ones_like, outputs)), allow_unused=True)
            for delivery in capture.deliveries:
                if delivery.delayed:
                    delivery.compute(first_writes)
            flags = [forget_failed_backward(param) for param in trained]  # of all parameters: none is left behind
            if any(flags):
                raise ValueError(
                    f"{place} holds a module of others that writes main_grad in its own backward and sets a flag, "
                    f"which no replay would set: leave that module out of the graphs, or convert it (convert_linears)"
                )
