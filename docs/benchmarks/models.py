"""One Hugging Face model trained by maingrad and by FSDP2, eager and compiled, with the same work.

    torchrun --nproc-per-node 2 docs/benchmarks/models.py --model llama-1b

A compiled row compiles each decoder layer in place (``fullgraph=True``), then wraps the model. A layer that does not
compile whole fails its row, but where tokens travel to experts of other ranks. Units of sharded parameters are each
decoder layer, then the model, whose own unit holds the embedding, the last norm and the head.

A row's time is the median over rounds of a round's mean step. A round ends with a synchronize, so that every all-gather
and reduction is on the clock. Clipping is off. A row that cannot be measured stays in the table with its reason.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from architectures import ARCHITECTURES, Architecture, Shape, architecture_named, transformers_version
from contenders import (
    KNOBS,
    PREFETCH,
    Row,
    fsdp2,
    ours,
    refuse_auto_graphs,
    refuse_copy_engines,
    refuse_embedding,
    refuse_experts,
    refuse_graphed_experts,
    refuse_graphs,
    refuse_symm_mem,
    refuse_tensor_parallel,
    refuse_torchao,
    row_of,
    tensor_parallel,
)
from harness import RowOptions, check_names, log, measure_and_write, measure_rows, run_script, versions
from tables import Column, grouped, odd_losses, shown, table, write_sections
from titan import refuse_torchtitan, torchtitan_experts
from torch.distributed.fsdp import FSDPModule
from trace_digest import Tracer

from maingrad.launch.parallelizing.blocks import default_units
from maingrad.launch.plan import model_flops
from maingrad.te_integration.recipes import recipe_named


@dataclass(frozen=True, kw_only=True)
class ModelsBench(RowOptions):
    """Models of Hugging Face: ours and FSDP2."""

    model: str = "llama-1b"
    """llama-1b, llama-8b, qwen3-1.7b, qwen3-30b-a3b, gpt2-large, tiny."""
    shapes: tuple[str, ...] = ()
    """Microbatches of one rank like 4x4096, sequences x tokens; none: the model's own."""
    num_layers: int | None = None
    """Decoder layers; None: the model's own number."""
    num_microbatches: int = 4
    """Microbatches of one step. One alone hides what accumulation costs."""
    backend: str = "inductor"
    """Backend of torch.compile: inductor, aot_eager, eager."""
    trace: tuple[str, ...] = ()
    """Rows that run two further steps under the profiler; a digest of rank 0's trace is written beside the table."""
    compile_loss: bool = False
    """Compile the loss function of compiled rows too."""
    ep: int | None = None
    """Ranks that hold all experts together, in rows with ep; None: all ranks."""
    transport: str = "all_to_all"
    """How tokens travel in these rows: all_to_all, capacity, symmetric."""
    capacity: int | None = None
    """Most rows that a rank sends to one expert, for transport capacity."""
    capacity_factor: float | None = None
    """Symmetric exchanges over all ranks whose ranks receive at most so many times what they send; None: all rows."""
    peak_tflops: float | None = None
    """Dense bf16 TFLOP/s of one GPU, which MFU is a share of; None: by the GPU's name."""
    stem: str = "models"
    """Files are STEM.csv and STEM.md; sections of other models, shapes and numbers of ranks in STEM.csv stay."""


