"""``convert_linears``: which layers are fused, which are skipped and why; nothing else in a model changes."""

import copy
import io
import os
import pickle
import re
import shutil
from unittest import mock

import pytest
import torch
import torch.ao.nn.qat
import torch.fx
import torch.nn.functional as F
from conversion import assert_close_to_exact, converted_iteration, plain_iteration, weights_of
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import LayerNormMLP, Linear, convert_linears


def square(model: nn.Module, index: int) -> Tensor:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(index))
    return model(x.to(next(model.parameters()).dtype)).square().mean()


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4, bias=False))


# ---- Gradients and lists, model by model. ----


def test_an_mlp_with_dropout() -> None:
    model = mlp()
    done = converted_iteration(model, square)
    assert done.conversion.converted == ("0", "3")
    assert done.conversion.skipped == {}
    assert done.fused_writes == {"0.weight": 2, "3.weight": 2}
    assert done.hook_writes == {"0.bias": 2}
    for name, gradient in plain_iteration(model, square).items():
        assert torch.equal(done.grads[name], gradient), name


@pytest.fixture
def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def test_a_transformer_encoder(encoder: nn.TransformerEncoder) -> None:
    """Its attention matrices never run as modules: skipped, named, and the hook brings them to main_grad."""
    done = converted_iteration(encoder, square)
    layers = ("layers.0", "layers.1")
    assert done.conversion.converted == tuple(f"{layer}.{name}" for layer in layers for name in ("linear1", "linear2"))
    assert done.conversion.skipped == {
        f"{layer}.{name}": reason
        for layer in layers
        for name, reason in {
            "self_attn": "MultiheadAttention: in_proj_weight is read as a matrix by F.multi_head_attention_forward, "
            "not run as a module",
            "self_attn.out_proj": "torch.nn.modules.linear.NonDynamicallyQuantizableLinear is a subclass of Linear "
            "and may use its weight in another way",
        }.items()
    }
    fused = weights_of(done.model, done.conversion.converted)
    assert done.fused_writes == dict.fromkeys(fused, 2)
    assert done.hook_writes == dict.fromkeys(done.grads.keys() - fused, 2)
    assert {f"{layer}.self_attn.{name}" for layer in layers for name in ("in_proj_weight", "out_proj.weight")} <= set(
        done.hook_writes
    )
    for name, gradient in plain_iteration(encoder, square).items():
        assert torch.equal(done.grads[name], gradient), name


def test_attention_with_separate_projections_is_named_by_them() -> None:
    skipped = convert_linears(nn.MultiheadAttention(8, 2, kdim=4, vdim=6)).skipped
    assert skipped[""].startswith("MultiheadAttention: q_proj_weight and k_proj_weight and v_proj_weight is read")


def test_the_encoders_inference_path_reads_converted_weights(encoder: nn.TransformerEncoder) -> None:
    encoder.eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        before = encoder(x)
        convert_linears(encoder)
        with mock.patch.object(
            torch, "_transformer_encoder_layer_fwd", wraps=torch._transformer_encoder_layer_fwd
        ) as fast:
            after = encoder(x)
    assert fast.call_count == 2
    assert torch.equal(before, after)


