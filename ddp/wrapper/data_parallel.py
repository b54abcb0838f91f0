"""``DistributedDataParallel``: gradient buckets under any model, reduced while backward still runs.

Follow a gradient: a module's backward writes ``main_grad``, or autograd leaves ``.grad`` and the hook below moves it
there (``main_grad.py``); in the final microbatch the hook marks the parameter ready (``bucket.py``); a full bucket
whose turn has come is launched (``launcher.py``, ``collectives.py``); ``finish_grad_sync`` waits for all of them.
"""

import copy
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
    check_wiring,
    is_frozen,
)
from ..buckets.launcher import BucketLauncher
from ..buckets.nan_check import NanCheck
from ..buckets.readiness import Readiness
from ..buckets.wiring import WiredParam, allocate_buckets
from ..collectives.failure_report import FailureReporter
from ..collectives.observer import Observer
from ..collectives.rank_grid import RankGrid, all_groups, make_grids
from ..collectives.reduction import GradReduction, make_reductions
from ..collectives.timeline import Timeline, recorded_on
from ..collectives.world import Ranks
from ..config import DistributedDataParallelConfig
from ..contract.record import GradRecord
from ..contract.torch_ddp import check_not_collected, check_not_inside
from ..gathers.param_gather import ParamGather
from ..plan.layout import BucketLayout
from ..plan.owned_params import find_owned_params
from ..stock.master_param import WatchedMasters
from ..stock.optimizer import expose_grad
from .around_module import AroundModule
from .attachment import attach_params, detach_params, discard_grads
from .init_sync import broadcast_model, check_whose_experts, has_experts
from .parts import BucketParts
from .per_token import check_num_tokens, divide_by_tokens
from .setup_checks import check_same_config, check_same_on_all_ranks, plan_on_each_rank

__all__ = ["DistributedDataParallel"]
_OURS = "a model in maingrad.ddp.DistributedDataParallel"


