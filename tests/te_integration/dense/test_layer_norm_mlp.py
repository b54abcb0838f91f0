"""``LayerNormMLP`` against fp64: every activation, and two weights that are independent of each other."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign import LazyForeignProvider
from loops import wrap
from modules import FEATURES, HIDDEN, PLAIN_ACTIVATIONS, clamped_swiglu, error, exact, make, plain_forward
from torch import Tensor, nn

from maingrad.te_integration import LayerNormMLP, Linear, WgradQueue, convert_linears, delayed_wgrad
from maingrad.te_integration.dense import activations
from maingrad.te_integration.dense.activations import ACTIVATIONS, activation_named

ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-5}


def batch(dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(2, 5, FEATURES, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().sum()


def grads_of(mlp: LayerNormMLP, batches: list[Tensor]) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Outputs, input gradients and every parameter's gradient, through our wrapper."""
    ddp = wrap(mlp)
    inputs = [x.clone().requires_grad_() for x in batches]
    outputs = []
    for x in inputs:
        outputs.append(ddp(x))
        loss_of(outputs[-1]).backward()
        mlp.backward_dw()
    ddp.finish_grad_sync()
    return outputs, [x.grad for x in inputs], {record.name: record.view.clone() for record in ddp.records}


def assert_fp64s(mlp: LayerNormMLP, dtype: torch.dtype = torch.float32) -> None:
    batches = [batch(dtype, seed) for seed in (2, 3)]
    expected = exact(mlp, batches, loss_of)
    actual = grads_of(mlp, batches)
    for ours, theirs in zip(actual[0] + actual[1], expected[0] + expected[1], strict=True):
        assert ours.dtype is dtype
        assert error(ours, theirs) <= ROUNDING[dtype]
    assert actual[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        assert error(actual[2][name], gradient) <= ROUNDING[dtype], name


# ---- Numbers. ----


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_every_activation_is_fp64s(activation: str, fuse: bool, dtype: torch.dtype) -> None:
    mlp = make("LayerNormMLP", fuse=fuse, activation=activation, params_dtype=dtype)
    if "re" in activation and dtype is torch.bfloat16:
        with torch.no_grad():
            mlp.fc1_bias[::2] += 4  # away from relu's kink, which rounding would cross
            mlp.fc1_bias[1::2] -= 4
    assert_fp64s(mlp, dtype)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered_gamma", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.sampled(4)
def test_every_norm_is_fp64s(
    delay: bool, checkpoint: bool, normalization: str, zero_centered_gamma: bool, bias: bool
) -> None:
    norm = {"normalization": normalization, "zero_centered_gamma": zero_centered_gamma}
    assert_fp64s(make("LayerNormMLP", delay=delay, checkpoint=checkpoint, activation="swiglu", bias=bias, **norm))


def test_activations_are_transformer_engines() -> None:
    assert set(ACTIVATIONS) == set(PLAIN_ACTIVATIONS)
    x = torch.randn(5, 6, dtype=torch.float64) * 10
    for name, (function, gated) in ACTIVATIONS.items():
        torch.testing.assert_close(function(x), PLAIN_ACTIVATIONS[name](x))
        assert function(x).shape[-1] == (3 if gated else 6)
    for given in ({"limit": 1.0, "alpha": 0.5}, {"limit": 1.0}, {"alpha": 0.5}):
        expected = clamped_swiglu(x, **given)
        torch.testing.assert_close(activation_named("clamped_swiglu", given).function(x), expected)
        mlp = LayerNormMLP(FEATURES, HIDDEN, activation="clamped_swiglu", activation_params=given)
        torch.testing.assert_close(mlp.activate(x), expected)


GATED = [name for name, (_, gated) in ACTIVATIONS.items() if gated]


@pytest.mark.parametrize("name", GATED)
def test_a_gated_activation_is_the_same_by_its_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of GPUs: values, gradients, gradients of gradients, other parameters. The reference is the kernel."""
    params = {"limit": 1.0, "alpha": 0.5} if name == "clamped_swiglu" else {}
    function = activation_named(name, params).function
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def results() -> list[Tensor]:
        y = function(x)
        (dx,) = torch.autograd.grad((y - 1).square().sum(), x, create_graph=True)
        return [y, dx, *torch.autograd.grad(dx.square().sum(), x)]

    by_torch = results()
    monkeypatch.setattr(activations, "_has_kernel", lambda _: True)
    by_kernel = results()
    assert type(by_kernel[0].grad_fn).__name__ != type(by_torch[0].grad_fn).__name__
    for ours, theirs in zip(by_kernel, by_torch, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gated_activation_is_one_kernel_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """Each direction launches once, and is at least as near to fp64 as torch's operations are."""
    function = activation_named(name).function
    x = torch.randn(64, 96, device="cuda", dtype=dtype, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    dy = torch.randn(64, 48, device="cuda", dtype=dtype)
    exact_y = function(wide)
    (exact_dx,) = torch.autograd.grad(exact_y, wide, dy.double())
    torch.autograd.grad(function(x), x, dy)  # compiles
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        y = function(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("scaled_glu" in each for each in kernels) == 2, kernels
    assert len([each for each in kernels if "emcpy" not in each and "emset" not in each]) == 2, kernels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(activations, "_has_kernel", lambda _: False)
        plain = function(x)
        (plain_dx,) = torch.autograd.grad(plain, x, dy)
    assert error(y, exact_y) <= error(plain, exact_y)
    assert error(dx, exact_dx) <= error(plain_dx, exact_dx)


@pytest.mark.parametrize(
    ("arguments", "error_type", "message"),
    [
        ({"activation": "swigelu"}, ValueError, "unknown activation 'swigelu': it is one of .*, swiglu"),
        ({"activation": "GELU"}, ValueError, "unknown activation 'GELU': it is one of gelu, geglu"),
        ({"activation": None}, ValueError, "unknown activation 'None'"),
        ({"activation_params": {"limit": 1.0}}, ValueError, r"activation_params.*do not fit 'gelu'"),
        ({"activation": "clamped_swiglu", "activation_params": {"beta": 1.0}}, ValueError, "limit and alpha"),
        ({"activation": "clamped_swiglu", "activation_params": {"glu_linear_offset": 0.0}}, ValueError, "limit and"),
        ({"normalization": "L2"}, ValueError, "unknown normalization 'L2'"),
        ({"sequence_parallel": True}, ValueError, "sequence_parallel say how a layer is cut"),
        ({"ub_overlap_rs": True}, ValueError, "LayerNormMLP does not support ub_overlap_rs=True"),
        ({"parameters_split": ("a", "b")}, TypeError, "LayerNormMLP has no argument 'parameters_split'"),
    ],
)
def test_arguments_that_cannot_take_effect_are_refused(
    arguments: dict[str, Any], error_type: type[Exception], message: str
) -> None:
    with pytest.raises(error_type, match=message):
        LayerNormMLP(FEATURES, HIDDEN, **arguments)
    LayerNormMLP(FEATURES, HIDDEN, 1e-6, seq_length=None, set_parallel_mode=True, tp_size=1)


# ---- Names, copies, what is returned. ----


@pytest.mark.parametrize(("activation", "rows"), [("gelu", HIDDEN), ("geglu", 2 * HIDDEN)])
def test_state_dict_has_transformer_engines_names(activation: str, rows: int) -> None:
    mlp = make("LayerNormMLP", activation=activation)
    assert {name: tuple(value.shape) for name, value in mlp.state_dict().items()} == {
        "layer_norm_weight": (FEATURES,),
        "layer_norm_bias": (FEATURES,),
        "fc1_weight": (rows, FEATURES),
        "fc1_bias": (rows,),
        "fc2_weight": (FEATURES, HIDDEN),
        "fc2_bias": (FEATURES,),
    }
    other = make("LayerNormMLP", activation=activation, seed=5)
    other.load_state_dict(mlp.state_dict())
    assert torch.equal(mlp(batch()), other(batch()))
    bare = make("LayerNormMLP", bias=False, normalization="RMSNorm")
    assert list(bare.state_dict()) == ["layer_norm_weight", "fc1_weight", "fc2_weight"]


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("return_norm", [False, True])
def test_what_is_returned_beside_the_output(return_bias: bool, return_norm: bool, checkpoint: bool) -> None:
    mlp = make("LayerNormMLP", return_bias=return_bias, return_layernorm_output=return_norm, checkpoint=checkpoint)
    ddp = wrap(mlp)
    params = {name: p.detach().clone().requires_grad_() for name, p in mlp.named_parameters()}
    returned = ddp(batch())
    expected = plain_forward(mlp, params, batch())
    if not (return_bias or return_norm):
        torch.testing.assert_close(returned, expected)
        return
    assert len(returned) == 1 + return_bias + return_norm
    torch.testing.assert_close(returned[0] + (mlp.fc2_bias if return_bias else 0), expected)
    if return_bias:
        assert returned[1] is mlp.fc2_bias
    loss = returned[0].sum()
    if return_norm:
        torch.testing.assert_close(returned[-1], mlp.normalize(batch()))
        loss = loss + returned[-1].square().sum()
    loss.backward()
    assert mlp.fc2_bias.main_grad.any().item() is not return_bias, "the caller adds it, or does not"
    assert mlp.layer_norm_weight.main_grad.any()


def test_parameters_are_made_where_and_as_the_program_says() -> None:
    module = LayerNormMLP(FEATURES, HIDDEN, device="meta", params_dtype=torch.float64)
    assert len(list(module.parameters())) == 6
    assert all(param.is_meta and param.dtype is torch.float64 for param in module.parameters())


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_zero_centred_norm_in_fp64_is_exact(normalization: str) -> None:
    made = LayerNormMLP(FEATURES, HIDDEN, dtype=torch.float64, normalization=normalization, zero_centered_gamma=True)
    plain = LayerNormMLP(FEATURES, HIDDEN, dtype=torch.float64, normalization=normalization)
    with torch.no_grad():
        made.layer_norm_weight.copy_(torch.linspace(-1, 1, FEATURES, dtype=torch.float64) / 3)
        plain.layer_norm_weight.copy_(made.layer_norm_weight + 1)
    x = torch.linspace(-1, 1, 3 * FEATURES, dtype=torch.float64).view(3, FEATURES).sin()
    torch.testing.assert_close(made.normalize(x), plain.normalize(x), rtol=1e-14, atol=1e-14)


def test_initialisation() -> None:
    def constant(value: float) -> Callable[[Tensor], Tensor]:
        return lambda weight: nn.init.constant_(weight, value)

    both = LayerNormMLP(FEATURES, HIDDEN, init_method=constant(1), output_layer_init_method=constant(2))
    assert both.fc1_weight.eq(1).all() and both.fc2_weight.eq(2).all()
    assert both.fc1_bias.eq(0).all() and both.fc2_bias.eq(0).all()
    assert LayerNormMLP(FEATURES, HIDDEN, init_method=constant(3)).fc2_weight.eq(3).all()
    torch.manual_seed(0)
    ours = LayerNormMLP(FEATURES, HIDDEN)
    torch.manual_seed(0)
    first, second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, FEATURES)
    assert torch.equal(ours.fc1_weight, first.weight) and torch.equal(ours.fc2_bias, second.bias)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_copies_and_materialised_modules_work(delay: bool, checkpoint: bool) -> None:
    options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": delay, "checkpoint": checkpoint}
    made = LayerNormMLP(FEATURES, HIDDEN, device="meta", activation="swiglu", **options)
    assert {parameter.device.type for parameter in made.parameters()} == {"meta"}
    made.to_empty(device="cpu")
    made.reset_parameters()
    twin = copy.deepcopy(made)
    first, second = grads_of(made, [batch()]), grads_of(twin, [batch()])
    for name, gradient in first[2].items():
        assert torch.equal(gradient, second[2][name]), name
        assert gradient.any()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_under_autocast_it_is_the_plain_modules(checkpoint: bool) -> None:
    mlp = make("LayerNormMLP", activation="relu", checkpoint=checkpoint)
    plain = nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES))
    plain.load_state_dict(dict(zip(plain.state_dict(), mlp.state_dict().values(), strict=True)))
    ddp = wrap(mlp)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = ddp(batch()), plain(batch())
    assert ours.dtype is torch.bfloat16 and torch.equal(ours, theirs)
    loss_of(ours).backward()
    loss_of(theirs).backward()
    for record, gradient in zip(sorted(ddp.records, key=lambda r: r.name), _sorted_grads(plain, mlp), strict=True):
        assert record.view.dtype is torch.float32
        torch.testing.assert_close(record.view, gradient, rtol=2.0**-6, atol=2.0**-4)


