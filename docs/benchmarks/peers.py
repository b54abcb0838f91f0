"""The peers' rows of ``data_parallel.py``: torch's DDP and FSDP2, Megatron-core, Megatron-FSDP.

Each peer is set up as its own documentation says for bf16 training with gradients summed and reduced in fp32, and with
all the overlap that it offers. Megatron's rows use the fused weight gradient of the same plain layer as the peers'
floor. A row whose package is not installed refuses with that reason.
"""

import importlib
import importlib.util
import sys
from functools import partial

import torch
from contenders import LEARNING_RATE, fsdp2, row_of
from gpt import AddmmLinear, Block, plain_linear
from harness import accumulate, stepping
from ranks import make_mesh
from torch import nn

# ---- torch's DistributedDataParallel. ----


def _torch_ddp(case, *, compiled):
    """fp32 weights and gradients under bf16 autocast, gradients as views of the buckets."""
    model = case.make(torch.float32)
    device_ids = [case.device.index] if case.device.type == "cuda" else None
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    adamw = torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE, fused=True)
    run = case.loss_of(torch.compile(ddp) if compiled else ddp)

    def loss_of(microbatch):
        with torch.autocast(case.device.type, torch.bfloat16):
            return run(microbatch)

    return stepping(partial(accumulate, loss_of, case.tokens(), not_last=ddp.no_sync), adamw)


# ---- Megatron-core. ----


def wrap_by_megatron(model, *, num_layers, hidden_size, num_heads, **options):
    """Megatron-core's wrapper of a bf16 model; it sums and reduces gradients in fp32, during backward.

    options  fields of its ``DistributedDataParallelConfig``
    """
    distributed = importlib.import_module("megatron.core.distributed")
    config = importlib.import_module("megatron.core.transformer").TransformerConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    ddp_config = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, **options
    )
    return distributed.DistributedDataParallel(config, ddp_config, model)


def _megatron(case, *, fused, zero1):
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()
    optimizers = importlib.import_module("megatron.core.optimizer")
    setting = case.setting
    linear = AddmmLinear.make if fused else plain_linear
    model = wrap_by_megatron(
        case.make(torch.bfloat16, linear),
        num_layers=setting.num_layers,
        hidden_size=setting.hidden,
        num_heads=setting.num_heads,
        overlap_param_gather=zero1,
        use_distributed_optimizer=zero1,
        average_in_collective=False,
    )
    model.broadcast_params()
    optimizer_config = optimizers.OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        weight_decay=0.01,
        clip_grad=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=zero1,
        overlap_param_gather=zero1,
    )
    optimizer = optimizers.get_megatron_optimizer(optimizer_config, [model])
    tokens = case.tokens()

    def step():
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = accumulate(case.loss_of(model), tokens, not_last=model.no_sync)
        model.finish_grad_sync()
        optimizer.step()
        return loss

    return step


def _close_megatron():
    if _is_installed("megatron.core"):
        importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()


# ---- Megatron-FSDP. ----


def _megatron_fsdp(case, *, stage, fused=False, defaults=False):
    """A step of Megatron-FSDP.

    defaults  gradients are summed and reduced in bf16, the parameters' dtype; otherwise in fp32, as in all other rows
    """
    package = _megatron_fsdp_alone()
    grads_dtype = None if defaults else torch.float32
    mesh = make_mesh(case.device, {"dp": case.num_ranks, "tp": 1})
    linear = AddmmLinear.make if fused else plain_linear
    module = case.make(torch.bfloat16, linear)
    model, adamw = package.fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=[Block],
        zero_dp_strategy=stage,
        device=case.device,
        mixed_precision_policy=package.MixedPrecisionPolicy(
            main_params_dtype=torch.float32, main_grads_dtype=grads_dtype, grad_comm_dtype=grads_dtype
        ),
        sync_model_each_microbatch=False,
    )
    forward = case.loss_of(model)
    return stepping(partial(accumulate, forward, case.tokens(), before=model.set_model_auto_sync), adamw)


def _megatron_fsdp_alone():
    """Import Megatron-FSDP as if Megatron-core were not installed.

    Megatron-FSDP uses Megatron-core's configuration class where Megatron-core is installed. The class of Megatron-core
    0.16 lacks fields that Megatron-FSDP 0.6 sets.
    """
    if "megatron_fsdp" not in sys.modules:
        core = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron"}
        for name in core:
            del sys.modules[name]
        sys.modules["megatron"] = None  # type: ignore[assignment]  # makes ``import megatron`` raise ImportError
        try:
            importlib.import_module("megatron_fsdp")
        finally:
            del sys.modules["megatron"]
            sys.modules.update(core)
    return sys.modules["megatron_fsdp"]


# ---- The table of them. ----


def _is_installed(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _problem(name, device):
    if not _is_installed(name):
        return f"{name} is not installed"
    return None if device.type == "cuda" else f"{name} runs on CUDA only"


def megatron_core_problem(device):
    """Why Megatron-core cannot be measured on ``device``; None if it can."""
    return _problem("megatron.core", device)


def _refuse_overwriting(case):
    if case.setting.num_microbatches > 1:
        # Megatron-FSDP 0.6.1 asks fused layers to overwrite main_grad after every unshard, even while sums go on there.
        return (
            "it has fused layers overwrite the sum of earlier microbatches: only the last one's gradient would be left"
        )
    return _MEGATRON_FSDP(case)


def _needs(name):
    return lambda case: _problem(name, case.device)


_CORE, _MEGATRON_FSDP = _needs("megatron.core"), _needs("megatron_fsdp")

PEERS = {
    **{
        name: row_of(label, _megatron, fused=fused, zero1=zero1, refuse=_CORE)._replace(close=_close_megatron)
        for name, label, fused, zero1 in (
            ("megatron_zero1_fused", "Megatron-core ZeRO-1, fused wgrad", True, True),
            ("megatron_zero1", "Megatron-core ZeRO-1", False, True),
            ("megatron_ddp_fused", "Megatron-core DDP, fused wgrad", True, False),
        )
    },
    "fsdp2_zero2": row_of("FSDP2, parameters kept (ZeRO-2)", fsdp2, reshard=False),
    "fsdp2_zero3": row_of("FSDP2, resharded (ZeRO-3)", fsdp2, reshard=True),
    "fsdp2_zero3_split": row_of(
        "FSDP2, resharded (ZeRO-3), embedding and head units of their own", fsdp2, reshard=True, split_ends=True
    ),
    "torch_ddp": row_of("torch DDP, autocast, fp32 weights", _torch_ddp, compiled=False),
    "fsdp2_zero2_compiled": row_of("FSDP2 ZeRO-2, torch.compile", fsdp2, reshard=False, compiled=True),
    "fsdp2_zero3_compiled": row_of("FSDP2 ZeRO-3, torch.compile", fsdp2, reshard=True, compiled=True),
    "torch_ddp_compiled": row_of("torch DDP, torch.compile", _torch_ddp, compiled=True),
    **{
        f"megatron_fsdp_zero{stage}{suffix}": row_of(
            f"Megatron-FSDP ZeRO-{stage}{what}",
            _megatron_fsdp,
            stage=stage,
            fused=suffix == "_fused",
            defaults=suffix == "_bf16",
            refuse=_refuse_overwriting if (stage, suffix) == (1, "_fused") else _MEGATRON_FSDP,
        )
        for stage in (1, 3)
        for suffix, what in (("", ""), ("_fused", ", fused wgrad"), ("_bf16", ", gradients in bf16"))
    },
}
"""Rows by name, in measuring order. Megatron-FSDP comes last: version 0.6.1 never frees its memory."""
