"""``PipelineStage``: delayed weight gradients in the W slots of torch.distributed.pipelining's schedules.

    F   forward; our modules will put their weight gradients into the stage's queue
    B   the whole backward, which computes input gradients, biases and everything that is not delayed
    W   the delayed weight gradients of that microbatch, in bucket order

A schedule without W slots (1F1B, GPipe) computes them right after each B. torch's own split of a backward runs the
graph twice, for inputs and again for weights, and puts what it finds into ``.grad`` by hand, so that no hook sees it:
it is never used here, and refused elsewhere (see ``SplitBackwardWatch``).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    """torch's ``PipelineStage`` whose weight gradients wait in ``queue`` for the schedule's W slots.

    It goes wherever torch's does: ``Schedule1F1B``, ``ScheduleInterleavedZeroBubble``, ``ScheduleZBVZeroBubble``, ...::

        stage_module = DistributedDataParallel(stage_module, config, process_group=mesh.get_group("dp"))
        stage = PipelineStage(stage_module, index, num_stages, device, group=mesh.get_group("pp"))
        schedule = ScheduleInterleavedZeroBubble([stage], num_microbatches, loss_fn, scale_grads=False)

        schedule.step(inputs, target=target, losses=losses)
        stage_module.finish_grad_sync()

    submodule            this stage's module. Our wrappers in it, or around it, learn which backward is the last: the
                         others run as under ``no_sync``. On a rank with several stages, each one's buckets are reduced
                         from its last W on, under what the other stages still compute
    stage_index          from 0
    num_stages           of the pipeline
    device               where the stage runs
    average_microbatches gradients are of the mean over the microbatches: the backward of each loss starts with
                         1 / num_microbatches instead of 1. The losses that the schedule reports are not scaled. False:
                         of their sum
    options              torch's other arguments: ``group``, ``input_args``, ``output_args``, ...

    The schedule must be built with ``scale_grads=False``: torch divides ``.grad``, where no gradient is, at a time when
    buckets may be under way already; ``RuntimeError`` at the end of its first step otherwise. ``ValueError`` for a
    ``dw_builder``, and for modules that delay into queues of their own, which no W slot would empty.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        average_microbatches: bool = True,
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
        self.average_microbatches = average_microbatches
        self.queue = WgradQueue()
        """What waits for its W slot; its ``log`` records what ran."""
        self._find_parts()
        self._microbatch = -1  # of the running or latest backward
        self._num_backwards = 0  # in this step
        self._is_incomplete = False  # some backwards of this step were begun, and not all are done
        self._iterations: list[int] = []  # of the wrappers, when the first was begun

    def _find_parts(self) -> None:
        """Everybody who reduces gradients of this stage, and of others on this rank perhaps."""
        self._parts: list[Parts] = parts_of([self.submod])
        self._hosts = [parts.host for parts in self._parts]  # a wrapper around several stages may have no other keeper

    def clear_runtime_states(self) -> None:
        """The start of a step. ``RuntimeError`` where one that failed has left gradients: they would be added."""
        step = running_pipeline_step()
        if step is not None:
            self.chunks = step.num_microbatches
            step.losses.clear()  # of a step that failed: torch would run backward from them
        if not self._has_leavings():
            self._num_backwards, self._is_incomplete = 0, False
        elif self.has_backward:
            raise RuntimeError(
                f"stage {self.stage_index}: an earlier step failed after {self._num_backwards} backwards, and has left "
                f"gradients{self._pending_text()}, which would be added to this step's: call stage.abandon_step() of "
                f"every stage, on every rank, which throws this iteration's gradients away"
            )
        if self.has_backward:
            self._find_parts()
            for parts in self._parts:
                parts.begin(self, self.submod.parameters())
            have_inputs_require_grad(self)
        super().clear_runtime_states()

    def abandon_step(self) -> None:
        """Give up a step that failed, and all gradients of the iteration with it, those of steps under ``no_sync`` too.

        Every stage and every rank must call it, replicas as well: buckets that one of them has launched are reduced to
        their end. What was sent between ranks and not received is not taken back: where a rank of a longer pipeline has
        failed by itself, make process groups, stages and schedule anew.
        """
        self.queue.clear()
        for parts in self._parts:
            parts.abandon(self)
        for param in self._unwrapped_params():
            param.grad = None
        self._num_backwards, self._is_incomplete = 0, False

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """F."""
        with delayed_wgrad(self.queue):
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """B; where the schedule does not split this backward, W too."""
        self._microbatch = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """The backward itself, marked as the final one of this step where it is.

        Counted, since a schedule that splits backwards sets ``last_backward`` with its last W only: too late for what
        is complete in B.
        """
        final = self._launches_early and (last_backward or self._num_backwards + 1 == self.chunks)
        if not self._is_incomplete:
            self._is_incomplete = True
            self._iterations = [parts.iteration for parts in self._parts]
        loss = bwd_kwargs["stage_output"]
        if self.is_last and self.average_microbatches and isinstance(loss, torch.Tensor):
            if loss.numel() != 1:  # torch.autograd refuses it without a gradient to start with
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
        self._is_incomplete = self._num_backwards != self.chunks
        return result

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """To a stage before on this rank. torch's schedules ask in ``eval()`` too, where torch's stage fails."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """From a stage behind on this rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """After the stage's last W: what is not under way yet is reduced from here on. Nothing in ``schedule.eval()``.

        ``RuntimeError`` where the step had another number of backwards than of microbatches: the mean is wrong then.
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
        """Refused, but for 1."""
        if grad_scale_factor != 1:
            raise RuntimeError(
                f"stage {self.stage_index}: the schedule would divide .grad by {grad_scale_factor}, and gradients are "
                f"in main_grad: build the schedule with scale_grads=False; average_microbatches=True of this stage "
                f"(the default) gives the mean over microbatches"
            )

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._no_sync():  # torch tries the module with the first microbatch, to learn shapes
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._no_sync():
            return super()._prepare_backward_infra(*args, **kwargs)

    @property
    def _launches_early(self) -> bool:
        """Whether buckets may launch as they become ready, and not in ``perform_reduce_grad``, together.

        Collectives of one group must be issued in one order on all replicas. A wrapper sees to that for its own
        buckets, also around several stages. Of several in one process, one may be held back on one replica only, by a
        parameter that its last microbatch does not use; then the place in the schedule decides, the same on all.
        """
        stages_here = list(self.stage_index_to_group_rank.values()).count(self.group_rank)
        return len(self._parts) == 1 and self._parts[0].num_begun == stages_here

    def _has_leavings(self) -> bool:
        """Whether a step that failed has left gradients, and nobody has thrown them away since."""
        if len(self.queue):
            return True
        if not self._is_incomplete:
            return False
        begun = zip(self._parts, self._iterations, strict=True)
        return any(not parts.is_clear and parts.iteration == before for parts, before in begun) or any(
            param.grad is not None for param in self._unwrapped_params()
        )

    def _pending_text(self) -> str:
        return f" ({len(self.queue)} pending, of {', '.join(self.queue.pending_owners)})" if len(self.queue) else ""

    def _unwrapped_params(self) -> list[nn.Parameter]:
        wrapped = {id(param) for host in self._hosts for param in host.parameters()}
        return [param for param in self.submod.parameters() if id(param) not in wrapped]

    def _wgrad_runner(self) -> Callable[[], None]:
        """torch's ``dw_builder``: called after each B, for what its W slot will call."""
        return partial(self.queue.drain_microbatch, self._microbatch)

    @contextmanager
    def _no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for parts in self._parts:
                stack.enter_context(parts.no_sync())
            yield
