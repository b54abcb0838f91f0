"""``WeightUnit``: weights that their module asks for, by the ``DistributedWeight`` protocol of Transformer Engine.

Modules of Transformer Engine from 2.19 on ask a weight with ``is_distributed_weight`` for its whole value in forward
and again in backward, and hand it its gradient. The first weight of a group answers for all: ``GroupedLinear`` asks
its first expert. With ``fully_shard(..., distributed_weights=True)`` each group is a unit of its own inside the unit
that ``fully_shard`` makes. It is gathered when it is asked for; modules register its parameters when they register
the other ones of that unit.

The protocol's attributes are on the whole parameters. There is no ``__fsdp_param__``: Transformer Engine would look
for ``get_main_grad`` first, whose memory holds earlier microbatches, and overwrite it.
"""

import re
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...ddp.collectives.rank_grid import RankGrid
from ...ddp.contract.main_grad import add_to_main_grad, attach, forget_failed_backward, hand_over, record_of
from ...ddp.contract.record import GradRecord
from ...ddp.plan.owned_params import OwnedParam
from ...ddp.torch_internals import weak_method
from .bucket import ShardedBucket
from .plan import UnitOptions
from .registration import Registration
from .unit import Unit

__all__ = ["WeightBucket", "WeightUnit", "find_groups", "make_weight_units"]

_NUMBERED, _ALONE = re.compile(r"weight\d+"), ("weight", "fc1_weight", "fc2_weight")


def find_groups(modules: Iterable[nn.Module], owned: Iterable[OwnedParam]) -> dict[str, str]:
    """By name, the parameters whose modules ask for them, each with the name of its group.

    A module asks if the source file of its class, or of one of its bases, has the protocol's dispatcher. ``weight0``,
    ``weight1``, ... of a module are one group; ``weight``, ``fc1_weight`` and ``fc2_weight`` are a group each.

    Raises ``ValueError`` for a weight that several modules register, and for one whose gradient is delayed.
    """
    asking = {id(module) for module in modules if _asks(type(module))}
    groups: dict[str, str] = {}
    for entry in owned:
        for owner, local in entry.owners:
            is_numbered = _NUMBERED.fullmatch(local)
            if id(owner) in asking and (is_numbered or local in _ALONE):
                _check(entry)
                groups[entry.name] = entry.name.removesuffix(local) if is_numbered else entry.name
    return groups


def _asks(cls: type) -> bool:
    files = (sys.modules.get(each.__module__) for each in cls.__mro__)
    return any(hasattr(file, "materialize_weight_for_forward") for file in files)


def _check(entry: OwnedParam) -> None:
    if len(entry.owners) > 1:
        raise ValueError(
            f"parameter '{entry.name}' is registered by several modules, and one that asks for its weights hands over "
            f"a gradient that is reduced before the others' come: untie it, or pass distributed_weights=False"
        )
    if entry.delayed:
        raise ValueError(
            f"parameter '{entry.name}' is of a module that delays weight gradients (delay_wgrad_compute), and such a "
            f"module hands none to a distributed weight: pass delay_wgrad_compute=False, or distributed_weights=False"
        )


class WeightBucket(ShardedBucket):
    """A bucket of weights that are asked for."""

    def _serve(self, entry: OwnedParam, param: nn.Parameter, record: GradRecord) -> None:
        attach(param, record)
        is_operation = hasattr(entry.owners[0][0], "op_forward")
        param.register_post_accumulate_grad_hook(partial(_on_grad, record, is_operation))


def _on_grad(record: GradRecord, is_operation: bool, param: Tensor) -> None:
    """The post-accumulate-grad hook: the gradient was handed over. Operations give autograd a placeholder all the same.

    Anything else is the gradient of another use, which comes after the reduction was launched.
    """
    delivered = forget_failed_backward(param)
    grad, param.grad = param.grad, None
    if grad is not None and not (delivered and is_operation):
        raise RuntimeError(
            f"parameter '{record.name}' received a gradient from autograd, and its module hands gradients to "
            f"finalize_group_grads: nothing else may use it; pass distributed_weights=False"
        )


