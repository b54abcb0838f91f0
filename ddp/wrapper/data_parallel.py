"""``DistributedDataParallel``: gradient buckets under any model, reduced while backward still runs.

The way of a gradient: a module's backward writes ``main_grad``, or autograd leaves ``.grad`` and the hook
(``buckets/readiness.py``) moves it there (``contract/main_grad.py``). In the final microbatch the hook marks the
parameter ready (``buckets/bucket.py``). A ready bucket is launched in its turn (``buckets/launcher.py``,
``collectives/reduction.py``). ``finish_grad_sync`` waits for all buckets. docs/architecture.md tells all of it.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..buckets.bucket import Bucket, Phase, check_nothing_under_way
from ..buckets.checks import (
    check_nothing_bypassed,
    check_nothing_pending,
    check_scalable,
    check_whole,
    is_frozen,
)
from ..buckets.iteration_ends import end_iteration
from ..buckets.launcher import BucketLauncher
from ..buckets.model_watch import ModelWatch
from ..buckets.nan_check import NanCheck
from ..buckets.readiness import Readiness
from ..buckets.replicas import Replicas
from ..buckets.wiring import allocate_buckets
from ..collectives.failure_report import FailureReporter
from ..collectives.rank_grid import RankGrid
from ..collectives.reduction import GradReduction, make_reductions
from ..collectives.step_check import StepCheck
from ..collectives.timeline import Observer, Timeline, recorded_on
from ..collectives.world import Ranks
from ..config import DistributedDataParallelConfig
from ..contract.record import GradRecord
from ..gathers.param_gather import ParamGather
from ..plan.layout import BucketLayout
from ..plan.owned_params import find_owned_params, find_tensors
from ..stock.master_param import WatchedMasters
from ..stock.optimizer import expose_grad
from ..torch_internals import check_wrappers_can_run
from .around_module import AroundModule
from .attachment import attach_params, detach_params, discard_grads
from .comparison import check_same_config, check_same_model
from .init_sync import broadcast_tensors
from .parts import BucketParts
from .per_token import check_num_tokens, divide_by_tokens
from .setup_checks import grids_of, plan_on_each_rank
from .whose_experts import check_whose_experts

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(AroundModule):
    """Data parallelism over contiguous gradient buckets, with Megatron-core's method names.

    ``main_grad`` of every trainable parameter is a view of a bucket, in which the gradients of all microbatches are
    summed. Backwards under ``no_sync`` only add. In the last microbatch each bucket's collective is launched as soon as
    the bucket's gradients are complete (``overlap_grad_reduce``). One iteration is::

        with model.no_sync():
            for microbatch in microbatches[:-1]: (loss(model, microbatch) / n).backward()
        (loss(model, microbatches[-1]) / n).backward()
        model.finish_grad_sync()      # main_grad holds the average over ranks (of this rank's shard, where sharded)
        optimizer.step()
        model.zero_grad_buffer()

    module                the model, on its final device and in its final dtype; frozen parameters get no accumulator
    config                see ``DistributedDataParallelConfig``
    process_group         ranks to reduce over: a group; a DeviceMesh of one dim; a DeviceMesh of two dims (outer,
                          inner) with shards inside, replicas across; ``WORLD_OF_ONE``: this process alone. None: the
                          default group, or a world of one where no launcher has started several ranks
    expert_process_group  the ranks that hold the same experts: ``WORLD_OF_ONE`` where each rank has its own. Experts
                          are parameters and buffers with Megatron-core's mark ``param.allreduce = False``, frozen ones
                          too. None: the ranks of ``process_group``, which must hold the same experts then
    backward_order        names of the trainable parameters in the order of backward, where that is not the reverse of
                          registration: ``recorded_backward_order`` finds it
    init_sync             copy the first rank's parameters and buffers to all ranks, as PyTorch's DDP does

    Gradients are averaged over the ranks of ``process_group``. Those of experts are too: an expert gets tokens of all
    these ranks. With ``calculate_per_token_loss`` gradients are summed, and divided by the tokens of all ranks.
    Attributes that the wrapper lacks are the module's: see ``AroundModule``. ``ddp_config`` is the wrapper's own.

    Raises ``ValueError`` at construction for settings that cannot take effect, where the model differs between ranks,
    and where a launcher has started several ranks and there is no process group.
    """

    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig | None = None,
        *,
        process_group: Ranks = None,
        expert_process_group: Ranks = None,
        backward_order: Sequence[str] | None = None,
        init_sync: bool = True,
    ) -> None:
        check_wrappers_can_run()
        super().__init__()
        self.module = module
        self.ddp_config = config = config or DistributedDataParallelConfig()
        tensors = find_tensors(module)
        trainable = [entry for entry in find_owned_params(module) if entry.param.requires_grad]
        self.failures = failures = FailureReporter()
        with failures.watch("the comparison of configs between ranks"):
            check_same_config(config, process_group)
        self.grids: dict[str, RankGrid] = grids_of(config, process_group, expert_process_group, tensors, failures)
        """By name, "dense" or "expert": the ranks that such parameters are reduced over."""
        failures.grids = self.grids.values()

        # The plan: which gradients there are, and where each will lie.
        overwritten = tensors if init_sync else [each for each in tensors if each.trained]
        self.device, self.plan = plan_on_each_rank(
            module, trainable, overwritten, config, self.grids, backward_order, failures
        )
        with failures.watch("the comparison of models between ranks"):
            check_same_model(self.plan, overwritten, self.grids)
            check_whose_experts(overwritten, self.grids["dense"], process_group, expert_process_group)
            failures.remember_rank_0()

        # Storage, and the collectives over it.
        self.buckets, self.wired = allocate_buckets(self.plan, trainable, self.device)
        """Trainable parameters with their buckets and records, in the order of the buffers."""
        self.records: tuple[GradRecord, ...] = tuple(wired.record for wired in self.wired)
        self._zeroed_views = [view for bucket in self.buckets for view in bucket.zeroed_views()]
        self.reductions: dict[str, GradReduction] = make_reductions(config, self.grids, self.device)
        dense = self.reductions["dense"]
        self._nan_check = NanCheck(self.buckets, self.device, dense) if config.check_for_nan_in_grad else None
        reductions = [self.reductions[bucket.layout.grid_name] for bucket in self.buckets]
        self._launcher = BucketLauncher(self.buckets, reductions, self._nan_check, failures, device=self.device)
        self.steps = StepCheck(self.grids["dense"], failures, self.device, self._launcher.stream)
        self._replicas = Replicas(module, self.grids, failures, config)
        self._gathers: Sequence[ParamGather] = ()
        self._masters: weakref.ref[WatchedMasters] | None = None

        # State of the iteration.
        self.iteration = 0
        """Number of iterations begun; ``zero_grad_buffer`` begins one."""
        self._launched = False  # True from the first launch outside a hook until zero_grad_buffer
        self._finished = False  # True from finish_grad_sync until zero_grad_buffer

        # Hooks and accumulators on the parameters, and the first rank's values in them.
        self._watch = ModelWatch(self.wired, module)
        self.readiness = Readiness(self.wired, self._launcher, config, self.device, self.steps, self._watch)
        hooks = self.readiness.listen()
        self._attachment = attach_params(self, self.wired, hooks, self.grids)
        self.grad_parts = BucketParts(self)
        self._end_making()
        if init_sync:
            broadcast_tensors(tensors, self.grids, failures)

    # ---- Methods of one iteration, in the order in which a program calls them. ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        observer = self.observer  # a recording may begin or end in the forward
        observer.forward_started()
        try:
            return self._forward(*args, **kwargs)
        finally:
            observer.forward_ended()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block only accumulate. For every microbatch of an iteration but the last."""
        before, self.readiness.sync = self.readiness.sync, False
        try:
            yield
        finally:
            self.readiness.sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """False inside ``no_sync``; PyTorch's DDP has the same attribute."""
        return self.readiness.sync

    def start_grad_sync(self) -> None:
        """Launch every bucket that is not launched yet, in the plan's order; returns at once.

        Raises ``RuntimeError`` while delayed weight gradients are pending, and where a program has put a gradient into
        ``.grad`` by hand: the reduction would lack both.
        """
        self.check_in_use("start_grad_sync()")
        self.check_not_in_torch_ddp()
        self._watch.check_sync()
        check_nothing_pending(self.records, "start_grad_sync()")
        self._launched = True  # before the next check may raise: zero_grad_buffer must clear gradients then too
        check_nothing_bypassed([(each.owned.param, each.record) for each in self.wired], "start_grad_sync()")
        self._launcher.launch_rest()
        self.steps.start()

    @torch.no_grad()
    def finish_grad_sync(self, num_tokens: Tensor | int | None = None, *, force_all_reduce: bool = False) -> None:
        """``start_grad_sync``, and wait: then ``main_grad`` holds the reduced gradients.

        num_tokens        with ``calculate_per_token_loss``: this rank's tokens in this iteration, a number or a tensor
                          of one element, which the host does not read. Ranks may differ in tokens and in microbatches
        force_all_reduce  Megatron-core's; True is refused where gradients are sharded

        Unused parameters have the gradient zero. Raises ``RuntimeError`` when called twice in an iteration, and
        ``FloatingPointError`` on all ranks where ``check_for_nan_in_grad`` finds NaN or Inf.
        """
        check_num_tokens(num_tokens, wanted=self.ddp_config.calculate_per_token_loss)
        if self._finished:
            raise RuntimeError(
                "finish_grad_sync() was called twice in one iteration: gradients are reduced already; call "
                "zero_grad_buffer() after optimizer.step()"
            )
        if force_all_reduce:
            check_whole(self.ddp_config, "finish_grad_sync(force_all_reduce=True)")
        self.start_grad_sync()
        self._launcher.wait()
        self.steps.finish()
        if self._nan_check is not None:
            with self.failures.watch("the search for NaN and Inf"):
                self._nan_check.raise_where_found(self.grids["dense"])
        if num_tokens is not None:
            with self.failures.watch("the sum of tokens"):
                divide_by_tokens(self.reduced_grads(), num_tokens, self.grids["dense"], self.device)
        self._finish()

    @property
    def is_clear(self) -> bool:
        """Whether no bucket holds a gradient of this iteration so far."""
        return not self._launched and all(bucket.is_clear for bucket in self.buckets)

    def wait_for_buckets(self, buckets: Iterable[Bucket]) -> None:
        """After ``start_grad_sync``: wait for some buckets. After the last bucket, ``finish_grad_sync`` is done.

        ``DistributedOptimizer.step`` so updates buckets while others are reduced, if ``ddp_config.can_wait_by_bucket``.
        """
        self.steps.finish()
        for bucket in buckets:
            self._launcher.wait_for(bucket)
        if not self._finished and all(bucket.phase is Phase.REDUCED for bucket in self.buckets):
            self._finish()

    def _finish(self) -> None:
        self._replicas.end_iteration()
        end_iteration(self.module, self.grids["dense"], self.failures, self.readiness.trained)
        self._finished = True

    @property
    def is_reduced(self) -> bool:
        """Whether all gradients of this iteration are reduced."""
        return self._finished

    def zero_grad_buffer(self) -> None:
        """Start a new iteration: discard all gradients.

        Accumulators that only our fused modules write are not zeroed, as their first GEMM overwrites. All others are.
        """
        if self.is_clear:
            for record in self.records:
                record.clear_touched()
            return
        check_nothing_pending(self.records, "zero_grad_buffer()", gives_up=True)
        check_nothing_under_way(self.buckets)
        self.steps.next_iteration()
        if self._zeroed_views:
            torch._foreach_zero_(self._zeroed_views)
        for bucket in self.buckets:  # after the zeroing, which raises versions
            bucket.reset()
        discard_grads(self.wired, self.module if self._finished else None)
        self._launcher.reset()
        self.readiness.reset()
        self._launched = self._finished = False
        self.iteration += 1

    def abandon_iteration(self) -> None:
        """``zero_grad_buffer`` after a backward that failed. Collective: launched buckets are reduced first."""
        check_nothing_pending(self.records, "abandon_iteration()")
        self.steps.note_given_up()
        if self.ddp_config.overlap_grad_reduce:
            self._launcher.launch_rest()
            self.steps.start()  # other ranks may have come to finish_grad_sync()
        self._launcher.wait()
        self.zero_grad_buffer()

    def note_replay(self) -> None:
        """A captured iteration was replayed: what its Python would have left."""
        self.iteration += 1
        for record in self.records if self.device.type == "cpu" else ():  # replays run operations, and raise versions
            record.note_version()

    def forget_iteration(self) -> None:
        """``zero_grad_buffer`` after a capture that failed: what it launched has not run."""
        self._launcher.forget()
        self.zero_grad_buffer()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """``zero_grad_buffer``: clearing ``.grad`` alone would leave the gradients in ``main_grad``."""
        self.zero_grad_buffer()

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply every gradient by ``factor``, a number or a 0-dim tensor on the model's device."""
        check_scalable(self.wired, "scale_gradients()")
        torch._foreach_mul_([bucket.grad_data for bucket in self.buckets], factor)

    def broadcast_params(self) -> None:
        """Copy the first rank's parameters and buffers to all other ranks; experts among ranks that hold the same."""
        broadcast_tensors(find_tensors(self.module), self.grids, self.failures)
        self.steps.forget()

    def expose_grads(self, dtype: torch.dtype | None = None) -> None:
        """Set ``.grad`` to the reduced gradients, for stock optimizers and ``clip_grad_norm_``.

        dtype  dtype of ``.grad``; None: each parameter's dtype, which every optimizer takes. Where this is
               ``main_grad``'s dtype (fp32 parameters, or ``torch.float32`` under bf16 ones) nothing is copied

        Raises ``RuntimeError`` before ``finish_grad_sync``, and where gradients are sharded.
        """
        self.check_reduced("expose_grads()")
        check_whole(self.ddp_config, "expose_grads()")
        for wired in self.wired:
            expose_grad(wired.owned.param, wired.record, dtype or wired.dtype)

    @contextmanager
    def record_timeline(self) -> Iterator[Timeline]:
        """Record the times of forwards, backwards, reductions and gathers in this block. Read them after the block."""
        with recorded_on(self._launcher, self.device, self.grids.values()) as timeline:
            yield timeline

    def check_started(self, caller: str) -> None:
        """Raise ``RuntimeError`` before ``start_grad_sync``: the iteration may have more backwards."""
        if not self._launched:
            raise RuntimeError(f"{caller} before finish_grad_sync() or start_grad_sync(): nothing is reduced yet")

    def check_reduced(self, caller: str) -> None:
        """Raise ``RuntimeError`` unless every bucket of this iteration is reduced."""
        if not self._finished:
            raise RuntimeError(f"{caller} before finish_grad_sync(): this iteration's gradients are not reduced yet")

    def owned_range(self, layout: BucketLayout) -> tuple[int, int]:
        """[start, end) of the bucket's elements whose sum this rank gets: its shard, or all elements."""
        return self.reductions[layout.grid_name].owned_range(layout.numel)

    def reduced_grads(self, grid_name: str | None = None) -> list[Tensor]:
        """``owned_range`` of each bucket, as views that hold reduced gradients after ``finish_grad_sync``.

        grid_name  "dense" or "expert": only buckets that are reduced over these ranks; None: all
        """
        wanted = [bucket for bucket in self.buckets if grid_name in (None, bucket.layout.grid_name)]
        return [bucket.grad_data[slice(*self.owned_range(bucket.layout))] for bucket in wanted]

    @property
    def observer(self) -> Observer:
        """The observer that forwards, backwards, reductions and gathers report to."""
        return self._launcher.observer

    def follow(self, gathers: Sequence[ParamGather], masters: WatchedMasters) -> None:
        """By ``DistributedOptimizer``: compiled forwards wait for ``gathers``, every forward checks ``masters``."""
        self._gathers, self._masters = gathers, weakref.ref(masters)

    def unwrap(self) -> nn.Module:
        """Give the plain module back. Gradients of the running iteration are lost.

        Without ``unwrap``, a module whose wrapper was freed refuses to train among several ranks.
        Raises ``RuntimeError`` while buckets are being reduced, or delayed weight gradients are pending.
        """
        self.zero_grad_buffer()
        self._finish_gathers()
        detach_params(self._attachment)
        return self.module

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            self._finish_gathers()  # compiled code has guards on plain parameters
        elif self._masters is not None and (masters := self._masters()) is not None:
            masters.check()
        if not torch.is_grad_enabled() or is_frozen(self.wired):
            return self._replicas.run(self.module, args, kwargs)
        self.check_before_forward()
        outputs = self._replicas.run(self.module, args, kwargs)
        self.readiness.watch(outputs, trains=self.module.training)
        return outputs

    @torch.compiler.disable
    def _finish_gathers(self) -> None:
        for gather in self._gathers:
            gather.settle()

    @torch.compiler.disable
    def check_before_forward(self) -> None:
        """The checks of a forward that builds a graph."""
        self.check_in_use("forward")
        self.check_not_in_torch_ddp()
        self._watch.check_forward()

    def check_in_use(self, caller: str) -> None:
        """Raise ``RuntimeError`` after ``unwrap``, and where ranks came after a world of one."""
        if not self._attachment.alive:
            raise RuntimeError(f"{caller} after unwrap(): this wrapper reduces nothing any more; wrap the module again")
        self.grids["dense"].check_still_alone("this DistributedDataParallel")
