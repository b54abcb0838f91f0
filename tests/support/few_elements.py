"""A model with few elements: where ranks share them, some ranks have none of a parameter, or padding alone."""

import torch
from torch import Tensor, nn


class FewElements(nn.Module):
    """Matrices, biases, a scalar, and a parameter that has no element at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 3)
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()) * self.scale
