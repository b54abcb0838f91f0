"""``DistributedDataParallel``: gradient buckets under any model, reduced while backward still runs.

``buckets/reducer.py`` is the way of a gradient from its hook to the reduced bucket. This file wires it to a model;
``iteration.py`` has the user's methods around it. docs/architecture.md tells all of it.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..buckets.bucket import BucketParam
from ..buckets.bucket_params import allocate_buckets
from ..buckets.checks import ModelWatch, is_frozen
from ..buckets.copy_engines import with_chosen_gathers
from ..buckets.nan_check import NanCheck
from ..buckets.reducer import BucketLauncher, Readiness
from ..buckets.released import GradPool
from ..buckets.replicas import Replicas
from ..collectives.failure_report import FailureReporter
from ..collectives.rank_grid import RankGrid, Ranks, make_grids
from ..collectives.reduction import GradReduction, make_reductions
from ..collectives.step_check import StepCheck
from ..config import DistributedDataParallelConfig, with_names_meant
from ..contract.record import GradRecord
from ..plan.cut import Range
from ..plan.owned_params import (
    ModelTensor,
    find_owned_params,
    find_tensors,
    is_slice,
    take_marks,
)
from ..torch_grads.over_ranks import ShardInfo
from ..torch_grads.shown_params import ShownGrads, ShownParam
from ..torch_internals import check_wrappers_can_run, weak_method
from .attachment import attach_params, detach_params
from .iteration import BucketIteration
from .parts import BucketParts
from .setup_checks import (
    broadcast_tensors,
    check_arguments,
    check_same_config,
    check_same_model,
    check_tensor_ranks,
    check_undeclared_parts,
    localize_on_each_rank,
    plan_on_each_rank,
)
from .shared_embedding import shared_embedding_of

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(BucketIteration):
    """Data parallelism over contiguous gradient buckets, under a plain PyTorch loop.

    ``main_grad`` of every trainable parameter is a view of a bucket, in which the gradients of all microbatches are
    summed. Backwards under ``no_sync`` only add. In the last microbatch each bucket's collective is launched as soon as
    the bucket's gradients are complete (``overlap_grad_reduce``). One iteration is::

        with model.no_sync():
            for microbatch in microbatches[:-1]: (loss(model, microbatch) / n).backward()
        (loss(model, microbatches[-1]) / n).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    From the last backward on, ``.grad`` is the average over ranks, in the parameter's shape. Its first read in an
    iteration is collective (``torch_grads/shown_params.py``). Programs that are written for Megatron-core call
    ``start_grad_sync``, ``finish_grad_sync``, ``zero_grad_buffer`` and ``expose_grads``; no other program needs them.

    module                the model, on its final device and in its final dtype; frozen parameters get no accumulator
    config                see ``DistributedDataParallelConfig``
    process_group         ranks to reduce over: a group; a DeviceMesh of one dim; a DeviceMesh of two dims (outer,
                          inner) with shards inside, replicas across; one of three (outer, inner, "cp"), whose last
                          two are one; ``WORLD_OF_ONE``: this process alone. None: the default group, or a world of one
                          where no launcher has started several ranks
    expert_process_group  the ranks that hold the same experts: ``WORLD_OF_ONE`` where each rank has its own. Experts
                          are parameters and buffers with Megatron-core's mark ``param.allreduce = False``, frozen ones
                          too. None: the ranks of ``process_group``, which must hold the same experts then
    tensor_parallel_group  the ranks that hold the slices of the same parameters, where the model is cut: a group, or a
                          mesh of one dim. ``process_group`` then has the ranks with this rank's slices and other data.
                          Slices are those of Megatron-core's marks (``tensor_model_parallel``, ``sequence_parallel``,
                          ...) and of parameters that were DTensors, which also say the group: None then
    embedding_group       the ranks, one of each pipeline stage, with copies of the parameter that has Megatron-core's
                          mark ``shared_embedding``: their gradients are summed. None on stages without a copy
    backward_order        names of the trainable parameters in the order of backward, where that is not the reverse of
                          registration: ``recorded_backward_order`` finds it
    init_sync             copy the first rank's parameters and buffers to all ranks, as PyTorch's DDP does

    Gradients are averaged over the ranks of ``process_group``. Those of experts are too: an expert gets tokens of all
    these ranks. With ``calculate_per_token_loss`` gradients are summed, and divided by the tokens of all ranks, which
    ``set_num_tokens`` tells before ``.grad`` is read, clipped or stepped on.
    Attributes that the wrapper lacks are the module's: see ``AroundModule``. ``ddp_config`` is the wrapper's own.

    Raises ``ValueError`` at construction for settings that cannot take effect, where the model differs between ranks,
    and where a launcher has started several ranks and there is no process group.
    """

    @with_names_meant(
        device_ids="move the model to its device before wrapping",
        output_device="move the model to its device before wrapping",
        broadcast_buffers="buffers are copied once, at construction; average them by yourself where ranks must agree",
        bucket_cap_mb="write config=DistributedDataParallelConfig(bucket_size=...), which counts elements",
        gradient_as_bucket_view="leave it away, gradients lie in buckets",
        find_unused_parameters="leave it away, or write it in config=DistributedDataParallelConfig(...), for overlap",
        static_graph="leave it away, graphs may change",
        device_mesh="write process_group=mesh",
        mesh="write process_group=mesh",
        ddp_config="write config=DistributedDataParallelConfig(...)",
        pg_collection="write process_group=pg_collection.dp_cp, tensor_parallel_group=pg_collection.tp, "
        "expert_process_group=pg_collection.expt_dp, embedding_group=pg_collection.embd",
    )
    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig | None = None,
        *,
        process_group: Ranks = None,
        expert_process_group: Ranks = None,
        tensor_parallel_group: Ranks = None,
        embedding_group: dist.ProcessGroup | None = None,
        backward_order: Sequence[str] | None = None,
        init_sync: bool = True,
    ) -> None:
        check_wrappers_can_run()
        check_arguments(module, config)
        super().__init__()
        self.module = module
        self.ddp_config = config = config or DistributedDataParallelConfig()
        self.failures = failures = FailureReporter()
        tensor_ranks, slices = localize_on_each_rank(module, process_group, tensor_parallel_group, failures)
        self.tensor_ranks = tensor_ranks
        """The tensor-parallel ranks; None: nobody has said."""
        self.model_slices = slices
        """What this rank has of each parameter, by name; empty where there is one tensor-parallel rank."""
        tensors = find_tensors(module, tensor_ranks)
        trainable = [entry for entry in find_owned_params(module, tensor_ranks) if entry.param.requires_grad]
        check_same_config(config, process_group, failures)
        self._make_grids(tensors, process_group, expert_process_group)

        # The plan: which gradients there are, and where each will lie.
        overwritten = tensors if init_sync else [each for each in tensors if each.trained]
        self.device, self.plan = plan_on_each_rank(
            module, trainable, overwritten, config, self.grids, backward_order, failures, tensor_ranks, slices,
            sums_embeddings=embedding_group is not None,
        )  # fmt: skip
        check_same_model(self.plan, overwritten, self.grids, failures)
        if tensor_ranks is not None:
            grid = self.grids["slice"]
            check_tensor_ranks(self.plan, overwritten, slices, grid, tensor_ranks, failures, compare=init_sync)
        self._check_undeclared_parts(overwritten, process_group, expert_process_group)
        self._choose_gathers()

        # Storage, and the collectives over it.
        self.reductions: dict[str, GradReduction] = make_reductions(config, self.grids, self.device)
        pool = GradPool() if config.release_grads else None
        self.buckets, self.bucket_params = allocate_buckets(self.plan, trainable, self.device, self.reductions, pool)
        """Trainable parameters with their buckets and records, in the order of the buffers."""
        self.records: tuple[GradRecord, ...] = tuple(entry.record for entry in self.bucket_params)
        marked = (entry.owned for entry in self.bucket_params if is_slice(entry.owned.param))
        unknown = tensor_ranks is None and self.grids["dense"].leaves_ranks_out
        self.slices = frozenset(owned.name for owned in marked if unknown)
        """Names of the slices of tensor parallelism of which nobody has said which ranks hold the rest."""
        self._zeroed_views = [view for bucket in self.buckets for view in bucket.zeroed_views()]
        least_room = max(self.reductions.values(), key=lambda each: each.factor)
        self._nan_check = NanCheck(self.buckets, self.device, least_room) if config.check_for_nan_in_grad else None
        reductions = [self.reductions[bucket.layout.grid_name] for bucket in self.buckets]
        self._launcher = BucketLauncher(
            self.buckets, reductions, self._nan_check.note if self._nan_check else None, failures, device=self.device
        )
        if pool is not None:
            pool.wait_for_all_but = weak_method(self._launcher.wait_for_all_but)
        self.steps = StepCheck(self.grids["dense"], failures, self.device, self._launcher.stream)
        self._replicas = Replicas(module, self.grids, failures, config, tensor_ranks)
        self._wait_for_gathers = self._check_masters = _nothing

        # Hooks and accumulators on the parameters, and the first rank's values in them.
        self._watch = ModelWatch(self.bucket_params, module)
        finish = partial(weak_method(self.finish_for_optimizer), "a read of .grad")
        self.shown = ShownGrads(self._shown_params(), finish)
        self.readiness = Readiness(
            self.bucket_params, self._launcher, config, self.device, self.steps, self.shown,
            check_launch=self._watch.check_launch, enter_backward=weak_method(self._enter_backward),
        )  # fmt: skip
        hooks = self.readiness.listen(weak_method(self._reopen))
        self._attachment = attach_params(self, self.bucket_params, hooks, self.grids)
        self.grad_parts = BucketParts(self)
        take_marks(module, slices)
        self._end_making()
        self.shared_embedding = shared_embedding_of(self.bucket_params, embedding_group, failures)
        if init_sync:
            self._copy_first(tensors)

    def _make_grids(self, tensors: Iterable[ModelTensor], ranks: Ranks, expert_ranks: Ranks) -> None:
        config = self.ddp_config
        with self.failures.watch("the making of process groups"):
            self.grids: dict[str, RankGrid] = make_grids(
                ranks,
                expert_ranks,
                tensor_ranks=None if self.tensor_ranks is None else self.tensor_ranks.inner,
                has_experts=any(each.grid_name == "expert" for each in tensors),
                num_instances=config.num_distributed_optimizer_instances,
                separate_gather=config.overlap_param_gather and config.copy_engine_param_gather != "auto",
                copy_engines=config.copy_engine_param_gather is True,
            )
        """By name: the ranks that such parameters are reduced over. "dense" are those that hold one model together."""
        self.failures.grids = self.grids.values()

    def _check_undeclared_parts(self, tensors: Sequence[ModelTensor], ranks: Ranks, expert_ranks: Ranks) -> None:
        """Tensors for which nobody has named the ranks may be parts that this program has cut by itself."""
        unsaid = [(each.name, each.tensor) for each in tensors if ranks is None]
        experts = [(each.name, each.tensor) for each in tensors if expert_ranks is None and each.grid_name == "expert"]
        check_undeclared_parts(unsaid, experts, self.grids["dense"], self.failures)

    def _choose_gathers(self) -> None:
        """Say whether gathers run on copy engines. By "auto" the plan's sizes decide, and groups are made only now."""
        config = self.ddp_config
        self.copy_engines = config.copy_engine_param_gather is True
        if config.overlap_param_gather and config.copy_engine_param_gather == "auto":
            self.grids, self.copy_engines = with_chosen_gathers(self.plan, self.grids, self.device, self.failures)
            self.failures.grids = self.grids.values()

    def broadcast_params(self) -> None:
        """Copy the first rank's parameters and buffers to all other ranks; experts among ranks that hold the same."""
        self._copy_first(find_tensors(self.module, self.tensor_ranks))
        self.steps.forget()

    def _copy_first(self, tensors: Iterable[ModelTensor]) -> None:
        broadcast_tensors(tensors, self.grids, self.failures)
        if self.shared_embedding is not None:
            self.shared_embedding.broadcast()

    # ---- Methods of one iteration, in the order in which a program calls them. ----

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        observer = self.observer  # a recording may begin or end in the forward
        observer.forward_started()
        try:
            return self._forward(*args, **kwargs)
        finally:
            observer.forward_ended()

    def _shown_params(self) -> list[ShownParam]:
        """The parameters, with this rank's part of each gradient where norms over it would not be of the whole."""
        # Norms of experts that only some ranks hold would differ between ranks, and so would a search for Inf.
        sizes = {self.grids[bucket.layout.grid_name].size for bucket in self.buckets}
        own = bool(self.slices) or min(sizes, default=0) < self.grids["dense"].size
        in_parts = own or self.ddp_config.use_distributed_optimizer
        return [
            ShownParam(entry.owned.param, entry.record, entry.dtype, self._part(entry) if in_parts else None)
            for entry in self.bucket_params
        ]

    def _part(self, entry: BucketParam) -> tuple[Tensor, ShardInfo]:
        layout, spec = entry.bucket.layout, entry.slot.spec
        owned, whole = Range(*self.owned_range(layout)), entry.slot.range.counted_from(layout.start)
        held = whole.intersect(owned)
        info = ShardInfo(
            spec.name, spec.shape, *held.counted_from(whole.start), self.grids[layout.grid_name],
            self.reductions[layout.grid_name].num_replicas, "", self.grids["dense"], spec.name in self.slices,
            flat=True, model_slice=self.model_slices.get(spec.name),
        )  # fmt: skip
        return entry.bucket.reduced[slice(*held.counted_from(owned.start))], info

    def follow(self, wait_for_gathers: Callable[[], None], check_masters: Callable[[], None]) -> None:
        """By ``DistributedOptimizer``: what compiled forwards call first, and what every other forward calls first."""
        self._wait_for_gathers, self._check_masters = wait_for_gathers, check_masters

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
        # Compiled code has guards on plain parameters. Some modules of torch evaluate in another way if hooked.
        compiling = torch.compiler.is_compiling()
        if compiling or not self.module.training:
            self._finish_gathers()
        if not compiling:
            self._check_masters()
        if not torch.is_grad_enabled() or is_frozen(self.bucket_params):
            return self._replicas.run(self.module, args, kwargs)
        self._begin_forward()
        outputs = self._replicas.run(self.module, args, kwargs)
        self.readiness.expect_backward(outputs, trains=self.module.training)
        return outputs

    @torch.compiler.disable
    def _finish_gathers(self) -> None:
        self._wait_for_gathers()

    @torch.compiler.disable
    def _begin_forward(self) -> None:
        if self.has_failed:
            self.abandon_iteration()
        self.begin_if_cleared()
        self.check_before_forward()

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


def _nothing() -> None:
    """Do nothing: what forwards call where no ``DistributedOptimizer`` updates the model."""
