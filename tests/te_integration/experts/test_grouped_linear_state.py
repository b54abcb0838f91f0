"""``GroupedLinear`` as a module: arguments, splits, state dicts, copies, the meta device, containers, compilation."""

import copy
import io
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from loops import wrap
from torch import Tensor, nn

from maingrad.te_integration import (
    Float8CurrentScaling,
    GroupedLinear,
    LayerNormMLP,
    Sequential,
    autocast,
    convert_linears,
)

E, K, N = 3, 4, 5
BOTH = [{}, {"single_grouped_weight": True, "single_grouped_bias": True}]
FORMS = [
    {"single_grouped_weight": weight, "single_grouped_bias": bias} for weight in (False, True) for bias in (False, True)
]


def make(experts: int = E, seed: int = 0, **options: Any) -> GroupedLinear:
    torch.manual_seed(seed)
    return GroupedLinear(experts, K, N, **options)


def experts_of(module: GroupedLinear) -> tuple[Tensor, Tensor | None]:
    """Weights [E, N, K] and biases [E, N], whatever their form."""

    def packed(name: str) -> Tensor | None:
        if getattr(module, name, None) is not None:
            return getattr(module, name).detach()
        parts = [getattr(module, f"{name}{expert}", None) for expert in range(module.num_gemms)]
        return None if parts[0] is None else torch.stack(parts).detach()

    return packed("weight"), packed("bias")


# ---- Names and arguments. ----


def test_parameters_have_transformer_engines_names_and_shapes() -> None:
    assert {name: tuple(p.shape) for name, p in make().named_parameters()} == {
        **{f"weight{expert}": (N, K) for expert in range(E)},
        **{f"bias{expert}": (N,) for expert in range(E)},
    }
    packed = make(**BOTH[1])
    assert {name: tuple(p.shape) for name, p in packed.named_parameters()} == {"weight": (E, N, K), "bias": (E, N)}
    without = make(bias=False)
    assert without.bias0 is None and [*without.state_dict()] == ["weight0", "weight1", "weight2"]
    assert make(params_dtype=torch.bfloat16).weight2.dtype is torch.bfloat16


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("init", [None, lambda weight: nn.init.normal_(weight, std=0.02)])
def test_weights_of_one_seed_are_equal_in_every_form(form: dict[str, bool], init: Any) -> None:
    weights, biases = experts_of(make(init_method=init))
    mine, others = experts_of(make(init_method=init, **form))
    assert torch.equal(mine, weights) and torch.equal(others, biases)
    assert biases.any().item() is (init is None)
    assert not torch.equal(weights[0], weights[1])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, K, N), {}, "num_gemms of 1 or more, got 0"),
        ((-1, K, N), {}, "num_gemms of 1 or more, got -1"),
        ((E, 0, N), {}, "in_features of 1 or more"),
        ((E, K, 0), {}, "out_features of 1 or more"),
        ((E, K, N), {"scale_bias": True, "bias": False}, "scale_bias needs bias=True"),
        ((E, K, N), {"scale_bias": True, "return_bias": True}, "return_bias leaves nothing to scale"),
        ((E, K, N), {"dtype": torch.float32, "params_dtype": torch.bfloat16}, "they are one argument"),
        ((E, K, N), {"tp_size": 2}, "does not support tp_size=2"),
        ((E, K, N), {"parallel_mode": "column"}, "does not support parallel_mode='column'"),
        ((E, K, N), {"accumulate_into_main_grad": True}, "its name is fuse_wgrad_accumulation here"),
    ],
)
def test_arguments_that_cannot_take_effect_are_refused(
    arguments: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedLinear(*arguments, **options)


def test_neutral_arguments_of_transformer_engine_are_accepted_and_unknown_ones_are_not() -> None:
    neutral = {"sequence_parallel": False, "tp_group": None, "tp_size": 1, "get_rng_state_tracker": None}
    module = GroupedLinear(E, K, N, parallel_mode=None, ub_overlap_rs=False, ub_overlap_ag=False, **neutral)
    assert module(torch.randn(3, K), [1, 1, 1], is_first_microbatch=True).shape == (3, N)
    with pytest.raises(TypeError, match="GroupedLinear has no argument 'num_gem'"):
        GroupedLinear(E, K, N, num_gem=3)


def test_it_says_what_it_is() -> None:
    text = repr(make(fuse_wgrad_accumulation=True, single_grouped_weight=True))
    for part in ("num_gemms=3", "in_features=4", "out_features=5", "fuse_wgrad_accumulation=True", "bias=True"):
        assert part in text
    assert "bias=True, scale_bias=False, single_grouped_weight=True, single_grouped_bias=False" in text


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_return_bias_leaves_the_addition_to_the_caller(form: dict[str, bool]) -> None:
    module, x, splits = make(return_bias=True, **form), torch.randn(6, K), [1, 2, 3]
    output, biases = module(x, splits)
    assert [tuple(bias.shape) for bias in biases] == [(N,)] * E
    added = output + torch.repeat_interleave(torch.stack(biases), torch.tensor(splits), dim=0)
    module.return_bias = False
    torch.testing.assert_close(added, module(x, splits), rtol=1e-6, atol=1e-6)
    assert make(return_bias=True, bias=False)(x, splits)[1] is None


# ---- What does not fit. ----


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ([2, 2], "has 3 experts, and m_splits counts for 2"),
        ([1, 1, 1, 1], "has 3 experts, and m_splits counts for 4"),
        ([], "m_splits counts for 0"),
        ([2, 2, 1], "add up to 5 rows, and the input has 6; a tensor of splits may leave rows over"),
        ([2, 2, 3], "add up to 7 rows, and the input has 6"),
        ([8, -2, 0], "must not be negative, got -2 for expert 1"),
        (torch.tensor([2, 2]), "m_splits counts for 2"),
        (torch.tensor([2, 2, 3]), "add up to 7 rows"),
        (torch.tensor([8, -2, 0]), "must not be negative, got -2 for expert 1"),
        (torch.tensor([2.0, 2.0, 2.0]), "of int32 or int64; got .*torch.float32"),
        (torch.tensor([True, True, False]), "of int32 or int64; got .*torch.bool"),
        (torch.tensor([2, 2, 2], dtype=torch.uint8), "of int32 or int64; got .*torch.uint8"),
        (torch.tensor([2, 2, 2], dtype=torch.int16), "of int32 or int64; got .*torch.int16"),
        (torch.tensor([[2, 2, 2]]), r"got \(1, 3\)"),
        (torch.ones(3, dtype=torch.int64, device="meta"), "m_splits is on meta, and the rows on cpu"),
    ],
    ids=str,
)
def test_splits_that_do_not_fit_are_refused(splits: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"layers.7.*{message}"):
        make(name="layers.7")(torch.randn(6, K), splits)


