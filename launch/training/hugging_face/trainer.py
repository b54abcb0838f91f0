"""``Trainer``: Hugging Face's, over maingrad's wrappers, optimizer and checkpoints."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ....ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    clip_grad_norm,
    load_checkpoint,
    save_checkpoint,
)
from ....ddp.torch_grads.muon_groups import MuonGroups, muon_groups
from ....fsdp import FSDPModule
from ....te_integration import convert_linears
from ...parallelizing.dtypes import policy_of
from ...parallelizing.muon import with_whole_matrices
from ...parallelizing.parallelize import parallelize
from .accelerator import ModelLeavingAccelerator
from .refused import check_accelerator, check_arguments, check_fused_loss, check_model, check_optimizer, check_options
from .step_graph import StepGraph
from .whole import read_as_whole
from .wrapping import (
    config_of,
    group_weight_decay,
    shard,
    share_buffers,
    unit_names,
    whole_weights,
    written_buffers,
)

__all__ = ["Trainer"]

STATE = "maingrad"
"""Folder of a checkpoint that holds parameters, masters and moments, for any number of ranks."""
SCHEDULE = "scheduler.pt"


class Trainer(transformers.Trainer):
    """Hugging Face's ``Trainer``; gradients, the optimizer and its checkpoints are maingrad's.

    parallel      "ddp": nothing is sharded. "zero1": optimizer state and fp32 masters are. "fsdp": parameters and
                  gradients are too
    ddp_config    for "ddp" and "zero1"; None: reductions and gathers overlap computation
    fsdp_units    for "fsdp": names of the classes whose modules are gathered together; None: the model's blocks, as its
                  class names them (``_no_split_modules``)
    fsdp_options  for "fsdp": arguments of ``fully_shard``, such as ``{"placements": "zero2"}``
    cuda_graph    "auto": on a GPU a step becomes one CUDA graph where that is right (``maingrad.graphed``), and a line
                  of the log says why not. False: no graphs. True: on a CPU too, by recorded operations, for tests
    fuse_linears  ``convert_linears``: weight gradients of linear layers, experts and embeddings go into the buckets
    fused_loss    ``convert_linears(model, fused_loss=True)``: training computes the loss without the logits in memory
    muon          options of ``maingrad.ddp.muon_groups``, such as ``{"lr": 0.02}``: Muon updates the layers' matrices,
                  and the optimizer that ``TrainingArguments`` name the rest. None: that optimizer updates all

    All other arguments are ``transformers.Trainer``'s, and ``TrainingArguments`` mean what they mean there. Raises
    ``ValueError`` for arguments, models and optimizers that do not fit, with a remedy. docs/hugging_face.md tells
    which.
    """

    # transformers makes these None before training, or lets programs replace them.
    accelerator: Any
    label_smoother: Any
    lr_scheduler: Any
    model: Any
    model_wrapped: Any
    optimizer: Any

    def __init__(
        self,
        model: Any = None,
        args: transformers.TrainingArguments | None = None,
        *others: Any,
        parallel: Literal["ddp", "zero1", "fsdp"] = "zero1",
        ddp_config: DistributedDataParallelConfig | None = None,
        fsdp_units: Sequence[str] | None = None,
        fsdp_options: Mapping[str, Any] | None = None,
        fuse_linears: bool = True,
        fused_loss: bool = False,
        cuda_graph: Literal["auto", True, False] = "auto",
        muon: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.muon, self._muon_groups = muon, MuonGroups([], {})
        self.parallel, self.fuse_linears, self.fused_loss = parallel, fuse_linears, fused_loss
        self._graph = StepGraph(self, cuda_graph)
        self.ddp_config, self.fsdp_units, self.fsdp_options = ddp_config, fsdp_units, dict(fsdp_options or {})
        check_options(parallel, ddp_config, fsdp_units, self.fsdp_options)
        args = args or transformers.TrainingArguments(output_dir="tmp_trainer")
        check_arguments(args, parallel, has_ddp_config=ddp_config is not None)
        if fused_loss:
            check_fused_loss(args, fuse_linears=fuse_linears)
        if model is not None:
            check_model(model)
        # By name: another Trainer between this class and transformers' may have an order of its own, as TRL's have.
        if others:
            super().__init__(model, args, *others, **options)
        else:
            super().__init__(model=model, args=args, **options)
        check_model(self.model)  # also where model_init has made it
        self._check_optimizer()
        if parallel == "fsdp":
            unit_names(self.model, fsdp_units)
        self._num_counted_params = 0
        if self.label_smoother and type(self.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            # transformers decides by the class's name, which fully_shard changes.
            self.label_smoother = functools.partial(self.label_smoother, shift_labels=True)

    # ---- Building: the model is wrapped before the optimizer is made. ----

    def create_accelerator_and_postprocess(self) -> None:
        """accelerate keeps data loaders, devices and autocast; it wraps no model."""
        super().create_accelerator_and_postprocess()
        check_accelerator(self.accelerator)
        self.accelerator.__class__ = ModelLeavingAccelerator

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Wrap the model, and make its optimizer with transformers' class, options and groups of weight decay."""
        self._wrap_for_training()
        if self.optimizer is None and self.parallel == "fsdp" and self.muon is None:
            return super().create_optimizer(self.model)  # over the shards
        if self.optimizer is None:
            cls, options = self._optimizer_class()
            decayed = self.get_decay_parameter_names(self.model)
            matrices = self._muon_groups.groups
            self.optimizer = group_weight_decay(
                self.model_wrapped, cls, options, decayed, self.args.weight_decay, matrices
            )
        made: torch.optim.Optimizer = self.optimizer
        return made

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if training or self.parallel == "fsdp":  # an evaluation before training may not have room for a whole model
            self._wrap_for_training()
        wrapped: nn.Module = self.model_wrapped if training else self.model
        return wrapped

    def _wrap_for_training(self) -> None:
        """Convert and wrap ``self.model`` unless that is done; ``model_init`` may have replaced it."""
        if self.parallel == "fsdp":
            if not isinstance(self.model, FSDPModule):
                self._check_no_optimizer()
                self._find_matrices()
                self._num_counted_params = self._count_params()
                dtype = torch.bfloat16 if self.args.bf16 else None
                policy = self.fsdp_options.get("mixed_precision") or policy_of(self.model, dtype)
                units = unit_names(self.model, self.fsdp_units)
                self._convert()
                self.model = shard(self.model, units, self.fsdp_options, policy)
            self.model_wrapped = self.model
        elif self.model_wrapped is self.model:
            self._check_no_optimizer()
            self._find_matrices()
            options: dict[str, Any]
            if self.ddp_config is not None:
                options = {"config": with_whole_matrices(self.ddp_config, self._muon_groups)}
            else:
                options = config_of(self.args)
                if self.parallel == "zero1":
                    options["keep_matrices_whole"] = self._muon_groups.matrices
            self._convert()  # before accelerate replaces the model's forward
            prepared = self.accelerator.prepare_model(self.model)
            self.model_wrapped = parallelize(prepared, self.parallel, units=(), fuse=self.fuse_linears, **options)

    def _find_matrices(self) -> None:
        if self.muon is not None:
            self._muon_groups = muon_groups(self.model, **{"weight_decay": self.args.weight_decay, **self.muon})
            if not self._muon_groups.groups:
                raise ValueError(f"muon={self.muon!r}: {self._muon_groups.why_nothing}")

    def _convert(self) -> None:
        if self.fuse_linears:
            reasons = convert_linears(self.model, fused_loss=self.fused_loss).unfused_losses
            if reasons:
                raise ValueError(f"fused_loss=True: {'; '.join(reasons.values())}")

    def _check_no_optimizer(self) -> None:
        """Raise ``ValueError`` where a program or a ``create_optimizer`` of its own has made one too early."""
        if self.optimizer is None:
            return
        groups = (
            "make it from the parameters of self.wrapped_model()"
            if self.parallel == "fsdp"
            else "maingrad.ddp.DistributedOptimizer(self.wrapped_model(), param_groups=...)"
        )
        raise ValueError(
            f"{type(self).__name__} made its optimizer, {type(self._inner_optimizer()).__name__}, before the model was "
            f"wrapped, so that it would update nothing: give optimizer_cls_and_kwargs, or override "
            f"get_decay_parameter_names; for groups of your own, override create_optimizer: {groups}"
        )

    def wrapped_model(self) -> Any:
        """The model that trains, wrapped now unless it is: for a ``create_optimizer`` of your own. Collective."""
        self._wrap_for_training()
        return self.model_wrapped

    def _optimizer_class(self) -> tuple[Any, dict[str, Any]]:
        cls, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
        return cls, dict(options)

    def _check_optimizer(self) -> None:
        if self.optimizer is not None or self.lr_scheduler is not None:
            raise ValueError(
                "optimizers=(...): the optimizer is built over maingrad's buckets after the model is wrapped; give "
                "optimizer_cls_and_kwargs=(torch.optim.AdamW, {...}), and lr_scheduler_type in TrainingArguments"
            )
        optim = getattr(self.args.optim, "value", self.args.optim)
        chosen_by = "optimizer_cls_and_kwargs" if self.optimizer_cls_and_kwargs else f"optim={optim!r}"
        check_optimizer(self._optimizer_class()[0], self.parallel, self.ddp_config, chosen_by)

    # ---- One step. ----

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Forward and backward of one microbatch; the last one of a step reduces gradients."""
        last = self.accelerator.sync_gradients
        if self._graph.is_active:
            return self._graph.microbatch(inputs, num_items_in_batch, last=last)
        # The last microbatch of a stream may be in the middle of a step, which transformers' loop takes for its end.
        with contextlib.nullcontext() if last else model.no_sync():  # type: ignore[operator]
            return self.run_microbatch(model, inputs, num_items_in_batch)

    def run_microbatch(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Forward and backward of one microbatch, as transformers has it. Returns the loss without a graph."""
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def train(self, *args: Any, **options: Any) -> Any:
        """As in ``transformers``."""
        try:
            return super().train(*args, **options)
        finally:
            self._graph.reset()

    def get_batch_samples(self, *loop: Any) -> tuple[list[Any], Tensor | int | None]:
        """A step's microbatches. All ranks begin it with the first rank's buffers, as torch's wrapper has it."""
        if self.args.ddp_broadcast_buffers is not False and self.args.world_size > 1:
            share_buffers(written_buffers(self.model))
        samples, num_items = super().get_batch_samples(*loop)
        self._graph.begin(len(samples))
        return samples, num_items

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.clipped_norm(model, self.args.max_grad_norm) if self._graph.norm is None else self._graph.norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        found = self._graph.norm if grad_norm is None else grad_norm
        return self.clipped_norm(model, float("inf")) if found is None else found

    def clipped_norm(self, model: nn.Module, max_norm: float) -> Tensor:
        """The norm of a step's gradients, which this waits for: ``training_step`` may be a subclass's own."""
        if isinstance(model, FSDPModule) or not model.is_reduced:
            model.finish_grad_sync()  # type: ignore[operator]
        if isinstance(model, DistributedDataParallel):
            return clip_grad_norm(model, max_norm)
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def floating_point_ops(self, inputs: Any) -> int:
        """As in ``transformers``, where the model's parameters are counted: here a rank has a part of them.

        inputs  what the data loader yields; a Trainer that makes its batches itself has other types than dicts
        """
        name = getattr(self.model, "main_input_name", "input_ids")
        main_input = inputs.get(name) if isinstance(inputs, Mapping) else None
        if not self._num_counted_params or main_input is None:
            return super().floating_point_ops(inputs)
        return 6 * int(main_input.numel()) * self._num_counted_params

    def _count_params(self) -> int:
        counts = getattr(self.model, "num_parameters", None)
        return 0 if counts is None else counts(exclude_embeddings=True)

    # ---- Checkpoints. ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a Hugging Face checkpoint of whole weights. Collective; the first rank writes."""
        folder = output_dir or self.args.output_dir
        if isinstance(optimizer := self._inner_optimizer(), DistributedOptimizer):
            optimizer.finish_param_sync()
        weights = whole_weights(self.model, keep=self.args.should_save)
        if self.args.should_save:
            with read_as_whole(self.model, weights):
                self._save(folder, state_dict=weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(Path(output_dir) / STATE, self.model_wrapped, self._inner_optimizer())
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing but a check: ``_load_optimizer_and_scheduler`` reads weights and masters together, once wrapped."""
        if not (Path(resume_from_checkpoint) / STATE).is_dir():
            raise ValueError(
                f"'{resume_from_checkpoint}' has no folder '{STATE}': another Trainer or save_only_model=True has "
                f"written it. To begin a new run with its weights, load the model by from_pretrained"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_checkpoint(Path(checkpoint) / STATE, self.model_wrapped, self._inner_optimizer())
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULE, weights_only=True))

    def _inner_optimizer(self) -> Any:
        """maingrad's or torch's optimizer, in accelerate's; None before training."""
        return getattr(self.optimizer, "optimizer", self.optimizer)
