"""``DeferredLogits``: what a head returns in place of logits, while the loss that will come of them is computed.

Models of Hugging Face compute logits and give them to a loss. Between the two they cast them, scale them, cap them, and
reshape them. ``DeferredLogits`` takes part in all of this without logits: it notes each of these steps, and does those
that reshape to the hidden states. ``F.cross_entropy`` of it is the head's loss without logits. Any other function, and
every step that is not known here, computes the logits first, and gets a tensor.

Legend: T tokens, H features, V classes.
"""

import builtins
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ddp.contract.main_grad import record_of
from ...ddp.contract.module import is_sharded
from ...ddp.torch_internals import tree_map
from ...kernels.cross_entropy.reference import LossTerms

__all__ = ["DeferredLogits"]

_Step = tuple[str, Any]


class _Made(NamedTuple):
    """What a forward ran with: its logits are of these modes, whenever they are read."""

    weight: tuple[Any, ...]
    """State of the head's weight."""
    grad_enabled: bool
    autocast: torch.dtype | None
    """Dtype of products under autocast; None: none was on."""

    @contextlib.contextmanager
    def modes(self, device: str) -> Iterator[None]:
        """The modes of the forward."""
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(self.grad_enabled),
            torch.autocast(device, self.autocast, enabled=self.autocast is not None),
        ):
            yield


