"""``FSDPModule``: the methods of a module that is a unit. ``fully_shard`` puts this class before the module's own."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ..ddp.buckets.iteration_ends import record_model
from ..ddp.collectives.timeline import Timeline, recorded_on
from ..ddp.torch_grads.sharded_grad import ShardedGrad
from .iteration.parts import RootParts
from .iteration.root import Root
from .state.checkpoint_source import ShardedSource
from .tensors.parameter import ShardedParameter
from .unit.registration import write_back
from .unit.unit import Unit, check_no_transform

__all__ = ["FSDPModule", "make_unit", "root_of", "unit_of"]

_UNIT = "_maingrad_unit"
_ROOT = "_maingrad_root"


class FSDPModule(nn.Module):
    """A module whose parameters are sharded. ``fully_shard`` makes a module an instance of this class and of its own.

    Outside the module's forward the parameters are this rank's shards. Methods about an iteration (``no_sync``,
    ``finish_grad_sync``, ``record_timeline``) act on the whole model; call them on the outermost unit.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward while its whole parameters are registered."""
        args, kwargs = _before(self, args, kwargs)
        try:
            outputs = super().__call__(*args, **kwargs)
        except BaseException:
            _failed(self)
            raise
        return _after(self, outputs)

    def no_sync(self) -> AbstractContextManager[None]:
        """For every microbatch of an iteration but the last: gradients are not reduced over all ranks.

        Placements that shard gradients reduce them inside an instance, unless ``reduce_every_microbatch=False``.
        Otherwise whole gradients stay in memory. Nothing is reduced across instances.
        """
        return root_of(self).parts.no_sync()

    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Reduce the remaining gradients of the iteration, and wait. Then ``.grad`` of every shard is complete.

        A backward outside ``no_sync`` does so by itself, unless delayed weight gradients are pending. Then the
        computation of the last delayed gradient does so. A second call costs nothing. Raises ``RuntimeError`` while
        delayed weight gradients are pending.
        """
        root_of(self).grads.finish_grad_sync()

    def unshard(self) -> None:
        """Gather this unit's whole parameters and register them until ``reshard()``. Collective."""
        unit, root = unit_of(self), root_of(self)
        root.grads.check_delays_are_over("unshard()")
        unit.registered.check_replaced()  # reshard() would put the shards back, and lose what the program has put there
        root.gathers.notice_changes()
        for each in (unit, *unit.weights):
            root.gathers.gather(each)
            root.gathers.wait(each)
            each.num_unshards += 1
        unit.registered.show_whole()

    def reshard(self) -> None:
        """Undo one ``unshard()``, and free the whole parameters after the last. Writes to whole parameters are lost.

        Views of them, and copies, go on having memory. The parameters themselves refuse to be read.

        Without ``unshard()`` before: free the whole parameters that forward has left gathered.
        """
        unit = unit_of(self)
        was_read = unit.num_unshards > 0
        if was_read:
            unit.registered.show_shards()
        for each in (unit, *unit.weights):
            if was_read:
                each.num_unshards -= 1
                each.writes.note()
                for bucket in each.buckets:
                    bucket.record_change()  # the program may have written
            if not unit.registered.shows_whole:
                root_of(self).gathers.release(each, was_read=was_read)

    @contextmanager
    def unsharded(self, *, writeback: bool = False) -> Iterator[None]:
        """Within the block, this unit and all units inside it have their whole parameters registered. Collective.

        writeback  True: writes to whole parameters are copied into the shards at the end; all ranks must have written
                   the same values. If False, or if the block raises, the writes are lost

        What is read there may be kept: ``state_dict()`` copies, and views of parameters (``param.detach()``) keep their
        memory. A parameter itself (``list(model.parameters())``) has none after the block, and refuses to be read.

        All these units are in memory at once. To read one unit at a time, use ``unshard()`` and ``reshard()``.
        """
        inside = _sharded_inside(self)
        for module in inside:
            FSDPModule.unshard(module)
        try:
            yield
        except BaseException:
            writeback = False
            raise
        finally:
            for module in inside:
                if writeback:
                    write_back(unit_of(module).pairs)
                FSDPModule.reshard(module)

    def set_modules_to_forward_prefetch(self, modules: Sequence["FSDPModule"]) -> None:
        """Gather these units while this unit's forward runs, instead of the unit that followed the last time."""
        unit_of(self).forward_prefetch = _units_of(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence["FSDPModule"]) -> None:
        """Gather these units while this unit's backward runs, instead of the unit whose forward ran before."""
        unit_of(self).backward_prefetch = _units_of(modules, "set_modules_to_backward_prefetch")

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set ``reshard_after_forward`` of this unit and, if ``recurse``, of all units inside it."""
        for module in _sharded_inside(self) if recurse else [self]:
            unit_of(module).reshard_after_forward = reshard_after_forward

    @contextmanager
    def record_timeline(self) -> Iterator[Timeline]:
        """Record the times of forwards, backwards, gathers and reductions within the block."""
        root = root_of(self)
        with recorded_on(root, root.device, [bucket.reduction.grid for bucket in root.buckets]) as timeline:
            yield timeline

    @property
    def units(self) -> list[Unit]:
        """Every unit of the model, the outermost first."""
        return list(root_of(self).units)

    @property
    def grad_parts(self) -> RootParts:
        """The interface of a pipeline schedule that runs parts of the model by turns. Collective at the first call."""
        return root_of(self).parts

    def checkpoint_source(self) -> ShardedSource:
        """The interface of ``save_checkpoint`` and ``load_checkpoint`` to this module and the units in it.

        Collective at the first call.
        """
        root_of(self).grads.steps.read()  # weights that were mixed are not saved
        return ShardedSource(self, [pair for module in _sharded_inside(self) for pair in unit_of(module).pairs])

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As ``nn.Module``. Raises ``ValueError`` if the caller is torch's ``DistributedDataParallel``."""
        unit_of(self).refuse_torch_ddp()
        return super().named_parameters(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        unit = unit_of(self)
        for pair in unit.pairs if unit.registered.shows_whole else ():
            _but_shards(fn, pair.sharded)  # raises for whole parameters as well, which stay where they are gathered
        return super()._apply(functools.partial(_but_shards, fn), recurse)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(
            "a fully sharded module is tied to its process groups and is not copied; build another model and load "
            "state_dict() into it. One that averages weights (AveragedModel, EMA) is another one, sharded alike: under "
            "torch.no_grad(), mean.lerp_(param, 0.1) for each pair of their parameters()"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a fully sharded module is not pickled; save its state_dict(), or use save_checkpoint")


def unit_of(module: nn.Module) -> Unit:
    """The unit that ``fully_shard`` made of this module."""
    return module.__dict__[_UNIT]  # type: ignore[no-any-return]


def _sharded_inside(module: nn.Module) -> list[FSDPModule]:
    """All units among the module and the modules inside it, the outermost first."""
    return [inner for inner in module.modules() if isinstance(inner, FSDPModule)]


def _units_of(modules: Sequence[nn.Module], verb: str) -> tuple[Unit, ...]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise TypeError(f"{verb} takes fully sharded modules, and {type(module).__name__} is none")
    return tuple(unit_of(module) for module in modules)


def root_of(module: FSDPModule) -> Root:
    """The root of the model that contains this module. If there is none, the module becomes the outermost unit."""
    unit = unit_of(module)
    root = None if unit.root_reference is None else unit.root_reference()
    return root if root is not None else _become_root(module)


def make_unit(module: nn.Module, unit: Unit) -> None:
    """Put ``FSDPModule`` before the module's class."""
    record_model(module)
    module.__dict__[_UNIT] = unit
    module.__class__ = _class_of(type(module))  # type: ignore[arg-type]  # classes are hashable


@functools.cache
def _class_of(cls: type) -> type:
    members: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    if hasattr(cls, "save_pretrained"):
        members["save_pretrained"] = _save_pretrained
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), members)


