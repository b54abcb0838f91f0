"""Which tensors the Triton kernels serve, and the warning where Triton is missing."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maingrad.kernels import compat


def like(device: str, dtype: torch.dtype) -> Any:
    """A stand-in for a tensor, with the attributes that the rule reads; needs no GPU."""
    return SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "HAS_TRITON", False)
    compat._warn_without_triton.cache_clear()


def test_kernels_serve_cuda_and_no_fp64() -> None:
    assert compat.runs_on_triton("op", like("cuda", torch.bfloat16)) == compat.HAS_TRITON
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compat.runs_on_triton("op", like("cpu", torch.bfloat16))
        assert not compat.runs_on_triton("op", like("cuda", torch.float64))


@pytest.mark.usefixtures("without_triton")
def test_a_missing_triton_is_said_once_for_each_operation() -> None:
    with pytest.warns(RuntimeWarning, match="grouped_dgrad runs as plain PyTorch.*pip install triton"):
        assert not compat.runs_on_triton("grouped_dgrad", like("cuda", torch.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compat.runs_on_triton("grouped_dgrad", like("cuda", torch.float16))
        # Tensors on a CPU and in fp64 never use Triton: no warning.
        assert not compat.runs_on_triton("grouped_linear", like("cpu", torch.float32))
        assert not compat.runs_on_triton("grouped_linear", like("cuda", torch.float64))
    with pytest.warns(RuntimeWarning, match="grouped_linear runs"):
        compat.runs_on_triton("grouped_linear", like("cuda", torch.bfloat16))


@pytest.mark.gpu(count=2)
def test_a_launch_goes_to_the_tensors_own_device() -> None:
    tensor = torch.ones(4, device="cuda:1")
    with compat.device_of(tensor):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0


def test_a_cpu_tensor_needs_no_device() -> None:
    with compat.device_of(torch.ones(1)):
        pass
