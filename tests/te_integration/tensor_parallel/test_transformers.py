"""Models that transformers has cut by their ``tp_plan``, under our wrapper, against the same models whole."""

from typing import Any

import pytest
import torch
from parallel_llama import assert_grads, batch, full, make_mesh, whole_grads
from torch import nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.plan.model_slice import model_slice_of
from maingrad.launch.simulation.simulate import simulate
from maingrad.te_integration import convert_linears, unconvert

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "use_cache": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
MODELS = ["Llama", "Qwen3", "Qwen3Moe"]
ORDERS = ["convert first", "tp first", "not converted"]


def make(kind: str) -> Any:
    torch.manual_seed(0)
    more: dict[str, Any] = {"Llama": {}, "Qwen3": {"head_dim": 8}, "Qwen3Moe": {"head_dim": 8, **EXPERTS}}[kind]
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:
                param.mul_(torch.linspace(0.5, 1.5, param.numel()))
    return model


def cut(model: Any, mesh: Any) -> None:
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    apply_tensor_parallelism(model, mesh["tp"], model._expand_parallel_plan(model.tp_plan))


def loss_of(model: Any, index: int) -> torch.Tensor:
    tokens, _ = batch(index)
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def train(kind: str, order: str, hooked: bool) -> dict[str, int]:
    mesh = make_mesh()
    dp = mesh["dp"].get_local_rank()
    model = make(kind)
    if order == "convert first":
        assert not convert_linears(model).skipped
    cut(model, mesh)
    if order == "tp first":
        assert not convert_linears(model).skipped
    if hooked and order == "not converted":  # transformers registers its gradient hooks in the first forward
        loss_of(model, 0)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=3000)
    wrapped = DistributedDataParallel(model, config, process_group=mesh["dp"])
    with wrapped.no_sync():
        (loss_of(wrapped, dp * 2) / 2).backward()
    (loss_of(wrapped, dp * 2 + 1) / 2).backward()
    wrapped.finish_grad_sync()
    plain = make(kind)
    for index in range(4):
        (loss_of(plain, index) / 4).backward()
    assert_grads(whole_grads(model), {name: param.grad for name, param in plain.named_parameters()}, rtol=2e-6)
    for name, value in model.state_dict().items():
        assert torch.equal(full(value), plain.state_dict()[name]), name
    with torch.no_grad():  # transformers multiplies local tensors then
        torch.testing.assert_close(loss_of(model, 5), loss_of(plain, 5))
    return {record.name: record.num_fused_writes for record in wrapped.records}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_the_whole_model(kind: str, order: str) -> None:
    for writes in simulate(train, 4, kind, order, True):
        fused = {name for name, count in writes.items() if count == 2}
        products = {name for name in writes if "_proj" in name or name == "lm_head.weight"}
        assert fused == (set() if order == "not converted" else products)


def test_norms_of_queries_and_keys_have_partial_gradients() -> None:
    def on_each_rank() -> None:
        mesh = make_mesh(1, 2)
        model = make("Qwen3")
        cut(model, mesh)
        loss_of(model, 0)
        DistributedDataParallel(model, process_group=mesh["dp"])
        for name, param in model.named_parameters():
            held = model_slice_of(param)
            if "q_norm" in name or "k_norm" in name:
                assert held is not None
                assert held.grad == "partial"
                assert not param._post_accumulate_grad_hooks or len(param._post_accumulate_grad_hooks) == 1  # ours

    simulate(on_each_rank, 2)


def test_conversion_of_a_cut_model_may_be_undone() -> None:
    def on_each_rank() -> None:
        mesh = make_mesh(1, 2)
        model = make("Llama")
        cut(model, mesh)
        loss = loss_of(model, 0)
        convert_linears(model)
        torch.testing.assert_close(loss_of(model, 0), loss)
        unconvert(model)
        assert type(model.lm_head) is nn.Linear
        torch.testing.assert_close(loss_of(model, 0), loss)

    simulate(on_each_rank, 2)


@pytest.mark.parametrize("order", ["convert first", "tp first"])
def test_a_head_that_is_cut_keeps_its_loss(order: str) -> None:
    """A fused loss reads the head's weight, of which each rank has a slice."""

    def on_each_rank() -> str:
        mesh = make_mesh(1, 2)
        model = make("Llama")
        if order == "tp first":
            cut(model, mesh)
        conversion = convert_linears(model, fused_loss=True)
        if order == "tp first":
            (reason,) = conversion.unfused_losses.values()
            return reason
        cut(model, mesh)
        with pytest.raises(ValueError, match="fused_loss") as raised:
            DistributedDataParallel(model, process_group=mesh["dp"])
        return str(raised.value)

    for text in simulate(on_each_rank, 2):
        assert "slice" in text
