"""Linear layers over tensor-parallel ranks, beside the same layers whole."""

import copy
import itertools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from maingrad.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    GraphedTrainingStep,
)
from maingrad.ddp.contract.main_grad import record_of
from maingrad.ddp.plan.cut import Box
from maingrad.ddp.plan.model_slice import slice_of_marks
from maingrad.ddp.plan.tensor_parallel.localize import localize
from maingrad.fsdp import fully_shard
from maingrad.launch import simulate
from maingrad.launch.simulation.simulate import SimulatedRankError
from maingrad.te_integration import (
    Float8CurrentScaling,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    WgradQueue,
    autocast,
    convert_linears,
    delayed_wgrad,
    unconvert,
)
from maingrad.te_integration.dense import products, tensor_parallel

K, F, LENGTH, ROWS = 8, 12, 6, 3
FUSED = 8  # weights of ``layers``


class Mixed(nn.Module):
    """Queries, keys and values, each of which is cut, become one."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.chunk(3, -1)
        return q.sigmoid() * k + v


def layers(**given: Any) -> nn.Sequential:
    """Each kind of layer: whole without ``given``, else cut over ``tp_group``."""
    torch.manual_seed(0)
    over = {name: given[name] for name in ("tp_group", "tp_size", "sequence_parallel") if name in given}
    rest = {name: value for name, value in given.items() if name not in over}
    column, row = ({"parallel_mode": mode} | over if over else {} for mode in ("column", "row"))
    return nn.Sequential(
        Linear(K, F, **rest, **column),
        nn.GELU(),
        Linear(F, K, **rest, **row),
        LayerNormMLP(K, F, activation="swiglu", **rest, **({"set_parallel_mode": True} | over if over else {})),
        LayerNormLinear(K, F, normalization="RMSNorm", parameters_split=("q", "k", "v"), **rest, **column),
        Mixed(),
        Linear(F // 3, K, bias=False, **rest, **row),
    )


def batch(number: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(LENGTH, ROWS, K, generator=draw), torch.randn(LENGTH, ROWS, K, generator=draw)


def part(x: Tensor, sequence_parallel: bool, group: Any = None) -> Tensor:
    return x.chunk(2)[dist.get_rank(group)] if sequence_parallel else x


def own_part(whole: Tensor, param: Any, group: dist.ProcessGroup) -> Tensor:
    """This rank's elements of a whole tensor, by the parameter's marks."""
    found = slice_of_marks(param, group)
    parts = [whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))] for box in found.boxes]
    return parts[0] if found.dim is None else torch.cat(parts, found.dim)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm())


def errors_of(how: str, sequence_parallel: bool, dtype: torch.dtype = torch.float64) -> tuple[dict[str, float], int]:
    """Errors of all gradients of two microbatches, relative to the layers whole; and how many writes were fused."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    group, replicas = mesh.get_group("tp"), mesh.get_group("dp")
    fuse = how not in ("unfused", "converted")
    model = layers(tp_group=group, sequence_parallel=sequence_parallel, fuse_wgrad_accumulation=fuse, dtype=dtype)
    if how == "converted":
        assert len(convert_linears(model).converted) == 5
    if how == "compiled":
        model.compile(backend="aot_eager", fullgraph=True)
    if how == "filled, compiled":  # the graph breaks at each layer, and torch compiles what it can behind it
        for layer in model:
            layer.compile(backend="eager")
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=how == "zero1")
    wrapped = DistributedDataParallel(model, config, process_group=replicas, tensor_parallel_group=group)
    whole, errors, queue = layers(dtype=dtype), {}, WgradQueue(fill_waits="filled" in how)
    run: Callable[[Tensor], Tensor] = wrapped
    if how in ("recomputed", "nested"):
        run = partial(checkpoint, wrapped, use_reentrant=how == "nested")
    for number in range(2):
        for replica in range(replicas.size()):
            x, of_output = (each.to(dtype) for each in batch(2 * number + replica))
            x.requires_grad_()
            expected = whole(x)
            (expected * of_output).sum().div(replicas.size()).backward()
            if replica != replicas.rank():
                continue
            mine = part(x.detach(), sequence_parallel, group).clone().requires_grad_()
            with delayed_wgrad(queue) if how in ("delayed", "filled", "filled, compiled") else nullcontext():
                output = run(mine)
            with wrapped.no_sync() if number == 0 else nullcontext():
                (output * part(of_output, sequence_parallel, group)).sum().backward()
            errors[f"output {number}"] = relative(output, part(expected, sequence_parallel, group))
            errors[f"input {number}"] = relative(mine.grad / replicas.size(), part(x.grad, sequence_parallel, group))
    queue.drain()
    wrapped.finish_grad_sync()
    writes = sum(record_of(param).num_fused_writes for param in model.parameters())
    wrapped.expose_grads()
    for (name, param), reference in zip(model.named_parameters(), whole.parameters(), strict=True):
        errors[name] = relative(param.grad, own_part(reference.grad, param, group))
    return errors, writes


