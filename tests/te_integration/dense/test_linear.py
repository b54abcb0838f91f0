"""Fused accumulation against autograd's and a hook's, over microbatches (``nn.Linear`` in all else)."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.te_integration import (
    Float8CurrentScaling,
    GroupedLinear,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    Recipe,
    autocast,
)
from maingrad.te_integration.dense.compiled_wgrad import handle_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MICROBATCHES = 8


def pair(bias: bool, dtype: torch.dtype, device: str) -> tuple[nn.Sequential, nn.Sequential]:
    """The same model with fused layers, and with layers whose gradients reach main_grad through the hook."""
    torch.manual_seed(0)
    fused = nn.Sequential(
        Linear(24, 40, bias, device, dtype, fuse_wgrad_accumulation=True),
        nn.GELU(),
        Linear(40, 16, bias, device, dtype, fuse_wgrad_accumulation=True),
    )
    plain = copy.deepcopy(fused)
    for module in plain:
        if isinstance(module, Linear):
            module.fuse_wgrad_accumulation = False
    return fused, plain


def accumulate(model: nn.Module, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ddp = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True))
    with ddp.no_sync():
        for x in batches[:-1]:
            ddp(x).square().mean().backward()
    ddp(batches[-1]).square().mean().backward()
    ddp.finish_grad_sync()
    return {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}


def exact_gradients(model: nn.Module, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    exact = copy.deepcopy(model).double()
    for x in batches:
        exact(x.double()).square().mean().backward()
    return {name: parameter.grad for name, parameter in exact.named_parameters()}


@pytest.mark.parametrize("bias", [True, False])
def test_fp32_on_the_cpu_is_bitwise_the_hooks_accumulation(bias: bool) -> None:
    fused, plain = pair(bias, torch.float32, "cpu")
    batches = [torch.randn(3, 5, 24) for _ in range(MICROBATCHES)]
    fused_grads, plain_grads = accumulate(fused, batches), accumulate(plain, batches)
    for name, gradient in plain_grads.items():
        assert torch.equal(fused_grads[name], gradient), name


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
def test_fp32_on_cuda_is_within_rounding_of_fp64(bias: bool) -> None:
    fused, plain = pair(bias, torch.float32, "cuda")
    batches = [torch.randn(3, 5, 24, device="cuda") for _ in range(MICROBATCHES)]
    exact = exact_gradients(plain, batches)
    for name, gradient in accumulate(fused, batches).items():
        error = (gradient.double() - exact[name]).norm() / exact[name].norm()
        # 15 rows and 8 microbatches of fp32 sums behind two layers of fp32 products
        assert error <= torch.finfo(torch.float32).eps * 64, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(5))
def test_bf16_is_at_least_as_close_to_fp64_as_the_hooks_accumulation(device: str, seed: int) -> None:
    """Same bf16 operands for both: what differs is the rounding of each microbatch's product to bf16."""
    torch.manual_seed(seed)
    layer = Linear(48, 32, bias=False, device=device, dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    plain = nn.Linear(48, 32, bias=False, device=device, dtype=torch.bfloat16)
    pieces = [(torch.randn(64, 48), torch.randn(64, 32)) for _ in range(MICROBATCHES)]
    exact = torch.zeros(32, 48, dtype=torch.float64)
    for x, dy in pieces:
        exact += dy.bfloat16().double().t() @ x.bfloat16().double()

    errors = []
    for model in (layer, plain):
        ddp = DistributedDataParallel(model)
        with ddp.no_sync():
            for x, dy in pieces:
                ddp(x.to(device, torch.bfloat16)).backward(dy.to(device, torch.bfloat16))
        ddp.finish_grad_sync()
        assert model.weight.main_grad.dtype is torch.float32
        errors.append(((model.weight.main_grad.cpu().double() - exact).norm() / exact.norm()).item())
    fused_error, hook_error = errors
    assert fused_error <= hook_error
    assert fused_error <= torch.finfo(torch.float32).eps * 64 < hook_error


def test_an_unfused_linear_is_nn_linear() -> None:
    torch.manual_seed(0)
    ours = Linear(6, 4)
    torch.manual_seed(0)
    theirs = nn.Linear(6, 4)
    x = torch.randn(3, 6)
    assert torch.equal(ours(x), theirs(x))
    ours(x).sum().backward()
    theirs(x).sum().backward()
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert isinstance(ours, nn.Linear)
    assert ours.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (0, 6), (2, 0, 6)])
