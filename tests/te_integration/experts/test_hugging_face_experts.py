"""``convert_linears`` on Hugging Face models with experts: results, gradients and state dicts stay as they were."""

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_models import EXPERT_MODELS, published, tiny
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.utils.parametrize import register_parametrization
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

import maingrad.fsdp as fsdp
from maingrad.ddp import (
    WORLD_OF_ONE,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
)
from maingrad.launch import simulate
from maingrad.te_integration import (
    Float8CurrentScaling,
    MXFP8BlockScaling,
    TokenDispatcher,
    WgradQueue,
    autocast,
    convert_linears,
    delayed_wgrad,
    unconvert,
)
from maingrad.te_integration.experts.hugging_face_experts import why_not_experts

NAMES = list(EXPERT_MODELS)
BOUND = 2e-5
"""Relative to the norm: fp32 sums in another order."""


def tokens_of(index: int, batch: int = 2) -> Tensor:
    return torch.randint(96, (batch, 17), generator=torch.Generator().manual_seed(index))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def experts_in(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "down_proj" in module._parameters]


def assert_same_gradients(model: nn.Module, plain: nn.Module, bound: float = BOUND) -> None:
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        gradient, want = parameter.main_grad, expected[name].grad
        if want is None:
            assert not gradient.count_nonzero(), name
        else:
            assert (gradient - want).norm() <= bound * want.norm() + 1e-9, name


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.sampled(4)
def test_fused_share_of_published_models(name: str) -> None:
    model = published(name)
    conversion = convert_linears(model)
    assert not conversion.skipped
    assert set(experts_in(model)) <= set(conversion.converted)
    assert 0.97 <= conversion.fused_share < 1.0
    # By hand: the routers are all that is left out.
    assert {key.rpartition(".")[0].rpartition(".")[2] for key in conversion.left_out} <= {"gate", "router"}
    config = model.config
    chosen = config.num_experts_per_tok
    fused = unfused = 0.0
    for key, parameter in model.named_parameters():
        if key in conversion.left_out:
            unfused += parameter.numel()
        elif parameter.dim() == 3:
            fused += parameter.numel() * chosen / parameter.shape[0]
        elif parameter.dim() == 2 and "embed_tokens" not in key and not key.endswith("bias"):
            fused += parameter.numel()
    assert conversion.fused_share == pytest.approx(fused / (fused + unfused), rel=1e-9)


def test_what_is_left_out_is_named() -> None:
    model = tiny("qwen3_moe")
    model.model.layers[1].mlp.experts.forward = model.model.layers[1].mlp.experts.forward

    class Mine(type(model.model.layers[0].mlp.experts)):  # type: ignore[misc]
        def forward(self, *arguments: Tensor) -> Tensor:
            result: Tensor = super().forward(*arguments) * 2
            return result

    model.model.layers[0].mlp.experts.__class__ = Mine
    conversion = convert_linears(model)
    first, second = (f"model.layers.{layer}.mlp" for layer in range(2))
    assert "Mine is a subclass of " in conversion.skipped[f"{first}.experts"]
    assert "forward was replaced" in conversion.skipped[f"{second}.experts"]
    assert set(conversion.left_out) == {f"{first}.gate.weight", f"{second}.gate.weight"}
    assert "Qwen3MoeTopKRouter" in conversion.left_out[f"{first}.gate.weight"]
    assert conversion.fused_share < 0.8


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(3)
def test_results_and_gradients_of_several_microbatches(name: str) -> None:
    plain, model = tiny(name), tiny(name)
    keys = list(model.state_dict())
    convert_linears(model)
    assert list(model.state_dict()) == keys
    wrapped = DistributedDataParallel(model, DistributedDataParallelConfig(overlap_grad_reduce=True))
    for index in range(3):
        expected = loss_of(plain, tokens_of(index))
        expected.backward()
        if index < 2:
            with wrapped.no_sync():
                loss = loss_of(wrapped, tokens_of(index))
                loss.backward()
        else:
            loss = loss_of(wrapped, tokens_of(index))
            loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    wrapped.finish_grad_sync()
    assert_same_gradients(model, plain)
    of_experts = [record for record in wrapped.records if ".experts." in record.name]
    assert of_experts
    assert all(record.num_fused_writes == 3 for record in of_experts if "bias" not in record.name)