class DistributedDataParallel(AroundModule):
    """Data parallelism over contiguous gradient buckets, with Megatron-core's verbs.

    ``main_grad`` of every trainable parameter is a view of a bucket. Gradients of any number of microbatches accumulate
    there; those under ``no_sync`` stay local, and in the last one each bucket's collective is launched as soon as its
    gradients are complete (``overlap_grad_reduce``). One iteration is::

        with model.no_sync():
            for microbatch in microbatches[:-1]: (loss(model, microbatch) / n).backward()
        (loss(model, microbatches[-1]) / n).backward()
        model.finish_grad_sync()      # main_grad holds the average over ranks (of this rank's shard, where sharded)
        optimizer.step()
        model.zero_grad_buffer()

    module                the model, on its final device and in its final dtype; frozen parameters stay plain
    config                see ``DistributedDataParallelConfig``
    process_group         ranks to reduce over: a group, or a DeviceMesh of one dim, or of two: (outer, inner), shards
                          inside, replicas across; ``WORLD_OF_ONE``: this process alone. None: the default group, or a
                          world of one where no launcher has started several ranks
    expert_process_group  the same for experts' parameters and buffers, frozen ones too, which Megatron-core marks
                          ``param.allreduce = False``: the ranks that hold the same experts, ``WORLD_OF_ONE`` where each
                          has its own. None: those of ``process_group``, which must hold the same then
    backward_order        names of the trainable parameters as backward reaches them, where that is not the reverse of
                          their registration: ``recorded_backward_order`` finds out
    init_sync             copy the first rank's parameters and buffers to all ranks, as PyTorch's DDP does

    Gradients are averaged over the ranks of ``process_group``, those of experts too: an expert has seen the tokens of
    all of them. With ``calculate_per_token_loss`` they are summed, and divided by all ranks' tokens.
    What else the module has (``config``, say; ours is ``ddp_config``) is reached through it: ``AroundModule``.

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
        super().__init__()
        self.module = module
        self.ddp_config = config = config or DistributedDataParallelConfig()
        trainable = [entry for entry in find_owned_params(module) if entry.param.requires_grad]
        self.failures = FailureReporter()
        with self.failures.watch("the comparison of configs between ranks"):
            check_same_config(config, process_group)
        with self.failures.watch("the making of process groups"):
            self.grids: dict[str, RankGrid] = make_grids(
                process_group,
                expert_process_group,
                has_experts=has_experts(module),
                num_instances=config.num_distributed_optimizer_instances,
                separate_gather=config.overlap_param_gather,
                copy_engines=config.copy_engine_param_gather,
            )
        """By name, "dense" or "expert": the ranks that such parameters are reduced over."""
        self.failures.groups = all_groups(self.grids.values())

        # What there is to reduce, and where it will lie.
        planned = plan_on_each_rank(module, trainable, config, self.grids, backward_order, self.failures)
        self.device, self.plan = planned
        with self.failures.watch("the comparison of models between ranks"):
            check_same_on_all_ranks(self.plan, self.grids, module if init_sync else None)
            check_whose_experts(module, trainable, self.grids["dense"], expert_process_group, init_sync=init_sync)
            self.failures.look_around()

        # Storage, and the collectives over it.
        buckets, self._wired = allocate_buckets(self.plan, trainable, self.device)
        self.buckets: tuple[Bucket, ...] = tuple(buckets)
        self.records: tuple[GradRecord, ...] = tuple(wired.record for wired in self._wired)
        self._zeroed_views = [record.view for record in self.records if not record.first_write_overwrites]
        # Nobody writes padding, but what multiplies whole buckets by NaN (clipping) would leave it there for ever.
        self._zeroed_views += [view for bucket in self.buckets for view in bucket.padding_views()]
        self.reductions: dict[str, GradReduction] = make_reductions(config, self.grids, self.device)
        dense = self.reductions["dense"]
        self._nan_check = NanCheck(self.buckets, self.device, dense) if config.check_for_nan_in_grad else None
        reductions = [self.reductions[bucket.layout.grid_name] for bucket in self.buckets]
        self._launcher = BucketLauncher(self.buckets, reductions, self._nan_check, self.failures, device=self.device)
        self._gathers: Sequence[ParamGather] = ()
        self._masters: weakref.ref[WatchedMasters] | None = None

        self.readiness = Readiness(self._wired, self._launcher, config, self.device)

        # State of the iteration.
        self.iteration = 0
        """How many have begun: ``zero_grad_buffer`` begins one."""
        self._checked = False  # True once this iteration's first forward has checked the wiring
        self._launched = False  # True from the first launch outside a hook until zero_grad_buffer
        self._finished = False  # True from finish_grad_sync until zero_grad_buffer

        self._attachment = attach_params(self, self._wired, self.readiness, self.grids)
        self.grad_parts = BucketParts(self)
        self._end_making()
        if init_sync:
            self.broadcast_params()

    # ---- The user's verbs. ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        observer = self.observer
        observer.forward_started()
        try:
            return self._forward(*args, **kwargs)
        finally:
            observer.forward_ended()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only accumulate: every microbatch of an iteration but the last."""
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
        """Launch every bucket that was not launched yet, in the plan's order; returns at once.

        Raises ``RuntimeError`` while delayed weight gradients are pending: they would come after the reduction; and
        where somebody has put a gradient into ``.grad`` by hand: it would be missing from the reduction.
        """
        self._check_in_use("start_grad_sync()")
        if is_frozen(self._wired):
            self._wired[0].check()
        self.check_before_forward()  # where the forward was a method of the module's own
        check_nothing_pending(self.records, "start_grad_sync()")
        self._launched = True  # also where the next check fails: zero_grad_buffer has something to clear then
        check_nothing_bypassed([(each.owned.param, each.record) for each in self._wired], "start_grad_sync()")
        self._launcher.launch_rest()

    @torch.no_grad()
    def finish_grad_sync(self, num_tokens: Tensor | int | None = None) -> None:
        """Launch what is missing and wait: then ``main_grad`` holds the reduced gradients.

        num_tokens  with ``calculate_per_token_loss``: the tokens of this rank in this iteration, a number or a tensor
                    of one element on the model's device, which the host does not read. Ranks may differ, in their
                    numbers of microbatches too

        Unused parameters have the gradient zero. Raises ``RuntimeError`` when called twice in an iteration, and
        ``FloatingPointError`` on all ranks where ``check_for_nan_in_grad`` finds something.
        """
        check_num_tokens(num_tokens, wanted=self.ddp_config.calculate_per_token_loss)
        if self._finished:
            raise RuntimeError(
                "finish_grad_sync() was called twice in one iteration: gradients are reduced already; call "
                "zero_grad_buffer() after optimizer.step()"
            )
        self.start_grad_sync()
        self._launcher.wait()
        if self._nan_check is not None:
            with self.failures.watch("the search for NaN and Inf"):
                self._nan_check.raise_where_found(self.grids["dense"])
        if num_tokens is not None:
            with self.failures.watch("the sum of tokens"):
                divide_by_tokens(self.reduced_grads(), num_tokens, self.grids["dense"], self.device)
        self._finished = True

    @property
    def is_clear(self) -> bool:
        """Whether this iteration has left nothing in any bucket so far."""
        return not self._launched and all(bucket.is_clear for bucket in self.buckets)

    def wait_for_buckets(self, buckets: Iterable[Bucket]) -> None:
        """After ``start_grad_sync``: wait for some of them; with the last one ``finish_grad_sync`` is done.

        ``DistributedOptimizer.step`` updates what has arrived while the rest is under way. Of no use to what needs all
        gradients at once (``ddp_config.can_wait_by_bucket``).
        """
        for bucket in buckets:
            self._launcher.wait_for(bucket)
        self._finished = all(bucket.phase is Phase.REDUCED for bucket in self.buckets)

    @property
    def is_reduced(self) -> bool:
        """Whether ``finish_grad_sync`` is done with this iteration."""
        return self._finished

    def zero_grad_buffer(self) -> None:
        """Start a new iteration: no gradient is in any bucket.

        Memory that only our modules write is not cleared (their first GEMM overwrites it); the rest is zeroed.
        """
        if self.is_clear:
            return
        check_nothing_pending(self.records, "zero_grad_buffer()", gives_up=True)
        check_nothing_under_way(self.buckets)
        for bucket in self.buckets:
            bucket.reset()
        discard_grads(self._wired)
        if self._zeroed_views:
            torch._foreach_zero_(self._zeroed_views)
        self._launcher.reset()
        self.readiness.reset()
        self._launched = self._checked = self._finished = False
        self.iteration += 1

    def abandon_iteration(self) -> None:
        """``zero_grad_buffer`` after a backward that failed; on all ranks: what one has launched is reduced first."""
        check_nothing_pending(self.records, "abandon_iteration()")
        if self.ddp_config.overlap_grad_reduce:
            self._launcher.launch_rest()
        self._launcher.wait()
        self.zero_grad_buffer()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """``zero_grad_buffer``: clearing ``.grad`` alone would leave the gradients where they are."""
        self.zero_grad_buffer()

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply every gradient by ``factor``, a number or a 0-dim tensor on the model's device."""
        check_scalable(self._wired, "scale_gradients()")
        torch._foreach_mul_([bucket.grad_data for bucket in self.buckets], factor)

    def broadcast_params(self) -> None:
        """Copy the first rank's parameters and buffers to all others, experts among those that have the same."""
        with self.failures.watch("the broadcast of parameters and buffers"):
            broadcast_model(self.module, self.grids)

    def expose_grads(self, dtype: torch.dtype | None = None) -> None:
        """Hand the gradients to stock optimizers and ``clip_grad_norm_`` as ``.grad``, after ``finish_grad_sync``.

        dtype  dtype of ``.grad``; None: each parameter's own, which every optimizer takes. Where it is ``main_grad``'s
               dtype (fp32 parameters, or ``torch.float32`` under bf16 ones) ``.grad`` is ``main_grad``, without a copy
        """
        self.check_reduced("expose_grads()")
        check_whole(self.ddp_config)
        for wired in self._wired:
            expose_grad(wired.owned.param, wired.record, dtype or wired.dtype)

    @contextmanager
    def record_timeline(self) -> Iterator[Timeline]:
        """Record when forwards and backwards ran, when each bucket was ready, launched and finished, and when its
        parameters were gathered; read it after the block."""
        with recorded_on(self._launcher, self.device, self.grids.values()) as timeline:
            yield timeline

    def check_started(self, caller: str) -> None:
        """Raise unless ``start_grad_sync`` has launched what was left: the iteration's backwards are over."""
        if not self._launched:
            raise RuntimeError(f"{caller} before finish_grad_sync() or start_grad_sync(): nothing is reduced yet")

    def check_reduced(self, caller: str) -> None:
        """Raise unless every bucket of this iteration is reduced."""
        if not self._finished:
            raise RuntimeError(f"{caller} before finish_grad_sync(): this iteration's gradients are not reduced yet")

    def owned_range(self, layout: BucketLayout) -> tuple[int, int]:
        """[start, end) of the bucket's elements that this rank reduces and updates: its shard, or all of them."""
        return self.reductions[layout.grid_name].owned_range(layout.numel)

    def reduced_grads(self, grid_name: str | None = None) -> list[Tensor]:
        """The part of each bucket that this rank may read after ``finish_grad_sync``.

        grid_name  "dense" or "expert": only buckets that are reduced over these ranks; None: all
        """
        return [
            bucket.grad_data[slice(*self.owned_range(bucket.layout))]
            for bucket in self.buckets
            if grid_name in (None, bucket.layout.grid_name)
        ]

    @property
    def observer(self) -> Observer:
        """Who is told what this iteration does."""
        return self._launcher.observer

    def follow(self, gathers: Sequence[ParamGather], masters: WatchedMasters) -> None:
        """Have compiled forwards wait for ``gathers``, and all refuse parameters that are behind their ``masters``."""
        self._gathers, self._masters = gathers, weakref.ref(masters)

    @property
    def wired(self) -> Sequence[WiredParam]:
        """Every trainable parameter with its bucket and record, in the order of the buffers."""
        return self._wired

    def unwrap(self) -> nn.Module:
        """Give the plain module back. Gradients of an iteration that has begun are lost.

        A module whose wrapper is let go without it refuses to train among several ranks, which would part unnoticed.
        Raises ``RuntimeError`` while buckets are under way, or delayed weight gradients pending.
        """
        self.zero_grad_buffer()
        self._finish_gathers()
        detach_params(self._attachment)
        return self.module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As any module's. Raises ``ValueError`` where torch's own wrapper asks."""
        check_not_collected((wired.owned.param for wired in self._wired), _OURS)
        return super().named_parameters(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A plain, unwrapped copy of the model: buckets and hooks stay with the original."""
        return copy.deepcopy(self.module, memo)

    # ---- Wiring. ----

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            self._finish_gathers()  # compiled code is guarded by what parameters are when nothing is under way
        elif self._masters is not None and (masters := self._masters()) is not None:
            masters.check()
        if not torch.is_grad_enabled() or is_frozen(self._wired):
            return self.module(*args, **kwargs)
        self.check_before_forward()
        outputs = self.module(*args, **kwargs)
        self._after_forward(outputs)
        return outputs

    @torch.compiler.disable
    def _finish_gathers(self) -> None:
        for gather in self._gathers:
            gather.settle()

    @torch.compiler.disable
    def check_before_forward(self) -> None:
        """What the iteration's first forward checks."""
        if self._checked:
            return
        self._check_in_use("forward")
        check_not_inside((wired.owned.param for wired in self._wired), _OURS)
        check_wiring(self._wired, self.module)
        self._checked = True

    def _check_in_use(self, caller: str) -> None:
        if not self._attachment.alive:
            raise RuntimeError(f"{caller} after unwrap(): this wrapper reduces nothing any more; wrap the module again")
        self.grids["dense"].check_still_alone("this DistributedDataParallel")

    @torch.compiler.disable
    def _after_forward(self, outputs: Any) -> None:
        self.readiness.watch(outputs)
