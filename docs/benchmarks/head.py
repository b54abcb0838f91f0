"""The head and its loss: forward and backward of ``LinearCrossEntropy`` beside an unfused, compiled path and others.

``python docs/benchmarks/head.py`` on one GPU; ``--num-tokens``, ``--hidden-size`` and ``--vocab-size`` set the sizes.
Writes head.csv, and prints the table: median time of forward and backward, time beside the first row, peak memory
beyond what is there before (weight, ``main_grad``, hidden states), and relative errors of loss, ``dx`` and ``dW``
against fp64, on fewer tokens and, of ``dW``, on the first classes. ``equal`` says whether two runs have the same bits.

The unfused path is ``te_integration.Linear``, whose ``dW`` is one product into the fp32 ``main_grad``, and a compiled
cross-entropy of its bf16 logits. Repetitions accumulate, as microbatches do: each product adds to ``main_grad``. Liger,
quack and CCE are measured where they can be imported, with an fp32 ``dW`` where they have one.
"""

import csv
import gc
import importlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from harness import RowOptions, log, run_script, time_calls, versions
from torch import nn

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import Linear, LinearCrossEntropy

CHUNKS = (1024, 2048, 4096)


@dataclass(frozen=True, kw_only=True)
class HeadOptions(RowOptions):
    """Sizes, and how the head is timed."""

    num_tokens: int = 8192
    hidden_size: int = 4096
    vocab_size: int = 131072
    num_repetitions: int = 20
    """Timed repetitions of each row; the median counts."""
    num_error_tokens: int = 4096
    """Tokens on which errors are measured."""
    num_error_classes: int = 2048
    """Classes of ``dW`` on which errors are measured."""
    device: str = "cuda"
    """``cpu`` measures errors, and no time of interest."""


class Unfused(nn.Module):
    """The fused layer's logits, and a compiled loss of them."""

    def __init__(self, options):
        super().__init__()
        sizes = options.hidden_size, options.vocab_size
        self.head = Linear(
            *sizes, bias=False, fuse_wgrad_accumulation=True, device=options.device, dtype=torch.bfloat16
        )
        self.loss = _cross_entropy if options.device == "cpu" else torch.compile(_cross_entropy)

    def forward(self, hidden, targets):
        return self.loss(self.head(hidden), targets)


def _cross_entropy(logits, targets):
    return F.cross_entropy(logits.float(), targets)


class Rival(nn.Module):
    """A weight, and a function of hidden states, weight and targets."""

    def __init__(self, options, loss):
        super().__init__()
        self.head = nn.Linear(
            options.hidden_size, options.vocab_size, bias=False, device=options.device, dtype=torch.bfloat16
        )
        self.loss = loss

    def forward(self, hidden, targets):
        return self.loss(hidden, self.head.weight, targets)


class Ours(nn.Module):
    """``LinearCrossEntropy``."""

    def __init__(self, options, **settings):
        super().__init__()
        sizes = options.hidden_size, options.vocab_size
        self.head = LinearCrossEntropy(*sizes, device=options.device, dtype=torch.bfloat16, **settings)

    def forward(self, hidden, targets):
        return self.head(hidden, targets)


def rows_of():
    """Name -> function of the options that makes the module; rivals that cannot be imported are left out."""
    rows: dict[str, Any] = {"unfused, compiled": Unfused}
    for mode in ("in_forward", "recompute"):
        for chunk in CHUNKS:
            rows[f"{mode}, {chunk:,}"] = partial(Ours, mode=mode, chunk_tokens=chunk)
    for name, find in (("Liger, fp32 dW", _liger), ("quack", _quack), ("CCE, exact", _cce)):
        try:
            rows[name] = partial(Rival, loss=find())
        except (ImportError, AttributeError) as error:
            log(f"without {name}: {error}")
    return rows


def _liger():
    function = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss
    loss = function(accum_dtype=torch.float32)
    return lambda hidden, weight, targets: loss(weight, hidden, targets)


def _quack():
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return lambda hidden, weight, targets: function(hidden, weight, targets, reduction="mean")


def _cce():
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return lambda hidden, weight, targets: function(hidden, weight, targets, impl="cce_exact")