def _sorted_grads(plain: nn.Module, mlp: LayerNormMLP) -> list[Tensor]:
    by_name = dict(zip((name for name, _ in mlp.named_parameters()), plain.parameters(), strict=True))
    return [by_name[name].grad for name in sorted(by_name)]


# ---- Recompute. ----


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.sampled(3)
def test_recompute_is_bitwise_and_keeps_the_input_alone(fuse: bool, delay: bool, activation: str) -> None:
    def run(checkpoint: bool) -> tuple[Any, int, int]:
        mlp = make("LayerNormMLP", fuse=fuse, delay=delay, activation=activation, checkpoint=checkpoint)
        ddp = wrap(mlp)
        x, kept = batch().requires_grad_(), {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = ddp(x)
        own = {parameter.data_ptr() for parameter in mlp.parameters()}
        nbytes = sum(size for pointer, size in kept.items() if pointer not in own)
        with torch.profiler.profile() as profile:
            loss_of(output).backward()
        gemms = sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm"))
        while mlp.need_backward_dw():
            mlp.backward_dw()
        return [output, x.grad, *(record.view.clone() for record in ddp.records)], nbytes, gemms

    (plain, plain_nbytes, plain_gemms), (recomputed, nbytes, gemms) = run(False), run(True)
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one, other)
    assert nbytes <= batch().nbytes < plain_nbytes
    assert gemms - plain_gemms == (1 if fuse or delay else 2), "the second product is not needed"


