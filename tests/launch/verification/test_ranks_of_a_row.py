"""``verify`` with ranks that compute each row together: plans of torch, attention by ``ulysses``, and mistakes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expert_models import tiny
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from maingrad.launch import ulysses, verify

CUT = ["ddp_tp", "zero1_tp_converted"]
SHARED = ["zero1_cp_converted", "fsdp_cp_converted"]
HEADS, WIDTH, LENGTH = 4, 4, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        dim = HEADS * WIDTH
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (part.unflatten(2, (-1, WIDTH)).transpose(1, 2) for part in (self.q(y), self.k(y), self.v(y)))
        x = x + self.out(ulysses(attend, q, k, v, self.group).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).tanh())


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, HEADS * WIDTH)
        self.places = nn.Embedding(LENGTH, HEADS * WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(HEADS * WIDTH, 32)
        self.part = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.places(torch.arange(length) + self.part * length)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randint(32, (8, LENGTH), generator=draw) for name in ("tokens", "targets")}


def columns_and_rows(found: Any, mesh: DeviceMesh) -> None:
    columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
    for block in found.blocks:
        parallelize_module(block, mesh, columns | {"out": RowwiseParallel(), "down": RowwiseParallel()})


def parts_of_tokens(found: Any, mesh: DeviceMesh) -> None:
    found.part = mesh.get_local_rank()
    for block in found.blocks:
        block.group = mesh.get_group()


@pytest.mark.in_turn
def test_right_plans_are_right():
    found = verify(model(), batch(), tensor_parallel=columns_and_rows, context_parallel=parts_of_tokens)
    assert found.ok, found
    rows = {row.way: row for row in found.results}
    assert {*CUT, *SHARED} < set(rows)
    assert rows["zero1_tp_converted"].fused_writes == rows["zero1_converted"].fused_writes > 0


@pytest.mark.in_turn
def test_ways_without_a_plan_are_left_out_or_refused():
    found = verify(model(), batch(), ways=["ddp"])
    assert [row.way for row in found.results] == ["ddp"]
    assert not {*CUT, *SHARED} & {row.way for row in verify(model(), batch()).results}
    with pytest.raises(ValueError, match="way 'zero1_cp_converted' needs context_parallel="):
        verify(model(), batch(), ways=SHARED)


def keeps_no_sum(found: Any, mesh: DeviceMesh) -> None:
    """Of the second product's parts; nothing that torch's plan could leave out."""
    columns_and_rows(found, mesh)
    for block in found.blocks:
        block.down.register_forward_hook(lambda module, args, y: y / mesh.size())


def forgets_its_place(found: Any, mesh: DeviceMesh) -> None:
    parts_of_tokens(found, mesh)
    found.part = 0


def attends_to_its_part(found: Any, mesh: DeviceMesh) -> None:
    found.part = mesh.get_local_rank()


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("ways", "plan"),
    [
        (CUT, {"tensor_parallel": keeps_no_sum}),
        (SHARED, {"context_parallel": forgets_its_place}),
        (SHARED, {"context_parallel": attends_to_its_part}),
    ],
)
def test_wrong_plans_are_found(ways: list[str], plan: dict[str, Callable[..., None]]):
    found = verify(model(), batch(), ways=ways, **plan)
    assert [row.ok for row in found.results] == [False, False], found
    assert all(row.grad_error > 1e-2 for row in found.results)


@pytest.mark.in_turn
def test_tokens_that_do_not_divide():
    odd = {name: part[:, :7] for name, part in batch().items()}
    found = verify(model(), odd, ways=SHARED, context_parallel=parts_of_tokens)
    assert not found.ok
    assert "rows of 7 tokens cannot be divided over 2 context-parallel ranks" in str(found).replace(
        "\n             ", " "
    )


@pytest.mark.in_turn
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_model_of_hugging_face_by_its_own_plan(family: str):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads)
    torch.manual_seed(0)
    found = getattr(transformers, f"{family}ForCausalLM")(config)
    ids = torch.randint(64, (8, 6), generator=torch.Generator().manual_seed(1))
    verified = verify(found, {"input_ids": ids, "labels": ids}, ways=CUT, tensor_parallel="tp_plan")
    assert verified.ok, verified
    assert verified.results[1].fused_writes > 0


# ---- Experts over ranks. ----


@pytest.mark.in_turn
def test_experts_of_hugging_face_are_shared_out() -> None:
    tokens = torch.randint(96, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    result = verify(tiny("mixtral"), batch, ways=["zero1_ep_converted", "fsdp_ep_converted"])
    assert result.ok
    assert [row.way for row in result.results] == ["zero1_ep_converted", "fsdp_ep_converted"]
    assert all(row.fused_writes > 0 for row in result.results)


@pytest.mark.parametrize(("make", "ranks"), [(lambda: nn.Linear(4, 4), 2), (lambda: tiny("mixtral"), 3)])
def test_ways_with_experts_need_some_that_two_ranks_divide(make: Callable[[], nn.Module], ranks: int) -> None:
    with pytest.raises(ValueError, match="needs experts of Hugging Face, whose number two ranks divide"):
        verify(make(), torch.zeros(6, 4), ranks=ranks, ways=["ddp", "zero1_ep_converted"])
