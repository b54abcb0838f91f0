"""Steps and parts of square linear layers under recipes, beside Transformer Engine where it is installed."""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....ddp import DistributedDataParallel
from ....ddp.contract.main_grad import accumulator_of
from ....kernels.quantized import quantize_both, scaled_wgrad_accumulate
from ....kernels.wgrad import wgrad_accumulate
from ....te_integration import Linear
from .rows import FORMS, RECIPES, PartRow, Parts, RecipesBench

__all__ = ["layer_step", "linear_parts", "linear_steps"]


def linear_steps(bench: RecipesBench, features: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """One step of a square layer, by its form."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    shape = bench.num_microbatches, bench.num_tokens, features
    inputs = [x.requires_grad_() for x in torch.randn(*shape, **options)]
    grads = list(torch.randn(*shape, **options))
    weight = torch.randn(features, features, **options) / features**0.5
    model = DistributedDataParallel(Linear(features, features, bias=False, fuse_wgrad_accumulation=True, **options))
    forms = {form: layer_step(model, weight, inputs, grads, around) for form, around in FORMS.items()}
    return forms | _transformer_engine(weight, inputs, grads)


def layer_step(
    model: DistributedDataParallel,
    weight: Tensor,
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    around: Callable[[], AbstractContextManager[Any]],
    *others: Tensor,
    **first: bool,
) -> Callable[[], Tensor]:
    """One step of ``model``, whose forwards run in ``around()``; it returns the weight's accumulator.

    others  what the layer takes beside the input
    first   the layer's argument that marks a first microbatch
    """
    (parameter,) = model.parameters()
    with torch.no_grad():
        parameter.copy_(weight)

    def step() -> Tensor:
        model.zero_grad_buffer()
        for number, (x, dy) in enumerate(zip(inputs, grads, strict=True)):
            x.grad = None
            with model.no_sync():
                with around():
                    y = model(x, *others, **dict.fromkeys(first, number == 0))
                y.backward(dy)
        return accumulator_of(parameter, "bench recipes")

    return step


def _transformer_engine(
    weight: Tensor, inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """Steps of Transformer Engine's ``Linear``, where it is installed, in our wrapper."""
    if importlib.util.find_spec("transformer_engine") is None:
        return {}
    import transformer_engine.pytorch as te  # type: ignore[import-not-found]
    from transformer_engine.common import recipe as recipes  # type: ignore[import-not-found]

    features = weight.shape[0]
    found = {}
    for name in (None, "Float8CurrentScaling", "Float8BlockScaling"):
        layer = te.Linear(
            features,
            features,
            bias=False,
            params_dtype=torch.bfloat16,
            device=weight.device,
            fuse_wgrad_accumulation=True,
        )
        around = nullcontext if name is None else partial(te.autocast, enabled=True, recipe=getattr(recipes, name)())
        found[f"Transformer Engine, {name or 'bf16'}"] = layer_step(
            DistributedDataParallel(layer), weight, inputs, grads, around, is_first_microbatch=True
        )
    return found


def linear_parts(bench: RecipesBench, features: int, device: torch.device) -> list[PartRow]:
    """The quantiser and the weight gradient of a square layer."""
    x = torch.randn(bench.num_tokens, features, device=device, dtype=torch.bfloat16)
    main_grad = torch.zeros(features, features, device=device)
    parts = Parts(f"{features}", x, "x", flops=2 * bench.num_tokens * features**2)
    parts.product("bf16 weight gradient, later", lambda: wgrad_accumulate(x, x, main_grad))
    for recipe in RECIPES:
        name = type(recipe).__name__
        of_input, of_grad = recipe.spec("input", columns=False), recipe.spec("grad", columns=True)
        parts.quantiser(f"{name}, quantiser, both copies", x, of_input, partial(quantize_both, x, of_input, of_input))
        _, right = quantize_both(x, None, of_input)
        _, left = quantize_both(x, None, of_grad)
        assert left is not None and right is not None
        for moment, overwrite in (("first", True), ("later", False)):
            run = partial(scaled_wgrad_accumulate, left, right, main_grad, overwrite=overwrite)
            parts.product(f"{name}, weight gradient, {moment}", run)
    return parts.rows
