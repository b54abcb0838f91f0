"""``WgradTarget``: where the weight gradients of one product go. The consumer's side of the contract, in order.

A module's backward passes through four steps here, and ``main_grad.py`` has what each touches:

    1. demand()               who asks for each weight's gradient: this backward, a caller of autograd.grad, nobody
    2. WgradTarget.resolve    where it goes; raises before any product is computed
    3. WgradTarget.deliver    dW: into main_grad now, or into a queue (``delayed.py``), or a capture (``capturing.py``)
    4. hand_over              the flag, and what autograd gets
"""

import enum
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from ...kernels.wgrad import wgrad_accumulate
from ..torch_internals import NO_BACKWARD, has_tensor_hooks, will_execute
from . import capturing
from .capturing import BackwardCapture, Delivery
from .delayed import DelayedWgrad, Operands, absorb_late_sum, live_queue
from .main_grad import (
    accumulator_of,
    add_to_grad,
    check_provided,
    hand_over,
    has_main_grad,
    is_foreign,
    open_for_write,
    record_of,
)
from .torch_wrappers import TorchShards, refuse_delay

__all__ = ["Demand", "DenseWgrad", "Place", "WgradProduct", "WgradQueueLike", "WgradTarget", "demand"]


class Demand(enum.Enum):
    """The running backward's use of a weight's gradient."""

    ACCUMULATE = "backward(): deliver it to the parameter"
    NOTHING = "the gradient is not asked for: autograd.grad(loss, inputs), backward(inputs=...)"
    RETURN = "autograd.grad(loss, weight), or create_graph=True: return it to the caller, without a side effect"


def demand(weight_node: Any) -> Demand:
    """Ask the engine what it will do with a weight's gradient; ``weight_node`` is ``ctx.next_functions[i][0]``.

    Only ``ACCUMULATE`` allows a write to ``main_grad``. A backward that is captured asks for every gradient of its
    layer, and each replay asks the engine again.
    """
    if capturing.active is not None:
        return Demand.ACCUMULATE
    if torch.is_grad_enabled():
        return Demand.RETURN  # create_graph=True: the gradient itself must be differentiable
    try:
        wanted = will_execute(weight_node)
    except RuntimeError:
        return Demand.RETURN  # the engine raises exactly where autograd.grad captures this leaf
    return Demand.ACCUMULATE if wanted else Demand.NOTHING


class WgradProduct(Protocol):
    """How the weight gradients of one product are computed: ``DenseWgrad``, or ``GroupedWgrad`` for experts."""

    def __init__(self, weights: Sequence[Tensor]) -> None: ...

    rows_apart: bool
    """``main_grad`` need not be contiguous: see ``accumulator_of``."""

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """Whether the weights have the shapes that this object was made for."""

    def accumulate(self, main_grads: Sequence[Tensor | None], overwrite: Sequence[bool], *operands: Any) -> None:
        """``main_grad (+)= dW`` for each weight; weights with None are left out."""

    def gradients(self, wanted: Sequence[bool], dtype: torch.dtype, *operands: Any) -> list[Tensor | None]:
        """``dW`` of each wanted weight as a new tensor of ``dtype``; None for the rest."""


class DenseWgrad:
    """``dW = dy^T x``; of several weights, which are slices of one along N, each takes its columns of ``dy``."""

    rows_apart = False

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.features = [weight.shape[0] for weight in weights]

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """See ``WgradProduct``: slices may get other sizes, when heads are pruned."""
        return len(weights) == 1 or [weight.shape[0] for weight in weights] == self.features

    def accumulate(self, main_grads: Sequence[Tensor | None], overwrite: Sequence[bool], dy: Any, x: Any) -> None:
        """See ``WgradProduct``: one GEMM for each weight."""
        for part, main_grad, over in zip(self.parts(dy), main_grads, overwrite, strict=True):
            if main_grad is not None:
                self.add(part, x, main_grad, overwrite=over)

    def gradients(self, wanted: Sequence[bool], dtype: torch.dtype, dy: Any, x: Any) -> list[Tensor | None]:
        """See ``WgradProduct``."""
        parts = zip(self.parts(dy), wanted, strict=True)
        return [self.multiply(part, x, dtype) if want else None for part, want in parts]

    def parts(self, dy: Any) -> Sequence[Any]:
        """The columns of ``dy`` for each weight."""
        return (dy,) if len(self.features) == 1 else dy.split(self.features, dim=1)

    def add(self, dy: Any, x: Any, main_grad: Tensor, *, overwrite: bool) -> None:
        """``main_grad (+)= dy^T x`` for the columns of one weight."""
        wgrad_accumulate(dy, x, main_grad, overwrite=overwrite)

    def multiply(self, dy: Any, x: Any, dtype: torch.dtype) -> Tensor:
        """``dy^T x`` in ``dtype`` for the columns of one weight."""
        product: Tensor = dy.t() @ x
        return product.to(dtype)


