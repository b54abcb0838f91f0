"""Arguments of Transformer Engine that maingrad lacks: accepted at a value without effect, refused otherwise."""

from typing import Any

__all__ = ["refuse_unsupported"]

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