def _train(name: str, form: str) -> dict[str, Tensor]:
    model = tiny(name)
    if form != "plain":
        convert_linears(model)
    rank = torch.distributed.get_rank()
    optimizer: torch.optim.Optimizer
    if form in ("fsdp", "torch_fsdp"):
        shard = fsdp.fully_shard if form == "fsdp" else torch_fully_shard
        for layer in model.model.layers:
            shard(layer)
        model = shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        sharded = form == "zero1"
        model = DistributedDataParallel(model, DistributedDataParallelConfig(use_distributed_optimizer=sharded))
        optimizer = DistributedOptimizer(model, lr=0.1, optimizer_class=torch.optim.SGD)
    for step in range(2):
        loss_of(model, tokens_of(2 * step + rank)).backward()
        if "fsdp" not in form:
            model.finish_grad_sync()
        optimizer.step()
        if "fsdp" in form:
            optimizer.zero_grad()
        else:
            model.zero_grad_buffer()
    state: dict[str, Tensor] = model.state_dict()
    whole = {key: value.full_tensor() if hasattr(value, "full_tensor") else value for key, value in state.items()}
    return {key.removeprefix("module."): value.clone() for key, value in whole.items()}


@pytest.mark.in_turn
@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp", "torch_fsdp"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(5)
def test_ranks_train_the_unconverted_model(name: str, form: str) -> None:
    plain = simulate(_train, 2, name, "plain")[0]
    for held in simulate(_train, 2, name, form):
        for key, value in plain.items():
            assert (held[key] - value).norm() <= BOUND * value.norm() + 1e-9, key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(2)
def test_evaluation_generation_and_the_way_back(name: str) -> None:
    plain, model = tiny(name).eval(), tiny(name).eval()
    experts = model.model.layers[1].mlp.experts
    base = type(experts)
    convert_linears(model)
    assert isinstance(experts, base)
    assert type(experts) is not base
    another = tiny(name)
    convert_linears(another)
    assert isinstance(another.model.layers[1].mlp.experts, type(experts))
    prompt = tokens_of(0)[:, :8]
    with torch.no_grad():
        assert torch.allclose(model(input_ids=prompt).logits, plain(input_ids=prompt).logits, rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))
    assert unconvert(model)
    assert type(experts) is base
    loss_of(model, tokens_of(1)).backward()
    loss_of(plain, tokens_of(1)).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)


def test_the_user_chooses_an_implementation_afterwards() -> None:
    """The choice is the config's, and has no effect on fused experts; results are the same whatever it is."""
    model, plain = tiny("mixtral"), tiny("mixtral")
    convert_linears(model)
    wrapped = DistributedDataParallel(model)
    model.set_experts_implementation("grouped_mm")
    loss_of(wrapped, tokens_of(0)).backward()
    wrapped.finish_grad_sync()
    loss_of(plain, tokens_of(0)).backward()
    assert_same_gradients(model, plain)
    assert all(record.num_fused_writes == 1 for record in wrapped.records if ".experts." in record.name)


def test_experts_that_transformers_has_split_over_ranks_are_skipped() -> None:
    model = tiny("mixtral")
    first, *others = experts_in(model)
    model.get_submodule(first)._is_expert_parallel = True
    conversion = convert_linears(model)
    assert "split over ranks by transformers" in conversion.skipped[first]
    assert set(others) <= set(conversion.converted)


