"""What a compiler traces, run as it is: outputs and gradients are those of the eager path, bit for bit.

``test_compiled.py`` compiles it. Here each branch of it costs milliseconds.
"""

import contextlib
import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from loops import wrap
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from traced_forms import traced

from maingrad.te_integration import (
    Embedding,
    Float8BlockScaling,
    Float8CurrentScaling,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    LinearCrossEntropy,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    WgradQueue,
    autocast,
    delayed_wgrad,
    linear_cross_entropy,
    recipes,
)
from maingrad.te_integration.dense import compiled_linear, compiled_wgrad
from maingrad.te_integration.head import compiled_head

K, N, V = 32, 48, 33
FUSED: dict[str, Any] = {"fuse_wgrad_accumulation": True}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Linear(K, N, **FUSED),
    "no bias": lambda: Linear(K, N, bias=False, **FUSED),
    "split": lambda: Linear(K, N, parameters_split={"query_": 32, "key_": 16}, **FUSED),
    "delayed": lambda: Linear(K, N, delay_wgrad_compute=True, **FUSED),
    "delayed, unfused": lambda: Linear(K, N, delay_wgrad_compute=True),
    "unfused": lambda: Linear(K, N),
    "norm": lambda: LayerNormLinear(K, N, **FUSED),
    "mlp": lambda: LayerNormMLP(K, N, activation="swiglu", **FUSED),
}
RECIPES = [Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling(), None]


def assert_alike(make: Callable[[], nn.Module], run: Callable[[nn.Module, int], Tensor], writes: int | None) -> None:
    """Two microbatches, eagerly and as traced; ``writes``: of fused weights, of each."""
    torch.manual_seed(0)
    eager = make()
    inside = copy.deepcopy(eager)
    wrappers = [wrap(eager), wrap(inside)]
    for microbatch in range(2):
        for model, ddp, mode in zip((eager, inside), wrappers, (contextlib.nullcontext, traced), strict=True):
            with ddp.no_sync() if microbatch == 0 else contextlib.nullcontext():
                with mode():
                    output = run(model, microbatch)
                (output.float() * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
                for module in model.modules():
                    if getattr(module, "wgrad_queue", None) is not None:
                        module.backward_dw()
            model.last = output.detach()
        assert torch.equal(eager.last, inside.last)  # type: ignore[arg-type]
    for ddp in wrappers:
        ddp.finish_grad_sync()
    for (name, param), other in zip(eager.named_parameters(), inside.parameters(), strict=True):
        assert torch.equal(param.main_grad, other.main_grad), name
    counts = [{record.name: record.num_fused_writes for record in ddp.records} for ddp in wrappers]
    assert counts[0] == counts[1] and (writes is None or writes in counts[1].values())


def inputs(microbatch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randn(3, 5, K, generator=generator).to(dtype).requires_grad_()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("how", ["fp32", "bf16", "autocast"])
@pytest.mark.sampled(24)
def test_layers(layer: str, how: str) -> None:
    dtype = torch.bfloat16 if how == "bf16" else torch.float32
    grads: list[Tensor] = []

    def run(model: nn.Module, microbatch: int) -> Tensor:
        x = inputs(microbatch, dtype)
        x.register_hook(grads.append)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            output: Tensor = model(x)
        return output

    assert_alike(lambda: LAYERS[layer]().to(dtype), run, None if "unfused" in layer else 2)
    assert len(grads) == 4 and all(map(torch.equal, grads[::2], grads[1::2]))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("layer", ["linear", "no bias", "split", "mlp"])
@pytest.mark.sampled(20)
def test_layers_under_a_recipe(layer: str, recipe: Any) -> None:
    if isinstance(recipe, NVFP4BlockScaling):
        recipe = NVFP4BlockScaling(disable_stochastic_rounding=True)  # the rest is the same in each run
    grads: list[Tensor] = []

    def run(model: nn.Module, microbatch: int) -> Tensor:
        x = inputs(microbatch, torch.bfloat16)
        x.register_hook(grads.append)
        output: Tensor = model(x)
        return output

    with autocast(recipe=recipe):
        assert_alike(lambda: LAYERS[layer]().bfloat16(), run, 2)
    assert all(map(torch.equal, grads[::2], grads[1::2]))


@pytest.mark.parametrize("frozen", ["weight", "bias", "input", "all but the input"])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.sampled(8)
def test_what_needs_no_gradient_gets_none(frozen: str, quantised: bool) -> None:
    torch.manual_seed(0)
    layer = Linear(K, N, dtype=torch.bfloat16, **FUSED)
    layer.weight.requires_grad_(frozen not in ("weight", "all but the input"))
    layer.bias.requires_grad_(frozen not in ("bias", "all but the input"))
    twin = copy.deepcopy(layer)
    found = []
    with autocast(quantised):
        for model, mode in ((layer, contextlib.nullcontext), (twin, traced)):
            ddp = wrap(model) if frozen != "all but the input" else None
            x = inputs(0, torch.bfloat16).detach().requires_grad_(frozen != "input")
            with mode():
                y = model(x)
            y.square().sum().backward()
            params = (model.weight, model.bias)
            found.append([y.detach(), x.grad, *(getattr(each, "main_grad", None) for each in params)])
            del ddp  # here: gradients of its iteration would go with it
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def tokens(microbatch: int) -> Tensor:
    return torch.randint(V, (3, 7), generator=torch.Generator().manual_seed(microbatch))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}], ids=str)
