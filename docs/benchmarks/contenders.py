"""How a contender is described: a row's name and label, and what builds its training step for a case.

A case is a model to train: sizes, this rank's tokens, the ranks and the device. ``data_parallel.py`` and ``models.py``
have a class each, with these members:

    name, rank, num_ranks, device, tokens()
    make(dtype)                the whole model, with the same weights for every row and rank
    units(model, split_ends)   the modules that are compiled, and that sharded wrappers make units of
    loss_of(model)             a function of one microbatch of tokens; further arguments are the model's
    compiling, compile_loss()  arguments of ``torch.compile``; compiles a model's loss
    ours                       options of the command line for all our rows; sharded units use ``bucket_size`` alone
    about(name, row), rates()  columns of the table: what was measured, and what follows from the ranks' times
"""

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import accumulate, stepping
from ranks import make_mesh
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import _muon as torch_muon

import maingrad
from maingrad import ddp, fsdp, te_integration
from maingrad.ddp.buckets.buffer import MappedPool
from maingrad.ddp.torch_internals.distributed import zero_cta_options
from maingrad.te_integration import autocast
from maingrad.te_integration.wgrad_queue import drain_modules

LEARNING_RATE = 1e-4
PREFETCH = 2
"""Units that tuned FSDP2 gathers ahead."""
KNOBS = {"set_separate_reduce_scatter_group": True, "set_reduce_scatter_max_input_buffers": 2}
"""Methods of FSDP2's modules that let reductions and gathers overlap, with their argument. torch 2.11 has none yet."""


def reset_compiler():
    """Drop compiled graphs and CUDA graphs, which hold the model that they were made for."""
    torch._dynamo.reset()


class Row(NamedTuple):
    """One contender."""

    label: str
    build: Callable[[Any], Any]
    """Makes, for a case, the training step, which returns the last microbatch's loss, detached."""
    options: str = ""
    """How the contender is set up, for the table."""
    compiled: bool = False
    with_groups: bool = True
    """Whether the row's ranks communicate; otherwise each rank is a world of one."""
    trains: bool = True
    """Whether the row trains the model, so that its loss falls as the other rows'."""
    refuse: Callable[[Any], str | None] = lambda _: None
    """Why the row cannot be measured for a case; None if it can."""
    close: Callable[[], None] = reset_compiler
    """Frees what the row left in the process. Called before the row's process groups end, also if the row failed."""


def row_of(label, build, *, refuse=lambda _: None, options="", **how):
    """A row whose ``build`` takes ``how``."""
    return Row(label, partial(build, **how), options, compiled=how.get("compiled", False), refuse=refuse)


# ---- Ours. ----


