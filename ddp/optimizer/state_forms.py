"""The forms of optimizer state between steps: full, compact, and on the host.

::

    state="full"            master fp32                       exp_avg, exp_avg_sq fp32
    state="compact"         bf16 parameter + int16 remainder  exp_avg, exp_avg_sq bf16, fp32 or 8 bits
    offload_state="host"    either one, in page-locked memory; a step takes it through the GPU bucket by bucket

Parameter and remainder together are the 32 bits of an fp32 master (``kernels.optimizer.reference.split_master``).
State dicts and checkpoints see the full form alone: ``full`` gives it, and ``take_loaded`` takes over what was written
into it. Moments are those of AdamW and Adam; SGD and Lion have one.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ...kernels.compat import runs_on_triton
from ...kernels.optimizer.reference import join_master, split_master
from .flat_params import FlatBucket, ParamSlice, Segment
from .host_state import HostState, Member
from .moment_blocks import MomentBlocks, scale_key
from .param_groups import IN_ONE_PASS
from .steps import (
    MASTER,
    MOMENTS,
    REMAINDER,
    SCALES,
    SECOND_MOMENT,
    FullState,
    OnePassSteps,
    TorchSteps,
    check_decay,
)

__all__ = ["StateForm", "knows_options"]


class CompactSteps(OnePassSteps):
    """Steps whose masters are bf16 parameters with remainders. fp32 parameters are masters themselves.

    moment_dtype  of moments between steps; bf16 is rounded stochastically, and uint8 are codes (``moment_blocks.py``)
    """

    def __init__(self, *args: Any, moment_dtype: torch.dtype) -> None:
        super().__init__(*args)
        self.moment_dtype = moment_dtype
        if moment_dtype is torch.uint8:
            self.blocks = MomentBlocks(self.slices)
        self._loading: FullState | None = None

    def update(self, flats: Sequence[FlatBucket], divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """As ``TorchSteps.update``."""
        self._loading = None  # of a load that has failed
        super().update(flats, divisor, found_inf)

    def _fits(self, groups: Sequence[Mapping[str, Any]], divisor: Tensor | None) -> bool:
        return knows_options(type(self.inner), groups, 'state="compact"')

    def _tensors_of(self, segment: Segment) -> dict[str, Tensor]:
        tensors = super()._tensors_of(segment)
        if REMAINDER in tensors:
            del tensors[MASTER]
        return tensors

    def _begun(self, segment: Segment) -> dict[str, Tensor]:
        begun = super()._begun(segment)
        if segment.master.dtype is torch.bfloat16:
            state = self.inner.state[segment.master]
            if REMAINDER not in state:
                state[REMAINDER] = self._zeros(segment.master, torch.int16)
            begun[REMAINDER] = state[REMAINDER]
        return begun

    def take_written(self, held: ParamSlice) -> None:
        """A program has written the parameter, which is the master now."""
        state = {} if held.segment is None else self.inner.state.get(held.segment.master, {})
        if REMAINDER in state:
            state[REMAINDER].view(-1)[held.offset : held.offset + held.end - held.start].zero_()

    @torch.no_grad()
    def full(self, *, to_load: bool = False) -> FullState:
        """Copies in host memory."""
        masters = {flat.bucket.index: _full_copy(flat.owned_params) for flat in self.flats}
        states: dict[Any, Any] = {}
        for segment in self.segments:
            state = dict(self.inner.state.get(segment.master, {}))
            remainder = state.pop(REMAINDER, None)
            if remainder is not None:
                joined = join_master(segment.master.detach().view(-1).cpu(), remainder.view(-1).cpu())
                masters[segment.flat.bucket.index][segment.start : segment.end] = joined
            if self.blocks is not None:
                for key in state.keys() & set(MOMENTS):
                    scales, signed = state.pop(scale_key(key)), key != SECOND_MOMENT
                    state[key] = self.blocks.decode(segment, state[key], scales, signed=signed)
            states[segment.master] = {key: _full_copy(value) for key, value in state.items()}
        slices = []
        for held in self.slices:
            start = 0 if held.segment is None else held.segment.start + held.offset
            whole = held.master.float() if held.segment is None else masters[held.segment.flat.bucket.index]
            slices.append(held._replace(master=whole[start : start + held.end - held.start], state_by_master=states))
        found = FullState(slices, list(masters.values()), states)
        if to_load:
            self._loading = found
        return found

    @torch.no_grad()
    def take_loaded(self, written: Collection[Tensor], *, from_full: bool) -> None:
        """Make state compact again: parameters and remainders from masters, moments rounded to nearest."""
        super().take_loaded(written, from_full=from_full)
        loaded, self._loading = (self._loading if from_full else None), None
        for segment in self.segments:
            if loaded is None and segment.master in written:
                self.inner.state[segment.master].pop(REMAINDER, None)
        masters: dict[int, Tensor] = {}
        if loaded is not None:
            masters = {flat.bucket.index: each for flat, each in zip(self.flats, loaded.masters, strict=True)}
        for segment in self.segments if masters else ():  # a bucket may hold another class's elements too
            mine = slice(segment.start, segment.end)
            master, owned_params = masters[segment.flat.bucket.index][mine], segment.flat.owned_params[mine]
            if owned_params.dtype is not torch.bfloat16:
                owned_params.copy_(master)
                continue
            param, remainder = split_master(master)
            owned_params.copy_(param)
            kept = self._zeros(segment.master, torch.int16)
            kept.view(-1).copy_(remainder)
            self.inner.state[segment.master][REMAINDER] = kept
        for segment in self.segments:
            state = self.inner.state[segment.master]
            for key in state.keys() & set(MOMENTS):
                if state[key].dtype is not torch.uint8:
                    self._keep(segment, key, state[key])

    def load(self, masters: Sequence[Tensor], state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Take over masters and moments. torch would round moments to the dtype of the parameters."""
        for master, given in state.items():
            self.inner.state[master] = {key: value.clone() for key, value in given.items()}
        self._loading = FullState([], list(masters), {})


