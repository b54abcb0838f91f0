"""``DistributedOptimizer``: ZeRO-1 where gradients are sharded; otherwise every rank updates every element.

Follow a step. Reductions leave the gradients of this rank's shard (``buckets/reducer.py``). One pass of a torch
optimizer updates masters and moments, and clips and unscales gradients on the way. Masters are rounded into this rank's
shard of the parameters. All-gathers (``gathers/param_gather.py``) collect the shards, under the next forward with
``overlap_param_gather``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ..buckets.bucket import BucketParam
from ..buckets.iteration_ends import record_step
from ..buckets.nan_check import unscale
from ..collectives.failure_report import run_on_all_ranks
from ..collectives.streams import is_capturing
from ..gathers.param_gather import wait_for_all
from ..torch_grads.around_optimizer import AroundOptimizer
from ..torch_grads.master_param import StateByMaster, WatchedMasters, late_grad
from ..torch_internals import DisableTorchFunctionSubclass, weak_method
from ..wrapper.data_parallel import DistributedDataParallel
from .fit import (
    check_classes,
    check_fits,
    check_storage,
    layout_key,
    refuse_norm,
    refuse_norm_of_stage,
    refuse_scaler,
    shard_of_how_many,
    slice_of_how_many,
)
from .flat_params import ParamSlice, flatten_params, inner_groups, segments_of, show_grads, slices_of
from .grad_norm import clip_coefficient, global_grad_norm
from .param_groups import assign_groups, counts_apart, groups_by_class, is_elementwise
from .param_sync import ParamSync
from .state_forms import StateForm
from .step_order import step_order
from .steps import StepsByClass, TorchSteps

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(AroundOptimizer):
    """Torch optimizers over the buckets of a ``DistributedDataParallel`` model, on fp32 masters.

    With ``use_distributed_optimizer=True`` each rank keeps masters and moments of its shard only (ZeRO stage 1,
    Rajbhandari et al., 2020), and updated parameters are all-gathered. Otherwise every rank updates every element.

    lr               learning rate; None: the default of ``optimizer_class``
    optimizer_class  an elementwise class of ``torch.optim``; where no shard cuts parameters (``keep_params_whole``,
                     ``keep_matrices_whole``) also a class that updates whole ones (Muon). AdamW (Loshchilov and Hutter,
                     2019), Adam and SGD run as torch's fused kernels. ``maingrad.ddp.Lion`` is a class that torch lacks
    param_groups     dicts of options. ``"params"`` selects a group's parameters: a name or pattern (``"*.bias"``), a
                     sequence of them, or a function of name and parameter. A parameter is in the first group that
                     selects it; parameters that no group selects form the last group, with the default options.
                     ``"optimizer"``: another class for the group, whose other options are then this class's defaults
    max_grad_norm    clip by the global norm; None: no clipping (``grad_norm`` is then None)
    skip_nonfinite   a step whose gradients' norm is Inf or NaN updates nothing on any rank, and counts in
                     ``num_skipped_steps``. Fused classes skip on the device; for others the host waits once a step
    state            "full": fp32 masters and moments. "compact", for AdamW, Adam, SGD and Lion: a bf16 parameter and 16
                     bits of remainder are the fp32 master, so that a rank keeps 6 + 6/s bytes for each parameter on s
                     shards, fp32 gradient included, in place of AdamW's 6 + 12/s. The parameter is then the master
                     rounded half away from zero; a program's write to a parameter is its new master, without remainders
    moment_dtype     of compact moments: ``torch.bfloat16`` (None), rounded stochastically; ``torch.float32``; or
                     ``torch.uint8``, codes with a scale for 256 elements (6 + 4/s bytes), for which shards need
                     ``DistributedDataParallelConfig(shard_atom=256)``. Groups of other classes have full state
    offload_state    "host": masters, remainders and moments lie in page-locked host memory, and pass through the device
                     bucket by bucket in each step, which has the same bits
    options          passed to ``optimizer_class``: ``betas``, ``eps``, ``weight_decay``, ``momentum`` ...

    On GPUs AdamW, Adam, SGD and Lion are one pass over memory (``steps.py``). State dicts and checkpoints have the full
    form, and each form reads them.

    Learning-rate schedulers of torch work on this class. A step first reads parameters that were changed since the last
    step (``load_state_dict``, an in-place update) into the masters. ``zero_grad`` begins a new iteration of ``model``,
    after backwards under ``no_sync`` alone too. ``maingrad.ddp.GradScaler`` scales losses for it, and torch's own does.

    ``step`` launches the reductions that are left. It updates reduced buckets while other buckets are still being
    reduced, unless ``.grad`` was read before, or clipping or a check needs all gradients at once. Raises
    ``RuntimeError`` where no backward came before.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        lr: float | None = None,
        *,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        param_groups: Sequence[Mapping[str, Any]] = (),
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        state: Literal["full", "compact"] = "full",
        moment_dtype: torch.dtype | None = None,
        offload_state: Literal["host"] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(f"DistributedOptimizer needs a DistributedDataParallel model, got {type(model).__name__}")
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be positive, or None for no clipping; got {max_grad_norm}")
        if max_grad_norm is not None or skip_nonfinite:
            refuse_norm(model, "skip_nonfinite" if max_grad_norm is None else "max_grad_norm")
            refuse_norm_of_stage(model, "max_grad_norm or skip_nonfinite")
        self.model = model
        self.max_grad_norm, self.skip_nonfinite = max_grad_norm, skip_nonfinite
        self.grad_norm: Tensor | None = None
        """Global norm of the last step's gradients before clipping, a 0-dim tensor."""
        self.num_skipped_steps = torch.zeros((), device=model.device) if skip_nonfinite else None
        """Steps that ``skip_nonfinite`` has skipped, a 0-dim fp32 tensor on the model's device."""

        # All checks come before parameters move: where one raises, an earlier DistributedOptimizer still works.
        groups = assign_groups(model.bucket_params, param_groups)
        if lr is not None:
            options["lr"] = lr
        classes = groups_by_class(optimizer_class, options, param_groups)
        form = StateForm(state, moment_dtype, offload_state)
        check_classes(model, classes, groups, form)

        # What this rank updates.
        class_of = {index: each.cls for each in classes for index in each.groups}

        def group_of(entry: BucketParam) -> int:
            return groups[entry.owned.name]

        def form_of(entry: BucketParam) -> StateForm:
            return form.of(class_of[group_of(entry)])

        def is_whole(entry: BucketParam) -> bool:
            return entry.bucket.layout.keeps_params_whole or not is_elementwise(class_of[group_of(entry)])

        flats = flatten_params(
            model, lambda entry: form_of(entry).is_compact, lambda flat: form_of(flat.bucket_params[0]).place(flat)
        )
        self._flats = sorted(flats, key=lambda flat: flat.bucket.index)
        self.segments = segments_of(self._flats, group_of, is_whole)

        # Inner optimizers, one for each class, do the arithmetic.
        self._masters = WatchedMasters({segment.master: segment.flat.bucket.name for segment in self.segments})
        inners = [each.cls(inner_groups(self.segments, each.groups), **each.options) for each in classes]
        super().__init__(inners, [list(each.groups) for each in classes], partial(StateByMaster, self._masters))
        show_grads(self.segments, self)

        self.slices: list[ParamSlice] = slices_of(self._flats, self.segments, group_of, self.state)
        """What this rank updates of each parameter. ``full_slices`` has masters and state for exports."""
        self._steps = self._steps_in(form)
        self._params = [held.bucket_param.owned.param for held in self.slices]
        self._addresses = [held.view.data_ptr() for held in self.slices]
        self._versions = [param._version for param in self._params]

        self.param_sync = ParamSync(model, self._flats)
        """The gathers of updated parameters."""
        self._masters.follow_late = bool(self.param_sync.gathers) or any(
            flat.owned_params.dtype in (torch.bfloat16, torch.float16) for flat in self._flats
        )
        model.follow(partial(wait_for_all, self.param_sync.gathers), weak_method(self._masters.check))
        self._in_charge = object()
        for entry in model.bucket_params:
            entry.record.updater = self._in_charge

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Clip gradients, update masters, round masters into parameters, and all-gather the parameters.

        closure  called once, before; computes the iteration's gradients, and returns the loss, which ``step`` returns
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._check_steppable()
        if is_capturing() and not self.param_sync.is_captured:
            raise RuntimeError(
                "optimizer.step() in the captured step of another optimizer: replays would not do what this one does "
                "on the host; make a GraphedTrainingStep for each optimizer, and call them in turn"
            )
        self.model.start_for_step()
        self.model.steps.record_update()
        if not (self.model.is_reduced or self.model.can_wait_by_bucket):
            self.model.finish_reduction("optimizer.step()")  # what follows needs all at once
        self.finish_param_sync()
        self.refresh_masters()
        divisor, found_inf = self._grad_divisor(), self._found_inf()
        # Classes that are not torch's get one pass: such a class may count steps for all parameters together.
        at_once = found_inf is not None or not all(counts_apart(type(each)) for each in self._inners)
        reduced, gathers = self.model.is_reduced, self.param_sync.overlaps
        for flats in step_order(self._flats, reduced=reduced, gathers=gathers, at_once=at_once):
            self.model.wait_for_buckets(flat.bucket for flat in flats)
            self._steps.update(flats, divisor, found_inf)  # step 8 of docs/by_hand.py
            self.param_sync.record_updated(flats)
        record_step(self.model.module, found_inf)
        self._masters.note()
        self.param_sync.publish()
        return loss

    def finish_param_sync(self) -> None:
        """Wait for the gathers under way.

        Reading a parameter waits by itself. Call this before something reads memory by its address (a CUDA graph).
        """
        self.param_sync.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a new iteration: discard all gradients."""
        self.model.zero_grad_buffer()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Read those parameters into the masters that were changed since the last step.

        A master whose rounding equals the parameter's element stays: a model that is loaded after its optimizer loses
        no bits. Compact masters lose their remainders where their parameters have been written. The tensor's version
        shows in-place changes. Writes through ``param.data`` change no version: change the parameter itself under
        ``torch.no_grad()``.
        """
        check_storage(self.slices, self._addresses)
        with DisableTorchFunctionSubclass():  # no value is read, so that no read waits for a gather
            grads = [param.grad for param in self._params]
            versions = [param._version for param in self._params]
        for held, grad in zip(self.slices, grads, strict=True):
            if grad is not None and not (self.model.shown.active or held.bucket_param.record.exposed):
                raise late_grad(held.name)
        for index in [i for i, version in enumerate(versions) if version != self._versions[i]]:
            self._steps.take_written(self.slices[index])
        self._versions = versions

    def full_slices(self, *, to_load: bool = False) -> list[ParamSlice]:
        """The slices with fp32 masters and moments; of compact state, copies in host memory.

        to_load  the caller writes into masters, and calls ``mark_loaded(from_full=True)`` next
        """
        return self._steps.full(to_load=to_load).slices

    def written_since(self) -> list[int]:
        """Indices of ``slices`` whose parameter a program has changed since the step, or since it was read."""
        return [index for index, param in enumerate(self._params) if param._version != self._versions[index]]

    def record_written(self, indices: Iterable[int]) -> None:
        """A replay has changed these parameters after the update (``written_since`` its capture): masters follow."""
        for index in indices:
            self._versions[index] = -1

    def prepare_replay(self) -> None:
        """Before a replay of a captured step: a step's checks, and what changed parameters bring to the masters."""
        self._check_steppable()
        self._masters.check()
        self.refresh_masters()
        self._steps.prepare_replay()

    def forget_step(self) -> None:
        """After a capture that failed: nothing of the step has run."""
        vars(self).pop("grad_scale", None)
        vars(self).pop("found_inf", None)

    def prepare_state(self) -> None:
        """Prepare masters and state for reading or writing: wait for gathers.

        Raises ``RuntimeError`` where another ``DistributedOptimizer`` has replaced this one.
        """
        self._check_in_charge()
        self._adopt_assigned()
        self.finish_param_sync()
        check_storage(self.slices, self._addresses)

    @torch.no_grad()
    def mark_loaded(self, *, whole: bool = False, from_full: bool = False) -> None:
        """After a program has written this rank's masters or state: parameters on all ranks follow the masters.

        Collective over the model's ranks: call it on all ranks after writing to the tensors of ``param_groups``.

        whole      all ranks have written equal whole parameters, which are their own masters: nothing is gathered
        from_full  masters and state are what was written into ``full_slices(to_load=True)``
        """
        self._check_in_charge()
        self._adopt_assigned()
        self.param_sync.begin_step()
        self.finish_param_sync()
        self._steps.take_loaded(self._masters.written(), from_full=from_full)
        if not whole:
            self._steps.round(self._flats)
            self.param_sync.start_and_finish()
        self._versions = [param._version for param in self._params]
        self._masters.note()

    @torch.no_grad()
    def unscale_grads(self, inv_scale: Tensor) -> Tensor:
        """Multiply this rank's reduced gradients by ``inv_scale`` (0-dim fp32), for ``GradScaler``.

        Returns whether any rank has Inf or NaN: 1 or 0, fp32 on the device, equal on all ranks; the host does not wait.
        Gradients are unscaled in ``main_grad``, where norms and clipping read them.
        """
        self._check_in_charge()
        refuse_scaler(self.model)
        self.model.finish_reduction("unscaling")
        found_inf = torch.zeros((), dtype=torch.float32, device=self.model.device)
        unscale([flat.grads for flat in self._flats], inv_scale, found_inf)
        with self.model.failures.watch("the search for Inf in scaled gradients"):
            self.model.grids["dense"].sum(found_inf)
        return found_inf.clamp_(max=1.0)

    def state_dict(self) -> dict[str, Any]:
        """This rank's moments, groups and masters. The dict fits this number of ranks and this bucket plan only.

        ``save_checkpoint`` writes checkpoints that fit any.
        """
        self.prepare_state()
        self.refresh_masters()
        full, own = self._steps.full(), self.state
        self.state = full.state  # type: ignore[assignment]
        try:
            state = super().state_dict()
        finally:
            self.state = own
        state["masters"] = full.masters
        state["layout"], state["shard"] = self._layout_key(), shard_of_how_many(self.model)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned on the same rank of the same layout; parameters follow the masters.

        Collective over the model's ranks. All ranks raise ``ValueError`` where one rank's dict does not fit.
        """
        axes = self.model.grids["dense"].axes
        run_on_all_ranks(
            lambda: self._check_loadable(state_dict), axes, self.model.failures, "the check of optimizer states"
        )
        state = self.state
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        loaded, self.state = self.state, state  # slices refer to this mapping
        state.clear()
        state.update(loaded)
        self._share()
        order = [master for group in self.param_groups for master in group["params"]]
        self._steps.load(state_dict["masters"], {order[index]: given for index, given in state_dict["state"].items()})
        self.mark_loaded(from_full=True)

    @property
    def is_stepping(self) -> bool:
        """Whether gradients of masters are those of a step."""
        return self._steps.is_running

    def _steps_in(self, form: StateForm) -> TorchSteps | StepsByClass:
        if len(self._inners) == 1:
            (inner,) = self._inners
            return form.of(type(inner)).steps(inner, self._flats, self.segments, self.slices)
        steps = []
        for inner, indices in zip(self._inners, self._places, strict=True):
            slices = [held for held in self.slices if held.group in indices]
            buckets = {held.bucket_param.bucket.index for held in slices}
            flats = [flat for flat in self._flats if flat.bucket.index in buckets]
            segments = [segment for segment in self.segments if segment.group in indices]
            if slices:
                steps.append(form.of(type(inner)).steps(inner, flats, segments, slices))
        return StepsByClass(steps, self._flats, self.slices)

    # ---- One step's parts. ----

    def _grad_divisor(self) -> Tensor | None:
        """What the update divides gradients by: the loss scale over the clipping coefficient. None: by nothing."""
        scale: Tensor | None = vars(self).get("grad_scale")
        if self.max_grad_norm is not None or self.skip_nonfinite:
            norm = global_grad_norm(self.model)
            self.grad_norm = norm if scale is None else norm / scale
        if self.max_grad_norm is None or self.grad_norm is None:
            return scale
        inverse = clip_coefficient(self.grad_norm, self.max_grad_norm).reciprocal().float()
        return inverse if scale is None else inverse * scale

    def _found_inf(self) -> Tensor | None:
        """1.0 where this step is to update nothing, as a scaler or this step's norm says; None: nobody looks."""
        found: Tensor | int | None = vars(self).get("found_inf")
        if isinstance(found, int):  # torch's sum over no gradients
            raise RuntimeError(
                "torch.amp.GradScaler found no gradient on this rank, which updates no parameter, and the other ranks "
                "wait for its search for Inf: use maingrad.ddp.GradScaler, or fewer ranks"
            )
        if self.skip_nonfinite and self.grad_norm is not None:
            found = self.grad_norm.isfinite().logical_not().float()  # so a scaler's Inf counts too
            if self.num_skipped_steps is None:
                self.num_skipped_steps = torch.zeros_like(found)
            self.num_skipped_steps += found
        return found

    def _layout_key(self) -> str:
        key = layout_key(self.classes_of_groups, self.model.plan, self.segments)
        return key + slice_of_how_many(self.model)

    def _check_loadable(self, state_dict: Mapping[str, Any]) -> None:
        self.prepare_state()
        lengths = {"state": None, "param_groups": len(self.param_groups), "masters": len(self._flats)}
        check_fits(state_dict, self._layout_key(), shard_of_how_many(self.model), lengths)

    def _check_steppable(self) -> None:
        """The checks of a step, before anything else of it."""
        self._check_in_charge()
        self._adopt_assigned()
        self._masters.check_gradless()
        self.param_sync.begin_step()

    def _check_in_charge(self) -> None:
        if self.model.bucket_params[0].record.updater is not self._in_charge:
            raise RuntimeError(
                "this DistributedOptimizer was replaced: another one was built over its model, and has the parameters "
                "and their masters in memory of its own; step, save and load that one alone"
            )
