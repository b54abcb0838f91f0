"""Megatron-core's layers with sequence parallelism under our wrapper, finished as its schedules do, on CPUs.

Runs where ``megatron.core`` is installed. docs/reference/environment.md says which version was tested.
"""

import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch
from gloo import run_ranks
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel, DistributedDataParallelConfig, DistributedOptimizer
from maingrad.te_integration import convert_linears
from maingrad.te_integration.pipeline import finalize_model_grads

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")

WORDS, WIDTH, HIDDEN, LENGTH, HEADS = 16, 8, 12, 4, 2


class Plain(nn.Module):
    """An embedding, a block of two layers whose heads are normalised, a norm, and a head that is a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.q_layernorm, self.head = nn.LayerNorm(HIDDEN // HEADS), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        hidden = _first(self.up(self.norm(x)))
        heads = self.q_layernorm(hidden.unflatten(-1, (-1, HIDDEN // HEADS)))
        return _first(self.head(x + _first(self.down(heads.flatten(-2).tanh()))))

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # Megatron's layers return their bias too


class Cut(Plain):
    """The same with Megatron-core's layers; with ``sequence_parallel`` each rank has a part of the sequence between."""

    def __init__(self, sequence_parallel: bool) -> None:
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
        from megatron.core.transformer import TransformerConfig

        super().__init__()
        whole = {name: param.detach().clone() for name, param in self.named_parameters()}
        self.config = TransformerConfig(
            num_layers=1,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=2,
            sequence_parallel=sequence_parallel,
            qk_layernorm=True,
        )
        self.pre_process, self.share_embeddings_and_output_weights = True, False
        given: dict[str, Any] = {"config": self.config, "init_method": nn.init.xavier_normal_}
        self.embedding = VocabParallelEmbedding(WORDS, WIDTH, reduce_scatter_embeddings=sequence_parallel, **given)
        self.up = ColumnParallelLinear(WIDTH, HIDDEN, gather_output=False, **given)
        rows = {"bias": True, "input_is_parallel": True, "skip_bias_add": False}
        self.down = RowParallelLinear(HIDDEN, WIDTH, **rows, **given)
        self.head = ColumnParallelLinear(WIDTH, WORDS, gather_output=False, **given)
        for param in self.norm.parameters():
            param.sequence_parallel = sequence_parallel
        with torch.no_grad():
            for name, param in self.named_parameters():
                param.copy_(own_part(whole[name], param))

    def embedded(self, tokens: Tensor) -> Tensor:
        # Where the embedding scatters the sequence, it takes [rows, sequence] and transposes.
        return self.embedding(tokens.t() if self.config.sequence_parallel else tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        logits: Tensor = gather_from_tensor_model_parallel_region(super().forward(tokens))
        return logits


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """The slice of a whole parameter that this tensor-parallel rank holds."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    for dim, size in enumerate(like.shape):
        whole = whole.narrow(dim, rank * size, size) if whole.shape[dim] != size else whole
    return whole


def batch(step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randint(WORDS, (LENGTH, replica + 1), generator=generator)  # rows of tokens, as Megatron has them


def loss_of(model: nn.Module, tokens: Tensor, reduction: str = "mean") -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction=reduction)


def in_a_mesh(test: Any, *args: Any) -> Any:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    try:
        with mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")):  # for their buffers
            ranks = parallel_state.get_tensor_model_parallel_group()
            return test(parallel_state.get_data_parallel_group(), ranks, *args)
    finally:
        parallel_state.destroy_model_parallel()


def made(replicas: Any, ranks: Any, sequence_parallel: bool, **config: Any) -> tuple[Any, list[nn.Parameter]]:
    inner = Cut(sequence_parallel)
    for param in inner.q_layernorm.parameters():
        param.sequence_parallel = True
    convert_linears(inner)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, **config)
    return DistributedDataParallel(inner, config, process_group=replicas, tensor_parallel_group=ranks), inner


def errors(
    replicas: Any, ranks: Any, sequence_parallel: bool, zero1: bool, per_token: bool, theirs: bool = False
) -> dict[str, float]:
    """Of each parameter after two steps, relative to plain PyTorch on all batches."""
    model, inner = made(
        replicas, ranks, sequence_parallel, use_distributed_optimizer=zero1, calculate_per_token_loss=per_token
    )
    reference, reduction = Plain(), "sum" if per_token else "mean"
    optimizer: Any = (
        DistributedOptimizer(model, optimizer_class=torch.optim.SGD, lr=0.5, max_grad_norm=0.5)
        if zero1
        else torch.optim.SGD(inner.parameters(), lr=0.5)
    )
    stock = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(2):
        own = batch(step, replicas.rank())
        loss_of(model, own, reduction).backward()
        finish = finalize_model_grads
        if theirs:
            from megatron.core.distributed import finalize_model_grads as finish

            inner.config.qk_layernorm = False  # by which it would sum the norm of the heads again
        finish([model], torch.tensor(own.numel()) if per_token else None)
        whole = [batch(step, replica) for replica in range(replicas.size())]
        divisor = sum(each.numel() for each in whole) if per_token else len(whole)
        for tokens in whole:
            (loss_of(reference, tokens, reduction) / divisor).backward()
        if zero1:
            nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        else:
            model.expose_grads()
        for each in (optimizer, stock):
            each.step()
            each.zero_grad()
        model.zero_grad_buffer()
    whole_params = dict(reference.named_parameters())
    return {
        name: float((param.detach() - own_part(whole_params[name].detach(), param)).abs().max())
        for name, param in inner.named_parameters()
    }


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_megatron_s_layers_are_finished_as_plain_ones(sequence_parallel: bool, zero1: bool, per_token: bool) -> None:
    for found in run_ranks(in_a_mesh, 4, errors, sequence_parallel, zero1, per_token, timeout=100.0):
        assert len(found) == 11
        assert max(found.values()) < 1e-6, found


@pytest.mark.parametrize("zero1", [False, True])
def test_their_function_is_right_where_it_has_nothing_to_sum(zero1: bool) -> None:
    for found in run_ranks(in_a_mesh, 4, errors, True, zero1, False, True, timeout=100.0):
        assert max(found.values()) < 1e-6, found


def with_their_function(replicas: Any, ranks: Any) -> str:
    from megatron.core.distributed import finalize_model_grads as theirs

    model, _ = made(replicas, ranks, sequence_parallel=True)
    loss_of(model, batch(0, 0)).backward()
    with pytest.raises(AttributeError) as raised:
        theirs([model])
    return str(raised.value)


def test_their_function_does_not_sum_a_second_time() -> None:
    for message in run_ranks(in_a_mesh, 4, with_their_function, timeout=100.0):
        assert "config.finalize_model_grads_func = maingrad.te_integration.pipeline.finalize_model_grads" in message


def with_unmarked_norms(replicas: Any, ranks: Any) -> str:
    with pytest.raises(ValueError, match="set sequence_parallel = True on it before wrapping") as raised:
        DistributedDataParallel(Cut(False), process_group=replicas, tensor_parallel_group=ranks)
    return str(raised.value)


def test_norms_of_heads_need_their_mark() -> None:
    for message in run_ranks(in_a_mesh, 4, with_unmarked_norms, timeout=100.0):
        assert message.startswith("'q_layernorm.weight' norms the heads of this tensor-parallel rank")
