"""``.grad`` of all parameters of a wrapper: what is shown when, and what programs do to it. See ``shown_grad.py``."""

import functools
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..contract.record import GradRecord
from ..torch_internals import NO_BACKWARD, DisableTorchFunctionSubclass, current_backward, weak_method
from .optimizer import clear_exposed_grad, expose_grad
from .over_ranks import ShardInfo
from .sharded_grad import make_sharded_grad
from .shown_grad import ShownGrad, without_memory

__all__ = ["ShownGrads", "ShownParam"]


class ShownParam:
    """One wrapped parameter, as ``ShownGrads`` knows it.

    param   the parameter
    record  its record
    dtype   of the parameter, and of its ``.grad``
    part    where gradients are sharded, or differ between ranks: this rank's elements [n] of ``main_grad``, and which
            these are. None: ``main_grad`` is the whole gradient, equal on all ranks
    """

    __slots__ = ("dtype", "grad", "memory", "param", "part", "plain", "record", "spare")

    def __init__(
        self, param: Tensor, record: GradRecord, dtype: torch.dtype, part: tuple[Tensor, ShardInfo] | None = None
    ) -> None:
        self.param, self.record, self.dtype, self.part = param, record, dtype, part
        self.grad: ShownGrad | None = None
        """What this iteration's backward has left in ``.grad``; None before."""
        self.spare: ShownGrad | None = None
        """The same, from the first iteration on: it is shown again, unless the program has kept it."""
        self.plain: Tensor | None = None
        """The plain tensor that ``.grad`` was made in this iteration."""
        self.memory = (0, 0)
        """Address and version of what was reduced, when it was shown."""

    @property
    def is_changed(self) -> bool:
        """Whether the program has set ``.grad`` to None or to another tensor, or has changed a copy."""
        held, grad = self.param.grad, self.grad
        if grad is None:
            return False
        if held is None or (held is not grad and held is not grad.reduced):
            return True
        if grad.reduced is None:
            return False
        address, version = grad.reduced.data_ptr(), grad.reduced._version
        # ``.grad.data = ...`` changes the address. What is written in ``main_grad``'s own memory is there already.
        return address != self.memory[0] or (version != self.memory[1] and address != self.target.data_ptr())

    def note(self, real: Tensor) -> None:
        """``real``, what was reduced, is shown from now on."""
        if self.grad is not None:
            self.grad.reduced = real
            self.memory = real.data_ptr(), real._version

    @property
    def is_of_own_ranks(self) -> bool:
        """Whether some ranks have another parameter at this place: an expert of their own."""
        info = None if self.part is None else self.part[1]
        return info is not None and info.everyone is not None and info.grid.size < info.everyone.size

    @property
    def target(self) -> Tensor:
        """What this rank has of the reduced gradient, in ``main_grad``."""
        return self.record.view if self.part is None else self.part[0]

    def take_change(self) -> None:
        """Bring the change into ``main_grad``."""
        held = self.param.grad
        if isinstance(held, ShownGrad):
            held = held.reduced
        if held is None:
            self.target.zero_()
        elif self.part is None:
            self.target.copy_(held)
        else:
            info = self.part[1]
            self.target.copy_(info.cut(held) if tuple(held.shape) == info.shape else held.view(-1))


