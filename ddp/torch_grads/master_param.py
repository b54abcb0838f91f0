"""``MasterParameter``: the flat shards in a ``DistributedOptimizer``'s ``param_groups``; writes to them are noticed.

A step updates masters, and a gather over all ranks copies them to the parameters. If a program writes to a master
between steps (Lookahead, noise, a decay by hand), no gather follows, so the next forward raises. Each master has a
version counter of its own, which rises with such writes. Gathers and this library write to the flat tensor behind the
master, which has another counter.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ..contract.main_grad import record_of
from ..torch_internals import let_optimizers_take, make_subclass
from .sharded_grad import ShardedGrad

__all__ = ["MasterParameter", "StateByMaster", "WatchedMasters", "late_grad", "make_master"]


_GRAD: Any = Tensor.grad  # torch's own attribute


class MasterParameter(nn.Parameter):
    """This rank's elements [n] of one or more parameters; made by ``make_master``.

    ``data`` shares the version counter. Setting ``data`` copies values, since the buckets own the memory.
    """

    shown: "Callable[[], Tensor | None] | None" = None
    """Returns this rank's elements of the reduced gradient, while programs may read them."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient of these elements after a backward: torch's clipping and scaler find it here. Collective.

        In a step it is what the step updates with.
        """
        own: Tensor | None = _GRAD.__get__(self)
        return own if own is not None or self.shown is None else self.shown()

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        _GRAD.__set__(self, grad)

    @property
    def has_own_grad(self) -> bool:
        """Whether a step, or a program, has put a gradient here."""
        return _GRAD.__get__(self) is not None

    data = ShardedGrad.data
    """A plain tensor with the same memory and version counter."""


def make_master(flat_view: Tensor) -> MasterParameter:
    """A master that shares the memory of ``flat_view`` [n] and has a version counter of its own."""
    master: MasterParameter = make_subclass(MasterParameter, flat_view.data, True)
    return master


let_optimizers_take(MasterParameter)


class StateByMaster(defaultdict[Any, Any]):
    """``optimizer.state``, with masters as keys. The ``KeyError`` for another key says where its state is."""

    def __init__(self, masters: Iterable[Tensor], state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self._masters = frozenset(masters)

    def __missing__(self, key: Any) -> Any:
        if key in self._masters:
            return super().__missing__(key)
        record = record_of(key) if isinstance(key, Tensor) else None
        raise KeyError(
            f"DistributedOptimizer.state is by the flat tensors of optimizer.param_groups, and has none of "
            f"{'this key' if record is None else f'parameter {record.name!r}'}: optimizer.slices say where each "
            f"parameter lies, with its part of the state, slice.state()"
        )

    def replace(self, state: Mapping[Any, Any]) -> None:
        """Take over a value assigned to ``optimizer.state``. Raises ``KeyError`` for keys that are no masters."""
        for key in state:
            if key not in self._masters:
                self.__missing__(key)
        self.clear()
        self.update(state)


class WatchedMasters(dict[Any, str]):
    """An optimizer's masters, each with its bucket's name; and whether one was written since parameters followed."""

    follow_late = True
    """Parameters follow masters in a step only. False where parameter and master are the same memory."""

    def __init__(self, masters: Mapping[MasterParameter, str]) -> None:
        super().__init__(masters)
        self.note()

    def note(self) -> None:
        """Note that parameters equal the masters now."""
        self._versions = [master._version for master in self]

    def check(self) -> None:
        """Raise ``RuntimeError`` where a master was written after ``note``."""
        for master in self.written() if self.follow_late else ():
            raise RuntimeError(
                f"forward: a tensor of optimizer.param_groups was written to after the step. It holds this rank's "
                f"elements of bucket '{self[master]}', and parameters do not follow by themselves: call "
                f"optimizer.mark_loaded() on all ranks after writing, or write to model.parameters() under "
                f"torch.no_grad(), which are whole and which the optimizer follows"
            )

    def written(self) -> set[MasterParameter]:
        """The masters that a program has written after ``note``."""
        return {master for master, version in zip(self, self._versions, strict=True) if master._version != version}

    def check_gradless(self) -> None:
        """Raise ``RuntimeError`` where a master has a ``.grad``, which nobody would read."""
        if any(master.has_own_grad for master in self):
            raise RuntimeError(
                "optimizer.step(): a gradient was put into .grad of a tensor of optimizer.param_groups, and would be "
                "lost: put it into .grad of a parameter of the model, or change model.reduced_grads() in place"
            )


def late_grad(name: str) -> RuntimeError:
    """The error for a gradient in a parameter's ``.grad``, which this optimizer does not read."""
    return RuntimeError(
        f"optimizer.step(): somebody has put a gradient into .grad of parameter '{name}', where it would be lost; call "
        f"maingrad.ddp.add_grad(param, grad) in its place, before the last backward"
    )
