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
from ....te_integration import Linear, autocast
from .rows import RECIPES, PartRow, RecipesBench
from .timing import time_captured

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
    forms = {"bf16": layer_step(model, weight, inputs, grads, nullcontext)}
    for recipe in RECIPES:
        forms[type(recipe).__name__] = layer_step(model, weight, inputs, grads, partial(autocast, recipe=recipe))
    forms.update(_transformer_engine(weight, inputs, grads))
    return forms


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
    copied = torch.empty_like(x)
    main_grad = torch.zeros(features, features, device=device)
    flops = 2 * bench.num_tokens * features**2
    microseconds = time_captured(lambda: copied.copy_(x))
    bandwidth = 4 * x.numel() / microseconds
    rows = [PartRow(layer=f"{features}", part="copy of x", microseconds=microseconds, rate=1.0)]

    def product(part: str, run: Callable[[], Any]) -> None:
        microseconds = time_captured(run)
        rows.append(PartRow(layer=f"{features}", part=part, microseconds=microseconds, rate=flops / microseconds / 1e6))

    product("bf16 weight gradient, later", lambda: wgrad_accumulate(x, x, main_grad))
    for recipe in RECIPES:
        name = type(recipe).__name__
        of_input, of_grad = recipe.spec("input", columns=False), recipe.spec("grad", columns=True)
        microseconds = time_captured(lambda spec=of_input: quantize_both(x, spec, spec))  # type: ignore[misc]
        nbytes = (6 if of_input.block is None else 4) * x.numel()  # one scale for the tensor: x is read twice
        rows.append(
            PartRow(
                layer=f"{features}",
                part=f"{name}, quantiser, both copies",
                microseconds=microseconds,
                rate=nbytes / microseconds / bandwidth,
            )
        )
        _, right = quantize_both(x, None, of_input)
        _, left = quantize_both(x, None, of_grad)
        assert left is not None and right is not None
        for moment, overwrite in (("first", True), ("later", False)):
            product(
                f"{name}, weight gradient, {moment}",
                lambda left=left, right=right, overwrite=overwrite: scaled_wgrad_accumulate(  # type: ignore[misc]
                    left, right, main_grad, overwrite=overwrite
                ),
            )
    return rows