class ShownGrads:
    """``.grad`` of all parameters of one wrapper.

    finish_reduction  finishes the iteration's reduction; holds the wrapper weakly
    """

    def __init__(self, params: Iterable[ShownParam], finish_reduction: Callable[[], None]) -> None:
        self.params = tuple(params)
        self.active = False
        """A backward outside ``no_sync`` has left gradients in ``.grad`` in this iteration."""
        self._finish_reduction = finish_reduction
        self._by_record = {id(each.record): each for each in self.params}
        self._of_own_ranks = tuple(each for each in self.params if each.is_of_own_ranks)
        self._cleared: list[ShownParam] = []  # or replaced, when the backward under way began
        self._arrived: list[ShownParam] = []  # in the backward under way

    # ---- Showing, and the program's changes. ----

    def show(self) -> None:
        """The iteration's last backward is over, as far as one knows: leave a gradient in every ``.grad``.

        What somebody has put there by hand stays, and is refused when the iteration settles: no hook has seen it.
        """
        self.active = True
        with DisableTorchFunctionSubclass():  # no value is read, so that no read waits for a gather
            for each in self.params:
                if each.grad is not None or each.param.grad is not None or each.record.foreign_delayer:
                    continue
                if each.record.written or each.param.requires_grad:  # zeros without a use, None if it was frozen
                    self._show(each)

    def show_again(self) -> None:
        """A later backward is over: what has arrived in it is shown, as what was there before."""
        arrived, self._arrived = self._arrived, []
        with DisableTorchFunctionSubclass():
            for each in arrived:
                if each.param.grad is None:
                    each.param.grad = each.grad

    def show_late(self, record: GradRecord) -> None:
        """The last delayed gradient of a foreign module, which works on ``.grad`` until then, is computed."""
        each = self._by_record[id(record)]
        if self.active and each.grad is None and each.param.grad is None:
            self._show(each)

    def _show(self, each: ShownParam) -> None:
        if each.spare is None:
            each.spare = without_memory(
                each.param, each.param.shape, each.dtype, each.record.name, weak_method(self.finish_reduction), None
            )
        each.grad = each.spare
        each.param.grad = each.grad

    @property
    def is_cleared(self) -> bool:
        """Whether the program has set every ``.grad`` to None since the backward: it begins a new iteration."""
        if not self.active or (self._arrived and current_backward() != NO_BACKWARD):
            return False  # in a backward hooks have set .grad to None, of what came before an output of the wrapper
        with DisableTorchFunctionSubclass():
            return all(each.param.grad is None for each in self.params if each.grad is not None)

    @property
    def first_cleared(self) -> str | None:
        """Name of the first parameter whose ``.grad`` the program has set to None or replaced since the backward."""
        cleared = (each.record for each in self.params if each.grad is not None and not self.holds(each.record))
        return next((record.name for record in cleared), None)

    def holds(self, record: GradRecord) -> bool:
        """Whether ``.grad`` of this parameter is what the last backward has left there."""
        each = self._by_record[id(record)]
        with DisableTorchFunctionSubclass():
            grad = each.param.grad
            return grad is not None and each.grad is not None and (grad is each.grad or grad is each.grad.reduced)

    @property
    def is_changed(self) -> bool:
        """Whether a ``.grad`` was set to None, replaced, or changed where it is a copy."""
        with DisableTorchFunctionSubclass():
            return self.active and any(
                each.is_changed
                for each in self.params
                if each.param.grad is not each.grad or (each.grad is not None and each.grad.reduced is not None)
            )

    @property
    def is_filled(self) -> bool:
        """Whether reads find what was reduced before: no backward has begun since."""
        return any(each.grad is not None and each.grad.reduced is not None for each in self.params)

    def check_norms(self) -> None:
        """A step begins. Raise ``RuntimeError`` where an expert's ``.grad`` is a plain tensor of the program's.

        Of such a tensor torch's ``clip_grad_norm_`` and ``GradScaler`` see this rank's alone: no function of ours is
        called. ``maingrad.ddp.clip_grad_norm`` has taken it into ``main_grad`` before.
        """
        for each in self._of_own_ranks:
            with DisableTorchFunctionSubclass():
                held = each.param.grad
            if each.grad is None or held is None or held is each.plain or isinstance(held, ShownGrad):
                continue
            raise RuntimeError(
                f".grad of parameter '{each.record.name}' was replaced by a plain tensor. Other ranks have other "
                f"experts, and torch's clip_grad_norm_ and GradScaler see this rank's alone: write into .grad, "
                f"param.grad.copy_(other), or clip by maingrad.ddp.clip_grad_norm(model, max_norm)"
            )

    @torch.no_grad()
    def take_changes(self) -> None:
        """Bring the program's changes of ``.grad`` into ``main_grad``, which is reduced, and show it again."""
        with DisableTorchFunctionSubclass():
            for each in self.params:
                if each.is_changed:
                    each.take_change()
                    if each.param.grad is not None:
                        self._show_main_grad(each, each.param.grad.dtype)

    def _show_main_grad(self, each: ShownParam, dtype: torch.dtype) -> None:
        shares = each.plain is not None and each.plain.data_ptr() == each.record.view.data_ptr()
        each.param.grad = each.plain if shares else each.grad
        if each.record.exposed and not shares:
            self.expose(each, dtype)

    @torch.no_grad()
    def copy_again(self) -> None:
        """``main_grad`` was changed: each ``.grad`` that is a copy of it in another dtype follows."""
        with DisableTorchFunctionSubclass():
            for each in self.params:
                if each.plain is not None and each.plain.data_ptr() != each.record.view.data_ptr():
                    each.plain.copy_(each.record.view)
                    each.note(each.plain)

    @torch.no_grad()
    def zero_cleared(self) -> None:
        """Zero ``main_grad``, which is reduced, of parameters whose ``.grad`` was None when the backward began, or
        another tensor, into which the backward accumulates."""
        for each in self._cleared:
            each.target.zero_()
        self._cleared.clear()

    @torch.no_grad()
    def _zero_cleared_now(self) -> None:
        """The same for those that are not launched yet."""
        for each in self._cleared:
            if each.record.closed is None:
                each.record.zero()
        self._cleared = [each for each in self._cleared if each.record.closed is not None]

    def take_added(self, record: GradRecord) -> None:
        """In a parameter's hook, in a later backward: ``.grad`` is what this backward has accumulated."""
        each = self._by_record[id(record)]
        self._arrived.append(each)
        with DisableTorchFunctionSubclass():
            if each.grad is not None and each.param.grad is each.grad:
                each.param.grad, each.grad.added = each.grad.added, None

    # ---- Reading. ----

    def finish_reduction(self, grad: ShownGrad) -> None:
        """A program reads ``grad``: give all of this iteration's gradients their values."""
        if any(each.grad is grad for each in self.params):
            self._finish_reduction()
            self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """All gradients are reduced: programs read them from now on."""
        with DisableTorchFunctionSubclass():
            for each in self.params:
                if each.part is None:
                    if not each.record.exposed:
                        self.expose(each, each.dtype if each.record.updater is None else each.record.view.dtype)
                    continue
                if each.grad is None and each.param.grad is None:
                    self._show(each)
                if each.grad is not None and each.grad.reduced is None:
                    each.note(make_sharded_grad(*each.part))

    def expose(self, each: ShownParam, dtype: torch.dtype) -> None:
        """Make ``.grad`` a plain tensor in ``dtype``, but where the program has cleared or replaced it."""
        param, grad = each.param, each.grad
        if grad is None or (param.grad is not None and (param.grad is grad or param.grad is grad.reduced)):
            if grad is not None and grad.reduced is not None and each.is_changed:
                each.take_change()
            each.plain = expose_grad(param, each.record, dtype)
            each.note(each.plain)
        each.record.exposed = True

    @torch.no_grad()
    def unfill(self) -> None:
        """A backward begins, and may accumulate into ``.grad``: ``main_grad`` alone holds the gradients again."""
        with DisableTorchFunctionSubclass():
            self._cleared = []
            for each in self.params:
                grad = each.grad
                if each.record.exposed or (grad is not None and grad.reduced is not None):
                    if each.is_changed:
                        each.take_change()
                    cleared = grad is not None and each.param.grad is None
                    del grad  # ``_keep_own`` counts references
                    _keep_own(each)
                    self._show(each)
                    if cleared:
                        each.param.grad = None
                elif grad is not None and each.param.grad is not grad and each not in self._arrived:
                    self._cleared.append(each)  # by the program: hooks have left None where gradients have arrived
        self._zero_cleared_now()

    def hide(self) -> None:
        """The iteration is over: take every ``.grad`` off."""
        self.active = False
        self._arrived.clear()
        with DisableTorchFunctionSubclass():
            for each in self.params:
                if each.grad is not None or each.record.exposed:
                    _keep_own(each)