def _save_pretrained(module: Any, *args: Any, **kwargs: Any) -> Any:
    """``save_pretrained`` of transformers, which writes whole tensors by itself. Shards are refused."""
    units = [unit_of(inner) for inner in _sharded_inside(module)]
    if kwargs.get("state_dict") is None and not all(unit.registered.shows_whole for unit in units):
        raise RuntimeError(
            f"save_pretrained of {type(module).__name__}, whose parameters are sharded, would write this rank's part: "
            f"call it within model.unsharded(), which all ranks enter, on the first rank; or pass state_dict=, from "
            f"get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)) on all ranks"
        )
    return super(FSDPModule, module).save_pretrained(*args, **kwargs)


@torch.compiler.disable
def _before(
    module: FSDPModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return root_of(module).pre_forward(unit_of(module), args, kwargs)


@torch.compiler.disable
def _after(module: FSDPModule, outputs: Any) -> Any:
    unit = unit_of(module)
    return unit.root.post_forward(unit, outputs)


@torch.compiler.disable
def _failed(module: FSDPModule) -> None:
    unit = unit_of(module)
    unit.root.forward_failed(unit)


def _become_root(module: FSDPModule) -> Root:
    """Make the module the outermost unit, at its first forward or at a method about the whole model. Collective."""
    check_no_transform(type(module).__name__)
    inside = _sharded_inside(module)
    root = Root(module, [each for inner in inside for each in (unit_of(inner), *unit_of(inner).weights)])
    for inner in inside:
        inner.__dict__.pop(_ROOT, None)
    module.__dict__[_ROOT] = root
    return root


def _but_shards(fn: Callable[[Any], Any], tensor: Any) -> Any:
    """``fn(tensor)``, but shards and their gradients are returned as they are: they must stay views of flat shards."""
    if isinstance(tensor, ShardedGrad):
        return tensor
    if not isinstance(tensor, ShardedParameter):
        return fn(tensor)
    moved = fn(tensor.detach())
    if moved.device != tensor.device or moved.dtype is not tensor.dtype:
        raise RuntimeError(
            f"parameter '{tensor.shard.name}' is sharded, and stays the {tensor.dtype} on {tensor.device} that it is: "
            f"move or convert the module before fully_shard"
        )
    return tensor
