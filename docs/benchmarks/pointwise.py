"""Norms and gated activations on one GPU: what our modules call where eager, beside inductor's, Liger's and quack's.

    python docs/benchmarks/pointwise.py

modules      what ``LayerNormLinear`` and ``LayerNormMLP`` call: torch's norms, and maingrad's kernel of activations
torch        an activation by torch's operations
kernel       maingrad's Triton kernel of gated activations, as experts call it
inductor     ``torch.compile`` of what the modules call
Liger, quack where they are installed; Liger's activations take the two halves as tensors of their own

Forward, and forward with backward, each beside a copy's time for the same bytes: operands read once, results written
once. The host is ahead of the GPU, so that launches do not count.
"""

import statistics
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from harness import ConfigError, Options, free_memory, log, run_script, take_turns, the_device, time_calls
from tables import Column, Measurement, machine, shown, table, write_table

from maingrad.te_integration.dense.activations import activation_named
from maingrad.te_integration.dense.layer_norm_linear import NormalizingModule
from maingrad.te_integration.experts.scaled_activations import glu_options, scaled_activation

OPS = ("LayerNorm", "RMSNorm", "swiglu", "geglu")
EPS = 1e-5
AHEAD_CYCLES = 2_000_000
"""The GPU sleeps for about a millisecond, in which the host launches all of a measurement."""


@dataclass(frozen=True, kw_only=True)
class PointwiseBench(Options):
    """Sizes of the measurement."""

    shapes: tuple[str, ...] = ("8192x4096", "16384x2048")
    """Rows x features of the result."""
    ops: tuple[str, ...] = OPS
    """Operations, of those above."""
    num_repetitions: int = 30
    """Timed calls; the median counts."""
    backend: str = "inductor"
    """Backend of torch.compile."""


class Operands:
    """One operation's tensors: ``inputs`` that have gradients, and the result's gradient ``dy`` [T, F]."""

    def __init__(self, op, rows, features, device):
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape):
            return torch.randn(shape, device=device, generator=generator).bfloat16()

        gated = op in ("swiglu", "geglu")
        self.op, self.gated, self.features = op, gated, features
        self.x = draw(rows, features * (2 if gated else 1)).requires_grad_()
        self.dy = draw(rows, features)
        size = self.dy.nbytes
        self.forward_nbytes = size * (3 if gated else 2)
        self.nbytes = self.forward_nbytes + size * (5 if gated else 3)
        self.norm = None
        if not gated:
            self.norm = NormalizingModule()
            self.norm.add_normalization(features, EPS, op, False, device, torch.bfloat16)
            self.norm.reset_normalization()

    @property
    def inputs(self):
        """The tensors whose gradients are computed."""
        return [self.x, *(() if self.norm is None else self.norm.parameters())]

    def halves(self):
        """The two halves of a gated activation's input, contiguous, as inputs of their own."""
        return [half.detach().contiguous().requires_grad_() for half in self.x.chunk(2, dim=-1)]


def contenders_of(at, backend):
    """``(function, inputs)`` by name: ``function(*inputs)`` is the result."""
    called = activation_named(at.op).function if at.gated else normalize_with(at)
    found = {"modules": (called, at.inputs), "inductor": (torch.compile(called, backend=backend), at.inputs)}
    if at.gated:
        found["torch"] = (partial(by_torch, at.op), at.inputs)
        found["kernel"] = (partial(scaled_by_kernel, at.op), at.inputs)
    return found | liger(at) | quack(at)


def normalize_with(at):
    """A function of x, gamma and beta, which are the module's own."""
    return lambda x, *_: at.norm.normalize(x)


def by_torch(op, x):
    gate, linear = x.chunk(2, dim=-1)
    return (F.silu(gate) if op == "swiglu" else F.gelu(gate, approximate="tanh")) * linear


def scaled_by_kernel(op, x):
    return scaled_activation(x, None, glu_options("pointwise.py", op))


def liger(at):
    """Liger's functions. None of them writes its results over its operands where that can be chosen."""
    try:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return {}
    if at.gated:
        function = (LigerSiLUMulFunction if at.op == "swiglu" else LigerGELUMulFunction).apply
        return {"Liger": (function, at.halves())}
    if at.op == "LayerNorm":
        return {"Liger": (lambda x, gamma, beta: LigerLayerNormFunction.apply(x, gamma, beta, EPS), at.inputs)}
    return {"Liger": (lambda x, g: LigerRMSNormFunction.apply(x, g, EPS, 0.0, "llama", False), at.inputs)}


