"""``BucketIteration``: one iteration of a wrapper, from the first backward to the next iteration.

    backward    hooks launch complete buckets (``buckets/reducer.py``). The end of the last backward launches the
                others, except those that wait for delayed gradients, and shows ``.grad``
    reduction   launches the buckets that are left, waits, and compares ranks, once an iteration. The first read of
                ``.grad`` does so at once (``finish_reduction``), a step of ``DistributedOptimizer`` bucket by bucket
                (``start_for_step``, ``wait_for_buckets``) where it may
    clearing    every ``.grad`` is None: the next forward or backward begins a new iteration

``start_grad_sync``, ``finish_grad_sync``, ``zero_grad_buffer`` and ``expose_grads`` do the same when a program says so,
by Megatron-core's names.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..buckets.bucket import Bucket, Phase
from ..buckets.checks import (
    ModelWatch,
    check_nothing_bypassed,
    check_nothing_pending,
    check_nothing_under_way,
    check_whole,
)
from ..buckets.iteration_ends import end_iteration, record_optimizer
from ..buckets.nan_check import NanCheck
from ..buckets.reducer import BucketLauncher, Readiness
from ..buckets.replicas import Replicas
from ..collectives.failure_report import FailureReporter
from ..collectives.rank_grid import RankGrid
from ..collectives.reduction import GradReduction
from ..collectives.step_check import StepCheck
from ..collectives.streams import is_capturing
from ..collectives.timeline import Observer, Timeline, recorded_on
from ..config import DistributedDataParallelConfig
from ..contract.delayed import compute_pending
from ..contract.record import GradRecord
from ..plan.layout import BucketLayout
from ..plan.model_slice import ModelSlice
from ..torch_grads.shown_params import ShownGrads
from .attachment import AroundModule, discard_grads
from .parts import BucketParts
from .shared_embedding import SharedEmbedding

__all__ = ["BucketIteration", "check_num_tokens", "divide_by_tokens"]


class BucketIteration(AroundModule):
    """The methods and the state of one iteration of ``DistributedDataParallel``, which makes the attributes."""

    ddp_config: DistributedDataParallelConfig
    device: torch.device
    buckets: Sequence[Bucket]
    records: Sequence[GradRecord]
    reductions: Mapping[str, GradReduction]
    grids: Mapping[str, RankGrid]
    model_slices: Mapping[str, ModelSlice]
    failures: FailureReporter
    readiness: Readiness
    steps: StepCheck
    shown: ShownGrads
    grad_parts: BucketParts
    _launcher: BucketLauncher
    _nan_check: NanCheck | None
    _replicas: Replicas
    _watch: ModelWatch
    _zeroed_views: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.iteration = 0
        """Number of iterations begun."""
        self._launched = False  # from the first launch outside a hook to the next iteration
        self._finished = False  # all gradients are reduced
        self._ended = False  # watchers were told of the iteration's end
        self._num_tokens: Tensor | int | None = None
        self.shared_embedding: SharedEmbedding | None = None
        """A parameter of which other pipeline stages hold copies."""

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
        self._start("start_grad_sync()")

    def _start(self, caller: str) -> None:
        self.check_in_use(caller)
        self.check_not_in_torch_ddp()
        self._watch.check_sync()
        check_nothing_pending(self.records, caller)
        self._launched = True  # before the next check may raise: zero_grad_buffer must clear gradients then too
        unshown = [(each.param, each.record) for each in self.shown.params if each.grad is None]
        check_nothing_bypassed(unshown, caller)
        self._launcher.launch_rest()
        self.steps.start()

    def set_num_tokens(self, num_tokens: Tensor | int) -> None:
        """With ``calculate_per_token_loss``: this rank's tokens in this iteration, by which gradients are divided.

        num_tokens  a number or a tensor of one element, which the host does not read. Ranks may differ in tokens and
                    in microbatches. Set it before ``.grad`` is read, clipped or stepped on
        """
        check_num_tokens(num_tokens, wanted=self.ddp_config.calculate_per_token_loss)
        self.begin_if_cleared()  # a program may know its tokens before the first forward
        self._num_tokens = num_tokens

    @torch.no_grad()
    def finish_grad_sync(self, num_tokens: Tensor | int | None = None, *, force_all_reduce: bool = False) -> None:
        """``start_grad_sync``, and wait: then ``main_grad`` holds the reduced gradients. A step does so by itself.

        num_tokens        see ``set_num_tokens``
        force_all_reduce  Megatron-core's; True is refused where gradients are sharded

        Unused parameters have the gradient zero. A second call in an iteration changes nothing. Raises
        ``FloatingPointError`` on all ranks where ``check_for_nan_in_grad`` finds NaN or Inf.
        """
        if num_tokens is not None:
            self.set_num_tokens(num_tokens)
        if force_all_reduce:
            check_whole(self.ddp_config, "finish_grad_sync(force_all_reduce=True)")
        if not self._finished:
            self._reduce_all("finish_grad_sync()")

    @torch.no_grad()
    def finish_reduction(self, caller: str) -> None:
        """Have all gradients of the iteration reduced, once: for the first read of ``.grad``, and for a step.

        Collective. Raises what ``finish_grad_sync`` raises, and ``RuntimeError`` where there is no gradient.
        """
        self.readiness.check_backward_over(caller)
        if self._finished:
            return
        self._compute_pending()
        if self.is_clear:
            raise RuntimeError(
                f"{caller} before a backward: there are no gradients. A rank without a microbatch of its own calls "
                f"model.finish_grad_sync(), since other ranks reduce theirs"
            )
        self._reduce_all(caller)

    def _compute_pending(self) -> None:
        """Compute the gradients that the program's queues still hold. A schedule computes those of its parts itself."""
        if not self.grad_parts.num_open:
            compute_pending(self.records)

    def finish_and_take_changes(self, caller: str) -> None:
        """``finish_reduction``, and what the program has put into ``.grad`` is the gradient."""
        self.finish_reduction(caller)
        self.shown.take_changes()

    def finish_for_optimizer(self, caller: str) -> None:
        """``finish_reduction`` where a program reads ``.grad``: an optimizer trains the model, even if its step is
        skipped."""
        record_optimizer(self.module)
        self.finish_reduction(caller)

    def _reduce_all(self, caller: str) -> None:
        check_num_tokens(self._num_tokens, wanted=self.ddp_config.calculate_per_token_loss)
        self._start(caller)
        self._launcher.wait()  # step 7 of docs/by_hand.py
        self.steps.finish()
        if self._nan_check is not None:
            self._nan_check.raise_where_found(self.grids["dense"], self.failures)
        if self.shared_embedding is not None:
            self.shared_embedding.sum()
        if self._num_tokens is not None:
            with self.failures.watch("the sum of tokens"):
                divide_by_tokens(self.reduced_grads(), self._num_tokens, self.grids["slice"], self.device)
        self._finish()

    @property
    def is_clear(self) -> bool:
        """Whether no bucket holds a gradient of this iteration so far."""
        return not self._launched and all(bucket.is_clear for bucket in self.buckets)

    @property
    def can_wait_by_bucket(self) -> bool:
        """Whether a step may wait for buckets one by one, in its own order.

        Not where something follows on the waits for all of them; and not where a wait begins a second collective, since
        another rank may wait in the plan's order, by ``finish_grad_sync``.
        """
        alone = self._launcher.waits_launch_nothing and self.shared_embedding is None
        return self.ddp_config.can_wait_by_bucket and alone

    def wait_for_buckets(self, buckets: Iterable[Bucket]) -> None:
        """Step 7 of docs/by_hand.py in parts: after ``start_grad_sync``, wait for some buckets. After the last one,
        ``finish_grad_sync`` is done.

        ``DistributedOptimizer.step`` so updates buckets while others are reduced, if ``can_wait_by_bucket``.
        """
        self.steps.finish()
        for bucket in buckets:
            self._launcher.wait_for(bucket)
        if not self._finished and all(bucket.phase is Phase.REDUCED for bucket in self.buckets):
            self._finish()

    def _finish(self) -> None:
        if not self._ended:
            self._replicas.end_iteration()
            end_iteration(self.module, self.grids["dense"], self.failures, self.readiness.trained)
        self._finished = self._ended = True
        if not self.shown.active:  # all backwards were under no_sync: who clears .grad begins a new iteration here too
            self.shown.show()

    @property
    def has_failed(self) -> bool:
        """Whether the last backward has raised. A schedule says itself what has failed."""
        return self.readiness.has_failed and not self.grad_parts.num_begun

    @property
    def is_reduced(self) -> bool:
        """Whether all gradients of this iteration are reduced."""
        return self._finished

    def zero_grad_buffer(self) -> None:
        """Start a new iteration: discard all gradients.

        Accumulators that only our fused modules write are not zeroed, as their first GEMM overwrites. All others are.
        """
        check_nothing_pending(self.records, "zero_grad_buffer()", gives_up=True)
        if self.has_failed:
            self._reduce_given_up()
        elif self.shown.active and not self._finished and self.ddp_config.overlap_grad_reduce:
            self._forget_ahead()
            self._launcher.launch_rest()  # other ranks may have launched more of the buckets that nobody wants
            self._launcher.wait()
        self._discard()

    def _discard(self) -> None:
        """Begin a new iteration without the gradients, whose reductions were waited for."""
        if self.is_clear:
            for record in self.records:
                record.clear_touched()
            return
        self._num_tokens = None
        check_nothing_under_way(self.buckets, "zero_grad()")
        self.steps.next_iteration()
        self.shown.hide()  # before buckets are emptied: what the program keeps is copied
        self._empty_buckets()  # step 10 of docs/by_hand.py
        discard_grads(self.bucket_params, self.module if self._ended else None)
        self.readiness.reset()
        self._launched = self._finished = self._ended = False
        self.iteration += 1

    def _empty_buckets(self) -> None:
        if self._zeroed_views:
            torch._foreach_zero_(self._zeroed_views)
        for bucket in self.buckets:  # after the zeroing, which raises versions
            bucket.reset()
        self._launcher.reset()

    # ---- What a backward begins with. ----

    def begin_if_cleared(self) -> None:
        """Before a forward or a backward: where the program has set every ``.grad`` to None, begin a new iteration."""
        if self.shown.is_cleared:
            self.zero_grad_buffer()

    def _enter_backward(self) -> None:
        """A backward has reached an output of the model. ``.grad`` of before must not be accumulated into."""
        if self.shown.active:
            self.begin_if_cleared()
            self.shown.unfill()

    @torch.no_grad()
    def _reopen(self) -> None:
        """A gradient arrives whose bucket was launched: by a second backward outside ``no_sync``.

        What was reduced so far is put aside, and added after the next reduction. Nothing is done, and the write raises,
        where gradients were divided by tokens or summed over stages, where delayed ones are pending, for schedules, and
        behind a read of ``.grad`` in a backward that has passed the wrapper by.
        """
        self.begin_if_cleared()
        divided = self._finished and self._num_tokens is not None
        joined = self._finished and self.shared_embedding is not None
        late = self.shown.is_filled or any(record.pending or record.exposed for record in self.records)
        if not self.shown.active or divided or joined or late:
            return
        self._launcher.launch_rest()
        self.steps.start(again=True)
        self._launcher.wait()
        self.steps.finish()
        self.shown.zero_cleared()
        carried = [bucket.reduced.clone() for bucket in self.buckets]
        self._empty_buckets()
        for bucket, reduced in zip(self.buckets, carried, strict=True):
            bucket.carried = reduced
        self.steps.go_on()
        self._launched = self._finished = False

    def abandon_iteration(self) -> None:
        """``zero_grad_buffer`` after a backward that failed. Collective: launched buckets are reduced first."""
        check_nothing_pending(self.records, "abandon_iteration()")
        self._reduce_given_up()
        self._discard()

    def _reduce_given_up(self) -> None:
        """Other ranks may have launched more buckets, or have come to their step: bring all ranks to one point."""
        self.steps.record_given_up()
        self._forget_ahead()
        if self.ddp_config.overlap_grad_reduce:
            self._launcher.launch_rest()
            self.steps.start()
        self._launcher.wait()

    def _forget_ahead(self) -> None:
        """What is reduced next is discarded: no backward need have come for what forwards have written."""
        for record in self.records:
            record.ahead = None

    def record_replay(self) -> None:
        """A captured iteration was replayed: what its Python would have left."""
        self.iteration += 1

    def forget_iteration(self) -> None:
        """``zero_grad_buffer`` after a capture that failed: what it launched has not run."""
        self._launcher.forget()
        check_nothing_pending(self.records, "zero_grad_buffer()", gives_up=True)
        self._discard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """``zero_grad_buffer``: clearing ``.grad`` alone would leave the gradients in ``main_grad``."""
        self.zero_grad_buffer()

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply every gradient by ``factor``, a number or a 0-dim tensor on the model's device."""
        if self.shown.active:
            self.finish_and_take_changes("scale_gradients()")
        check_nothing_under_way(self.buckets, "scale_gradients()")
        if held := [tensor for bucket in self.buckets for tensor in bucket.held()]:
            torch._foreach_mul_(held, factor)
        self.shown.copy_again()

    def expose_grads(self, dtype: torch.dtype | None = None) -> None:
        """Make ``.grad`` plain tensors of the reduced gradients, as a read of ``.grad`` and a stock step do anyway.

        dtype  dtype of ``.grad``; None: each parameter's dtype, which every optimizer takes. Where this is
               ``main_grad``'s dtype (fp32 parameters, or ``torch.float32`` under bf16 ones) nothing is copied

        Experts that only some ranks hold, and slices of tensor parallelism, stay parts, whose norms cover all ranks,
        until a step reads them. Raises ``RuntimeError`` where gradients are sharded.
        """
        check_whole(self.ddp_config, "expose_grads()")
        self.finish_for_optimizer("expose_grads()")
        for each in self.shown.params:
            if each.part is None:  # else its norms cover other ranks until a step reads it
                self.shown.expose(each, dtype or each.dtype)

    def start_for_step(self) -> None:
        """``DistributedOptimizer`` steps: launch what is left, and bring the program's changes of ``.grad`` in."""
        self.readiness.check_backward_over("optimizer.step()")
        self.shown.check_norms()
        if self.is_clear or self.shown.is_changed:
            self.finish_and_take_changes("optimizer.step()")  # raises where nothing is there
        elif not self._launched:
            self._compute_pending()
            self._start("optimizer.step()")

    def prepare_stock_step(self) -> None:
        """A stock optimizer is about to read ``.grad``: finish the reduction, and give it plain tensors."""
        self.readiness.check_backward_over("optimizer.step()")
        if self.is_clear:
            return
        self.finish_reduction("optimizer.step()")
        check_whole(self.ddp_config, "optimizer.step()")
        self.shown.check_norms()
        for each in self.shown.params:
            if not each.record.exposed:  # else the program has chosen its dtype
                self.shown.expose(each, each.dtype)

    @contextmanager
    def record_timeline(self) -> Iterator[Timeline]:
        """Record the times of forwards, backwards, reductions and gathers in this block. Read them after the block."""
        with recorded_on(self._launcher, self.device, self.grids.values()) as timeline:
            yield timeline

    def owned_range(self, layout: BucketLayout) -> tuple[int, int]:
        """[start, end) of the bucket's elements whose sum this rank gets: its shard, or all elements."""
        return self.reductions[layout.grid_name].owned_range(layout.numel)

    def reduced_grads(self, grid_name: str | None = None) -> list[Tensor]:
        """``owned_range`` of each bucket, as views of reduced gradients. Collective where nothing was read before.

        grid_name  a name of ``grids``: only buckets that are reduced over these ranks; None: all

        After ``start_grad_sync`` alone, and between microbatches, they are not reduced yet. With ``release_grads`` a
        call between microbatches raises ``RuntimeError``.
        """
        if self.shown.active and not self._launched:
            self.finish_reduction("reading reduced_grads()")
        wanted = [bucket for bucket in self.buckets if grid_name in (None, bucket.layout.grid_name)]
        for bucket in wanted:
            bucket.check_readable("reduced_grads()")
        return [bucket.reduced for bucket in wanted]

    @property
    def observer(self) -> Observer:
        """The observer that forwards, backwards, reductions and gathers report to."""
        return self._launcher.observer


