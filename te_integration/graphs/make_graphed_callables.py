"""``make_graphed_callables``: layers as CUDA graphs, one microbatch each, in the order of a pipeline schedule."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...ddp.graphs.capture import GraphPool
from ..pipeline.order import Kind, Schedule, parse_order
from ..scaling.delayed_scaling import refused
from .callable import GraphedCallable
from .captured_order import CapturedOrder
from .layer_graphs import LayerGraphs
from .refusals import check_capturable, device_of
from .signature import Sample, Signature, tensors_in
from .trial import run_trials

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
    if order is not None:
        num_layers = len(modules) if num_layers_per_chunk is None else None
        schedule = parse_order(order, num_layers_per_chunk=num_layers_per_chunk, num_layers=num_layers)
        groups = [schedule.split_layers(modules)]
    elif num_layers_per_chunk is not None:
        raise ValueError("num_layers_per_chunk belongs to an order, and none was given")
    else:
        schedule = parse_order([1, -1])
        groups = [[[module]] for module in modules] if pool is None else [[modules]]
    samples = _samples(len(modules) * schedule.num_microbatches, sample_args, sample_kwargs)
    if num_warmup_iters < 1:
        raise ValueError(f"num_warmup_iters must be 1 or more, not {num_warmup_iters}: a trial shows what a layer does")
    if not torch.is_grad_enabled():
        raise RuntimeError("make_graphed_callables while gradients are disabled: there is no backward to capture")
    for index, module in enumerate(modules):
        check_capturable(module, f"module {index} ({type(module).__name__})")
    device = device_of(modules, tensors_in(samples))

    made: list[LayerGraphs] = []
    stream = None if pool is None else pool.stream
    try:
        with refused("make_graphed_callables"):
            for chunks in groups:  # graphs of one group share memory
                shared = pool or GraphPool(device, stream)
                stream = shared.stream  # one for all: cuBLAS keeps a workspace for each stream
                _capture(chunks, schedule, samples, shared, num_warmup_iters, made, is_given=order is not None)
    except BaseException as error:
        for graphs in made:
            graphs.reset()
        error.add_note(
            "make_graphed_callables: nothing was captured, and the modules are as before. Memory of a failed capture "
            "may stay with the CUDA allocator until the process ends."
        )
        raise
    return tuple(map(GraphedCallable, made))


def _samples(
    count: int, sample_args: Sequence[tuple[Any, ...]], sample_kwargs: Sequence[Mapping[str, Any]] | None
) -> list[Sample]:
    if not all(isinstance(args, tuple | list) for args in sample_args):
        raise TypeError("sample_args is a list of tuples, one tuple of arguments for each callable")
    kwargs = [{} for _ in sample_args] if sample_kwargs is None else list(sample_kwargs)
    for name, found in (("sample_args", len(sample_args)), ("sample_kwargs", len(kwargs))):
        if found != count:
            raise ValueError(
                f"{name} has {found} entries, and there are {count} callables: one for each chunk, microbatch and "
                f"layer, in this order"
            )
    return [(tuple(args), dict(each)) for args, each in zip(sample_args, kwargs, strict=True)]


def _capture(
    chunks: Sequence[Sequence[nn.Module]],
    schedule: Schedule,
    samples: Sequence[Sample],
    pool: GraphPool,
    num_warmup_iters: int,
    made: list[LayerGraphs],
    *,
    is_given: bool,
) -> None:
    """Capture the layers of ``chunks`` in one order. ``made`` gets their graphs, in the order of ``samples``.

    is_given  the program gave the order
    """
    order = CapturedOrder(pool, is_given=is_given, shares=schedule.num_microbatches > 1)
    tried: set[Any] = set()
    layers: dict[tuple[int, int], list[LayerGraphs]] = {}  # by chunk and microbatch
    for chunk, microbatch in itertools.product(range(1, len(chunks) + 1), range(schedule.num_microbatches)):
        layers[chunk, microbatch] = []
        for index, module in enumerate(chunks[chunk - 1]):
            sample, name = samples[len(made)], type(module).__name__
            place = f"layer {index} ({name}) of chunk {chunk}, microbatch {microbatch}"
            if not is_given:
                place = f"module {len(made)} ({name})"
            signature = Signature(place, sample)
            key = id(module), tuple(signature.kinds)
            if key not in tried:
                run_trials(module, place, signature, tensors_in(sample), pool, num_warmup_iters)
                tried.add(key)
            made.append(LayerGraphs(module, place, signature, sample, order))
            layers[chunk, microbatch].append(made[-1])
    for step in schedule.steps:
        graphs_of_step = layers[step.chunk, step.microbatch]
        backwards = [graphs for graphs in reversed(graphs_of_step) if graphs.has_backward]
        if step.kind is Kind.FORWARD:
            for graphs in graphs_of_step:
                graphs.capture_forward()
        elif step.kind is Kind.DGRAD:
            for graphs in backwards:
                graphs.capture_dgrad()
            for graphs in backwards:
                graphs.end_of_dgrads()
        else:
            if step.chunk in schedule.delayed_chunks:
                _check_wgrads(step.chunk, graphs_of_step)
            for graphs in backwards:
                graphs.capture_wgrad()


def _check_wgrads(chunk: int, layers: Sequence[LayerGraphs]) -> None:
    """Raise ``ValueError`` for wgrad entries of a chunk that has no delayed weight gradient."""
    if any(layer.delays for layer in layers):
        return
    reason = "no output of its layers requires a gradient"
    if any(layer.has_backward for layer in layers):
        reason = "none of its layers delays a weight gradient"
    raise ValueError(
        f"the order has wgrad entries ({-chunk - 0.5}) of chunk {chunk}, and {reason}: leave these entries out, or "
        f"build a layer of chunk {chunk} with delay_wgrad_compute=True and weights that are trained"
    )