class WeightUnit(Unit):
    """One group of weights, the first of which answers for all. ``enclose`` sets the unit that it belongs to."""

    owner: "weakref.ref[Unit]"

    def enclose(self, owner: Unit, inside: Sequence[nn.Module]) -> None:
        """Belong to ``owner``, which registers the parameters, and bind the protocol's methods; ``inside``: its
        modules."""
        self.owner = weakref.ref(owner)
        self.hands_over = False
        """Weights were trained in the last forward: the module hands over gradients when backward passes it."""
        self.registered: Registration = owner.registered
        for pair in self.pairs:
            pair.whole.__dict__.update(
                is_distributed_weight=True,
                materialize_group_for_forward=weak_method(self._for_forward),
                materialize_group_for_backward=weak_method(self._for_backward),
                finalize_group_grads=weak_method(self._finalize),
                grad_buffer=weak_method(self._grad_buffer, pair.whole),
            )
        asking = self.pairs[0].places[0][0]()
        for module in inside:  # operations inside a container of operations run without a call of their own
            if any(each is asking for each in module.modules()):
                module.register_forward_hook(weak_method(self._forward_ended), always_call=True)

    @property
    def reshards(self) -> bool:
        """As the enclosing unit, but the weights of the outermost unit are freed too, unless it says otherwise."""
        owner = self.owner()
        return owner is None or owner.reshard_after_forward is not False

    def join(self, name: str, everyone: RankGrid | None, root: Any) -> None:
        """As ``Unit.join``: the enclosing unit has named the parameters."""
        self.root_reference = root
        self.name = self.pairs[0].sharded.shard.name
        self.label = f"weight '{self.name}'"

    @property
    def _whole(self) -> Any:
        wholes = [pair.whole for pair in self.pairs]
        return wholes if len(wholes) > 1 else wholes[0]

    def _for_forward(self) -> Any:
        self.root.weights.for_forward(self)
        return self._whole

    def _forward_ended(self, *_: Any) -> None:
        if self.root_reference is not None:
            self.root.weights.forward_ended(self)

    def _for_backward(self) -> Any:
        self.root.weights.enter(self)
        return self._whole

    def _grad_buffer(self, param: nn.Parameter) -> Tensor:
        self.root.weights.enter(self)
        record = record_of(param)
        assert record is not None, "a module asks it of a trained weight"
        if record.written or not self.root.weights.delivers_to(param):
            return torch.empty_like(record.view)  # ``main_grad`` has an earlier contribution, or gets none
        if record.make_room is not None:
            record.make_room()
        return record.view  # the first contribution counts as written when it is handed over

    def deliver(self, param: nn.Parameter, wgrad: Tensor) -> None:
        """Add a gradient that the module has handed over to ``main_grad``."""
        record = record_of(param)
        assert record is not None, "a module hands over gradients of trained weights"
        add_to_main_grad(record, wgrad)  # the first one overwrites: nothing is done where it was written there
        hand_over(param, record, fused=True)

    def _finalize(self, wgrads: Any) -> Any:
        found = wgrads if isinstance(wgrads, list | tuple) else [wgrads]
        self.root.weights.finalize(self, found)
        return [None] * len(found) if len(found) > 1 else None


def make_weight_units(
    groups: Mapping[str, str],
    buckets: Sequence[ShardedBucket],
    options: UnitOptions,
    grid: RankGrid,
    device: torch.device,
    inside: Sequence[nn.Module],
) -> list[WeightUnit]:
    """The groups of ``find_groups`` as units, of those ``buckets`` that have their parameters."""
    mine: dict[str, list[ShardedBucket]] = {}
    for bucket in buckets:
        if (group := groups.get(bucket.pairs[0].name)) is not None:
            mine.setdefault(group, []).append(bucket)
    order = [*groups]
    units = [WeightUnit(each, options, grid, device, inside) for each in mine.values()]
    for unit in units:  # buckets are in backward's order, and modules have their weights in that of registration
        unit.pairs = tuple(sorted(unit.pairs, key=lambda pair: order.index(pair.name)))
    return units