class Place(NamedTuple):
    """Where a weight's gradient goes. A backward looks it up before it computes any product."""

    weight: Tensor
    """The weight's Python object, which carries the contract's attributes."""
    accumulator: Tensor | None
    """The checked ``main_grad``; None where this backward does not write it."""


Places = Sequence[Place | None]
"""One for each weight of a product; None: autograd delivers that gradient, or nobody asked for it."""


class WgradQueueLike(Protocol):
    """A queue of delayed weight gradients."""

    def put(self, entry: DelayedWgrad) -> None:
        """Append ``entry``."""


class WgradTarget:
    """Where the gradients of one product's weights go.

    A target refers to the weights' Python objects weakly. An autograd graph must not keep a weight alive, and the
    object that ``ctx.saved_tensors`` returns may be a copy without attributes (saved-tensor hooks, recompute, offload).
    Each weight has its own flag and record, may be frozen alone, and its own first write overwrites.

    weights  of the product
    names    of the weights, for errors
    product  computes the gradients
    owner    the module, for errors
    fused    the gradients go into ``main_grad``; False (delayed ones only): into ``.grad``
    queue    they are delayed into this queue, which is held weakly; None: backward computes them

    Under torch's FSDP2 the accumulators are FSDP2's: see ``TorchShards``. A queue raises ``RuntimeError`` there.
    """

    __slots__ = ("_fused", "_owner", "_product", "_queue", "_weights")

    def __init__(
        self,
        weights: Sequence[Tensor],
        names: Sequence[str],
        product: WgradProduct,
        owner: str,
        *,
        fused: bool = True,
        queue: WgradQueueLike | None = None,
    ) -> None:
        self._weights = tuple(
            _Weight(weight, f"{owner}, {name}", fused=fused, delayed=queue is not None, rows_apart=product.rows_apart)
            for weight, name in zip(weights, names, strict=True)
        )
        self._product = product
        self._owner = owner
        self._fused = fused
        self._queue = None if queue is None else weakref.ref(queue)  # weak: modules must not keep a queue alive

    @property
    def delays(self) -> bool:
        """Whether weight gradients wait in a queue."""
        return self._queue is not None

    def delays_into(self, queue: WgradQueueLike | None) -> bool:
        """Whether weight gradients wait in ``queue``; for None, whether backward computes them."""
        return queue is None if self._queue is None else queue is not None and self._queue() is queue

    def refers_to(self, weights: Sequence[Tensor]) -> bool:
        """Whether this is the target of ``weights``, in this order."""
        return len(weights) == len(self._weights) and all(map(_Weight.refers_to, self._weights, weights))

    def resolve(self, wanted: Sequence[bool]) -> list[Place | None]:
        """Where this backward's gradients go. None for weights that are not wanted, and where autograd delivers.

        Raises ``RuntimeError`` that names the module: for a weight that was freed, for a missing or unfit ``main_grad``
        (see ``accumulator_of``), and for a tensor hook on a weight whose gradient is delayed.
        """
        return [weight.resolve() if want else None for weight, want in zip(self._weights, wanted, strict=True)]

    def deliver(self, places: Places, operands: Operands, backward: int) -> list[Tensor | None]:
        """In backward: ``main_grad (+)= dW``, now or later, and the flags; returns what autograd gets.

        places    from ``resolve``; weights with None are left out
        backward  number of the running backward; in reentrant recompute of the backward around it
        """
        if capturing.active is not None:
            return self._leave_to(capturing.active, places, operands)
        # Step 3 of docs/by_hand.py: the product into main_grad, then the flag.
        if self._queue is None:
            self._accumulate(places, operands, backward)
        else:
            mine = [place is not None for place in places]
            records = [record_of(place.weight) for place in places if place is not None]
            known = [record for record in records if record is not None]
            compute, alive = partial(self._compute, mine), partial(self._alive, mine)
            entry = DelayedWgrad(compute, tuple(operands), known, self._owner, backward, alive)
            live_queue(self._queue, self._owner).put(entry)
        return [place and hand_over(place.weight, record_of(place.weight), fused=self._fused) for place in places]

    def write_ahead(self, operands: Operands) -> Tensor:
        """In forward, of a product with one weight: ``main_grad (+)= dW``. Returns the token of this contribution.

        The provider is ours, and the weight has no hooks. The graph keeps the token until backward hands it to
        ``deliver_written``.
        """
        (place,) = self.resolve([True])
        assert place is not None, "the caller asks is_fusable"
        ahead = torch.empty(1, dtype=torch.uint8, device="cpu")
        overwrite = open_for_write(place.weight, record_of(place.weight), NO_BACKWARD, ahead=ahead)
        self._product.accumulate([place.accumulator], [overwrite], *operands)
        return ahead

    def deliver_written(self, ahead: Tensor, poison: Tensor) -> Tensor | None:
        """In backward, after ``write_ahead``: the flag; returns what autograd gets.

        poison  [1]: 0, or NaN where what was written is no gradient: it is added to one element

        Raises ``RuntimeError`` where gradients were cleared meanwhile, and where a hook must see the gradient.
        """
        (place,) = self.resolve([True])
        record = None if place is None else record_of(place.weight)
        if place is None or place.accumulator is None or record is None:
            raise RuntimeError(
                f"{self._owner}: its forward wrote the weight's gradient, and since then the weight got a hook, was "
                f'frozen, or left its wrapper; change these before the forward, or use mode="recompute"'
            )
        record.come(ahead, self._owner)
        place.accumulator.view(-1)[:1].add_(poison)
        return hand_over(place.weight, record, fused=self._fused)

    def gradients(self, wanted: Sequence[bool], dtype: torch.dtype, operands: Operands) -> list[Tensor | None]:
        """``dW`` of each wanted weight as a new tensor: for autograd."""
        return self._product.gradients(wanted, dtype, *operands)

    def deliver_in_graph(self, wanted: Sequence[bool], operands: Operands, backward: int) -> None:
        """``resolve`` and ``deliver`` in a compiled backward, which returns no gradient to autograd.

        Raises ``RuntimeError`` where autograd must have the gradient, for a reason that came after the compilation.
        """
        wanted = [
            want and weight.check_in_graph().requires_grad  # False: frozen after the forward
            for weight, want in zip(self._weights, wanted, strict=True)
        ]
        places = self.resolve(wanted)
        unwritten = [want and place is None for want, place in zip(wanted, places, strict=True)]
        if True in unwritten:  # FSDP2 has no accumulator, and takes ``.grad`` after this graph
            weights = [weight.alive() for weight in self._weights]
            self._add_to_grads(weights, self.gradients(unwritten, weights[0].dtype, operands), ours=False)
        if any(place is not None for place in places):
            self.deliver(places, operands, backward)

    def _accumulate(self, places: Places, operands: Operands, backward: int) -> None:
        main_grads, overwrite = [], []
        for place in places:
            main_grads.append(place and place.accumulator)
            overwrite.append(place is not None and open_for_write(place.weight, record_of(place.weight), backward))
        self._product.accumulate(main_grads, overwrite, *operands)

    def _compute(self, mine: Sequence[bool], entry: DelayedWgrad, *operands: Any) -> None:
        """Compute the delayed gradients ``entry``, and then raise ``RuntimeError`` for a weight that was freed."""
        kept = [own and weight.reference() is not None for weight, own in zip(self._weights, mine, strict=True)]
        places = self._places_for_write(kept)
        weights = [place.weight for place in places if place is not None]
        if weights and self._fused:
            self._accumulate(places, operands, entry.backward)
        elif weights:
            found = self.gradients(kept, weights[0].dtype, operands)
            self._add_to_grads([place and place.weight for place in places], found, ours=True)
        for weight in weights:
            absorb_late_sum(weight, record_of(weight), entry)
        for freed, own in zip(self._weights, mine, strict=True):
            if own:
                freed.alive()

    def _leave_to(self, capture: BackwardCapture, places: Places, operands: Operands) -> list[Tensor | None]:
        """``deliver`` in a backward that is captured."""
        mine = [place is not None for place in places]
        if self._fused:
            places = self._places_for_write(mine)
        weights = [place.weight for place in places if place is not None]

        def compute(overwrite: Sequence[bool]) -> list[Tensor | None]:
            if not self._fused:
                found = self.gradients(mine, weights[0].dtype, operands)
                return [gradient for gradient, own in zip(found, mine, strict=True) if own]
            betas = iter(overwrite)
            accumulators = [place and place.accumulator for place in places]
            self._product.accumulate(accumulators, [own and next(betas) for own in mine], *operands)
            return [None] * len(weights)

        capture.note(Delivery(self._owner, weights, fused=self._fused, queue=self._queue, compute=compute))
        return [None] * len(places)

    def _places_for_write(self, mine: Sequence[bool]) -> list[Place | None]:
        return [weight.resolve_for_write() if own else None for weight, own in zip(self._weights, mine, strict=True)]

    def _add_to_grads(
        self, weights: Sequence[Tensor | None], gradients: Sequence[Tensor | None], *, ours: bool
    ) -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            if weight is not None and gradient is not None:
                add_to_grad(weight, gradient, record_of(weight) if ours else None)

    def _alive(self, mine: Sequence[bool]) -> list[Tensor]:
        """The weights of a delayed gradient; none where one was freed, so that the queue drops the entry."""
        found = [weight.reference() for weight, own in zip(self._weights, mine, strict=True) if own]
        return [] if any(weight is None for weight in found) else found


