"""The peers' rows of ``bench data-parallel``: torch's DDP and FSDP2, Megatron-core, Megatron-FSDP.

Each peer is set up as its own documentation says for bf16 training with gradients summed and reduced in fp32, and with
all the overlap that it offers. Megatron's rows use the fused weight gradient of the same plain layer as the peers'
floor. A row whose package is not installed refuses with that reason.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..steps import accumulate, stepping
from .model import AddmmLinear, Block, LinearFactory, make_model, plain_linear
from .ranks import make_mesh
from .rows import LEARNING_RATE, Case, Row, Step, row_of

__all__ = ["PEERS", "megatron_core_problem", "peer_versions", "shard_by_fsdp2", "wrap_by_megatron"]


# ---- torch's DistributedDataParallel. ----


def _torch_ddp(case: Case, *, compiled: bool) -> Step:
    """fp32 weights and gradients under bf16 autocast, gradients as views of the buckets."""
    model = make_model(case.setting, plain_linear, torch.float32, case.device)
    device_ids = [case.device.index] if case.device.type == "cuda" else None
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
    adamw = torch.optim.AdamW(ddp.parameters(), lr=LEARNING_RATE, fused=True)
    run: Any = torch.compile(ddp) if compiled else ddp
    tokens = case.tokens()

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(case.device.type, torch.bfloat16):
            loss: Tensor = run(inputs, targets)
        return loss

    return stepping(partial(accumulate, forward, tokens, not_last=ddp.no_sync), adamw)


# ---- FSDP2. ----


def shard_by_fsdp2(
    model: nn.Module, units: Iterable[nn.Module], mesh: DeviceMesh, *, reshard: bool, reshard_root: bool | None = True
) -> tuple[Any, Callable[[bool], None]]:
    """Make units of FSDP2: fp32 parameters, computation in bf16, gradients reduced in fp32, once a step.

    reshard       ZeRO-3; otherwise ZeRO-2: parameters stay gathered until the last microbatch's backward has used them
    reshard_root  FSDP2's argument for the root under ZeRO-3; None is FSDP2's default: gathered from forward to backward

    Returns the model, and what is called before each microbatch; its argument says whether the microbatch is the last.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    keep = reshard_root if reshard else False
    root: Any = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=keep)

    def before(is_last: bool) -> None:
        root.set_requires_gradient_sync(is_last)
        if not reshard:
            root.set_reshard_after_backward(is_last)

    return root, before


def _fsdp2(case: Case, *, reshard: bool, split_ends: bool = False, compiled: bool = False) -> Step:
    """split_ends  the embedding and the head are units of their own"""
    model = make_model(case.setting, plain_linear, torch.float32, case.device)
    if compiled:
        model.compile_parts()
    mesh = init_device_mesh(case.device.type, (case.num_ranks,))
    sharded, before = shard_by_fsdp2(model, model.units(split_ends=split_ends), mesh, reshard=reshard)
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return stepping(partial(accumulate, sharded, case.tokens(), before=before), adamw)


# ---- Megatron-core. ----


def wrap_by_megatron(model: nn.Module, *, num_layers: int, hidden_size: int, num_heads: int, **options: Any) -> Any:
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


def _megatron(case: Case, *, fused: bool, zero1: bool) -> Step:
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()
    optimizers = importlib.import_module("megatron.core.optimizer")
    setting = case.setting
    linear: LinearFactory = AddmmLinear.make if fused else plain_linear
    model = wrap_by_megatron(
        make_model(setting, linear, torch.bfloat16, case.device),
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

    def step() -> Tensor:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = accumulate(model, tokens, not_last=model.no_sync)
        model.finish_grad_sync()
        optimizer.step()
        return loss

    return step


def _close_megatron() -> None:
    if _is_installed("megatron.core"):
        importlib.import_module("megatron.core.parallel_state").destroy_model_parallel()


# ---- Megatron-FSDP. ----


def _megatron_fsdp(case: Case, *, stage: int, fused: bool = False, defaults: bool = False) -> Step:
    """A step of Megatron-FSDP.

    defaults  gradients are summed and reduced in bf16, the parameters' dtype; otherwise in fp32, as in all other rows
    """
    package = _megatron_fsdp_alone()
    grads_dtype = None if defaults else torch.float32
    mesh = make_mesh(case.device, {"dp": case.num_ranks, "tp": 1})
    linear: LinearFactory = AddmmLinear.make if fused else plain_linear
    module = make_model(case.setting, linear, torch.bfloat16, case.device)
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
    return stepping(partial(accumulate, model, case.tokens(), before=model.set_model_auto_sync), adamw)


def _megatron_fsdp_alone() -> Any:
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


def peer_versions() -> str:
    """Versions of the installed packages that rows need beyond torch, like "triton 3.6.0, NCCL 2.28.9"."""
    found = []
    for package in ("triton", "megatron-core", "megatron-fsdp"):
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    return ", ".join(found)


# ---- The table of them. ----


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _problem(name: str, device: torch.device) -> str | None:
    if not _is_installed(name):
        return f"{name} is not installed"
    return None if device.type == "cuda" else f"{name} runs on CUDA only"


def megatron_core_problem(device: torch.device) -> str | None:
    """Why Megatron-core cannot be measured on ``device``; None if it can."""
    return _problem("megatron.core", device)


def _refuse_overwriting(case: Case) -> str | None:
    if case.setting.num_microbatches > 1:
        # Megatron-FSDP 0.6.1 asks fused layers to overwrite main_grad after every unshard, even while sums go on there.
        return (
            "it has fused layers overwrite the sum of earlier microbatches: only the last one's gradient would be left"
        )
    return _MEGATRON_FSDP(case)


def _needs(name: str) -> Callable[[Case], str | None]:
    return lambda case: _problem(name, case.device)


_CORE, _MEGATRON_FSDP = _needs("megatron.core"), _needs("megatron_fsdp")

PEERS: Mapping[str, Row] = {
    **{
        name: row_of(label, _megatron, fused=fused, zero1=zero1, refuse=_CORE)._replace(close=_close_megatron)
        for name, label, fused, zero1 in (
            ("megatron_zero1_fused", "Megatron-core ZeRO-1, fused wgrad", True, True),
            ("megatron_zero1", "Megatron-core ZeRO-1", False, True),
            ("megatron_ddp_fused", "Megatron-core DDP, fused wgrad", True, False),
        )
    },
    "fsdp2_zero2": row_of("FSDP2, parameters kept (ZeRO-2)", _fsdp2, reshard=False),
    "fsdp2_zero3": row_of("FSDP2, resharded (ZeRO-3)", _fsdp2, reshard=True),
    "fsdp2_zero3_split": row_of(
        "FSDP2, resharded (ZeRO-3), embedding and head units of their own",
        _fsdp2,
        reshard=True,
        split_ends=True,
    ),
    "torch_ddp": row_of("torch DDP, autocast, fp32 weights", _torch_ddp, compiled=False),
    "fsdp2_zero2_compiled": row_of("FSDP2 ZeRO-2, torch.compile", _fsdp2, reshard=False, compiled=True),
    "fsdp2_zero3_compiled": row_of("FSDP2 ZeRO-3, torch.compile", _fsdp2, reshard=True, compiled=True),
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