@dataclass(frozen=True)
class Case:
    """The model, the shape, the ranks and the device that a row is built for; see ``contenders.py``."""

    bench: ModelsBench
    architecture: Architecture
    shape: Shape
    rank: int
    num_ranks: int
    device: torch.device
    ours: ClassVar[dict[str, Any]] = {}
    """No option of the command line is for our rows alone."""

    @property
    def name(self):
        return f"{self.architecture.name} {self.shape}"

    @property
    def compiling(self):
        return {"fullgraph": True, "backend": self.bench.backend}

    def make(self, dtype):
        return self.architecture.make(dtype, self.device)

    def units(self, model, split_ends=False):
        return list(default_units(model))

    def compile_loss(self, model):
        if self.bench.compile_loss:
            model.loss_function = torch.compile(model.loss_function, backend=self.bench.backend)

    def loss_of(self, model, **given):
        return lambda tokens: model(input_ids=tokens, labels=tokens, **given).loss  # the model shifts the labels itself

    def tokens(self):
        return self.architecture.tokens(self.shape, self.bench.num_microbatches, self.rank, self.device)

    def about(self, name, row):
        backend = self.bench.backend + (", the loss compiled too" if self.bench.compile_loss else "")
        transport = f": {self.bench.transport}" if "_ep" in name else ""
        return {
            "model": self.architecture.name,
            "shape": str(self.shape),
            "num_microbatches": self.bench.num_microbatches,
            "label": row.label,
            "options": row.options + transport,
            "backend": backend if row.compiled else "",
        }

    def rates(self, step_ms):
        """``tokens_per_second`` of one GPU; ``mfu``: the model's FLOPs of a second over ``peak_tflops``, or NaN."""
        tokens = self.shape.batch * self.shape.length * self.bench.num_microbatches
        per_second = tokens / step_ms[0] * 1e3
        peak = peak_tflops(self.bench, self.device)
        mfu = per_second * self.architecture.flops_per_token(self.shape.length) / (peak * 1e12)
        return {"tokens_per_second": per_second, "mfu": mfu, "peak_tflops": peak}


def peak_tflops(bench, device):
    """Dense bf16 TFLOP/s of one GPU; NaN where neither the options nor the GPU's name tell."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return bench.peak_tflops or model_flops.peak_tflops(name) or math.nan


# ---- The rows. ----


def _knobs_in_words():
    known = [f"{name}({value})" for name, value in KNOBS.items() if hasattr(FSDPModule, name)]
    missing = [name for name in KNOBS if not hasattr(FSDPModule, name)]
    lacks = f" (this torch has no {' and no '.join(missing)})" if missing else ""
    return ", ".join([f"forward and backward prefetch of {PREFETCH}", *known]) + lacks


_ZERO1 = (
    "bf16 parameters, fp32 main_grad and masters; overlap_grad_reduce, overlap_param_gather, DistributedOptimizer; "
    'copy_engine_param_gather="auto"'
)
_ZERO3 = (
    "fp32 shards, bf16 computation, fp32 main_grad; reduce_every_microbatch=False; torch's AdamW(fused=True); "
    'copy_engine_gather="auto"'
)
_FSDP2 = (
    f"fp32 parameters, param_dtype=bf16, reduce_dtype=fp32; torch's AdamW(fused=True); {_knobs_in_words()}; "
    "gradients reduced once a step"
)
_COPIES = "gathers on copy engines"


def _pair(name, label, *, build, **how):
    """An eager row and its compiled one."""
    return {
        name: row_of(label, build, **how),
        f"{name}_compiled": row_of(f"{label}, compiled", build, compiled=True, **how),
    }


_zero1 = partial(_pair, build=ours, form="zero1")
_zero3 = partial(_pair, build=ours, form="zero3", reduce_every_microbatch=False)
_fsdp2 = partial(_pair, build=fsdp2, tuned=True)


def _recipe(name):
    """Rows of both forms under a recipe."""
    recipe = recipe_named(name)
    about = f"autocast({recipe}), the head too"
    return {
        **_zero1(
            f"zero1_{name}",
            f"maingrad ZeRO-1, {type(recipe).__name__}",
            options=f"{_ZERO1}; {about}",
            recipe=recipe,
        ),
        **_zero3(
            f"zero3_{name}",
            f"maingrad ZeRO-3, {type(recipe).__name__}",
            options=f"{_ZERO3}; {about}",
            recipe=recipe,
        ),
    }


def _graphed(pair, name, words, options):
    """Rows of one form as a CUDA graph, asked for and as the quick start has it."""
    asked, quick = f"{options}; GraphedTrainingStep", f"{options}; maingrad.graphed"
    return {
        **pair(f"{name}_graphed", f"{words}, one CUDA graph", options=asked, graphed=True, refuse=refuse_graphs),
        **pair(
            f"{name}_graphed_auto",
            f"{words}, quick start's form",
            options=quick,
            graphed="auto",
            refuse=refuse_auto_graphs,
        ),
    }


def _plain_embedding(pair, name, words, options):
    """Rows of one form where autograd delivers the embedding's gradient."""
    return pair(
        f"{name}_plain_embedding",
        f"{words}, embedding by autograd",
        options=f"{options}; autograd delivers the embedding's gradient",
        embedding=False,
        refuse=refuse_embedding,
    )