def test_embeddings(options: dict[str, Any]) -> None:
    def run(model: nn.Module, microbatch: int) -> Tensor:
        output: Tensor = model(tokens(microbatch))
        return output

    assert_alike(lambda: Embedding(V, K, **options, **FUSED), run, 0 if "scale_grad_by_freq" in options else 2)


def heads() -> Iterator[tuple[Any, dict[str, Any], torch.dtype]]:
    for dtype in (torch.float32, torch.bfloat16):
        yield "recompute", {}, dtype
        yield "recompute", {"bias": True, "label_smoothing": 0.1, "z_loss": 0.01, "logit_softcap": 3.0}, dtype
        yield "in_forward", {"bias": True, "logit_scale": 0.5, "ignore_index": 7}, dtype


@pytest.mark.parametrize(("mode", "options", "dtype"), list(heads()))
def test_heads(mode: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    grads: list[Tensor] = []

    def run(model: nn.Module, microbatch: int) -> Tensor:
        hidden, targets = inputs(microbatch, dtype), tokens(microbatch)[:, :5].clone()
        hidden.register_hook(grads.append)
        targets[0] = options.get("ignore_index", -100)
        loss: Tensor = model(hidden, targets, grad_scale=-1.0)  # what ``assert_alike`` begins with
        return loss

    assert_alike(lambda: LinearCrossEntropy(K, V, chunk_tokens=4, mode=mode, dtype=dtype, **options), run, 2)
    assert len(grads) == 4 and all(map(torch.equal, grads[::2], grads[1::2]))


@pytest.mark.filterwarnings("ignore:.*quantises bf16 and fp16")
def test_what_a_graph_cannot_hold_is_a_break() -> None:
    """Where others decide about the gradient in each forward; and nowhere else."""
    torch.manual_seed(0)
    layer, queue = Linear(K, N, **FUSED), WgradQueue()
    ddp = wrap(layer)

    def breaks(module: Any, *args: Any) -> int:
        with traced() as broken:
            module(*args)
        return len(broken)

    x = inputs(0)
    assert breaks(layer, x) == 0
    own_queue = Linear(K, N, delay_wgrad_compute=True, **FUSED)
    delays = wrap(own_queue)
    assert breaks(own_queue, x) == 0, "a module's own queue stays"
    with delayed_wgrad(queue):
        assert breaks(layer, x) == 1
        assert breaks(Linear(K, N, **FUSED), x) == 1, "without a provider what is delayed is checked in eager code"
    assert breaks(Linear(K, N, delay_wgrad_compute=True), x) == 1, "into a queue of its own too"
    with torch.no_grad():
        assert breaks(layer, x) == 0
    with patch.object(compiled_wgrad, "is_compiled_autograd_on", lambda: True):
        assert breaks(layer, x) == 1, "compiled autograd would drop the gradient"
    of_others = Linear(K, N, **FUSED)
    of_others.weight.main_grad = torch.zeros(N, K)
    assert breaks(of_others, x) == 1, "a foreign provider needs a placeholder"
    half = Linear(K, N, dtype=torch.bfloat16)
    with autocast():
        assert breaks(half, x.bfloat16()) == 1, "autograd delivers a quantised product"
        assert breaks(half.requires_grad_(False), x.bfloat16()) == 0
        assert breaks(layer, x) == 0, "fp32 is not quantised"
        trained = Linear(K, N, dtype=torch.bfloat16, **FUSED)
        with torch.no_grad():
            assert breaks(trained, x.bfloat16()) == breaks(half.requires_grad_(), x.bfloat16()) == 0, "an evaluation"
    with traced() as broken, autocast():
        half(x.bfloat16())
    assert len(broken) == 1, "a block of the traced code itself"
    kept = wrap(trained)
    with traced() as broken, autocast():
        trained(x.bfloat16())
    assert len(broken) == 1, "around a fused layer too"
    with autocast():
        assert breaks(trained, x.bfloat16()) == 0, "that block has ended"
    assert breaks(Embedding(V, K, **FUSED), tokens(0)) == 0
    for max_norm, expected in ((None, 0), (1.0, 1)):
        lookup = Embedding(V, K, max_norm=max_norm, **FUSED)
        kept = wrap(lookup)
        assert breaks(lookup, tokens(0)) == expected, max_norm
    del ddp, kept, delays


def test_a_layer_that_ignores_recipes_computes_without_one() -> None:
    layer = Linear(K, N, dtype=torch.bfloat16, **FUSED)
    layer.ignores_recipes = True
    kept, x = wrap(layer), inputs(0, torch.bfloat16)
    expected = layer(x)
    for recipe in RECIPES[:2]:
        with autocast(recipe=recipe), traced() as broken:
            found = layer(x)
        assert torch.equal(found, expected) and not broken
    del kept


def test_a_layer_that_was_never_quantised_runs_whole_in_a_reentrant_recompute() -> None:
    """One that was, outside of autocast, breaks: eager code raises the error."""
    layer, breaks = Linear(K, N, **FUSED), []
    kept = wrap(layer)

    def run(x: Tensor) -> Tensor:
        with traced() as broken:
            y: Tensor = layer(x)
        breaks.append(len(broken))
        return y

    checkpoint(run, inputs(0), use_reentrant=True).sum().backward()
    assert breaks == [0, 0] and layer.weight.main_grad.any()
    layer = Linear(K, N, dtype=torch.bfloat16, **FUSED)
    kept = wrap(layer)
    with autocast():
        y = checkpoint(run, inputs(0, torch.bfloat16), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        y.sum().backward()
    del kept


def test_a_weight_is_found_where_the_backward_has_it_now() -> None:
    """Its place among the operands changes: the bias before it is the caller's to add, or the layer's."""
    layer: Any = Linear(K, N, **FUSED)
    kept = wrap(layer)
    for returned in (False, True, False):
        layer.return_bias = returned
        kept.zero_grad()
        with traced():
            y = layer(inputs(0))
        (y[0] if returned else y).sum().backward()
        torch.testing.assert_close(layer.weight.main_grad, inputs(0).detach().view(-1, K).sum(0).expand(N, K))


@pytest.mark.parametrize("recipe", RECIPES[:-1], ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.sampled(8)
def test_a_compiler_is_told_the_shapes_that_come(recipe: Any, transposed: bool) -> None:
    number, rows, dtype = recipes.number_of(recipe), 15, torch.bfloat16
    weights = [torch.ones(K, N).to(dtype)] if transposed else [torch.ones(n, K).to(dtype) for n in (32, 16)]
    forward = torch.ones(rows, K).to(dtype), weights, None, number, transposed
    backward = torch.ones(rows, N).to(dtype), weights, number, transposed
    run = compiled_linear
    for needs in itertools.product((False, True), repeat=2):
        for real, fake, given in (
            (run._forward, run._fake_forward, forward),
            (run._backward, run._fake_backward, backward),
        ):
            found, told = (each(*given, *needs) for each in (real, fake))  # type: ignore[operator]
            assert forms_of(found) == forms_of(told)


def forms_of(found: Any) -> list[Any]:
    return [(each.shape, each.dtype) for each in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_compiler_is_told_the_shapes_of_a_heads_gradients(dtype: torch.dtype) -> None:
    run, targets, options = compiled_head, torch.arange(5), (-100, 0.1, 0.01, None, 1.0, 4)
    hidden, weight = torch.ones(5, K, dtype=dtype), torch.ones(V, K, dtype=dtype)
    losses = [each(hidden, weight, None, targets, *options) for each in (run._losses, run._fake_losses)]
    assert forms_of(losses[0]) == forms_of(losses[1])
    operands = [losses[0][0], losses[0][1], hidden, weight, targets, torch.ones(V, dtype=dtype)]
    for needs in itertools.product((False, True), repeat=3):
        found, told = (each(operands, *options, *needs) for each in (run._grads, run._fake_grads))
        assert forms_of(found) == forms_of(told)
        assert forms_of(run._fake_backward(operands, *options, needs[0], needs[2])) == forms_of(told[::2])


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["plain", "quantised"])
@pytest.mark.parametrize("mode", [contextlib.nullcontext, traced], ids=["eager", "traced"])
def test_a_bias_gradient_is_summed_in_the_dtype_of_the_bias(mode: Any, recipe: Any) -> None:
    """Under autocast too: bf16 has 256 and 258, and none between."""
    layer = Linear(K, N, **FUSED)
    ddp = wrap(layer)
    with torch.autocast("cpu", torch.bfloat16), autocast(recipe is not None, recipe=recipe), mode():
        output = layer(torch.ones(257, K))
    output.sum().backward()
    ddp.finish_grad_sync()
    assert layer.bias.main_grad.eq(257).all()


def test_inputs_that_do_not_fit_are_refused_as_in_eager_code() -> None:
    layer = Linear(K, N, **FUSED)
    kept = wrap(layer)
    for x, error in ((torch.ones(2, K + 1), "takes 32 features"), (torch.ones(2, K).double(), "the input is")):
        for mode in (contextlib.nullcontext, traced):
            with mode(), pytest.raises(ValueError, match=error):
                layer(x)
    del kept


@pytest.mark.parametrize("mode", [contextlib.nullcontext, traced], ids=["eager", "traced"])
def test_beside_a_frozen_slice_the_others_are_fused(mode: Any) -> None:
    layer: Any = LAYERS["split"]()
    layer.query_weight.requires_grad_(False)
    ddp = wrap(layer)
    with mode():
        output = layer(inputs(0))
    output.sum().backward()
    ddp.finish_grad_sync()
    assert {record.name: record.num_fused_writes for record in ddp.records}["key_weight"] == 1
    torch.testing.assert_close(layer.key_weight.main_grad, inputs(0).detach().view(-1, K).sum(0).expand(16, K))
    assert layer.query_weight.grad is None


@pytest.mark.parametrize("name", ["query_weight", "key_weight"])
def test_one_slice_decides_for_all_how_their_product_runs(name: str) -> None:
    layers: list[Any] = [LAYERS["split"]() for _ in range(3)]
    hooked, of_others, computed = layers
    ddp = wrap(hooked)
    hooked.get_parameter(name).register_hook(lambda grad: 3 * grad)
    of_others.get_parameter(name).main_grad = torch.zeros_like(of_others.get_parameter(name))
    nn.utils.parametrize.register_parametrization(computed, name, nn.Identity())
    breaks = []
    for layer in layers:
        with traced() as broken:
            output = layer(inputs(0))
        breaks.append(len(broken))
        if layer is hooked:
            output.sum().backward()
            ddp.finish_grad_sync()
    assert breaks == [0, 1, 1]
    expected = inputs(0).detach().view(-1, K).sum(0)
    for each in ("query_weight", "key_weight"):
        found = hooked.get_parameter(each).main_grad
        torch.testing.assert_close(found, (expected * (3 if each == name else 1)).expand_as(found))


def test_a_frozen_weight_that_is_stored_transposed() -> None:
    """As that of ``Conv1D``: input and bias have their gradients."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((3, 4), (4, 5), (5,)))
    operands = x.requires_grad_(), bias.requires_grad_()
    found = compiled_linear.compiled_linear(x, [weight], bias, torch.tensor(-1), 0, transposed=True)
    expected = torch.addmm(bias, x, weight)
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(y.square().sum(), operands) for y in (found, expected))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, traced], ids=["eager", "traced"])
def test_a_weight_that_is_stored_transposed_whose_gradient_is_autograds(mode: Any) -> None:
    layer: Any = Linear(K, K, bias=False)
    layer.transposed = True
    with mode():
        found = layer(inputs(0))
    torch.testing.assert_close(found, inputs(0) @ layer.weight)


OF_ONE_WEIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "linear": (lambda: Linear(K, N, **FUSED), lambda model: model(inputs(0)).square().sum()),
    "embedding": (lambda: Embedding(V, K, **FUSED), lambda model: model(tokens(0)).square().sum()),
    "head": (lambda: LinearCrossEntropy(K, V), lambda model: model(inputs(0), tokens(0)[:, :5])),
    "head in forward": (
        lambda: LinearCrossEntropy(K, V, mode="in_forward"),
        lambda model: model(inputs(0), tokens(0)[:, :5]),
    ),
}


@pytest.mark.parametrize("kind", OF_ONE_WEIGHT)
@pytest.mark.parametrize("how", ["a hook", "unfused", "no provider", "another weight"])
@pytest.mark.sampled(16)
def test_gradients_that_are_not_ours_are_autograds(kind: str, how: str) -> None:
    """A hook sees the gradient of its weight, and a tensor in a weight's place gets its own."""
    make, loss = OF_ONE_WEIGHT[kind]
    found = []
    for mode in (contextlib.nullcontext, traced):
        torch.manual_seed(0)
        model: Any = make()
        if how == "unfused" or (how == "no provider" and "head" not in kind):  # a head needs none
            model.fuse_wgrad_accumulation = False
        ddp = wrap(model) if how != "no provider" else None
        source = model.weight.detach().clone().requires_grad_()
        other = 2 * source
        if how == "a hook":
            model.weight.register_hook(lambda grad: 3 * grad)
        by_other = partial(torch.func.functional_call, model, {"weight": other})
        call = (lambda *args, by=by_other: by(args)) if how == "another weight" else model
        with mode():
            computed = loss(call)
        computed.backward()
        if ddp is not None:
            ddp.finish_grad_sync()
        grad = source.grad if how == "another weight" else model.weight.grad if ddp is None else model.weight.main_grad
        assert grad is not None and grad.any()
        assert how != "another weight" or not model.weight.main_grad.any()
        found.append([computed.detach(), grad.clone()])
    for eager, inside in zip(*found, strict=True):
        torch.testing.assert_close(inside, eager)


@pytest.mark.parametrize("kind", OF_ONE_WEIGHT)
def test_a_leaf_in_a_weights_place_gets_its_gradient(kind: str) -> None:
    make, loss = OF_ONE_WEIGHT[kind]
    model, plain = (make() for _ in range(2))
    model.load_state_dict(plain.state_dict())
    plain.fuse_wgrad_accumulation = False  # type: ignore[assignment]
    kept, weight = wrap(model), model.weight.detach().clone().requires_grad_()  # type: ignore[operator]
    with traced():
        found = loss(lambda *args: torch.func.functional_call(model, {"weight": weight}, args))
    for computed in (found, loss(plain)):
        computed.backward()
    torch.testing.assert_close(weight.grad, plain.weight.grad)
    assert not model.weight.main_grad.any()  # type: ignore[operator, union-attr]
    del kept


@pytest.mark.parametrize("layer", ["linear", "split", "mlp"])
def test_a_backward_of_the_inputs_alone_writes_no_weight_gradient(layer: str) -> None:
    model, x = LAYERS[layer](), inputs(0)
    kept = wrap(model)
    with traced():
        losses = [model(x).square().sum() for _ in range(2)]
    (asked_for,) = torch.autograd.grad(losses[0], x, retain_graph=True)
    losses[1].backward(inputs=[x])
    assert x.grad is not None and torch.equal(x.grad, asked_for) and asked_for.any()
    assert not any(record.view.any() for record in kept.records)
    weights: Any = [param for name, param in model.named_parameters() if name.endswith("weight") and "norm" not in name]
    losses[0].backward(inputs=weights[:1])
    assert [param.main_grad.any().item() for param in weights] == [param is weights[0] for param in weights]


@pytest.mark.parametrize("layer", ["linear", "split", "mlp"])
def test_transforms_see_plain_operations(layer: str) -> None:
    model = LAYERS[layer]()
    kept = wrap(model)
    found = []
    for mode in (contextlib.nullcontext, traced):
        with mode():
            found.append(torch.func.grad(lambda x: model(x).square().sum())(inputs(0).detach()))
    torch.testing.assert_close(*found)
    assert found[0].any() and not any(record.view.any() for record in kept.records)


def test_what_decides_how_a_product_runs_compiles_it_again() -> None:
    """Compilers ask for it before each call of compiled code."""
    layer: Any = LAYERS["split"]()
    kept, handle = wrap(layer), layer._wgrad_handle
    before = handle.guarded()
    with autocast(recipe=MXFP8BlockScaling()):
        assert handle.guarded() != before, "a recipe"
    for name in ("query_weight", "key_weight"):
        weight = layer.get_parameter(name)
        weight.requires_grad_(False)
        assert handle.guarded() != before, "frozen"
        weight.requires_grad_()
        hook = weight.register_hook(lambda grad: grad)
        assert handle.guarded() != before, "hooked"
        hook.remove()
    with torch.autograd.forward_ad.dual_level():
        assert handle.guarded() != before, "a transform"
    with patch.object(compiled_wgrad, "is_compiled_autograd_on", lambda: True):
        assert handle.guarded() != before, "compiled autograd"
    assert handle.guarded() == before
    kept.unwrap()
    assert handle.guarded() != before, "no provider"


@pytest.mark.parametrize("name", ["query_weight", "key_weight"])
def test_a_provider_that_comes_after_the_compiled_forward_is_named(name: str) -> None:
    layer: Any = LAYERS["split"]()
    with traced():
        output = layer(inputs(0))
    weight = layer.get_parameter(name)
    weight.main_grad = torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match=rf"{name}: the weight got a main_grad of others after the layer was compi"):
        output.sum().backward(inputs=[weight])


@pytest.mark.parametrize("name", ["query_weight", "key_weight"])
def test_a_hook_that_comes_after_the_compiled_forward_is_named(name: str) -> None:
    """Any slice of a weight may have it."""
    layer: Any = LAYERS["split"]()
    kept = wrap(layer)
    with traced():
        output = layer(inputs(0))
    layer.get_parameter(name).register_hook(lambda grad: grad)
    with pytest.raises(RuntimeError, match=rf"{name}: the weight got a hook .*after the layer was compiled"):
        output.sum().backward()
    del kept


@pytest.mark.parametrize("kind", ["linear", "head", "head in forward"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_compiled_backward_asks_for_its_module(kind: str) -> None:
    """It keeps none alive, and does not differentiate its own operators."""
    make, loss = OF_ONE_WEIGHT[kind]
    for created, error in ((True, r"backward\(create_graph=True\)"), (False, "a module was freed between")):
        model: Any = make()
        ddp = wrap(model)
        with traced():
            computed = loss(model)
        if not created:
            del model, ddp
            gc.collect()
        with pytest.raises(RuntimeError, match=error):
            computed.backward(create_graph=created)


@pytest.mark.parametrize("layer", ["linear", "mlp"])
def test_without_tokens_there_is_nothing_to_quantise(layer: str) -> None:
    def run(model: nn.Module, microbatch: int) -> Tensor:
        output: Tensor = model(inputs(microbatch, torch.bfloat16)[:, : 5 * microbatch])
        return output

    with autocast(recipe=MXFP8BlockScaling()):
        assert_alike(lambda: LAYERS[layer]().bfloat16(), run, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_compiler_is_told_the_shapes_of_a_head_that_writes_in_forward(dtype: torch.dtype) -> None:
    targets, options = torch.arange(5), (-100, 0.1, 0.01, None, 1.0, 4)
    head = LinearCrossEntropy(K, V, bias=True, mode="in_forward", dtype=dtype)
    kept = wrap(head)
    announced = torch.ones((), dtype=torch.promote_types(dtype, torch.float32))
    operands = [announced, torch.ones(5, K, dtype=dtype), head.weight, targets, head.bias]
    for needs in itertools.product((False, True), repeat=2):
        found, told = (
            each(operands, head._wgrad_key, *options, *needs)
            for each in (compiled_head._in_forward, compiled_head._fake_in_forward)
        )
        assert forms_of(found) == forms_of(told)
        kept.zero_grad()


class ByFunction(nn.Module):
    """A tied weight: the loss is a function's."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.table, self.bias, self.mode = nn.Embedding(V, K), nn.Parameter(torch.linspace(-1, 1, V)), mode

    def forward(self, hidden: Tensor, targets: Tensor, **more: Any) -> Tensor:
        options = {"bias": self.bias, "mode": self.mode, "chunk_tokens": 4, "logit_scale": 0.5, "ignore_index": 7}
        return linear_cross_entropy(hidden, self.table.weight, targets, **options, **more)


@pytest.mark.parametrize("mode", ["recompute", "in_forward"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("frozen", ["", "hidden", "weight", "bias"])
@pytest.mark.sampled(16)
def test_the_function_of_a_weight(mode: Any, wrapped: bool, frozen: str) -> None:
    """With a ``main_grad`` the weight is the provider's, which is a break."""
    found = []
    for how in (contextlib.nullcontext, traced):
        torch.manual_seed(0)
        model = ByFunction(mode)
        model.table.weight.requires_grad_(frozen != "weight")
        model.bias.requires_grad_(frozen != "bias")
        ddp = wrap(model) if wrapped else None
        hidden, targets = inputs(0).detach().requires_grad_(frozen != "hidden"), tokens(0)[:, :5].clone()
        targets[0] = 7
        with how() as broken:
            loss = model(hidden, targets, num_tokens=9)
        assert len(broken or ()) == (how is traced and wrapped and frozen != "weight")
        loss.backward()
        if ddp is not None:
            ddp.finish_grad_sync()
            ddp.expose_grads()
        found.append([loss.detach(), hidden.grad, *(param.grad for param in model.parameters())])
    for eager, inside in zip(*found, strict=True):
        assert (eager is None) == (inside is None)
        if eager is not None:
            assert eager.any()
            torch.testing.assert_close(inside, eager)


@pytest.mark.parametrize("options", [{}, {"return_bias": True, "return_layernorm_output": True}], ids=str)
def test_an_mlp_that_computes_again(options: dict[str, Any]) -> None:
    found = []
    for kept in (False, True):
        torch.manual_seed(0)
        mlp: Any = LayerNormMLP(K, N, checkpoint=not kept, **options, **FUSED)
        ddp, x = wrap(mlp), inputs(0)
        with contextlib.nullcontext() if kept else traced():
            results = mlp(x)
            (results[0] if options else results).square().sum().backward()
        ddp.finish_grad_sync()
        found.append([*(results if options else [results]), x.grad, *(param.main_grad for param in mlp.parameters())])
    for again, once in zip(*found, strict=True):
        torch.testing.assert_close(again, once)