class TiedHead(nn.Module):
    """An embedding and two heads that share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)
        self.second_head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.second_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(self.embedding(tokens)))
        return torch.cat([self.head(hidden), self.second_head(hidden.sin())], dim=-1)


def tokens_loss(model: nn.Module, index: int) -> Tensor:
    tokens = torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(index))
    return model(tokens).logsumexp(-1).square().mean()


def test_tied_weights_keep_every_contribution() -> None:
    torch.manual_seed(0)
    model = TiedHead()
    done = converted_iteration(model, tokens_loss)
    assert done.conversion.converted == ("embedding", "body", "head", "second_head")
    assert done.model.head.weight is done.model.second_head.weight is done.model.embedding.weight
    assert done.fused_writes == {"embedding.weight": 6, "body.weight": 2}
    assert done.hook_writes == {"body.bias": 2, "head.bias": 2}
    plain = plain_iteration(model, tokens_loss)
    assert_close_to_exact(done.grads, plain, plain_iteration(model, tokens_loss, dtype=torch.float64))


def test_autocast_gives_nn_linears_gradients() -> None:
    """Under bf16 autocast nn.Linear rounds each gradient to bf16 before fp32 sees it; a fused one is not rounded."""

    def loss(model: nn.Module, index: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return square(model, index)

    model = mlp().eval()
    done, plain = converted_iteration(model, loss), plain_iteration(model, loss)
    halves = [plain_iteration(model, lambda each, _, index=index: loss(each, index)) for index in (0, 1)]
    assert done.fused_writes == {"0.weight": 2, "3.weight": 2}
    for name, gradient in plain.items():
        assert done.grads[name].dtype is torch.float32
        # Two roundings, each by at most 2^-8 of that microbatch's gradient; the last bits are fp32's.
        bound = sum(half[name].abs() / 2 for half in halves) * 2**-8 * 1.01 + 1e-9
        assert ((done.grads[name] - gradient).abs() <= bound).all(), name
        assert not torch.equal(done.grads[name], gradient), name


def test_frozen_weights_are_converted_and_stay_frozen() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    done = converted_iteration(model, square)
    assert done.conversion.converted == ("0", "3")
    assert not done.model[0].weight.requires_grad
    assert done.model[0].weight.grad is None
    assert done.fused_writes == {"3.weight": 2}
    for name, gradient in plain_iteration(model, square).items():
        assert torch.equal(done.grads[name], gradient), name


def test_a_layer_may_be_unfrozen_up_to_the_wrap() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    convert_linears(model)
    model[0].weight.requires_grad_(True)
    ddp = DistributedDataParallel(model)
    square(ddp, 0).backward()
    ddp.finish_grad_sync()
    assert {record.name for record in ddp.records if record.num_fused_writes} == {"0.weight", "3.weight"}


# ---- What stays. ----


def test_a_module_stays_the_object_it_was() -> None:
    model = mlp()
    first, last = model[0], model[3]
    first.note = ["set by somebody"]
    first.register_buffer("scale", torch.ones(2))
    first.weight.note = "on the parameter"
    last.weight.requires_grad_(False)
    model.eval()
    first.train()
    before = [dict(module.__dict__) for module in (first, last)]
    keys, params = list(model.state_dict()), list(model.parameters())

    convert_linears(model)

    assert model[0] is first
    assert model[3] is last
    for module, attributes in zip((first, last), before, strict=True):
        assert type(module) is Linear
        assert isinstance(module, nn.Linear)
        after = dict(module.__dict__)
        assert after.pop("fuse_wgrad_accumulation") is True
        del after["_wgrad_handle"], after["_wgrad_key"]  # by which compiled code names the module
        assert after.keys() == attributes.keys()
        assert all(after[name] is attributes[name] for name in after)
    assert list(model.state_dict()) == keys
    assert all(old is new for old, new in zip(params, model.parameters(), strict=True))
    assert first.weight.note == "on the parameter"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_stays(dtype: torch.dtype) -> None:
    model = nn.Linear(8, 4, dtype=dtype)
    assert convert_linears(model).converted == ("",)
    assert model.weight.dtype is dtype
    ddp = DistributedDataParallel(model)
    square(ddp, 0).backward()
    assert [record.num_fused_writes for record in ddp.records if record.name == "weight"] == [1]


def test_hooks_of_every_kind_still_fire() -> None:
    model = mlp()
    fired = []
    layer = model[0]
    layer.register_forward_pre_hook(lambda *_: fired.append("forward pre"))
    layer.register_forward_hook(lambda *_: fired.append("forward"))
    layer.register_full_backward_pre_hook(lambda *_: fired.append("backward pre"))
    layer.register_full_backward_hook(lambda *_: fired.append("backward"))
    layer.register_state_dict_pre_hook(lambda *_: fired.append("state dict pre"))
    layer.register_state_dict_post_hook(lambda *_: fired.append("state dict"))
    layer.register_load_state_dict_pre_hook(lambda *_: fired.append("load pre"))
    layer.register_load_state_dict_post_hook(lambda *_: fired.append("load"))
    convert_linears(model)
    ddp = DistributedDataParallel(model)
    ddp(torch.randn(3, 8, requires_grad=True)).sum().backward()
    assert fired == ["forward pre", "forward", "backward pre", "backward"]
    fired.clear()
    model.load_state_dict(model.state_dict())
    assert fired == ["state dict pre", "state dict", "load pre", "load"]


def test_a_forward_hook_may_change_the_output() -> None:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    done = converted_iteration(model, square)
    for name, gradient in plain_iteration(model, square).items():
        assert torch.equal(done.grads[name], gradient), name


def test_state_dicts_travel_both_ways() -> None:
    plain, converted = mlp(), mlp()
    nn.init.ones_(converted[0].weight)
    convert_linears(converted)
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    converted.load_state_dict(torch.load(file))
    assert torch.equal(converted[0].weight, plain[0].weight)
    nn.init.zeros_(converted[0].weight)
    file = io.BytesIO()
    torch.save(converted.state_dict(), file)
    file.seek(0)
    plain.load_state_dict(torch.load(file))
    assert not plain[0].weight.any()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_converted_model_are_converted(clone) -> None:
    model = mlp()
    convert_linears(model)
    copied = clone(model)
    assert convert_linears(copied).skipped == {"0": "already fused", "3": "already fused"}
    ddp = DistributedDataParallel(copied)
    copied.eval()
    square(ddp, 0).backward()
    ddp.finish_grad_sync()
    plain = mlp().eval()
    square(plain, 0).backward()
    for ours, theirs in zip(copied.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.main_grad, theirs.grad)


def test_a_copy_of_a_wrapped_model_can_be_wrapped_again() -> None:
    model = mlp()
    convert_linears(model)
    copied = copy.deepcopy(DistributedDataParallel(model))
    assert type(copied[0]) is Linear
    ddp = DistributedDataParallel(copied)
    square(ddp, 0).backward()
    assert {record.name for record in ddp.records if record.num_fused_writes} == {"0.weight", "3.weight"}


# ---- What is named, and what is refused. ----


class Doubled(nn.Linear):
    """A subclass that computes something else, as adapters do."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Again(Doubled):
    pass