# ---- ``calculate_per_token_loss``: gradients are divided by the number of tokens of all ranks, on the device.


def check_num_tokens(num_tokens: Tensor | int | None, *, wanted: bool) -> None:
    """Raise ``TypeError`` where ``num_tokens`` is missing or not ``wanted``, ``ValueError`` for several elements, and
    ``RuntimeError`` for a number in a capture."""
    if (num_tokens is not None) != wanted:
        raise TypeError(
            "model.set_num_tokens(num_tokens), before .grad is read or stepped on, goes with "
            "DistributedDataParallelConfig(calculate_per_token_loss=True), and only with it"
        )
    if isinstance(num_tokens, int) and is_capturing():
        raise RuntimeError(
            "set_num_tokens(num_tokens) got a number in a function that is captured, and every replay would divide "
            "by this number: give it a tensor on the device, computed from the microbatches"
        )
    if isinstance(num_tokens, Tensor) and num_tokens.numel() != 1:
        raise ValueError(
            f"set_num_tokens(num_tokens) takes one number for this rank, not a tensor of {list(num_tokens.shape)}"
        )


def divide_by_tokens(grads: list[Tensor], num_tokens: Tensor | int, grid: RankGrid, device: torch.device) -> None:
    """Divide ``grads`` in place by the sum of ``num_tokens`` over the grid, whose ranks average losses. Collective."""
    total = torch.as_tensor(num_tokens, dtype=torch.float32, device=device).reshape(()).clone()
    grid.sum(total)
    total.masked_fill_(total == 0, 1.0)  # without tokens all gradients are zeros
    torch._foreach_div_(grads, total)
