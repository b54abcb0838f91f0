"""``DistributedDataParallel``: gradient buckets under any model, reduced while backward still runs.

Follow a gradient: a module's backward writes ``main_grad``, or autograd leaves ``.grad`` and the hook below moves it
there (``main_grad.py``); in the final microbatch the hook marks the parameter ready (``bucket.py``); a full bucket
whose turn has come is launched (``launcher.py``, ``collectives.py``); ``finish_grad_sync`` waits for all of them.
"""

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .bucket import Bucket, Phase
from .collectives import group_or_default, group_rank, group_size
from .config import DistributedDataParallelConfig
from .grad_record import GradRecord
from .launcher import BucketLauncher
from .layout import BucketLayout
from .main_grad import (
    attach,
    check_unattached,
    detach,
    forget_failed_backward,
    record_of,
)
from .readiness import Readiness
from .stock_optimizer import clear_exposed_grad, expose_grad, guard_stock_optimizers
from .timeline import Timeline
from .wiring import WiredParam, allocate_buckets, check_same_on_all_ranks, check_setup, find_owned_params, plan_model

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.Module):
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

    module          the model, on its final device and in its final dtype; frozen parameters stay plain
    config          see ``DistributedDataParallelConfig``
    process_group   ranks to reduce over; None: the default group, or a world of one without ``torch.distributed``
    backward_order  names of the trainable parameters as backward reaches them, where that is not the reverse of their
                    registration: ``recorded_backward_order`` finds out
    init_sync       copy rank 0's parameters and buffers to all ranks, as PyTorch's DDP does

    Raises ``ValueError`` at construction for settings that cannot take effect, and where the model differs between
    ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        backward_order: Sequence[str] | None = None,
        init_sync: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config = config or DistributedDataParallelConfig()
        self.process_group = process_group = group_or_default(process_group)

        # What there is to reduce, and where it will lie.
        trainable = [entry for entry in find_owned_params(module) if entry.param.requires_grad]
        self.device = check_setup(trainable, config, process_group)
        self.plan = plan_model(trainable, config, shard_degree=group_size(process_group), backward_order=backward_order)
        check_same_on_all_ranks(self.plan, process_group, module if init_sync else None)

        # Storage, and the collectives over it.
        buckets, self._wired = allocate_buckets(self.plan, trainable, self.device)
        self.buckets: tuple[Bucket, ...] = tuple(buckets)
        self.records: tuple[GradRecord, ...] = tuple(wired.record for wired in self._wired)
        self._zeroed_views = [record.view for record in self.records if not record.first_write_overwrites]
        self._launcher = BucketLauncher(
            self.buckets,
            process_group,
            sharded=config.use_distributed_optimizer,
            average_in_collective=config.average_in_collective,
            device=self.device,
        )

        self._readiness = Readiness(self._wired, self._launcher, config, self.device)

        # State of the iteration.
        self._checked = False  # True once this iteration's first forward has checked the wiring
        self._launched = False  # True from the first launch outside a hook until zero_grad_buffer
        self._finished = False  # True from finish_grad_sync until zero_grad_buffer

        self._attach()
        if init_sync:
            self.broadcast_params()

    # ---- The user's verbs. ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        self._before_forward()
        outputs = self.module(*args, **kwargs)
        self._after_forward(outputs)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only accumulate: every microbatch of an iteration but the last."""
        before, self._readiness.sync = self._readiness.sync, False
        try:
            yield
        finally:
            self._readiness.sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """False inside ``no_sync``; PyTorch's DDP has the same attribute."""
        return self._readiness.sync

    def start_grad_sync(self) -> None:
        """Launch every bucket that was not launched yet, in the plan's order; returns at once.

        Raises ``RuntimeError`` while delayed weight gradients are pending: they would come after the reduction; and
        where somebody has put a gradient into ``.grad`` by hand: it would be missing from the reduction.
        """
        self._check_nothing_pending("start_grad_sync()")
        self._launched = True  # also where the next check fails: zero_grad_buffer has something to clear then
        self._check_nothing_bypassed("start_grad_sync()")
        self._launcher.launch_rest()

    def finish_grad_sync(self) -> None:
        """Launch what is missing and wait: then ``main_grad`` holds the reduced gradients.

        Unused parameters have the gradient zero. Raises ``RuntimeError`` when called twice in an iteration.
        """
        if self._finished:
            raise RuntimeError(
                "finish_grad_sync() was called twice in one iteration: gradients are reduced already; call "
                "zero_grad_buffer() after optimizer.step()"
            )
        self.start_grad_sync()
        self._launcher.wait()
        self._finished = True

    def zero_grad_buffer(self) -> None:
        """Start a new iteration: no gradient is in any bucket.

        Memory that only our modules write is not cleared (their first GEMM overwrites it); the rest is zeroed.
        """
        if not (self._launched or self._readiness.touched or any(record.written for record in self.records)):
            return
        self._check_nothing_pending("zero_grad_buffer()")
        for bucket in self.buckets:
            if bucket.phase is Phase.REDUCING:
                raise RuntimeError(
                    f"{bucket.name} is still being reduced: call finish_grad_sync() after the last backward of an "
                    f"iteration and before zero_grad_buffer()"
                )
        for bucket in self.buckets:
            bucket.reset()
        for wired in self._wired:
            forget_failed_backward(wired.owned.param)
            clear_exposed_grad(wired.owned.param, wired.record)
            if wired.owned.param.grad is not None:  # put there by hand: see _check_nothing_bypassed
                wired.owned.param.grad = None
        if self._zeroed_views:
            torch._foreach_zero_(self._zeroed_views)
        self._launcher.reset()
        self._readiness.reset()
        self._launched = self._checked = self._finished = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """``zero_grad_buffer``: clearing ``.grad`` alone would leave the gradients where they are."""
        self.zero_grad_buffer()

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply every gradient by ``factor``, a number or a 0-dim tensor on the model's device."""
        self.check_scalable("scale_gradients()")
        torch._foreach_mul_([bucket.grad_data for bucket in self.buckets], factor)

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Copy rank 0's parameters and buffers to every rank of the group."""
        if self.process_group is None or group_size(self.process_group) == 1:
            return
        source = dist.get_global_rank(self.process_group, 0)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(tensor.detach(), source, group=self.process_group)
            torch.autograd.graph.increment_version(tensor)  # collectives do not, and masters are refreshed by it

    def expose_grads(self, dtype: torch.dtype | None = None) -> None:
        """Hand the gradients to stock optimizers and ``clip_grad_norm_`` as ``.grad``, after ``finish_grad_sync``.

        dtype  dtype of ``.grad``; None: each parameter's own, which every optimizer takes. Where it is ``main_grad``'s
               dtype (fp32 parameters, or ``torch.float32`` under bf16 ones) ``.grad`` is ``main_grad``, without a copy
        """
        self.check_reduced("expose_grads()")
        if self.config.use_distributed_optimizer:
            raise RuntimeError(
                "expose_grads() needs whole gradients, and use_distributed_optimizer=True leaves each rank its shard: "
                "use maingrad.ddp.DistributedOptimizer, or set use_distributed_optimizer=False"
            )
        for wired in self._wired:
            expose_grad(wired.owned.param, wired.record, dtype or wired.dtype)

    @contextmanager
    def record_timeline(self) -> Iterator[Timeline]:
        """Record when backwards ran and when each bucket was ready, launched and finished; read it after the block."""
        on_gloo = self.process_group is not None and dist.get_backend(self.process_group) == "gloo"
        timeline = Timeline(self.device, collectives_have_threads=on_gloo)
        self._launcher.timeline = timeline
        try:
            yield timeline
        finally:
            self._launcher.timeline = None
            timeline.close()

    def check_reduced(self, caller: str) -> None:
        """Raise unless every bucket of this iteration is reduced."""
        if not self._finished:
            raise RuntimeError(f"{caller} before finish_grad_sync(): this iteration's gradients are not reduced yet")

    def check_scalable(self, caller: str) -> None:
        """Raise where scaling buckets would race with a collective, or miss the ``.grad`` that an optimizer reads."""
        for wired in self._wired:
            grad, record = wired.owned.param.grad, wired.record
            if wired.bucket.phase is Phase.REDUCING:
                raise RuntimeError(f"{caller} before finish_grad_sync(): {wired.bucket.name} is still being reduced")
            if record.exposed and grad is not None and grad.data_ptr() != record.view.data_ptr():
                raise RuntimeError(
                    f"{caller} after expose_grads(): .grad of parameter '{record.name}' is a {grad.dtype} copy and "
                    f"would stay as it is; call it before expose_grads(), or torch.nn.utils.clip_grad_norm_ after it"
                )

    def owned_range(self, layout: BucketLayout) -> tuple[int, int]:
        """[start, end) of the bucket's elements that this rank reduces and updates: its shard, or all of them."""
        if not self.config.use_distributed_optimizer:
            return 0, layout.numel
        return layout.shard(group_rank(self.process_group))

    @property
    def wired(self) -> Sequence[WiredParam]:
        """Every trainable parameter with its bucket and record, in the order of the buffers."""
        return self._wired

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A plain, unwrapped copy of the model: buckets and hooks stay with the original."""
        return copy.deepcopy(self.module, memo)

    # ---- Wiring. ----

    def _attach(self) -> None:
        """Give every parameter its accumulator and its hook; a dead wrapper takes them back."""
        # Back edges (hook -> readiness) are weak: a model that is let go frees its memory without the collector.
        handles, params = [], []
        for wired in self._wired:
            check_unattached(wired.owned.param, wired.record.name)  # all of them before the first is touched
        for wired in self._wired:
            param, record = wired.owned.param, wired.record
            attach(param, record)
            handles.append(param.register_post_accumulate_grad_hook(self._readiness.grad_hook(wired.bucket, record)))
            self._readiness.expect_delayed(wired)
            params.append((torch.utils.weak.TensorWeakRef(param), record))
        handles.append(guard_stock_optimizers())
        weakref.finalize(self, _unwire, handles, params).atexit = False

    @torch.compiler.disable
    def _before_forward(self) -> None:
        if self._checked:
            return
        for wired in self._wired:
            wired.check()
        for name, param in self.module.named_parameters():
            if param.requires_grad and record_of(param) is None:
                raise RuntimeError(
                    f"parameter '{name}' requires a gradient, and was frozen or not there when the model was wrapped: "
                    f"it has no main_grad and would never be reduced; unfreeze or add it before wrapping, or wrap again"
                )
        self._checked = True

    @torch.compiler.disable
    def _after_forward(self, outputs: Any) -> None:
        self._readiness.watch(outputs)

    def _check_nothing_pending(self, caller: str) -> None:
        waiting = {record.name: record.pending for record in self.records if record.pending}
        if waiting:
            name, pending = next(iter(waiting.items()))
            raise RuntimeError(
                f"{caller} while delayed weight gradients of {len(waiting)} parameter(s) are pending: '{name}' waits "
                f"for {len(pending)} of {pending[0].owner}; run its backward_dw() or drain its WgradQueue first"
            )

    def _check_nothing_bypassed(self, caller: str) -> None:
        """A hook empties ``.grad`` whenever autograd has filled it."""
        for wired in self._wired:
            if wired.owned.param.grad is not None and not wired.record.exposed:
                raise RuntimeError(
                    f"{caller}: a gradient of parameter '{wired.record.name}' was put into .grad by hand, where no "
                    f"hook sees it. Zero-bubble schedules of torch.distributed.pipelining do so unless their stage has "
                    f"a dw_builder: use maingrad.te_integration.pipeline.PipelineStage. Where it was you, add it to "
                    f"main_grad, before the last backward"
                )


def _unwire(handles: list[RemovableHandle], params: list[tuple[torch.utils.weak.TensorWeakRef, GradRecord]]) -> None:
    for handle in handles:
        handle.remove()
    for reference, record in params:
        param = reference()
        if param is not None:
            clear_exposed_grad(param, record)
            detach(param)