def wrap(
    case,
    form,
    *,
    fused=True,
    compiled=False,
    split_ends=False,
    num_instances=1,
    compact=False,
    embedding=True,
    muon=False,
    ep=None,
    **options,
):
    """The case's model by ``parallelize(model, form, **options)``.

    fused          weight gradients by our layers; otherwise by ``nn.Linear``
    split_ends     the embedding and the head are units of their own: neither is whole while the other is used
    num_instances  of "hsdp"
    embedding      False: autograd delivers the embedding's gradient, also where our module could
    compact        shards are bf16, for an optimizer with ``state="compact"``
    ep             True: experts are spread over ranks, as the case's ``bench`` says; "delayed": and their weight
                   gradients are computed while rows travel in backward
    muon           True, or "torch" for torch's class. Under "zero1": no border between shards cuts a matrix of Muon's
    """
    MappedPool.num_made = 0  # "auto" maps memory once in a process, and each row stands for a process of its own
    sharded = form not in ("ddp", "zero1")
    model = case.make(torch.float32 if sharded and not compact else torch.bfloat16)
    if sharded:
        outer = {} if num_instances == 1 else {"outer": num_instances}
        options["mesh"] = make_mesh(case.device, {**outer, "inner": case.num_ranks // num_instances})
        stored = {"mixed_precision": fsdp.MixedPrecisionPolicy()} if compact else {"param_dtype": torch.bfloat16}
        options |= {**stored, "bucket_size": case.ours.get("bucket_size")}
    else:
        options |= case.ours
    if muon:
        options["keep_matrices_whole"] = ddp.muon_groups(model).matrices
    if compiled and "fused_loss" not in options:
        case.compile_loss(model)
    units = case.units(model, split_ends)
    compiling = case.compiling
    if ep:
        options |= {"ep": case.bench.ep or case.num_ranks, "dispatch": dispatch_of(case)}
        static = case.bench.transport == "capacity" or not isinstance(options["dispatch"]["transport"], str)
        compiling = {**compiling, "fullgraph": static and ep is True and not sharded}  # sharded experts are units
    if ep == "delayed":
        delay_experts(model)
    wrapped = maingrad.parallelize(model, form, units=units, fuse=fused, compile=compiled and compiling, **options)
    for module in () if embedding else wrapped.modules():
        if isinstance(module, te_integration.Embedding):
            module.fuse_wgrad_accumulation = False
    return wrapped


def train(model, loss_of, tokens, *, graphed=False, recipe=None, optimizer_options=None, after=lambda: None):
    """A step of our wrapped ``model``: ``make_optimizer`` and the README's loop.

    loss_of            of a model: a function of one microbatch
    graphed            True: as one CUDA graph. "auto": by ``maingrad.graphed``, as in the quick start
    optimizer_options  of ``make_optimizer``, beside the learning rate
    after              called after each backward
    """
    optimizer = maingrad.make_optimizer(model, lr=LEARNING_RATE, **(optimizer_options or {}))

    def accumulated(tokens):
        with nullcontext() if recipe is None else autocast(recipe=recipe):
            return accumulate(loss_of(model), tokens, not_last=model.no_sync, after=after)

    step = stepping(accumulated, optimizer)
    if graphed == "auto":
        step = maingrad.graphed(step, model, optimizer)
    elif graphed:
        step = (fsdp if isinstance(model, fsdp.FSDPModule) else ddp).GraphedTrainingStep(step, model, optimizer)
    return partial(step, tokens)


def ours(case, form, *, graphed=False, recipe=None, optimizer_options=None, **how):
    """A step of maingrad; ``how`` the model is wrapped: see ``wrap``; the other options are those of ``train``."""
    model = wrap(case, form, **how)
    if how.get("muon") == "torch":
        matrices = {"params": ddp.muon_groups(model).matrices, "optimizer": torch.optim.Muon, "lr": LEARNING_RATE}
        optimizer_options = {"param_groups": [matrices]}
    elif how.get("muon"):
        optimizer_options = {"param_groups": ddp.muon_groups(model, lr=LEARNING_RATE).groups}
    options = {"graphed": graphed, "recipe": recipe, "optimizer_options": optimizer_options}
    if how.get("ep") == "delayed":
        options["after"] = partial(drain_modules, model)  # a half of what the last wait has found
    tokens, loss_of = case.tokens(), case.loss_of
    if how.get("fused_loss") == "in_forward":
        loss_of = partial(loss_of, grad_scale=1 / len(tokens))  # as ``accumulate`` divides
    return train(model, loss_of, tokens, **options)


def dispatch_of(case):
    """Options of ``TokenDispatcher``."""
    bench, sizes = case.bench, case.architecture.sizes
    factor, over_all = bench.capacity_factor, bench.ep in (None, case.num_ranks)
    if factor is not None or (bench.transport == "symmetric" and over_all):
        from maingrad.te_integration.experts.dispatch.symmetric import SymmetricExchange

        assert dist.group.WORLD is not None, "ranks communicate"
        rows = case.shape.batch * case.shape.length * sizes["num_experts_per_tok"]
        options = {"max_rows": rows, "capacity_factor": factor}  # so known, compiled layers are whole
        return {"transport": SymmetricExchange(sizes["num_experts"], dist.group.WORLD, **options)}
    return {"transport": bench.transport, **({} if bench.capacity is None else {"capacity": bench.capacity})}


def delay_experts(model):
    """Have experts leave their weight gradients to one queue, of which backward computes a half while rows travel."""
    te_integration.convert_linears(model)
    queue = te_integration.WgradQueue(fill_waits=True)
    for module in model.modules():
        if hasattr(module, "dispatcher"):
            module.wgrad_queue = queue
            module.mark_delayed_weights()


def refuse_experts(case):
    """Why there are no experts to be spread over ranks; None if there are."""
    if case.num_ranks > 1 and "num_experts" in case.architecture.sizes:
        return None
    return "experts are spread over two or more ranks, in a model that has experts"


def refuse_copy_engines(case):
    """Why gathers cannot run on copy engines; None if they can."""
    if case.device.type == "cuda" and zero_cta_options() is not None:
        return None
    return "gathers on copy engines need CUDA devices, and a torch that knows NCCL's zero-CTA policy"


def refuse_embedding(_):
    """Why the embedding's gradient cannot come by our module; None if it can."""
    return None if hasattr(te_integration, "Embedding") else "this maingrad has no te_integration.Embedding"


def refuse_instances(case):
    """Why the ranks cannot form two instances; None if they can."""
    if case.num_ranks >= 4 and case.num_ranks % 2 == 0:
        return None
    return "two instances of two or more ranks each need 4 ranks, or a larger even number"


def refuse_graphs(case):
    """Why a step cannot be a CUDA graph; None if it can."""
    return None if case.device.type == "cuda" else "CUDA graphs need CUDA devices"


def refuse_graphed_experts(case):
    """Why a step whose experts are spread over ranks cannot be a CUDA graph; None if it can."""
    refusal = refuse_experts(case) or refuse_graphs(case)
    if refusal is None and case.bench.transport == "all_to_all" and case.bench.capacity_factor is None:
        return "transport all_to_all reads split sizes on the host, which no CUDA graph replays"
    return refusal


def refuse_auto_graphs(_):
    """Why ``maingrad.graphed`` cannot be measured; None if it can."""
    return None if hasattr(maingrad, "graphed") else "this maingrad has no maingrad.graphed"


# ---- Tensor parallelism: all ranks hold one model, and train on the same tokens. ----

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWS_OF_WEIGHT = ("o_proj", "down_proj")


def tensor_parallel(case, by, *, compiled=False):
    """A step of one model that is cut over all ranks.

    by  "torch"      torch's ``parallelize_module`` with ``nn.Linear``: bf16 parameters and gradients
        "fsdp2"      the same under FSDP2 over one data-parallel rank: fp32 parameters, gradients reduced in fp32
        "localized"  the same under maingrad's wrapper, which makes local parameters of the DTensors; fused
        "compact"    so, with 16-bit remainders of the parameters and moments of bf16 in place of fp32 masters
        "modules"    maingrad's ``Linear(parallel_mode=...)``, fused; embedding and head are whole
    """
    model = case.make(torch.float32 if by == "fsdp2" else torch.bfloat16)
    both = make_mesh(case.device, {"dp": 1, "tp": case.num_ranks})
    mesh = both["tp"]
    if by == "modules":
        cut_by_modules(model, mesh.get_group())
    else:
        cut_by_torch(model, case.units(model), mesh)
    if by in ("localized", "compact", "modules"):
        te_integration.convert_linears(model)
    if compiled:
        case.compile_loss(model)
        for unit in case.units(model):
            unit.compile(**case.compiling)
    tokens = replace(case, rank=0).tokens()
    if by in ("torch", "fsdp2"):
        before = shard_by_fsdp2(model, case.units(model), both["dp"], reshard=False)[1] if by == "fsdp2" else None
        kinds: dict[Any, list[Any]] = {}  # one kernel takes DTensors of one mesh, and no plain tensors beside them
        for param in model.parameters():
            kinds.setdefault(getattr(param, "device_mesh", None), []).append(param)
        adamw = torch.optim.AdamW([{"params": params} for params in kinds.values()], lr=LEARNING_RATE, fused=True)
        return stepping(partial(accumulate, case.loss_of(model), tokens, before=before), adamw)
    config = ddp.DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    wrapped = ddp.DistributedDataParallel(
        model, config, process_group=ddp.WORLD_OF_ONE, tensor_parallel_group=mesh.get_group()
    )
    state = {"state": "compact"} if by == "compact" else {}
    return train(wrapped, case.loss_of, tokens, optimizer_options=state)


def cut_by_torch(model, units, mesh):
    """torch's plan: each decoder layer, and the head's vocabulary, whose logits are gathered.

    The embedding stays whole: behind one that torch has cut, backward of a compiled layer fails in torch.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    head = next(name for name, each in model.named_modules() if each is model.get_output_embeddings())
    ends: dict[str, Any] = {head: ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, ends)
    for unit in units:
        names = [name for name, _ in unit.named_modules()]
        plan: dict[str, Any] = {name: ColwiseParallel() for name in names if name.endswith(COLUMNS)}
        plan |= {name: RowwiseParallel() for name in names if name.endswith(ROWS_OF_WEIGHT)}
        parallelize_module(unit, mesh, plan)


def cut_by_modules(model, group):
    """maingrad's modules in place of the ``nn.Linear`` that ``cut_by_torch`` cuts, with slices of their weights."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name not in (*COLUMNS, *ROWS_OF_WEIGHT):
                continue
            cut = te_integration.Linear(
                child.in_features,
                child.out_features,
                bias=child.bias is not None,
                device=child.weight.device,
                dtype=child.weight.dtype,
                parallel_mode="column" if name in COLUMNS else "row",
                tp_group=group,
            )
            with torch.no_grad():
                for own, whole in zip(cut.parameters(), child.parameters(), strict=True):
                    dim = next((d for d in range(own.dim()) if own.shape[d] != whole.shape[d]), None)
                    own.copy_(whole if dim is None else whole.chunk(group.size(), dim)[group.rank()])
            setattr(parent, name, cut)


def refuse_tensor_parallel(case):
    """Why the model cannot be cut over the ranks; None if it can."""
    sizes = case.architecture.sizes
    if case.num_ranks == 1 or sizes.get("num_key_value_heads", 1) % case.num_ranks or "num_experts" in sizes:
        return "tensor parallelism is for two or more ranks that divide the key-value heads of a dense model"
    return None


# ---- FSDP2. ----


def shard_by_fsdp2(model, units, mesh, *, reshard, reshard_root=True):
    """Make units of FSDP2: fp32 parameters, computation in bf16, gradients reduced in fp32, once a step.

    reshard       ZeRO-3; otherwise ZeRO-2: parameters stay gathered until the last microbatch's backward has used them
    reshard_root  FSDP2's argument for the root under ZeRO-3; None is FSDP2's default: gathered from forward to backward

    Returns the model, and what is called before each microbatch; its argument says whether the microbatch is the last.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    root = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_root if reshard else False)

    def before(is_last):
        root.set_requires_gradient_sync(is_last)
        if not reshard:
            root.set_reshard_after_backward(is_last)

    return root, before


def fsdp2(case, *, reshard, split_ends=False, compiled=False, tuned=False, symm_mem=False, float8=False, muon=False):
    """A step of FSDP2.

    reshard   ZeRO-3; otherwise ZeRO-2
    tuned     prefetch and ``KNOBS``, and FSDP2's own default for the root
    symm_mem  communicate from symmetric memory, gathers on copy engines
    float8    torchao's float8, dynamic scales of whole tensors; the head too
    muon      ``GatheredMuon`` for matrices
    """
    model = case.make(torch.float32)
    matrices = ddp.muon_groups(model).matrices if muon else ()
    after_step = convert_by_torchao(model, case.device) if float8 else lambda: None
    units = case.units(model, split_ends)
    if compiled:
        case.compile_loss(model)
        for unit in case.units(model):
            unit.compile(**case.compiling)
    mesh = _copy_engine_mesh(case) if symm_mem else init_device_mesh(case.device.type, (case.num_ranks,))
    root, before = shard_by_fsdp2(model, units, mesh, reshard=reshard, reshard_root=None if tuned else True)
    if tuned:
        _set_knobs(root, units, symm_mem)
    params = dict(model.named_parameters())
    gathered = [GatheredMuon([params.pop(name) for name in matrices], lr=LEARNING_RATE)] if muon else []
    optimizer = Several([torch.optim.AdamW(params.values(), lr=LEARNING_RATE, fused=True), *gathered])
    step = stepping(partial(accumulate, case.loss_of(root), case.tokens(), before=before), optimizer)

    def step_and_scales():
        loss = step()
        after_step()
        return loss

    return step_and_scales


class Several(NamedTuple):
    """Optimizers that step together."""

    optimizers: list[torch.optim.Optimizer]

    def step(self):
        for each in self.optimizers:
            each.step()

    def zero_grad(self):
        for each in self.optimizers:
            each.zero_grad()


class GatheredMuon(torch.optim.Muon):
    """torch's ``Muon`` over parameters that FSDP2 has cut: each rank gathers and orthogonalises every whole update."""

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            for param in group["params"]:
                self._step(param, group)

    def _step(self, param, group):
        grad, weight, momentum = param.grad.to_local(), param.to_local(), group["momentum"]
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"].lerp_(grad, 1 - momentum)
        update = DTensor.from_local(
            grad.lerp(buffer, momentum) if group["nesterov"] else buffer,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
        whole = torch_muon._zeropower_via_newtonschulz(
            update.full_tensor(), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        everywhere = DTensor.from_local(whole, param.device_mesh, [Replicate()], run_check=False)
        mine = everywhere.redistribute(placements=param.placements).to_local()
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(mine, alpha=-torch_muon._adjust_lr(group["lr"], group["adjust_lr_fn"], param.shape))


def convert_by_torchao(model, device):
    """Make every ``nn.Linear`` torchao's ``Float8Linear``; returns what is called after the optimizer's step.

    Weights are gathered in float8, with scales that one reduction computes after the step, as torchtitan sets torchao
    up. Not where the head is tied to the embedding, which reads the weight in bf16. Without a GPU float8 is emulated.
    """
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=not tied, emulate=device.type != "cuda")
    convert_to_float8_training(model, config=config)
    return (lambda: None) if tied else partial(precompute_float8_dynamic_scale_for_fsdp, model)


def refuse_torchao(_):
    """Why torchao's float8 cannot be measured; None if it can."""
    return None if importlib.util.find_spec("torchao") else "torchao is not installed"


def _set_knobs(root, units, symm_mem):
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + PREFETCH])
        unit.set_modules_to_backward_prefetch(units[max(0, index - PREFETCH) : index][::-1])
    for name, value in KNOBS.items():
        if hasattr(root, name):
            getattr(root, name)(value)
    if symm_mem:
        for unit in (*units, root):
            unit.set_symm_mem_for_comm()


def _copy_engine_mesh(case):
    """All ranks, in an NCCL group whose gathers from symmetric memory run on copy engines."""
    group: Any = dist.new_group(pg_options=zero_cta_options())
    return DeviceMesh.from_group(group, case.device.type)


def refuse_symm_mem(case):
    """Why FSDP2 cannot communicate from symmetric memory; None if it can."""
    if case.device.type != "cuda":
        return "symmetric memory needs CUDA devices"
    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_symm_mem_for_comm"):
        return f"FSDP2 of torch {torch.__version__} has no set_symm_mem_for_comm"
    return None if zero_cta_options() is not None else "this torch does not know NCCL's zero-CTA policy"
