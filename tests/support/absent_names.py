"""Runs programs on a torch that lacks private names, in a process that is asked by lines of JSON.

The process imports torch, and forks a child for each line. The child hides the names, imports the library and trains.
The answer says how the import went, which warnings came, and what each program gave.
"""

import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
import torch._dynamo.compiled_autograd
import torch._higher_order_ops.effects
import torch.distributed.checkpoint.filesystem
import torch.distributed.pipelining.schedules
from torch import Tensor, nn

PACKAGES = [f"maingrad.{name}" for name in ("kernels", "ddp", "fsdp", "te_integration", "launch")]
MORE = ["maingrad.te_integration.pipeline", "maingrad.launch.simulation.simulate", "maingrad.launch.verification"]
"""Rooms that a package imports when they are asked for."""


class _Absent:
    """In place of what a class has."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise AttributeError("another version of torch has no such name")


def _hide_in_module(module: ModuleType, name: str) -> None:
    """Hide ``module.name`` from others. The module's own functions find it: torch renames what it uses."""
    plain: Any = type(module)

    def getattribute(self: ModuleType, asked: str) -> Any:
        if asked == name:
            raise AttributeError(f"another version of torch has no {name}")
        return plain.__getattribute__(self, asked)

    def fall_back(self: ModuleType, asked: str) -> Any:
        if asked == name or not hasattr(plain, "__getattr__"):
            raise AttributeError(f"another version of torch has no {asked}")
        return plain.__getattr__(self, asked)

    renamed = type(plain.__name__, (plain,), {"__getattribute__": getattribute, "__getattr__": fall_back})
    object.__setattr__(module, "__class__", renamed)


def hide(spelling: str) -> None:
    """Let a dotted name be absent; for an attribute of an object that is written in C, the part before it."""
    parts = spelling.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            owner = _resolve(parts[:end])
            getattr(owner, parts[end])
        except (AttributeError, ImportError):
            return  # this version has another spelling
        if isinstance(owner, ModuleType):
            _hide_in_module(owner, parts[end])
            return
        if isinstance(owner, type):
            setattr(owner, parts[end], _Absent())
            return


def _resolve(parts: list[str]) -> Any:
    found: Any = importlib.import_module(parts[0])
    for end, part in enumerate(parts[1:], 2):
        # torch.optim deletes the names of its modules.
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:end]))
    return found


def import_all() -> None:
    """Import every package, and note its names."""
    for name in PACKAGES + MORE:
        importlib.import_module(name)


# ---- Programs, each in fp64 on two ranks. ----


def _model() -> nn.Sequential:
    from maingrad.te_integration import Linear

    torch.manual_seed(1)
    layers = [Linear(4, 8, params_dtype=torch.float64), nn.Tanh(), nn.Linear(8, 2, dtype=torch.float64)]
    return nn.Sequential(*layers)


def _batch(step: int) -> Tensor:
    rank = torch.distributed.get_rank()
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def _weights(params: Iterable[Tensor]) -> list[float]:
    return [round(value, 9) for param in params for value in param.detach().flatten().tolist()]


def _train(model: nn.Module, optimizer: Any, clip: Callable[[], Any]) -> None:
    for step in range(2):
        model(_batch(step)).square().mean().backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()


def zero1() -> list[float]:
    """``DistributedOptimizer``, with its norm."""
    from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer

    config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
    inner = _model()
    model = DistributedDataParallel(inner, config)
    optimizer = DistributedOptimizer(model, optimizer_class=torch.optim.SGD, lr=0.1)
    for step in range(2):
        model.zero_grad_buffer()
        model(_batch(step)).square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
    return _weights(inner.parameters())


def ddp() -> list[float]:
    """A stock optimizer, and torch's clipping."""
    from maingrad.ddp import DistributedDataParallel

    inner = _model()
    model = DistributedDataParallel(inner)
    for step in range(2):
        model.zero_grad_buffer()
        model(_batch(step)).square().mean().backward()
        model.finish_grad_sync()
        with torch.no_grad():
            for param in inner.parameters():
                param -= 0.1 * param.main_grad
    return _weights(inner.parameters())


def sharded() -> list[float]:
    """``fully_shard``, torch's optimizer and torch's clipping."""
    from maingrad.fsdp import fully_shard

    model = _model()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(model, optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    return _weights(value.to_local() for value in model.state_dict().values())


def on_two_ranks(program: Callable[[], list[float]]) -> Any:
    """Each rank's weights, or the error with its causes."""
    from maingrad.launch import simulate

    try:
        return simulate(program, 2)
    except BaseException as error:
        return "".join(traceback.format_exception(error))


def compiled() -> Any:
    """A fused layer under ``torch.compile`` beside the eager one: the largest difference of its gradients."""
    from maingrad.ddp import DistributedDataParallel

    found = []
    for run in (lambda model: model, lambda model: torch.compile(model, backend=lambda graph, inputs: graph.forward)):
        inner = _model()
        model = DistributedDataParallel(inner)
        run(inner)(torch.ones(3, 4, dtype=torch.float64)).square().mean().backward()
        model.finish_grad_sync()
        found.append(torch.cat([param.main_grad.flatten() for param in inner.parameters()]))
    return float((found[0] - found[1]).abs().max())


PROGRAMS = {"ddp": ddp, "zero1": zero1, "sharded": sharded}


def without(names: list[str], programs: list[str]) -> dict[str, Any]:
    """What happens on a torch without ``names``, each in all its spellings: the import, its warnings, and programs."""
    for name in names:
        for spelling in name.split(" or "):
            hide(spelling)
    found: dict[str, Any] = {"import": None, "programs": {}}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            import_all()
        except BaseException:
            return {"import": traceback.format_exc()}
        for each in programs:
            found["programs"][each] = compiled() if each == "compiled" else on_two_ranks(PROGRAMS[each])
    found["warnings"] = [str(each.message) for each in seen if each.category is RuntimeWarning]
    from maingrad.kernels.compat import requested_names

    found["names"] = requested_names
    return found


def in_a_child(run: Callable[[], Any]) -> Any:
    """The result of ``run`` in a forked process."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        try:
            said = json.dumps(run())
        except BaseException:
            said = json.dumps({"import": traceback.format_exc()})
        with os.fdopen(writer, "w") as out:
            out.write(said)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.wait()
    return json.loads(text or '{"import": "the child died"}')


def main() -> None:
    """Answer each line of the input, ``[[names], [programs]]``, by a line."""
    for line in sys.stdin:
        names, programs = json.loads(line)
        print(json.dumps(in_a_child(lambda names=names, programs=programs: without(names, programs))), flush=True)


if __name__ == "__main__":
    main()