def test_recompute_in_a_delayed_wgrad_block_uses_its_queue() -> None:
    for fuse in (True, False):
        mlp = make("LayerNormMLP", fuse=fuse, checkpoint=True)
        ddp, queue = wrap(mlp), WgradQueue()
        with delayed_wgrad(queue):
            output = ddp(batch())
        loss_of(output).backward()
        assert len(queue) == 2
        queue.drain()
        ddp.finish_grad_sync()
        expected = exact(mlp, [batch()], loss_of)[2]
        for record in ddp.records:
            assert error(record.view, expected[record.name]) <= ROUNDING[torch.float32], record.name


# ---- Two weights. ----


def written_shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], bool]]:
    """(shape, whether it overwrote) of every fused weight gradient from now on."""
    from maingrad.kernels import wgrad_accumulate
    from maingrad.te_integration.dense import products as dense_products

    seen: list[tuple[tuple[int, ...], bool]] = []

    def note(dy: Tensor, x: Tensor, grad: Tensor, *, overwrite: bool) -> None:
        seen.append((tuple(grad.shape), overwrite))
        wgrad_accumulate(dy, x, grad, overwrite=overwrite)

    monkeypatch.setattr(dense_products, "wgrad_accumulate", note)
    return seen


def test_backward_dw_runs_fc2_then_fc1_of_one_microbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp = make("LayerNormMLP", delay=True)
    ddp = wrap(mlp)
    seen = written_shapes(monkeypatch)
    for seed in range(2):
        with ddp.no_sync():
            loss_of(ddp(batch(seed=seed))).backward()
    assert not seen and len(mlp.wgrad_queue) == 4
    fc1, fc2 = (HIDDEN, FEATURES), (FEATURES, HIDDEN)
    mlp.backward_dw()
    assert seen == [(fc2, True), (fc1, True)]
    mlp.backward_dw()
    assert seen[2:] == [(fc2, False), (fc1, False)]
    mlp.backward_dw()
    assert len(seen) == 4 and not mlp.need_backward_dw()


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("frozen", [("fc1_weight",), ("fc2_weight",), ("fc1_weight", "fc2_weight")])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_07_either_weight_may_be_frozen(delay: bool, frozen: tuple[str, ...], fuse: bool, checkpoint: bool) -> None:
    """The biases still get their gradients, and backward_dw runs the products of the weights that train."""
    mlp = make("LayerNormMLP", fuse=fuse, delay=delay, checkpoint=checkpoint)
    for name in frozen:
        getattr(mlp, name).requires_grad_(False)
    assert_fp64s(mlp)
    for name in frozen:
        assert getattr(mlp, name).grad is None and not hasattr(getattr(mlp, name), "main_grad")


