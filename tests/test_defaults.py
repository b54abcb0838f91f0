"""Defaults of the public API, as its callers rely on them: a change of one is a change for all programs."""

import enum
import importlib
import inspect
from typing import Any

import torch

from maingrad import kernels, te_integration

FOLDERS = {
    "ddp": "maingrad.ddp",
    "fsdp": "maingrad.fsdp",
    "te_integration": "maingrad.te_integration",
    "pipeline": "maingrad.te_integration.pipeline",
    "kernels": "maingrad.kernels",
    "launch": "maingrad.launch",
}

_LOSS = {
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "logit_scale": 1.0,
    "reduction": "mean",
    "mode": "recompute",
    "chunk_tokens": 2048,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "ddp.DistributedDataParallel": {"init_sync": True},
    "ddp.DistributedDataParallelConfig": {
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": False,
        "use_distributed_optimizer": False,
        "overlap_param_gather": False,
        "copy_engine_param_gather": "auto",
        "num_distributed_optimizer_instances": 1,
        "keep_params_whole": False,
        "release_grads": False,
        "shard_atom": 1,
        "calculate_per_token_loss": False,
        "check_for_nan_in_grad": False,
        "pad_buckets_for_high_nccl_busbw": False,
        "find_unused_parameters": False,
        "forward_writes": "refused",
    },
    "ddp.DistributedOptimizer": {"optimizer_class": torch.optim.AdamW, "skip_nonfinite": False, "state": "full"},
    "ddp.Lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False},
    "ddp.muon_groups": {"routers": False},
    "ddp.Muon": {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "split": 1},
    "ddp.GraphedTrainingStep": {"num_warmup_steps": 2, "max_graphs": 8},
    "ddp.clip_grad_norm": {"error_if_nonfinite": False},
    "ddp.save_checkpoint": {"background": False},
    "fsdp.GraphedTrainingStep": {"num_warmup_steps": 2, "max_graphs": 8},
    "fsdp.MixedPrecisionPolicy": {"grad_dtype": torch.float32, "cast_forward_inputs": True},
    "fsdp.ShardedAdam": {"state": "compact"},
    "fsdp.ShardedAdamW": {"state": "compact"},
    "fsdp.fully_shard": {
        "placements": "zero3",
        "shard_atoms": "element",
        "offload_to_cpu": False,
        "copy_engine_gather": "auto",
        "init_sync": True,
        "forward_writes": "refused",
        "distributed_weights": False,
    },
    "te_integration.DelayedScaling": {
        "emulate": False,
        "fp8_format": te_integration.Format.HYBRID,
        "margin": 0,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "reduce_amax": True,
    },
    "te_integration.Embedding": {
        "norm_type": 2.0,
        "scale_grad_by_freq": False,
        "sparse": False,
        "_freeze": False,
        "fuse_wgrad_accumulation": False,
    },
    "te_integration.Float8BlockScaling": {"emulate": False},
    "te_integration.Float8CurrentScaling": {"emulate": False, "fp8_format": te_integration.Format.HYBRID},
    "te_integration.GroupedLinear": {
        "bias": True,
        "single_grouped_weight": False,
        "single_grouped_bias": False,
        "scale_bias": False,
        "fuse_wgrad_accumulation": False,
        "delay_wgrad_compute": False,
        "return_bias": False,
        "save_original_input": False,
    },
    "te_integration.GroupedMLP": {
        "bias": True,
        "single_grouped_weight": False,
        "single_grouped_bias": False,
        "scale_bias": False,
        "activation": "swiglu",
        "fuse_wgrad_accumulation": False,
        "delay_wgrad_compute": False,
    },
    "te_integration.LayerNormLinear": {
        "eps": 1e-05,
        "bias": True,
        "normalization": "LayerNorm",
        "zero_centered_gamma": False,
        "return_layernorm_output": False,
        "return_bias": False,
        "fuse_wgrad_accumulation": False,
        "delay_wgrad_compute": False,
        "save_original_input": False,
        "tp_size": 1,
        "sequence_parallel": False,
    },
    "te_integration.LayerNormMLP": {
        "eps": 1e-05,
        "bias": True,
        "normalization": "LayerNorm",
        "activation": "gelu",
        "zero_centered_gamma": False,
        "return_layernorm_output": False,
        "return_bias": False,
        "checkpoint": False,
        "fuse_wgrad_accumulation": False,
        "delay_wgrad_compute": False,
        "set_parallel_mode": False,
        "tp_size": 1,
        "sequence_parallel": False,
    },
    "te_integration.Linear": {
        "bias": True,
        "fuse_wgrad_accumulation": False,
        "delay_wgrad_compute": False,
        "return_bias": False,
        "save_original_input": False,
        "tp_size": 1,
        "sequence_parallel": False,
    },
    "te_integration.LinearCrossEntropy": _LOSS | {"bias": False, "fuse_wgrad_accumulation": True},
    "te_integration.linear_cross_entropy": _LOSS,
    "te_integration.MXFP8BlockScaling": {"emulate": False},
    "te_integration.NVFP4BlockScaling": {
        "emulate": False,
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
    },
    "te_integration.Recipe": {"emulate": False},
    "te_integration.ScaledClampedQGeGLU": {
        "activation_recompute_in_mlp": False,
        "limit": 7.0,
        "alpha": 1.702,
        "glu_linear_offset": 1.0,
    },
    "te_integration.ScaledSwiGLU": {"activation_recompute_in_mlp": False},
    "te_integration.autocast": {"enabled": True, "calibrating": False},
    "te_integration.convert_linears": {"fused_loss": False},
    "te_integration.make_graphed_callables": {"num_warmup_iters": 3},
    "te_integration.TokenDispatcher": {"transport": "all_to_all", "quantize_rows": False},
    "te_integration.WgradQueue": {"fill_waits": False},
    "pipeline.finalize_model_grads": {"force_all_reduce": False},
    "pipeline.PipelineStage": {"average_microbatches": True, "delay_wgrad": True},
    "kernels.grouped_linear": {"transposed": False},
    "kernels.grouped_wgrad_accumulate": {"overwrite": False},
    "kernels.glu_named": {"limit": 7.0, "alpha": 1.702, "linear_offset": 1.0},
    "kernels.scaled_glu": {"glu": kernels.glu_named("swiglu")},
    "kernels.scaled_glu_backward": {"glu": kernels.glu_named("swiglu")},
    "kernels.embedding_wgrad_accumulate": {"overwrite": False},
    "kernels.wgrad_accumulate": {"overwrite": False},
    "launch.graphed": {"max_graphs": 8, "record_on_cpu": False},
    "launch.make_optimizer": {"optimizer_class": torch.optim.AdamW},
    "launch.parallelize": {"units": "auto", "fuse": True, "fused_loss": False, "recompute": False, "compile": False},
    "launch.simulate": {"seed": 0},
    "launch.verify": {"ranks": 2, "num_microbatches": 2, "seed": 0},
}
"""Arguments that are not None, or empty, unless a program says otherwise."""

