"""``torch.compile`` around or inside the wrapper: eager's gradients, in one graph with the fused layers."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loops import (
    assert_same,
    ddp_backward,
    loss_of,
    main_grads,
    make_batches,
    make_model,
    plain_backward,
    plain_grads,
    plain_twin,
    weights,
    wrap,
)
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

from maingrad.ddp import DistributedDataParallel, DistributedOptimizer

NUM_FUSED = 2
pieces_run: list[str] = []
"""One entry for each compiled graph that ran."""


def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend that traces as inductor does, generates no code, and counts the graphs that run."""
    compiled = lookup_backend("aot_eager")(graph, inputs)
    name = " ".join(node.name for node in graph.graph.nodes if node.op.startswith("call"))

    def run(*args: Any) -> Any:
        pieces_run.append(name)
        return compiled(*args)

    return run


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    pieces_run.clear()
    yield
    torch.compiler.reset()


class Waves(nn.Module):
    """Something to compile before, between and after two fused layers."""

    def __init__(self, fuse: bool) -> None:
        super().__init__()
        self.up, _, self.norm, self.down = make_model(fuse=fuse)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x.sin()).tanh())).sigmoid()


def around(model: nn.Module) -> tuple[DistributedDataParallel, nn.Module]:
    ddp = wrap(model, overlap_grad_reduce=True, find_unused_parameters=True, bucket_size=64)
    return ddp, torch.compile(ddp, backend=counting)


def inside(model: nn.Module) -> tuple[DistributedDataParallel, nn.Module]:
    ddp = wrap(torch.compile(model, backend=counting), overlap_grad_reduce=True, bucket_size=64)
    return ddp, ddp


def in_place(model: nn.Module) -> tuple[DistributedDataParallel, nn.Module]:
    model.compile(backend=counting)
    ddp = wrap(model, overlap_grad_reduce=True, bucket_size=64)
    return ddp, ddp


def each_layer(model: nn.Module) -> tuple[DistributedDataParallel, nn.Module]:
    for layer in model.children():
        layer.compile(backend=counting)
    ddp = wrap(model, overlap_grad_reduce=True)
    return ddp, ddp


WAYS = [around, inside, in_place, each_layer]


@pytest.mark.in_turn
@pytest.mark.parametrize("compile_model", WAYS)
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.sampled(1)
def test_gradients_are_eagers_and_fused_layers_break_no_graph(
    compile_model: Callable[[nn.Module], tuple[DistributedDataParallel, nn.Module]], fuse: bool
) -> None:
    model = Waves(fuse)
    eager = wrap(plain_twin(model))
    ddp, compiled = compile_model(model)
    for step in range(3):
        pieces_run.clear()
        batches = make_batches(3, seed=step)
        with ddp.no_sync():
            for batch in batches[:-1]:
                (loss_of(compiled, batch) / 3).backward()
        (loss_of(compiled, batches[-1]) / 3).backward()
        ddp.finish_grad_sync()
        ddp_backward(eager, batches)
        assert_same(dict(zip(main_grads(eager), main_grads(ddp).values(), strict=True)), main_grads(eager))
        ddp.zero_grad_buffer()
        eager.zero_grad_buffer()
    writes = sum(record.num_fused_writes for record in ddp.records)
    assert writes == (9 * NUM_FUSED if fuse else 0)
    if compile_model is not each_layer:
        in_each_forward = pieces_run[: len(pieces_run) // len(batches)]
        assert pieces_run == in_each_forward * len(batches)
        assert len(in_each_forward) == 1


@pytest.mark.slow
def test_a_whole_training_run_is_eagers() -> None:
    model = make_model()
    eager = wrap(plain_twin(model))
    ddp, compiled = around(model)
    ours, theirs = (DistributedOptimizer(each, lr=0.05, max_grad_norm=1.0) for each in (ddp, eager))
    for step in range(4):
        batch = make_batches(1, seed=step)[0]
        loss_of(compiled, batch).backward()
        ddp.finish_grad_sync()
        ours.step()
        ddp.zero_grad_buffer()
        loss_of(eager, batch).backward()
        eager.finish_grad_sync()
        theirs.step()
        theirs.zero_grad()
    for name, value in weights(eager).items():  # a compiler may fuse a multiplication with an addition
        torch.testing.assert_close(weights(ddp)[name], value, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.in_turn
def test_a_model_compiled_before_it_was_wrapped_trains_through_main_grad() -> None:
    """The trace was made before any weight had a main_grad; it does not contain the fused layers."""
    model = make_model()
    plain = plain_twin(model)
    compiled = torch.compile(model, backend=counting)
    with torch.no_grad():
        compiled(make_batches(1)[0])
    loss_of(plain_twin(model), make_batches(1)[0]).backward()
    ddp = wrap(compiled)
    batches = make_batches(2)
    ddp_backward(ddp, batches)
    plain_backward(plain, batches)
    assert_same(dict(zip(plain_grads(plain), main_grads(ddp).values(), strict=True)), plain_grads(plain))
    assert sum(record.num_fused_writes for record in ddp.records) == 2 * NUM_FUSED


@pytest.mark.in_turn
def test_checks_after_wrapping_still_speak_in_a_compiled_model() -> None:
    ddp, compiled = around(make_model())
    plain = plain_twin(ddp.module)
    batch = make_batches(1)[0]
    for _ in range(2):  # the second one finds buckets that are launched
        loss_of(compiled, batch).backward()
        loss_of(plain, batch).backward()
    for name, grad in plain_grads(plain).items():
        torch.testing.assert_close(ddp.module.get_parameter(name).grad, grad)
    ddp.zero_grad_buffer()
    ddp.module[2].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"parameter '2.weight' was frozen"):
        compiled(batch)
