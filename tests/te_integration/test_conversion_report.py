"""``Conversion``: which share of the FLOPs of weight gradients is fused, and whose parameters the others are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maingrad.te_integration import GroupedLinear, GroupedMLP, LayerNormMLP, Linear, convert_linears


@pytest.mark.parametrize(("frozen", "share"), [((), 2 / 3), (("0.weight",), 1 / 2), (("2.weight",), 1.0)], ids=str)
def test_the_fused_share_is_of_the_weights_that_train(frozen: tuple[str, ...], share: float) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), Own())
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    assert convert_linears(model).fused_share == pytest.approx(share)


def test_of_a_model_without_weights_all_is_fused() -> None:
    assert convert_linears(nn.Tanh()).fused_share == 1.0
    assert convert_linears(nn.Linear(2, 2).requires_grad_(False)).fused_share == 1.0


def test_a_layer_of_ours_that_stays_unfused_has_no_share() -> None:
    model = nn.Sequential(Linear(8, 8, bias=False), Linear(8, 8, bias=False))
    model[0].forward = lambda x: x
    conversion = convert_linears(model)
    assert conversion.converted == ("1",) and conversion.fused_share == 0.5


def test_attention_of_a_class_of_its_own_is_named_by_its_matrices_too() -> None:
    attention = type("Attention", (nn.MultiheadAttention,), {})(8, 2)
    assert convert_linears(attention).skipped[""].startswith("Attention: in_proj_weight is read as a matrix")


class Positions(nn.Module):
    """Parameters that no known module multiplies, with and without two dims."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.position_bias = nn.Parameter(torch.eye(8))
        self.gain = nn.Parameter(torch.ones(8))


def test_parameters_are_named_and_counted_once() -> None:
    """Tied ones too; lookups, and layers that have no size yet, have no share."""
    model = Positions()
    model.tied = Positions()
    model.tied.weight = model.weight
    model.first, model.second = (nn.Linear(8, 8, bias=False) for _ in range(2))
    model.second.weight = model.first.weight
    model.bag, model.table = nn.EmbeddingBag(4, 8), nn.Embedding(4, 8)
    model.convolution, model.lazy = nn.LazyConv2d(4, 3), nn.LazyLinear(4)
    conversion = convert_linears(model)
    assert conversion.left_out == {
        "weight": "Positions uses it by itself, shape (8, 8)",
        "position_bias": "Positions uses it by itself, shape (8, 8)",
        "tied.position_bias": "Positions uses it by itself, shape (8, 8)",
    }
    assert conversion.fused_share == pytest.approx(1 / 4)


def test_all_weights_of_a_module_count_and_so_does_what_is_beside_them() -> None:
    """An adapter's matrices in a subclass of a linear layer, for example."""
    adapted = type("Adapted", (nn.Linear,), {})(8, 8, bias=False)
    adapted.down, adapted.down_bias = nn.Parameter(torch.ones(2, 8)), nn.Parameter(torch.ones(2, 8))
    conversion = convert_linears(nn.Sequential(LayerNormMLP(8, 16), GroupedMLP(2, 8, 4), adapted))
    assert conversion.left_out == {"2.down": "Adapted uses it by itself, shape (2, 8)"}
    mlp, experts = 2 * 8 * 16, (2 * 8 * 4 + 4 * 8) * 2 / 2
    assert conversion.fused_share == pytest.approx((mlp + experts) / (mlp + experts + 8 * 8 + 2 * 8))


@pytest.mark.parametrize("name", ["num_experts_per_tok", "moe_topk", "top_k_experts"])
@pytest.mark.parametrize(
    ("chosen", "share"),
    [(1, 1 / 2), (2, 2 / 3), (9, 4 / 5), ([1, 3], 2 / 3), ((1, 1, 4), 2 / 3), (None, 1 / 2)],
    ids=str,
)
@pytest.mark.sampled(18)
def test_experts_count_for_the_tokens_that_come_to_them(name: str, chosen: Any, share: float) -> None:
    """No token goes to more experts than there are; of a number for each layer the mean counts."""
    experts = GroupedLinear(4, 8, 8, single_grouped_weight=True)
    experts.config = type("Config", (), {name: chosen})
    model = nn.Sequential(experts, Positions())
    model[1].position_bias = None
    assert convert_linears(model).fused_share == pytest.approx(share)


def test_experts_that_stay_with_autograd_count_for_the_tokens_that_come_to_them() -> None:
    pytest.importorskip("transformers")
    from expert_models import tiny

    model: Any = tiny("mixtral", layers=1)
    experts = model.model.layers[0].mlp.experts
    experts._apply_gate = lambda x: x
    conversion = convert_linears(model)
    linears = [model.get_submodule(name) for name in conversion.converted]
    fused = sum(layer.weight.numel() for layer in linears if not isinstance(layer, nn.Embedding))
    others = sum(model.get_parameter(name).numel() for name in conversion.left_out)
    of_experts = sum(weight.numel() for weight in experts.parameters()) * 2 / 4
    assert conversion.fused_share == pytest.approx(fused / (fused + others + of_experts))
