"""Our modules with products, one name for each, and what they should compute, written out in plain PyTorch."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from maingrad.te_integration import GroupedLinear, GroupedMLP, LayerNormLinear, LayerNormMLP, Linear

__all__ = [
    "ALL_FACTORIES",
    "ALL_WEIGHTS",
    "FACTORIES",
    "FEATURES",
    "HIDDEN",
    "PLAIN_ACTIVATIONS",
    "WEIGHTS",
    "clamped_swiglu",
    "error",
    "exact",
    "make",
    "plain_forward",
]

FEATURES = 8
HIDDEN = 16

FACTORIES: dict[str, Callable[..., Any]] = {
    "Linear": lambda **options: Linear(FEATURES, FEATURES, **options),
    "LayerNormLinear": lambda **options: LayerNormLinear(FEATURES, FEATURES, **options),
    "LayerNormMLP": lambda **options: LayerNormMLP(FEATURES, HIDDEN, **options),
}
WEIGHTS = [
    ("Linear", "weight"),
    ("LayerNormLinear", "weight"),
    ("LayerNormMLP", "fc1_weight"),
    ("LayerNormMLP", "fc2_weight"),
]


class Experts(GroupedLinear):
    """``GroupedLinear`` that gives each expert its share of whatever rows come, and one of them none."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, torch.tensor(shares(x.numel() // x.shape[-1]), device=x.device))


class ExpertMLP(GroupedMLP):
    """``GroupedMLP`` with the same shares, and a probability for each row."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        return super().forward(x, torch.tensor(shares(rows), device=x.device), probabilities(rows).to(x.device))


def shares(rows: int) -> list[int]:
    """Rows of each of three experts."""
    return [rows // 2, 0, rows - rows // 2]


def probabilities(rows: int) -> Tensor:
    """Of each row."""
    return torch.linspace(0.25, 1.0, rows)


# What a module with one or two dense weights can do, these need not: a tied expert, a second derivative.
ALL_FACTORIES: dict[str, Callable[..., Any]] = {
    **FACTORIES,
    "GroupedLinear": lambda **options: Experts(3, FEATURES, FEATURES, **options),
    "packed GroupedLinear": lambda **options: Experts(
        3, FEATURES, FEATURES, single_grouped_weight=True, single_grouped_bias=True, **options
    ),
    "GroupedMLP": lambda **options: ExpertMLP(3, FEATURES, HIDDEN, **options),
    "packed GroupedMLP": lambda **options: ExpertMLP(
        3, FEATURES, HIDDEN, single_grouped_weight=True, single_grouped_bias=True, **options
    ),
}
ALL_WEIGHTS = [
    *WEIGHTS,
    ("GroupedLinear", "weight0"),
    ("GroupedLinear", "weight2"),
    ("packed GroupedLinear", "weight"),
    ("GroupedMLP", "fc1_weight0"),
    ("GroupedMLP", "fc2_weight2"),
    ("packed GroupedMLP", "fc1_weight"),
    ("packed GroupedMLP", "fc2_weight"),
]


def make(kind: str, *, fuse: bool = True, delay: bool = False, seed: int = 0, **options: Any) -> Any:
    """One of them, its weights from ``seed``; norm parameters are random too, so that none is left out unnoticed."""
    torch.manual_seed(seed)
    module = ALL_FACTORIES[kind](fuse_wgrad_accumulation=fuse, delay_wgrad_compute=delay, **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "layer_norm" in name:
                parameter.add_(torch.randn(parameter.shape).to(parameter) * 0.3)
    return module


# ---- What they should compute. ----


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _quick_gelu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-1.702 * x))


def _relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.0)


def _squared_relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * x, 0.0)


def _gated(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: act(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :]


def clamped_swiglu(x: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    gate, linear = x.tensor_split(2, dim=-1)
    gate, linear = torch.minimum(gate, gate.new_tensor(limit)), linear.clamp(-limit, limit)
    return gate / (1 + torch.exp(-alpha * gate)) * (linear + 1)


PLAIN_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "geglu": _gated(_gelu),
    "glu": _gated(lambda x: 1 / (1 + torch.exp(-x))),
    "qgelu": _quick_gelu,
    "qgeglu": _gated(_quick_gelu),
    "relu": _relu,
    "reglu": _gated(_relu),
    "srelu": _squared_relu,
    "sreglu": _gated(_squared_relu),
    "silu": _silu,
    "swiglu": _gated(_silu),
    "clamped_swiglu": clamped_swiglu,
}


def _norm(module: Any, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    gamma = params["layer_norm_weight"] + (1 if module.zero_centered_gamma else 0)
    if module.normalization == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * gamma
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + module.eps).sqrt() * gamma + params["layer_norm_bias"]


def plain_forward(module: Any, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The output of ``module`` with ``params`` in its parameters' place."""

    def linear(x: Tensor, prefix: str = "") -> Tensor:
        bias = params.get(f"{prefix}bias")
        return x @ params[f"{prefix}weight"].t() + (0 if bias is None else bias)

    if isinstance(module, Linear):
        return linear(x)
    if isinstance(module, Experts):
        rows = x.flatten(0, -2)
        parts = rows.split(shares(len(rows)))
        y = torch.cat([part @ _of(params, "weight", e).t() + _of(params, "bias", e) for e, part in enumerate(parts)])
        return y.unflatten(0, x.shape[:-1])
    if isinstance(module, ExpertMLP):
        rows = x.flatten(0, -2)
        parts = zip(rows.split(shares(len(rows))), probabilities(len(rows)).split(shares(len(rows))), strict=True)
        outputs = []
        for e, (part, probs) in enumerate(parts):
            h = part @ _of(params, "fc1_weight", e).t() + _of(params, "fc1_bias", e)
            activated = PLAIN_ACTIVATIONS[module.activation](h) * probs[:, None].to(h.dtype)
            outputs.append(activated @ _of(params, "fc2_weight", e).t() + _of(params, "fc2_bias", e))
        return torch.cat(outputs).unflatten(0, x.shape[:-1])
    x = _norm(module, params, x)
    if isinstance(module, LayerNormLinear):
        return linear(x)
    return linear(PLAIN_ACTIVATIONS[module.activation](linear(x, "fc1_")), "fc2_")


def _of(params: Mapping[str, Tensor], name: str, expert: int) -> Tensor:
    return params[name][expert] if name in params else params[f"{name}{expert}"]


def exact(
    module: nn.Module, batches: list[Tensor], loss: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Outputs, input gradients and summed parameter gradients in fp64. Frozen parameters have none."""
    params = {name: p.detach().double().requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    inputs = [batch.detach().double().requires_grad_() for batch in batches]
    outputs = [plain_forward(module, params, x) for x in inputs]
    for output in outputs:
        loss(output).backward()
    grads = {name: p.grad for name, p in params.items() if p.requires_grad}
    return [output.detach() for output in outputs], [x.grad for x in inputs], grads


def error(actual: Tensor, expected: Tensor) -> float:
    """Relative, in the Frobenius norm; what should be zero must be."""
    difference = (actual.double() - expected).norm()
    return (difference / expected.norm()).item() if difference != 0 else 0.0
