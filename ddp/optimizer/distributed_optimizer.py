"""The optimizer's step over flat shards: ZeRO-1 where the model's gradients are sharded, else all of it on every rank.

Follow a step: gradients are reduced into this rank's shard (``launcher.py``); one pass of a torch optimizer updates
masters and moments, clipping and unscaling on the way; masters are rounded into the parameters' shard; the shards are
gathered (``param_gather.py``), under the next forward where the config says so.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..buckets.nan_check import unscale
from ..collectives.agreement import alike
from ..collectives.placements import placements_of
from ..gathers.compiled_modules import wait_before_compiled_code
from ..gathers.guard import find_keepers, guard_reads
from ..gathers.param_gather import ParamGather
from ..gathers.reader_threads import ReaderThreads
from ..gathers.waiting_modules import modules_below
from ..stock.master_param import StateByMaster, WatchedMasters, late_grad
from ..stock.skipped_steps import prepare_skippable_step, settle_first_step
from ..torch_internals import DisableTorchFunctionSubclass
from ..wrapper.data_parallel import DistributedDataParallel
from .fit import check_fits, layout_key, shard_of_how_many
from .flat_params import FlatBucket, ParamSlice, flatten_params, inner_groups, segments_of, slices_of
from .grad_norm import clip_coefficient, global_grad_norm
from .param_groups import assign_groups, check_optimizer_class, check_options, is_fused, is_of_torch
from .step_order import step_order

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(torch.optim.Optimizer):
    """A torch optimizer over the buckets of a ``DistributedDataParallel`` model, on fp32 masters.

    With ``use_distributed_optimizer=True`` each rank keeps masters and moments of its shard only (ZeRO stage 1,
    Rajbhandari et al., 2020) and the updated parameters are all-gathered; otherwise every rank updates everything.

    lr               learning rate
    optimizer_class  any elementwise class of ``torch.optim``; of whole parameters with ``keep_params_whole`` (Muon).
                     AdamW (Loshchilov and Hutter, 2019), Adam and SGD run as torch's fused kernels
    param_groups     dicts of options, each for the parameters that its ``"params"`` selects: a name or pattern
                     (``"*.bias"``), a sequence of them, or a function of name and parameter. The first match counts;
                     the rest form the last group, with the default options
    max_grad_norm    clip by the global norm; None: no clipping (``grad_norm`` is then None)
    options          passed to ``optimizer_class``: ``betas``, ``eps``, ``weight_decay``, ``momentum`` ...

    Learning-rate schedulers of torch work on this class. Parameters that somebody changed since the last step
    (``load_state_dict``, an in-place update) are read into the masters again first. ``zero_grad`` is
    ``model.zero_grad_buffer``. Under fp16 use ``maingrad.ddp.GradScaler``.

    ``step`` comes after ``model.finish_grad_sync()``, or after ``model.start_grad_sync()`` alone: it then updates
    buckets that are reduced while others are under way, unless clipping or a check needs all of them at once. Raises
    ``RuntimeError`` before either.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        lr: float = 1e-3,
        *,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        param_groups: Sequence[Mapping[str, Any]] = (),
        max_grad_norm: float | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise TypeError(f"DistributedOptimizer needs a DistributedDataParallel model, got {type(model).__name__}")
        if max_grad_norm is not None and max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be positive, or None for no clipping; got {max_grad_norm}")
        whole = model.ddp_config.keep_params_whole
        check_optimizer_class(optimizer_class, model.wired, whole=whole)
        self.model = model
        self.max_grad_norm = max_grad_norm
        self.grad_norm: Tensor | None = None
        """Global norm of the last step's gradients before clipping, a 0-dim tensor."""

        # Whatever may raise does so before parameters move: a DistributedOptimizer of before goes on then.
        groups = assign_groups(model.wired, param_groups)
        if is_fused(optimizer_class) and not options.get("foreach"):
            options.setdefault("fused", True)
        check_options(optimizer_class, {"lr": lr, **options}, param_groups)

        # What this rank updates.
        self._flats = sorted(flatten_params(model), key=lambda flat: flat.bucket.index)
        self._segments = segments_of(self._flats, lambda wired: groups[wired.owned.name], whole=whole)

        # The optimizer that does the arithmetic; one list of groups and one state for both, so that schedulers and
        # state dicts act on what the step reads.
        self._inner = optimizer_class(inner_groups(self._segments, param_groups), lr=lr, **options)  # type: ignore[call-arg]
        self._masters = WatchedMasters({segment.master: segment.flat.bucket.name for segment in self._segments})
        self._inner.state = StateByMaster(self._masters, self._inner.state)
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state
        self._sealed = True
        self._agreed_in = -1  # iteration in which all ranks looked for Inf together

        self.slices: list[ParamSlice] = slices_of(
            self._flats,
            self._segments,
            lambda wired: groups[wired.owned.name],
            self.state,
        )
        """Where each parameter meets this rank's shards: for checkpoints and exports."""
        self._versions = [piece.wired.owned.param._version for piece in self.slices]

        # Gathers, first what the forward reads first.
        self._threads = ReaderThreads()
        self._gathers = [
            ParamGather(
                flat.bucket.name,
                flat.params,
                [wired.owned.param for wired in flat.wired],
                model.grids[flat.bucket.layout.grid_name],
                model.failures,
                self._threads,
            )
            for flat in reversed(self._flats)
            if placements_of(model.ddp_config).inner.gathers and model.grids[flat.bucket.layout.grid_name].size > 1
        ]
        self._stream = torch.cuda.Stream(model.device) if self._gathers and model.device.type == "cuda" else None
        self._keepers = find_keepers(model.module, self._gathers)
        self._masters.follow_late = bool(self._gathers) or any(
            flat.master is not flat.owned_params for flat in self._flats
        )
        model.follow(self._gathers, self._masters)
        self._in_charge = object()
        for wired in model.wired:
            wired.record.updater = self._in_charge

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Clip, update the masters, round them into the parameters and gather these from all ranks."""
        if closure is not None:
            raise ValueError(
                "DistributedOptimizer.step() takes no closure: gradients are reduced once per iteration; run what is "
                "in it, then model.finish_grad_sync() and step(). One that calls closures (LBFGS) is a stock optimizer "
                "with use_distributed_optimizer=False; its closure ends with model.finish_grad_sync() and "
                "model.expose_grads()"
            )
        self._check_in_charge()
        self.model.check_started("optimizer.step()")
        self._adopt_assigned()
        self._masters.check_gradless()
        scaled = "found_inf" in vars(self)
        if scaled and self._agreed_in != self.model.iteration:
            raise RuntimeError(
                "torch.amp.GradScaler over DistributedOptimizer: each rank would look for Inf in its own shard only, "
                "and ranks would skip different steps; use maingrad.ddp.GradScaler"
            )
        self._threads.come_home()
        if not self.model.is_reduced and (
            self.max_grad_norm is not None or not self.model.ddp_config.can_wait_by_bucket
        ):
            self.model.finish_grad_sync()  # all gradients are needed at once
        self.finish_param_sync()
        self.refresh_masters()
        divisor = self._grad_divisor()
        early = [gather for gather in self._gathers if gather.flat is self._flats[-1].params]
        for flats in self._passes(at_once=scaled):
            self.model.wait_for_buckets(flat.bucket for flat in flats)
            self._update(flats, divisor)
            self._round(flats)
            if flats[-1] is self._flats[-1]:  # what the next forward reads first is gathered first
                self._start_gathers(early)
        self._start_gathers([gather for gather in self._gathers if gather not in early])
        self._masters.note()
        self._let_parameters_wait()

    def finish_param_sync(self) -> None:
        """Wait for the gathers under way. Reading a parameter does so by itself; what reads memory by its address, a
        captured CUDA graph say, does not."""
        for gather in self._gathers:
            gather.arrive()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Start a new iteration: ``model.zero_grad_buffer()``."""
        self.model.zero_grad_buffer()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Read parameters into the masters where somebody changed them since they were last in step.

        Elements that still are their master's rounding keep it: a model loaded after its optimizer loses no bits.
        In-place changes are seen by the tensor's version. Writing through ``param.data`` leaves none: change the
        parameter itself under ``torch.no_grad()``.
        """
        self._check_storage()
        for index, piece in enumerate(self.slices):
            param = piece.wired.owned.param
            if param.grad is not None and not piece.wired.record.exposed:
                raise late_grad(piece.name)
            version = param._version
            if version != self._versions[index]:
                self._versions[index] = version
                same = piece.master.to(piece.param.dtype) == piece.param
                piece.master.copy_(torch.where(same, piece.master, piece.param))

    def settle(self) -> None:
        """Before masters and state are read or written: no gather is under way, and nothing known to the device alone.

        Raises ``RuntimeError`` where another ``DistributedOptimizer`` has replaced this one.
        """
        self._check_in_charge()
        self._adopt_assigned()
        self.finish_param_sync()
        self._check_storage()
        settle_first_step(self._inner)

    @torch.no_grad()
    def mark_loaded(self, *, whole: bool = False) -> None:
        """Somebody wrote this rank's masters and state: parameters follow on all ranks. Collective over the model's.

        To be called by all ranks after a program has written to the tensors of ``param_groups``. Nothing is gathered
        where all have written ``whole`` parameters, alike, which are their own masters.
        """
        self._check_in_charge()
        self._adopt_assigned()
        self._threads.come_home()
        self.finish_param_sync()
        if not whole:
            self._round(self._flats)
            self._start_gathers(self._gathers)
            self.finish_param_sync()
        self._versions = [piece.wired.owned.param._version for piece in self.slices]
        self._masters.note()

    @torch.no_grad()
    def unscale_grads(self, inv_scale: Tensor) -> Tensor:
        """Multiply this rank's reduced gradients by ``inv_scale`` (0-dim fp32); returns whether a rank met Inf or NaN.

        The answer is fp32 on the device, 1 or 0, alike on all ranks; nothing waits for it. For ``GradScaler``.
        Gradients stay in ``main_grad`` and its dtype, so that norms and clipping find them unscaled.
        """
        self._check_in_charge()
        self.model.check_reduced("unscaling")
        self._agreed_in = self.model.iteration
        found_inf = torch.zeros((), dtype=torch.float32, device=self.model.device)
        unscale([flat.grads for flat in self._flats], inv_scale, found_inf)
        with self.model.failures.watch("the search for Inf in scaled gradients"):
            self.model.grids["dense"].sum(found_inf)
        return found_inf.clamp_(max=1.0)

    def state_dict(self) -> dict[str, Any]:
        """This rank's moments, groups and masters. It fits this number of ranks and this bucket plan only.

        ``save_checkpoint`` writes what fits any.
        """
        self.settle()
        self.refresh_masters()
        state = super().state_dict()
        state["masters"] = [flat.master.detach() for flat in self._flats]
        state["layout"], state["shard"] = self._layout_key(), shard_of_how_many(self.model)
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave on the same rank of the same layout; parameters follow the masters.

        Collective over the model's ranks. All raise ``ValueError`` where one was given what does not fit it.
        """
        axes = self.model.grids["dense"].axes
        alike(lambda: self._check_loadable(state_dict), axes, self.model.failures, "the check of optimizer states")
        state = self.state
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        loaded, self.state = self.state, state  # slices refer to this one
        state.clear()
        state.update(loaded)
        self._inner.param_groups = self.param_groups
        for flat, master in zip(self._flats, state_dict["masters"], strict=True):
            flat.master.copy_(master)
        self.mark_loaded()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups are made by the constructor; another one is refused."""
        if vars(self).get("_sealed"):
            raise RuntimeError(
                "DistributedOptimizer updates every parameter of its model and takes no further group: give the "
                "constructor param_groups"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "DistributedOptimizer is tied to its model's buckets and is not copied or pickled; use state_dict()"
        )

    _step_supports_amp_scaling = True
    """A scaler leaves unscaling and skipping to ``step``: it sets ``grad_scale`` and ``found_inf``."""

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The class that does the arithmetic."""
        return type(self._inner)

    def _adopt_assigned(self) -> None:
        """``optimizer.state = ...`` and ``optimizer.param_groups = ...``: one list and one state for both."""
        self._inner.param_groups = self.param_groups
        if self.state is not self._inner.state:
            given, self.state = self.state, self._inner.state
            self.state.replace(given)  # type: ignore[attr-defined]

    # ---- One step's parts. ----

    def _passes(self, *, at_once: bool) -> list[list[FlatBucket]]:
        """The buckets of each pass of the inner optimizer: one pass where nothing is to be hidden by another.

        A class that is not torch's may count its steps for all parameters together: it has one pass.
        """
        at_once = at_once or not is_of_torch(self.optimizer_class)
        overlaps = self.model.ddp_config.overlap_param_gather and bool(self._gathers)
        if at_once or (self.model.is_reduced and not overlaps):
            return [self._flats]
        return step_order(self._flats, reduced=self.model.is_reduced, gathers=overlaps)

    def _update(self, flats: Sequence[FlatBucket], divisor: Tensor | None) -> None:
        """One pass over the masters of these buckets: the others have no gradient in it."""
        chosen = {id(flat.params) for flat in flats}
        for segment in self._segments:
            segment.master.grad = segment.grads.to(segment.master.dtype) if id(segment.flat.params) in chosen else None
        found_inf = vars(self).get("found_inf")
        if self._runs_fused():
            self._inner.grad_scale, self._inner.found_inf = divisor, found_inf  # type: ignore[attr-defined]
            prepare_skippable_step(self._inner)
            self._inner.step()
            self._inner.grad_scale = self._inner.found_inf = None  # type: ignore[attr-defined]
        else:  # gradients are divided first, and the host asks once whether to skip
            grads = [segment.master.grad for segment in self._segments if segment.master.grad is not None]
            if divisor is not None and grads:  # with whole parameters this rank may have none
                torch._foreach_div_(grads, divisor)
            if found_inf is None or not found_inf.item():
                prepare_skippable_step(self._inner)
                self._inner.step()
        for segment in self._segments:
            segment.master.grad = None

    def _runs_fused(self) -> bool:
        """Whether the kernel itself divides gradients and skips; groups say it, also those that were loaded."""
        return is_fused(self.optimizer_class) and all(group["fused"] for group in self.param_groups)

    def _grad_divisor(self) -> Tensor | None:
        """What gradients are divided by on the way: the loss scale, and the inverse of the clipping coefficient."""
        scale: Tensor | None = vars(self).get("grad_scale")
        if self.max_grad_norm is None:
            return scale
        self.grad_norm = global_grad_norm(self.model)
        if scale is not None:
            self.grad_norm = self.grad_norm / scale
        inverse = clip_coefficient(self.grad_norm, self.max_grad_norm).reciprocal().float()
        return inverse if scale is None else inverse * scale

    def _round(self, flats: Sequence[FlatBucket]) -> None:
        """Round masters into this rank's shard of the parameters."""
        rounded = [flat for flat in flats if flat.master.data_ptr() != flat.owned_params.data_ptr()]
        if rounded:
            torch._foreach_copy_([flat.owned_params for flat in rounded], [flat.master for flat in rounded])

    def _start_gathers(self, gathers: Sequence[ParamGather]) -> None:
        for gather in gathers:
            gather.start(self._stream, self.model.observer)

    def _let_parameters_wait(self) -> None:
        """From here on whoever reads a parameter waits for its gather; without overlap everybody waits now."""
        if not self.model.ddp_config.overlap_param_gather:
            self.finish_param_sync()
            return
        modules = modules_below(self.model.module)
        wait_before_compiled_code(modules, self._gathers)
        guard_reads(modules, self._gathers, self._keepers, self._threads)

    def _layout_key(self) -> str:
        return layout_key(self.optimizer_class, self.model.plan, self._segments)

    def _check_loadable(self, state_dict: Mapping[str, Any]) -> None:
        self.settle()
        lengths = {"state": None, "param_groups": len(self.param_groups), "masters": len(self._flats)}
        check_fits(state_dict, self._layout_key(), shard_of_how_many(self.model), lengths)

    def _check_in_charge(self) -> None:
        if self.model.wired[0].record.updater is not self._in_charge:
            raise RuntimeError(
                "this DistributedOptimizer was replaced: another one was built over its model, and has the parameters "
                "and their masters in memory of its own; step, save and load that one alone"
            )

    def _check_storage(self) -> None:
        for piece in self.slices:
            param = piece.wired.owned.param
            with DisableTorchFunctionSubclass():  # no value is read: whoever needs them has waited
                address = param.data_ptr()
            if address != piece.view.data_ptr():
                raise RuntimeError(
                    f"parameter '{piece.name}' was given other storage (.to(), .data = ...) after the optimizer was "
                    f"built: updates would not reach it; move the model before wrapping it"
                )