def test_splits_that_are_no_counts_are_refused() -> None:
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        make()(torch.randn(6, K), [2.0, 2.0, 2.0])


def test_inputs_that_do_not_fit_are_refused() -> None:
    module, splits = make(name="layers.7"), [2, 2, 2]
    with pytest.raises(ValueError, match=r"layers.7 takes 4 features in the last dim, got \(6, 5\)"):
        module(torch.randn(6, K + 1), splits)
    with pytest.raises(ValueError, match=r"takes 4 features in the last dim, got \(0, 5\)"):
        module(torch.randn(0, K + 1), [0, 0, 0])
    with pytest.raises(ValueError, match=r"layers.7: the input is torch.bfloat16 and the parameters torch.float32"):
        module(torch.randn(6, K).bfloat16(), splits)
    module.weight1.data = module.weight1.data.half()
    with pytest.raises(ValueError, match=r"the parameters torch.float16 and torch.float32"):
        module(torch.randn(6, K), splits)
    with pytest.raises(ValueError, match=r"layers.7: scale_bias=False, and bias_scales were given"):
        module(torch.randn(6, K), splits, torch.ones(6))
    scaled = make(scale_bias=True, name="layers.7")
    with pytest.raises(ValueError, match="scale_bias=True, and no bias_scales were given"):
        scaled(torch.randn(6, K), splits)
    for wrong in (5, 7):
        with pytest.raises(ValueError, match=rf"bias_scales must be \[6\], one for each row; got \({wrong},\)"):
            scaled(torch.randn(6, K), splits, torch.ones(wrong))


