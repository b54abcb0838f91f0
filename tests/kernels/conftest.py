"""Kernels in Triton's interpreter stay within their tensors in every test."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from interpreted import addresses_are_checked


@pytest.fixture(autouse=True)
def kernels_stay_within_their_tensors() -> Iterator[None]:
    if torch.cuda.is_available() or not importlib.util.find_spec("triton"):
        yield
        return
    with addresses_are_checked():
        yield
