"""What Megatron-core's schedules call at the end of an iteration, for models under this library's wrapper.

Megatron-core's own function sums over pipeline stages and tensor-parallel ranks what its wrapper has left out. This
library's wrapper has summed that already, with ``embedding_group`` and ``tensor_parallel_group``.
"""

from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["finalize_model_grads"]

_ALONE = SimpleNamespace(size=lambda: 1)
"""In place of a group over which nothing is left to sum."""


def finalize_model_grads(
    model: Sequence[Any],
    num_tokens: Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Take the place of ``megatron.core.distributed.finalize_model_grads``, as ``config.finalize_model_grads_func``.

    model             this rank's chunks, each in a ``DistributedDataParallel`` of this library
    num_tokens        of this rank, on the last stage: with ``calculate_per_token_loss`` gradients are divided by all
                      tokens. Other stages get the last one's
    pg_collection     Megatron-core's process groups; None: those of its ``parallel_state``
    force_all_reduce  see ``DistributedDataParallel.finish_grad_sync``

    Router biases and counters of Megatron-core's experts are updated by its own function.
    """
    theirs = import_module("megatron.core.distributed.finalize_model_grads")
    groups = vars(pg_collection or _groups_of(theirs.parallel_state))
    if num_tokens is not None:
        dist.broadcast(num_tokens, group=groups["pp"], group_src=groups["pp"].size() - 1)
    for chunk in model:
        chunk.finish_grad_sync(num_tokens, force_all_reduce=bool(force_all_reduce))
    summed = SimpleNamespace(**groups | dict.fromkeys(("tp", "embd", "pos_embd"), _ALONE))
    theirs.finalize_model_grads(list(model), None, summed, force_all_reduce)


def _groups_of(state: Any) -> SimpleNamespace:
    return SimpleNamespace(
        pp=state.get_pipeline_model_parallel_group(),
        dp_cp=state.get_data_parallel_group(with_context_parallel=True),
        tp_dp_cp=state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    )