# ---- State dicts. ----


@pytest.mark.parametrize("stored", FORMS, ids=str)
@pytest.mark.parametrize("loaded", FORMS, ids=str)
@pytest.mark.parametrize("prefix", ["", "block.experts."])
@pytest.mark.parametrize("assign", [False, True])
def test_every_form_loads_every_other(
    stored: dict[str, bool], loaded: dict[str, bool], prefix: str, assign: bool
) -> None:
    source, target = make(seed=1, **stored), make(seed=2, **loaded)

    def inside(module: nn.Module) -> nn.Module:
        for name in reversed(prefix.split(".")[:-1]):
            module = nn.ModuleDict({name: module})
        return module

    state = inside(source).state_dict()
    state[f"{prefix}_extra_state"] = torch.empty(0)  # Transformer Engine's, of fp8
    keys = [*state]
    inside(target).load_state_dict(state, strict=True, assign=assign)
    assert [*state] == keys, "the caller's state dict is left as it is"
    for one, other in zip(experts_of(source), experts_of(target), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("stored", BOTH, ids=["discrete", "packed"])
@pytest.mark.parametrize("loaded", BOTH, ids=["discrete", "packed"])
def test_another_number_of_experts_is_an_error_that_says_so(stored: dict[str, bool], loaded: dict[str, bool]) -> None:
    for count, strict in ((2, True), (4, True), (2, False)):
        with pytest.raises(RuntimeError, match=f"the state dict has weight of {count} experts, and the module has 3"):
            make(name="experts", **loaded).load_state_dict(make(count, **stored).state_dict(), strict=strict)


@pytest.mark.parametrize("name", ["weight1", "bias1"])
def test_a_parameter_of_another_dtype_is_refused_by_name_of_the_layer(name: str) -> None:
    module = make(name="experts")
    setattr(module, name, nn.Parameter(getattr(module, name).detach().double()))
    with pytest.raises(ValueError, match=r"experts: the input is torch\.float32 and the parameters torch\.float32 and"):
        module(torch.randn(3, K), [1, 1, 1])


def test_missing_and_unexpected_keys_are_reported_as_ever() -> None:
    with pytest.raises(RuntimeError, match=r'Missing key.*"bias0", "bias1", "bias2"'):
        make().load_state_dict(make(bias=False, single_grouped_weight=True).state_dict())
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"bias"'):
        make(bias=False, single_grouped_weight=True, single_grouped_bias=True).load_state_dict(make().state_dict())
    packed = {"single_grouped_weight": True, "single_grouped_bias": True}
    both = make().state_dict() | make(**packed).state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "weight", "bias"\. $'):
        make().load_state_dict(both)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "weight0", .*"bias2"\. $'):
        make(**packed).load_state_dict(both)
    assert make().load_state_dict({}, strict=False).missing_keys == [*make().state_dict()]


# ---- Copies and moves. ----


@pytest.mark.parametrize("form", BOTH, ids=["discrete", "packed"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_keep_delaying_into_queues_of_their_own(form: dict[str, bool], how: str) -> None:
    module = make(delay_wgrad_compute=True, **form)
    x = torch.randn(6, K)
    module(x, [1, 2, 3]).sum().backward()
    if how == "deepcopy":
        twin = copy.deepcopy(module)
    else:
        module.wgrad_queue.clear()
        if how == "pickle":
            twin = pickle.loads(pickle.dumps(module))
        else:
            torch.save(module, stream := io.BytesIO())
            stream.seek(0)
            twin = torch.load(stream, weights_only=False)
    assert not twin.need_backward_dw() and twin.wgrad_queue is not module.wgrad_queue
    assert all(getattr(getattr(twin, name), "skip_backward_post_hook", False) for name in twin.weight_names)
    twin(x, [1, 2, 3]).sum().backward()
    twin.backward_dw()
    for name in twin.weight_names:
        assert getattr(twin, name).grad is not None
        assert getattr(twin, name) is not getattr(module, name)


@pytest.mark.parametrize("form", BOTH, ids=["discrete", "packed"])
def test_from_the_meta_device(form: dict[str, bool]) -> None:
    module = make(device="meta", delay_wgrad_compute=True, fuse_wgrad_accumulation=True, **form)
    assert all(parameter.is_meta for parameter in module.parameters())
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        parameter.data.fill_(torch.nan)
    torch.manual_seed(0)
    module.reset_parameters()
    weights, biases = experts_of(make())
    assert torch.equal(experts_of(module)[0], weights) and torch.equal(experts_of(module)[1], biases)
    ddp = wrap(module)
    ddp(torch.randn(6, K), [1, 2, 3]).sum().backward()
    module.backward_dw()
    assert {r.name for r in ddp.records if r.num_fused_writes} == set(module.weight_names)


@pytest.mark.parametrize("form", BOTH, ids=["discrete", "packed"])
def test_after_a_change_of_dtype_the_products_are_of_the_new_one(form: dict[str, bool]) -> None:
    module = make(**form)
    module(torch.randn(6, K), [1, 2, 3]).sum().backward()
    module.zero_grad()
    module.to(torch.bfloat16)
    module(torch.randn(6, K).bfloat16(), [1, 2, 3]).sum().backward()
    assert all(parameter.grad.dtype is torch.bfloat16 for parameter in module.parameters())


def test_converting_a_model_fuses_its_experts() -> None:
    class Own(GroupedLinear):
        pass

    model = nn.ModuleDict({"experts": make(), "own": Own(E, K, N), "mlp": LayerNormMLP(K, 8)})
    done = convert_linears(model)
    assert done.converted == ("experts", "mlp") and model["experts"].fuse_wgrad_accumulation
    assert "is a subclass of GroupedLinear" in done.skipped["own"]


# ---- In containers, under transforms. ----


class Split(nn.Module):
    """Operations between two grouped layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


@pytest.mark.parametrize("delay", [False, True])
def test_in_a_sequential_splits_and_scales_go_where_they_are_taken(delay: bool) -> None:
    torch.manual_seed(0)
    first = GroupedLinear(E, K, N, delay_wgrad_compute=delay, scale_bias=True)
    second = GroupedLinear(E, N, K, delay_wgrad_compute=delay, single_grouped_weight=True)
    block = Sequential(first, Split(), second)
    assert (first.num_extra_inputs, second.num_extra_inputs, block.num_extra_inputs) == (2, 1, 3)
    x, splits, scales = torch.randn(6, K), torch.tensor([1, 2, 3]), torch.rand(6)
    output = block(x, splits, scales, splits)
    assert torch.equal(output, second(first(x, splits, scales).tanh(), splits))
    output.sum().backward()
    assert block.need_backward_dw() is delay
    block.backward_dw()
    assert first.weight0.grad is not None and second.weight.grad is not None


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("form", BOTH, ids=["discrete", "packed"])
@pytest.mark.sampled(1)
def test_compiled_around(fuse: bool, form: dict[str, bool]) -> None:
    """Compilation breaks the graph at the module, and the gradients are the same."""
    torch.compiler.reset()
    x, splits = torch.randn(6, K), torch.tensor([1, 2, 3])
    results = []
    for compiled in (False, True):
        module = make(fuse_wgrad_accumulation=fuse, **form)
        kept = wrap(module)

        def run(x: Tensor, splits: Tensor | Sequence[int], module: nn.Module = module) -> Tensor:
            return module(x * 2, splits).tanh().sum()

        (torch.compile(run, backend="aot_eager") if compiled else run)(x, splits).backward()
        results.append([record.view.clone() for record in kept.records])
        assert all(record.num_fused_writes == (fuse and "weight" in record.name) for record in kept.records)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    torch.compiler.reset()


@pytest.mark.parametrize("memory", ["out", "grad_input"])
def test_compiled_around_with_memory_of_the_caller(memory: str) -> None:
    """Compiled code writes there too."""
    torch.compiler.reset()
    module = make()
    x, splits = torch.randn(6, K, requires_grad=True), torch.tensor([1, 2, 3])
    buffer = torch.full((6, N if memory == "out" else K), torch.nan)
    output = torch.compile(module, backend="aot_eager")(x, splits, **{memory: buffer})
    output.sum().backward()
    expected = module(x.detach(), splits) if memory == "out" else x.grad
    assert torch.equal(buffer, expected)
    torch.compiler.reset()


@pytest.mark.parametrize("quantised", [False, True])
def test_a_graph_does_not_keep_the_callers_memory(quantised: bool) -> None:
    """The output's tensor is the caller's: with its last reader it may go."""
    module = GroupedLinear(2, 32, 32, bias=False, dtype=torch.bfloat16)
    out = torch.empty(5, 32, dtype=torch.bfloat16)
    kept = weakref.ref(out)
    with autocast(enabled=quantised, recipe=Float8CurrentScaling()):
        y = module(torch.ones(5, 32, dtype=torch.bfloat16), [2, 3], out=out)
    assert y.data_ptr() == out.data_ptr()
    loss = y.sum()
    del out, y
    assert kept() is None
    loss.backward()
    assert module.weight0.grad is not None and module.weight0.grad.eq(2).all()


def test_memory_of_inference_mode_is_written_in_inference_mode() -> None:
    """It has no version that would count the write."""
    module, x = make(), torch.randn(6, K)
    with torch.inference_mode():
        out = torch.empty(6, N)
        y = module(x, [1, 2, 3], out=out)
    assert y.data_ptr() == out.data_ptr() and torch.equal(y, module(x, [1, 2, 3]))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_graph_keeps_what_a_gradient_needs_alone(frozen: str) -> None:
    """Rows for those of weights, scales for those of biases."""
    module, kept = make(scale_bias=True, single_grouped_weight=True, single_grouped_bias=True), []
    module.get_parameter(frozen).requires_grad_(False)
    x, scales = torch.randn(6, K), torch.rand(6)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = module(x, [1, 2, 3], scales)
    assert {tuple(each.shape) for each in kept} == {(6,) if frozen == "weight" else (6, K)}
    y.sum().backward()
    assert (module.weight.grad is None) == (frozen == "weight") and (module.bias.grad is None) == (frozen == "bias")


@pytest.mark.parametrize("needs", ["the input", "the weights"])
def test_derivatives_of_gradients_are_refused(needs: str) -> None:
    module, x = make(name="experts"), torch.randn(6, K, requires_grad=needs == "the input")
    module.requires_grad_(needs == "the weights")
    wanted = x if needs == "the input" else module.weight0
    with pytest.raises(RuntimeError, match=r"experts: second derivatives \(create_graph=True\)"):
        torch.autograd.grad(module(x, [1, 2, 3]).sum(), wanted, create_graph=True)


def test_without_gradients_nothing_is_kept() -> None:
    module = make(fuse_wgrad_accumulation=True)
    with torch.no_grad():
        assert not module(torch.randn(6, K), [1, 2, 3]).requires_grad
    with torch.inference_mode():
        assert module(torch.randn(6, K), [1, 2, 3]).shape == (6, N)


def test_weights_that_are_computed_get_their_gradients_by_autograd() -> None:
    """``parametrize`` makes an expert's weight a function of another parameter."""

    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    module, plain = make(fuse_wgrad_accumulation=True), make()
    nn.utils.parametrize.register_parametrization(module, "weight1", Double())
    with torch.no_grad():
        plain.weight1.mul_(2)
    ddp = wrap(module)
    x, splits = torch.randn(6, K), [1, 2, 3]
    ddp(x, splits).square().sum().backward()
    plain(x, splits).square().sum().backward()
    ddp.finish_grad_sync()
    torch.testing.assert_close(module.parametrizations.weight1.original.main_grad, 2 * plain.weight1.grad)
    torch.testing.assert_close(module.weight0.main_grad, plain.weight0.grad)


def test_a_hook_on_one_expert_sees_its_gradient() -> None:
    module, plain = make(fuse_wgrad_accumulation=True), make()
    ddp = wrap(module)
    seen: list[Tensor] = []
    module.weight1.register_hook(lambda grad: seen.append(grad.clone()))
    x, splits = torch.randn(6, K), [1, 2, 3]
    ddp(x, splits).square().sum().backward()
    plain(x, splits).square().sum().backward()
    ddp.finish_grad_sync()
    assert len(seen) == 1 and torch.equal(seen[0], plain.weight1.grad)
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.main_grad, theirs.grad)
