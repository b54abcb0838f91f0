"""Handles what Transformer Engine has and maingrad lacks: arguments, which are accepted at a value without effect and
refused otherwise; and the extra state in checkpoints.
"""

import io
import warnings
from typing import Any

__all__ = ["drop_extra_state", "refuse_unsupported"]

# Name -> the values without effect. An unlisted argument does not exist in Transformer Engine either: TypeError.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (False,),
    "tp_group": (None,),
    "tp_size": (1,),
    "parallel_mode": (None,),
    "get_rng_state_tracker": (None,),
    "rng_state_tracker_function": (None,),
    "accumulate_into_main_grad": (False,),
    "rng_tracker_name": (None,),
    "set_parallel_mode": (False,),
    "return_layernorm_output_gathered": (False,),
    "seq_length": (None,),
    "micro_batch_size": (None,),
    "ub_name": (None,),
    "symmetric_ar_type": (None,),
    "keep_fp8_weight_transpose_cache": (True, False),
    "cache_quantized_params": (False,),
}
_USE_THEIRS = "use Transformer Engine's module, which runs under this DDP too"
_REMEDY = {
    "sequence_parallel": f"shard the sequence outside, or {_USE_THEIRS}",
    "tp_group": f"tensor parallelism is the model's: {_USE_THEIRS}",
    "tp_size": f"tensor parallelism is the model's: {_USE_THEIRS}",
    "accumulate_into_main_grad": "its name is fuse_wgrad_accumulation here",
    "parallel_mode": f"tensor parallelism is the model's: {_USE_THEIRS}",
}


def refuse_unsupported(module: str, arguments: dict[str, Any]) -> None:
    """Raise ``ValueError`` for a Transformer Engine argument with an effect, ``TypeError`` for an unknown one.

    ``ub_*`` arguments (overlap of tensor-parallel communication) are refused unless False.
    """
    for name, value in arguments.items():
        neutral = (False, None) if name.startswith("ub_") else _NEUTRAL.get(name)
        if neutral is None:
            raise TypeError(f"{module} has no argument '{name}'")
        if value not in neutral:
            raise ValueError(
                f"{module} does not support {name}={value!r}: {_REMEDY.get(name, f'leave it at {neutral[0]!r}')}"
            )


def drop_extra_state(state_dict: dict[str, Any], prefix: str) -> None:
    """Take a module's ``_extra_state`` out of ``state_dict``.

    There Transformer Engine pickles the scales and amaxes of its modules. Pickles run code when they are read, so that
    these are not: a ``RuntimeWarning`` says so where there are any.
    """
    extra = state_dict.pop(f"{prefix}_extra_state", None)
    if isinstance(extra, io.BytesIO):
        is_empty = not extra.getbuffer().nbytes
    else:
        is_empty = extra is None or (hasattr(extra, "numel") and extra.numel() == 0)
    if not is_empty:
        warnings.warn(
            "a state dict has Transformer Engine's scales and amaxes (_extra_state), which are pickled and were not "
            "read: under DelayedScaling modules begin with scales of 1, and recipes without state need none",
            RuntimeWarning,
            stacklevel=2,
        )
