"""How a ``DistributedOptimizer`` updates its buckets.

``TorchSteps`` runs any torch optimizer over masters, and rounds masters into parameters in a second pass.
``OnePassSteps`` runs AdamW, Adam, SGD and Lion in one pass over memory (``kernels/optimizer``), with the same state.
``StepsByClass`` has one of them for each of several optimizer classes.
``state_forms.py`` has those that keep state in fewer bytes, or on the host.
"""

import zlib
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.optimizer.adamw import AdamUpdate
from ...kernels.optimizer.flat_update import FlatUpdate
from ...kernels.optimizer.lion import LionUpdate
from ...kernels.optimizer.reference import AdamOptions, LionOptions, Options, SGDOptions, UpdateRow
from ...kernels.optimizer.sgd import SGDUpdate
from ..collectives.streams import is_capturing
from ..torch_grads.lion import Lion
from ..torch_grads.optimizer import prepare_skippable_step
from .flat_params import FlatBucket, ParamSlice, Segment
from .moment_blocks import MomentBlocks, scale_key
from .param_groups import is_fused

__all__ = [
    "MASTER",
    "MOMENTS",
    "REMAINDER",
    "SCALES",
    "SECOND_MOMENT",
    "FullState",
    "OnePassSteps",
    "StepsByClass",
    "TorchSteps",
    "adam_options",
    "check_decay",
]

MASTER, REMAINDER, SECOND_MOMENT = "master", "remainder", "exp_avg_sq"
MOMENTS = ("exp_avg", SECOND_MOMENT, "momentum_buffer")
"""Keys of what a pass reads and writes for each element; the state of torch has the moments alone."""
SCALES = tuple(map(scale_key, MOMENTS))
"""Keys of the scales of 8-bit moments."""


class _Rule(NamedTuple):
    """How the steps of one class run in one pass."""

    update: Callable[..., FlatUpdate]
    moments: tuple[str, ...]
    """Keys of the state."""
    options: Callable[[Mapping[str, Any]], Options]
    """Options of a group."""


def adam_options(group: Mapping[str, Any]) -> AdamOptions:
    """What the kernel is told of a group of Adam or AdamW."""
    beta1, beta2 = group["betas"]
    return AdamOptions(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])


def _sgd_options(group: Mapping[str, Any]) -> Options:
    return SGDOptions(*(group[key] for key in SGDOptions._fields))


def _lion_options(group: Mapping[str, Any]) -> Options:
    beta1, beta2 = group["betas"]
    return LionOptions(group["lr"], beta1, beta2, group["weight_decay"])


_RULES: dict[type, _Rule] = {
    torch.optim.AdamW: _Rule(AdamUpdate, MOMENTS[:2], adam_options),
    torch.optim.Adam: _Rule(partial(AdamUpdate, decoupled=False), MOMENTS[:2], adam_options),
    torch.optim.SGD: _Rule(SGDUpdate, MOMENTS[2:], _sgd_options),
    Lion: _Rule(LionUpdate, MOMENTS[:1], _lion_options),
}
"""The rule of each class of ``IN_ONE_PASS``."""


def _decays_otherwise(cls: type, groups: Iterable[Mapping[str, Any]]) -> bool:
    """Whether torch's ``decoupled_weight_decay`` of a group gives Adam the decay of AdamW, or AdamW that of Adam."""
    own = issubclass(cls, torch.optim.AdamW)
    return any(bool(group.get("decoupled_weight_decay", own)) != own for group in groups)


