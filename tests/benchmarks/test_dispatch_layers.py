"""docs/benchmarks/dispatch_layers.py: exchanges of a layer of experts in forward."""

import torch
import torch.distributed as dist
from dispatch_layers import Layer, LayersBench, Stay
from torch import Tensor

from maingrad.launch import simulate
from maingrad.te_integration import TokenDispatcher

BENCH = LayersBench(num_tokens=8, dim=16, ffn_dim=8, num_experts=4, top_k=2, capacity_factor=1.5)


def test_each_form_of_the_layer_computes_the_same() -> None:
    def forms() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layer, dispatcher = Layer(BENCH, torch.device("cpu")), TokenDispatcher(BENCH.num_experts, dist.group.WORLD)
        with torch.no_grad():
            whole = layer.in_one_piece(dispatcher)
            halves = torch.cat(layer.in_two_halves(dispatcher))
            return whole, halves, layer.beside_a_shared_expert(dispatcher), layer.after_a_shared_expert(dispatcher)

    for whole, halves, beside, after in simulate(forms, 2):
        assert whole.abs().max() > 0 and torch.equal(whole, halves)
        assert torch.equal(beside, after) and not torch.equal(after, whole)


def test_rows_that_stay_are_as_many() -> None:
    def shapes() -> tuple[torch.Size, int, torch.Size]:
        layer = Layer(BENCH, torch.device("cpu"))
        dispatcher = TokenDispatcher(BENCH.num_experts, dist.group.WORLD, Stay(BENCH, 16, torch.device("cpu")))
        with torch.no_grad():
            rows, splits, _, _ = dispatcher.dispatch(*layer.tokens)
            return rows.shape, int(splits.sum()), layer.in_one_piece(dispatcher).shape

    assert simulate(shapes, 2) == [((24, 16), 16, (8, 16))] * 2
