"""Units whose modules are compiled: gathers and hooks stay outside of the graph."""

import pytest
import torch
from torch import Tensor, nn

from maingrad.fsdp import MixedPrecisionPolicy, fully_shard
from maingrad.launch import simulate


class Block(nn.Module):
    """A layer around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


def train(compiled: bool, placements: str, dtype: torch.dtype | None) -> list[Tensor]:
    """Weights after three steps of two microbatches."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(3)])
    for block in (*model, model):
        if compiled and block is not model:
            block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block, placements=placements, mixed_precision=MixedPrecisionPolicy(param_dtype=dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + torch.distributed.get_rank()))
        with model.no_sync():
            model(x).square().mean().backward()
        model(x + 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.full_tensor() for value in model.state_dict().values()]


@pytest.mark.parametrize(
    "placements, dtype",
    [("zero3", None), pytest.param("zero2", torch.bfloat16, marks=pytest.mark.slow)],
    ids=["zero3", "zero2"],
)
def test_compiled_blocks_train_the_same(placements: str, dtype: torch.dtype | None) -> None:
    eager, compiled = (simulate(train, 2, compiled, placements, dtype)[0] for compiled in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(eager, compiled, strict=True))