def check_decay(cls: type, groups: Sequence[Mapping[str, Any]], what: str) -> None:
    """Raise ``ValueError`` for such a group of an optimizer that has no other steps."""
    if _decays_otherwise(cls, groups):
        decoupled = not issubclass(cls, torch.optim.AdamW)
        raise ValueError(
            f"{what} does not go with decoupled_weight_decay={decoupled} of {cls.__name__}: take the class "
            f"{'AdamW' if decoupled else 'Adam'}, which decays so"
        )


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
    flats     the buckets with parameters of these groups, in launch order
    segments  the tensors that ``inner`` updates
    slices    what they hold, and empty ones
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
        mine = [segment for segment in self.segments if id(segment.flat.params) in chosen]
        self.is_running = True
        try:  # the other masters have no gradient in this pass
            for segment in self.segments:
                segment.master.grad = None
            for part in self._begun_and_not(mine):
                for segment in part:
                    segment.master.grad = segment.grads.to(segment.master.dtype)
                self._step_inner(divisor, found_inf)
                for segment in part:
                    segment.master.grad = None
        finally:  # it may raise (no memory for its state): gradients are shown again, and the next step begins anew
            for segment in self.segments:
                segment.master.grad = None
            self.is_running = False
        self.round(flats)

    def _begun_and_not(self, segments: list[Segment]) -> list[list[Segment]]:
        """Parts that are updated one after the other.

        torch's fused SGD takes the first step of all its parameters, or of none. A checkpoint may have momentum for a
        part of them: for those that had gradients before.
        """
        if not isinstance(self.inner, torch.optim.SGD):
            return [segments]
        parts: dict[bool, list[Segment]] = {}
        for segment in segments:
            has_begun = self.inner.state.get(segment.master, {}).get("momentum_buffer") is not None
            parts.setdefault(has_begun, []).append(segment)
        return list(parts.values()) or [segments]

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
        if found_inf is not None and is_capturing():
            raise RuntimeError(
                f"a GradScaler skips {type(self.inner).__name__} on the host, which no graph replays: train in bf16, "
                f"or without GraphedTrainingStep"
            )
        if found_inf is None or not found_inf.item():
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

    def take_loaded(self, written: Collection[Tensor], *, from_full: bool) -> None:
        """After a load.

        written    masters of segments that a program has written itself
        from_full  what was written into the full form is the state
        """

    def prepare_replay(self) -> None:
        """Before the replay of a captured step."""

    def load(self, masters: Sequence[Tensor], state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take over what torch's ``load_state_dict`` does not: the masters, by bucket, of a state dict.

        state  the dict's, by segments' masters
        """
        for flat, master in zip(self.flats, masters, strict=True):
            flat.master.copy_(master)


class StepsByClass:
    """The steps of each of several optimizer classes over the buckets that hold parameters of its groups.

    flats   all buckets, in launch order
    slices  all slices
    """

    def __init__(self, steps: Sequence[TorchSteps], flats: Sequence[FlatBucket], slices: Sequence[ParamSlice]) -> None:
        self._steps, self._flats, self._slices = steps, flats, slices
        self._buckets = [{flat.bucket.index for flat in each.flats} for each in steps]
        self._of_group = {held.group: each for each in steps for held in each.slices}

    @property
    def is_running(self) -> bool:
        """Whether gradients of masters are those that a step has put there."""
        return any(each.is_running for each in self._steps)

    def update(self, flats: Sequence[FlatBucket], divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """As ``TorchSteps.update``."""
        for each, buckets in zip(self._steps, self._buckets, strict=True):
            mine = [flat for flat in flats if flat.bucket.index in buckets]
            if mine:
                each.update(mine, divisor, found_inf)

    def round(self, flats: Sequence[FlatBucket]) -> None:
        """As ``TorchSteps.round``. A bucket that two classes share is rounded twice, which changes nothing."""
        for each, buckets in zip(self._steps, self._buckets, strict=True):
            each.round([flat for flat in flats if flat.bucket.index in buckets])

    def take_written(self, held: ParamSlice) -> None:
        """As ``TorchSteps.take_written``."""
        self._of_group[held.group].take_written(held)

    def full(self, *, to_load: bool = False) -> FullState:
        """As ``TorchSteps.full``."""
        slices: dict[str, ParamSlice] = {}
        masters: dict[int, Tensor] = {}
        states: dict[Any, Any] = {}
        for each in self._steps:
            full = each.full(to_load=to_load)
            slices |= {held.name: held for held in full.slices}
            mine = {flat.bucket.index: master for flat, master in zip(each.flats, full.masters, strict=True)}
            for segment in each.segments:
                index, part = segment.flat.bucket.index, slice(segment.start, segment.end)
                if (others := masters.get(index, mine[index])).data_ptr() != mine[index].data_ptr():
                    others[part] = mine[index][part]  # copies, each with the masters of one class
                if segment.master in full.state:
                    states[segment.master] = full.state[segment.master]
            masters = mine | masters
        return FullState(
            [slices[held.name] for held in self._slices], [masters[flat.bucket.index] for flat in self._flats], states
        )

    def take_loaded(self, written: Collection[Tensor], *, from_full: bool) -> None:
        """As ``TorchSteps.take_loaded``."""
        for each in self._steps:
            each.take_loaded(written, from_full=from_full)

    def prepare_replay(self) -> None:
        """Before the replay of a captured step."""
        for each in self._steps:
            each.prepare_replay()

    def load(self, masters: Sequence[Tensor], state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """As ``TorchSteps.load``."""
        by_bucket = {flat.bucket.index: master for flat, master in zip(self._flats, masters, strict=True)}
        for each in self._steps:
            own = [segment.master for segment in each.segments]
            mine: dict[Tensor, Mapping[str, Any]] = {master: state[master] for master in own if master in state}
            each.load([by_bucket[flat.bucket.index] for flat in each.flats], mine)


class OnePassSteps(TorchSteps):
    """Steps of a class of ``IN_ONE_PASS`` over fp32 masters in one pass, with the state of torch's class.

    Adam and AdamW have the bits of torch's fused kernel, and SGD without a divisor. SGD and Lion count steps too.
    Subclasses keep the state in another form.
    """

    moment_dtype: torch.dtype = torch.float32
    """The dtype of moments between steps."""
    blocks: MomentBlocks | None = None
    """Where scales lie; None: moments have none."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rule = _RULES[type(self.inner)]
        self._places = {group: place for place, group in enumerate(sorted({held.group for held in self.slices}))}
        """Index of a group among those of ``inner``."""
        self._updates: dict[Hashable, tuple[list[Tensor], FlatUpdate]] = {}
        self._in_graphs: list[tuple[Hashable, list[Tensor], FlatUpdate]] = []
        """Those whose tables replays read. A later capture, which cannot make a table, finds them."""

    @torch.no_grad()
    def update(self, flats: Sequence[FlatBucket], divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """As ``TorchSteps.update``."""
        groups = self.inner.param_groups
        if not self._fits(groups, divisor):
            self._updates.clear()
            super().update(flats, divisor, found_inf)
            return
        buckets = {flat.bucket.index for flat in flats}
        tensors: dict[Tensor, Mapping[str, Tensor]] = {
            s.master: self._tensors_of(s) for s in self.segments if s.flat.bucket.index in buckets
        }
        maximize = bool(groups[0]["maximize"])
        update = self._update_of((maximize, *sorted(buckets)), tensors, maximize=maximize)
        update([self._rule.options(group) for group in groups], divisor=divisor, found_inf=found_inf)

    def _fits(self, groups: Sequence[Mapping[str, Any]], divisor: Tensor | None) -> bool:
        """Whether the kernel knows the options, which a load may have changed, and Adam gets the bits of torch's.

        Adam's ``grad + weight_decay * param`` without ``grad_scale`` is rounded once in three of four elements of a
        thread of torch's kernel, and twice in the first: its compiler takes that product out of a branch.
        """
        decays = any(group["weight_decay"] for group in groups)
        if type(self.inner) is torch.optim.Adam and divisor is None and decays:
            return False
        if _decays_otherwise(type(self.inner), groups):
            return False
        return len({bool(group["maximize"]) for group in groups}) == 1 and not any(
            group.get("amsgrad")
            or not group.get("fused", True)
            or any(isinstance(beta, Tensor) for beta in group.get("betas", ()))
            for group in groups
        )

    def _update_of(
        self, key: Hashable, tensors: Mapping[Tensor, Mapping[str, Tensor]], *, maximize: bool
    ) -> FlatUpdate:
        """The kernel's table of these segments, made anew where a load has replaced a tensor of the state."""
        used = [tensor for by_key in tensors.values() for tensor in by_key.values()]
        known, update = self._updates.pop(key, ([], None))
        if update is None or not _same(known, used):
            replaced = {*map(id, known)} - {*map(id, used)}
            self._updates = {
                place: entry for place, entry in self._updates.items() if replaced.isdisjoint(map(id, entry[0]))
            }
            captured = (each for place, known, each in self._in_graphs if place == key and _same(known, used))
            update = next(captured, None)
        if update is None:
            by_slice = [(held, tensors.get(held.segment.master)) for held in self.slices if held.segment is not None]
            rows = [self._row(held, by_key) for held, by_key in by_slice if by_key is not None]
            update = self._rule.update(rows, maximize=maximize)
        self._updates[key] = used, update
        if is_capturing():
            self._in_graphs.append((key, used, update))
        return update

    def _row(self, held: ParamSlice, tensors: Mapping[str, Tensor]) -> UpdateRow:
        assert held.segment is not None
        part = slice(held.offset, held.offset + held.end - held.start)
        mine = {key: tensor.detach().view(-1)[part] for key, tensor in tensors.items() if key not in ("step", *SCALES)}
        keys = [key for key in self._rule.moments if key in tensors]
        moments = [*(mine[key] for key in keys), None, None]
        scales: list[Tensor | None] = [None, None]
        if self.blocks is not None:
            place = self.blocks.scales_in_segment(held)
            scales = [*(tensors[scale_key(key)][place] for key in keys), None, None]
        return UpdateRow(
            grad=held.segment.grads.view(-1)[part],
            exp_avg=moments[0],
            exp_avg_sq=moments[1],
            step=tensors["step"],
            master=mine.get(MASTER),
            param=None if held.param.dtype is torch.float32 else held.param,
            remainder=mine.get(REMAINDER),
            exp_avg_scale=scales[0],
            exp_avg_sq_scale=scales[1],
            first=held.start,
            key=zlib.crc32(held.name.encode()),
            group=self._places[held.group],
        )

    def _tensors_of(self, segment: Segment) -> dict[str, Tensor]:
        """What the pass reads and writes of a segment, by key, beside gradient and parameter."""
        return {MASTER: segment.master, **self._begun(segment)}

    def _begun(self, segment: Segment) -> dict[str, Tensor]:
        """The segment's state, which begins as zeros."""
        state: dict[str, Any] = self.inner.state[segment.master]
        device = segment.grads.device
        group = self.inner.param_groups[self._places[segment.group]]
        has_moments = group.get("momentum") != 0  # SGD without has no state
        moments = self._rule.moments if has_moments else ()
        if "step" not in state:  # torch's SGD does not count: a buffer is from a step
            taken = any(state.get(key) is not None for key in moments)
            state["step"] = torch.full((), float(taken), dtype=torch.float32, device=device)
        elif state["step"].device != device:  # groups without ``fused`` count on the host
            state["step"] = state["step"].to(device)
        for key in moments:
            if state.get(key) is None:
                self._keep(segment, key, None)
                # SGD may have stepped without momentum. Dampening spares the first step of a buffer.
                state["step"] = torch.zeros_like(state["step"])
        return {key: state[key] for key in ("step", *moments, *map(scale_key, moments)) if key in state}

    def _keep(self, segment: Segment, key: str, values: Tensor | None) -> None:
        """Put fp32 values of a moment, or zeros, into the segment's state as it lies between steps."""
        kept = self._zeros(segment.master, self.moment_dtype)
        state = self.inner.state[segment.master]
        if self.blocks is not None:
            scales = kept.new_zeros(self.blocks.scales_of(segment).numel, dtype=torch.float32)
            state[scale_key(key)] = self._zeros(scales, torch.float32)
            if values is not None:
                signed = key != SECOND_MOMENT
                self.blocks.encode(segment, values, kept, state[scale_key(key)], signed=signed)
        elif values is not None:
            kept.copy_(values)
        state[key] = kept

    def _zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for state."""
        return torch.zeros(like.shape, dtype=dtype, device=like.device)


def _same(known: Sequence[Tensor], used: Sequence[Tensor]) -> bool:
    return len(known) == len(used) and all(a is b for a, b in zip(known, used, strict=True))
