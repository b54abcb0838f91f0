"""Host time of a sharded unit, in microseconds per unit and microbatch: ours and FSDP2's.

The model is a chain of tiny units. A unit's time is the forward and backward under a wrapper minus the same without a
wrapper, divided by the number of units. The clock does not run during the optimizer's step, zeroing or waiting, and the
garbage collector is off. Units have fp32 weights and compute in bf16; without a wrapper the weights are bf16. The group
has one rank, so neither wrapper launches a collective: the measured time is the wrappers' own work, and the copies into
the buffers that collectives would read.

The intermediate microbatch does not reduce whole gradients (``no_sync``); the final microbatch reduces all of them.
Each round measures all contenders.
"""

from contextlib import nullcontext
from functools import partial

import torch
from contenders import shard_by_fsdp2
from host_clock import Wrapped, beyond_bare, unwrapped
from ranks import AnyRankFailed, Ranks
from tables import Column, Measurement
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from maingrad.fsdp import MixedPrecisionPolicy, fully_shard

_SHAPE = (16, 16)


def _cell(name):
    return lambda row: "" if row.problem else f"{getattr(row, name):.1f}"


UNIT_COLUMNS: list[Column] = [
    ("units of", "{row.name}"),
    ("intermediate forward, us", lambda row: row.problem or f"{row.intermediate_forward_us:.1f}"),
    ("and backward", _cell("intermediate_backward_us")),
    ("final forward, us", _cell("final_forward_us")),
    ("and backward", _cell("final_backward_us")),
    ("module without, forward, us", _cell("bare_forward_us")),
    ("and backward", _cell("bare_backward_us")),
]


def bench_units(device, *, num_units=24, calls=3, rounds=5):
    """Measure our units and FSDP2's, with parameters resharded after forward and with parameters kept whole.

    Times of one unit, forward and backward: ``intermediate_``, in a microbatch that is not the last; ``final_``, in the
    last one; ``bare_``, of one module without a wrapper.
    """
    try:
        with Ranks.alone(device).attempt(with_groups=True):
            return _measure(device, num_units, calls=calls, rounds=rounds)
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


def _ours(model, device, placements):
    mesh = init_device_mesh(device.type, (1,))
    for unit in (*model, model):
        fully_shard(unit, mesh, placements, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return _stepping(model, lambda is_last: None, model.no_sync, model.finish_grad_sync)


def _fsdp2(model, device, reshard):
    _, begin = shard_by_fsdp2(model, model, init_device_mesh(device.type, (1,)), reshard=reshard)
    return _stepping(model, begin, nullcontext, lambda: None)


def _stepping(model, begin, no_sync, finish):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step():
        finish()
        optimizer.step()
        optimizer.zero_grad()

    return Wrapped(model, begin, no_sync, step)


_CONTENDERS = {
    "maingrad ZeRO-3": partial(_ours, placements="zero3"),
    "FSDP2, resharded (ZeRO-3)": partial(_fsdp2, reshard=True),
    "maingrad ZeRO-2": partial(_ours, placements="zero2"),
    "FSDP2, parameters kept (ZeRO-2)": partial(_fsdp2, reshard=False),
}


def _measure(device, num_units, **how):
    bare = unwrapped(_chain(num_units, device, torch.bfloat16))
    pairs = {name: (bare, wrap(_chain(num_units, device, torch.float32), device)) for name, wrap in _CONTENDERS.items()}
    x = torch.ones(_SHAPE, device=device, dtype=torch.bfloat16, requires_grad=True)
    found = beyond_bare(pairs, x, parts=num_units, **how)
    return [Measurement(name=name, **times) for name, times in found.items()]
