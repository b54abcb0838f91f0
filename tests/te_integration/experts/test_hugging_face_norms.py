"""Hugging Face's experts whose rows are scaled apart from the gate: by other activations, and by a norm behind."""

import itertools

import pytest
import torch
from expert_models import tiny
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import convert_linears

WIDTH = 32


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_scale_what_the_norm_gives(name: str, dtype: torch.dtype) -> None:
    """And no bias before it."""
    model = tiny(name, layers=1)
    experts = model.model.layers[0].mlp.experts
    experts.has_post_expert_norm, experts.post_expert_norm = True, nn.LayerNorm(WIDTH)
    nn.init.normal_(experts.post_expert_norm.weight)
    convert_linears(model.to(dtype))
    wrapper = DistributedDataParallel(model)
    leaves = x, probs = torch.randn(5, WIDTH, dtype=dtype, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    index = torch.tensor([[0, 1], [1, 3], [3, 0], [2, 0], [3, 1]])

    def product(rows: Tensor, name: str, expert: Tensor) -> Tensor:
        weight = getattr(experts, name)[expert]
        y = rows @ (weight if experts.is_transposed else weight.t())
        return y + getattr(experts, f"{name}_bias")[expert] if experts.has_bias else y

    expected = [torch.zeros(WIDTH) for _ in range(5)]
    for token, choice in itertools.product(range(5), range(2)):
        expert = index[token, choice]
        activated = experts._apply_gate(product(x[token, None], "gate_up_proj", expert))
        normed = experts.post_expert_norm(product(activated, "down_proj", expert))[0]
        expected[token] = expected[token] + probs[token, choice] * normed
    y = experts(x, index, probs)
    assert y.dtype is dtype and wrapper.is_clear
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.05}
    torch.testing.assert_close(y.float(), torch.stack(expected), **tolerance)
    weights = torch.randn(5, WIDTH)
    found = torch.autograd.grad((y * weights).sum(), leaves)
    wanted = torch.autograd.grad((torch.stack(expected) * weights).sum(), leaves)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= (1e-4 if dtype is torch.float32 else 0.05) * other.norm()


@pytest.mark.parametrize("scaled", [True, False])
def test_probabilities_in_fp32_scale_rows_in_bf16(scaled: bool) -> None:
    """Of an activation that has no kernel of its own: the second product takes bf16."""
    model = tiny("mixtral", layers=1)
    experts = model.model.layers[0].mlp.experts
    experts.act_fn = nn.GELU()
    x, index = torch.randn(6, WIDTH), torch.arange(12).remainder(4).view(6, 2)
    probs = torch.rand(6, 2) if scaled else torch.ones(6, 2)
    expected = experts(x, index, probs)
    convert_linears(model.bfloat16())
    found = experts(x.bfloat16(), index, probs)
    assert found.dtype is torch.bfloat16
    assert (found - expected).norm() <= 0.05 * expected.norm()
