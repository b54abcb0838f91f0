"""How a ``DistributedOptimizer`` updates its buckets, and in which form it keeps optimizer state.

``TorchSteps`` runs any torch optimizer over masters, and rounds masters into parameters in a second pass. The others
run Adam and AdamW in one pass over memory (``kernels/optimizer``): ``OnePassSteps`` keeps the same state, with the same
bits. ``CompactSteps`` keeps state in half the bytes::

    TorchSteps, OnePassSteps   master fp32                       exp_avg, exp_avg_sq fp32
    CompactSteps               bf16 parameter + int16 remainder  exp_avg, exp_avg_sq bf16 or fp32

Parameter and remainder together are the 32 bits of an fp32 master (``kernels.optimizer.reference.split_master``).
State dicts and checkpoints see the full form alone: ``full`` gives it, and ``take_loaded`` takes over what was written
into it.
"""

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.compat import runs_on_triton
from ...kernels.optimizer.adamw import AdamOptions, AdamTensors, AdamUpdate
from ...kernels.optimizer.reference import join_master, split_master
from ..torch_grads.skipped_steps import prepare_skippable_step
from ..wrapper.data_parallel import DistributedDataParallel
from .flat_params import FlatBucket, ParamSlice, Segment
from .param_groups import is_fused

__all__ = ["CompactSteps", "FullState", "OnePassSteps", "TorchSteps", "check_state_form", "steps_of"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_REMAINDER = "remainder"


class FullState(NamedTuple):
    """Optimizer state with fp32 masters and moments: the optimizer's own tensors, or copies in host memory."""

    slices: list[ParamSlice]
    masters: list[Tensor]
    """[owned.numel] of each bucket."""
    state: Mapping[Any, Any]
    """torch's state, by segments' masters."""


class TorchSteps:
    """Steps of ``inner``, any torch optimizer.

    inner     has the options of groups, and state by segments' masters
    flats     all buckets, in launch order
    segments  the tensors that ``inner`` updates
    slices    what they hold
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        flats: Sequence[FlatBucket],
        segments: Sequence[Segment],
        slices: list[ParamSlice],
    ) -> None:
        self.inner, self.flats, self.segments, self.slices = inner, flats, segments, slices
        self.is_running = False
        """Whether gradients of masters are those that a step has put there."""

    def update(self, flats: Sequence[FlatBucket], divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """Update masters, state and parameters of these buckets.

        divisor    0-dim fp32 that gradients are divided by; None: by nothing
        found_inf  0-dim fp32; 1.0: nothing changes. None: nobody looks
        """
        chosen = {id(flat.params) for flat in flats}
        self.is_running = True
        try:  # the other masters have no gradient in this pass
            for segment in self.segments:
                grads = segment.grads.to(segment.master.dtype) if id(segment.flat.params) in chosen else None
                segment.master.grad = grads
            self._step_inner(divisor, found_inf)
        finally:  # it may raise (no memory for its state): gradients are shown again, and the next step begins anew
            for segment in self.segments:
                segment.master.grad = None
            self.is_running = False
        self.round(flats)

    def _step_inner(self, divisor: Tensor | None, found_inf: Tensor | None) -> None:
        # A loaded group may have ``fused`` off.
        if is_fused(type(self.inner)) and all(group["fused"] for group in self.inner.param_groups):
            self.inner.grad_scale, self.inner.found_inf = divisor, found_inf  # type: ignore[attr-defined]
            prepare_skippable_step(self.inner)
            self.inner.step()
            self.inner.grad_scale = self.inner.found_inf = None  # type: ignore[attr-defined]
            return
        # Divide gradients first; the host reads once whether to skip.
        grads = [segment.master.grad for segment in self.segments if segment.master.grad is not None]
        if divisor is not None and grads:  # with whole parameters this rank may have no segment
            torch._foreach_div_(grads, divisor)
        if found_inf is None or not found_inf.item():
            prepare_skippable_step(self.inner)
            self.inner.step()

    def round(self, flats: Sequence[FlatBucket]) -> None:
        """Round masters into the parameters that this rank updates."""
        rounded = [flat for flat in flats if flat.master.data_ptr() != flat.owned_params.data_ptr()]
        if rounded:
            torch._foreach_copy_([flat.owned_params for flat in rounded], [flat.master for flat in rounded])

    def take_written(self, held: ParamSlice) -> None:
        """A program has written the parameter: the master takes the elements that are not its rounding."""
        same = held.master.to(held.param.dtype) == held.param
        held.master.copy_(torch.where(same, held.master, held.param))

    def full(self, *, to_load: bool = False) -> FullState:
        """The full form of the state.

        to_load  a load writes into it, and ``take_loaded`` comes next
        """
        return FullState(self.slices, [flat.master.detach() for flat in self.flats], self.inner.state)

    def take_loaded(self, written: Collection[Tensor]) -> None:
        """After a load: what was written into the full form is the state.

        written  masters of segments that a program has written itself
        """

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what torch's ``load_state_dict`` does not: the masters of a state dict."""
        for flat, master in zip(self.flats, state_dict["masters"], strict=True):
            flat.master.copy_(master)


class OnePassSteps(TorchSteps):
    """Steps of ``torch.optim.Adam`` or ``AdamW`` over fp32 masters in one pass: the state and the bits of torch's."""

    moment_dtype: torch.dtype = torch.float32

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._updates: dict[tuple[int, ...], tuple[list[Tensor], AdamUpdate]] = {}

    @torch.no_grad()
    def update(self, flats: Sequence[FlatBucket], divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """As ``TorchSteps.update``."""
        if not self._fits():
            super().update(flats, divisor, found_inf)
            return
        groups = self.inner.param_groups
        update = self._update_of(tuple(flat.bucket.index for flat in flats))
        update(
            [AdamOptions(group["lr"], *group["betas"], group["eps"], group["weight_decay"]) for group in groups],
            divisor=divisor,
            found_inf=found_inf,
        )

    def _update_of(self, buckets: tuple[int, ...]) -> AdamUpdate:
        """The kernel's table of these buckets, made anew where a load has replaced a tensor of the state."""
        mine = [segment for segment in self.segments if segment.flat.bucket.index in buckets]
        tensors = [tensor for segment in mine for tensor in self._begun(segment).values()]
        known, update = self._updates.get(buckets, ([], None))
        if update is None or len(known) != len(tensors) or any(a is not b for a, b in zip(known, tensors, strict=True)):
            update = AdamUpdate(
                [
                    self._row(held, held.segment)
                    for held in self.slices
                    if held.segment is not None and held.segment.flat.bucket.index in buckets
                ],
                decoupled=isinstance(self.inner, torch.optim.AdamW),
                maximize=self.inner.param_groups[0]["maximize"],
            )
            self._updates[buckets] = tensors, update
        return update

    def _fits(self) -> bool:
        """Whether the kernel knows the options, which a load may have changed."""
        groups = self.inner.param_groups
        return len({bool(group["maximize"]) for group in groups}) == 1 and not any(
            group["amsgrad"] or not group["fused"] or any(isinstance(beta, Tensor) for beta in group["betas"])
            for group in groups
        )

    def _begun(self, segment: Segment) -> dict[str, Tensor]:
        """The segment's state, which begins as zeros."""
        master = segment.master
        state: dict[str, Tensor] = self.inner.state[master]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state.update({key: self._zeros(master, self.moment_dtype) for key in _MOMENTS})
        return state

    def _zeros(self, master: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(master.shape, dtype=dtype, device=master.device)

    def _row(self, held: ParamSlice, segment: Segment) -> AdamTensors:
        state, part = self.inner.state[segment.master], slice(held.offset, held.offset + held.end - held.start)
        remainder = state.get(_REMAINDER)
        return AdamTensors(
            grad=segment.grads.view(-1)[part],
            exp_avg=state["exp_avg"].view(-1)[part],
            exp_avg_sq=state["exp_avg_sq"].view(-1)[part],
            step=state["step"],
            master=held.master if remainder is None else None,
            param=None if held.param.dtype is torch.float32 else held.param,
            remainder=None if remainder is None else remainder.view(-1)[part],
            exp_avg_scale=None,
            exp_avg_sq_scale=None,
            first=held.start,
            key=zlib.crc32(held.name.encode()),
            group=held.group,
        )


class CompactSteps(OnePassSteps):
    """Steps of Adam or AdamW whose masters are bf16 parameters with remainders. fp32 parameters are masters themselves.

    moment_dtype  of moments between steps; bf16 is rounded stochastically
    """

    def __init__(self, *args: Any, moment_dtype: torch.dtype) -> None:
        super().__init__(*args)
        self.moment_dtype = moment_dtype
        self._loading: FullState | None = None

    def _fits(self) -> bool:
        return True

    def _begun(self, segment: Segment) -> dict[str, Tensor]:
        state = super()._begun(segment)
        if segment.master.dtype is torch.bfloat16 and _REMAINDER not in state:
            state[_REMAINDER] = self._zeros(segment.master, torch.int16)
        return state

    def take_written(self, held: ParamSlice) -> None:
        """A program has written the parameter, which is the master now."""
        state = {} if held.segment is None else self.inner.state.get(held.segment.master, {})
        if _REMAINDER in state:
            state[_REMAINDER].view(-1)[held.offset : held.offset + held.end - held.start].zero_()

    @torch.no_grad()
    def full(self, *, to_load: bool = False) -> FullState:
        """Copies in host memory."""
        masters = {flat.bucket.index: flat.owned_params.float().cpu() for flat in self.flats}
        states: dict[Any, Any] = {}
        for segment in self.segments:
            state = dict(self.inner.state.get(segment.master, {}))
            remainder = state.pop(_REMAINDER, None)
            if remainder is not None:
                joined = join_master(segment.master.detach().view(-1), remainder.view(-1))
                masters[segment.flat.bucket.index][segment.start : segment.end] = joined
            states[segment.master] = {key: value.float().cpu() for key, value in state.items()}
        slices = []
        for held in self.slices:
            start = 0 if held.segment is None else held.segment.start + held.offset
            whole = masters[held.segment.flat.bucket.index] if held.segment else held.master.float()
            master = whole[start : start + held.end - held.start]
            slices.append(held._replace(master=master, state_by_master=states))
        found = FullState(slices, list(masters.values()), states)
        if to_load:
            self._loading = found
        return found

    def take_loaded(self, written: Collection[Tensor]) -> None:
        """Make state compact again: parameters and remainders from masters, moments rounded to nearest."""
        loaded, self._loading = self._loading, None
        for segment in self.segments:
            if loaded is None and segment.master in written:
                self.inner.state[segment.master].pop(_REMAINDER, None)
        for flat, master in zip(self.flats, [] if loaded is None else loaded.masters, strict=loaded is not None):
            remainders = None
            if flat.owned_params.dtype is torch.bfloat16:
                param, remainders = split_master(master.to(flat.owned_params.device))
                flat.owned_params.copy_(param)
            else:
                flat.owned_params.copy_(master)
            for segment in self.segments:
                if segment.flat is flat and remainders is not None:
                    remainder = remainders[segment.start : segment.end].view(segment.master.shape)
                    self.inner.state[segment.master][_REMAINDER] = remainder.clone()
        for segment in self.segments:
            state, device = self.inner.state[segment.master], segment.master.device
            for key in _MOMENTS:
                if key in state:
                    state[key] = state[key].to(device, self.moment_dtype)
            if "step" in state:
                state["step"] = state["step"].to(device)

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Take over masters and moments. torch would round moments to the dtype of the parameters."""
        order = [master for group in self.inner.param_groups for master in group["params"]]
        for index, given in state_dict["state"].items():
            self.inner.state[order[index]] = dict(given)
        self._loading = FullState([], state_dict["masters"], {})


def check_state_form(
    form: str,
    moment_dtype: torch.dtype | None,
    cls: type,
    model: DistributedDataParallel,
    options: Sequence[Mapping[str, Any]],
) -> None:
    """Raise ``ValueError`` for a form of optimizer state that there is not, or not for this class and model."""
    if form == "full":
        if moment_dtype is not None:
            raise ValueError(f'moment_dtype={moment_dtype}: moments are fp32 with state="full"; say state="compact"')
        return
    if form != "compact":
        raise ValueError(f'state={form!r}: "full" (fp32 masters and moments) or "compact" (bf16 and a remainder)')
    if moment_dtype not in (None, torch.bfloat16, torch.float32):
        raise ValueError(f"moment_dtype={moment_dtype}: compact moments are torch.bfloat16 or torch.float32")
    if cls not in (torch.optim.Adam, torch.optim.AdamW):
        raise ValueError(f'state="compact" has Adam and AdamW, not {cls.__name__}: leave state out')
    for group in options:
        for key in ("amsgrad", "maximize", "capturable"):
            if group.get(key):
                raise ValueError(f'state="compact" has no {key}=True: leave one of them out')
        if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
            raise ValueError('state="compact" takes betas that are numbers')
    for entry in model.bucket_params:
        if entry.owned.param.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"parameter '{entry.owned.name}' is {entry.owned.param.dtype}: compact state has masters of bf16 and "
                f"fp32 parameters; leave state out"
            )


def steps_of(
    form: str,
    moment_dtype: torch.dtype | None,
    inner: torch.optim.Optimizer,
    flats: Sequence[FlatBucket],
    segments: Sequence[Segment],
    slices: list[ParamSlice],
) -> TorchSteps:
    """The steps for this optimizer, device and form of state."""
    if form == "compact":
        return CompactSteps(inner, flats, segments, slices, moment_dtype=moment_dtype or torch.bfloat16)
    is_adam = type(inner) in (torch.optim.Adam, torch.optim.AdamW)
    if is_adam and flats and all(f.master.dtype is torch.float32 and _runs(f.master) for f in flats):
        return OnePassSteps(inner, flats, segments, slices)
    return TorchSteps(inner, flats, segments, slices)


def _runs(master: Tensor) -> bool:
    return runs_on_triton("DistributedOptimizer.step", master)