class Tagged(Tensor):
    """A tensor subclass, as distributed and quantized weights are."""


def lazy() -> nn.Module:
    return nn.LazyLinear(4)


def parametrized() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(8, 8), "weight", nn.Softplus())


def weight_normed() -> nn.Module:
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.utils.weight_norm(nn.Linear(8, 4))


def pruned() -> nn.Module:
    return prune.random_unstructured(nn.Linear(8, 4), "weight", 0.5)


def patched() -> nn.Module:
    layer = nn.Linear(8, 4)
    inner = layer.forward
    layer.forward = lambda x: inner(x) * 2
    return layer


def pruned_behind() -> nn.Module:
    return prune.random_unstructured(LayerNormMLP(8, 4), "fc2_weight", 0.5)


def pruned_behind_fused() -> nn.Module:
    return prune.random_unstructured(LayerNormMLP(8, 4, fuse_wgrad_accumulation=True), "fc2_weight", 0.5)


def in_eight_bits() -> nn.Module:
    layer = nn.Linear(8, 4)
    layer.weight = nn.Parameter(layer.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    return layer


def tensor_subclass() -> nn.Module:
    layer = nn.Linear(8, 4)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Tagged))
    return layer


def quantized() -> nn.Module:
    layer = nn.Linear(8, 4)
    layer.weight = nn.Parameter(torch.ones(4, 8, dtype=torch.int8), requires_grad=False)
    return layer


