"""Steps and parts of grouped layers under recipes.

Legend: E experts, T rows of all experts, N output features, K input features.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ....ddp import DistributedDataParallel
from ....kernels import grouped_dgrad, grouped_linear, grouped_wgrad_accumulate
from ....kernels.quantized import (
    quantize_experts,
    quantize_grouped_both,
    scaled_grouped_product,
    scaled_grouped_wgrad_accumulate,
)
from ....te_integration import GroupedLinear
from ..kernels.problems import GroupedOperands, Shape
from .linear import layer_step
from .rows import FORMS, RECIPES, PartRow, Parts, RecipesBench

__all__ = ["expert_parts", "expert_steps"]


def expert_steps(bench: RecipesBench, shape: Shape, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """One step of a grouped layer with a packed weight, by its form."""
    torch.manual_seed(0)
    num_experts, _, n, k = shape
    operands = GroupedOperands(*shape, torch.bfloat16, device)
    splits = operands.offsets.diff()
    inputs = [torch.randn_like(operands.x).requires_grad_() for _ in range(bench.num_microbatches)]
    grads = [torch.randn_like(operands.dy) for _ in range(bench.num_microbatches)]
    layer = GroupedLinear(
        num_experts,
        k,
        n,
        bias=False,
        fuse_wgrad_accumulation=True,
        single_grouped_weight=True,
        dtype=torch.bfloat16,
        device=device,
    )
    model = DistributedDataParallel(layer)
    weight = operands.weights / k**0.5
    return {form: layer_step(model, weight, inputs, grads, around, splits) for form, around in FORMS.items()}


def expert_parts(shape: Shape, device: torch.device) -> list[PartRow]:
    """The quantisers and the three products of a grouped layer."""
    layer = "x".join(map(str, shape))
    at = GroupedOperands(*shape, torch.bfloat16, device)
    _, rows, n, k = shape
    parts = Parts(layer, at.dy, "dy", flops=2 * rows * n * k, count=4)
    product = parts.product
    product("bf16, forward", lambda: grouped_linear(at.x, at.weights, at.offsets, out=at.y))
    product("bf16, dgrad", lambda: grouped_dgrad(at.dy, at.weights, at.offsets, out=at.dx))
    product("bf16, weight gradient, later", lambda: grouped_wgrad_accumulate(at.dy, at.x, at.grads, at.offsets))
    for recipe in RECIPES:
        name = type(recipe).__name__
        of_input, of_weight = recipe.spec("input", columns=False), recipe.spec("weight", columns=False)
        of_grad = recipe.spec("grad", columns=False)
        quantise_dy = partial(quantize_grouped_both, at.dy, of_grad, of_grad, at.offsets)
        quantise_weights = partial(quantize_experts, at.weights, of_weight, of_weight)
        parts.quantiser(f"{name}, quantiser of dy, both copies", at.dy, of_input, quantise_dy)
        parts.quantiser(f"{name}, quantiser of weights, both copies", at.weights, of_input, quantise_weights)
        (dy, dy_columns), (weights, transposes) = quantise_dy(), quantise_weights()
        x, x_columns = quantize_grouped_both(at.x, of_input, of_input, at.offsets)
        assert x is not None and x_columns is not None and dy is not None and dy_columns is not None
        assert weights is not None and transposes is not None
        product(f"{name}, forward", partial(scaled_grouped_product, x, weights, torch.bfloat16, out=at.y))
        product(f"{name}, dgrad", partial(scaled_grouped_product, dy, transposes, torch.bfloat16, out=at.dx))
        for moment, overwrite in (("first", True), ("later", False)):
            run = partial(scaled_grouped_wgrad_accumulate, dy_columns, x_columns, at.grads, overwrite=overwrite)
            product(f"{name}, weight gradient, {moment}", run)
    return parts.rows
