"""One training iteration of a model as it is, and of the same model converted and wrapped."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.te_integration import convert_linears
from maingrad.te_integration.conversion.report import Conversion

__all__ = ["Iteration", "assert_close_to_exact", "converted_iteration", "plain_iteration", "weights_of"]

Loss = Callable[[nn.Module, int], Tensor]
"""Loss of a model in one microbatch, given its index."""
MICROBATCHES = 2


class Iteration(NamedTuple):
    """What a converted model's iteration left behind."""

    model: nn.Module
    ddp: DistributedDataParallel
    conversion: Conversion
    grads: dict[str, Tensor]

    @property
    def fused_writes(self) -> dict[str, int]:
        """Weight -> number of weight-gradient GEMMs that wrote it; nothing where there was none."""
        return {record.name: record.num_fused_writes for record in self.ddp.records if record.num_fused_writes}

    @property
    def hook_writes(self) -> dict[str, int]:
        """Parameter -> number of gradients that the hook moved; nothing where there was none."""
        return {record.name: record.num_hook_writes for record in self.ddp.records if record.num_hook_writes}


def plain_iteration(model: nn.Module, loss: Loss, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """``.grad`` of a copy of ``model``, by autograd alone; in ``dtype`` where one is given."""
    model = copy.deepcopy(model).to(dtype)
    for index in range(MICROBATCHES):
        torch.manual_seed(index)  # dropout
        (loss(model, index) / MICROBATCHES).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.requires_grad}


def converted_iteration(model: nn.Module, loss: Loss, **options: Any) -> Iteration:
    """``main_grad`` of a copy of ``model``, converted with ``options`` and wrapped."""
    model = copy.deepcopy(model)
    conversion = convert_linears(model, **options)
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True))
    for index in range(MICROBATCHES):
        torch.manual_seed(index)
        if index < MICROBATCHES - 1:
            with ddp.no_sync():
                (loss(ddp, index) / MICROBATCHES).backward()
        else:
            (loss(ddp, index) / MICROBATCHES).backward()
    ddp.finish_grad_sync()
    grads = {name: param.main_grad.clone() for name, param in model.named_parameters() if param.requires_grad}
    return Iteration(model, ddp, conversion, grads)


def weights_of(model: nn.Module, modules: tuple[str, ...]) -> set[str]:
    """The parameters (by the name of their first owner) that these modules have as ``weight``."""
    weights = {model.get_submodule(name).weight for name in modules}
    return {name for name, param in model.named_parameters() if param in weights}


def assert_close_to_exact(grads: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Where additions happen in another order: each gradient is as close to fp64's as the plain one is.

    "As close" leaves room for the luck of the other order: twice the plain error, or a few roundings.
    """
    assert grads.keys() == plain.keys() == exact.keys()
    for name, reference in exact.items():
        error = (grads[name].double() - reference).norm()
        plain_error = (plain[name].double() - reference).norm()
        assert error <= 2 * plain_error + 4 * torch.finfo(plain[name].dtype).eps * reference.norm(), name