def quantization_aware() -> nn.Module:
    return torch.ao.nn.qat.Linear(8, 4, qconfig=torch.ao.quantization.default_qat_qconfig)


SKIPPED = {
    lambda: Doubled(8, 4): "test_convert.Doubled is a subclass of Linear",
    lambda: Again(8, 4): "test_convert.Again is a subclass of Linear",
    lazy: "LazyLinear has no weight yet: run one forward, then convert",
    parametrized: "ParametrizedLinear is a subclass of Linear",
    weight_normed: "Linear's weight is computed from other parameters",
    pruned: "Linear's weight is computed from other parameters",
    pruned_behind: "LayerNormMLP's weight is computed from other parameters",
    pruned_behind_fused: "LayerNormMLP's weight is computed from other parameters",
    patched: "Linear's forward was replaced on this instance",
    tensor_subclass: "Linear's weight is a Tagged",
    quantized: "Linear's weight is torch.int8",
    in_eight_bits: "Linear's weight is torch.float8_e4m3fn",
    lambda: nn.Linear(8, 4, dtype=torch.complex64): "Linear's weight is torch.complex64",
    quantization_aware: "torch.ao.nn.qat.modules.linear.Linear is a subclass of Linear",
}


@pytest.mark.parametrize("make", SKIPPED, ids=SKIPPED.values())
def test_what_is_not_a_plain_linear_is_skipped_by_name(make) -> None:
    model = nn.ModuleDict({"other": make(), "plain": nn.Linear(8, 4)})
    cls, attributes = type(model["other"]), dict(model["other"].__dict__)
    conversion = convert_linears(model)
    assert conversion.converted == ("plain",)
    assert list(conversion.skipped) == ["other"]
    assert SKIPPED[make] in conversion.skipped["other"]
    assert type(model["other"]) is cls
    assert model["other"].__dict__ == attributes


@pytest.mark.parametrize(
    "make",
    [lambda: Doubled(8, 8), parametrized, weight_normed, pruned],
    ids=["subclass", "parametrized", "weight_norm", "pruned"],
)
def test_the_hook_serves_what_is_skipped(make) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(make(), nn.Linear(8 if make is not pruned and make is not weight_normed else 4, 4))
    # weight_norm and prune leave a computed weight behind, which cannot be copied.
    model = nn.Sequential(make(), nn.Linear(plain[1].in_features, 4))
    model.load_state_dict(plain.state_dict())
    assert convert_linears(model).converted == ("1",)
    ddp = DistributedDataParallel(model)
    square(ddp, 0).backward()
    ddp.finish_grad_sync()
    square(plain, 0).backward()
    assert {record.name for record in ddp.records if record.num_fused_writes} == {"1.weight"}
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.main_grad, theirs.grad)


def test_a_converted_layer_can_be_parametrized() -> None:
    model, plain = mlp().eval(), mlp().eval()
    convert_linears(model)
    for each in (model, plain):
        parametrize.register_parametrization(each[0], "weight", nn.Softplus(), unsafe=True)
    ddp = DistributedDataParallel(model)
    square(ddp, 0).backward()
    ddp.finish_grad_sync()
    square(plain, 0).backward()
    assert {record.name for record in ddp.records if record.num_fused_writes} == {"3.weight"}
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.main_grad, theirs.grad)


