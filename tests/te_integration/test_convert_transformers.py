"""``convert_linears`` on Hugging Face models, built from a config: Llama (``nn.Linear``) and GPT-2 (``Conv1D``)."""

import copy
import os
import pickle

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

import pytest
import torch
from conversion import assert_close_to_exact, converted_iteration, plain_iteration, weights_of
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import WgradQueue, convert_linears, delayed_wgrad
from maingrad.te_integration.dense.hugging_face import FusedConv1D

VOCABULARY = 96
LLAMA_LAYER = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
LLAMA = (
    "model.embed_tokens",
    *(f"model.layers.{layer}.{name}" for layer in range(2) for name in LLAMA_LAYER),
    "lm_head",
)
GPT2_LAYER = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
GPT2 = (
    "transformer.wte",
    "transformer.wpe",
    *(f"transformer.h.{layer}.{name}" for layer in range(2) for name in GPT2_LAYER),
    "lm_head",
)


def llama(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
            attention_dropout=0.1,
            use_cache=False,
        )
    ).train()


def gpt2(*, tied: bool = False, dropout: float = 0.1) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=4,
        tie_word_embeddings=tied,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).train()


def next_token(model: nn.Module, index: int) -> Tensor:
    tokens = torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(index))
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("model", [lambda: llama(tied=False), gpt2], ids=["llama", "gpt2"])
def test_untied_models_have_autograds_gradients(model) -> None:
    """Dropout on, the masks drawn from the same seeds; every addition in autograd's order, hence every bit the same."""
    model = model()
    done = converted_iteration(model, next_token)
    assert done.conversion.converted == (LLAMA if isinstance(model, LlamaForCausalLM) else GPT2)
    assert done.conversion.skipped == {}
    fused = {f"{name}.weight" for name in done.conversion.converted}
    assert done.fused_writes == dict.fromkeys(fused, 2)
    assert done.hook_writes == dict.fromkeys(done.grads.keys() - fused, 2)
    plain = plain_iteration(model, next_token)
    assert plain.keys() == done.grads.keys()
    for name, gradient in plain.items():
        assert torch.equal(done.grads[name], gradient), name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tied_embeddings_get_the_heads_gemm_and_the_lookups_rows(family: str) -> None:
    model = (llama(tied=True) if family == "llama" else gpt2(tied=True)).eval()  # fp64 draws other dropout masks
    embedding = "model.embed_tokens.weight" if family == "llama" else "transformer.wte.weight"
    done = converted_iteration(model, next_token)
    assert done.conversion.converted == (LLAMA if family == "llama" else GPT2)
    assert done.model.lm_head.weight is done.model.get_input_embeddings().weight
    fused = {f"{name}.weight" for name in done.conversion.converted if name != "lm_head"}
    assert fused == weights_of(done.model, done.conversion.converted)
    assert done.fused_writes == dict.fromkeys(fused, 2) | {embedding: 4}
    assert done.hook_writes == dict.fromkeys(done.grads.keys() - fused, 2)
    plain = plain_iteration(model, next_token)
    for name, gradient in plain.items():
        assert name == embedding or torch.equal(done.grads[name], gradient), name
    assert_close_to_exact(done.grads, plain, plain_iteration(model, next_token, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")  # renamed in transformers 5.2x
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.sampled(3)
def test_gradient_checkpointing(family: str, reentrant: bool, tied: bool) -> None:
    """The recomputed forward has its own weight references, and its gradients are the same, to the bit where untied."""
    model = llama(tied=tied) if family == "llama" else gpt2(tied=tied)
    plain = plain_iteration(model, next_token)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    runs: list[nn.Module] = []
    layer = model.get_submodule(LLAMA[1] if family == "llama" else GPT2[2])
    layer.register_forward_pre_hook(lambda module, _: runs.append(module))
    done = converted_iteration(model, next_token)
    assert len(runs) == 4  # a forward and its recompute in each of two microbatches
    writes = dict.fromkeys(weights_of(done.model, done.conversion.converted), 2)
    looked_up = "model.embed_tokens.weight" if family == "llama" else "transformer.wte.weight"
    assert done.fused_writes == writes | {looked_up: 4 if tied else 2}
    for name, gradient in plain.items():
        if "embed_tokens" in name or "wte" in name:
            assert (done.grads[name] - gradient).norm() <= 4 * torch.finfo(torch.float32).eps * gradient.norm()
        else:
            assert torch.equal(done.grads[name], gradient), name


def test_state_dict_keys_stay_and_an_old_state_dict_loads() -> None:
    for model in (llama(tied=False), gpt2(tied=True)):
        old = {name: value.clone() for name, value in model.state_dict().items()}
        convert_linears(model)
        assert list(model.state_dict()) == list(old)
        for param in model.parameters():
            nn.init.zeros_(param)
        model.load_state_dict(old)
        assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())


# ---- Conv1D. ----


def conv1d_loss(model: nn.Module, index: int) -> Tensor:
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(index))
    return model(x.to(next(model.parameters()).dtype)).square().mean()