def _torchao(stage, reshard):
    return _fsdp2(
        f"fsdp2_zero{stage}_torchao",
        f"FSDP2 ZeRO-{stage}, torchao's float8",
        options=f"{_FSDP2}; Float8Linear with dynamic scales of whole tensors, the head too, gathers in float8",
        reshard=reshard,
        float8=True,
        refuse=refuse_torchao,
    )


def _less(name, words, *, release_grads=False, **optimizer_options):
    """ZeRO-1 in less memory."""
    label, options = f"maingrad ZeRO-1, {words}", f"{_ZERO1}; {words}"
    how = {"release_grads": True} if release_grads else {}
    return _zero1(f"zero1_{name}", label, options=options, optimizer_options=optimizer_options, **how)


def _no_logits(row, name, label, *, options, mode, **how):
    """A row whose head computes the loss; see ``fused_loss`` of ``parallelize``."""
    named, words = name + ("_in_forward" if mode == "in_forward" else "_fused_loss"), f'fused_loss="{mode}"'
    return row(named, f"{label}, {words}", options=f"{options}; {words}", fused_loss=mode, **how)


def _experts(pair, name, words, options):
    """Rows of one form whose experts are spread over ranks, and with their weight gradients under the exchanges.

    Each is there as a CUDA graph too.
    """
    about = f"{options}; experts spread over ranks (--ep, --transport)"
    label = f"{words}, experts over ranks"
    delayed = "their weight gradients while rows travel"
    rows: dict[str, Row] = {}
    for named, ep, then in ((f"{name}_ep", True, ""), (f"{name}_ep_delayed", "delayed", delayed)):
        as_label, as_options = (", ".join(filter(None, (label, then))), "; ".join(filter(None, (about, then))))
        rows |= pair(named, as_label, options=as_options, ep=ep, refuse=refuse_experts)
        rows |= pair(
            f"{named}_graphed",
            f"{as_label}, one CUDA graph",
            options=f"{as_options}; GraphedTrainingStep",
            ep=ep,
            graphed=True,
            refuse=refuse_graphed_experts,
        )
    return rows


def _symmetric(stage, reshard):
    return _fsdp2(
        f"fsdp2_zero{stage}_symm_mem",
        f"FSDP2 ZeRO-{stage}, symmetric memory",
        options=f"{_FSDP2}; set_symm_mem_for_comm in a group with the zero-CTA policy",
        reshard=reshard,
        symm_mem=True,
        refuse=refuse_symm_mem,
    )


def _tensor_parallel(by, label, options):
    about = f"{options}; decoder layers are cut over all ranks, whose tokens are the same: tokens/s are of all together"
    return _pair(f"tp_{by}", label, build=tensor_parallel, by=by, options=about, refuse=refuse_tensor_parallel)