def data_of(options, num_tokens):
    """Hidden states and targets; an eighth of the targets is ignored."""
    generator = torch.Generator(options.device).manual_seed(0)
    made = {"device": options.device, "generator": generator}
    hidden = torch.randn(num_tokens, options.hidden_size, dtype=torch.bfloat16, **made)
    targets = torch.randint(options.vocab_size, (num_tokens,), **made)
    targets[: num_tokens // 8] = -100
    return hidden.requires_grad_(), targets


def model_of(make, options):
    """The wrapped module with the same weight in every row."""
    module = make(options)
    with torch.no_grad():
        generator = torch.Generator(options.device).manual_seed(1)
        module.head.weight.normal_(std=0.02, generator=generator)
    return DistributedDataParallel(module), module.head.weight


def backward(model, hidden, targets):
    """Forward and backward, of which nothing is reduced: gradients accumulate. Returns the loss."""
    hidden.grad = None
    with model.no_sync():
        loss = model(hidden, targets)
        loss.backward()
    return loss.detach()


def peak_gib(run, options):
    """Peak memory of a call beyond what was allocated before."""
    if options.device == "cpu":
        run()
        return float("nan")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def exact_of(options):
    """Loss, ``dx`` and the first classes of ``dW`` in fp64."""
    hidden, targets = data_of(options, options.num_error_tokens)
    weight = torch.empty(options.vocab_size, options.hidden_size, dtype=torch.bfloat16, device=options.device)
    weight.normal_(std=0.02, generator=torch.Generator(options.device).manual_seed(1))
    weight, x = weight.double(), hidden.detach().double()
    logits = (x @ weight.t()).requires_grad_()
    loss = F.cross_entropy(logits, targets)
    (dz,) = torch.autograd.grad(loss, logits)
    return loss.detach(), dz @ weight, dz[:, : options.num_error_classes].t() @ x


def errors_of(model, weight, exact, options):
    """Relative errors of loss, ``dx`` and ``dW``, and whether a second run has the same bits."""
    hidden, targets = data_of(options, options.num_error_tokens)
    runs = []
    for _ in range(2):
        model.zero_grad()
        loss = backward(model, hidden, targets)
        runs.append((loss, hidden.grad.clone(), weight.main_grad[: options.num_error_classes].clone()))
    model.zero_grad()
    equal = all(map(torch.equal, *runs))
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(runs[0], exact, strict=True)], equal


def measure(make, exact, options):
    """Milliseconds, GiB, errors of loss, dx and dW, and whether bits are equal."""
    model, weight = model_of(make, options)
    errors, equal = errors_of(model, weight, exact, options)
    hidden, targets = data_of(options, options.num_tokens)
    run = partial(backward, model, hidden, targets)
    for _ in range(options.num_warmup_steps):
        run()
    time = time_calls([run] * options.num_repetitions, options.device, ahead_cycles=2_000_000)
    return [time, peak_gib(run, options), *errors, equal]


def run(options):
    """Measure all rows."""
    known = rows_of()
    exact = exact_of(options)
    gc.collect()
    rows = []
    log(f"{versions()}; {options.num_tokens:,} tokens x {options.hidden_size:,} x {options.vocab_size:,}, bf16")
    log("| row | ms | beside unfused | GiB | loss | dx | dW | equal |\n|---|---|---|---|---|---|---|---|")
    for name in options.chosen(known):
        try:
            found = measure(known[name], exact, options)
        except Exception as error:  # a rival's: the other rows are measured all the same
            if "unfused" in name or ("," in name and name.partition(",")[0] in ("in_forward", "recompute")):
                raise
            log(f"| {name} | {type(error).__name__}: {str(error)[:200]!r} |")
            continue
        rows.append([name, *found])
        time, gib, *errors, equal = found
        shown = " | ".join(f"{error:.2e}" for error in errors)
        log(f"| {name} | {time:.2f} | {time / rows[0][1]:.3f} | {gib:.2f} | {shown} | {'yes' if equal else 'no'} |")
        gc.collect()
        if options.device != "cpu":
            torch.cuda.empty_cache()
    options.out_dir.mkdir(parents=True, exist_ok=True)
    with (options.out_dir / "head.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "ms", "gib", "loss_error", "dx_error", "dw_error", "equal"])
        writer.writerows(rows)


if __name__ == "__main__":
    raise SystemExit(run_script(HeadOptions, run))
