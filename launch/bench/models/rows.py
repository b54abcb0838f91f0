"""The rows of ``bench models``: maingrad's ZeRO-1 and ZeRO-3, and torch's FSDP2, eager and compiled.

A compiled row compiles each decoder layer in place (``layer.compile(fullgraph=True)``), then wraps the model. A layer
that does not compile whole fails its row. Units of sharded parameters are each decoder layer, then the model, whose own
unit holds the embedding, the last norm and the head.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from ....ddp import GraphedTrainingStep
from ....ddp.torch_internals.distributed import zero_cta_options
from ....te_integration import autocast, convert_linears
from ....te_integration.recipes import Recipe, recipe_named
from ...parallelizing.make_optimizer import make_optimizer
from ...parallelizing.parallelize import parallelize
from ..data_parallel.peers import shard_by_fsdp2
from ..data_parallel.rows import LEARNING_RATE, Step, refuse_copy_engines, refuse_graphs
from ..steps import accumulate_losses, stepping
from .architectures import Architecture, Shape, decoder_layers

__all__ = ["ROWS", "Case", "Row"]

_PREFETCH = 2


class Case(NamedTuple):
    """What a row is built for."""

    architecture: Architecture
    shape: Shape
    num_microbatches: int
    rank: int
    num_ranks: int
    device: torch.device
    backend: str
    """Backend of ``torch.compile``."""
    compile_loss: bool

    def tokens(self) -> Tensor:
        """This rank's tokens [M, B, T]."""
        return self.architecture.tokens(self.shape, self.num_microbatches, self.rank, self.device)

    def make_model(self, dtype: torch.dtype, *, fused: bool = False, compiled: bool = False) -> nn.Module:
        """The architecture with the same weights for every row.

        fused     convert its linear layers
        compiled  compile its decoder layers in place, each whole; the loss as well if ``compile_loss``
        """
        model = self.architecture.make(dtype, self.device)
        if fused:
            convert_linears(model)
        if not compiled:
            return model
        for layer in decoder_layers(model):
            layer.compile(fullgraph=True, backend=self.backend)
        if self.compile_loss:
            any_model: Any = model
            any_model.loss_function = torch.compile(any_model.loss_function, backend=self.backend)
        return model


class Row(NamedTuple):
    """One contender."""

    label: str
    build: Callable[[Case], Step]
    options: str
    """How the contender is set up, for the table."""
    compiled: bool = False
    refuse: Callable[[Case], str | None] = lambda _: None
    """Why the row cannot be measured in this case; None if it can."""


def _loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The loss of tokens [B, T]; the model shifts the labels itself."""

    def loss_of(tokens: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        return loss

    return loss_of


# ---- Ours. ----


def _zero1(
    case: Case,
    *,
    fused: bool = True,
    compiled: bool = False,
    copy_engines: bool = False,
    graphed: bool = False,
    recipe: Recipe | None = None,
) -> Step:
    model = case.make_model(torch.bfloat16, fused=fused, compiled=compiled)
    ddp = parallelize(model, "zero1", fuse=False, copy_engine_param_gather=copy_engines)  # fused before it is compiled
    optimizer = make_optimizer(ddp, lr=LEARNING_RATE)

    def accumulated(tokens: Tensor) -> Tensor:
        with autocast(recipe is not None, recipe=recipe):
            return accumulate_losses(_loss_of(ddp), tokens, not_last=ddp.no_sync)

    train_step = stepping(accumulated, optimizer)
    return partial(GraphedTrainingStep(train_step, ddp, optimizer) if graphed else train_step, case.tokens())


def _zero3(case: Case, *, fused: bool = True, compiled: bool = False, copy_engines: bool = False) -> Step:
    model = case.make_model(torch.float32, fused=fused, compiled=compiled)
    sharded = parallelize(
        model,
        "zero3",
        units=decoder_layers(model),
        fuse=False,
        param_dtype=torch.bfloat16,
        reduce_every_microbatch=False,
        copy_engine_gather=copy_engines,
    )
    adamw = make_optimizer(sharded, lr=LEARNING_RATE)
    return stepping(partial(accumulate_losses, _loss_of(sharded), case.tokens(), not_last=sharded.no_sync), adamw)


# ---- FSDP2. ----


def _fsdp2(case: Case, *, reshard: bool, compiled: bool = False, symm_mem: bool = False) -> Step:
    """reshard   ZeRO-3; otherwise ZeRO-2

    symm_mem  communicate from symmetric memory, gathers on copy engines
    """
    model = case.make_model(torch.float32, compiled=compiled)
    mesh = _copy_engine_mesh(case) if symm_mem else init_device_mesh(case.device.type, (case.num_ranks,))
    layers = decoder_layers(model)
    root, before = shard_by_fsdp2(model, layers, mesh, reshard=reshard, reshard_root=None)
    _set_knobs(root, layers, symm_mem)
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    return stepping(partial(accumulate_losses, _loss_of(root), case.tokens(), before=before), adamw)


_KNOBS: Mapping[str, Any] = {"set_separate_reduce_scatter_group": True, "set_reduce_scatter_max_input_buffers": 2}
"""Methods of FSDP2's modules that let reductions and gathers overlap, with their argument. torch 2.11 has none yet."""