WAYS = [
    "fused",
    "unfused",
    "converted",
    "delayed",
    "filled",
    "filled, compiled",
    "recomputed",
    "nested",
    "compiled",
]


@pytest.mark.in_turn
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("how", WAYS)
def test_gradients_are_those_of_whole_layers(how: str, sequence_parallel: bool) -> None:
    for errors, writes in simulate(errors_of, 2, how, sequence_parallel):
        assert max(errors.values()) < 1e-12, errors
        assert writes == (0 if how == "unfused" else 2 * FUSED)


@pytest.mark.in_turn
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("how", ["fused", "filled"])
def test_gradients_are_averaged_over_replicas(how: str, sequence_parallel: bool) -> None:
    for errors, _ in simulate(errors_of, 4, how, sequence_parallel):
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_in_fp32(sequence_parallel: bool) -> None:
    for errors, _ in simulate(errors_of, 2, "fused", sequence_parallel, torch.float32):
        assert max(errors.values()) < 1e-6, errors


# ---- The order of a column-parallel backward. ----


def backward_of_one(events: list[Any], how: str, sequence_parallel: bool) -> None:
    group, alone = dist.group.WORLD, [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    given = {"parallel_mode": "column", "tp_group": group, "sequence_parallel": sequence_parallel}
    layer: nn.Linear = Linear(K, F, bias=False, fuse_wgrad_accumulation=True, **given)
    if "torch's" in how:
        layer = nn.Linear(K, F, bias=False)
        convert_linears(parallelize_module(layer, init_device_mesh("cpu", (2,)), ColwiseParallel()))
        localize(layer)
    if how not in ("fused", "filled", "torch's"):
        layer.compile(backend=how.removesuffix(", torch's"), fullgraph=True)
    wrapped = DistributedDataParallel(layer, DistributedDataParallelConfig(), process_group=alone)
    queue, x = WgradQueue(fill_waits=True), torch.randn(LENGTH, K, requires_grad=True)
    if how == "filled":
        with delayed_wgrad(queue):
            before = wrapped(x.detach()).sum()
        with wrapped.no_sync():
            before.backward()
    with delayed_wgrad(queue) if how == "filled" else nullcontext():
        output = wrapped(x).sum()
    events.append((dist.get_rank(), "backward"))
    output.backward()
    events.append((dist.get_rank(), "end"))
    queue.drain()


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "how, sequence_parallel",
    [
        *itertools.product(["fused", "aot_eager", "filled"], [False, True]),
        ("torch's", False),
        ("aot_eager, torch's", False),
        pytest.param("inductor", False, marks=pytest.mark.slow),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
def test_a_backward_computes_while_its_collectives_run(
    how: str, sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[int, str]] = []

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(each, torch._subclasses.FakeTensor) for each in args):
                events.append((dist.get_rank(), name))
            return call(*args, **kwargs)

        return run

    real = torch.ops._c10d_functional
    names = ("all_reduce", "all_reduce_", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor")
    compiled = how not in ("fused", "filled", "torch's")
    if compiled:  # the graph calls the operators themselves, and simulated ranks see their launches
        monkeypatch.setattr(products, "wgrad_accumulate", noted("dW", products.wgrad_accumulate))
        simulate(backward_of_one, 2, events, how, sequence_parallel, schedule=events)
    else:
        ops = type("Collectives", (), {name: staticmethod(noted(name, getattr(real, name))) for name in names})
        monkeypatch.setattr(products, "collectives", ops)
        monkeypatch.setattr(products, "wgrad_accumulate", noted("dW", products.wgrad_accumulate))
        monkeypatch.setattr(tensor_parallel, "input_grad", noted("dx", products.input_grad))
        simulate(backward_of_one, 2, events, how, sequence_parallel)
    mine = [event for rank, event in events if rank == 0]
    backward = mine[mine.index("backward") + 1 : mine.index("end")]
    if compiled:
        started = [index for index, event in enumerate(backward) if event.startswith(("launch all_r", "launch reduce"))]
        assert len(started) == 1 and started[0] < backward.index("dW")
        return
    gather, wait = ["all_gather_into_tensor"], ["wait_tensor"]
    start = "reduce_scatter_tensor" if sequence_parallel else "all_reduce_"
    # The product that is filled in is the earlier microbatch's: this one's own waits in the queue.
    between = ["dW", *(wait * sequence_parallel)] if how == "filled" else [*(wait * sequence_parallel), "dW"]
    assert backward == [*(gather * sequence_parallel), "dx", start, *between, *wait]


# ---- What is refused, and what a module keeps. ----


def whole_of(module: Any) -> dict[str, list[Tensor]]:
    """Each parameter with its boxes, from all ranks."""
    found: dict[str, list[Any]] = {}
    for name, param in module.named_parameters():
        gathered: list[Any] = [None, None]
        dist.all_gather_object(gathered, (param.detach(), slice_of_marks(param, dist.group.WORLD).boxes))
        found[name] = gathered
    return found


def initial_values() -> list[tuple[str, bool]]:
    group, results = dist.group.WORLD, []
    whole, cut = layers(), layers(tp_group=group, tp_size=2)
    pickled, copied = pickle.loads(pickle.dumps(cut)), copy.deepcopy(cut)
    again = layers(tp_group=group, device="meta").to_empty(device="cpu")
    for model in (cut, pickled, copied, again):
        assert list(map(type, model)) == list(map(type, cut)), "modules of one class have one type"
        if model is again:  # ``to_empty`` has left neither values nor marks
            for each in (whole, again):
                torch.manual_seed(0)
                for module in filter(lambda module: hasattr(module, "reset_parameters"), each):
                    module.reset_parameters()
        for (name, param), reference in zip(model.named_parameters(), whole.parameters(), strict=True):
            results.append((name, torch.equal(param, own_part(reference, param, group))))
    return results


def test_ranks_cut_their_initial_values_from_one_whole() -> None:
    for found in simulate(initial_values, 2):
        assert len(found) == 4 * 18
        assert all(equal for _, equal in found), found


def marks_of_what_others_have_cut() -> list[str]:
    layer = Linear(K, F // 2, fuse_wgrad_accumulation=True)
    ranks = tensor_parallel.ranks_of(dist.group.WORLD, 0)
    tensor_parallel.exchange_over_ranks(layer, ["column"], ranks, dist.group.WORLD)
    return [mark for param in copy.deepcopy(layer).parameters() for mark in vars(param)]


def test_a_copy_of_what_others_have_cut_has_no_marks() -> None:
    """Whoever has cut it says what its parameters are: a mark would have their gradients summed once more."""
    assert simulate(marks_of_what_others_have_cut, 2) == [[], []]


def marks_of_a_gated_mlp() -> tuple[Any, ...]:
    mlp: Any = LayerNormMLP(K, F, activation="swiglu", set_parallel_mode=True, tp_group=dist.group.WORLD)
    return slice_of_marks(mlp.fc1_weight, dist.group.WORLD).boxes, mlp.fc2_weight.partition_dim, repr(mlp), type(mlp)


def test_a_gated_weight_is_two_blocks_each_of_which_is_cut() -> None:
    _, (boxes, dim, text, cls) = simulate(marks_of_a_gated_mlp, 2)
    assert boxes == (Box((F // 2, 0), (F // 2, K)), Box((F + F // 2, 0), (F // 2, K)))
    assert dim == 1 and issubclass(cls, LayerNormMLP) and text.startswith("TensorParallelLayerNormMLP(hidden_size=8")


def biases_apart() -> list[Any]:
    row: Any = Linear(F, K, parallel_mode="row", tp_group=dist.group.WORLD, return_bias=True)
    whole: Any = (torch.manual_seed(dist.get_rank()), Linear(F, K))[1]
    del whole
    output, bias = row(torch.ones(2, F // 2))
    return [bias is row.bias, output.detach()]


def test_return_bias_leaves_the_bias_to_the_caller() -> None:
    (first, output), (second, other) = simulate(biases_apart, 2)
    assert first and second and torch.equal(output, other)


def under_a_recipe(sequence_parallel: bool) -> dict[str, float]:
    group = dist.group.WORLD
    assert group is not None
    dtype = torch.bfloat16
    whole = layers(dtype=dtype)[:3]
    model = layers(dtype=dtype, tp_group=group, sequence_parallel=sequence_parallel)[:3]
    x, of_output = (each.to(dtype) for each in batch(0))
    mine = part(x, sequence_parallel).clone().requires_grad_()
    x.requires_grad_()
    with autocast(recipe=Float8CurrentScaling(emulate=True)):
        output = model(mine)
    (output * part(of_output, sequence_parallel)).sum().backward()
    (whole(x) * of_output).sum().backward()
    errors = {"input": relative(mine.grad.float(), part(x.grad.float(), sequence_parallel))}
    for (name, param), reference in zip(model.named_parameters(), whole.parameters(), strict=True):
        if getattr(param, "sequence_parallel", False):
            dist.all_reduce(param.grad, group=group)
        errors[name] = relative(param.grad.float(), own_part(reference.grad, param, group).float())
    return errors


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_products_under_a_recipe_are_exchanged_too(sequence_parallel: bool) -> None:
    for errors in simulate(under_a_recipe, 2, sequence_parallel):
        assert max(errors.values()) < 0.1, errors  # of eight bits; a missing sum is an error of more than 0.6


def twice_differentiated(kind: str) -> None:
    given: Any = {"tp_group": dist.group.WORLD, "fuse_wgrad_accumulation": kind == "fused"}
    layer = Linear(K, F, parallel_mode="row" if kind == "row" else "column", **given)
    x = torch.randn(2, K // 2 if kind == "row" else K, requires_grad=True)
    torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("kind", ["fused", "column", "row"])
def test_second_derivatives_are_refused(kind: str) -> None:
    with pytest.raises(SimulatedRankError, match="second derivatives"):
        simulate(twice_differentiated, 2, kind)


def unconverted() -> bool:
    model = layers(tp_group=dist.group.WORLD, fuse_wgrad_accumulation=True)
    unconvert(model)
    return any(layer.fuse_wgrad_accumulation for layer in model if isinstance(layer, Linear))


def test_unconverted_layers_stay_cut() -> None:
    assert simulate(unconverted, 2) == [False, False]


FORMS: dict[str, Callable[[Any], nn.Module]] = {
    "whole": lambda tp: layers(tp_group=tp.get_group(), fuse_wgrad_accumulation=True),
    "parts": lambda tp: layers(tp_group=tp.get_group(), fuse_wgrad_accumulation=True, sequence_parallel=True),
    "DTensors": lambda tp: parallelize_module(layers(), tp, {"0": ColwiseParallel(), "2": RowwiseParallel()}),
}


def steps(graphed: bool, form: str) -> tuple[list[float], list[Tensor]]:
    """Losses of five steps on this rank, and the parameters after them."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = DistributedDataParallel(FORMS[form](mesh["tp"]), process_group=mesh["dp"], tensor_parallel_group=mesh["tp"])
    optimizer = DistributedOptimizer(model, lr=0.1, optimizer_class=torch.optim.SGD)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = GraphedTrainingStep(step, model, optimizer) if graphed else step
    parts = ([part(each, form == "parts", mesh.get_group("tp")) for each in batch(number)] for number in range(5))
    return [train(*each).item() for each in parts], [param.detach().clone() for param in model.parameters()]


def eager_and_graphed(form: str) -> None:
    eager, graphed = (steps(each, form) for each in (False, True))
    torch.testing.assert_close(graphed, eager, rtol=2e-6, atol=1e-6)  # autograd adds in another order


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("run", [simulate, run_ranks])
def test_graphed_steps_exchange_what_eager_ones_do(run: Callable[..., Any], form: str) -> None:
    run(eager_and_graphed, 2, form)


def wrapped_by_other_ranks(fully: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = copy.deepcopy(layers(tp_group=mesh.get_group("tp")))
    if fully:
        fully_shard(model, mesh["tp"], tensor_parallel_group=mesh["dp"])
    else:
        DistributedDataParallel(model, process_group=mesh["tp"], tensor_parallel_group=mesh["dp"])


@pytest.mark.parametrize("fully", [False, True])
def test_groups_in_each_others_place_are_refused(fully: bool) -> None:
    with pytest.raises(SimulatedRankError, match=r"layer '0' is cut over ranks .*pass the layers' group as"):
        simulate(wrapped_by_other_ranks, 4, fully)


@pytest.mark.parametrize(
    "make, message",
    [
        (partial(Linear, K, F, parallel_mode="column", tp_size=2), "Linear: tp_size=2, and tp_group, .* has 1 rank"),
        (partial(Linear, K, F, sequence_parallel=True), "say how a layer is cut that has a parallel_mode"),
        (partial(LayerNormLinear, K, F, parallel_mode="row"), "cannot normalise them; it is 'column'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def refused_with_a_group(given: dict[str, Any]) -> None:
    sizes, kind = given.pop("sizes", (K, F)), given.pop("kind", Linear)
    kind(*sizes, tp_group=dist.group.WORLD, **given)


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "say how a layer is cut that has a parallel_mode"),
        ({"parallel_mode": "row", "tp_size": 4}, "tp_size=4, and tp_group, .* has 2 rank"),
        ({"parallel_mode": "row", "tp_size": 0}, "tp_size=0, and tp_group, .* has 2 rank"),
        ({"parallel_mode": "column", "sizes": (K, 7)}, r"weight \[7, 8\] does not divide over 2 ranks in dim 0"),
        (
            {"kind": LayerNormMLP, "set_parallel_mode": True, "activation": "swiglu", "sizes": (K, 7)},
            r"fc1_weight \[14, 8\] does not divide over 2 ranks in dim 0",
        ),
    ],
)
def test_what_does_not_fit_the_ranks_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulatedRankError, match=message):
        simulate(refused_with_a_group, 2, given)


def under_autocast(**given: Any) -> list[torch.dtype]:
    dtypes = []
    for layer in (Linear(F, K, parallel_mode="row", tp_group=dist.group.WORLD, **given), nn.Linear(F // 2, K)):
        with torch.autocast("cpu", torch.bfloat16):
            dtypes.append(layer(torch.randn(2, F // 2)).dtype)
    return dtypes


@pytest.mark.parametrize("fused", [False, True])
def test_a_bias_behind_the_sum_keeps_autocasts_dtype(fused: bool) -> None:
    assert simulate(under_autocast, 2, fuse_wgrad_accumulation=fused) == [[torch.bfloat16] * 2] * 2


def sizes() -> list[tuple[int, int]]:
    given: Any = {"tp_group": dist.group.WORLD, "parallel_mode": "column"}
    made = [Linear(K, F, **given), LayerNormLinear(K, F, **given), Linear(F, K, **given | {"parallel_mode": "row"})]
    assert all(tuple(layer.weight.shape) == (layer.out_features, layer.in_features) for layer in made)
    return [(layer.in_features, layer.out_features) for layer in made]


def test_a_layer_says_the_sizes_of_its_slice() -> None:
    assert simulate(sizes, 2) == [[(K, F // 2), (K, F // 2), (F // 2, K)]] * 2


def of_batches_first(adjacent: bool, **given: Any) -> list[Tensor]:
    """Output and gradients of a column- and a row-parallel layer, of [batch, sequence, features] turned round."""
    torch.manual_seed(0)
    over: Any = {"tp_group": dist.group.WORLD, "fuse_wgrad_accumulation": True, "bias": False, **given}
    model = nn.Sequential(Linear(K, F, parallel_mode="column", **over), Linear(F, K, parallel_mode="row", **over))
    wrapped = DistributedDataParallel(
        model, process_group=[dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    )
    x, dy = (torch.randn(ROWS, LENGTH, K).transpose(0, 1) for _ in range(2))
    x, dy = (each.contiguous() if adjacent else each for each in (x, dy))
    output = wrapped(x.requires_grad_())
    output.backward(dy)
    return [output.detach(), x.grad, *(param.main_grad.clone() for param in model.parameters())]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_operands_may_lie_in_another_order(sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives take adjacent elements alone: NCCL's and gloo's do, though not those that are simulated."""

    def strict(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Tensor, *args: Any) -> Any:
            assert x.is_contiguous()
            return call(x, *args)

        return run

    expected = simulate(of_batches_first, 2, True, sequence_parallel=sequence_parallel)
    real = torch.ops._c10d_functional
    names = ("all_reduce", "all_reduce_", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor")
    ops = type("Collectives", (), {name: staticmethod(strict(getattr(real, name))) for name in names})
    monkeypatch.setattr(products, "collectives", ops)
    found = simulate(of_batches_first, 2, False, sequence_parallel=sequence_parallel)
    torch.testing.assert_close(found, expected)


def saved_inputs(original: bool) -> tuple[list[torch.dtype], Tensor]:
    """Dtypes of what a column-parallel layer saves of its input under autocast, and the weight's gradient."""
    torch.manual_seed(0)
    given: Any = {"tp_group": dist.group.WORLD, "parallel_mode": "column", "fuse_wgrad_accumulation": True}
    layer, kept = Linear(K, F, save_original_input=original, **given), []
    wrapped = DistributedDataParallel(
        layer, process_group=[dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    )
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast("cpu", torch.bfloat16),
    ):
        output = wrapped(torch.randn(3, K, requires_grad=True))
    output.float().square().sum().backward()
    of_bias = (2 * output.detach()).float().sum(0)
    torch.testing.assert_close(layer.bias.main_grad, of_bias, rtol=1e-6, atol=1e-6)  # summed in fp32
    return [t.dtype for t in kept if t.shape == (3, K)], layer.weight.main_grad.clone()


def test_under_autocast_the_input_itself_is_saved_where_the_program_says_so() -> None:
    copies, originals = (simulate(saved_inputs, 2, original) for original in (False, True))
    for (of_copy, grad), (of_original, same) in zip(copies, originals, strict=True):
        assert of_copy == [torch.bfloat16] and of_original == [torch.float32] and torch.equal(grad, same)


def cut_by_torch(given: dict[str, Any]) -> None:
    layer = Linear(K, F, **given)
    localize(parallelize_module(layer, init_device_mesh("cpu", (2,)), ColwiseParallel()))


@pytest.mark.parametrize("given", [{"return_bias": True}, {"parameters_split": ("q", "k")}])
def test_torchs_plans_do_not_cut_what_is_computed_outside_of_the_product(given: dict[str, Any]) -> None:
    with pytest.raises(SimulatedRankError, match="is a slice of tensor parallelism, and Linear computes from"):
        simulate(cut_by_torch, 2, given)


def waiting(plan: Any) -> int:
    """Weight gradients that wait behind the backward of a layer that torch has cut."""
    layer, queue = nn.Linear(K, K), WgradQueue()
    convert_linears(parallelize_module(layer, init_device_mesh("cpu", (2,)), plan))
    localize(layer)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    wrapped = DistributedDataParallel(layer, process_group=alone)
    with delayed_wgrad(queue):
        output = wrapped(torch.randn(3, K if isinstance(plan, ColwiseParallel) else K // 2, requires_grad=True))
    output.sum().backward()
    found = len(queue)
    queue.drain()
    return found


@pytest.mark.parametrize("plan", [ColwiseParallel(), RowwiseParallel()], ids=["column", "row"])
def test_weight_gradients_of_layers_that_torch_has_cut_may_wait(plan: Any) -> None:
    assert simulate(waiting, 2, plan) == [1, 1]


def odd_sequence() -> None:
    row = Linear(F, K, parallel_mode="row", tp_group=dist.group.WORLD, sequence_parallel=True)
    row(torch.randn(5, F // 2))


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    with pytest.raises(SimulatedRankError, match=r"a sequence of 5 \(dim 0\) does not divide over 2 ranks"):
        simulate(odd_sequence, 2)


def sum_along_dim_1(batch: int, length: int) -> Tensor:
    ranks, whole = tensor_parallel.ranks_of(dist.group.WORLD, 1), torch.arange(batch * length * 2.0)
    return ranks.finish_sum(ranks.start_sum(whole.view(batch, length, 2)))


def test_along_dim_1_the_sequence_divides_and_the_batch_need_not() -> None:
    expected = 2 * torch.arange(24.0).view(3, 4, 2)
    assert torch.equal(torch.cat(simulate(sum_along_dim_1, 2, 3, 4), 1), expected)
    with pytest.raises(SimulatedRankError, match=r"ValueError.*a sequence of 3 \(dim 1\) does not divide over 2 ranks"):
        simulate(sum_along_dim_1, 2, 4, 3)


def test_one_rank_has_the_whole_layer() -> None:
    def make() -> Any:
        return type(Linear(K, F, parallel_mode="column", tp_group=dist.group.WORLD)), type(Linear(K, F, tp_size=1))

    assert simulate(make, 1) == [(Linear, Linear)]
