"""The private names of torch.distributed, and of its wrappers, that ``ddp`` and ``fsdp`` use.

``__init__.py`` holds the others, and says what happens where a version of torch lacks a name.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ...kernels.compat import TESTED_TORCH, private_name, spelling_of

__all__ = [
    "accumulated_by_fsdp2",
    "active_torch_ddp",
    "backend_on",
    "default_store",
    "gathered_by_fsdp2",
    "new_group_of_members",
    "params_of_torch_ddp",
    "premultiplied_sum",
    "start_all_gather",
    "start_reduce_scatter",
    "timeout_on",
    "zero_cta_options",
]

# ---- torch's own DistributedDataParallel. Neither attribute has a public reader. ----


active_torch_ddp: Callable[[], TorchDDP | None] = private_name(
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module",
    loss="a model of maingrad inside torch's DistributedDataParallel is not refused in its forward",
    use=lambda: TorchDDP._active_ddp_module,
    fallback=lambda: None,
)
"""The wrapper whose forward runs now. torch's compiler reads the same attribute."""


def params_of_torch_ddp(wrapper: TorchDDP) -> Sequence[Tensor] | None:
    """The parameters whose gradients ``wrapper`` reduces. None: it still collects them, or the name is another."""
    return vars(wrapper).get("_module_parameters")


# ---- torch.distributed.fsdp.fully_shard (FSDP2) tells nobody which weight belongs to which sharded parameter. The
# ---- names are those of torch 2.11 to 2.14. Nothing of FSDP2 is imported here: torch loads its registry before FSDP2.


def gathered_by_fsdp2() -> Iterator[tuple[Any, Tensor]]:
    """Every weight that FSDP2 holds gathered in this process, each after FSDP2's record of the parameter.

    Raises ``RuntimeError`` where this torch keeps them under other names.
    """
    registry = sys.modules.get("torch.distributed._composable_state")
    states = () if registry is None else [ref() for ref in _named(registry, "_module_state_mapping").values()]
    for state in states:
        if type(state).__name__ != "FSDPState":  # torch's other composable wrappers are in the same table
            continue
        # torch 2.11 has one group for each module.
        one_group = hasattr(state, "_fsdp_param_group")
        groups = [state._fsdp_param_group] if one_group else _named(state, "_fsdp_param_groups")
        for group in filter(None, groups):
            for param in _named(group, "fsdp_params"):
                gathered = getattr(param, "_unsharded_param", None)
                if gathered is not None:
                    yield param, gathered


def _named(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} does not show which weights torch.distributed.fsdp.fully_shard has gathered "
            f"(no {name}): use maingrad.fsdp.fully_shard, fuse_wgrad_accumulation=False, or torch {TESTED_TORCH}"
        ) from None


def accumulated_by_fsdp2(param: Any) -> Tensor | None:
    """The gradient that FSDP2 sums outside of ``.grad``, in its ``reduce_dtype``; ``param`` is FSDP2's record."""
    found: Tensor | None = getattr(param, "unsharded_accumulated_grad", None)
    return found


# ---- Process groups. ----

# torch.distributed's public functions around these two methods cost 90 us of host time on torch 2.11, for counters and
# checks. torch 2.13 renamed the methods.
_COLLECTIVES_COST = "each all-gather and reduce-scatter takes the host 90 us more"


def _last(spelling: str | None) -> str | None:
    return None if spelling is None else spelling.rpartition(".")[2]


_GATHER: str | None = None
_SCATTER: str | None = None
_GatherOptions: Any = None
_ScatterOptions: Any = None
if dist.is_available():
    _GATHER, _SCATTER = (
        _last(spelling_of(*(f"torch.distributed.ProcessGroup.{name}" for name in names), loss=_COLLECTIVES_COST))
        for names in (("all_gather_single", "_allgather_base"), ("reduce_scatter_single", "_reduce_scatter_base"))
    )
    _GatherOptions, _ScatterOptions = (
        private_name(f"torch.distributed.distributed_c10d.{name}", loss=_COLLECTIVES_COST, fallback=None)
        for name in ("AllgatherOptions", "ReduceScatterOptions")
    )