class DeferredLogits:
    """``hidden W^T``, and what is done to it, to be computed when something reads it.

    head     computes the product, ``head(hidden, defer=False)``, or the loss, ``head(hidden, targets=...)``
    hidden   [..., H], of which a step that reshapes makes another
    steps    in order: ("to", dtype), ("mul", number), ("div", number), ("tanh", None), ("add", bias)
    made     what the forward ran with; None, in compiled code: it is not known

    A model's output holds one where logits would be. It has the methods, operators and attributes of a tensor, and is
    an argument of any torch function. It is no instance of ``Tensor``.
    """

    def __init__(self, head: Any, hidden: Tensor, steps: tuple[_Step, ...], made: _Made | None) -> None:
        self._head = head
        self._hidden = hidden
        self._steps = steps
        self._made = made
        self._values: Tensor | None = None

    @classmethod
    def of_forward(cls, head: Any, hidden: Tensor) -> "DeferredLogits":
        """Those of the head's forward of ``hidden``, which runs."""
        # A compiler would guard what tells of changes, and compile again in each step.
        if torch.compiler.is_compiling():
            return cls(head, hidden, (), None)
        made = _Made(_state_of(head.weight), torch.is_grad_enabled(), _autocast_dtype(hidden))
        return cls(head, hidden, (), made)

    # ---- What is known without logits. ----

    @property
    def shape(self) -> torch.Size:
        """[..., V]."""
        return torch.Size((*self._hidden.shape[:-1], self._head.out_features))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the last cast, or else of the product."""
        casts = [value for kind, value in self._steps if kind == "to"]
        if casts:
            return casts[-1]  # type: ignore[no-any-return]
        autocast = _autocast_dtype(self._hidden) if self._made is None else self._made.autocast
        own = self._hidden.dtype
        return own if autocast is None or own is torch.float64 else autocast  # which leaves fp64 as it is

    @property
    def device(self) -> torch.device:
        """The device of the hidden states."""
        return self._hidden.device

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self._hidden.ndim

    @property
    def requires_grad(self) -> bool:
        """Whether the logits will have a graph."""
        enabled = torch.is_grad_enabled() if self._made is None else self._made.grad_enabled
        return enabled and (self._hidden.requires_grad or self._head.weight.requires_grad)

    def dim(self) -> int:
        """Number of dims."""
        return self._hidden.ndim

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        """``shape``, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    # ---- Steps. ----

    def float(self) -> Any:
        """As ``Tensor.float``."""
        return self._then("to", torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Tensor.to``; noted if the argument is a dtype, or the device that the logits are on."""
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.dtype):
            return self._then("to", args[0])
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.device) and args[0] == self.device:
            return self
        return self.values().to(*args, **kwargs)

    def contiguous(self) -> Any:
        """As ``Tensor.contiguous``."""
        return self

    def tanh(self) -> Any:
        """As ``Tensor.tanh``."""
        return self._then("tanh", None)

    def view(self, *sizes: Any) -> Any:
        """As ``Tensor.view``."""
        return self._reshaped("view", *sizes)

    def reshape(self, *sizes: Any) -> Any:
        """As ``Tensor.reshape``."""
        return self._reshaped("reshape", *sizes)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """As ``Tensor.flatten``."""
        if self._values is None and end_dim % self.ndim != self.ndim - 1:
            return self._of(self._hidden.flatten(start_dim, end_dim))
        return self.values().flatten(start_dim, end_dim)

    def __getitem__(self, index: Any) -> Any:
        rows = _without_classes(index, self.ndim) if self._values is None else None
        return self.values()[index] if rows is None else self._of(self._hidden[rows])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values()[index] = value

    def __mul__(self, other: Any) -> Any:
        return self._then("mul", other) if _is_number(other) else self.values() * other

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._then("div", other) if _is_number(other) else self.values() / other

    def __add__(self, other: Any) -> Any:
        """A bias of the classes is noted: Bart has one beside its head."""
        is_bias = isinstance(other, Tensor) and other.numel() == self.shape[-1] == other.shape[-1]
        return self._then("add", other) if is_bias else self.values() + other

    __radd__ = __add__

    def _then(self, kind: str, value: Any) -> Any:
        """After one more step."""
        if self._values is not None:
            return _do(self._values, kind, value)
        return DeferredLogits(self._head, self._hidden, (*self._steps, (kind, value)), self._made)

    def _of(self, hidden: Tensor) -> "DeferredLogits":
        """The same of other rows."""
        return DeferredLogits(self._head, hidden, self._steps, self._made)

    def _reshaped(self, method: str, *sizes: Any) -> Any:
        given = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], tuple | list | torch.Size) else sizes
        if self._values is None and given[-1:] == self.shape[-1:]:
            return self._of(self._hidden.reshape(*given[:-1], self._hidden.shape[-1]))
        return getattr(self.values(), method)(*sizes)

    # ---- The loss, and the logits. ----

    def values(self) -> Tensor:
        """The logits, by the operations of the model, in the modes of its forward (grad, autocast): computed once.

        Raises ``RuntimeError`` outside the model's forward if the forward was compiled, if a backward has reached the
        head since, or if the head's weight has changed or is sharded.
        """
        if self._values is None:
            if not self._head.defers:  # else the model's forward runs
                self._check_weight()
            with contextlib.nullcontext() if self._made is None else self._made.modes(self.device.type):
                values: Tensor = self._head(self._hidden, defer=False)
                for kind, value in self._steps:
                    values = _do(values, kind, value)
            self._values = values
        return self._values

    def _check_weight(self) -> None:
        weight = self._head.weight
        if is_sharded(weight):
            why = "outside the forward, which alone has the head's whole weight"
        elif self._made is None:
            why = "outside the forward, which was compiled"
        elif self._made.weight != _state_of(weight):
            why = "after a backward, or after the head's weight has changed"
        else:
            return
        raise RuntimeError(
            f"logits are read {why}: with labels, a model whose loss is fused computes none in training. Read them "
            f"before backward(), or have them computed in forward, model(..., skip_logits=False)"
        )

    def cross_entropy(
        self,
        target: Any,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: builtins.float = 0.0,
    ) -> Tensor:
        """``F.cross_entropy`` of the logits, whose arguments these are; outside the model's forward it reads them."""
        form = _form_of(self._steps) if self._values is None and self._head.defers else None
        if form is not None and form[2] is not None and self._head.bias is not None:
            form = None  # two biases
        of_rows = self.ndim == 2 and isinstance(target, Tensor) and target.shape == self.shape[:1]
        legacy = size_average is not None or reduce is not None
        needs_mean = self._head.mode == "in_forward" and reduction == "none"
        if form is None or not of_rows or legacy or needs_mean or weight is not None or target.is_floating_point():
            options = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
            return F.cross_entropy(self.values(), target, *options)
        scale, cap, bias = form
        autocasts = torch.is_autocast_enabled(self.device.type)  # which runs losses in fp32
        dtype = torch.promote_types(self.dtype, torch.float32) if autocasts else self.dtype
        loss: Tensor = self._head(
            self._hidden,
            target,
            terms=LossTerms(ignore_index, label_smoothing, 0.0, cap, scale),
            reduction=reduction,
            bias=bias,
            dtype=dtype,
        )
        return loss.to(dtype)

    # ---- All else that a tensor does. ----

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredLogits):
            if func is F.cross_entropy:
                return first.cross_entropy(*args[1:], **kwargs)
            if func is torch.tanh:  # F.tanh calls the method
                return first.tanh()
        args, kwargs = tree_map(_values_of, (tuple(args), kwargs))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"DeferredLogits has no attribute '{name}'")
        if name in _OF_GRADIENTS:
            raise RuntimeError(
                f"logits.{name}: the fused loss has no logits whose gradient backward could give; have them computed "
                f"in forward, model(..., skip_logits=False)"
            )
        return getattr(self.values(), name)

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={list(self.shape)}, dtype={self.dtype})"


