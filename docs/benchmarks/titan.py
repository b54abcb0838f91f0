"""torchtitan's expert parallelism as a row of models.py: its Qwen3 model under its own ``parallelize_qwen3``.

Measured with torchtitan 0.2.2, whose wheel runs with released versions of torch; 0.3 asks for a nightly build. The
packages of its models import data loaders that a benchmark does not need: their folders are entered without them, and
empty classes stand for loaders and validators.
"""

import importlib
import importlib.util
import sys
import types
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contenders import LEARNING_RATE
from harness import accumulate, stepping

_LOADING = {
    "torchtitan.components.dataloader": ("BaseDataLoader",),
    "torchtitan.components.validate": ("BaseValidator",),
}


def refuse_torchtitan(case):
    """Why the row cannot be measured; None if it can."""
    if importlib.util.find_spec("torchtitan") is None:
        return "torchtitan is not installed"
    if "num_experts" not in case.architecture.sizes or case.num_ranks == 1:
        return "expert parallelism is for two or more ranks and a model of experts"
    return None


def torchtitan_experts(case, *, reshard, compiled=False):
    """A step of torchtitan's Qwen3 with experts over all ranks: FSDP2 for the rest, fp32 parameters, bf16 products.

    reshard  "always": ZeRO-3; "never": ZeRO-2
    """
    for name in ("qwen3", "llama3", "llama4"):
        _enter_without_init(f"torchtitan.models.{name}")
    for module, names in _LOADING.items():
        if module not in sys.modules:
            sys.modules[module] = types.ModuleType(module)
            vars(sys.modules[module]).update({name: type(name, (), {}) for name in names})
    args = importlib.import_module("torchtitan.models.qwen3.model.args").Qwen3ModelArgs
    model_class = importlib.import_module("torchtitan.models.qwen3.model.model").Qwen3Model
    parallelize = importlib.import_module("torchtitan.models.qwen3.infra.parallelize").parallelize_qwen3
    experts = importlib.import_module("torchtitan.models.moe").MoEArgs
    config = importlib.import_module("torchtitan.config").JobConfig()
    dims = importlib.import_module("torchtitan.distributed").ParallelDims

    sizes = case.architecture.sizes
    config.training.seq_len = case.shape.length
    config.compile.enable = compiled
    config.compile.backend = case.bench.backend
    config.activation_checkpoint.mode = "none"
    config.parallelism.fsdp_reshard_after_forward = reshard
    routing = experts(
        num_experts=sizes["num_experts"],
        num_shared_experts=0,
        top_k=sizes["num_experts_per_tok"],
        score_func="softmax",
        route_norm=sizes["norm_topk_prob"],
        score_before_experts=False,
        load_balance_coeff=None,
    )
    with torch.device(case.device):
        model = model_class(
            args(
                dim=sizes["hidden_size"],
                n_layers=sizes["num_hidden_layers"],
                n_heads=sizes["num_attention_heads"],
                n_kv_heads=sizes["num_key_value_heads"],
                head_dim=sizes["head_dim"],
                hidden_dim=sizes["intermediate_size"],
                vocab_size=sizes["vocab_size"],
                max_seq_len=case.shape.length,
                moe_enabled=True,
                moe_inter_dim=sizes["moe_intermediate_size"],
                moe_args=routing,
            )
        )
    torch.manual_seed(0)
    ranks = {"dp_replicate": 1, "dp_shard": case.num_ranks, "ep": case.num_ranks, "world_size": case.num_ranks}
    mesh = dims(**ranks, cp=1, tp=1, pp=1, etp=1)
    world = dist.distributed_c10d._get_default_group()
    world.bound_device_id, bound = None, world.bound_device_id  # no communicator is split: see ``make_mesh``
    mesh.build_mesh()
    world.bound_device_id = bound
    with torch.no_grad():
        model.init_weights()
    model = parallelize(model, mesh, config)
    kinds: dict[Any, list[Any]] = {}  # one kernel takes DTensors of one mesh
    for param in model.parameters():
        kinds.setdefault(param.device_mesh, []).append(param)
    adamw = torch.optim.AdamW([{"params": params} for params in kinds.values()], lr=LEARNING_RATE, fused=True)
    loss = torch.compile(_loss, backend=case.bench.backend) if compiled and case.bench.compile_loss else _loss

    def before(is_last):
        for module in model.modules():
            if hasattr(module, "set_requires_gradient_sync"):
                module.set_requires_gradient_sync(is_last, recurse=False)

    def loss_of(tokens):
        return loss(model(tokens), tokens) / case.num_ranks  # torchtitan's FSDP sums gradients

    return stepping(partial(accumulate, loss_of, case.tokens(), before=before), adamw)


def _loss(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _enter_without_init(name):
    """Make ``name`` a package whose modules import, without what its ``__init__`` imports."""
    if name not in sys.modules:
        parent = importlib.import_module(name.rpartition(".")[0])
        package = types.ModuleType(name)
        package.__path__ = [f"{folder}/{name.rpartition('.')[2]}" for folder in parent.__path__]
        sys.modules[name] = package
