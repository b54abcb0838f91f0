"""``GroupedMLP`` written out: a loop over experts in plain PyTorch, and the splits that tests run it with."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from modules import PLAIN_ACTIVATIONS
from torch import Tensor

from maingrad.te_integration import GroupedMLP

__all__ = ["FFN", "HIDDEN", "LAYOUTS", "SPLITS", "Batch", "batch_of", "exact_grads", "make_experts", "plain_experts"]

HIDDEN = 6
FFN = 10

# Rows of each expert, rows of padding behind the last.
SPLITS: dict[str, tuple[list[int], int]] = {
    "uneven": ([3, 0, 5, 1], 0),
    "padded": ([3, 0, 5, 1], 256),
    "all to one": ([0, 0, 9, 0], 2),
    "no rows": ([0, 0, 0, 0], 0),
    "padding alone": ([0, 0, 0, 0], 5),
    "tiles and more": ([130, 17, 0, 64], 3),
}

# Which of weights and biases are packed.
LAYOUTS: dict[str, dict[str, Any]] = {
    "discrete": {},
    "packed": {"single_grouped_weight": True, "single_grouped_bias": True},
    "packed weights": {"single_grouped_weight": True},
    "packed weights, no bias": {"single_grouped_weight": True, "bias": False},
    "discrete, no bias": {"bias": False},
    "discrete, scaled bias": {"scale_bias": True},
    "packed, scaled bias": {"single_grouped_weight": True, "single_grouped_bias": True, "scale_bias": True},
}


class Batch(NamedTuple):
    """x [T, HIDDEN], whose pad rows are NaN, the rows of each expert, and a probability for each row."""

    x: Tensor
    splits: Tensor
    probs: Tensor

    @property
    def filled(self) -> int:
        """Rows that are no padding."""
        return int(self.splits.sum())


def batch_of(
    splits: Sequence[int],
    padding: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 1,
    split_dtype: torch.dtype = torch.int64,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(splits) + padding
    x, probs = torch.randn(rows, HIDDEN, generator=generator), torch.rand(rows, generator=generator)
    x[sum(splits) :] = float("nan")
    return Batch(
        x.to(device, dtype).requires_grad_(),
        torch.tensor(splits, dtype=split_dtype, device=device),
        probs.to(device, torch.promote_types(dtype, torch.float32)).requires_grad_(),
    )


def make_experts(num_experts: int = 4, *, seed: int = 0, **options: Any) -> GroupedMLP:
    torch.manual_seed(seed)
    return GroupedMLP(num_experts, HIDDEN, FFN, **options)


def _of_expert(params: Mapping[str, Tensor], name: str, expert: int) -> Tensor | None:
    packed = params.get(name)
    return params.get(f"{name}{expert}") if packed is None else packed[expert]


def plain_experts(
    params: Mapping[str, Tensor],
    batch: Batch,
    *,
    activation: str = "swiglu",
    activation_params: Mapping[str, float] | None = None,
    scale_bias: bool = False,
) -> Tensor:
    """[T, HIDDEN], with zeros in pad rows."""
    outputs, start = [], 0
    for expert, rows in enumerate(batch.splits.tolist()):
        x, probs = batch.x[start : start + rows], batch.probs[start : start + rows, None].to(batch.x.dtype)
        start += rows
        w1, b1, w2, b2 = (
            _of_expert(params, name, expert) for name in ("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias")
        )
        h = x @ w1.t() + (0 if b1 is None else b1)
        a = PLAIN_ACTIVATIONS[activation](h, **(activation_params or {})) * probs
        outputs.append(a @ w2.t() + (0 if b2 is None else b2 * probs if scale_bias else b2))
    return torch.cat([*outputs, batch.x.new_zeros(batch.x.shape[0] - start, HIDDEN)])


def exact_grads(
    module: GroupedMLP, batches: Sequence[Batch], weights_of_outputs: Sequence[Tensor], **options: Any
) -> tuple[list[Tensor], list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Outputs, gradients of inputs and of probabilities, and summed parameter gradients of ``(y * w).sum()``, in fp64.

    A parameter that needs a gradient and that no row reached has zeros.
    """
    params = {name: p.detach().double().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    doubled = [Batch(b.x.detach().double().requires_grad_(), b.splits, b.probs.detach().double().requires_grad_())
               for b in batches]  # fmt: skip
    outputs = [plain_experts(params, b, **options) for b in doubled]
    for output, weight in zip(outputs, weights_of_outputs, strict=True):
        if output.requires_grad:
            (output * weight.double()).sum().backward()

    def grad_of(tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

    return (
        [output.detach() for output in outputs],
        [grad_of(b.x) for b in doubled],
        [grad_of(b.probs) for b in doubled],
        {name: grad_of(p) for name, p in params.items() if p.requires_grad},
    )