def _torchtitan(stage, reshard):
    """It begins with weights of its own, so its losses are not compared."""
    rows = _pair(
        f"torchtitan_ep_zero{stage}",
        f"torchtitan, expert parallelism, ZeRO-{stage}",
        options=f"its Qwen3 and parallelize_qwen3; fsdp_reshard_after_forward={reshard!r}; AdamW(fused=True); "
        "its loss is divided by the ranks",
        build=torchtitan_experts,
        reshard=reshard,
        refuse=refuse_torchtitan,
    )
    return {name: row._replace(trains=False) for name, row in rows.items()}


ROWS: dict[str, Row] = {
    **_zero1("zero1", "maingrad ZeRO-1", options=_ZERO1),
    **_graphed(_zero1, "zero1", "maingrad ZeRO-1", _ZERO1),
    **_plain_embedding(_zero1, "zero1", "maingrad ZeRO-1", _ZERO1),
    **_zero1("zero1_linear", "maingrad ZeRO-1, nn.Linear", options=f"{_ZERO1}; not converted", fused=False),
    **_no_logits(_zero1, "zero1", "maingrad ZeRO-1", options=_ZERO1, mode="recompute"),
    **_no_logits(_zero1, "zero1", "maingrad ZeRO-1", options=_ZERO1, mode="in_forward"),
    **_less("released", "gradients released", release_grads=True),
    **_less("compact", "compact state", state="compact"),
    **_less("compact_released", "compact state, gradients released", state="compact", release_grads=True),
    **_less("host", "state on the host", offload_state="host"),
    **_less("compact_host", "compact state on the host", state="compact", offload_state="host"),
    **_zero1(
        "zero1_muon", "maingrad ZeRO-1, Muon", options=f"{_ZERO1}; Muon for matrices, AdamW for the rest", muon=True
    ),
    **_zero1(
        "zero1_kernels",
        "maingrad ZeRO-1, gathers by kernels",
        options=f"{_ZERO1}; copy_engine_param_gather=False",
        copy_engine_param_gather=False,
    ),
    **_zero1(
        "zero1_torch_muon",
        "maingrad ZeRO-1, torch's Muon",
        options=f"{_ZERO1}; torch's Muon for matrices, AdamW for the rest",
        muon="torch",
    ),
    **_recipe("float8_current"),
    **_recipe("float8_block"),
    **_zero3("zero3", "maingrad ZeRO-3", options=_ZERO3),
    **_graphed(_zero3, "zero3", "maingrad ZeRO-3", _ZERO3),
    **_plain_embedding(_zero3, "zero3", "maingrad ZeRO-3", _ZERO3),
    **_zero3(
        "zero3_kernels",
        "maingrad ZeRO-3, gathers by kernels",
        options=f"{_ZERO3}; copy_engine_gather=False",
        copy_engine_gather=False,
    ),
    **_zero3(
        "zero3_compact",
        "maingrad ZeRO-3, compact state",
        options="bf16 shards with remainders, fp32 main_grad; reduce_every_microbatch=False; ShardedAdamW",
        compact=True,
        optimizer_options={"state": "compact"},
    ),
    **_zero3(
        "zero3_compact8",
        "maingrad ZeRO-3, compact state, moments in 8 bits",
        options="as zero3_compact, shard_atoms='block', moment_dtype=torch.uint8",
        compact=True,
        shard_atoms="block",
        optimizer_options={"state": "compact", "moment_dtype": torch.uint8},
    ),
    **_no_logits(_zero3, "zero3", "maingrad ZeRO-3", options=_ZERO3, mode="recompute"),
    **_no_logits(_zero3, "zero3", "maingrad ZeRO-3", options=_ZERO3, mode="in_forward"),
    **_no_logits(
        _zero3,
        "zero3_compact8",
        "maingrad ZeRO-3, compact state, moments in 8 bits",
        options="as zero3_compact8",
        mode="in_forward",
        compact=True,
        shard_atoms="block",
        optimizer_options={"state": "compact", "moment_dtype": torch.uint8},
    ),
    **_zero3("zero3_linear", "maingrad ZeRO-3, nn.Linear", options=f"{_ZERO3}; not converted", fused=False),
    **_fsdp2("fsdp2_zero2", "FSDP2 ZeRO-2", options=f"{_FSDP2}; reshard_after_forward=False", reshard=False),
    **_fsdp2(
        "fsdp2_zero3", "FSDP2 ZeRO-3", options=f"{_FSDP2}; reshard_after_forward=True, None for the root", reshard=True
    ),
    **_fsdp2(
        "fsdp2_zero2_muon",
        "FSDP2 ZeRO-2, torch's Muon",
        options=f"{_FSDP2}; reshard_after_forward=False; torch's Muon for matrices, whose updates every rank gathers "
        "and orthogonalises whole",
        reshard=False,
        muon=True,
    ),
    **_torchao(2, reshard=False),
    **_torchao(3, reshard=True),
    **_tensor_parallel(
        "torch", "torch's tensor parallelism, nn.Linear", "bf16 parameters and gradients, AdamW(fused=True)"
    ),
    **_tensor_parallel(
        "fsdp2", "torch's tensor parallelism under FSDP2, nn.Linear", f"{_FSDP2}; one data-parallel rank"
    ),
    **_tensor_parallel("localized", "torch's tensor parallelism under maingrad", _ZERO1),
    **_tensor_parallel(
        "compact", "torch's tensor parallelism under maingrad, compact state", f"{_ZERO1}; state='compact'"
    ),
    **_tensor_parallel("modules", "maingrad's tensor-parallel layers", _ZERO1),
    **_torchtitan(2, "never"),
    **_torchtitan(3, "always"),
    **_experts(_zero1, "zero1", "maingrad ZeRO-1", _ZERO1),
    **_experts(_zero3, "zero3", "maingrad ZeRO-3", _ZERO3),
    # Rows that map symmetric memory come last.
    **_zero1(
        "zero1_copy_engines",
        f"maingrad ZeRO-1, {_COPIES}",
        options=f"{_ZERO1}; {_COPIES}",
        copy_engine_param_gather=True,
        refuse=refuse_copy_engines,
    ),
    **_zero3(
        "zero3_copy_engines",
        f"maingrad ZeRO-3, {_COPIES}",
        options=f"{_ZERO3}; {_COPIES}",
        copy_engine_gather=True,
        refuse=refuse_copy_engines,
    ),
    **_symmetric(2, reshard=False),
    **_symmetric(3, reshard=True),
}
"""Rows by name, in measuring order."""