class TiedBefore(nn.Module):
    """The MLP's second weight is also the weight of another layer, which backward reaches before the MLP."""

    def __init__(self, tied: str) -> None:
        super().__init__()
        self.mlp = make("LayerNormMLP")
        rows, columns = getattr(self.mlp, tied).shape
        self.head = Linear(columns, rows, bias=False, fuse_wgrad_accumulation=True)
        self.head.weight = getattr(self.mlp, tied)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return self.head(torch.cat([y, y], dim=-1)[..., : self.head.in_features]).sum() + y.square().sum()


@pytest.mark.parametrize("tied", ["fc1_weight", "fc2_weight"])
def test_15_each_weight_has_its_own_overwrite_bit(tied: str) -> None:
    """Another layer has already written one weight's memory: that gradient is added, the other one overwrites."""
    model = TiedBefore(tied)
    ddp = wrap(model)
    plain = copy.deepcopy(model)
    for module in (plain.mlp, plain.head):
        module.fuse_wgrad_accumulation = False
    plain(batch()).backward()
    for _ in range(2):
        ddp(batch()).backward()
        ddp.finish_grad_sync()
        for name in ("fc1_weight", "fc2_weight"):
            torch.testing.assert_close(getattr(model.mlp, name).main_grad, getattr(plain.mlp, name).grad)
        ddp.zero_grad_buffer()
        for record in ddp.records:
            if record.first_write_overwrites:
                record.view.data.fill_(torch.nan)


