"""``make_graphed_callables``: layers as CUDA graphs, one microbatch each, in the order of a pipeline schedule."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...ddp.collectives.streams import is_capturing
from ...ddp.graphs.capture import GraphPool
from ..pipeline.order import Kind, Schedule, parse_order
from ..scaling.delayed_scaling import refused
from .callable import GraphedCallable
from .captured_order import Place
from .layer_graphs import CaptureState, LayerGraphs
from .refusals import check_capturable, device_of
from .signature import Signature
from .trial import Trial, run_trials

__all__ = ["make_graphed_callables"]


def make_graphed_callables(
    modules: Sequence[nn.Module],
    sample_args: Sequence[tuple[Any, ...]],
    *,
    order: Iterable[float] | None = None,
    num_layers_per_chunk: Sequence[int] | None = None,
    sample_kwargs: Sequence[Mapping[str, Any]] | None = None,
    num_warmup_iters: int = 3,
    pool: GraphPool | None = None,
) -> tuple[GraphedCallable, ...]:
    """Capture forwards, input gradients and delayed weight gradients of layers as CUDA graphs.

    modules               the layers, already wrapped by ``DistributedDataParallel`` if at all; with an order all layers
                          of all chunks, chunk after chunk
    sample_args           the arguments of each callable, tensors and constants. A call must bring tensors of the same
                          shape, dtype, device and ``requires_grad``. Without an order one tuple for each module; with
                          an order one for each chunk, microbatch and layer: those of chunk 1 first, among these those
                          of microbatch 0, layer by layer
    order                 a list of numbers, see ``maingrad.te_integration.pipeline.parse_order``; its errors are raised
                          here. None: each module has one microbatch in flight, and modules are called in any order
    num_layers_per_chunk  with an order: number of layers of each chunk. None: all chunks have equally many
    sample_kwargs         keyword arguments of each callable, likewise
    num_warmup_iters      eager runs of each layer before its capture, at least 1
    pool                  memory that graphs made before share: then all are to be called in the order of their capture

    Returns a ``GraphedCallable`` for each entry of ``sample_args``.

    With an order, each entry is captured for each layer of its chunk: a forward graph, a dgrad graph, and where the
    layer delays (``delay_wgrad_compute=True``) a wgrad graph, last layer first. ``backward_dw()`` of the callable
    replays the wgrad graph. In a chunk without wgrad entries a layer that delays has its wgrad graph right behind its
    chunk's dgrads, and ``backward_dw()`` is called there.

    Raises ``ScheduleError`` for an invalid order; ``ValueError`` for a wgrad entry of a chunk in which nothing delays,
    or no gradient is required, for numbers that do not fit, and for modules that cannot be captured: sharded, compiled,
    hooked, wrapped. On CPUs a stand-in records operations: for tests.
    """
    modules = list(modules)
    schedule, counts = _schedule(modules, order, num_layers_per_chunk)
    microbatches = 1 if schedule is None else schedule.num_microbatches
    samples = _samples(len(modules) * microbatches, sample_args, sample_kwargs)
    if num_warmup_iters < 1:
        raise ValueError(f"num_warmup_iters must be 1 or more, not {num_warmup_iters}: a trial shows what a layer does")
    if is_capturing():
        raise RuntimeError("make_graphed_callables in a capture: make the callables before")
    if not torch.is_grad_enabled():
        raise RuntimeError("make_graphed_callables while gradients are disabled: there is no backward to capture")
    device = device_of(modules, [leaf for args, kwargs in samples for leaf in _tensors(args, kwargs)])
    for index, module in enumerate(modules):
        check_capturable(module, f"module {index} ({type(module).__name__})", device)

    if schedule is None and pool is None:  # every module by itself
        groups = [_Group([module], [1], None, [sample]) for module, sample in zip(modules, samples, strict=True)]
        for index, group in enumerate(groups):
            group.first = index
    else:
        groups = [_Group(modules, counts, schedule, samples)]
    made: list[LayerGraphs] = []
    try:
        first = pool or GraphPool(device)
        with _without_autocast_cache(), refused("make_graphed_callables"):
            for number, group in enumerate(groups):
                own = GraphPool(device) if number else first
                own.stream = first.stream  # cuBLAS keeps a workspace for each stream
                group.capture(own, num_warmup_iters, made)
    except BaseException as error:
        for graphs in made:
            graphs.reset()
        error.add_note(
            "make_graphed_callables: nothing was captured, and the modules are as before. Memory of a failed capture "
            "may stay with the CUDA allocator until the process ends."
        )
        raise
    return tuple(GraphedCallable(graphs) for group in groups for graphs in group.in_order_of_samples())


def _schedule(
    modules: Sequence[nn.Module], order: Iterable[float] | None, num_layers_per_chunk: Sequence[int] | None
) -> tuple[Schedule | None, Sequence[int]]:
    if not modules:
        raise ValueError("make_graphed_callables needs at least one module")
    if order is None:
        if num_layers_per_chunk is not None:
            raise ValueError("num_layers_per_chunk belongs to an order, and none was given")
        return None, [len(modules)]
    if num_layers_per_chunk is None:
        schedule = parse_order(order, num_layers=len(modules))
    else:
        schedule = parse_order(order, num_layers_per_chunk=num_layers_per_chunk)
    schedule.split_layers(modules)  # raises where the numbers differ
    counts = schedule.num_layers_per_chunk
    assert counts is not None, "given, or computed from the number of modules"
    return schedule, counts


_Sample = tuple[tuple[Any, ...], Mapping[str, Any]]


def _samples(
    count: int, sample_args: Sequence[tuple[Any, ...]], sample_kwargs: Sequence[Mapping[str, Any]] | None
) -> list[_Sample]:
    if not all(isinstance(args, tuple | list) for args in sample_args):
        raise TypeError("sample_args is a list of tuples, one tuple of arguments for each callable")
    kwargs = [{} for _ in sample_args] if sample_kwargs is None else list(sample_kwargs)
    for name, found in (("sample_args", len(sample_args)), ("sample_kwargs", len(kwargs))):
        if found != count:
            raise ValueError(
                f"{name} has {found} entries, and there are {count} callables: one for each chunk, microbatch and "
                f"layer, in this order"
            )
    return [(tuple(args), each) for args, each in zip(sample_args, kwargs, strict=True)]


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    return [leaf for leaf in Signature.leaves(args, kwargs) if isinstance(leaf, Tensor)]


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Autocast keeps a cast weight for later uses: a graph would read what was cast before it, in every replay."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class _Group:
    """Layers whose graphs share memory, in one order."""

    def __init__(
        self, modules: Sequence[nn.Module], counts: Sequence[int], schedule: Schedule | None, samples: Sequence[_Sample]
    ) -> None:
        self._modules, self._counts, self._schedule, self._samples = modules, counts, schedule, samples
        self._num_microbatches = 1 if schedule is None else schedule.num_microbatches
        self._trials: dict[Any, Trial] = {}
        self._made: dict[int, LayerGraphs] = {}  # by index of the sample
        self.first = 0
        """Number of the first module, for errors."""

    def capture(self, pool: GraphPool, num_warmup_iters: int, made: list[LayerGraphs]) -> None:
        """Capture everything; ``made`` gets the graphs as they come."""
        state = CaptureState(pool, in_order=self._schedule is not None, shares=self._num_microbatches > 1)
        for chunk in range(1, len(self._counts) + 1):
            for microbatch in range(self._num_microbatches):
                for index, layer in self._layers(chunk, microbatch):
                    self._made[index] = self._new(index, chunk, microbatch, layer, state, num_warmup_iters)
                    made.append(self._made[index])
        order = self._schedule or parse_order([1, -1])
        self._check_wgrads(order)
        for step in order.steps:
            layers = [index for index, _ in self._layers(step.chunk, step.microbatch)]
            backwards = [self._made[index] for index in reversed(layers) if self._made[index].has_backward]
            if step.kind is Kind.FORWARD:
                for index in layers:
                    self._made[index].capture_forward(_tensors(*self._samples[index]))
            elif step.kind is Kind.DGRAD:
                for graphs in backwards:
                    graphs.capture_dgrad()
                for graphs in backwards:
                    graphs.end_of_dgrads()
            else:
                for graphs in backwards:
                    graphs.capture_wgrad()

    def in_order_of_samples(self) -> list[LayerGraphs]:
        """The graphs in the order of ``sample_args``."""
        return [graphs for _, graphs in sorted(self._made.items())]

    def _layers(self, chunk: int, microbatch: int) -> list[tuple[int, int]]:
        """For each layer of a chunk: the index of its sample, and its index in the chunk."""
        before = sum(self._counts[: chunk - 1]) * self._num_microbatches
        count = self._counts[chunk - 1]
        return [(before + microbatch * count + layer, layer) for layer in range(count)]

    def _new(
        self, index: int, chunk: int, microbatch: int, layer: int, state: CaptureState, num_warmup_iters: int
    ) -> LayerGraphs:
        module = self._modules[sum(self._counts[: chunk - 1]) + layer]
        has_order = self._schedule is not None
        place = Place(chunk if has_order else 0, microbatch, self.first + layer, type(module).__name__)
        args, kwargs = self._samples[index]
        signature = Signature(place, args, kwargs)
        key = id(module), tuple(signature.kinds)
        if key not in self._trials:
            tensors = _tensors(args, kwargs)
            self._trials[key] = run_trials(module, place, signature, tensors, state.pool, num_warmup_iters)
        return LayerGraphs(module, place, signature, self._trials[key], state)

    def _check_wgrads(self, order: Schedule) -> None:
        """Raise ``ValueError`` for wgrad entries of a chunk that has no delayed weight gradient."""
        for chunk in sorted(order.delayed_chunks):
            graphs = [self._made[index] for index, _ in self._layers(chunk, 0)]
            if any(each.delays for each in graphs):
                continue
            if not any(each.has_backward for each in graphs):
                reason = "no output of its layers requires a gradient"
            else:
                reason = "none of its layers delays a weight gradient"
            raise ValueError(
                f"the order has wgrad entries ({-chunk - 0.5}) of chunk {chunk}, and {reason}: leave these entries "
                f"out, or build a layer of chunk {chunk} with delay_wgrad_compute=True and weights that are trained"
            )