# ---- A gradient that the program keeps: ``grads = [p.grad for p in model.parameters()]``. ----


def _keep_own(each: ShownParam) -> None:
    """Take ``.grad`` off, before ``main_grad`` is written again. What the program keeps gets memory of its own."""
    if each.record.exposed:
        clear_exposed_grad(each.param, each.record)
    each.param.grad = each.grad = real = None
    if each.spare is not None:
        real, each.spare.reduced = each.spare.reduced, None
    if each.plain is not None:
        is_plain, real = real is each.plain, None
        if sys.getrefcount(each.plain) > _alone() and each.plain.data_ptr() == each.record.view.data_ptr():
            each.plain.data = each.plain.detach().clone()
        if is_plain:
            real = each.plain
        each.plain = None
    if each.spare is not None and sys.getrefcount(each.spare) > _alone():
        if real is not None and each.part is not None:
            real = make_sharded_grad(each.part[0].clone(), each.part[1])
        elif real is not None and real.data_ptr() == each.record.view.data_ptr():
            real = real.clone()
        each.spare.reduced = real
        each.spare = None  # the next iteration shows another one


@functools.cache
def _alone() -> int:
    """``sys.getrefcount`` of a tensor that a ``ShownParam`` alone has: the program keeps one with a larger count."""
    each = ShownParam(torch.zeros(1), None, torch.float32)  # type: ignore[arg-type]
    each.plain = torch.zeros(1)
    return sys.getrefcount(each.plain)