METHODS: dict[str, dict[str, Any]] = {
    "ddp.DistributedDataParallel.finish_grad_sync": {"force_all_reduce": False},
    "ddp.DistributedOptimizer.mark_loaded": {"whole": False, "from_full": False},
    "fsdp.FSDPModule.set_reshard_after_forward": {"recurse": True},
    "fsdp.FSDPModule.unsharded": {"writeback": False},
}


def defaults_of(called: Any) -> dict[str, Any]:
    given = {name: each.default for name, each in inspect.signature(called).parameters.items()}
    return {
        name: value
        for name, value in given.items()
        if value is not inspect.Parameter.empty and value is not None and value != () and not inspect.isfunction(value)
    }


def test_defaults_are_those_that_programs_rely_on() -> None:
    found = {}
    for short, folder in FOLDERS.items():
        module = importlib.import_module(folder)
        for name in module.__all__:
            called = getattr(module, name)
            kinds = (enum.Enum, BaseException)
            if callable(called) and not (inspect.isclass(called) and issubclass(called, kinds)):
                found[f"{short}.{name}"] = defaults_of(called)
    assert {name: given for name, given in found.items() if given} == DEFAULTS


def test_defaults_of_methods() -> None:
    for name, expected in METHODS.items():
        short, cls, method = name.split(".")
        assert defaults_of(getattr(getattr(importlib.import_module(FOLDERS[short]), cls), method)) == expected, name
