"""Host time of a wrapper: of forward and backward under it, minus the same without it. Of its hooks, and of its units.

The clock runs during forward and backward alone, not during zeroing, waiting or the optimizer's step.
"""

import importlib
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from contenders import shard_by_fsdp2
from harness import host_seconds, synchronize
from peers import megatron_core_problem, wrap_by_megatron
from ranks import AnyRankFailed, Ranks
from tables import Measurement
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.contract.main_grad import hand_over, has_main_grad, placeholder, record_of
from maingrad.fsdp import MixedPrecisionPolicy, fully_shard


def medians(one_round, rounds):
    """The medians of what ``one_round`` returns; one round more, the first, is a warm-up."""
    measured = [one_round() for _ in range(rounds + 1)][1:]
    return {key: statistics.median(each[key] for each in measured) for key in measured[0]}


class Wrapped(NamedTuple):
    """A model under a wrapper or under none, and what an iteration calls."""

    model: nn.Module
    begin: Callable[[bool], Any]
    """Called before each microbatch; the argument says whether this microbatch is the last."""
    no_sync: Callable[[], AbstractContextManager[Any]]
    """What every microbatch but the last runs in."""
    step: Callable[[], Any]
    """Called at the end."""


def unwrapped(model):
    """The model alone. ``.grad`` is cleared before each microbatch, so that autograd assigns instead of adding."""
    return Wrapped(model, lambda _: model.zero_grad(), nullcontext, model.zero_grad)


def beyond_bare(contenders, x, *, parts, calls, rounds):
    """Host microseconds of one of a model's ``parts`` in the wrapper, by contender.

    contenders  the model without and with the wrapper

    ``intermediate_`` is of a microbatch that is not the last, ``final_`` of the last one, ``bare_`` of a microbatch
    without the wrapper: each with ``forward_us`` and ``backward_us``.
    """

    def one_round():
        found: dict[Any, float] = {}
        for name, pair in contenders.items():
            bare, wrapped = (_microbatch_us(each, x, parts, calls) for each in pair)
            found |= {(name, part): wrapped[part] - bare[part] for part in bare}
            found |= {(name, part.replace("final", "bare")): bare[part] for part in bare if "final" in part}
        return found

    measured = medians(one_round, rounds)
    return {name: {part: us for (of, part), us in measured.items() if of == name} for name in contenders}


def _microbatch_us(wrapped, x, parts, calls):
    """Means over iterations of two microbatches. The clock does not run between them."""
    totals: dict[str, float] = {}
    for _ in range(calls):
        for microbatch in ("intermediate", "final"):
            is_last = microbatch == "final"
            x.grad = None
            wrapped.begin(is_last)
            with nullcontext() if is_last else wrapped.no_sync():
                forward, loss = host_seconds(lambda: wrapped.model(x).sum(), x.device)
                backward, _ = host_seconds(loss.backward, x.device)
            for way, seconds in (("forward", forward), ("backward", backward)):
                key = f"{microbatch}_{way}_us"
                totals[key] = totals.get(key, 0.0) + 1e6 * seconds / calls / parts
        synchronize(x.device)
        wrapped.step()
    return totals


# ---- Hooks. ----

OURS, MEGATRON = "maingrad", "Megatron-core"


def bench_hooks(device, *, num_params=400, calls=5, rounds=5):
    """Plain and fused parameters of one element under our wrapper and, where it runs, under Megatron-core's.

    plain   the gradient comes in ``.grad``, and the hook adds it to ``main_grad``
    fused   a module has written ``main_grad`` and says so; the hook records it. Under a foreign wrapper the module
            returns the placeholder gradient that such wrappers expect. It returns the placeholder without a wrapper as
            well, so that the placeholder's cost does not count as the hook's

    The intermediate microbatch is under ``no_sync``. The final microbatch marks buckets ready and launches their
    collectives, in a group of one rank. Both wrappers overlap and shard.

    intermediate_us, final_us  hook time of one parameter in a microbatch under ``no_sync``, and in the last one
    backward_us                backward time of one parameter without a wrapper
    """
    rows = []
    for parameters in ("plain", "fused"):
        measure = partial(_hooks, parameters, device, num_params, calls=calls, rounds=rounds)
        problem = megatron_core_problem(device)
        if problem is None:
            try:
                with Ranks.alone(device).attempt(with_groups=True), _megatron_groups():
                    rows += measure({OURS: _wrap_ours, MEGATRON: _wrap_megatron})
                continue
            except AnyRankFailed as failure:
                problem = str(failure)
        rows += measure({OURS: _wrap_ours})
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
            return grads[0], hand_over(weight, record_of(weight), fused=True), None
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


def _hooks(parameters, device, num_params, wrappers, **how):
    kind = _Plain if parameters == "plain" else _Fused
    pairs = {}
    for name, wrap in wrappers.items():
        bare, model = (kind(num_params, device, is_foreign=name != OURS) for _ in range(2))
        ddp = wrap(model)
        begin = lambda is_last, clear=ddp.zero_grad_buffer: clear()  # noqa: E731
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


# ---- Sharded units. ----

_SHAPE = (16, 16)


def bench_units(device, *, num_units=24, calls=3, rounds=5):
    """Our units and FSDP2's, with parameters resharded after forward and with parameters kept whole.

    Units have fp32 weights and compute in bf16; without a wrapper the weights are bf16. The group has one rank, so that
    no wrapper launches a collective: the time is the wrappers' own work, and the copies into the buffers that
    collectives would read. The intermediate microbatch does not reduce whole gradients (``no_sync``).
    """
    try:
        with Ranks.alone(device).attempt(with_groups=True):
            bare = unwrapped(_chain(num_units, device, torch.bfloat16))
            pairs = {
                name: (bare, wrap(_chain(num_units, device, torch.float32), device)) for name, wrap in _UNITS.items()
            }
            x = torch.ones(_SHAPE, device=device, dtype=torch.bfloat16, requires_grad=True)
            found = beyond_bare(pairs, x, parts=num_units, calls=calls, rounds=rounds)
            return [Measurement(name=name, **times) for name, times in found.items()]
    except AnyRankFailed as failure:
        return [Measurement(name=name, problem=f"not measured: {failure}") for name in _UNITS]


class _Scale(nn.Module):
    """x times the weights, both [16, 16]: as little work as a unit can have."""

    def __init__(self, device, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_SHAPE, device=device, dtype=dtype))

    def forward(self, x):
        return x * self.weight


def _chain(num_units, device, dtype):
    return nn.Sequential(*[_Scale(device, dtype) for _ in range(num_units)])


def _our_units(model, device, placements):
    mesh = init_device_mesh(device.type, (1,))
    for unit in (*model, model):
        fully_shard(unit, mesh, placements, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return _stepping(model, lambda is_last: None, model.no_sync, model.finish_grad_sync)


def _fsdp2_units(model, device, reshard):
    _, begin = shard_by_fsdp2(model, model, init_device_mesh(device.type, (1,)), reshard=reshard)
    return _stepping(model, begin, nullcontext, lambda: None)


def _stepping(model, begin, no_sync, finish):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        finish()
        optimizer.step()
        optimizer.zero_grad()

    return Wrapped(model, begin, no_sync, step)


_UNITS = {
    "maingrad ZeRO-3": partial(_our_units, placements="zero3"),
    "FSDP2, resharded (ZeRO-3)": partial(_fsdp2_units, reshard=True),
    "maingrad ZeRO-2": partial(_our_units, placements="zero2"),
    "FSDP2, parameters kept (ZeRO-2)": partial(_fsdp2_units, reshard=False),
}
