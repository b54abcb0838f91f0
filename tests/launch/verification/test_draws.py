"""Random draws replaced by their means, and the generators that are looked at."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from maingrad.launch.verification.draws import DrawnMeans, random_state
from maingrad.launch.verification.program import set_seed

X = torch.arange(6.0).view(2, 3)


@pytest.mark.sampled(25)
@pytest.mark.parametrize(
    ("draw", "mean"),
    [
        (lambda: F.dropout(X, 0.3), X),
        (lambda: F.dropout(X), X),
        (lambda: F.alpha_dropout(X, 0.0), X),
        (lambda: torch.bernoulli(torch.full((2,), 0.25)), torch.full((2,), 0.25)),
        (lambda: torch.empty(2).bernoulli_(torch.tensor([0.25, 1.0])), torch.tensor([0.25, 1.0])),
        (lambda: torch.empty(2, dtype=torch.bool).bernoulli_(0.75), torch.tensor([True, True])),
        (lambda: torch.empty(2, dtype=torch.bool).bernoulli_(0.25), torch.tensor([False, False])),
        (lambda: torch.empty(2, dtype=torch.bool).bernoulli_(0.5), torch.tensor([True, True])),
        (lambda: torch.zeros(2, dtype=torch.int64).bernoulli_(0.5), torch.tensor([1, 1])),
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
        (lambda: torch.randint(low=4, high=10, size=(2,)), torch.full((2,), 7)),
        (lambda: torch.empty(2).uniform_(**{"from": 1, "to": 4}), torch.full((2,), 2.5)),
        (lambda: torch.empty(2).normal_(std=1, mean=3), torch.full((2,), 3.0)),
        (lambda: torch.empty(2).bernoulli_(p=0.25), torch.full((2,), 0.25)),
        (lambda: torch.randperm(n=4), torch.arange(4)),
        (lambda: torch.randperm(4), torch.arange(4)),
        (lambda: torch.rand(2, dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)),
        (lambda: torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)),
    ],
)
def test_means(draw, mean: Tensor) -> None:
    with DrawnMeans():
        assert torch.allclose(draw(), mean)


def test_every_default_generator_is_seeded() -> None:
    """numpy's takes 32 bits."""
    drawn = []
    for seed in (3, 4, 2**32 + 3, 3):
        set_seed(seed)
        drawn.append((torch.rand(1).item(), random.random(), np.random.rand()))
    assert drawn[0] == drawn[3] and drawn[0][2] == drawn[2][2]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))
    assert drawn[0][:2] != drawn[2][:2]


def test_every_default_generator_is_looked_at() -> None:
    for draw in (lambda: torch.rand(1), random.random, np.random.rand):
        before = random_state()
        assert random_state() == before
        draw()
        assert random_state() != before
