"""What the library's modules promise to compute, in plain PyTorch, with their parameters' names."""

import torch
import torch.nn.functional as F
from torch import nn


class PlainLayerNormLinear(nn.Module):
    def __init__(self, in_features, out_features, bias=True, normalization="LayerNorm"):
        super().__init__()
        self.normalization = normalization
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
        self.layer_norm_bias = nn.Parameter(torch.zeros(in_features)) if normalization == "LayerNorm" else None
        self.weight = nn.Parameter(torch.zeros(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x):
        return F.linear(normalized(self, x), self.weight, self.bias)


class PlainLayerNormMLP(nn.Module):
    def __init__(self, features, hidden, bias=True, normalization="LayerNorm", activation="gelu"):
        super().__init__()
        self.normalization, self.activation = normalization, activation
        self.layer_norm_weight = nn.Parameter(torch.ones(features))
        self.layer_norm_bias = nn.Parameter(torch.zeros(features)) if normalization == "LayerNorm" else None
        self.fc1_weight = nn.Parameter(torch.zeros(hidden * (2 if activation == "swiglu" else 1), features))
        self.fc1_bias = nn.Parameter(torch.zeros(len(self.fc1_weight))) if bias else None
        self.fc2_weight = nn.Parameter(torch.zeros(features, hidden))
        self.fc2_bias = nn.Parameter(torch.zeros(features)) if bias else None

    def forward(self, x):
        y = F.linear(normalized(self, x), self.fc1_weight, self.fc1_bias)
        if self.activation == "swiglu":
            gate, y = y.chunk(2, dim=-1)
            y = F.silu(gate) * y
        else:
            y = F.gelu(y, approximate="tanh")
        return F.linear(y, self.fc2_weight, self.fc2_bias)


def normalized(module, x):
    shape = (x.shape[-1],)
    if module.normalization == "RMSNorm":
        return F.rms_norm(x, shape, module.layer_norm_weight, 1e-5)
    return F.layer_norm(x, shape, module.layer_norm_weight, module.layer_norm_bias, 1e-5)


class PlainGroupedLinear(nn.Module):
    def __init__(self, num_experts, in_features, out_features, bias=True, single_grouped_weight=False):
        super().__init__()
        self.num_experts, self.has_bias, self.packed = num_experts, bias, single_grouped_weight
        add_experts(self, "", num_experts, out_features, in_features, bias, single_grouped_weight)

    def forward(self, x, m_splits):
        return product_of_experts(self, "", x, m_splits)


class PlainGroupedMLP(nn.Module):
    def __init__(self, num_experts, features, hidden, bias=True, single_grouped_weight=False):
        super().__init__()
        self.num_experts, self.has_bias, self.packed = num_experts, bias, single_grouped_weight
        add_experts(self, "fc1_", num_experts, 2 * hidden, features, bias, single_grouped_weight)
        add_experts(self, "fc2_", num_experts, features, hidden, bias, single_grouped_weight)

    def forward(self, x, m_splits):
        gate, y = product_of_experts(self, "fc1_", x, m_splits).chunk(2, dim=-1)
        return product_of_experts(self, "fc2_", F.silu(gate) * y, m_splits)


def add_experts(module, prefix, num_experts, out_features, in_features, bias, packed):
    for expert in range(1 if packed else num_experts):
        shape = (num_experts, out_features, in_features) if packed else (out_features, in_features)
        module.register_parameter(f"{prefix}weight{'' if packed else expert}", nn.Parameter(torch.zeros(shape)))
    for expert in range(num_experts if bias else 0):
        module.register_parameter(f"{prefix}bias{expert}", nn.Parameter(torch.zeros(out_features)))


def product_of_experts(module, prefix, x, m_splits):
    rows = x.split([*m_splits.tolist(), len(x) - int(m_splits.sum())])
    products = []
    for expert in range(module.num_experts):
        packed = getattr(module, f"{prefix}weight", None)
        weight = getattr(module, f"{prefix}weight{expert}") if packed is None else packed[expert]
        bias = getattr(module, f"{prefix}bias{expert}") if module.has_bias else None
        products.append(F.linear(rows[expert], weight, bias))
    products.append(products[0].new_zeros(len(rows[-1]), products[0].shape[-1]))  # of no expert
    return torch.cat(products)
