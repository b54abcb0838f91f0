"""``recorded_backward_order``: the order in which backward reaches parameters, if not the reverse of registration."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ..collectives.rank_grid import WorldOfOne, group_or_default, group_size
from ..contract.main_grad import attach, check_unattached, detach
from ..contract.record import GradRecord
from ..plan.owned_params import OwnedParam, find_owned_params

__all__ = ["recorded_backward_order"]


def recorded_backward_order(
    module: nn.Module,
    loss_of: Callable[[nn.Module], torch.Tensor],
    process_group: dist.ProcessGroup | WorldOfOne | None = None,
) -> list[str]:
    """Run one forward and backward of the plain ``module``; returns names of parameters in the order of backward.

    loss_of        called with ``module``, returns a scalar loss; one small microbatch is enough
    process_group  all these ranks get the first rank's order. None: the default group, if there is one;
                   ``WORLD_OF_ONE``: this process alone

    Trainable parameters that the loss does not use come last. ``.grad`` and the default random state do not change.
    What the forward itself writes does: batch norm's running statistics, a parameter that it clamps.
    """
    group = group_or_default(process_group)
    owned = [entry for entry in find_owned_params(module) if entry.param.requires_grad]
    reached: dict[str, None] = {}
    with torch.random.fork_rng(), torch.enable_grad(), _noting_order(owned, reached):
        loss_of(module).backward()
    order = [*reached, *(entry.name for entry in owned if entry.name not in reached)]
    if group is not None and group_size(group) > 1:
        shared = [order]
        dist.broadcast_object_list(shared, dist.get_global_rank(group, 0), group=group)
        order = shared[0]
    return order


@contextmanager
def _noting_order(owned: Sequence[OwnedParam], reached: dict[str, None]) -> Iterator[None]:
    """Add each parameter's name to ``reached`` when its gradient arrives, and discard the gradient."""
    for entry in owned:
        check_unattached(entry.param, entry.name)
    kept = [entry.param.grad for entry in owned]
    handles = []
    try:
        for entry in owned:
            # Fused modules need an accumulator; nobody reads it.
            scratch = torch.empty_like(entry.param, requires_grad=False)
            attach(entry.param, GradRecord(entry.name, scratch, first_write_overwrites=True, shared=False))

            def note(param: torch.Tensor, name: str = entry.name) -> None:
                param.grad = None
                reached.setdefault(name)

            entry.param.grad = None
            handles.append(entry.param.register_post_accumulate_grad_hook(note))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for entry, grad in zip(owned, kept, strict=True):
            detach(entry.param)
            entry.param.grad = grad
