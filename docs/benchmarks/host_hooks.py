"""Host time of a wrapper's hooks, in microseconds per parameter and microbatch.

The model has many one-element parameters. The hooks' time is the backward under a wrapper minus the same backward
without a wrapper, divided by the number of parameters. The clock runs during backward alone, not during forward,
zeroing or waiting, and the garbage collector is off. Without a wrapper, ``.grad`` is cleared between backwards, so that
autograd assigns ``.grad`` in both cases instead of adding to it.

plain   the gradient comes in ``.grad``, and the hook adds it to ``main_grad``
fused   a module has written ``main_grad`` and says so; the hook records it. Under a foreign wrapper the module returns
        the placeholder gradient that such wrappers expect. It returns the placeholder without a wrapper as well, so
        that the placeholder's cost does not count as the hook's

The intermediate microbatch is under ``no_sync``. The final microbatch marks buckets ready and launches their
collectives, in a group of one rank. Our wrapper and Megatron-core's both overlap and shard. Each round measures all
contenders.
"""

import importlib
from contextlib import contextmanager
from functools import partial

import torch
from host_clock import Wrapped, beyond_bare, unwrapped
from peers import megatron_core_problem, wrap_by_megatron
from ranks import AnyRankFailed, Ranks
from tables import Column, Measurement
from torch import nn

from maingrad import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.contract.main_grad import hand_over, has_main_grad, record_of
from maingrad.ddp.contract.return_table import placeholder

OURS, MEGATRON = "maingrad", "Megatron-core"


HOOK_COLUMNS: list[Column] = [
    ("hooks of", "{row.name}"),
    ("parameters", "{row.parameters}"),
    ("intermediate, us", lambda row: row.problem or f"{row.intermediate_us:.2f}"),
    ("final, us", lambda row: "" if row.problem else f"{row.final_us:.2f}"),
    ("backward without them, us", lambda row: "" if row.problem else f"{row.backward_us:.2f}"),
]


def bench_hooks(device, *, num_params=400, calls=5, rounds=5):
    """Measure plain and fused parameters under our wrapper and, where it runs, under Megatron-core's.

    intermediate_us, final_us  hook time of one parameter in a microbatch under ``no_sync``, and in the last one
    backward_us                backward time of one parameter without a wrapper
    """
    rows = []
    for parameters in ("plain", "fused"):
        problem = megatron_core_problem(device)
        if problem is None:
            try:
                with Ranks.alone(device).attempt(with_groups=True), _megatron_groups():
                    wrappers = {OURS: _wrap_ours, MEGATRON: _wrap_megatron}
                    rows += _measure(wrappers, parameters, device, num_params, calls=calls, rounds=rounds)
                continue
            except AnyRankFailed as failure:
                problem = str(failure)
        rows += _measure({OURS: _wrap_ours}, parameters, device, num_params, calls=calls, rounds=rounds)
        rows.append(Measurement(name=MEGATRON, parameters=parameters, problem=f"not measured: {problem}"))
    return rows


class _Plain(nn.Module):
    """Sum over i of x[i] times parameter i; each of the n parameters has one element."""

    def __init__(self, num_params, device, *, is_foreign):
        super().__init__()
        self.is_foreign = is_foreign
        ones = torch.ones(num_params, 1, device=device, dtype=torch.bfloat16)
        self.weights = nn.ParameterList(nn.Parameter(one.clone()) for one in ones)

    def forward(self, x):
        return (torch.cat(list(self.weights)) * x).sum()


class _Fused(_Plain):
    """A chain of layers, one for each parameter; each layer only reports a weight gradient."""

    def forward(self, x):
        y = x
        for weight in self.weights:
            y = _Report.apply(y, weight, self.is_foreign)
        return y.sum()


class _Report(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, is_foreign):
        ctx.weight, ctx.is_foreign = weight, is_foreign
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        weight = ctx.weight
        if has_main_grad(weight):
            return grads[0], hand_over(weight, record_of(weight), delayed=False, fused=True), None
        return grads[0], placeholder(weight) if ctx.is_foreign else None, None


def _wrap_ours(model):
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    return DistributedDataParallel(model, config)


def _wrap_megatron(model):
    return wrap_by_megatron(model, num_layers=1, hidden_size=128, num_heads=1, use_distributed_optimizer=True)


@contextmanager
def _megatron_groups():
    parallel_state = importlib.import_module("megatron.core.parallel_state")
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def _measure(wrappers, parameters, device, num_params, **how):
    kind = _Plain if parameters == "plain" else _Fused
    pairs = {}
    for name, wrap in wrappers.items():
        bare, model = (kind(num_params, device, is_foreign=name != OURS) for _ in range(2))
        ddp = wrap(model)
        begin = partial(_call, ddp.zero_grad_buffer)
        pairs[name] = (unwrapped(bare), Wrapped(ddp, begin, ddp.no_sync, ddp.finish_grad_sync))
    x = torch.ones(num_params, device=device, dtype=torch.bfloat16, requires_grad=True)
    return [
        Measurement(
            name=name,
            parameters=parameters,
            intermediate_us=us["intermediate_backward_us"],
            final_us=us["final_backward_us"],
            backward_us=us["bare_backward_us"],
        )
        for name, us in beyond_bare(pairs, x, parts=num_params, **how).items()
    ]


def _call(function, is_last):
    function()