class _OnHost(OnePassSteps):
    """Masters, remainders and moments live in page-locked memory; a step visits them bucket by bucket."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._device = self.flats[0].params.device
        self._segment_of: dict[Tensor, Segment] = {segment.master: segment for segment in self.segments}
        members = [
            Member(each.master, each.flat.bucket.index, self.blocks.scales_of(each).numel if self.blocks else 0)
            for each in self.segments  # which come bucket by bucket
        ]
        self._host = HostState(self._device, members)

    def _fits(self, groups: Sequence[Mapping[str, Any]], divisor: Tensor | None) -> bool:
        return knows_options(type(self.inner), groups, 'offload_state="host"')

    @torch.no_grad()
    def update(self, flats: Sequence[FlatBucket], divisor: Tensor | None, found_inf: Tensor | None) -> None:
        """As ``TorchSteps.update``, bucket by bucket."""
        by_bucket: dict[Hashable, FlatBucket] = {flat.bucket.index: flat for flat in flats}
        owners = [segment.master for segment in self.segments if segment.flat.bucket.index in by_bucket]
        for bucket, _ in self._host.visits(owners, self._homes_of):
            super().update([by_bucket[bucket]], divisor, found_inf)

    def prepare_replay(self) -> None:
        """See ``HostState``."""
        self._host.prepare_replay()

    def _homes_of(self, master: Tensor) -> dict[str, Tensor]:
        """The state of a segment that lies on the host."""
        segment = self._segment_of[master]
        is_copy = segment.flat.master is not segment.flat.owned_params
        on_host = {REMAINDER, *MOMENTS, *SCALES, *([MASTER] if is_copy else [])}
        return {key: home.detach() for key, home in super()._tensors_of(segment).items() if key in on_host}

    def _tensors_of(self, segment: Segment) -> dict[str, Tensor]:
        homes = self._homes_of(segment.master)
        places = {key: self._host.place(segment.master, key, home) for key, home in homes.items()}
        return super()._tensors_of(segment) | places

    def _zeros(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(like.shape, dtype=dtype, pin_memory=self._device.type == "cuda")

    def _is_home(self, tensor: Tensor) -> bool:
        return tensor.is_cpu and tensor.is_pinned() == (self._device.type == "cuda")

    def take_written(self, held: ParamSlice) -> None:
        """As in the other forms, once the last step's state is on the host."""
        self._host.wait()
        super().take_written(held._replace(param=held.param.cpu()))

    def full(self, *, to_load: bool = False) -> FullState:
        """As in the other forms, once the last step's state is on the host."""
        self._host.wait()
        return super().full(to_load=to_load)

    def load(self, masters: Sequence[Tensor], state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """As in the other forms, once the last step's copies are over, which would overwrite what is loaded."""
        self._host.wait()
        super().load(masters, state)

    @torch.no_grad()
    def take_loaded(self, written: Collection[Tensor], *, from_full: bool) -> None:
        """After a load: state lies in page-locked memory again."""
        self._host.wait()
        super().take_loaded(written, from_full=from_full)
        for segment in self.segments:
            state = self.inner.state[segment.master]
            for key in state.keys() & {*MOMENTS, *SCALES}:
                if not self._is_home(state[key]):
                    state[key] = self._zeros(state[key], state[key].dtype).copy_(state[key])


class HostSteps(_OnHost, OnePassSteps):
    """Full state on the host."""


class CompactHostSteps(_OnHost, CompactSteps):
    """Compact state on the host."""


def _full_copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", torch.float32, copy=True)


def knows_options(cls: type, groups: Sequence[Mapping[str, Any]], what: str) -> bool:
    """True, or ``ValueError`` for options that came after the optimizer was built, and that the kernel lacks."""
    check_decay(cls, groups, what)
    if any(group.get("amsgrad") for group in groups):
        raise ValueError(f"{what} does not go with amsgrad=True, which a group has by now: set it to False")
    if len({bool(group["maximize"]) for group in groups}) > 1:
        raise ValueError(f"{what} takes maximize alike in all groups, and by now groups differ: set them alike")
    return True


class StateForm(NamedTuple):
    """In which form, and where, a ``DistributedOptimizer`` keeps its state."""

    state: Literal["full", "compact"]
    moment_dtype: torch.dtype | None
    offload_state: Literal["host"] | None

    @property
    def is_compact(self) -> bool:
        """Whether masters are parameters with remainders."""
        return self.state == "compact"

    @property
    def name(self) -> str:
        """The option that asks for this form."""
        return 'state="compact"' if self.is_compact else 'offload_state="host"'

    def of(self, cls: type) -> "StateForm":
        """The form in which parameters of a class are kept: full where the class has no other."""
        return self if cls in IN_ONE_PASS else StateForm("full", None, None)

    def check(self, cls: type, dtypes: Iterable[tuple[str, torch.dtype]], options: Sequence[Mapping[str, Any]]) -> None:
        """Raise ``ValueError`` for a form that there is not, or not for this class, or parameters of these dtypes.

        dtypes  of the parameters, by name
        """
        if self.state not in ("full", "compact"):
            raise ValueError(
                f'state={self.state!r}: "full" (fp32 masters and moments) or "compact" (bf16 and a remainder)'
            )
        if self.moment_dtype is not None and not self.is_compact:
            raise ValueError(f'moment_dtype={self.moment_dtype}: full moments are fp32; say state="compact"')
        if self.moment_dtype not in (None, torch.bfloat16, torch.float32, torch.uint8):
            raise ValueError(
                f"moment_dtype={self.moment_dtype}: compact moments are torch.bfloat16, torch.float32 or torch.uint8"
            )
        if self.offload_state not in (None, "host"):
            raise ValueError(f'offload_state={self.offload_state!r}: "host", or None')
        if self == StateForm("full", None, None):
            return
        what = self.name
        if cls not in IN_ONE_PASS:
            known = ", ".join(each.__name__ for each in IN_ONE_PASS)
            raise ValueError(f"{what} is for {known}, not {cls.__name__}: leave it out")
        check_decay(cls, options, what)
        for group in options:
            for key in ("amsgrad", "maximize"):
                if group.get(key):
                    raise ValueError(f"{what} does not go with {key}=True: leave one of them out")
            if any(isinstance(beta, Tensor) for beta in group.get("betas", ())):
                raise ValueError(f"{what} takes betas that are numbers, and got a tensor: give its float()")
        for name, dtype in dtypes:
            if dtype not in (torch.bfloat16, torch.float32):
                raise ValueError(f"parameter '{name}' is {dtype}: {what} is for bf16 and fp32 parameters; leave it out")

    def steps(
        self,
        inner: torch.optim.Optimizer,
        flats: Sequence[FlatBucket],
        segments: Sequence[Segment],
        slices: list[ParamSlice],
    ) -> TorchSteps:
        """The steps of ``inner`` in this form."""
        if self.is_compact:
            cls = CompactSteps if self.offload_state is None else CompactHostSteps
            return cls(inner, flats, segments, slices, moment_dtype=self.moment_dtype or torch.bfloat16)
        if self.offload_state is not None:
            return HostSteps(inner, flats, segments, slices)
        if type(inner) in IN_ONE_PASS and flats and all(_has_kernel(flat.master) for flat in flats):
            return OnePassSteps(inner, flats, segments, slices)
        return TorchSteps(inner, flats, segments, slices)

    def place(self, flat: FlatBucket) -> FlatBucket:
        """The bucket with its master where this form keeps masters."""
        if self.offload_state is None or flat.master is flat.owned_params:
            return flat
        host = torch.empty(flat.master.shape, dtype=flat.master.dtype, pin_memory=flat.master.is_cuda)
        return flat._replace(master=host.copy_(flat.master))


def _has_kernel(master: Tensor) -> bool:
    return master.dtype is torch.float32 and runs_on_triton("DistributedOptimizer.step", master)