def _set_knobs(root: Any, layers: list[nn.Module], symm_mem: bool) -> None:
    units: list[Any] = list(layers)
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + _PREFETCH])
        unit.set_modules_to_backward_prefetch(units[max(0, index - _PREFETCH) : index][::-1])
    for name, value in _KNOBS.items():
        if hasattr(root, name):
            getattr(root, name)(value)
    if symm_mem:
        for unit in (*units, root):
            unit.set_symm_mem_for_comm()


def _copy_engine_mesh(case: Case) -> DeviceMesh:
    """All ranks, in an NCCL group whose gathers from symmetric memory run on copy engines."""
    group = dist.new_group(pg_options=zero_cta_options())
    assert isinstance(group, dist.ProcessGroup), "all ranks are members"
    mesh: DeviceMesh = DeviceMesh.from_group(group, case.device.type)
    return mesh


def _refuse_symm_mem(case: Case) -> str | None:
    if case.device.type != "cuda":
        return "symmetric memory needs CUDA devices"
    if not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        return f"FSDP2 of torch {torch.__version__} has no set_symm_mem_for_comm"
    return None if zero_cta_options() is not None else "this torch does not know NCCL's zero-CTA policy"


def _knobs_in_words() -> str:
    known = [f"{name}({value})" for name, value in _KNOBS.items() if hasattr(FSDPModule, name)]
    missing = [name for name in _KNOBS if not hasattr(FSDPModule, name)]
    lacks = f" (this torch has no {' and no '.join(missing)})" if missing else ""
    return ", ".join([f"forward and backward prefetch of {_PREFETCH}", *known]) + lacks


# ---- The table of them. ----

_ZERO1 = "bf16 parameters, fp32 main_grad and masters; overlap_grad_reduce, overlap_param_gather, DistributedOptimizer"
_ZERO3 = "fp32 shards, bf16 computation, fp32 main_grad; reduce_every_microbatch=False; torch's AdamW(fused=True)"
_FSDP2 = (
    f"fp32 parameters, param_dtype=bf16, reduce_dtype=fp32; torch's AdamW(fused=True); {_knobs_in_words()}; "
    "gradients reduced once a step"
)
_COPIES = "gathers on copy engines"


def _variants() -> Mapping[str, Row]:
    """Every row, each eager one before its compiled one. The rows that map symmetric memory come last."""
    rows: dict[str, Row] = {}

    def add(name: str, label: str, build: Callable[..., Step], options: str, **how: Any) -> None:
        refuse = how.pop("refuse", lambda _: None)
        rows[name] = Row(label, partial(build, **how), options, refuse=refuse)
        rows[f"{name}_compiled"] = Row(
            f"{label}, compiled", partial(build, compiled=True, **how), options, compiled=True, refuse=refuse
        )

    add("zero1", "maingrad ZeRO-1", _zero1, _ZERO1)
    graphed = {"graphed": True, "refuse": refuse_graphs}
    add("zero1_graphed", "maingrad ZeRO-1, one CUDA graph", _zero1, f"{_ZERO1}; GraphedTrainingStep", **graphed)
    add("zero1_linear", "maingrad ZeRO-1, nn.Linear", _zero1, f"{_ZERO1}; not converted", fused=False)
    for name in ("float8_current", "float8_block"):
        recipe = recipe_named(name)
        options = f"{_ZERO1}; autocast({recipe}), the head too"
        add(f"zero1_{name}", f"maingrad ZeRO-1, {type(recipe).__name__}", _zero1, options, recipe=recipe)
    add("zero3", "maingrad ZeRO-3", _zero3, _ZERO3)
    add("zero3_linear", "maingrad ZeRO-3, nn.Linear", _zero3, f"{_ZERO3}; not converted", fused=False)
    add("fsdp2_zero2", "FSDP2 ZeRO-2", _fsdp2, f"{_FSDP2}; reshard_after_forward=False", reshard=False)
    add("fsdp2_zero3", "FSDP2 ZeRO-3", _fsdp2, f"{_FSDP2}; reshard_after_forward=True, None for the root", reshard=True)
    copies: dict[str, Any] = {"copy_engines": True, "refuse": refuse_copy_engines}
    add("zero1_copy_engines", f"maingrad ZeRO-1, {_COPIES}", _zero1, f"{_ZERO1}; {_COPIES}", **copies)
    add("zero3_copy_engines", f"maingrad ZeRO-3, {_COPIES}", _zero3, f"{_ZERO3}; {_COPIES}", **copies)
    for stage, reshard in ((2, False), (3, True)):
        add(
            f"fsdp2_zero{stage}_symm_mem",
            f"FSDP2 ZeRO-{stage}, symmetric memory",
            _fsdp2,
            f"{_FSDP2}; set_symm_mem_for_comm in a group with the zero-CTA policy",
            reshard=reshard,
            symm_mem=True,
            refuse=_refuse_symm_mem,
        )
    return rows


ROWS: Mapping[str, Row] = _variants()
"""Rows by name, in measuring order."""
