"""What a ``DistributedOptimizer`` has in its ``param_groups``: flat shards that know when somebody writes to them.

Parameters follow masters in a step, by a gather that all ranks take part in. What is written to masters in between, by
a program that goes over ``optimizer.param_groups`` (Lookahead, noise, a decay by hand), is seen by this rank alone: the
next forward refuses. Versions tell: each master has its own, which gathers and this library's own writes to the flat
tensor behind it do not raise.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..contract.main_grad import record_of
from ..torch_internals import let_optimizers_take, make_subclass

__all__ = ["MasterParameter", "StateByMaster", "WatchedMasters", "late_grad", "make_master"]


class MasterParameter(nn.Parameter):
    """This rank's elements of one or more parameters, as one long tensor: ``make_master`` makes one.

    ``data`` has this tensor's version counter, and setting it writes the values: the buckets have the memory.
    """

    @property
    def data(self) -> Tensor:
        """A plain tensor of the same memory and version counter."""
        return self.detach()

    @data.setter
    def data(self, data: Tensor) -> None:
        with torch.no_grad():
            self.copy_(data)


def make_master(flat_view: Tensor) -> MasterParameter:
    """The master that is ``flat_view``: it shares the memory and has a version counter of its own."""
    master: MasterParameter = make_subclass(MasterParameter, flat_view.data, True)
    return master


let_optimizers_take(MasterParameter)


class StateByMaster(defaultdict[Any, Any]):
    """``optimizer.state``: torch's, for masters alone; another key raises ``KeyError`` that says where its state is."""

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
        """Hold what somebody has assigned to ``optimizer.state``; raises ``KeyError`` for keys that are no masters."""
        for key in state:
            if key not in self._masters:
                self.__missing__(key)
        self.clear()
        self.update(state)


class WatchedMasters(dict[Any, str]):
    """An optimizer's masters, each with its bucket's name, and whether parameters have followed what was written."""

    follow_late = True
    """Parameters do not show by themselves what is written: they are gathered, or have another dtype."""

    def __init__(self, masters: Mapping[MasterParameter, str]) -> None:
        super().__init__(masters)
        self.note()

    def note(self) -> None:
        """Parameters are as the masters are now."""
        self._versions = [master._version for master in self]

    def check(self) -> None:
        """Raise ``RuntimeError`` where somebody has written to a master that parameters have not followed."""
        if not self.follow_late:
            return
        for (master, bucket), version in zip(self.items(), self._versions, strict=True):
            if master._version != version:
                raise RuntimeError(
                    f"forward: a tensor of optimizer.param_groups was written to after the step. It holds this rank's "
                    f"elements of bucket '{bucket}', and parameters do not follow by themselves: call "
                    f"optimizer.mark_loaded() on all ranks after writing, or write to model.parameters() under "
                    f"torch.no_grad(), which are whole and which the optimizer follows"
                )

    def check_gradless(self) -> None:
        """Raise ``RuntimeError`` where somebody has put a gradient into a master's ``.grad``, which nobody reads."""
        if any(master.grad is not None for master in self):
            raise RuntimeError(
                "optimizer.step(): a gradient was put into .grad of a tensor of optimizer.param_groups, and would be "
                "lost: the gradients of this rank's shards are model.reduced_grads(), after finish_grad_sync(); "
                "change them in place"
            )


def late_grad(name: str) -> RuntimeError:
    """The error of who puts a gradient into a parameter's ``.grad``, which this optimizer does not read."""
    return RuntimeError(
        f"optimizer.step(): somebody has put a gradient into .grad of parameter '{name}', where it would be lost; call "
        f"maingrad.ddp.add_grad(param, grad) in its place, before the last backward"
    )