class _Weight:
    """One weight of a target, held weakly, and where its gradient goes. The arguments are those of ``WgradTarget``."""

    __slots__ = ("_delayed", "_fused", "_owner", "_rows_apart", "_torch_shards", "reference")

    def __init__(self, weight: Tensor, owner: str, *, fused: bool, delayed: bool, rows_apart: bool) -> None:
        self.reference = TensorWeakRef(weight)
        self._owner, self._fused, self._delayed, self._rows_apart = owner, fused, delayed, rows_apart
        self._torch_shards = None
        if not has_main_grad(weight):
            self._torch_shards = TorchShards.of(weight)
            if delayed:
                if self._torch_shards is not None:
                    raise self._torch_shards.refuse_delay(owner)
                refuse_delay(owner, weight)

    def refers_to(self, weight: Tensor) -> bool:
        return self.reference() is weight

    def alive(self) -> Tensor:
        weight: Tensor | None = self.reference()
        if weight is None:
            raise RuntimeError(f"{self._owner}: the weight was freed between forward and backward")
        return weight

    def resolve(self) -> Place | None:
        weight = self.alive()
        if self._torch_shards is not None:
            accumulator = self._torch_shards.accumulator(weight)
            return None if accumulator is None else Place(weight, accumulator)
        if has_tensor_hooks(weight):  # registered after the forward: the hook must get the gradient
            if self._delayed:
                raise RuntimeError(
                    f"{self._owner}: a hook on the weight (register_hook) wants to see its gradient in backward, and "
                    f"that is delayed; remove the hook and change .grad or main_grad before the step, or let this "
                    f"module compute its gradients in backward"
                )
            return None
        if not weight.requires_grad:  # frozen after the forward: autograd drops the gradient
            return None
        if not self._delayed:
            return self.resolve_for_write()
        if self._fused:
            check_provided(weight, self._owner)
        return Place(weight, None)  # a lazy provider allocates when the delayed gradient is written, and not now

    def resolve_for_write(self) -> Place:
        """``resolve`` for a gradient that is written right after: in backward, or when a delayed one is computed."""
        weight = self.alive()
        return Place(weight, accumulator_of(weight, self._owner, rows_apart=self._rows_apart) if self._fused else None)

    def check_in_graph(self) -> Tensor:
        """The weight; raises ``RuntimeError`` where a compiled backward cannot deliver its gradient."""
        weight = self.alive()
        hooked = has_tensor_hooks(weight)
        if hooked or is_foreign(weight):
            what = "a hook (register_hook)" if hooked else "a main_grad of others"
            raise RuntimeError(
                f"{self._owner}: the weight got {what} after the layer was compiled, and the compiled backward has no "
                f"gradient to hand over; call torch.compiler.reset() then, so that the layer is compiled again"
            )
        return weight
