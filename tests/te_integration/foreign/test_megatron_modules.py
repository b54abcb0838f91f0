"""Megatron-core's own tensor-parallel modules under our wrappers, on CPUs.

Runs where ``megatron.core`` is installed. docs/reference/environment.md says which version was tested.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo import run_ranks
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.fsdp import fully_shard
from maingrad.te_integration import convert_linears

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")

WORDS, WIDTH, HIDDEN = 16, 8, 12
NAMES = ("embedding", "up", "down", "head")


class Block(nn.Module):
    """An embedding, a column-parallel and a row-parallel layer, and a plain head, each from a factory."""

    def __init__(self, make: Callable[[str, int, int], nn.Module]) -> None:
        super().__init__()
        sizes = {"embedding": (WORDS, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "head": (WIDTH, WORDS)}
        for name in NAMES:
            self.add_module(name, make(name, *sizes[name]))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in (self.up, torch.tanh, self.down, self.head):
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x  # Megatron's layers return their bias too
        return x


def plain(name: str, first: int, second: int) -> nn.Module:
    return nn.Embedding(first, second) if name == "embedding" else nn.Linear(first, second)


def megatrons(name: str, first: int, second: int) -> nn.Module:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=2,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tp_size(),
    )
    given: dict[str, Any] = {"config": config, "init_method": nn.init.xavier_normal_}
    if name == "embedding":
        return VocabParallelEmbedding(first, second, **given)
    if name == "up":
        return ColumnParallelLinear(first, second, gather_output=False, **given)
    if name == "down":
        return RowParallelLinear(first, second, bias=True, input_is_parallel=True, skip_bias_add=False, **given)
    return nn.Linear(first, second)


def tp_size() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_tensor_model_parallel_world_size())


def batch(step: int, replica: int) -> Tensor:
    return torch.randint(WORDS, (6,), generator=torch.Generator().manual_seed(10 * step + replica))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens), tokens)


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """The slice of a whole parameter that this tensor-parallel rank holds."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    for dim, size in enumerate(like.shape):
        whole = whole.narrow(dim, rank * size, size) if whole.shape[dim] != size else whole
    return whole


def train(wrapper: str, tp: int) -> list[tuple[str, float]]:
    """On each process: the error of each parameter after two steps, relative to plain PyTorch on all batches."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    try:
        return steps_beside_plain(wrapper, parallel_state.get_data_parallel_group())
    finally:
        parallel_state.destroy_model_parallel()


def steps_beside_plain(wrapper: str, replicas: Any) -> list[tuple[str, float]]:
    torch.manual_seed(0)
    reference, inner = Block(plain), Block(megatrons)
    whole = dict(reference.named_parameters())
    with torch.no_grad():
        for name, param in inner.named_parameters():
            param.copy_(own_part(whole[name], param))
    convert_linears(inner)
    if wrapper == "fully_shard":
        model: Any = inner
        fully_shard(inner, mesh=replicas)
        optimizer: Any = torch.optim.SGD(inner.parameters(), lr=0.5)
    else:
        zero1 = wrapper == "zero1"
        config = DistributedDataParallelConfig(use_distributed_optimizer=zero1, overlap_grad_reduce=True)
        model = DistributedDataParallel(inner, config, process_group=replicas)
        optimizer = (
            DistributedOptimizer(model, optimizer_class=torch.optim.SGD, lr=0.5)
            if zero1
            else torch.optim.SGD(inner.parameters(), lr=0.5)
        )
    stock = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(2):
        loss_of(model, batch(step, replicas.rank())).backward()
        for replica in range(replicas.size()):
            (loss_of(reference, batch(step, replica)) / replicas.size()).backward()
        if wrapper != "fully_shard":
            model.finish_grad_sync()
        if wrapper == "ddp":
            model.expose_grads()
        for each in (optimizer, stock):
            each.step()
            each.zero_grad()
        if wrapper != "fully_shard":
            model.zero_grad_buffer()
    if wrapper == "fully_shard":
        with inner.unsharded():
            return errors(inner, whole)
    return errors(inner, whole)


def errors(inner: nn.Module, whole: dict[str, Tensor]) -> list[tuple[str, float]]:
    return [
        (name, float((param.detach() - own_part(whole[name].detach(), param)).abs().max()))
        for name, param in inner.named_parameters()
    ]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("wrapper", ["ddp", "zero1", "fully_shard"])
def test_megatron_s_layers_train_as_plain_ones(wrapper: str, tp: int) -> None:
    for found in run_ranks(train, 2, wrapper, tp, timeout=100.0):
        assert len(found) == 7
        assert max(error for _, error in found) < 1e-6, found