# ---- The measurement. ----


def choose(bench, rows=ROWS):
    """The model, the shapes, and row names in measuring order. Raises ``ConfigError`` for an unknown name or shape."""
    check_names("model", [bench.model], ARCHITECTURES)
    check_names("row", bench.trace, rows)
    architecture = ARCHITECTURES[bench.model]
    if bench.num_layers is not None:
        architecture = architecture.with_layers(bench.num_layers)
    shapes = [Shape.parse(text) for text in bench.shapes or architecture.shapes]
    return architecture, shapes, bench.chosen(rows)


def bench_models(bench, ranks, rows=ROWS, **how):
    """Measure every chosen row at every shape; ``how``: see ``measure_rows``."""
    architecture, shapes, names = choose(bench, rows)
    cases = [Case(bench, architecture, shape, ranks.rank, ranks.size, ranks.device) for shape in shapes]
    _warm_up(bench, ranks, "_compiled" if any(rows[name].compiled for name in names) else "")
    return measure_rows(bench, ranks, cases, rows, names, after=Tracer(bench.trace, bench.out_dir), **how)


def _warm_up(bench, ranks, suffix):
    """Run a step of ours and one of FSDP2's on a very small model, for what is done once in a process.

    A process imports its compiler and traces the compiler's own patterns for its first graph, starts its communication,
    and loads kernels at their first launch. No row's first step should pay for it.
    """
    tiny = ARCHITECTURES["tiny"]
    once = replace(bench, num_steps=1, num_rounds=1, num_warmup_steps=1)
    case = Case(once, tiny, Shape.parse(tiny.shapes[0]), ranks.rank, ranks.size, ranks.device)
    measure_rows(once, ranks, [case], ROWS, [f"zero1{suffix}", f"fsdp2_zero3{suffix}"])


