"""Models that transformers has cut by their ``tp_plan``, under our wrapper, against the same models whole."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks
from parallel_llama import OLD_DTENSORS, assert_grads, full, make_mesh, whole_grads
from torch import nn

from maingrad.ddp import WORLD_OF_ONE, DistributedDataParallel, DistributedDataParallelConfig
from maingrad.ddp.plan.model_slice import model_slice_of
from maingrad.ddp.plan.tensor_parallel.localize import localize
from maingrad.fsdp import fully_shard
from maingrad.launch.simulation.simulate import simulate
from maingrad.te_integration import convert_linears

pytest.importorskip("transformers")
from cut_transformers import cut, loss_of, make

MODELS = ["Llama", "Qwen3", "Qwen3Moe"]
ORDERS = ["convert first", "tp first", "not converted"]


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


@pytest.mark.in_turn
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_are_those_of_the_whole_model(kind: str, order: str) -> None:
    if OLD_DTENSORS and kind == "Qwen3Moe":
        pytest.skip("torch puts no packed cut together, by which this test compares")
    for writes in simulate(train, 4, kind, order, True):
        fused = {name for name, count in writes.items() if count == 2}
        products = {name for name in writes if "_proj" in name or name == "lm_head.weight"}
        assert fused == (set() if order == "not converted" else products)


@pytest.mark.in_turn
@pytest.mark.parametrize("hooked", [True, False])
def test_norms_of_queries_and_keys_have_partial_gradients(hooked: bool) -> None:
    """The program's own hooks stay; those of transformers go, and no later forward brings them back."""

    def on_each_rank() -> None:
        mesh = make_mesh(1, 2)
        model = make("Qwen3")
        cut(model, mesh)
        if hooked:
            loss_of(model, 0)
        norms = [name for name, _ in model.named_parameters() if "q_norm" in name or "k_norm" in name]
        called: list[str] = []
        for name in norms:
            param = model.get_parameter(name)
            param.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
        localize(model)
        wrapped = DistributedDataParallel(model, process_group=mesh["dp"])
        for name in norms:
            held = model_slice_of(model.get_parameter(name))
            assert held is not None
            assert held.grad == "partial"
        loss_of(wrapped, 0).backward()
        assert sorted(called) == sorted(norms)
        wrapped.finish_grad_sync()
        plain = make("Qwen3")
        loss_of(plain, 0).backward()
        assert norms
        for name in norms:
            summed = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(summed, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-7)

    simulate(on_each_rank, 2)


def test_a_norm_that_a_load_replaces_has_partial_gradients_when_it_is_wrapped_again() -> None:
    from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce

    def on_each_rank() -> None:
        mesh = make_mesh(1, 2)
        tp = mesh["tp"]
        norm = ReplicatedWithGradAllReduce().install_forward(nn.RMSNorm(4), tp)
        inputs = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 1.0, 1.0, 2.0]])
        expected = nn.functional.rms_norm(inputs, (4,)).sum(0)
        for _ in range(3):
            wrapped = DistributedDataParallel(norm, process_group=mesh["dp"])
            for _ in range(2):
                wrapped(inputs[tp.get_local_rank()]).sum().backward()
                wrapped.finish_grad_sync()
                torch.testing.assert_close(norm.weight.grad.full_tensor(), expected)
                wrapped.zero_grad_buffer()
            norm.load_state_dict({"weight": torch.ones(4)}, assign=True)

    simulate(on_each_rank, 2)


def sharded_grads(kind: str) -> None:
    """Units by layer: their forwards see other parameters than those that wrapping has found."""
    mesh = make_mesh()
    dp = mesh["dp"].get_local_rank()
    model = make(kind)
    convert_linears(model)
    cut(model, mesh)
    for layer in model.model.layers:
        fully_shard(layer, mesh["dp"])
    fully_shard(model, mesh["dp"])
    with model.no_sync():
        (loss_of(model, dp * 2) / 2).backward()
    (loss_of(model, dp * 2 + 1) / 2).backward()
    plain = make(kind)
    for index in range(4):
        (loss_of(plain, index) / 4).backward()
    found = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    assert_grads(found, {name: param.grad for name, param in plain.named_parameters()}, rtol=2e-6)


@pytest.mark.in_turn
@pytest.mark.parametrize("kind", MODELS)
def test_gradients_under_fully_shard(kind: str) -> None:
    if OLD_DTENSORS and kind == "Qwen3Moe":
        pytest.skip("torch puts no packed cut together, by which this test compares")
    simulate(sharded_grads, 4, kind)


def loaded(folder: str) -> dict[str, int]:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(dist.get_rank()))  # as torchrun, which transformers reads
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    convert_linears(model)
    wrapped = DistributedDataParallel(model, process_group=WORLD_OF_ONE)
    loss_of(wrapped, 0).backward()
    wrapped.finish_grad_sync()
    plain = make("Llama")
    loss_of(plain, 0).backward()
    assert_grads(whole_grads(model), {name: param.grad for name, param in plain.named_parameters()}, rtol=2e-6)
    return {record.name: record.num_fused_writes for record in wrapped.records}


@pytest.mark.in_turn
def test_a_model_that_transformers_loads_in_parts(tmp_path: Path) -> None:
    make("Llama").save_pretrained(tmp_path)
    for writes in run_ranks(loaded, 2, str(tmp_path), timeout=100.0):
        assert sum(writes.values()) == 2 * 7 + 1
