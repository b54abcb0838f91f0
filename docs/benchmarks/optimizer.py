"""AdamW, SGD and Lion in one pass: bandwidth in each mode beside a copy, and AdamW beside torch's fused kernel.

``python docs/benchmarks/optimizer.py`` on one GPU; ``--num-elements`` sets the size. Writes optimizer.csv, and prints
the table. Rows are as long as the parameters of Llama-1B's blocks, one beside the other in a flat buffer.

The bytes of a mode are those that it must move: each operand read or written once. Today's step is torch's fused AdamW
with ``grad_scale`` and ``found_inf``, which also writes gradients, followed by the cast of masters to bf16.
"""

import csv
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from harness import Options, run_script, time_calls, versions

from maingrad.kernels.optimizer.adamw import AdamUpdate
from maingrad.kernels.optimizer.eight_bits import quantize_moment
from maingrad.kernels.optimizer.lion import LionUpdate
from maingrad.kernels.optimizer.reference import (
    AdamOptions,
    LionOptions,
    SGDOptions,
    UpdateRow,
    join_master,
    split_master,
)
from maingrad.kernels.optimizer.sgd import SGDUpdate

OPTIONS = AdamOptions(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
SIZES = [2048 * 2048, 2048 * 512, 2048 * 512, 2048 * 2048, 2048 * 8192, 2048 * 8192, 2048 * 8192, 2048, 2048]
SGD_OPTIONS = SGDOptions(lr=1e-2, momentum=0.9, dampening=0.0, nesterov=True, weight_decay=0.1)
LION_OPTIONS = LionOptions(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.1)
MODES = {  # class, dtypes of moments, form of the parameter, and bytes an element
    "fp32 master": ("adamw", "fp32", "none", 4 + 3 * 8),
    "fp32 master, bf16 parameter": ("adamw", "fp32", "bf16", 4 + 3 * 8 + 2),
    "remainder": ("adamw", "fp32", "remainder", 4 + 2 * 8 + 8),
    "remainder, bf16 moments": ("adamw", "bf16", "remainder", 4 + 2 * 4 + 8),
    "remainder, 8-bit moments": ("adamw", "8 bits", "remainder", 4 + 2 * 2 + 8),
    "SGD: fp32 master, bf16 parameter": ("sgd", "fp32", "bf16", 4 + 2 * 8 + 2),
    "SGD: remainder, bf16 momentum": ("sgd", "bf16", "remainder", 4 + 4 + 8),
    "Lion: fp32 master, bf16 parameter": ("lion", "fp32", "bf16", 4 + 2 * 8 + 2),
    "Lion: remainder, bf16 moment": ("lion", "bf16", "remainder", 4 + 4 + 8),
    "Lion: remainder, 8-bit moment": ("lion", "8 bits", "remainder", 4 + 2 + 8),
}
CLASSES = {"adamw": (AdamUpdate, OPTIONS), "sgd": (SGDUpdate, SGD_OPTIONS), "lion": (LionUpdate, LION_OPTIONS)}


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(Options):
    """How the update is timed."""

    num_elements: int = 2**26
    """Elements of all rows together."""
    num_repetitions: int = 50
    """Timed repetitions of each; the median counts."""
    num_compared: int = 20
    """Steps after which bits are compared with torch's."""
    device: str = "cuda"
    """``cpu`` compares the reference, and measures nothing of interest."""


class State:
    """Gradients, masters and fp32 moments of all rows, in flat buffers."""

    def __init__(self, count, device):
        generator = torch.Generator(device).manual_seed(0)
        self.lengths: list[int] = []
        for size in cycle(SIZES):
            self.lengths.append(min(size, count - sum(self.lengths)))
            if sum(self.lengths) == count:
                break
        self.grad = torch.randn(count, device=device, generator=generator)
        self.master = torch.randn(count, device=device, generator=generator)
        self.exp_avg, self.exp_avg_sq = torch.zeros(2, count, device=device)
        self.step = torch.zeros((), device=device)

    def rows(self, flat):
        return [None] * len(self.lengths) if flat is None else flat.split(self.lengths)


def update_of(state, kind, moments, form):
    """Our update of copies of the state's tensors, and what it updates: master, parameter, remainder and moments."""
    update = CLASSES[kind][0]
    master, param, remainder = state.master.clone(), None, None
    if form == "bf16":
        param = master.bfloat16()
    elif form == "remainder":
        (param, remainder), master = split_master(master), None
    exp_avg, exp_avg_sq = state.exp_avg.clone(), state.exp_avg_sq.clone()
    if moments == "bf16":
        exp_avg, exp_avg_sq = exp_avg.bfloat16(), exp_avg_sq.bfloat16()
    step = torch.zeros_like(state.step)
    rows = []
    flats = (state.grad, exp_avg, exp_avg_sq, master, param, remainder)
    for key, parts in enumerate(zip(*map(state.rows, flats), strict=True)):
        grad, first, second, own_master, own_param, own_remainder = parts
        scale = scale_sq = None
        if moments == "8 bits":
            first, scale = quantize_moment(first, signed=True)
            second, scale_sq = quantize_moment(second, signed=False)
        tensors = grad, first, second, step, own_master, own_param, own_remainder, scale, scale_sq
        row = UpdateRow(*tensors, key=key)
        rows.append(row if kind == "adamw" else row._replace(exp_avg_sq=None, exp_avg_sq_scale=None))
    return update(rows), (master, param, remainder, exp_avg, exp_avg_sq)


def torch_step(state, cast):
    """Today's step on copies of the state's tensors: a function of (grad_scale, found_inf), and what it updates."""
    master, exp_avg, exp_avg_sq, grad = (
        each.clone() for each in (state.master, state.exp_avg, state.exp_avg_sq, state.grad)
    )
    param = torch.empty_like(master, dtype=torch.bfloat16)
    masters, grads, exp_avgs, exp_avg_sqs = (list(state.rows(each)) for each in (master, grad, exp_avg, exp_avg_sq))
    steps = [torch.zeros_like(state.step) for _ in state.lengths]
    lr, beta1, beta2, eps, weight_decay = map(float, OPTIONS)

    def step(divisor, found_inf):
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            masters, grads, exp_avgs, exp_avg_sqs, [], steps, lr=lr, beta1=beta1, beta2=beta2,
            weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False, grad_scale=divisor, found_inf=found_inf,
        )  # fmt: skip
        if found_inf is not None:
            torch._foreach_sub_(steps, [found_inf] * len(steps))
        if cast:
            param.copy_(master)

    return step, (master, param, grad, exp_avg, exp_avg_sq)


