"""Tools of torch that reach into a wrapper and take what is not there: refused by name, where a tool has no hook.

Their functions are recognised by the module of the caller.
"""

import sys
from typing import Any

import torch

__all__ = ["refuse_dcp_of_optimizer", "refuse_scaling_by_stage"]


def refuse_dcp_of_optimizer() -> None:
    """Called by the optimizer's ``state_dict`` and by a step that finds strange gradients. Raises ``TypeError`` for
    ``torch.distributed.checkpoint.state_dict.get_state_dict``, which looks for the model's parameters in the groups.
    """
    if _is_called_by("torch.distributed.checkpoint.state_dict", "_get_optim_state_dict", "_init_optim_state"):
        raise TypeError(
            "torch.distributed.checkpoint's get_state_dict and set_state_dict take optimizers over the model's "
            "parameters, and DistributedOptimizer updates flat shards: save_checkpoint(path, model, optimizer) writes "
            "what DCP's tools read, and load_checkpoint reads it; get_model_state_dict(model.module) has the weights"
        )


def refuse_scaling_by_stage() -> None:
    """Called by the wrapper's ``named_parameters``. Raises ``RuntimeError`` for torch's ``PipelineStage.scale_grads``,
    which divides ``.grad`` and finds none."""
    if not torch.compiler.is_compiling() and _is_called_by("torch.distributed.pipelining.stage", "scale_grads"):
        raise RuntimeError(
            "the schedule would divide .grad by the number of microbatches, and gradients are in main_grad: build the "
            "schedule with scale_grads=False and scale the loss of each microbatch, or use "
            "maingrad.te_integration.PipelineStage"
        )


def _is_called_by(module: str, *functions: str) -> bool:
    frame: Any = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code.co_name in functions and frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
