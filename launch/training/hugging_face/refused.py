"""Options of ``TrainingArguments`` and models that do not fit maingrad, each with a remedy."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from ....ddp import DistributedDataParallelConfig
from ....ddp.optimizer.param_groups import why_not_over

__all__ = [
    "PARALLEL",
    "check_accelerator",
    "check_arguments",
    "check_fused_loss",
    "check_model",
    "check_optimizer",
    "check_options",
]

PARALLEL = ("ddp", "zero1", "fsdp")


_EVERYWHERE = {
    "deepspeed": 'maingrad shards: Trainer(..., parallel="zero1" or "fsdp")',
    "fsdp": 'it is torch\'s FSDP: use Trainer(..., parallel="fsdp", fsdp_options={...})',
    "parallelism_config": (
        "tensor, context and sequence parallelism are accelerate's; maingrad.ddp takes process groups by itself"
    ),
    "fp16": "use bf16=True, which needs no loss scaling",
    "fp16_full_eval": "it would convert the model that is trained; use bf16",
    "bf16_full_eval": "it would convert the model that is trained; use bf16",
    "torch_compile": (
        "compile layers in place before the Trainer is built: for layer in model.model.layers: layer.compile()"
    ),
    "auto_find_batch_size": "a step that fails on one rank leaves the others waiting; set per_device_train_batch_size",
    "save_on_each_node": "checkpoints need one file system that all ranks share",
    "enable_jit_checkpoint": (
        "ranks get a signal at different steps, and a checkpoint is written by all ranks together; set save_steps"
    ),
    "ddp_static_graph": "the order of reductions follows from shapes, whatever graph the model has; leave it None",
}
"""Options of ``TrainingArguments``, some of which some versions lack, and what to use instead."""
_OF_TORCH_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb")


def check_options(
    parallel: str, ddp_config: DistributedDataParallelConfig | None, fsdp_units: Any, fsdp_options: Mapping[str, Any]
) -> None:
    """Raise ``ValueError`` where options of maingrad's own contradict each other."""
    if parallel not in PARALLEL:
        raise ValueError(f"parallel={parallel!r}: choose one of {', '.join(PARALLEL)}")
    if parallel == "fsdp" and ddp_config is not None:
        raise ValueError('ddp_config has no effect with parallel="fsdp": give fsdp_options, or drop it')
    if parallel != "fsdp" and (fsdp_units is not None or fsdp_options):
        raise ValueError(f'fsdp_units and fsdp_options have no effect with parallel="{parallel}": drop them')
    if ddp_config is None:
        return
    if ddp_config.use_distributed_optimizer is not (parallel == "zero1"):
        raise ValueError(
            f"ddp_config has use_distributed_optimizer={ddp_config.use_distributed_optimizer}, and "
            f"parallel={parallel!r} means {parallel == 'zero1'}: change one of them"
        )
    if ddp_config.calculate_per_token_loss:
        raise ValueError(
            "ddp_config.calculate_per_token_loss: the Trainer divides losses by the tokens of all ranks itself "
            "(average_tokens_across_devices); leave it False"
        )


def check_arguments(args: TrainingArguments, parallel: str, *, has_ddp_config: bool) -> None:
    """Raise ``ValueError`` for the first option that maingrad cannot honour."""
    for option, remedy in _EVERYWHERE.items():
        if getattr(args, option, None):
            raise ValueError(f"TrainingArguments: {option} does not work with maingrad: {remedy}")
    accumulation = getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    if accumulation.get("sync_each_batch"):
        raise ValueError(
            "TrainingArguments: accelerator_config.gradient_accumulation_kwargs['sync_each_batch'] does not work with "
            'maingrad: gradients are reduced once a step. To hold less memory: parallel="fsdp", which reduces shards '
            "each microbatch"
        )
    for option in _OF_TORCH_DDP:
        if getattr(args, option) is not None and (parallel == "fsdp" or has_ddp_config):
            instead = 'has no effect with parallel="fsdp"' if parallel == "fsdp" else "is a field of ddp_config here"
            raise ValueError(f"TrainingArguments: {option} {instead}: leave it None")
    if args.n_gpu > 1:
        raise ValueError(
            f"this process sees {args.n_gpu} GPUs and has no launcher: start one process for each by torchrun, or "
            f"choose one by CUDA_VISIBLE_DEVICES"
        )


def check_fused_loss(args: TrainingArguments, *, fuse_linears: bool) -> None:
    """Raise ``ValueError`` where ``fused_loss=True`` would have no effect."""
    if not fuse_linears:
        raise ValueError("fused_loss=True needs fuse_linears=True: the head's weight gradient goes into the buckets")
    if args.label_smoothing_factor:
        raise ValueError("fused_loss=True: label_smoothing_factor takes logits, so that nothing is fused; drop one")


def check_accelerator(accelerator: Any) -> None:
    """Raise ``ValueError`` where accelerate's launcher or environment has chosen another way of training."""
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise ValueError(f"accelerate was configured for {kind}: start the program by torchrun, without its config")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != accelerator.num_processes:
        raise ValueError(
            f"a launcher has started {started} processes, and accelerate knows of {accelerator.num_processes}: on CPUs "
            f"set use_cpu=True in TrainingArguments"
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"accelerate was configured for mixed_precision={accelerator.mixed_precision}: use bf16=True; for 8 bits, "
            f"maingrad.te_integration.autocast(recipe=...) around the model's forward"
        )
    if accelerator.state.dynamo_plugin.backend.value not in (None, "NO", "no"):
        raise ValueError("accelerate was configured for torch.compile: compile layers in place, layer.compile()")


def check_model(model: nn.Module) -> None:
    """Raise ``ValueError`` for models that something else has distributed or quantised."""
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise ValueError(f"the model is spread over {sorted(devices)} by device_map: load it without device_map")
    if getattr(model, "is_distributed_loading_by_transformers", False) or (getattr(model, "tp_size", None) or 1) > 1:
        raise ValueError("the model was sharded while it was loaded: load it without tp_plan and distributed_config")
    if getattr(model, "is_quantized", False):
        raise ValueError("the model's weights are quantised: load it in bf16 or fp32")


def check_optimizer(cls: Any, parallel: str, ddp_config: DistributedDataParallelConfig | None, chosen_by: str) -> None:
    """Raise ``ValueError`` for an optimizer that cannot update shards; with the name of the option that chose it."""
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ValueError(f"{chosen_by}: not one class of torch.optim.Optimizer; use optim='adamw_torch_fused'")
    whole = ddp_config is not None and ddp_config.keep_params_whole
    kept_whole = "ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True, keep_params_whole=True)"
    if parallel == "fsdp":
        kept_whole = 'parallel="zero1" and ' + kept_whole
    why = why_not_over(cls, whole=whole, kept_whole=kept_whole)
    if why is not None:
        raise ValueError(f"{chosen_by}: {why}")