@pytest.mark.parametrize("registered", ["before", "afterwards"])
def test_an_implementation_of_the_programs_own_runs(registered: str, own_implementation: str) -> None:
    """Before the conversion, such experts are skipped by name; afterwards, they run and autograd delivers."""
    plain, model = tiny("mixtral"), tiny("mixtral")
    plain.set_experts_implementation(own_implementation)
    if registered == "before":
        model.set_experts_implementation(own_implementation)
    conversion = convert_linears(model)
    assert all((name in conversion.converted) == (registered == "afterwards") for name in experts_in(model))
    if registered == "before":
        assert "'thrice', which is not transformers' own" in conversion.skipped["model.layers.0.mlp.experts"]
    wrapped = DistributedDataParallel(model)
    model.set_experts_implementation(own_implementation)
    expected, loss = loss_of(plain, tokens_of(0)), loss_of(wrapped, tokens_of(0))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert loss.item() != pytest.approx(loss_of(tiny("mixtral"), tokens_of(0)).item(), rel=1e-3)
    expected.backward()
    loss.backward()
    wrapped.finish_grad_sync()
    assert_same_gradients(model, plain)
    assert not any(record.num_fused_writes for record in wrapped.records if ".experts." in record.name)
    if registered == "afterwards":
        experts = model.model.layers[0].mlp.experts
        experts.dispatcher = TokenDispatcher(4, WORLD_OF_ONE)
        with pytest.raises(RuntimeError, match="experts_implementation='thrice' knows no other ranks"):
            experts(torch.randn(1, 32), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


@pytest.fixture
def own_implementation() -> Iterator[str]:
    """Registers an implementation that differs from transformers'."""

    def thrice(experts: Any, *arguments: Tensor) -> Tensor:
        result: Tensor = 3 * ALL_EXPERTS_FUNCTIONS["batched_mm"](experts, *arguments)
        return result

    ALL_EXPERTS_FUNCTIONS.register("thrice", thrice)
    yield "thrice"
    del type(ALL_EXPERTS_FUNCTIONS)._global_mapping["thrice"]


class Elsewhere(nn.Module):
    """As in a model's own code on the Hub."""

    up = "gate_up_proj"

    def __init__(self, config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_experts = config.num_local_experts
        self.register_parameter(self.up, nn.Parameter(torch.randn(4, 96, 32) / 8))
        self.down_proj = nn.Parameter(torch.randn(4, 32, 48 if self.up == "gate_up_proj" else 96) / 8)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        raise NotImplementedError


def with_experts_of(cls: Any, implementation: str) -> Any:
    model = tiny("mixtral", layers=1)
    model.model.layers[0].mlp.experts = cls(model.config)
    model.set_experts_implementation(implementation)
    return model


def assert_converted_experts_are_as_before(model: Any) -> None:
    experts = model.model.layers[0].mlp.experts
    plain = copy.deepcopy(experts)
    assert "model.layers.0.mlp.experts" in convert_linears(model).converted
    wrapped = DistributedDataParallel(model)
    x, index, probs = torch.randn(6, 32), torch.arange(12).remainder(4).view(6, 2), torch.rand(6, 2)
    torch.testing.assert_close(experts(x, index, probs), plain(x, index, probs), rtol=1e-4, atol=1e-5)
    for each in (experts, plain):
        each(x, index, probs).square().sum().backward()
    wrapped.finish_grad_sync()
    assert_same_gradients(experts, plain)


def test_classes_from_elsewhere_that_transformers_decorator_has_changed() -> None:
    """What runs there is known unless it is the class's eager forward."""
    use_experts_implementation(cls := type("Elsewhere", (Elsewhere,), {"forward": Elsewhere.forward}))
    (reason,) = convert_linears(with_experts_of(cls, "eager")).skipped.values()
    assert "Elsewhere runs experts_implementation='eager'" in reason
    assert_converted_experts_are_as_before(with_experts_of(cls, "grouped_mm"))


def test_functions_of_another_registry_compute_something_else() -> None:
    """Transformers' own experts in 8 bits have such a one, with the same names."""
    use_experts_implementation(
        cls := type("In8Bits", (Elsewhere,), {"forward": Elsewhere.forward}),
        experts_interface=ALL_FP8_EXPERTS_FUNCTIONS,
    )
    model = with_experts_of(cls, "grouped_mm")
    assert "model.layers.0.mlp.experts" not in convert_linears(model).converted
    assert type(model.model.layers[0].mlp.experts) is cls


def test_another_decorator_with_names_like_transformers_is_left_alone() -> None:
    def decorated(experts_interface: Any) -> Any:
        def forward(self: Any, hidden_states: Tensor, *routing: Tensor) -> Tensor:
            chosen: Tensor = experts_interface["grouped_mm"](self, hidden_states, *routing)
            return chosen

        return forward

    cls = type("OfAProgram", (Elsewhere,), {"forward": decorated(ALL_EXPERTS_FUNCTIONS)})
    cls.has_gate = True
    model = with_experts_of(cls, "grouped_mm")
    assert "model.layers.0.mlp.experts" not in convert_linears(model).converted
    assert type(model.model.layers[0].mlp.experts) is cls


def test_a_gate_of_the_classs_own_is_called() -> None:
    """With SiLU, as most have, and one more in the second half."""

    class Raised(Elsewhere):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate) * (up + 1)  # type: ignore[no-any-return]

    use_experts_implementation(Raised)
    assert_converted_experts_are_as_before(with_experts_of(Raised, "batched_mm"))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_experts_without_a_gate(activation: type[nn.Module]) -> None:
    class Ungated(Elsewhere):
        up = "up_proj"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.act_fn = activation()

    use_experts_implementation(Ungated, has_gate=False)
    assert_converted_experts_are_as_before(with_experts_of(Ungated, "batched_mm"))


def test_probabilities_are_not_rounded_to_the_dtype_of_tokens() -> None:
    model = tiny("mixtral", layers=1).bfloat16()
    experts = model.model.layers[0].mlp.experts
    convert_linears(model)
    wrapped = DistributedDataParallel(model)
    probs = torch.rand(5, 2, requires_grad=True)
    experts(torch.randn(5, 32).bfloat16(), torch.tensor([[0, 1]] * 5), probs).float().square().sum().backward()
    wrapped.finish_grad_sync()
    assert probs.grad is not None and not torch.equal(probs.grad.bfloat16().float(), probs.grad)


def test_experts_called_by_themselves() -> None:
    """By the argument names of either eager forward, with dropped choices, and without tokens."""
    model = tiny("gpt_oss", layers=1)
    model.set_experts_implementation("eager")
    plain = copy.deepcopy(model.model.layers[0].mlp.experts)
    convert_linears(model)
    wrapped = DistributedDataParallel(model)
    experts = model.model.layers[0].mlp.experts
    x, index, probs = torch.randn(5, 32), torch.tensor([[0, 1], [1, 3], [3, 0], [1, 0], [3, 1]]), torch.rand(5, 2)
    expected = plain(x, router_indices=index, routing_weights=probs)
    assert torch.allclose(experts(x, router_indices=index, routing_weights=probs), expected, atol=1e-5)
    assert torch.allclose(experts(x, top_k_index=index, top_k_weights=probs), expected, atol=1e-5)
    dropped = index.clone()
    dropped[2] = experts.num_experts
    assert not experts(x, dropped, probs)[2].count_nonzero()
    assert torch.allclose(experts(x, dropped, probs)[3:], expected[3:], atol=1e-5)
    nothing = experts(x[:0].requires_grad_(), index[:0], probs[:0])
    assert nothing.shape == (0, 32)
    nothing.sum().backward()
    wrapped.finish_grad_sync()
    assert not experts.gate_up_proj.main_grad.count_nonzero()
    for given in ({}, {"top_k_index": index}, {"routing_weights": probs}):
        with pytest.raises(TypeError, match="takes hidden_states, top_k_index and top_k_weights"):
            experts(x, **given)
    with torch.autocast("cpu", torch.bfloat16):
        assert experts(x, index, probs).dtype is torch.float32, "that of the hidden states"


def test_experts_with_another_activation_or_gate_of_their_own() -> None:
    model = tiny("mixtral", layers=1, hidden_act="gelu")
    model.set_experts_implementation("eager")
    experts = model.model.layers[0].mlp.experts
    plain, x, index, probs = (
        copy.deepcopy(experts),
        torch.randn(5, 32),
        torch.arange(10).view(5, 2) % 4,
        torch.rand(5, 2),
    )
    assert convert_linears(model).converted
    torch.testing.assert_close(experts(x, index, probs), plain(x, index, probs), rtol=1e-4, atol=1e-5)
    replaced = tiny("mixtral", layers=1)
    replaced.model.layers[0].mlp.experts._apply_gate = lambda gate_up: gate_up.chunk(2, dim=-1)[0]
    reason = convert_linears(replaced).skipped["model.layers.0.mlp.experts"]
    assert "_apply_gate was replaced on this instance" in reason
    split = tiny("mixtral", layers=1)
    experts = split.model.layers[0].mlp.experts
    experts._is_expert_parallel = True
    assert why_not_experts(experts, may_be_split=True) is None, "for those who bring the tokens"
    reason = convert_linears(split).skipped["model.layers.0.mlp.experts"]
    assert "split over ranks by transformers (expert parallelism)" in reason


@pytest.mark.parametrize("choice", [{"moe_topk": [1, 3]}, {"top_k_experts": 2}])
def test_how_many_experts_a_token_goes_to(choice: dict[str, Any]) -> None:
    """Configs give the number other names, and some a number for each layer."""
    model = tiny("qwen3_moe")
    model.lm_head.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.requires_grad_(False)
        layer.mlp.experts.down_proj.requires_grad_(False)
        layer.mlp.experts.config = SimpleNamespace(_experts_implementation="eager", **choice)
    share = convert_linears(model).fused_share
    experts, router = 8 * 48 * 32 * 2 / 8, 8 * 32
    assert share == pytest.approx(experts / (experts + router))


@pytest.mark.parametrize("adapter", ["module", "parametrization"])
def test_adapters_on_frozen_experts(adapter: str) -> None:
    """A module in the experts' place, and low ranks added to the packed weights: only the adapter is trained."""
    found = []
    for converts in (False, True):
        model = tiny("gpt_oss", layers=1).requires_grad_(False)
        torch.manual_seed(1)
        mlp = model.model.layers[0].mlp
        if converts and adapter == "parametrization":
            convert_linears(model)
        if adapter == "module":
            mlp.experts = _Beside(mlp.experts)
        else:
            for name in ("gate_up_proj", "down_proj"):
                register_parametrization(mlp.experts, name, _LowRank(getattr(mlp.experts, name)))
        if converts and adapter == "module":
            convert_linears(model)
        wrapped = DistributedDataParallel(model) if converts else model
        loss_of(wrapped, tokens_of(0)).backward()
        if converts:
            wrapped.finish_grad_sync()
        trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        assert len(trained) == (2 if adapter == "module" else 4)
        found.append({name: each.main_grad if converts else each.grad for name, each in trained})
    plain, ours = found
    for name, gradient in plain.items():
        assert (ours[name] - gradient).norm() <= BOUND * gradient.norm(), name


class _Beside(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts, self.down, self.up = experts, nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, hidden_states: Tensor, *routing: Tensor) -> Tensor:
        result: Tensor = self.experts(hidden_states, *routing) + self.up(self.down(hidden_states))
        return result


class _LowRank(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        experts, rows, columns = weight.shape
        self.left = nn.Parameter(0.1 * torch.randn(experts, rows, 2))
        self.right = nn.Parameter(0.1 * torch.randn(experts, 2, columns))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.left @ self.right


@pytest.mark.parametrize("how", ["recompute", "copied", "pickled", "frozen", "delayed", "autocast"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.sampled(5)
def test_programs_around_experts(name: str, how: str, tmp_path: Path) -> None:
    # One layer in bf16: behind experts, another rounding would choose other experts.
    layers = 1 if how == "autocast" else 2
    plain, model = tiny(name, layers=layers), tiny(name, layers=layers)
    convert_linears(model)
    if how == "recompute":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif how == "copied":
        model = copy.deepcopy(model)
    elif how == "pickled":
        model = pickle.loads(pickle.dumps(model))
    elif how == "frozen":
        for each in (plain, model):
            each.model.layers[0].mlp.experts.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    lowered = torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast")
    for index in range(2):
        with lowered:
            loss_of(plain, tokens_of(index)).backward()
        if how == "delayed":
            queue = WgradQueue()
            with wrapped.no_sync() if index == 0 else lowered:
                with delayed_wgrad(queue):
                    loss = loss_of(wrapped, tokens_of(index))
                loss.backward()
                assert len(queue) > 4
                queue.drain()
            continue
        with lowered, wrapped.no_sync() if index == 0 else torch.enable_grad():
            loss_of(wrapped, tokens_of(index)).backward()
    wrapped.finish_grad_sync()
    trained = {parameter_name for parameter_name, parameter in plain.named_parameters() if parameter.requires_grad}
    expected = dict(plain.named_parameters())
    for parameter_name, parameter in model.named_parameters():
        if parameter_name in trained:
            bound = 2e-2 if how == "autocast" else BOUND
            want = expected[parameter_name].grad
            assert want is not None, parameter_name
            assert (parameter.main_grad - want).norm() <= bound * want.norm() + 1e-9, parameter_name


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.sampled(1)
def test_a_compiled_layer_is_one_graph(name: str) -> None:
    plain, model = tiny(name, layers=1), tiny(name, layers=1)
    convert_linears(model)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    wrapped = DistributedDataParallel(model)
    loss_of(wrapped, tokens_of(0)).backward()
    wrapped.finish_grad_sync()
    loss_of(plain, tokens_of(0)).backward()
    assert_same_gradients(model, plain)
    assert all(
        record.num_fused_writes == 1
        for record in wrapped.records
        if ".experts." in record.name and "bias" not in record.name
    )


@pytest.mark.parametrize("recipe", [Float8CurrentScaling, MXFP8BlockScaling])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_under_a_recipe(name: str, recipe: type) -> None:
    """Quantised gradients are near those of bf16, and no nearer than elements of 8 bits can be."""
    plain, model = tiny(name, layers=1).bfloat16(), tiny(name, layers=1).bfloat16()
    convert_linears(model)
    wrapped = DistributedDataParallel(model)
    with autocast(recipe=recipe()):
        loss_of(wrapped, tokens_of(0)).backward()
        with torch.no_grad():
            assert abs(loss_of(model, tokens_of(0)) - loss_of(plain, tokens_of(0))) < 0.1
    wrapped.finish_grad_sync()
    loss_of(plain, tokens_of(0)).backward()
    for name_of_layer in ("gate_up_proj", "down_proj"):
        weight = getattr(model.model.layers[0].mlp.experts, name_of_layer)
        want = getattr(plain.model.layers[0].mlp.experts, name_of_layer).grad.float()
        error = (weight.main_grad - want).norm() / want.norm()
        assert 5e-3 < error < 0.3


@pytest.mark.in_turn
def test_the_program_of_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).resolve().parents[3] / "docs/mixture_of_experts.md"
    program, *_ = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(program, names)
    said = capsys.readouterr().out
    assert "% of the FLOPs of weight gradients are fused" in said
    assert "not fused: model.layers.0.mlp.gate.weight: Qwen3MoeTopKRouter" in said
    with torch.no_grad():
        assert loss_of(names["model"], names["tokens"]) < 4.5, "5.5 at the start"


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(5)
def test_on_a_gpu(name: str) -> None:
    """bf16, beside transformers' own implementations in bf16 and in fp32; and the host waits for nothing."""
    gradients = {}
    for how in ("fp32", "eager", "grouped_mm", "ours"):
        # One layer with experts: behind it, another rounding would choose other experts.
        layers = 2 if name == "deepseek_v3" else 1
        model = tiny(name, layers=layers, hidden_size=64, moe_intermediate_size=64, intermediate_size=64).cuda()
        model = model.to(torch.float32 if how == "fp32" else torch.bfloat16)
        if how == "ours":
            convert_linears(model)
            wrapped = DistributedDataParallel(model)
            with wrapped.no_sync():
                loss_of(wrapped, tokens_of(0).cuda()).backward()
            wrapped.zero_grad_buffer()
            experts = model.model.layers[-1].mlp.experts
            x = torch.randn(34, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            index = torch.randint(4, (34, 1), device="cuda")
            probs = torch.rand(34, 1, device="cuda")
            torch.cuda.synchronize()
            with wrapped.no_sync():
                experts(x, index, probs).sum().backward()  # kernels of these shapes compile
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    experts(x, index, probs).sum().backward()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            wrapped.zero_grad_buffer()
            loss_of(wrapped, tokens_of(0).cuda()).backward()
            wrapped.finish_grad_sync()
            gradients[how] = {key: each.main_grad.clone() for key, each in model.named_parameters()}
        else:
            if how != "fp32":
                model.set_experts_implementation(how)
            loss_of(model, tokens_of(0).cuda()).backward()
            gradients[how] = {
                key: torch.zeros_like(each) if each.grad is None else each.grad
                for key, each in model.named_parameters()
            }
    for key, exact in gradients["fp32"].items():
        errors = {how: float((gradients[how][key].float() - exact).norm()) for how in ("eager", "grouped_mm", "ours")}
        assert errors["ours"] <= 3 * max(errors["eager"], errors["grouped_mm"]) + 1e-6, (key, errors)