@pytest.mark.parametrize("fresh", ["fc1_weight", "fc2_weight"])
def test_15_each_weight_obeys_its_own_foreign_overwrite_bit(fresh: str) -> None:
    """A lazy provider asks one weight to overwrite (its memory is NaN) and the other to add."""
    mlp = make("LayerNormMLP")
    provider = LazyForeignProvider(mlp)
    loss_of(mlp(batch())).backward()
    first = {name: main_grad.clone() for name, main_grad in provider.allocated.items()}
    provider.start_microbatch(mlp)
    del provider.allocated[fresh]
    loss_of(mlp(batch())).backward()
    for name in ("fc1_weight", "fc2_weight"):
        torch.testing.assert_close(provider.allocated[name], first[name] * (1 if name == fresh else 2))


@pytest.mark.parametrize("kind", ["LayerNormMLP", "LayerNormLinear"])
@pytest.mark.parametrize("fuse", [True, False])
def test_convert_linears_fuses_it(kind: str, fuse: bool) -> None:
    module = make(kind, fuse=fuse)
    conversion = convert_linears(nn.Sequential(module))
    assert conversion.converted == (() if fuse else ("0",))
    assert conversion.skipped == ({"0": "already fused"} if fuse else {})
    ddp = wrap(module)
    loss_of(ddp(batch())).backward()
    assert sum(record.num_fused_writes for record in ddp.records) == len(module.weight_names)


def test_convert_linears_skips_a_subclass() -> None:
    class Doubled(LayerNormMLP):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    conversion = convert_linears(nn.Sequential(Doubled(FEATURES, HIDDEN)))
    assert conversion.converted == ()
    assert "Doubled is a subclass of LayerNormMLP" in conversion.skipped["0"]


@pytest.mark.slow
def test_compiled_whole() -> None:
    for fuse, checkpoint in itertools.product([True, False], repeat=2):
        torch.compiler.reset()
        mlp = make("LayerNormMLP", fuse=fuse, checkpoint=checkpoint)
        ddp = wrap(mlp)
        loss_of(ddp(batch())).backward()
        ddp.finish_grad_sync()
        eager = {record.name: record.view.clone() for record in ddp.records}
        ddp.zero_grad_buffer()
        compiled = torch.compile(mlp, backend="aot_eager")
        loss_of(compiled(batch())).backward()
        ddp.finish_grad_sync()
        for record in ddp.records:
            torch.testing.assert_close(record.view, eager[record.name])
        torch.compiler.reset()
        explained = torch._dynamo.explain(lambda x, mlp=mlp: mlp(x.exp()).tanh())(batch())
        assert explained.graph_count == 1
    torch.compiler.reset()


def test_a_weight_that_died_is_an_error_that_names_the_mlp() -> None:
    mlp = make("LayerNormMLP", fuse=False, delay=True, name="layers.2.mlp")
    loss_of(mlp(batch())).backward()
    mlp.fc1_weight = nn.Parameter(mlp.fc1_weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"layers\.2\.mlp, fc1_weight: the weight was freed"):
        mlp.backward_dw()
    assert mlp.fc2_weight.grad is not None, "its own weight is there"