def test_any_number_of_leading_dims(shape: tuple[int, ...]) -> None:
    layer = Linear(6, 4, fuse_wgrad_accumulation=True)
    plain = copy.deepcopy(layer)
    plain.fuse_wgrad_accumulation = False
    ddp = DistributedDataParallel(layer)
    x = torch.randn(shape, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    ddp(x).square().sum().backward()
    ddp.finish_grad_sync()
    plain(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(layer.weight.main_grad, plain.weight.grad)
    torch.testing.assert_close(layer.bias.main_grad, plain.bias.grad)


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["plain", "quantised"])
def test_an_input_that_does_not_fit_is_refused_by_the_layers_name(recipe: Recipe | None) -> None:
    layer = Linear(8, 4, dtype=torch.bfloat16, name="layers.7", fuse_wgrad_accumulation=True)
    with autocast(recipe is not None, recipe=recipe):
        with pytest.raises(ValueError, match=r"layers.7 takes 8 features in the last dim, got \(2, 5\)"):
            layer(torch.ones(2, 5, dtype=torch.bfloat16))
        with pytest.raises(ValueError, match=r"layers.7: the input is torch.float16 and the weight torch.bfloat16"):
            layer(torch.ones(2, 8, dtype=torch.float16))


@pytest.mark.parametrize("save_original_input", [False, True])
def test_under_autocast_the_input_itself_is_saved_where_the_program_says_so(save_original_input: bool) -> None:
    """Gradients are the same: the copy is made again."""
    kept: list[Tensor] = []
    grads = []
    for original in (False, save_original_input):
        torch.manual_seed(0)
        layer = Linear(6, 4, fuse_wgrad_accumulation=True, save_original_input=original)
        model, x = DistributedDataParallel(layer), torch.randn(3, 6, requires_grad=True)
        kept.clear()
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
            torch.autocast("cpu", torch.bfloat16),
        ):
            y = model(x)
        y.float().square().sum().backward()
        grads.append([x.grad, *(param.main_grad.clone() for param in layer.parameters())])
    assert [t.dtype for t in kept if t.shape == x.shape] == [torch.float32 if save_original_input else torch.bfloat16]
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Linear(4, 4, fuse_wgrad_accumulation=True),
        lambda: Linear(4, 4, fuse_wgrad_accumulation=True, parameters_split=("q", "k")),
        lambda: GroupedLinear(2, 4, 4, fuse_wgrad_accumulation=True),
    ],
)
def test_a_weight_may_change_before_a_backward_that_brings_the_input_no_gradient(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    layer, x = make(), torch.randn(3, 4)
    model = DistributedDataParallel(layer)
    loss = model(x, *([[1, 2]] if isinstance(layer, GroupedLinear) else [])).sum()
    with torch.no_grad():
        for param in layer.parameters():
            param.mul_(2)
    loss.backward()
    expected = x.sum(0).expand(4, 4)
    found = [param.main_grad for param in layer.parameters() if param.dim() == 2]
    if isinstance(layer, GroupedLinear):
        torch.testing.assert_close(sum(found), expected)
    else:
        torch.testing.assert_close(torch.cat(found), expected)


def test_the_product_of_a_frozen_slice_is_not_computed() -> None:
    products = []
    for frozen in (False, True):
        layer: Any = Linear(6, 4, fuse_wgrad_accumulation=True, parameters_split=("q", "k"))
        layer.q_weight.requires_grad_(not frozen)
        model = DistributedDataParallel(layer)
        loss = model(torch.ones(3, 6)).sum()
        with torch.profiler.profile() as profile:
            loss.backward()
        products.append(sum(each.count for each in profile.key_averages() if each.key in ("aten::mm", "aten::addmm")))
        assert layer.k_weight.main_grad.eq(3).all()
    assert products == [2, 1]


def test_a_module_that_is_made_on_meta_has_a_name_for_graphs() -> None:
    with torch.device("meta"):
        layer = Linear(4, 4)
    assert handle_of(layer._wgrad_key).module is layer


def test_what_transformer_engine_has_and_this_layer_lacks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Linear does not support ub_overlap_ag=True"):
        Linear(4, 4, ub_overlap_ag=True)
    with pytest.raises(TypeError, match="Linear has no argument 'activation'"):
        Linear(4, 4, activation="gelu")


def test_a_layer_shows_its_sizes_and_where_weight_gradients_go() -> None:
    fused, delayed, neither = (
        f"fuse_wgrad_accumulation={fuse}, delay_wgrad_compute={delay}"
        for fuse, delay in ((True, False), (False, True), (False, False))
    )
    shown: list[tuple[Any, str]] = [
        (Linear(4, 3, delay_wgrad_compute=True), f"in_features=4, out_features=3, {delayed}, bias=True"),
        (Linear(4, 3, bias=False), f"in_features=4, out_features=3, {neither}, bias=False"),
        (
            LayerNormLinear(4, 6, parameters_split=("q", "k"), fuse_wgrad_accumulation=True),
            f"in_features=4, out_features=6, normalization=LayerNorm, {fused}, bias=True",
        ),
        (
            LayerNormMLP(4, 8, normalization="RMSNorm", activation="silu", bias=False, checkpoint=True),
            f"hidden_size=4, ffn_hidden_size=8, normalization=RMSNorm, activation=silu, {neither}, bias=False, "
            f"checkpoint=True",
        ),
        (LayerNormMLP(4, 8), f"activation=gelu, {neither}, bias=True, checkpoint=False"),
    ]
    for layer, text in shown:
        assert text in repr(layer)


def test_a_layer_without_features_begins_with_zeros() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, that there is nothing to initialise
        layer = Linear(0, 4)
        layer.bias.data.fill_(7.0)
        layer.reset_parameters()
    assert layer.bias.eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_autocast_casts_what_it_casts_for_plain_layers(dtype: torch.dtype) -> None:
    """It leaves fp64 as it is."""
    plain = nn.Linear(4, 3, dtype=dtype)
    ours = Linear(4, 3, dtype=dtype, fuse_wgrad_accumulation=True)
    ours.load_state_dict(plain.state_dict())
    model = DistributedDataParallel(ours)
    x = torch.randn(2, 4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), plain(x), rtol=0, atol=0)
