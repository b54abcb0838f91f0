"""``LayerNormLinear`` against plain PyTorch and fp64: every norm, with and without bias, in every dtype and mode."""

import copy
import itertools
from typing import Any

import pytest
import torch
from foreign import LazyForeignProvider
from loops import wrap
from modules import FEATURES, error, exact, make
from torch import Tensor, nn

from maingrad.te_integration import LayerNormLinear, LayerNormMLP

NORMS = [
    {"normalization": normalization, "zero_centered_gamma": zero_centered}
    for normalization, zero_centered in itertools.product(["LayerNorm", "RMSNorm"], [False, True])
]
ROUNDING = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6}


def batch(dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(2, 5, FEATURES, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().sum()


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_output_and_every_gradient_are_fp64s(norm: dict[str, Any], bias: bool, fuse: bool, dtype: torch.dtype) -> None:
    layer = make("LayerNormLinear", fuse=fuse, bias=bias, params_dtype=dtype, **norm)
    ddp = wrap(layer)
    batches = [batch(dtype, seed) for seed in range(3)]
    outputs, input_grads, grads = exact(layer, batches, loss_of)
    for x, expected, expected_grad in zip(batches, outputs, input_grads, strict=True):
        x.requires_grad_()
        output = ddp(x)
        assert output.dtype is dtype
        assert error(output, expected) <= ROUNDING[dtype]
        loss_of(output).backward()
        assert error(x.grad, expected_grad) <= ROUNDING[dtype]
    ddp.finish_grad_sync()
    assert set(grads) == {record.name for record in ddp.records}
    for record in ddp.records:
        assert error(record.view, grads[record.name]) <= ROUNDING[dtype], record.name
        assert record.num_fused_writes == (3 if fuse and record.name == "weight" else 0)


@pytest.mark.parametrize("norm", NORMS, ids=str)
@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_eps_is_what_the_program_says(norm: dict[str, Any], kind: Any, dtype: torch.dtype) -> None:
    x = batch(dtype)
    exact_norm = x.double()
    if norm["normalization"] == "LayerNorm":
        exact_norm = exact_norm - exact_norm.mean(-1, keepdim=True)
    exact_norm = exact_norm / (exact_norm.square().mean(-1, keepdim=True) + 0.5).sqrt()
    module = kind(FEATURES, 4, 0.5, params_dtype=dtype, **norm)
    assert error(module.normalize(x), exact_norm) <= ROUNDING[dtype]


class Plain(nn.Module):
    """The same computation with PyTorch's modules."""

    def __init__(self, layer: LayerNormLinear) -> None:
        super().__init__()
        kind = nn.LayerNorm if layer.normalization == "LayerNorm" else nn.RMSNorm
        self.norm, self.linear = kind(FEATURES, eps=layer.eps), nn.Linear(FEATURES, FEATURES)
        with torch.no_grad():
            self.norm.weight.copy_(layer.layer_norm_weight)
            if layer.layer_norm_bias is not None:
                self.norm.bias.copy_(layer.layer_norm_bias)
            self.linear.weight.copy_(layer.weight)
            self.linear.bias.copy_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(
    ("autocast", "input_dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
)
def test_output_is_bitwise_the_plain_modules(normalization: str, autocast: bool, input_dtype: torch.dtype) -> None:
    """Under autocast too, where a norm may get fp32 or bf16."""
    layer = make("LayerNormLinear", normalization=normalization)
    ddp = wrap(layer)
    plain = Plain(layer)
    x = batch(input_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = ddp(x), plain(x)
    assert ours.dtype is theirs.dtype
    if input_dtype is torch.float32:
        assert torch.equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs)  # nn.RMSNorm takes another kernel for a mix of dtypes
    ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    assert layer.weight.main_grad.dtype is torch.float32
    torch.testing.assert_close(layer.weight.main_grad, plain.linear.weight.grad, rtol=2.0**-7, atol=2.0**-7)
    torch.testing.assert_close(layer.layer_norm_weight.main_grad, plain.norm.weight.grad, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_an_input_in_fp32_is_normalised_in_fp32_by_a_gamma_in_bf16(zero_centered: bool) -> None:
    """As autocast brings it, and the other way round."""
    x = batch()
    exact_norm = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    for dtype, input_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        layer = LayerNormLinear(
            FEATURES, 4, normalization="RMSNorm", zero_centered_gamma=zero_centered, params_dtype=dtype
        )
        found = layer.normalize(x.to(input_dtype))
        assert found.dtype is input_dtype and error(found, exact_norm) <= ROUNDING[input_dtype]


def test_a_small_zero_centred_gamma_survives_bf16() -> None:
    """1 + 2^-9 is 1 in bf16: two layers that differ by such a gamma must not be the same."""
    x = batch(torch.bfloat16) * 8
    for normalization in ("LayerNorm", "RMSNorm"):
        layer = LayerNormLinear(
            FEATURES, FEATURES, normalization=normalization, zero_centered_gamma=True, params_dtype=torch.bfloat16
        )
        assert not layer.layer_norm_weight.any()
        before = layer.normalize(x).double()
        with torch.no_grad():
            layer.layer_norm_weight.fill_(2.0**-9)
        after = layer.normalize(x).double()
        ratio = (after.sum() / before.sum()).item()
        assert after.dtype == before.dtype and ratio != 1.0
        exact_norm = x.double()
        if normalization == "LayerNorm":
            exact_norm = exact_norm - exact_norm.mean(-1, keepdim=True)
        exact_norm = exact_norm / (exact_norm.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (1 + 2.0**-9)
        assert error(after, exact_norm) <= 2.0**-8


@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("return_norm", [False, True])
def test_what_is_returned_beside_the_output(return_bias: bool, return_norm: bool) -> None:
    """In Transformer Engine's order: output, bias, normalised input."""
    layer = make("LayerNormLinear", return_bias=return_bias, return_layernorm_output=return_norm)
    ddp = wrap(layer)
    plain = Plain(layer)
    x = batch()
    returned = ddp(x)
    if not (return_bias or return_norm):
        assert isinstance(returned, Tensor)
        return
    assert len(returned) == 1 + return_bias + return_norm
    output = returned[0] + layer.bias if return_bias else returned[0]
    torch.testing.assert_close(output, plain(x))
    if return_bias:
        assert returned[1] is layer.bias
    if return_norm:
        assert torch.equal(returned[-1], plain.norm(x))
        (returned[-1].sum() + output.sum()).backward()  # a residual taken after the norm
        expected = torch.autograd.grad(plain.norm(x).sum() + plain(x).sum(), plain.norm.weight)[0]
        torch.testing.assert_close(layer.layer_norm_weight.main_grad, expected)


def test_the_place_of_a_bias_that_is_not_there_stays() -> None:
    for return_norm in (False, True):
        layer = make("LayerNormLinear", bias=False, return_bias=True, return_layernorm_output=return_norm)
        output, bias, *normalized = layer(batch())
        assert bias is None and len(normalized) == return_norm
        assert torch.equal(output, layer.normalize(batch()) @ layer.weight.t())


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_state_dict_has_transformer_engines_names(normalization: str) -> None:
    layer = make("LayerNormLinear", normalization=normalization)
    names = ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]
    if normalization == "RMSNorm":
        names.remove("layer_norm_bias")
    assert list(layer.state_dict()) == names
    other = make("LayerNormLinear", normalization=normalization, seed=7)
    assert not torch.equal(other(batch()), layer(batch()))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(batch()), layer(batch()))


def test_a_split_weight_is_the_whole_one() -> None:
    split = {"query_": 1, "key_": 3, "value_": 4}
    whole, parts = make("LayerNormLinear"), make("LayerNormLinear", parameters_split=split)
    assert [name for name, _ in parts.named_parameters()][:4] == [
        "layer_norm_weight",
        "layer_norm_bias",
        "query_weight",
        "key_weight",
    ]
    for ddp in (wrapped := [wrap(whole), wrap(parts)]):
        loss_of(ddp(batch())).backward()
    rows = torch.cat([parts.query_weight.main_grad, parts.key_weight.main_grad, parts.value_weight.main_grad])
    torch.testing.assert_close(rows, whole.weight.main_grad)
    assert [sum(record.num_fused_writes for record in ddp.records) for ddp in wrapped] == [1, 3]
    names = "query_bias", "value_weight", "layer_norm_weight"
    with torch.no_grad():
        for name in names:
            parts.get_parameter(name).fill_(7)
    parts.reset_parameters()
    assert not any(parts.get_parameter(name).eq(7).any() for name in names)
    assert parts.layer_norm_weight.eq(1).all()


@pytest.mark.parametrize("fresh", ["query", "value"])
def test_15_each_slice_obeys_its_own_foreign_overwrite_bit(fresh: str) -> None:
    """A lazy provider asks one slice to overwrite (its memory is NaN) and the others to add."""
    layer = make("LayerNormLinear", parameters_split={"query_": 2, "key_": 3, "value_": 3})
    provider = LazyForeignProvider(layer)
    loss_of(layer(batch())).backward()
    first = {name: main_grad.clone() for name, main_grad in provider.allocated.items()}
    provider.start_microbatch(layer)
    del provider.allocated[f"{fresh}_weight"]
    loss_of(layer(batch())).backward()
    for name in layer.weight_names:
        factor = 1 if name.startswith(fresh) else 2
        torch.testing.assert_close(provider.allocated[name], first[name] * factor)


@pytest.mark.parametrize("delay", [False, True])
def test_copies_and_materialised_modules_work(delay: bool) -> None:
    made = LayerNormLinear(FEATURES, FEATURES, device="meta", fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    assert {parameter.device.type for parameter in made.parameters()} == {"meta"}
    made.to_empty(device="cpu")
    made.reset_parameters()
    assert made.layer_norm_weight.eq(1).all() and made.layer_norm_bias.eq(0).all()
    twin = copy.deepcopy(made)
    wrapped = [wrap(made), wrap(twin)]
    for layer, ddp in zip((made, twin), wrapped, strict=True):
        loss_of(ddp(batch())).backward()
        assert layer.need_backward_dw() is delay
        layer.backward_dw()
        ddp.finish_grad_sync()
    assert torch.equal(made.weight.main_grad, twin.weight.main_grad)
    assert made.weight.main_grad.data_ptr() != twin.weight.main_grad.data_ptr()


def test_initialisation() -> None:
    torch.manual_seed(0)
    ours = LayerNormLinear(FEATURES, 6)
    torch.manual_seed(0)
    theirs = nn.Linear(FEATURES, 6)
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    given = LayerNormLinear(FEATURES, 6, init_method=lambda weight: nn.init.constant_(weight, 0.5))
    assert given.weight.eq(0.5).all() and given.bias.eq(0).all()


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_compiled_whole(fuse: bool) -> None:
    torch.compiler.reset()
    layer = make("LayerNormLinear", fuse=fuse)
    ddp = wrap(layer)
    explained = torch._dynamo.explain(lambda x: layer(x.exp()).tanh())(batch())
    assert explained.graph_count == 1
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager")
    loss_of(compiled(batch())).backward()
    ddp.finish_grad_sync()
    once = {record.name: record.view.clone() for record in ddp.records}
    ddp.zero_grad_buffer()
    loss_of(layer(batch())).backward()
    for record in ddp.records:
        torch.testing.assert_close(once[record.name], record.view)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("arguments", "error_type", "message"),
    [
        ({"normalization": "BatchNorm"}, ValueError, "unknown normalization 'BatchNorm'.*LayerNorm, RMSNorm"),
        ({"sequence_parallel": True}, ValueError, "sequence_parallel say how a layer is cut"),
        ({"return_layernorm_output_gathered": True}, ValueError, "return_layernorm_output_gathered=True"),
        ({"parameters_split": {"q": 1}}, ValueError, "do not add up"),
        ({"dtype": torch.float16, "params_dtype": torch.float32}, ValueError, "LayerNormLinear got dtype=.*one argum"),
        ({"activation": "gelu"}, TypeError, "LayerNormLinear has no argument 'activation'"),
    ],
)
def test_arguments_that_cannot_take_effect_are_refused(
    arguments: dict[str, Any], error_type: type[Exception], message: str
) -> None:
    with pytest.raises(error_type, match=message):
        LayerNormLinear(FEATURES, FEATURES, **arguments)
    LayerNormLinear(FEATURES, FEATURES, 1e-6, sequence_parallel=False, tp_size=1)


@pytest.mark.parametrize("original", [False, True])
def test_under_autocast_the_normalised_input_is_kept_in_the_dtype_that_the_program_says(original: bool) -> None:
    kept: list[Tensor] = []
    layer = LayerNormLinear(FEATURES, 4, fuse_wgrad_accumulation=True, save_original_input=original)
    ddp, x = wrap(layer), batch()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
        torch.autocast("cpu", torch.bfloat16),
    ):
        y = ddp(x)
    y.float().sum().backward()
    assert (torch.bfloat16 in {t.dtype for t in kept if t.shape == x.shape}) is not original


def test_errors_name_the_layer() -> None:
    layer = LayerNormLinear(FEATURES, 4, fuse_wgrad_accumulation=True)
    with pytest.raises(
        RuntimeError, match=r"LayerNormLinear\(in_features=8, out_features=4, normalization=LayerNorm\)"
    ):
        layer(batch()).sum().backward()
    named = LayerNormLinear(FEATURES, 4, fuse_wgrad_accumulation=True, name="decoder.3.qkv")
    with pytest.raises(
        RuntimeError, match=r"decoder.3.qkv, weight: fuse_wgrad_accumulation=True needs weight.main_grad"
    ):
        named(batch()).sum().backward()
    with pytest.raises(RuntimeError, match=r"8"):
        layer(torch.randn(3, 7))