def start_all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup, *, on_stream: bool = False) -> Any:
    """Start to fill ``output`` [n] with every rank's ``input`` [n / ranks]; returns the ``Work``.

    on_stream  NCCL runs on the current CUDA stream instead of torch's own stream, which saves the host two events
    """
    if _GATHER is None or _GatherOptions is None:
        return dist.all_gather_into_tensor(output, input, group, async_op=not on_stream) or _OnStream()
    options = _GatherOptions()
    options.asyncOp = not on_stream
    return getattr(group, _GATHER)(_real(output), _real(input), options) or _OnStream()


def start_reduce_scatter(
    output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup, *, on_stream: bool = False
) -> Any:
    """Start to fill ``output`` [n / ranks] with this rank's shard of the reduced ``input`` [n]; returns the ``Work``.

    on_stream  as for ``start_all_gather``
    """
    if _SCATTER is None or _ScatterOptions is None:
        return dist.reduce_scatter_tensor(output, input, op, group, async_op=not on_stream) or _OnStream()
    options = _ScatterOptions()
    options.reduceOp = op
    options.asyncOp = not on_stream
    return getattr(group, _SCATTER)(_real(output), _real(input), options) or _OnStream()


class _OnStream:
    """The ``Work`` of a collective on the current stream, for which torch returns None: the stream itself waits."""

    def wait(self) -> bool:
        """Return at once."""
        return True


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


premultiplied_sum: Callable[[float], Any] | None = (
    private_name(
        "torch.distributed._make_nccl_premul_sum",
        loss="ranks multiply gradients by the averaging factor before NCCL sums them, slowly",
        fallback=None,
    )
    if dist.is_available()
    else None
)
"""NCCL's operation that multiplies each rank's values by a factor and sums them. torch's FSDP uses this name."""


def zero_cta_options() -> Any:
    """Options of an NCCL group whose all-gathers occupy no multiprocessor. None where this torch has no such option."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)
    policy = getattr(nccl, "NCCL_CTA_POLICY_ZERO", None)
    if nccl is None or policy is None:
        return None
    try:
        options = nccl.Options()
        options.config.cta_policy = policy
    except (AttributeError, TypeError):
        return None
    return options


default_store: Callable[[], Any] | None = (
    private_name(
        "torch.distributed.distributed_c10d._get_default_store",
        loss="a collective that fails on one rank is not reported to the others",
        fallback=None,
    )
    if dist.is_available()
    else None
)
"""The key-value store of the default process group. ``torch.distributed`` has no public reader for it."""


backend_on: Callable[[dist.ProcessGroup, torch.device], Any] | None = (
    private_name(
        "torch.distributed.ProcessGroup._get_backend",
        loss="groups that maingrad makes have the backend's default timeout, and copy engines do not run gathers",
        use=lambda group, device: group._get_backend(device),
        fallback=None,
    )
    if dist.is_available()
    else None
)
"""The backend (``ProcessGroupNCCL``, ``ProcessGroupGloo``) that runs a group's collectives on one kind of device.

``dist.get_backend`` returns a name only."""


def timeout_on(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """How long a collective of the group may take on this kind of device; None where the backend does not say."""
    options = None if backend_on is None else getattr(backend_on(group, device), "options", None)
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


_groups_of_rank: Callable[[], Any] = private_name(
    "torch.distributed.distributed_c10d._world",
    loss="ranks that have wrapped different models can wait for each other in the next process group that they make",
    use=lambda: dist.distributed_c10d._world,
    fallback=SimpleNamespace,
)

_groups_made: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""By default group, which ``destroy_process_group`` ends: processes may have other ranks in the next one."""


def new_group_of_members(ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """``dist.new_group(ranks, **options)``, which the members of ``ranks`` call and nobody else.

    torch 2.14 names a group after the number of groups that its rank has made. Ranks outside of this group do not
    count it, and would look for the program's next group of all ranks under another name. So this group's name comes
    from the number of such groups of the same ranks, on which its members agree, and the rank's count stays as it is.
    torch 2.11 takes the number of groups that the rank is in, which nothing here changes.
    """
    world = _groups_of_rank()
    count = getattr(world, "group_count", 0)
    made = _groups_made.setdefault(dist.group.WORLD, Counter())
    made[tuple(ranks)] += 1
    world.group_count = -made[tuple(ranks)]  # torch's own are not negative
    try:
        group = dist.new_group(list(ranks), use_local_synchronization=True, **options)
    finally:
        world.group_count = count
    assert isinstance(group, dist.ProcessGroup), "its members alone call this"
    return group
