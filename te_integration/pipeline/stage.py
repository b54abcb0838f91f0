"""``PipelineStage``: delayed weight gradients in the W slots of torch.distributed.pipelining's schedules.

    F   forward; maingrad modules will delay their weight gradients into the queue of the stage
    B   one backward, which computes input gradients, bias gradients and everything else that is not delayed
    W   the delayed weight gradients of that microbatch, in bucket order

A schedule without W slots (1F1B, GPipe) computes delayed weight gradients right after each B. torch's own split runs
backward twice, for inputs and for weights, and writes to ``.grad`` directly, so that no hook sees the gradients. This
stage never uses that split, and fused modules refuse it (see ``refuse_split_backward``).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

from ...ddp.contract.module import DelayedWgradModule
from ...ddp.wrapper.parts import Parts, parts_of
from ..torch_internals import have_inputs_require_grad, running_pipeline_step
from ..wgrad_queue import WgradQueue, delayed_wgrad

__all__ = ["PipelineStage"]


class PipelineStage(pipelining.PipelineStage):
    """torch's ``PipelineStage`` with weight gradients that wait in ``queue`` for the W slots of the schedule.

    Every schedule of torch takes it (``Schedule1F1B``, ``ScheduleInterleavedZeroBubble``, ``ScheduleZBVZeroBubble``)::

        stage_module = DistributedDataParallel(stage_module, config, process_group=mesh.get_group("dp"))
        stage = PipelineStage(stage_module, index, num_stages, device, group=mesh.get_group("pp"))
        schedule = ScheduleInterleavedZeroBubble([stage], num_microbatches, loss_fn, scale_grads=False)

        schedule.step(inputs, target=target, losses=losses)
        stage_module.finish_grad_sync()

    submodule            module of this stage. maingrad wrappers in it or around it learn which backward is the last
                         of the step; all others run as under ``no_sync``. If a rank has several stages, the buckets of
                         a stage are reduced after its last W, while the other stages compute
    stage_index          from 0
    num_stages           of the pipeline
    device               where the stage runs
    average_microbatches True: gradients of the mean loss over the microbatches; the backward of each loss starts with
                         1 / num_microbatches instead of 1. False: gradients of the sum. The losses that the schedule
                         reports are not scaled
    delay_wgrad          False: B computes all weight gradients. For schedules without W slots, which need no queue, and
                         for compiled modules, whose graph this queue would break
    options              torch's other arguments: ``group``, ``input_args``, ``output_args``, ...

    Build the schedule with ``scale_grads=False``: torch would divide ``.grad``, but the gradients are in ``main_grad``,
    and reductions may be under way. The first step raises ``RuntimeError`` otherwise. The constructor raises
    ``ValueError`` for a ``dw_builder``, and for modules with their own queues, which no W slot would drain.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        average_microbatches: bool = True,
        delay_wgrad: bool = True,
        **options: Any,
    ) -> None:
        if "dw_builder" in options:
            raise ValueError("dw_builder is what this stage brings: use torch's PipelineStage for one of your own")
        for name, module in submodule.named_modules():
            if isinstance(module, DelayedWgradModule) and module.wgrad_queue is not None:
                raise ValueError(
                    f"stage {stage_index}: '{name}' ({type(module).__name__}) delays its weight gradients into a queue "
                    f"of its own, which the schedule's W slots would not empty: build it without "
                    f"delay_wgrad_compute=True, this stage delays it"
                )
        super().__init__(submodule, stage_index, num_stages, device, dw_builder=self._wgrad_runner, **options)
        self.average_microbatches, self.delay_wgrad = average_microbatches, delay_wgrad
        self.queue = WgradQueue()
        """Weight gradients that wait for their W slot; ``queue.log`` records what ran."""
        self._find_parts()
        self._microbatch = -1  # index of the running or latest backward
        self._num_backwards = 0  # in this step
        self._begun_in: list[int] | None = None
        """The iteration of each wrapper at the step's first backward; None after the last backward."""

    def _find_parts(self) -> None:
        """Find the wrappers that reduce gradients of this stage. They may serve other stages of this rank too."""
        self._parts: list[Parts] = parts_of([self.submod])
        self._hosts = [parts.host for parts in self._parts]  # keeps a wrapper around several stages alive

    def clear_runtime_states(self) -> None:
        """Start a step. Raises ``RuntimeError`` if a failed step has left gradients, which this step would add to."""
        step = running_pipeline_step()
        if step is not None:
            self.chunks = step.num_microbatches
            step.losses.clear()  # torch would run backward from losses of a failed step
        if not self._has_leavings():
            self._num_backwards, self._begun_in = 0, None
        elif self.has_backward:
            raise RuntimeError(
                f"stage {self.stage_index}: an earlier step failed after {self._num_backwards} backwards, and has left "
                f"gradients (pending: {self.queue.pending_owners}), which would be added to this step's: call "
                f"stage.abandon_step() of every stage, on every rank, which throws this iteration's gradients away"
            )
        if self.has_backward:
            self._find_parts()
            for parts in self._parts:
                parts.begin(self, self.submod.parameters())
            have_inputs_require_grad(self)
        super().clear_runtime_states()

    def abandon_step(self) -> None:
        """Drop a failed step and all gradients of the iteration, including those of steps under ``no_sync``.

        Call it for every stage on every rank, replicas included: reductions that some rank has launched must finish on
        all. Messages between stages that were sent and not received remain. If one rank of a pipeline failed alone,
        create new process groups, stages and schedules.
        """
        self.queue.clear()
        for parts in self._parts:
            parts.abandon(self)
        for param in self._unwrapped_params():
            param.grad = None
        self._begun_in = None

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run F."""
        with delayed_wgrad(self.queue) if self.delay_wgrad else nullcontext():
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run B, and W too if the schedule does not split this backward."""
        self._microbatch = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run the backward, and tell wrappers whether it is the last one of this step.

        Backwards are counted here. A schedule that splits backwards sets ``last_backward`` only at its last W, which is
        too late for gradients that are complete in B.
        """
        final = self._launches_early and self._num_backwards + 1 == self.chunks
        if self._begun_in is None:
            self._begun_in = [parts.iteration for parts in self._parts]
        loss = bwd_kwargs["stage_output"]
        if self.is_last and self.average_microbatches and isinstance(loss, torch.Tensor):
            if loss.numel() != 1:  # torch.autograd would demand an initial gradient
                raise RuntimeError(
                    f"stage {self.stage_index}: loss_fn must return a scalar, got shape {tuple(loss.shape)}; return "
                    f"its mean() or sum()"
                )
            bwd_kwargs = {**bwd_kwargs, "output_grads": torch.full_like(loss, 1.0 / (self.chunks or 1))}
        with self.queue.microbatch(self._microbatch), ExitStack() as stack:
            for parts in self._parts:
                stack.enter_context(parts.backward(self, final=final))
            result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)
        self._num_backwards += 1
        if self._num_backwards == self.chunks:
            self._begun_in = None
        return result

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Gradients for the previous stage on this rank. Schedules ask in ``eval()`` too, where torch's stage fails."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Gradients from the next stage on this rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Launch the reductions that are still missing; the schedule calls this after the last W of the stage.

        Does nothing in ``schedule.eval()``. Raises ``RuntimeError`` if the number of backwards is not the number of
        microbatches, since the mean over microbatches would be wrong.
        """
        if not self.has_backward:
            return
        self.queue.check_empty()
        if self._num_backwards != self.chunks:
            raise RuntimeError(
                f"stage {self.stage_index}: {self._num_backwards} backwards in a step of {self.chunks} microbatches, "
                f"so that each was scaled by 1 / {self.chunks}; run this stage by one of torch's schedules, or give "
                f"each schedule a PipelineStage of its own around the same module"
            )
        for parts in self._parts:
            parts.end(self)
        super().perform_reduce_grad(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Raise ``RuntimeError`` unless the factor is 1."""
        if grad_scale_factor != 1:
            raise RuntimeError(
                f"stage {self.stage_index}: the schedule would divide .grad by {grad_scale_factor}, and gradients are "
                f"in main_grad: build the schedule with scale_grads=False; average_microbatches=True of this stage "
                f"(the default) gives the mean over microbatches"
            )

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._no_sync():  # torch runs the module once to learn shapes
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._no_sync():
            return super()._prepare_backward_infra(*args, **kwargs)

    @property
    def _launches_early(self) -> bool:
        """True if buckets launch as they become ready; otherwise ``perform_reduce_grad`` launches them together.

        All replicas must issue the collectives of a group in the same order. One wrapper keeps that order for its own
        buckets, also around several stages. With several wrappers in a process, a parameter that the last microbatch of
        one replica does not use could hold one wrapper back on that replica only. The place in the schedule, which is
        the same on all replicas, then decides the order.
        """
        stages_here = list(self.stage_index_to_group_rank.values()).count(self.group_rank)
        return len(self._parts) == 1 and self._parts[0].num_begun == stages_here

    def _has_leavings(self) -> bool:
        """Return True if a failed step has left gradients that were not dropped since."""
        if len(self.queue):
            return True
        if self._begun_in is None:
            return False
        begun = zip(self._parts, self._begun_in, strict=True)
        return any(not parts.is_clear and parts.iteration == before for parts, before in begun) or any(
            param.grad is not None for param in self._unwrapped_params()
        )

    def _unwrapped_params(self) -> list[nn.Parameter]:
        wrapped = {id(param) for host in self._hosts for param in host.parameters()}
        return [param for param in self.submod.parameters() if id(param) not in wrapped]

    def _wgrad_runner(self) -> Callable[[], None]:
        """torch's ``dw_builder``: called after each B; returns what the W slot of that microbatch calls."""
        return partial(self.queue.drain_microbatch, self._microbatch)

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for parts in self._parts:
                stack.enter_context(parts.host.no_sync())
            yield
