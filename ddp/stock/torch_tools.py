"""Tools of torch that reach into a wrapper and take what is not there: refused by name, where a tool has no hook.

Their functions are recognised by the module of the caller.
"""

import sys
from typing import Any

__all__ = ["refuse_dcp_of_optimizer"]


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


def _is_called_by(module: str, *functions: str) -> bool:
    frame: Any = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code.co_name in functions and frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
