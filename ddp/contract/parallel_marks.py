"""Megatron-core's marks of model parallelism on parameters. No other file reads these attributes.

``allreduce = False``                   an expert, which only some ranks hold
``tensor_model_parallel = True``        a slice: tensor-parallel ranks hold the whole parameter together
``sequence_parallel = True``            copies on tensor-parallel ranks, each of which has a part of the gradient
``average_gradients_across_tp_domain``  copies likewise; each rank has another gradient, and the mean counts
``shared_embedding = True``             copies on two pipeline stages, each of which has a part of the gradient
"""

from torch import Tensor

__all__ = ["grid_name_of", "is_marked_expert", "is_slice", "is_tied_across_stages", "mark_of_partial_grad"]

_PARTIAL = ("sequence_parallel", "average_gradients_across_tp_domain", "shared_embedding")


def grid_name_of(param: Tensor) -> str:
    """Which ranks a parameter's gradient is reduced over: "dense" or "expert".

    "expert" is what Megatron-core marks ``allreduce = False``: only some ranks hold the same values.
    """
    return "dense" if getattr(param, "allreduce", True) else "expert"


def is_marked_expert(param: Tensor) -> bool:
    """Whether ``grid_name_of`` says "expert"."""
    return grid_name_of(param) == "expert"


def is_slice(param: Tensor) -> bool:
    """Whether tensor-parallel ranks hold the whole parameter together. Megatron-core marks experts alike, whole or cut:
    those have ranks of their own, and are none here."""
    return bool(getattr(param, "tensor_model_parallel", False)) and not is_marked_expert(param)


def is_tied_across_stages(param: Tensor) -> bool:
    """Whether another pipeline stage holds a copy."""
    return bool(getattr(param, "shared_embedding", False))


def mark_of_partial_grad(param: Tensor) -> str | None:
    """The mark of a parameter of which other ranks hold copies, with parts of its gradient; None: no such mark."""
    return next((name for name in _PARTIAL if getattr(param, name, False)), None)
