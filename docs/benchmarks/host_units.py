"""Host time of a sharded unit, in microseconds per unit and microbatch: ours and FSDP2's.

The model is a chain of tiny units. A unit's time is the forward and backward under a wrapper minus the same without a
wrapper, divided by the number of units. The clock does not run during the optimizer's step, zeroing or waiting, and the
garbage collector is off. Units have fp32 weights and compute in bf16; without a wrapper the weights are bf16. The group
has one rank, so neither wrapper launches a collective: the measured time is the wrappers' own work, and the copies into
the buffers that collectives would read.

The intermediate microbatch does not reduce whole gradients (``no_sync``); the final microbatch reduces all of them.
Each round measures all contenders.
"""

import statistics
from functools import partial
from typing import Any, NamedTuple

import torch
from contenders import shard_by_fsdp2
from harness import host_seconds, synchronize
from ranks import AnyRankFailed, Ranks
from tables import Measurement
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.fsdp import MixedPrecisionPolicy, fully_shard

_SHAPE = (16, 16)


def _cell(name):
    return lambda row: "" if row.problem else f"{getattr(row, name):.1f}"


UNIT_COLUMNS = [
    ("units of", "{row.name}"),
    ("intermediate forward, us", lambda row: row.problem or f"{row.intermediate_forward_us:.1f}"),
    ("and backward", _cell("intermediate_backward_us")),
    ("final forward, us", _cell("final_forward_us")),
    ("and backward", _cell("final_backward_us")),
    ("module without, forward, us", _cell("bare_forward_us")),
    ("and backward", _cell("bare_backward_us")),
]


class _Sharded(NamedTuple):
    """A chain of units, with the functions that an iteration calls."""

    model: nn.Module
    begin: Any
    """Called before each microbatch; the argument says whether this microbatch is the last."""
    step: Any


def bench_units(device, *, num_units=24, calls=3, rounds=5):
    """Measure our units and FSDP2's, with parameters resharded after forward and with parameters kept whole.

    Times of one unit, forward and backward: ``intermediate_``, in a microbatch that is not the last; ``final_``, in the
    last one; ``bare_``, of one module without a wrapper.
    """
    try:
        with Ranks.alone(device).attempt(with_groups=True):
            return _measure(_CONTENDERS, device, num_units, calls, rounds)
    except AnyRankFailed as failure:
        return [Measurement(name=name, problem=f"not measured: {failure}") for name in _CONTENDERS]


class _Scale(nn.Module):
    """x times the weights, both [16, 16]: as little work as a unit can have."""

    def __init__(self, device, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_SHAPE, device=device, dtype=dtype))

    def forward(self, x):
        return x * self.weight


def _chain(num_units, device, dtype):
    return nn.Sequential(*[_Scale(device, dtype) for _ in range(num_units)])


def _wrap_ours(model, device, placements):
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in (*model, model):
        fully_shard(unit, mesh, placements, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    quiet = []

    def begin(is_last):
        while quiet:
            quiet.pop().__exit__(None, None, None)
        if not is_last:
            quiet.append(model.no_sync())
            quiet[-1].__enter__()

    def step():
        model.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()

    return _Sharded(model, begin, step)


def _wrap_fsdp2(model, device, reshard):
    mesh = init_device_mesh(device.type, (1,))
    _, begin = shard_by_fsdp2(model, model, mesh, reshard=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return _Sharded(model, begin, step)


def _wrap_nothing(model):
    return _Sharded(model, lambda is_last: None, lambda: model.zero_grad())


_CONTENDERS = {
    "maingrad ZeRO-3": partial(_wrap_ours, placements="zero3"),
    "FSDP2, resharded (ZeRO-3)": partial(_wrap_fsdp2, reshard=True),
    "maingrad ZeRO-2": partial(_wrap_ours, placements="zero2"),
    "FSDP2, parameters kept (ZeRO-2)": partial(_wrap_fsdp2, reshard=False),
}

_WAYS = ("forward", "backward")
_PARTS = tuple(f"{microbatch}_{way}" for microbatch in ("intermediate", "final") for way in _WAYS)


def _measure(contenders, device, num_units, calls, rounds):
    chains = {name: wrap(_chain(num_units, device, torch.float32), device) for name, wrap in contenders.items()}
    chains = {"": _wrap_nothing(_chain(num_units, device, torch.bfloat16)), **chains}
    x = torch.ones(_SHAPE, device=device, dtype=torch.bfloat16, requires_grad=True)
    measured = [{name: _time(chain, x, num_units, calls) for name, chain in chains.items()} for _ in range(rounds + 1)][
        1:
    ]  # the first round is a warm-up

    def beyond_bare(name, part):
        return statistics.median(each[name][part] - each[""][part] for each in measured)

    bare = {f"bare_{part}_us": statistics.median(each[""][2 + i] for each in measured) for i, part in enumerate(_WAYS)}
    return [
        Measurement(name=name, **{f"{part}_us": beyond_bare(name, i) for i, part in enumerate(_PARTS)}, **bare)
        for name in contenders
    ]


def _time(sharded, x, num_units, calls):
    """Host microseconds of one unit in each of ``_PARTS``: means over iterations of two microbatches."""
    totals = [0.0] * len(_PARTS)
    for _ in range(calls):
        x.grad = None
        for is_last in (False, True):
            sharded.begin(is_last)
            forward, loss = host_seconds(lambda: sharded.model(x).sum(), x.device)
            backward, _ = host_seconds(loss.backward)
            totals[2 * is_last] += forward
            totals[2 * is_last + 1] += backward
        synchronize(x.device)
        sharded.step()
    return [total / calls / num_units * 1e6 for total in totals]