def test_a_weight_read_as_a_matrix_gets_both_gradients() -> None:
    """Conversion cannot know of such reads: the fused use and the plain one must add up."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.never_run = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.layer(x), self.layer.weight.t()) + F.linear(x, self.never_run.weight)

    torch.manual_seed(0)
    model = Reader()
    done = converted_iteration(model, square)
    assert done.conversion.converted == ("layer", "never_run")
    assert done.fused_writes == {"layer.weight": 2}
    assert done.hook_writes == {"layer.weight": 2, "layer.bias": 2, "never_run.weight": 2}
    plain = plain_iteration(model, square)
    assert_close_to_exact(done.grads, plain, plain_iteration(model, square, dtype=torch.float64))


def test_converting_twice_says_so() -> None:
    model = mlp()
    assert convert_linears(model).converted == ("0", "3")
    again = convert_linears(model)
    assert again.converted == ()
    assert again.skipped == {"0": "already fused", "3": "already fused"}


def test_our_own_unfused_linear_is_switched_on() -> None:
    model = nn.Sequential(Linear(8, 8), Linear(8, 4, fuse_wgrad_accumulation=True))
    conversion = convert_linears(model)
    assert conversion.converted == ("0",)
    assert conversion.skipped == {"1": "already fused"}
    assert model[0].fuse_wgrad_accumulation


def test_a_model_that_is_a_linear_and_a_module_in_two_places() -> None:
    layer = nn.Linear(8, 8)
    assert convert_linears(nn.Sequential(layer, nn.ReLU(), layer)).converted == ("0",)
    alone = nn.Linear(8, 8)
    assert convert_linears(alone).converted == ("",)
    assert type(layer) is type(alone) is Linear


def test_on_the_meta_device_before_weights_exist() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4, bias=False))
    assert convert_linears(model).converted == ("0", "3")
    assert model[0].weight.is_meta
    model.to_empty(device="cpu").load_state_dict(mlp().state_dict())
    done = converted_iteration(model, square)
    assert done.fused_writes == {"0.weight": 2, "3.weight": 2}
    for name, gradient in plain_iteration(mlp(), square).items():
        assert torch.equal(done.grads[name], gradient), name


@pytest.mark.parametrize("inside", [False, True], ids=["the wrapper", "the wrapped module"])
def test_a_wrapped_model_is_refused_and_left_alone(inside: bool) -> None:
    ddp = DistributedDataParallel(mlp())
    with pytest.raises(ValueError, match=r"parameter '.*0\.weight' already has a main_grad.*before the wrapper"):
        convert_linears(ddp.module if inside else ddp)
    assert type(ddp.module[0]) is nn.Linear


def test_a_foreign_providers_model_is_refused() -> None:
    model = mlp()
    model[3].weight.__fsdp_param__ = True  # promises an accumulator on demand
    with pytest.raises(ValueError, match=r"'3\.weight' already has a main_grad"):
        convert_linears(model)
    assert type(model[0]) is nn.Linear


def test_after_its_wrapper_is_gone_a_model_converts() -> None:
    model = mlp()
    ddp = DistributedDataParallel(model)
    del ddp
    assert convert_linears(model).converted == ("0", "3")


@pytest.mark.parametrize("model", [None, {"a": nn.Linear(2, 2)}, [nn.Linear(2, 2)]], ids=str)
def test_only_modules_convert(model) -> None:
    with pytest.raises(TypeError, match=f"takes an nn.Module, got {type(model).__name__}"):
        convert_linears(model)


def test_a_converted_model_without_a_provider_says_what_is_missing() -> None:
    model = mlp()
    convert_linears(model)
    with pytest.raises(RuntimeError, match=re.escape("Linear(in_features=16, out_features=4), weight: fuse_wgrad")):
        square(model, 0).backward()


def test_complex_weights_stay_with_autograd() -> None:
    """A fused complex layer that a user builds all the same has nn.Linear's gradients, conjugates included."""
    torch.manual_seed(0)
    layer = Linear(8, 4, dtype=torch.complex64, fuse_wgrad_accumulation=True)
    plain = copy.deepcopy(layer)
    plain.fuse_wgrad_accumulation = False
    x = torch.randn(3, 8, dtype=torch.complex64)
    ddp = DistributedDataParallel(layer)
    ddp(x).abs().sum().backward()
    ddp.finish_grad_sync()
    plain(x).abs().sum().backward()
    assert torch.equal(layer.weight.main_grad, plain.weight.grad)


