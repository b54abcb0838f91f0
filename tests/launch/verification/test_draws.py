"""Random draws replaced by their means, and the modules that draw."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maingrad.launch.verification.draws import DrawnMeans, modules_that_draw, random_state

X = torch.arange(6.0).view(2, 3)


@pytest.mark.sampled(17)
@pytest.mark.parametrize(
    ("draw", "mean"),
    [
        (lambda: F.dropout(X, 0.3), X),
        (lambda: F.dropout(X), X),
        (lambda: F.alpha_dropout(X, 0.0), X),
        (lambda: torch.bernoulli(torch.full((2,), 0.25)), torch.full((2,), 0.25)),
        (lambda: torch.empty(2).bernoulli_(torch.tensor([0.25, 1.0])), torch.tensor([0.25, 1.0])),
        (lambda: torch.empty(2, dtype=torch.bool).bernoulli_(0.75), torch.tensor([True, True])),
        (lambda: torch.rand(2), torch.full((2,), 0.5)),
        (lambda: torch.rand_like(X), torch.full((2, 3), 0.5)),
        (lambda: torch.empty(2).uniform_(1, 4), torch.full((2,), 2.5)),
        (lambda: torch.randn(3), torch.zeros(3)),
        (lambda: torch.randn_like(X), torch.zeros(2, 3)),
        (lambda: torch.empty(2).normal_(3, 1), torch.full((2,), 3.0)),
        (lambda: torch.normal(X, 2.0), X),
        (lambda: torch.empty(2).exponential_(4), torch.full((2,), 0.25)),
        (lambda: torch.randint(10, (2,)), torch.full((2,), 5)),
        (lambda: torch.randint(4, 10, (2,)), torch.full((2,), 7)),
        (lambda: torch.randperm(4), torch.arange(4)),
    ],
)
def test_means(draw, mean: Tensor) -> None:
    with DrawnMeans():
        assert torch.allclose(draw(), mean)


def test_the_inner_module_that_draws_is_named() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steady, self.drop, self.python = nn.Linear(3, 3), nn.Dropout(), PythonDraw()

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.steady(x)) + self.python(x)

    class PythonDraw(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * random.random() * np.random.rand()

    model = Noisy()
    assert modules_that_draw(model, lambda: model(X)) == ["drop", "python"]
    assert modules_that_draw(model, lambda: model.steady(X)) == []
    assert modules_that_draw(model, lambda: torch.rand(1)) == [""]
    assert not model._forward_hooks and not model.drop._forward_pre_hooks


def test_every_default_generator_is_looked_at() -> None:
    for draw in (lambda: torch.rand(1), random.random, np.random.rand):
        before = random_state()
        assert random_state() == before
        draw()
        assert random_state() != before