def quack(at):
    """quack's RMSNorm, which has a backward."""
    if at.op != "RMSNorm":
        return {}
    try:
        from quack.rmsnorm import rmsnorm
    except ImportError:
        return {}
    return {"quack": (lambda x, gamma: rmsnorm(x, gamma, eps=EPS), at.inputs)}


def call_of(function, inputs, dy):
    """A call that returns events around its forward and after its backward, and its result and gradients."""

    def call():
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if dy.is_cuda else []
        if events:
            torch.cuda._sleep(AHEAD_CYCLES)
            events[0].record()
        result = function(*inputs)
        if events:
            events[1].record()
        grads = torch.autograd.grad(result, inputs, dy)
        if events:
            events[2].record()
        return events, result, grads

    return call


def error_of(found, exact):
    """The largest error of results and gradients, each relative to its largest element."""
    pairs = zip(found, exact, strict=True)
    return max(((ours.double() - right).abs().max() / right.abs().max()).item() for ours, right in pairs)


def exact_results(at):
    """Result and gradients in fp64."""
    inputs = [tensor.detach().double().requires_grad_() for tensor in at.inputs]
    x, *params = inputs
    if at.gated:
        result = activation_named(at.op).function(x)
    elif at.op == "LayerNorm":
        weight, bias = params
        result = F.layer_norm(x, (at.features,), weight, bias, EPS)
    else:
        (weight,) = params
        result = F.rms_norm(x, (at.features,), weight, EPS)
    return result.detach(), *torch.autograd.grad(result, inputs, at.dy.double())


def copy_us_a_byte(tensor, repetitions):
    """Microseconds a byte, read or written, of a device copy."""
    copy = partial(torch.empty_like(tensor).copy_, tensor)
    return time_calls([copy] * repetitions, "cuda", ahead_cycles=AHEAD_CYCLES) * 1e3 / (2 * tensor.nbytes)


def measure_op(bench, op, shape, device):
    """A row for each contender. Without a GPU times are NaN."""
    rows, features = map(int, shape.split("x"))
    at = Operands(op, rows, features, device)
    exact = exact_results(at)
    calls, errors = {}, {}
    for name, (function, inputs) in contenders_of(at, bench.backend).items():
        calls[name] = call = call_of(function, inputs, at.dy)
        _, result, grads = call()
        if len(grads) == 2 and at.gated:
            grads = (torch.cat(grads, dim=-1),)
        errors[name] = error_of((result, *grads), exact)
    per_byte = copy_us_a_byte(at.dy, bench.num_repetitions) if device.type == "cuda" else float("nan")

    def timed(name):
        events, *_ = calls[name]()
        if not events:
            return float("nan"), float("nan")
        events[-1].synchronize()
        return events[0].elapsed_time(events[1]) * 1e3, events[1].elapsed_time(events[2]) * 1e3

    found = []
    for name, times in take_turns(bench.num_repetitions, calls, timed).items():
        forward, backward = (statistics.median(each) for each in zip(*times, strict=True))
        row = Measurement(op=op, shape=shape, name=name, forward_us=forward, backward_us=backward, error=errors[name])
        row["share_of_copy"] = at.nbytes * per_byte / (forward + backward)
        found.append(row)
    return found


COLUMNS: list[Column] = [
    ("", "{row.op}, {row.shape}"),
    ("by", "{row.name}"),
    ("forward, us", shown("forward_us", ".1f")),
    ("backward, us", shown("backward_us", ".1f")),
    ("share of a copy's bandwidth", shown("share_of_copy", ".2f")),
    ("error", "{row.error:.4f}"),
]


def write_report(rows, bench):
    """Write ``pointwise.csv`` and ``pointwise.md``; returns the Markdown."""
    return write_table(
        bench.out_dir,
        "pointwise",
        rows,
        "Norms and gated activations, forward and backward",
        f"{machine()}. bf16; median of {bench.num_repetitions} calls. Bytes are those that forward and backward must "
        f"read and write. Errors are relative to the largest element, against fp64. Made by "
        f"`docs/benchmarks/pointwise.py`.",
        table(rows, COLUMNS),
    )


def run(bench):
    if unknown := set(bench.ops) - set(OPS):
        raise ConfigError(f"unknown op '{min(unknown)}': it is one of {', '.join(OPS)}")
    device = the_device()
    rows = []
    for op in bench.ops:
        for shape in bench.shapes:
            rows += measure_op(bench, op, shape, device)
            free_memory(device)
            torch._dynamo.reset()
    log(write_report(rows, bench))


main = partial(run_script, PointwiseBench, run)

if __name__ == "__main__":
    sys.exit(main())
