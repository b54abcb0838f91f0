"""``torch.compile`` of blocks, before or after they become units, and around the model; autocast around it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here may download

import pytest
import torch
import torch.distributed as dist
from sharded_twin import Block, Net, mean_loss, one_backward, shard_blocks, train_beside
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from maingrad.fsdp import MixedPrecisionPolicy, fully_shard
from maingrad.launch import simulate
from maingrad.te_integration import convert_linears


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compile_blocks(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(backend="aot_eager")


def compiled_before(model: nn.Module, **options: Any) -> None:
    compile_blocks(model)
    shard_blocks(model, **options)


def compiled_after(model: nn.Module, **options: Any) -> None:
    shard_blocks(model, **options)
    compile_blocks(model)


def compiled_as_a_whole(model: nn.Module, **options: Any) -> None:
    shard_blocks(model, **options)
    model.compile(backend="aot_eager")


@pytest.mark.parametrize(
    "shard", [compiled_before, pytest.param(compiled_after, marks=pytest.mark.slow), compiled_as_a_whole]
)
@pytest.mark.parametrize("kind", ["zero3", pytest.param("zero1", marks=pytest.mark.slow)])
@pytest.mark.sampled(1)
def test_compiled_modules(kind: str, shard: Any) -> None:
    train_beside(kind, shard=shard, ranks=0, steps=3)


def each_in_autocast(model: nn.Module, batches: Sequence[Tensor]) -> None:
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_loss(model(batch))
        loss.backward()


def all_in_one_autocast(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """The second microbatch may use casts that autocast has cached. torch sums their gradients in bf16."""
    with torch.autocast("cpu", torch.bfloat16):
        one_backward(model, batches)


@pytest.mark.parametrize(("run", "tolerance"), [(each_in_autocast, 1e-6), (all_in_one_autocast, 2**-7)])
@pytest.mark.parametrize("kind", ["zero3", "zero1", "hsdp_zero1"])
@pytest.mark.sampled(1)
def test_autocast(kind: str, run: Any, tolerance: float) -> None:
    train_beside(kind, run=run, dtype=torch.float32, tolerance=tolerance, steps=3)


@pytest.mark.parametrize("placements", ["zero1", "zero3"])
def test_dtypes_of_a_policy(placements: str) -> None:
    """Parameters and inputs in one dtype, gradients in another, outputs in a third."""
    seen: dict[str, Any] = {}

    class Looks(nn.Linear):
        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            seen.update(x=x.dtype, scale=scale.dtype, weight=self.weight.dtype)
            return super().forward(x) * scale

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, grad_dtype=torch.float32, reduce_dtype=torch.bfloat16, output_dtype=torch.float64
    )
    model: Any = fully_shard(Looks(4, 4), placements=placements, mixed_precision=policy)
    output = model(torch.ones(2, 4), scale=torch.ones(4))
    assert set(seen.values()) == {torch.bfloat16}
    assert output.dtype is torch.float64
    output.sum().backward()
    assert model.weight.grad.dtype is torch.float32 and model.weight.dtype is torch.float32
    assert (model.weight.grad == 2).to_local().all()
    fixed: Any = fully_shard(
        Looks(4, 4),
        placements=placements,
        mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
    )
    with pytest.raises(RuntimeError, match="dtype"):
        fixed(torch.ones(2, 4), scale=torch.ones(4))
    assert seen["x"] is torch.float32


@pytest.mark.in_turn
def test_a_block_compiled_before_a_model_that_is_evaluated() -> None:
    model = Net()
    compiled_before(model)
    with torch.inference_mode():
        first = model(torch.ones(2, 5))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)
        assert not torch.equal(model(torch.ones(2, 5)), first)


# ---- Hugging Face's layers, each rank a thread of this process. ----


def losses_of_a_llama(compiled: str, *, fused: bool) -> list[list[float]]:
    """Losses of two iterations of two microbatches, on each of two ranks."""
    size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=2, vocab_size=64, max_position_embeddings=32, use_cache=False, **size)

    def train() -> list[float]:
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        if fused:
            convert_linears(model)
        layers = list(model.model.layers)
        for layer in layers if compiled == "before fully_shard" else ():
            layer.compile(backend="aot_eager")
        for unit in (*layers, model):
            fully_shard(unit)
        for layer in layers if compiled == "after fully_shard" else ():
            layer.compile(backend="aot_eager")
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(2):
            for last in (False, True):
                seed = torch.Generator().manual_seed(10 * step + 2 * dist.get_rank() + last)
                tokens = torch.randint(0, 64, (2, 8), generator=seed)
                with nullcontext() if last else model.no_sync():
                    loss = model(input_ids=tokens, labels=tokens).loss
                    (loss / 2).backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    torch._dynamo.reset()
    return simulate(train, 2)


@pytest.mark.filterwarnings("ignore")  # of transformers and dynamo, about each other
@pytest.mark.parametrize("compiled", ["before fully_shard", pytest.param("after fully_shard", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_compiled_layers_of_hugging_face(compiled: str) -> None:
    plain = losses_of_a_llama("no", fused=False)
    found = losses_of_a_llama(compiled, fused=True)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=1e-5, atol=1e-6)
