"""A model's parameters and buffers, each once, with the ranks that hold the same values."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..contract.main_grad import check_unattached, is_delayed
from ..contract.module import DelayedWgradModule, FusedWgradModule
from .parallel_marks import grid_name_of, is_marked_expert

__all__ = [
    "ModelTensor",
    "OwnedParam",
    "buffers_of_experts",
    "check_plain",
    "check_shapes",
    "find_owned_params",
    "find_tensors",
    "grid_name_of",
    "is_marked_expert",
]


class OwnedParam(NamedTuple):
    """A parameter and its owners: the modules that register it. The first owner gives the name."""

    name: str
    param: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    grid_name: str
    """Which ranks the gradient is reduced over: see ``grid_name_of``."""

    def read_again(self) -> "OwnedParam":
        """With the parameter that the first owner registers now."""
        owner, local = self.owners[0]
        param = owner._parameters[local]
        assert param is not None, "modules keep the names of their parameters"
        return self._replace(param=param)

    @property
    def ours_alone(self) -> bool:
        """Whether every owner writes the weight gradient through a ``WgradTarget``."""
        return all(isinstance(m, FusedWgradModule) and local in m.fused_wgrad_weights() for m, local in self.owners)

    @property
    def delayed(self) -> bool:
        """Whether an owner computes the weight gradient after the main backward."""
        return is_delayed(self.param) or any(
            isinstance(m, DelayedWgradModule) and local in m.delayed_wgrad_weights() for m, local in self.owners
        )


class ModelTensor(NamedTuple):
    """A parameter or a buffer."""

    name: str
    tensor: Tensor
    grid_name: str
    """Which ranks hold the same values: see ``grid_name_of`` and ``buffers_of_experts``."""
    is_buffer: bool

    @property
    def trained(self) -> bool:
        """Whether it is a parameter that requires a gradient."""
        return self.tensor.requires_grad and not self.is_buffer


def buffers_of_experts(module: nn.Module, is_experts: Callable[[nn.Parameter], bool]) -> set[int]:
    """``id`` of the buffers that only some ranks hold the same values of, because their module is an expert's.

    A module is an expert's if its own parameters all are. If it has none, those of the modules in it decide; if these
    have none either, the module around it. Nobody marks buffers (Megatron-core marks parameters alone); where a buffer
    has the attribute ``allreduce``, that decides.
    """
    found: set[int] = set()

    def visit(owner: nn.Module, around: bool) -> None:
        params = [param for param in owner._parameters.values() if param is not None] or list(owner.parameters())
        of_experts = all(map(is_experts, params)) if params else around
        for buffer in owner._buffers.values():
            if buffer is not None and not getattr(buffer, "allreduce", not of_experts):
                found.add(id(buffer))
        for child in owner.children():
            visit(child, of_experts)

    visit(module, False)
    return found


def check_shapes(module: nn.Module, before: str) -> None:
    """Raise ``ValueError`` for a parameter or buffer of a lazy module (``nn.LazyLinear``) that has no shape yet.

    before  what the module is given to
    """
    tensors: Iterable[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise ValueError(f"'{name}' has no shape yet: run a forward of the lazy module before {before}")


def check_plain(name: str, param: nn.Parameter, before: str) -> None:
    """Raise ``ValueError`` for a DTensor, for a parameter that has a gradient, and for one that has a ``main_grad``.

    before  what the model is given to
    """
    if hasattr(param, "to_local"):
        raise ValueError(
            f"parameter '{name}' is a DTensor (torch.distributed.fsdp.fully_shard, or tensor parallelism), and its "
            f"gradient is one too, or never reaches it in backward: give {before} a model of plain parameters"
        )
    if param.grad is not None:
        raise ValueError(
            f"parameter '{name}' already has a .grad, which would count in the first iteration: call "
            f"module.zero_grad() before {before}"
        )
    check_unattached(param, name)


def find_owned_params(module: nn.Module) -> list[OwnedParam]:
    """Every parameter of the model once, in registration order."""
    owners: defaultdict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    names: dict[nn.Parameter, str] = {}
    for prefix, owner in module.named_modules():
        for local, param in owner._parameters.items():
            if param is not None:
                owners[param].append((owner, local))
                names.setdefault(param, f"{prefix}.{local}" if prefix else local)
    return [OwnedParam(name, param, tuple(owners[param]), grid_name_of(param)) for param, name in names.items()]


def find_tensors(module: nn.Module) -> list[ModelTensor]:
    """Every parameter of the model once, frozen ones too, then every buffer, each in registration order."""
    params = [ModelTensor(name, each, grid_name_of(each), is_buffer=False) for name, each in module.named_parameters()]
    of_experts = buffers_of_experts(module, is_marked_expert)
    buffers = [
        ModelTensor(name, each, "expert" if id(each) in of_experts else "dense", is_buffer=True)
        for name, each in module.named_buffers()
    ]
    return params + buffers
