"""Graphed callables train bit for bit as the layers do eagerly, in every order, under every provider of gradients."""

from dataclasses import replace

import pytest
import torch
from graphed import KINDS, ORDERS, Case, train

from maingrad.launch import simulate

WAYS = ("alone", "ddp", "zero1")


def assert_alike(case: Case, ranks: int) -> None:
    if ranks == 1:
        results = [(train(case, graphed=False), train(case, graphed=True))]
    else:
        results = list(zip(*(simulate(train, ranks, case, graphed) for graphed in (False, True)), strict=True))
    for eager, graphed in results:
        assert len(eager) == len(graphed)
        assert all(map(torch.equal, eager, graphed))
        assert all(torch.isfinite(tensor).all() for tensor in eager)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("delayed", [True, False], ids=["delayed", "now"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(12)
def test_an_order_trains_as_it_does_eagerly(kind, order, way, delayed, fused):
    if fused and way == "alone":
        way = "ddp"
    case = Case(kind, order, fused, delayed, way)
    assert_alike(case, 1 if way == "alone" else 2)


def test_each_way_differs_from_no_training():
    case = Case()
    assert not all(map(torch.equal, train(case, graphed=True)[-2:], train(replace(case, steps=0), graphed=True)[-2:]))
