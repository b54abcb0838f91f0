"""Checks that refuse, by name and before a capture, what cannot be captured or would be replayed wrongly."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ...ddp.contract.delay_blocks import delay_blocks
from ...ddp.contract.main_grad import is_lazy
from ...ddp.contract.module import DelayedWgradModule, is_sharded
from ...ddp.torch_internals import has_tensor_hooks
from ...ddp.wrapper.attachment import AroundModule
from ..pipeline.executor import has_backward_dw
from ..sequential import Sequential as Ours
from .weights import hooks_of

__all__ = ["check_capturable", "device_of"]


def device_of(modules: Sequence[nn.Module], samples: Sequence[Tensor]) -> torch.device:
    """The one device of parameters, buffers and sample arguments. Raises ``ValueError`` where there are several."""
    tensors: list[Tensor] = [*samples]
    for module in modules:
        tensors += [*module.parameters(), *module.buffers()]
    # A count or a scale on the CPU is refused by the capture where it is read.
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1 or not {"cuda", "cpu"}.issuperset(device.type for device in devices):
        names = ", ".join(sorted(map(str, devices))) or "none"
        raise ValueError(f"make_graphed_callables captures work of one device, CUDA or CPU: tensors are on {names}")
    return devices.pop()


def check_capturable(module: nn.Module, where: str) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a module whose replay would differ from its eager run.

    where  the module's place, for errors
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{where} must be a module, not a {type(module).__name__}")
    if delay_blocks.queue is not None:
        raise ValueError(
            f"{where}: a capture in a delayed_wgrad block, whose queue no replay would know; build modules with "
            f"delay_wgrad_compute=True"
        )
    for name, param in module.named_parameters():
        _check_param(param, f"{where}: parameter '{name}'")
    for name, inner in module.named_modules():
        _check_module(inner, f"{where}: '{name}' ({type(inner).__name__})" if name else where)


def _check_module(module: nn.Module, where: str) -> None:
    if isinstance(module, TorchDDP) or getattr(module, "grad_parts", None) is not None:
        raise ValueError(
            f"{where} reduces gradients of its parameters, which is no part of a layer's graphs: give the layers "
            f"inside of the wrapper"
        )
    wraps_compiled = type(module).__module__.startswith("torch._dynamo")
    if wraps_compiled or isinstance(module, torch.jit.ScriptModule) or module._compiled_call_impl is not None:
        raise ValueError(f"{where} is compiled: capture the layer as it was before, or the ._orig_mod inside")
    if hooks_of(module):
        raise ValueError(
            f"{where} has hooks on its forward or backward, which a replay would not call: remove them, or hook the "
            f"callable that make_graphed_callables returns"
        )
    if getattr(module, "writes_in_forward", False):
        raise ValueError(
            f'{where} writes main_grad in its forward (mode="in_forward"), which these graphs replay without a '
            f'backward of their own: build it with mode="recompute", or capture the whole step'
        )
    has_ours = any(isinstance(inner, DelayedWgradModule) for inner in module.modules())
    if has_backward_dw(module) and not has_ours and not isinstance(module, Ours | AroundModule):
        raise ValueError(
            f"{where} delays weight gradients by itself (backward_dw), and no replay would fill what it keeps: leave "
            f"it out of the graphs, or convert it to a module of maingrad.te_integration"
        )


def _check_param(param: nn.Parameter, where: str) -> None:
    if is_sharded(param) or is_lazy(param):
        raise ValueError(
            f"{where} is sharded (fully_shard, tensor parallelism) or has its main_grad for some time only "
            f"(release_grads), and graphs need memory that stays: use maingrad.ddp.DistributedDataParallel, with "
            f"release_grads=False, or leave the layer out of the graphs"
        )
    if has_tensor_hooks(param):
        raise ValueError(
            f"{where} has a hook (register_hook), which would run in the capture and in no replay: remove it, and "
            f"change .grad or main_grad before the step"
        )