# ---- torch.compile and torch.fx. ----

NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")),
    reason="inductor needs a C++ compiler (g++ or clang++)",
)


class Waves(nn.Module):
    """Operations before, between and after two layers: three pieces to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x.sin())).cos()).sin()


@pytest.fixture
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)])
@pytest.mark.parametrize("order", ["convert, compile, wrap", "compile, run, convert, wrap", "convert, wrap, compile"])
@pytest.mark.sampled(1)
@pytest.mark.slow
def test_a_compiled_model_has_eagers_gradients(order: str, backend: str) -> None:
    torch.manual_seed(0)
    model = Waves()
    plain = plain_iteration(model, square)
    exact = plain_iteration(model, square, dtype=torch.float64)
    trained = model
    for step in order.split(", "):
        if step == "convert":
            assert len(convert_linears(trained).converted) == 2
        elif step == "compile":
            trained = torch.compile(trained, backend=backend)
        elif step == "run":
            square(trained, 0).backward()
            model.zero_grad()
        else:
            ddp = trained = DistributedDataParallel(trained)
    with ddp.no_sync():
        (square(trained, 0) / 2).backward()
    (square(trained, 1) / 2).backward()
    ddp.finish_grad_sync()
    written = {record.name.removeprefix("_orig_mod."): record.num_fused_writes for record in ddp.records}
    assert written == {"up.weight": 2, "down.weight": 2, "up.bias": 0, "down.bias": 0}
    assert_close_to_exact({name: param.main_grad for name, param in model.named_parameters()}, plain, exact)


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
def test_a_converted_model_is_one_graph() -> None:
    model = Waves()
    convert_linears(model)
    explained = torch._dynamo.explain(model)(torch.randn(3, 8))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


@pytest.mark.in_turn
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("adapt", ["subclass", "parametrized", "hooked"])
@pytest.mark.sampled(1)
def test_what_wraps_a_fused_layer_is_compiled_once(adapt: str) -> None:
    class Doubled(Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    torch.manual_seed(0)
    model = nn.Sequential(Doubled(8, 4, fuse_wgrad_accumulation=True) if adapt == "subclass" else nn.Linear(8, 4))
    convert_linears(model)
    seen: list[Tensor] = []
    if adapt == "parametrized":
        parametrize.register_parametrization(model[0], "weight", nn.Softplus())
    elif adapt == "hooked":
        model[0].weight.register_hook(seen.append)
    plain = copy.deepcopy(model)
    plain[0].fuse_wgrad_accumulation = False
    ddp = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    square(ddp, 0).backward()
    ddp.finish_grad_sync()
    square(plain, 0).backward()
    assert len(seen) == (adapt == "hooked")
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.main_grad, theirs.grad)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("why", ["no_grad", "frozen"])
@pytest.mark.sampled(1)
def test_without_a_weight_gradient_nothing_breaks_the_graph(why: str) -> None:
    model = Waves()
    convert_linears(model)
    model.requires_grad_(why != "frozen")
    with torch.set_grad_enabled(why != "no_grad"):
        explained = torch._dynamo.explain(model)(torch.randn(3, 8))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


def test_a_traced_model_converts() -> None:
    """torch.fx keeps nn.Linear as a call of a module, and so the conversion comes after the trace."""
    torch.manual_seed(0)
    model = Waves()
    plain = plain_iteration(model, square)
    traced = torch.fx.symbolic_trace(model)
    done = converted_iteration(traced, square)
    assert done.conversion.converted == ("up", "down")
    assert done.fused_writes == {"up.weight": 2, "down.weight": 2}
    for name, gradient in plain.items():
        assert torch.equal(done.grads[name], gradient), name