_OF_GRADIENTS = ("retain_grad", "register_hook")
_OPERATORS = (
    "sub rsub pow rpow mod rmod floordiv rfloordiv neg pos abs eq "
    "ne lt le gt ge matmul rmatmul rtruediv len iter bool float int"
)


def _operator(name: str) -> Callable[..., Any]:
    def read(self: DeferredLogits, *others: Any) -> Any:
        return getattr(self.values(), name)(*others)

    return read


for _name in (f"__{each}__" for each in _OPERATORS.split()):
    setattr(DeferredLogits, _name, _operator(_name))


def _state_of(weight: Tensor) -> tuple[Any, ...]:
    """Values of which one changes before a program can have updated the weight."""
    record = record_of(weight)  # optimizers over buckets do not raise the version
    if record is None:
        return (weight._version,)
    return weight._version, record.num_fused_writes + record.num_hook_writes, record.closed


def _autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _values_of(value: Any) -> Any:
    return value.values() if isinstance(value, DeferredLogits) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _do(values: Tensor, kind: str, value: Any) -> Tensor:
    """One step, by the operation that the model has asked for."""
    if kind == "to":
        return values.to(value)
    if kind == "mul":
        return torch.mul(values, value)
    if kind == "div":
        return torch.div(values, value)
    return torch.add(values, value) if kind == "add" else torch.tanh(values)


def _form_of(steps: tuple[_Step, ...]) -> tuple[float, float | None, Tensor | None] | None:
    """Scale, cap and bias, of which the steps make ``cap tanh(scale (z + bias) / cap)``; None: they make another."""
    bias: Tensor | None = None
    scale, factor, capped = 1.0, 1.0, False
    for kind, value in steps:
        if kind in ("mul", "div"):
            factor *= value if kind == "mul" else 1.0 / value
        elif kind == "tanh":
            if capped:
                return None
            scale, factor, capped = factor, 1.0, True
        elif kind == "add":
            if capped or factor != 1.0 or bias is not None:
                return None
            bias = value.reshape(-1)
        elif value not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            return None
    if not capped:
        return factor, None, bias
    return (scale * factor, factor, bias) if factor > 0 else None


def _without_classes(index: Any, ndim: int) -> tuple[Any, ...] | None:
    """The index of rows, where ``index`` takes whole rows of classes; None where it does not."""
    parts = index if isinstance(index, tuple) else (index,)
    taken = 0
    for part in parts:
        if part is None or isinstance(part, bool | list):
            return None
        if part is not Ellipsis:
            taken += part.ndim if isinstance(part, Tensor) and part.dtype is torch.bool else 1
    last = parts[-1]
    if taken < ndim and (last is Ellipsis or not any(part is Ellipsis for part in parts)):
        return parts
    return parts if taken <= ndim and isinstance(last, slice) and last == slice(None) else None
