"""What a compiler takes of modules with experts into its graph, run by Python: all that the eager way computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_models import tiny
from torch import Tensor, nn

from maingrad.ddp import DistributedDataParallel
from maingrad.te_integration import GroupedLinear, GroupedMLP, convert_linears

EXPERTS, ROWS = 3, 6


def hugging_face(name: str) -> Any:
    experts = tiny(name, layers=1).model.layers[0].mlp.experts
    convert_linears(experts)
    return experts


MODULES: dict[str, Callable[[], nn.Module]] = {
    "scaled biases": lambda: GroupedLinear(EXPERTS, 8, 5, scale_bias=True),
    "packed": lambda: GroupedLinear(
        EXPERTS, 8, 5, scale_bias=True, single_grouped_weight=True, single_grouped_bias=True
    ),
    "two layers": lambda: GroupedMLP(EXPERTS, 8, 5),
    "two layers, fused": lambda: GroupedMLP(EXPERTS, 8, 5, fuse_wgrad_accumulation=True),
    "two layers, scaled biases": lambda: GroupedMLP(EXPERTS, 8, 5, scale_bias=True),
    "mixtral": lambda: hugging_face("mixtral"),
    "gpt_oss": lambda: hugging_face("gpt_oss"),  # transposed weights, and biases
}


@pytest.mark.parametrize("name", MODULES)
def test_the_traced_form_computes_what_the_eager_one_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(traced: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = MODULES[name]()
        for param in module.parameters():
            nn.init.normal_(param, std=0.3)
        model = DistributedDataParallel(module)
        arguments: tuple[Tensor, ...]
        if isinstance(module, GroupedLinear | GroupedMLP):
            x = torch.randn(ROWS, 8, requires_grad=True)
            arguments = torch.tensor([1, 2, 3]), torch.rand(ROWS, requires_grad=True)
        else:
            x = torch.randn(ROWS, module.down_proj.shape[-1 if module.is_transposed else -2], requires_grad=True)
            arguments = torch.arange(2 * ROWS).view(ROWS, 2) % 4, torch.rand(ROWS, 2, requires_grad=True)
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: traced)
            y = module(x, *arguments)
        y.square().sum().backward()
        model.finish_grad_sync()
        assert x.grad is not None and arguments[1].grad is not None
        return [y.detach(), x.grad, arguments[1].grad, *(param.main_grad for param in module.parameters())]

    for found, expected in zip(run(True), run(False), strict=True):
        assert expected.any()
        torch.testing.assert_close(found, expected)