# ---- The table: a section for each model, shape and number of ranks. ----


def write_report(rows, folder, stem="models"):
    """Write ``stem.csv`` and ``stem.md``, with the sections that the CSV already has; returns the Markdown."""
    return write_sections(
        rows,
        folder,
        stem,
        title="Models of Hugging Face: ours and FSDP2",
        script="models",
        anchor="models-of-hugging-face",
        key=_section,
        sections_of=sections_of,
        parts_of=_parts,
    )


def sections_of(rows):
    """The rows by model, shape, microbatches and number of ranks, in the order in which these come first."""
    return list(grouped(rows, _section).values())


def odd_rows(section):
    """Rows whose loss differs from that of the others with the same optimizer."""
    by_optimizer = grouped(section, lambda row: "muon" in row.row)
    return [row for rows in by_optimizer.values() for row in odd_losses(rows)]


def _section(row):
    return row.model, row.shape, row.num_microbatches, row.num_ranks


def _parts(section):
    some = section[0]
    architecture, shape = architecture_named(some.model), Shape.parse(some.shape)
    total, _ = architecture.count()
    flops = architecture.flops_per_token(shape.length)
    peak = next((row.peak_tflops for row in section if not math.isnan(row.peak_tflops)), math.nan)
    mfu = "" if math.isnan(peak) else f" MFU is over {peak:g} TFLOP/s a GPU."
    backends = sorted({row.backend for row in section if row.backend})
    compiled = f" Compiled rows: every decoder layer whole, by {' and '.join(backends)}." if backends else ""
    columns: list[Column] = [
        ("", "{row.label}"),
        ("ms", shown("step_ms", ".1f")),
        ("spread", shown("spread_ms", ".1f")),
        ("thousand tokens/s a GPU", shown("tokens_per_second", ".1f", scale=1e-3)),
        ("MFU", shown("mfu", ".1%")),
        ("peak GiB", shown("peak_gib", ".1f")),
        ("first step, s", shown("first_step_s", ".1f")),
        ("graphs", lambda row: str(row.num_graphs) if row.backend and not row.problem else ""),
        ("loss", lambda row: row.problem or f"{row.first_loss:.3f} to {row.last_loss:.3f}"),
    ]
    options = grouped((row for row in section if not row.problem), lambda row: row.options)
    microbatches = "1 microbatch" if some.num_microbatches == 1 else f"{some.num_microbatches} microbatches"
    odd = ", ".join(row.label for row in odd_rows(section))
    return [
        f"## {some.model}, {some.shape}, {some.num_ranks} {'rank' if some.num_ranks == 1 else 'ranks'}",
        f"{some.num_ranks} x {some.machine}. {architecture.about}: {total / 1e9:.2f} B parameters, {flops / 1e9:.2f} "
        f"GFLOP a token. A step has {microbatches} of {shape.batch} x {shape.length:,} tokens on each GPU."
        f"{mfu}{compiled}",
        table(section, columns),
        "\n".join(f"- {'; '.join(row.label for row in rows)}: {text}." for text, rows in options.items()),
        *([f"The loss differs from the other rows' in: {odd}."] if odd else []),
    ]


def run(bench):
    """Returns status 1 if the loss of a row differs from the other rows'; the table names the row."""
    choose(bench)
    rows, text = measure_and_write(bench, bench_models, write_report, versions(transformers_version()))
    log(text)
    return any(odd_rows(section) for section in sections_of(rows))


main = partial(run_script, ModelsBench, run)

if __name__ == "__main__":
    sys.exit(main())
