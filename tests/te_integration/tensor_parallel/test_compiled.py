"""``torch.compile`` of models with local parameters: one graph, with the weight gradients fused."""

import itertools
from typing import Any

import pytest
import torch
from gloo import run_ranks
from parallel_llama import OLD_DTENSORS, assert_grads, batch, llama, make_mesh, parallelize, plain_grads, whole_grads
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import convert_linears

pytestmark = pytest.mark.skipif(OLD_DTENSORS, reason="torch compiles fewer programs of DTensors")


def prepare() -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.set_num_threads(1)


def backwards(wrapped: Any, calls: list[Any]) -> list[int]:
    for number, call in enumerate(calls):
        if number + 1 < len(calls):
            with wrapped.no_sync():
                (call() / len(calls)).backward()
        else:
            (call() / len(calls)).backward()
    wrapped.finish_grad_sync()
    assert not counters["graph_break"], counters["graph_break"]
    return sorted({record.num_fused_writes for record in wrapped.records})


def compiled(sequence: bool, whole: bool, convert: bool) -> list[int]:
    prepare()
    mesh = make_mesh(1, 2)
    model = llama(layers=1)
    if convert:
        convert_linears(model)
    parallelize(model, mesh["tp"], sequence=sequence)
    part: nn.Module = model if whole else model.blocks[0]
    part.compile(backend="aot_eager")
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"])
    writes = backwards(wrapped, [lambda i=i: wrapped(*batch(i)) for i in range(2)])
    assert_grads(whole_grads(model), plain_grads(llama(layers=1), [batch(0), batch(1)]))
    return writes


# torch alone fails in the backward of a compiled block behind an embedding whose sum is still on its way.
CASES = [case for case in itertools.product([True, False], repeat=3) if case[0] or case[1]]


@pytest.mark.in_turn
@pytest.mark.parametrize("sequence, whole, convert", CASES)
@pytest.mark.sampled(2)
def test_a_compiled_part_is_one_graph_with_fused_writes(sequence: bool, whole: bool, convert: bool) -> None:
    for writes in run_ranks(compiled, 2, sequence, whole, convert):
        assert writes == ([0, 2] if convert else [0])


def compiled_rows(uneven: bool) -> None:
    """A bias once, and a rank with fewer rows than another."""
    prepare()
    mesh = make_mesh(1, 2)
    sizes = (6, 7 if uneven else 8)

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], 4))

    model, plain = make(), make()
    convert_linears(model)
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    model.compile(backend="aot_eager")
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"])
    x = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0))
    assert backwards(wrapped, [lambda: wrapped(x).square().mean()] * 2) == [0, 2]
    plain(x).square().mean().backward()
    assert_grads(whole_grads(model), {name: param.grad for name, param in plain.named_parameters()})


@pytest.mark.in_turn
@pytest.mark.parametrize("uneven", [False, True])
def test_a_compiled_bias_counts_once_and_cuts_may_be_uneven(uneven: bool) -> None:
    run_ranks(compiled_rows, 2, uneven)


def compiled_transformers(kind: str) -> list[int]:
    from cut_transformers import cut, loss_of, make

    prepare()
    mesh = make_mesh(1, 2)
    model = make(kind)
    cut(model, mesh)
    convert_linears(model)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    wrapped = DistributedDataParallel(model, process_group=mesh["dp"])
    writes = backwards(wrapped, [lambda i=i: loss_of(wrapped, i) for i in range(2)])
    plain = make(kind)
    for index in range(2):
        (loss_of(plain, index) / 2).backward()
    assert_grads(whole_grads(model), {n: param.grad for n, param in plain.named_parameters()}, rtol=3e-6)
    return writes


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Qwen3Moe"])
@pytest.mark.slow
def test_compiled_layers_of_transformers(kind: str) -> None:
    """Norms of queries and keys too, of whose gradients transformers' own hook loses a rank's part in compiled code."""
    pytest.importorskip("transformers")
    for writes in run_ranks(compiled_transformers, 2, kind):
        assert writes == [0, 2]