def conv1d() -> Conv1D:
    torch.manual_seed(0)
    return Conv1D(12, 8)


def test_a_conv1d_of_a_models_own_code_is_none_of_transformers() -> None:
    """transformers imports such code, of the Hub, as ``transformers_modules``."""
    own = type("Conv1D", (Conv1D,), {"__module__": "transformers_modules.somebody.modeling"})
    conversion = convert_linears(nn.Sequential(own(12, 8), conv1d()))
    assert conversion.converted == ("1",)


def test_a_conv1d_stays_one() -> None:
    model = conv1d()
    model.note = "set by somebody"
    weight, keys, shown = model.weight, list(model.state_dict()), repr(model)
    assert convert_linears(model).converted == ("",)
    assert isinstance(model, Conv1D)
    assert isinstance(model, FusedConv1D)
    assert model.weight is weight
    assert (model.nf, model.nx, model.note) == (12, 8, "set by somebody")
    assert list(model.state_dict()) == keys
    assert repr(model) == shown
    assert convert_linears(model).skipped == {"": "already fused"}


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_fused_conv1d_are_fused(clone) -> None:
    model = conv1d()
    convert_linears(model)
    copied = clone(model)
    assert type(copied) is type(model)
    ddp = DistributedDataParallel(copied)
    conv1d_loss(ddp, 0).backward()
    ddp.finish_grad_sync()
    plain = conv1d()
    conv1d_loss(plain, 0).backward()
    assert torch.equal(copied.weight.main_grad, plain.weight.grad)
    assert torch.equal(copied.bias.main_grad, plain.bias.grad)


@pytest.mark.parametrize("case", ["frozen weight", "frozen bias", "no_grad"])
def test_a_fused_conv1d_computes_what_is_asked_for(case: str) -> None:
    model, plain = conv1d(), conv1d()
    for each in (model, plain):
        each.weight.requires_grad_(case != "frozen weight")
        each.bias.requires_grad_(case != "frozen bias")
    assert convert_linears(model).converted == ("",)
    if case == "no_grad":
        x = torch.randn(3, 8)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        return
    ddp = DistributedDataParallel(model)
    conv1d_loss(ddp, 0).backward()
    ddp.finish_grad_sync()
    conv1d_loss(plain, 0).backward()
    writes = {record.name: (record.num_fused_writes, record.num_hook_writes) for record in ddp.records}
    assert writes == ({"bias": (0, 1)} if case == "frozen weight" else {"weight": (1, 0)})
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert not ours.requires_grad or torch.equal(ours.main_grad, theirs.grad)


def test_a_fused_conv1d_returns_the_gradient_that_autograd_grad_asks_for() -> None:
    model, plain = conv1d(), conv1d()
    convert_linears(model)
    ddp = DistributedDataParallel(model)
    for create_graph in (False, True):
        ours = torch.autograd.grad(conv1d_loss(ddp, 0), list(model.parameters()), create_graph=create_graph)
        theirs = torch.autograd.grad(conv1d_loss(plain, 0), list(plain.parameters()), create_graph=create_graph)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine, other)
    assert not model.weight.main_grad.any()


