"""``WgradQueue(fill_waits=True)``: what waits is computed while tensor-parallel ranks exchange."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from maingrad.launch import simulate
from maingrad.te_integration import Float8CurrentScaling, Linear, WgradQueue, autocast, delayed_wgrad
from maingrad.te_integration.dense.products import Ranks
from maingrad.te_integration.dense.tensor_parallel import from_rows, to_columns


@pytest.mark.parametrize("sequence_dim", [None, 0])
@pytest.mark.parametrize("exchange", [to_columns, from_rows])
def test_what_waits_is_computed_between_start_and_end_of_an_exchange(
    exchange: Callable[..., Tensor], sequence_dim: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In backward, and not where nothing is exchanged."""
    events: list[str] = []

    def noted(name: str) -> Callable[..., Tensor]:
        def run(ranks: Ranks, x: Tensor, **options: Any) -> Tensor:
            events.append(name)
            return x

        return run

    for name in ("start_sum", "finish_sum", "start_gather", "finish_gather"):
        monkeypatch.setattr(Ranks, name, noted(name))
    x = torch.ones(2, 2, requires_grad=True)
    y = exchange(x, Ranks("", 2, 0, sequence_dim), lambda: events.append("fill"))
    assert "fill" not in events
    events.clear()
    y.sum().backward()
    kind = "sum" if exchange is to_columns else "gather"
    assert events == [f"start_{kind}", *["fill"] * (kind == "sum" or sequence_dim == 0), f"finish_{kind}"]


def fills_of(mode: Any, sequence_parallel: bool, quantised: bool) -> int:
    """How often the queue of a block is asked to fill a wait in one backward."""
    given: Any = {"parallel_mode": mode, "tp_group": dist.group.WORLD, "sequence_parallel": sequence_parallel}
    layer = Linear(32, 32, dtype=torch.bfloat16, **given)
    queue, fills = WgradQueue(fill_waits=True), []
    queue.fill = lambda: fills.append(queue)  # type: ignore[method-assign]
    x = torch.ones(16, layer.weight.shape[1], dtype=torch.bfloat16, requires_grad=True)
    with delayed_wgrad(queue), autocast(enabled=quantised, recipe=Float8CurrentScaling(emulate=True)):
        output = layer(x)
    output.sum().backward()
    return len(fills)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    "mode, sequence_parallel, fills", [("column", False, 1), ("column", True, 1), ("row", False, 0), ("row", True, 1)]
)
def test_layers_fill_their_waits(mode: str, sequence_parallel: bool, fills: int, quantised: bool) -> None:
    assert simulate(fills_of, 2, mode, sequence_parallel, quantised) == [fills] * 2