def microseconds(run, options):
    """Median of single calls."""
    for _ in range(5):
        run()
    return time_calls([run] * options.num_repetitions, options.device, ahead_cycles=200_000) * 1e3


def compare(options, state, divisor, found_inf):
    """Elements whose bits differ from torch's after some steps with new gradients: of master, parameter, moments."""
    differ = {}
    for name, (kind, moments, form, _) in MODES.items():
        if moments != "fp32" or kind != "adamw":
            continue
        step, (theirs, their_param, their_grad, *their_moments) = torch_step(state, cast=True)
        update, (master, param, remainder, *our_moments) = update_of(state, kind, moments, form)
        generator = torch.Generator(options.device).manual_seed(1)
        for _ in range(options.num_compared):
            state.grad.normal_(generator=generator)
            their_grad.copy_(state.grad)  # torch's step divides its gradients in place
            step(divisor, found_inf)
            update([OPTIONS], divisor=divisor, found_inf=found_inf)
        if form == "remainder":
            master = join_master(param, remainder)
        pairs = [(theirs, master), *zip(their_moments, our_moments, strict=True)]
        if form == "bf16":
            pairs.append((their_param, param))
        differ[name] = sum(int((one != other).sum()) for one, other in pairs)
    return differ


def run(options):
    device = options.device
    state = State(options.num_elements, device)
    divisor, found_inf = torch.tensor(1.7, device=device), torch.tensor(0.0, device=device)
    differ = compare(options, state, divisor, found_inf)
    count, rows = options.num_elements, []

    def measure(name, run, nbytes):
        time = microseconds(run, options)
        rows.append([name, nbytes, time, count * nbytes / time / 1e3, differ.get(name, "")])

    measure("copy", partial(torch.empty_like(state.grad).copy_, state.grad), 8)
    measure("torch fused, cast to bf16", partial(torch_step(state, cast=True)[0], divisor, found_inf), 4 * 8 + 6)
    measure("torch fused alone, no scale", partial(torch_step(state, cast=False)[0], None, None), 4 + 3 * 8)
    for name, (kind, moments, form, nbytes) in MODES.items():
        update, options_of = update_of(state, kind, moments, form)[0], [CLASSES[kind][1]]
        update = partial(update, options_of, divisor=divisor, found_inf=found_inf)
        measure(name, update, nbytes)
    today = rows[1][2]
    print(f"{versions()}; {count:,} elements in {len(state.lengths)} rows; bits after {options.num_compared} steps")
    print(f"{'':34}{'bytes':>6}{'us':>10}{'GB/s':>9}{'of today':>10}{'of copy':>9}  bits that differ from torch's")
    for name, nbytes, time, rate, bits in rows:
        print(f"{name:34}{nbytes:6}{time:10.1f}{rate:9.0f}{time / today:10.3f}{rate / rows[0][3]:9.3f}  {bits}")
    options.out_dir.mkdir(parents=True, exist_ok=True)
    with open(options.out_dir / "optimizer.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "bytes_per_element", "us", "gb_per_s", "elements_that_differ", "elements", "machine"])
        writer.writerows([*row, count, versions()] for row in rows)


if __name__ == "__main__":
    raise SystemExit(run_script(OptimizerOptions, run))