@pytest.mark.in_turn
def test_a_compiled_conv1d_whose_weight_is_parametrized_later() -> None:
    """A computed weight is a graph break, behind which plain autograd computes the product."""
    torch.manual_seed(0)
    model = Conv1D(8, 8)  # square: a product with the weight's transpose has this shape too
    plain = copy.deepcopy(model)
    convert_linears(model)
    for each in (model, plain):
        parametrize.register_parametrization(each, "weight", nn.Softplus())
    x = torch.randn(3, 8)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), plain(x))


def test_a_conv1d_under_autocast() -> None:
    def loss(model: nn.Module, index: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return conv1d_loss(model, index)

    done, plain = converted_iteration(conv1d(), loss), plain_iteration(conv1d(), loss)
    halves = [plain_iteration(conv1d(), lambda model, _, index=index: loss(model, index)) for index in (0, 1)]
    assert done.fused_writes == {"weight": 2}
    for name, gradient in plain.items():
        # Plain gradients are rounded to bf16 in each microbatch, by at most 2^-8 of themselves.
        bound = sum(half[name].abs() / 2 for half in halves) * 2**-8 * 1.01 + 1e-9
        assert ((done.grads[name] - gradient).abs() <= bound).all(), name


def test_a_conv1d_may_be_delayed() -> None:
    model, plain, queue = conv1d(), conv1d(), WgradQueue()
    convert_linears(model)
    wrapped = DistributedDataParallel(model)
    with delayed_wgrad(queue):
        loss = conv1d_loss(wrapped, 0)
    loss.backward()
    assert queue.pending_owners == [model.describe()] == ["Conv1D(nf=12, nx=8)"]
    queue.drain()
    wrapped.finish_grad_sync()
    conv1d_loss(plain, 0).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.main_grad, theirs.grad)


def test_bf16_accumulates_in_fp32() -> None:
    model = conv1d().bfloat16()
    done = converted_iteration(model, conv1d_loss)
    assert done.grads["weight"].dtype is torch.float32
    assert done.grads["weight"].shape == (8, 12)
    exact = plain_iteration(model, conv1d_loss, dtype=torch.float64)["weight"]
    plain = plain_iteration(model, conv1d_loss)["weight"]
    assert (done.grads["weight"].double() - exact).norm() <= (plain.double() - exact).norm()


def test_what_is_not_conv1d_itself_is_skipped() -> None:
    class Scaled(Conv1D):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    others = type("Conv1D", (nn.Module,), {"__module__": "my_transformers.pytorch_utils"})()  # of the same name
    others.weight = nn.Parameter(torch.ones(8, 8))
    model = nn.ModuleDict(
        {
            "others": others,
            "scaled": Scaled(12, 8),
            "parametrized": parametrize.register_parametrization(Conv1D(8, 8), "weight", nn.Softplus()),
            "torch's": nn.Conv1d(2, 2, 1),
        }
    )
    conversion = convert_linears(model)
    assert conversion.converted == ()
    assert list(conversion.skipped) == ["scaled", "parametrized"]
    assert "Scaled is a subclass of Conv1D" in conversion.skipped["scaled"]
    assert "ParametrizedConv1D is a subclass of Conv1D" in conversion.skipped["parametrized"]


def test_without_a_provider_the_conv1d_is_named() -> None:
    model = conv1d()
    convert_linears(model)
    with pytest.raises(RuntimeError, match=r"Conv1D\(nf=12, nx=8\), weight: .*needs weight.main_grad"):
        conv1d_loss(model, 0).backward()


@pytest.mark.slow
def test_a_compiled_conv1d_breaks_no_graph() -> None:
    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = conv1d()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.sin()).cos()

    torch._dynamo.reset()
    model = Waves()
    plain = plain_iteration(model, conv1d_loss)
    convert_linears(model)
    explained = torch._dynamo.explain(model)(torch.randn(3, 8))
    assert (len(explained.break_reasons), explained.graph_count) == (0, 1)
    torch._dynamo.reset()
    ddp = DistributedDataParallel(torch.compile(model, backend="aot_eager"))
    for index in range(2):
        (conv1d_loss(ddp, index) / 2).backward()
    ddp.finish_grad_sync()
    torch._dynamo.reset()
    assert {record.name: record.num_fused_writes for record in ddp.records if record.num_fused_writes} == {
        "_orig_mod.layer.weight": 2
    }
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.main_grad, plain[name])
