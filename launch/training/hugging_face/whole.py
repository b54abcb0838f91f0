"""A sharded model that one rank's code may read as a whole one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from ....fsdp.tensors.parameter import ShardedParameter

__all__ = ["read_as_whole"]


@contextmanager
def read_as_whole(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within, sharded parameters of ``model`` are the whole ``weights`` of the same names, on this rank alone.

    What saves a model may ask parts of it for their state dicts, as PEFT does of ``modules_to_save``. Those of sharded
    modules are collective, and only the first rank saves.
    """
    sharded = [
        (module, local, param, weights[name])
        for prefix, module in model.named_modules()
        for local, param in module._parameters.items()
        if isinstance(param, ShardedParameter) and (name := f"{prefix}.{local}" if prefix else local) in weights
    ]
    try:
        for module, local, param, whole in sharded:
            module._parameters[local] = nn.Parameter(whole, requires_grad=param.requires_grad)
        yield
    finally:
        for module, local, param, _ in sharded:
            module._parameters[local] = param
