"""A program: compares all that is reachable from torch before the import of maingrad and after steps in its wrappers.

The ranks are simulated: what they replaced, any process of theirs would. It prints what differs and fails, or "equal"
and the number of places that were compared.
"""

import sys
from collections import deque
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.amp
import torch.autograd
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
import torch.nn.parallel
import torch.nn.utils
import torch.optim
from torch.optim.optimizer import _foreach_supported_types as optimizers_take
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._foreach_utils import _foreach_supported_types as clipping_takes

ROOTS = ("torch.nn", "torch.optim", "torch.amp", "torch.autograd", "torch.distributed")

REGISTERED: list[tuple[Any, str]] = [
    (_global_optimizer_pre_hooks, "register_optimizer_step_pre_hook"),
    (_global_optimizer_post_hooks, "register_optimizer_step_post_hook"),
    (clipping_takes, "classes of gradients over which torch clips in one call"),
    (optimizers_take, "classes of parameters for which optimizers go foreach by default"),
]
"""Containers of torch to which a program adds what is its own, and by which function or for what."""

Place = tuple[int, Any]


def _is(value: Any, *classes: type) -> bool:
    """``isinstance`` that does not ask ``value`` itself: torch has objects that warn when they are asked."""
    return issubclass(type(value), classes)


def children(holder: Any) -> Iterator[tuple[Any, Any]]:
    """What ``holder`` refers to, each with a key: attributes, closure cells, elements."""
    if _is(holder, ModuleType):
        if holder.__name__.startswith(ROOTS):
            yield from list(vars(holder).items())
    elif _is(holder, type):
        if str(holder.__module__).startswith("torch"):
            yield from list(vars(holder).items())
    elif _is(holder, FunctionType):
        yield "__code__", holder.__code__
        yield "__defaults__", holder.__defaults__
        yield "__kwdefaults__", holder.__kwdefaults__
        yield from list(vars(holder).items())
        yield from enumerate(holder.__closure__ or ())
    elif _is(holder, CellType):
        try:
            yield "cell_contents", holder.cell_contents
        except ValueError:
            return
    elif _is(holder, staticmethod, classmethod, MethodType):
        yield "__func__", holder.__func__
    elif _is(holder, property):
        yield from (("fget", holder.fget), ("fset", holder.fset), ("fdel", holder.fdel))
    elif _is(holder, dict):
        yield from [(key, value) for key, value in list(holder.items()) if _is(key, str, int, type)]
    elif _is(holder, list, tuple):
        yield from enumerate(list(holder))
    elif _is(holder, set, frozenset):
        yield from [(id(each), each) for each in list(holder)]


def snapshot() -> tuple[dict[Place, tuple[str, Any]], list[Any]]:
    """Each place with its name and what is there; and all holders, which are kept alive so that no id comes again."""
    places: dict[Place, tuple[str, Any]] = {}
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(ROOTS)]
    left: deque[tuple[str, Any]] = deque((module.__name__, module) for module in modules if module is not None)
    seen = {id(module) for _, module in left}
    kept: list[Any] = [module for _, module in left]
    while left:
        name, holder = left.popleft()
        for key, value in children(holder):
            path = f"{name}.{key}"
            places[id(holder), key] = path, value
            if id(value) not in seen:
                seen.add(id(value))
                kept.append(value)
                left.append((path, value))
    return places, kept


def is_compared(value: Any) -> bool:
    """Whether it is code, or leads to code. Counters, flags and caches change in any program."""
    return callable(value) or _is(value, CellType, CodeType, staticmethod, classmethod, property)


def is_ours(value: Any) -> bool:
    if _is(value, FunctionType, type):
        return str(value.__module__).startswith("maingrad")
    return type(value).__module__.startswith("maingrad")


def train(how: str) -> None:
    import maingrad
    from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
    from maingrad.te_integration import DelayedScaling, Linear, autocast

    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(Linear(16, 16, dtype=torch.bfloat16), torch.nn.Linear(16, 16).bfloat16())
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=8.0)
    if how in ("ddp", "zero1"):
        model = DistributedDataParallel(model, DistributedDataParallelConfig(use_distributed_optimizer=how == "zero1"))
    elif how != "plain":
        model = maingrad.fsdp.fully_shard(model, placements=how)
    if how == "zero1":
        optimizer: Any = maingrad.ddp.DistributedOptimizer(model, lr=0.01)
        scaler = maingrad.ddp.GradScaler("cpu", init_scale=8.0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        for factor in (1.0, torch.inf):
            with autocast(recipe=DelayedScaling(amax_history_len=2)):
                loss = model(torch.ones(4, 16, dtype=torch.bfloat16)).float().square().mean()
            scaler.scale(loss * factor).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update(8.0)
            optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())


def main() -> int:
    before, kept = snapshot()

    import maingrad.ddp
    import maingrad.fsdp
    import maingrad.te_integration  # noqa: F401
    from maingrad.launch import simulate

    for how in ("plain", "ddp", "zero1", "zero2", "zero3"):
        simulate(train, 2, how)
    after, kept_too = snapshot()

    found = []
    for place, (path, value) in before.items():
        if is_compared(value) and after.get(place, (path, None))[1] is not value:
            found.append(f"replaced: {path}, {value}, by {after.get(place, (path, 'nothing'))[1]}")
    may_grow = {id(container) for container, _ in REGISTERED}
    for place, (path, value) in after.items():
        if place not in before and is_ours(value) and place[0] not in may_grow:
            found.append(f"added: {path}, {value}")
    del kept, kept_too
    print("\n".join(found) if found else f"equal: {sum(is_compared(value) for _, value in before.values())}")
    return len(found)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
